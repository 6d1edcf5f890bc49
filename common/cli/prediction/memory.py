"""``ddplab predict --model`` without a cluster: the memory of a training step, part by part."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from common.cli.printed import print_lines, print_notes
from common.errors import UserError
from common.runtime.wording import digits

if TYPE_CHECKING:
    from rich.console import Console

    from common.perfmodel.cluster.job import Job
    from common.perfmodel.one_device.moments import MemoryPrediction
    from common.perfmodel.one_device.sharding import Sharding

GB = 10**9
CARDS_GIB = (24, 40, 80, 141)
"""Memories of usual cards. Data sheets call GiB of memory GB."""
GPUS_PER_NODE = 8
"""GPUs that share a copy under HYBRID_SHARD where no cluster says how many a node has."""


def print_memory(
    job: Job,
    gpus: Sequence[int],
    strategies: Sequence[str],
    capacities_gb: Sequence[float],
    console: Console,
) -> None:
    """Prints the peak of a step by part, its moments, and the largest micro-batches.

    Args:
        job: the work of a GPU.
        gpus: numbers of GPUs, each with every strategy; 1 is a single GPU without one.
        strategies: strategies of ``Sharding``.
        capacities_gb: memories whose largest micro-batch is printed, in 10⁹ bytes; those of
            ``CARDS_GIB`` without any.
        console: where to print.

    Raises UserError for capacities that are not positive, and as ``predict_training_memory``.
    """
    from common.perfmodel.one_device.sharding import sharding_on
    from common.perfmodel.one_device.training_memory import predict_training_memory

    for capacity in capacities_gb:
        if not 0 < capacity < math.inf:
            raise UserError(f"--capacity-gb {capacity:g}: above 0 and finite")
    cases: dict[str, Sharding] = {}
    for number in gpus:
        for strategy in strategies if number > 1 else ("",):
            name = f"{strategy} on {number:,}" if strategy else "one GPU"
            cases[name] = sharding_on(strategy, number, GPUS_PER_NODE)
    predicted = {name: predict_training_memory(job.passes, case) for name, case in cases.items()}
    about = (
        f"{job.architecture.name}: memory of a training step a GPU, predicted, not measured. "
        f"Micro-batch of {job.micro_batch_words}, {job.precision}, checkpointing "
        f"{job.checkpointing}; GB are 10⁹ bytes"
    )
    print_lines(console, [about])
    _print_parts(predicted, console)
    cards = {f"card of {gib} GiB": gib * 2**30 for gib in CARDS_GIB}
    capacities = {f"{capacity:g} GB": capacity * GB for capacity in capacities_gb} or cards
    _print_largest(job, cases, capacities, console)
    print_notes(console, _notes(job, predicted))


def _print_parts(predicted: dict[str, MemoryPrediction], console: Console) -> None:
    from rich import box
    from rich.table import Table

    from common.perfmodel.one_device.moments import COMPONENTS

    table = Table(title="At the peak (GB)", title_justify="left", box=box.SIMPLE_HEAD)
    table.add_column("part")
    for name in predicted:
        table.add_column(name, justify="right", no_wrap=True)
    peaks = [prediction.peak for prediction in predicted.values()]
    for part in COMPONENTS:
        sizes = [peak.components.get(part, 0) for peak in peaks]
        if any(sizes):
            table.add_row(part, *(f"{size / GB:.3f}" for size in sizes))
    table.add_section()
    table.add_row("peak", *(f"{peak.total_bytes / GB:.3f}" for peak in peaks))
    table.add_row("reached in", *(peak.name for peak in peaks))
    console.print(table)


def _print_largest(
    job: Job, cases: dict[str, Sharding], capacities: Mapping[str, float], console: Console
) -> None:
    from rich import box
    from rich.table import Table

    from common.perfmodel.one_device.memory_fit import largest_micro_batch
    from common.perfmodel.one_device.training_memory import LIBRARIES_BYTES

    title = "Largest micro-batch (samples)"
    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD)
    table.add_column("memory", justify="right")
    for name in cases:
        table.add_column(name, justify="right", no_wrap=True)
    for name, capacity in capacities.items():
        usable = capacity - LIBRARIES_BYTES
        most = [largest_micro_batch(job.passes, usable, sharding) for sharding in cases.values()]
        table.add_row(name, *(f"{samples:,}" if samples else "-" for samples in most))
    console.print(table)


def _notes(job: Job, predicted: dict[str, MemoryPrediction]) -> list[str]:
    from common.perfmodel.one_device.memory_fit import reserved_bytes
    from common.perfmodel.one_device.training_memory import LIBRARIES_BYTES

    name, first = next(iter(predicted.items()))
    reserved = reserved_bytes(job.passes, first)
    casts = "float32" if job.precision == "float32" else "autocast beside float32 weights"
    return [
        f"{name}: CUDA's allocator may hold about {digits(reserved / GB)} GB of the driver for "
        f"{digits(first.peak_bytes / GB)} GB in use; the largest micro-batches leave "
        f"{LIBRARIES_BYTES / GB:g} GB to the CUDA context and the libraries",
        f"assumed: eager execution, {casts}, fused attention, AdamW with float32 moments, and for "
        "FSDP a unit per block and one for the rest",
    ]
