"""All-reduce times by size: one after another, and many in flight."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated

import pandas as pd

from common.errors import UserError
from common.perfmodel.collectives import algorithm_bandwidth, bus_bandwidth
from common.runtime.group.collective_timing import ALL_REDUCE_COLUMNS, TimedCalls, time_all_reduces
from common.runtime.group.process_group import process_group
from common.runtime.progress import Progress
from common.runtime.records.recorder import Recorder, record_run
from common.samples import slowest_rank
from common.settings import NonNegative, OneOf, Positive, RankOptions
from common.training.precision import DTYPES

# The course's list: one element, then 1,676,718,080 (in float32 6.7 GB) halved down to 12,792.
COURSE_NUMEL = (1, *(1_676_718_080 // 2**halvings for halvings in range(17, -1, -1)))
SIZES = ("total_elements", "total_bytes")
logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class AllReduceBenchmark(RankOptions):
    """Time all-reduces of a list of sizes; the slowest rank counts.

    Recipe: uv run torchrun --nproc_per_node=2 assignments/assignment2/allreduce_benchmark.py
    --numel 1 1000 1000000. The variable NUMEL sets the list too, DTYPE and BACKEND the others.

    Sizes are visited in rounds whose order rotates. Each is timed in two modes: sequential (the
    next call starts when the last is done) and in_flight (several launched at once; the time is
    the batch's divided by their number). Writes allreduce-times.csv (the course's columns,
    sequential, seconds) and allreduce-samples.csv (raw). Stopped with Ctrl-C it keeps
    what it has. Settings may also come from --config FILE (a YAML file; flags win).
    """

    numel: tuple[int, ...] = COURSE_NUMEL
    """Elements per all-reduce, ascending."""
    dtype: Annotated[str, OneOf(DTYPES)] = "float32"
    """Type of the elements: float32, float16 or bfloat16."""
    rounds: Annotated[int, Positive] = 4
    """Rounds; each visits every size and mode once."""
    iterations: Annotated[int, Positive] = 10
    """Timed calls per size and round, one after another; in flight as many whole batches as hold
    them, with a time for each batch."""
    warmup_steps: Annotated[int, NonNegative] = 2
    """Untimed calls before the timed ones of each size and round, one after another. In flight one
    batch is untimed."""
    in_flight_mib: Annotated[float, Positive] = 256
    """Memory for the buffers of calls in flight; 2 to 16 of them."""
    launch_included: bool = False
    """On GPUs: start on an idle device, so that a small message's time is that of its launch. By
    default the device is held back until everything is launched, as it is in training. On the CPU
    a launch is part of the call."""
    output_dir: str = "outputs/assignment2"

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.numel:
            raise UserError("numel is empty; give at least one element count")
        if min(self.numel) < 1:
            raise UserError(f"numel {min(self.numel)}: an all-reduce has at least 1 element")
        if list(self.numel) != sorted(set(self.numel)):
            raise UserError("numel must be ascending, each count once")


def main(settings: AllReduceBenchmark) -> None:
    """Runs the benchmark and prints its table."""
    with (
        process_group(settings.device, settings.backend) as worker,
        record_run(settings, "allreduce_benchmark", worker) as recorder,
    ):
        if settings.launch_included and worker.device.type == "cpu" and worker.is_main:
            logger.warning("without effect: launch_included, as a CPU's calls contain their launch")
        samples = measure(settings, recorder)
        if recorder.run:
            about = {"backend": worker.backend, "world_size": worker.world_size}
            table = course_table(samples, "sequential", SIZES, about)
            recorder.run.write_table("allreduce-times.csv", table)
            summary = summarise(samples, worker.world_size)
            print(summary.to_string(index=False, float_format="%.4g"))
            print(f"Written to {recorder.run.path}")


def measure(settings: AllReduceBenchmark, recorder: Recorder) -> pd.DataFrame:
    """Visits the sizes in rotated rounds; returns the samples of every rank, on rank 0."""
    worker = recorder.worker
    samples = recorder.stream("allreduce-samples.csv", ALL_REDUCE_COLUMNS)
    dtype = DTYPES[settings.dtype]
    progress = Progress(settings.rounds * len(settings.numel), worker.is_main)
    for round_, numel in recorder.rounds(settings.numel, settings.rounds, stage="sizes"):
        fitting = settings.in_flight_mib * 2**20 // (numel * dtype.itemsize)
        in_flight = int(min(16, max(2, fitting)))
        rows = time_all_reduces(
            numel,
            dtype,
            worker,
            round_,
            TimedCalls(
                alone=settings.iterations,
                warmup=settings.warmup_steps,
                in_flight=in_flight,
                batches=-(-settings.iterations // in_flight),
            ),
            checked=True,
            launch_included=settings.launch_included,
        )
        samples.write(rows)
        progress.step(f"round {round_ + 1}, {numel:,} elements")
    return samples.table()


def course_table(
    samples: pd.DataFrame, mode: str, sizes: Sequence[str], about: Mapping[str, object]
) -> pd.DataFrame:
    """Returns a table as the course has it: one row per size, of one mode.

    ``average_time`` and ``stdev_time``, the standard deviation, are in seconds; ``about`` is what
    the first columns hold, the same in all rows.
    """
    calls = samples[samples["mode"] == mode]
    calls = slowest_rank(calls, "time_ms", by=[*sizes, "round", "iteration"])
    table = (calls.groupby([*sizes]).agg(["mean", "std"]).fillna(0) / 1e3).reset_index()
    table = table.rename(columns={"mean": "average_time", "std": "stdev_time"})
    return pd.DataFrame(dict(about), index=table.index).join(table)


def summarise(samples: pd.DataFrame, world_size: int) -> pd.DataFrame:
    """Returns p50 and p95 (ms), algorithm and bus bandwidth (GB/s), one row per mode and size.

    1 GB is 1e9 bytes. Bus bandwidth is algorithm bandwidth times 2(n−1)/n (nccl-tests,
    doc/PERFORMANCE.md).
    """
    keys = ["mode", "total_bytes"]
    calls = slowest_rank(samples, "time_ms", by=[*keys, "round", "iteration"])
    table = calls.groupby(keys).quantile([0.5, 0.95]).unstack().reset_index()
    table.columns = ["mode", "size_bytes", "p50_ms", "p95_ms"]
    size, time_s = table["size_bytes"], table["p50_ms"] / 1e3
    table["algbw_gb_per_s"] = algorithm_bandwidth(size, time_s) / 1e9
    table["busbw_gb_per_s"] = bus_bandwidth(size, time_s, world_size) / 1e9
    return table
