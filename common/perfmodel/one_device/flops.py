"""Floating-point operations of training a GPT-2, per token, and their share of a device's peak.

The counts are those of exercise A0.2, which says where they come from. A kernel that skips the half
of attention that is masked reaches a higher MFU for it, as the whole is counted.
"""

from __future__ import annotations

from common.exercises import step_flops
from common.perfmodel.one_device.architecture import GPT2Config


def matrix_parameters(config: GPT2Config) -> int:
    """Counts N, the weights of matrix products; others are 0.1 % of gpt2's weights."""
    return step_flops.matrix_weights(config.n_layer, config.n_embd, config.vocab_size)


def forward_flops_per_token(config: GPT2Config, seq_len: int) -> int:
    """Counts the forward pass's operations for each of ``seq_len`` tokens: 2N and attention."""
    return step_flops.forward_flops(config.n_layer, config.n_embd, config.vocab_size, seq_len)


def training_flops_per_token(config: GPT2Config, seq_len: int) -> int:
    """Counts operations of both passes per token: 6N + 12 · layers · width · length.

    It counts what the model needs, whatever the implementation: neither the recomputation of
    activation checkpointing nor the rows of a padded vocabulary, so give the model's own sizes.
    """
    return step_flops.training_flops(config.n_layer, config.n_embd, config.vocab_size, seq_len)


def recomputed_flops_per_token(config: GPT2Config, seq_len: int) -> int:
    """Counts operations per token that checkpointing repeats: the blocks', but not the head's.

    With these on top a device's own utilisation (HFU) is higher than MFU. PyTorch stops a block's
    second pass when all it needs is there, which leaves out the block's last product.
    """
    last_product = config.n_layer * 4 * config.n_embd**2
    weights = config.n_layer * config.matrix_parameters_per_layer() - last_product
    return 2 * weights + step_flops.attention_flops(config.n_layer, config.n_embd, seq_len)


def mfu(tokens_per_s: float, config: GPT2Config, seq_len: int, peak_flops_per_s: float) -> float:
    """Computes model FLOPs utilisation: operations that training needs, over the peak's."""
    per_token = training_flops_per_token(config, seq_len)
    return step_flops.utilisation(tokens_per_s, per_token, peak_flops_per_s)
