"""The time of a layer's passes on a GPU, from what it computes and what it keeps.

Matrix products, attention and convolutions run at a share of the GPU's peak. All else is bound by
memory: norms, activation functions, casts and additions read and write the activations, so their
time goes with the bytes that a layer keeps for its backward pass. The figures were fitted to steps
on one H200 (``data/h200-1/study-models``, cases that are not held out), an A100's to published rows
(``data/RESULTS.md``, Other people's GPUs). Steps whose kernels are launched more slowly than they
run take longer.
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
OF_AN_A100 = {"16 bits": 0.77}
"""The same, where it is another of an A100, which power holds back less."""
CONVOLUTIONS = {"16 bits": (0.70, 27.0), "tf32": (0.74, 18.5), "float32": (1.75, 19.0)}
"""Kind of products → the share that convolutions reach, and how often the bytes that such a layer
keeps go through memory, by published rows with cuDNN's fastest kernels (``cudnn.benchmark``): those
of float32 need fewer operations than are counted (Winograd). An H200 took 1.3 to 2.4 times as long
for a ResNet-50 without that search."""
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
    shares = PRODUCT_SHARES | (OF_AN_A100 if "A100" in peak.device else {})
    return shares[_kind(job)]


def moves(job: Job) -> float:
    """Returns how often a kept byte goes through memory in both passes."""
    return FUSED_MOVES if job.compile else MOVES


def forward_s(job: Job, layer: Layer, peak: DevicePeak) -> float:
    """Returns the seconds of a sample in the forward pass of one layer."""
    share, moved = product_share(job, peak), moves(job)
    if any(len(tensor.shape) == 4 for tensor in layer.tensors):  # height and width of a kernel
        share, moved = CONVOLUTIONS[_kind(job)]
    flops_per_s = share * peak.flops(job.precision, job.tf32)
    flops = layer.forward_flops + (ATTENTION - 1) * layer.attention_flops
    kept_bytes = sum(in_parts(layer.activations.kept, job.passes.numerics).values())
    moved_bytes = FORWARD_SHARE * moved * kept_bytes
    return flops / flops_per_s + moved_bytes / peak.memory_bytes_per_s


def _kind(job: Job) -> str:
    if job.precision != "float32":
        return "16 bits"
    return "tf32" if job.tf32 else "float32"


def step_s(job: Job, peak: DevicePeak) -> float:
    """Returns the seconds of a step on one GPU: its micro-batches' passes, and AdamW."""
    passes_s = sum(
        layer.count * (3 + job.recomputed(layer)) * forward_s(job, layer, peak)
        for layer in job.architecture.layers
    )
    update_s = ADAMW_BYTES * job.architecture.num_parameters / peak.memory_bytes_per_s
    return job.accumulation * job.batch_size * passes_s + update_s
