"""The time of a layer's passes on a GPU, from what it computes and what it keeps.

Matrix products, attention and convolutions run at a share of the GPU's peak. All else is bound by
memory: norms, activation functions, casts and additions read and write the activations, so their
time goes with the bytes that a layer keeps for its backward pass. Shares are from an H200's steps
that are not held out (``data/h200-1/study-models``), those of A100s and convolutions from published
rows (``data/RESULTS.md``, Other people's GPUs); MOVES lies between the two. Steps whose kernels are
launched more slowly than they run take longer.
"""

from __future__ import annotations

from common.perfmodel.architectures.activations import in_parts
from common.perfmodel.architectures.architecture import Layer
from common.perfmodel.cluster.job import Job
from common.perfmodel.one_device.peaks import DevicePeak

ADAMW_BYTES = 28
"""Bytes that AdamW moves per parameter: weight, gradient and both moments are read, all but the
gradient written, float32 each."""

PRODUCT_SHARES = {"16 bits": 0.70, "tf32": 0.42, "float32": 0.71}
"""Kind of products → share of its peak that they reach."""
A100_PRODUCT_SHARES = {"16 bits": 0.77}
"""Shares that A100s reach, which their power limit holds back less."""
CONVOLUTIONS = {"16 bits": (0.70, 27.0), "tf32": (0.74, 18.5), "float32": (1.75, 19.0)}
"""Kind of products → share of the peak that convolutions reach, and how often a byte that such a
layer keeps goes through memory. Both are from published rows, whose scripts let cuDNN search for
its fastest kernels (``cudnn.benchmark``): a ResNet-50 without that search took 1.2 to 2.2 times as
long on an H200. Those of float32 need fewer operations than are counted (Winograd)."""
ATTENTION = 1.5
"""Time of an operation of attention, counted whole, over one of another product."""
MOVES, FUSED_MOVES = 17.1, 7.3
"""Times that a kept byte goes through memory in both passes: operator by operator, and where a
compiler joins operators. The H200's steps alone give 15.7 and 7.0, published ones of BERT 15 to
19."""
FORWARD_SHARE = 1 / 3
"""Share of both passes that the forward pass takes: the backward pass takes twice as long."""


def product_share(job: Job, peak: DevicePeak) -> float:
    """Returns the share of a GPU's peak that a job's matrix products reach."""
    shares = PRODUCT_SHARES | (A100_PRODUCT_SHARES if "A100" in peak.device else {})
    return shares[_kind(job, peak)]


def moves(job: Job) -> float:
    """Returns how often a kept byte goes through memory in both passes."""
    return FUSED_MOVES if job.compile else MOVES


def is_convolution(layer: Layer) -> bool:
    """Returns True where a weight has the height and width of a kernel."""
    return any(len(tensor.shape) == 4 for tensor in (*layer.tensors, *layer.frozen))


def convolutions(job: Job, peak: DevicePeak) -> tuple[float, float]:
    """Returns, of layers with convolutions, the share of the peak and how often bytes move."""
    return CONVOLUTIONS[_kind(job, peak)]


def forward_s(job: Job, layer: Layer, peak: DevicePeak) -> float:
    """Returns the seconds of a sample in the forward pass of one layer."""
    return sum(_forward_parts_s(job, layer, peak))


def backward_s(job: Job, layer: Layer, peak: DevicePeak) -> float:
    """Returns the seconds of a sample in the backward pass of one layer, which repeats nothing.

    Bytes move twice as often as in the forward pass, whichever gradients are made.
    """
    products_s, moves_s = _forward_parts_s(job, layer, peak)
    return layer.backward_ratio * products_s + 2 * moves_s * layer.has_backward


def _forward_parts_s(job: Job, layer: Layer, peak: DevicePeak) -> tuple[float, float]:
    """Returns the seconds of a forward pass's products, and those of the bytes that it moves."""
    share, moved = product_share(job, peak), moves(job)
    if is_convolution(layer):
        share, moved = convolutions(job, peak)
    flops_per_s = share * peak.flops(job.precision, job.tf32)
    flops = layer.forward_flops + (ATTENTION - 1) * layer.attention_flops
    kept = layer.activations.moved or layer.activations.kept
    moved_bytes = FORWARD_SHARE * moved * sum(in_parts(kept, job.usual_types).values())
    return flops / flops_per_s, moved_bytes / peak.memory_bytes_per_s


def adamw_s(parameters: float, memory_bytes_per_s: float) -> float:
    """Returns the seconds of AdamW's update of these parameters."""
    return ADAMW_BYTES * parameters / memory_bytes_per_s


def _kind(job: Job, peak: DevicePeak) -> str:
    if job.precision != "float32":
        return "16 bits"
    return "tf32" if job.tf32 and "tf32" in peak.flops_per_s else "float32"


def step_s(job: Job, peak: DevicePeak) -> float:
    """Returns the seconds of a step on one GPU: its micro-batches' passes, and AdamW."""
    passes_s = sum(
        layer.count
        * ((1 + job.recomputed(layer)) * forward_s(job, layer, peak) + backward_s(job, layer, peak))
        for layer in job.architecture.layers
    )
    update_s = adamw_s(job.architecture.num_trained, peak.memory_bytes_per_s)
    return job.accumulation * job.batch_size * passes_s + update_s
