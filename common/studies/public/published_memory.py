"""Memory of published jobs: types, kernels and losses that their sources train with.

A source's facts are not in its table: llm-foundry's fused cross-entropy (flash-attn), BERT's
written-out attention in NVIDIA/DeepLearningExamples, FSDP's casts of all units to 16 bits.
torchtitan compiled its loss where the model is compiled, but for December 2024 (commit e8977b0
turned it off); it publishes what its allocator has reserved.
"""

from __future__ import annotations

import re

from common.perfmodel.architectures.activations import Numerics
from common.perfmodel.cluster.job import Job
from common.perfmodel.one_device.memory_fit import largest_micro_batch, reserved_bytes
from common.perfmodel.one_device.peaks import known_peak
from common.perfmodel.one_device.sharding import sharding_on
from common.perfmodel.one_device.training_memory import LIBRARIES_BYTES, predict_training_memory
from common.studies.public.hardware import PEAK_NAMES
from common.studies.public.jobs import PublishedJob

FUSED_LOSS = ("mosaicml/llm-foundry",)
WRITTEN_ATTENTION = ("NVIDIA/DeepLearningExamples", "lambdal/deeplearning-benchmark")
PUBLISHES_RESERVED = ("pytorch/torchtitan",)
LOSS_COMPILED_SINCE = 202504
"""Month since which torchtitan's compiled jobs compile the loss (commit bbb1b61)."""


def memory_of(job: PublishedJob, work: Job, strategy: str) -> dict[str, float | None]:
    """Predicts the memory of a published job, by the names of a ``Forecast``.

    Raises UserError where the activations of its model are not known.
    """
    sharding = sharding_on(strategy, job.gpus, job.gpus_per_node or job.gpus)
    predicted = predict_training_memory(work.passes, sharding)
    peak = predicted.peak_bytes
    if job.source_repo in PUBLISHES_RESERVED:
        peak = reserved_bytes(work.passes, predicted)
    gpu = known_peak(PEAK_NAMES.get(job.gpu, job.gpu))
    if gpu is None or gpu.memory_bytes is None:
        return {"memory_bytes": peak}
    capacity = gpu.memory_bytes - LIBRARIES_BYTES
    return {
        "memory_bytes": peak,
        "fits": predicted.peak_bytes <= capacity,
        "largest_micro_batch": largest_micro_batch(work.passes, capacity, sharding),
    }


def numerics_of(job: PublishedJob, precision: str, strategy: str) -> Numerics:
    """Returns the types and kernels that a source trains with, in this precision of a ``Job``."""
    fused_loss = job.source_repo in FUSED_LOSS
    if job.source_repo in PUBLISHES_RESERVED and job.compile == "yes":
        month = re.search(r"_(20\d\d)-?(\d\d)\b|_(20\d\d)(\d\d)_", job.source_path)
        digits = int("".join(part for part in month.groups() if part)) if month else 0
        fused_loss = digits >= LOSS_COMPILED_SINCE
    in_half = strategy not in ("DDP", "ZERO1") or job.source_repo in WRITTEN_ATTENTION
    casts = "half" if in_half else "autocast"
    return Numerics(
        casts="float32" if precision == "float32" else casts,
        fused_attention=job.source_repo not in WRITTEN_ATTENTION,
        fused_loss=fused_loss,
    )
