"""Computes what the tab of clusters shows: any model's step on more and more GPUs, and its memory.

Both are the answers of ``ddplab predict --cluster`` and ``ddplab predict --model``.
"""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from dataclasses import dataclass, replace

import pandas as pd

from common.errors import UserError
from common.explore.buckets import COMMAND
from common.explore.chosen_model import ChosenModel
from common.explore.controls import Slider
from common.perfmodel.cluster.clusters import Cluster, load_cluster
from common.perfmodel.cluster.job import Job
from common.perfmodel.cluster.scale_out import predict_scale_out
from common.perfmodel.one_device.memory_fit import largest_micro_batch
from common.perfmodel.one_device.moments import STATE, MemoryPrediction
from common.perfmodel.one_device.sharding import sharding_on
from common.perfmodel.one_device.training_memory import LIBRARIES_BYTES, predict_training_memory

STEP_PARTS = {
    "computation": "computation_s",
    "waiting": "straggler_s",
    "copies": "copies_s",
    "slowed": "slowed_s",
    "exposed": "exposed_s",
}
"""Part of a step → its column."""
MEMORY_PARTS = (*STATE, "communication", "activations")
"""Uses of memory that are told apart; whatever is none of the others counts as activations."""


@dataclass(frozen=True)
class JobSettings:
    """Settings of the controls.

    Attributes:
        cluster: name of a cluster below data/clusters.
        strategy: DDP, or a way to shard.
        gpus: number of GPUs.
        batch_size: samples of a micro-batch.
        accumulation: micro-batches of a step.
        checkpointing: none, selective or block.
        precision: bfloat16, float16 or float32.
    """

    cluster: str
    strategy: str = "FULL_SHARD"
    gpus: int = 64
    batch_size: int = 1
    accumulation: int = 1
    checkpointing: str = "none"
    precision: str = "bfloat16"


@dataclass(frozen=True, eq=False)
class JobView:
    """Contents of the plots.

    Attributes:
        steps: a row per number of GPUs, with the columns of ``ScaleOut.table``.
        memory: the moments of a step on the chosen number; None where activations are not known.
        capacity_bytes: memory of a GPU without what libraries take.
        largest: most samples of a micro-batch that fit; None where that is not known.
    """

    steps: pd.DataFrame
    memory: MemoryPrediction | None
    capacity_bytes: float | None
    largest: int | None

    def on(self, gpus: int) -> pd.Series:
        """Returns the row of a number of GPUs."""
        return self.steps[self.steps["gpus"] == gpus].iloc[0]

    @property
    def fits(self) -> bool | None:
        """Returns whether the peak fits; None where that is not known."""
        if self.memory is None or self.capacity_bytes is None:
            return None
        return self.memory.peak_bytes <= self.capacity_bytes


def numbers_of_gpus(cluster: Cluster) -> list[int]:
    """Returns powers of two up to a whole node, and the whole nodes of such numbers of nodes."""
    node, most = cluster.gpus_per_node, cluster.gpus_per_node * cluster.max_nodes
    within = [2**power for power in range(node.bit_length()) if 2**power < node]
    return within + [node << power for power in range(most.bit_length()) if node << power <= most]


def offer_gpus(slider: Slider[int], cluster: str, least: int = 1) -> None:
    """Offers as many GPUs as a cluster has, ``least`` or more, and no more chosen than before."""
    numbers = [n for n in numbers_of_gpus(load_cluster(cluster)) if n >= least]
    slider.offer(numbers, max(n for n in numbers if n <= max(slider.value, numbers[0])))


def job_of(model: ChosenModel, settings: JobSettings) -> Job:
    """Returns the work of a GPU."""
    return Job(
        architecture=model.architecture,
        batch_size=settings.batch_size,
        precision=settings.precision,
        checkpointing=settings.checkpointing,
        accumulation=settings.accumulation,
    )


def view_job(model: ChosenModel, settings: JobSettings, before: JobView | None = None) -> JobView:
    """Computes everything that the tab shows.

    Args:
        model: the model.
        settings: settings of the controls.
        before: view of the same settings but for the number of GPUs, whose steps are those of all.

    Raises UserError for a precision that the GPU has no peak of.
    """
    job, cluster = job_of(model, settings), load_cluster(settings.cluster)
    if before is None:
        predicted = predict_scale_out(
            job=job,
            cluster=cluster,
            gpus=numbers_of_gpus(cluster),
            global_batch_size=1,  # no strong scaling
            strategies=[settings.strategy],
        )
        memory = predicted.peak.memory_bytes
        capacity = memory - LIBRARIES_BYTES if memory else None
        before = JobView(predicted.rows("weak", settings.strategy), None, capacity, None)
    sharding = sharding_on(settings.strategy, settings.gpus, cluster.gpus_per_node)
    try:
        memory = predict_training_memory(job.passes, sharding)
    except UserError:
        return replace(before, memory=None, largest=None)
    largest = None
    if before.capacity_bytes is not None:
        largest = largest_micro_batch(job.passes, before.capacity_bytes, sharding)
    return replace(before, memory=memory, largest=largest)


def memory_part(components: Mapping[str, int], part: str) -> int:
    """Returns the bytes of one of ``MEMORY_PARTS`` at a moment."""
    if part != MEMORY_PARTS[-1]:
        return components.get(part, 0)
    return sum(size for name, size in components.items() if name not in MEMORY_PARTS[:-1])


def job_line(model: ChosenModel, settings: JobSettings) -> str:
    """Returns the ``ddplab predict`` that answers the same."""
    flags = {
        "--cluster": settings.cluster,
        "--gpus": settings.gpus,
        "--strategies": settings.strategy,
        "--batch-size": settings.batch_size,
        "--accumulation": settings.accumulation,
        "--checkpointing": settings.checkpointing,
        "--precision": settings.precision,
    }
    words = [str(word) for pair in flags.items() for word in pair]
    return shlex.join([*COMMAND, *model.flags, *words])
