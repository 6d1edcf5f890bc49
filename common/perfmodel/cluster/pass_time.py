"""The time of a layer's passes on a GPU, from what it computes and what it keeps.

Matrix products, attention and convolutions run at a share of the GPU's peak. All else is bound by
memory: norms, activation functions, casts and additions read and write the activations, so their
time goes with the bytes that a layer keeps for its backward pass. The shares were fitted to the
steps of 12 models on one H200 (``data/h200-1/study-models``, cases that are not held out) and, of
GPUs of other makes, to published rows (``data/RESULTS.md``, Other people's GPUs). Steps whose
kernels are launched more slowly than they run take longer.
"""

from __future__ import annotations

from common.perfmodel.architectures.activations import in_parts
from common.perfmodel.architectures.architecture import Layer
from common.perfmodel.cluster.job import Job
from common.perfmodel.one_device.peaks import DevicePeak

PRODUCT_SHARES = {"16 bits": 0.70, "tf32": 0.41, "float32": 0.68}
"""Kind of products → share of its peak that they reach."""
MOVES, FUSED_MOVES = 17.7, 8.2
"""Times that a kept byte goes through memory in both passes: operator by operator, and where a
compiler joins operators."""
FORWARD_SHARE = 1 / 3
"""Share of both passes that the forward pass takes: the backward pass takes twice as long."""


def kind_of_products(job: Job) -> str:
    """Returns the key of ``PRODUCT_SHARES`` for a job."""
    if job.precision != "float32":
        return "16 bits"
    return "tf32" if job.tf32 else "float32"


def kept_bytes(job: Job, layer: Layer) -> float:
    """Returns the bytes that one layer keeps of a sample where nothing is computed again."""
    return sum(in_parts(layer.activations.kept, job.numerics).values())


def forward_s(job: Job, layer: Layer, peak: DevicePeak) -> float:
    """Returns the seconds of a sample in the forward pass of one layer."""
    flops_per_s = PRODUCT_SHARES[kind_of_products(job)] * peak.flops(job.precision, job.tf32)
    moves = FORWARD_SHARE * (FUSED_MOVES if job.compile else MOVES)
    return (
        layer.forward_flops / flops_per_s + moves * kept_bytes(job, layer) / peak.memory_bytes_per_s
    )
