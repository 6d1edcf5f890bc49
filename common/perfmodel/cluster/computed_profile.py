"""The model of a GPT-2 on GPUs that nobody has timed: its FLOPs at a stated rate.

The backward pass takes twice the forward pass's operations. Blocks have their four matrix products
and attention, the head its one; norms and look-ups take none. Where gradients lie in that line of
work, and how a block's time is shared out over its tensors, is ``layer_tables``' affair.
"""

from __future__ import annotations

from dataclasses import replace

from common.perfmodel.calibration import calibrated_model
from common.perfmodel.cluster.assumptions import OVERLAP_SLOWDOWN
from common.perfmodel.collectives import AllReduceModel
from common.perfmodel.ddp.profile import BackwardProfile, DdpCosts
from common.perfmodel.layer_tables import LayerTables, profile_from_layers
from common.perfmodel.model import DdpModel
from common.perfmodel.one_device.architecture import GPT2Config
from common.perfmodel.one_device.flops import forward_flops_per_token


def forward_parts_s(
    config: GPT2Config, seq_len: int, tokens: float, flops_per_s: float
) -> tuple[float, float]:
    """Computes the forward pass's seconds of (one block, the head) for ``tokens`` tokens."""
    head = 2 * config.vocab_size * config.n_embd
    block = (forward_flops_per_token(config, seq_len) - head) / config.n_layer
    return block * tokens / flops_per_s, head * tokens / flops_per_s


def computed_profile(
    config: GPT2Config, seq_len: int, tokens: float, flops_per_s: float
) -> BackwardProfile:
    """Computes the ready times of a GPT-2's gradients (float32) from FLOPs alone.

    Args:
        config: the model's sizes.
        seq_len: tokens of a sequence.
        tokens: tokens of one backward pass.
        flops_per_s: the rate that the GPU reaches; a peak times an MFU.
    """
    block_s, head_s = forward_parts_s(config, seq_len, tokens, flops_per_s)
    parameters = config.parameters_per_layer()
    layers = [(f"block {i}", parameters, 2 * block_s) for i in range(config.n_layer)]
    tables = LayerTables(
        layers=(*layers, ("ln_f", 2 * config.n_embd, 0.0)),
        embedding_parameters=config.vocab_size * config.n_embd,
        position_parameters=config.n_positions * config.n_embd,
        lm_head_s=2 * head_s,
        embedding_s=0.0,
        forward_s=config.n_layer * block_s + head_s,
        step_s=None,
        notes=(),
        source="FLOPs",
    )
    profile = profile_from_layers(tables)
    assumptions = (
        "all matrix products run at one rate, and nothing else takes time",
        *profile.assumptions[:2],
    )
    return replace(profile, assumptions=assumptions)


def computed_model(
    profile: BackwardProfile, network: AllReduceModel, memory_bytes_per_s: float
) -> DdpModel:
    """Returns the model of DDP on GPUs that copy at their memory's bandwidth.

    Computation beside all-reduces is slowed as is assumed for a cluster.
    """
    copy = 2 / memory_bytes_per_s  # a copied byte is read and written
    costs = DdpCosts(
        copy_in_s_per_byte=copy,
        copy_out_s_per_byte=copy,
        compute_slowdown=OVERLAP_SLOWDOWN.value,
    )
    return calibrated_model(profile, network, costs)
