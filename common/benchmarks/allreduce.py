"""How long an all-reduce takes, by size: one after another, and many in flight."""

from __future__ import annotations

import logging
from dataclasses import dataclass

import pandas as pd
import torch

from common.benchmarks.gpt2_step import DTYPES
from common.errors import UserError, unknown_name
from common.perfmodel.collectives import algorithm_bandwidth, bus_bandwidth
from common.runtime.collective_timing import check_sum, time_in_flight, time_sequence
from common.runtime.process_group import Worker, process_group
from common.runtime.progress import Progress
from common.runtime.recorder import Recorder, record_run, require_not_negative, require_positive

# The course's list: one element, then 12,792 doubling up to 1,676,718,080 (in float32 6.7 GB).
COURSE_NUMEL = (
    *(1, 12792, 25584, 51169, 102338, 204677, 409355, 818710, 1637420, 3274840, 6549680),
    *(13099360, 26198720, 52397440, 104794880, 209589760, 419179520, 838359040, 1676718080),
)
SAMPLE_COLUMNS = (
    *("mode", "total_elements", "total_bytes", "in_flight"),
    *("round", "iteration", "rank", "time_ms"),
)

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class AllReduceBenchmark:
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
    dtype: str = "float32"
    backend: str | None = None
    """nccl or gloo; by default NCCL on CUDA and gloo on the CPU."""
    device: str | None = None
    rounds: int = 4
    iterations: int = 10
    """Timed calls per size, mode and round."""
    warmup_steps: int = 2
    """Untimed calls before them."""
    in_flight_mib: float = 256
    """Memory for the buffers of calls in flight; 2 to 16 of them."""
    launch_included: bool = False
    """On GPUs: start on an idle device, so that a small message's time is that of its launch. By
    default the device is held back until everything is launched, as it is in training. On the CPU
    a launch is part of the call."""
    output_dir: str = "outputs/assignment2"
    run_id: str = ""
    """Name of the run directory below output_dir; made up by default."""

    def __post_init__(self) -> None:
        require_not_negative(self, "warmup_steps")
        require_positive(self, "rounds", "iterations", "in_flight_mib")
        check_numel(self.numel)
        if self.dtype not in DTYPES:
            raise UserError(unknown_name("dtype", self.dtype, DTYPES))


def check_numel(numel: tuple[int, ...]) -> None:
    """Raise UserError unless the element counts are positive and ascending."""
    if not numel:
        raise UserError("numel is empty; give at least one element count")
    if min(numel) < 1:
        raise UserError(f"numel {min(numel)}: an all-reduce has at least 1 element")
    if list(numel) != sorted(set(numel)):
        raise UserError("numel must be ascending, each count once")


def main(settings: AllReduceBenchmark) -> None:
    """Run the benchmark and print its table."""
    with (
        process_group(settings.device, settings.backend) as worker,
        record_run(settings, "allreduce_benchmark", worker) as recorder,
    ):
        if settings.launch_included and worker.device.type == "cpu" and worker.is_main:
            logger.warning("without effect: launch_included, as a CPU's calls contain their launch")
        samples = measure(settings, worker, recorder)
        if recorder.run:
            table = course_table(samples, worker.backend, worker.world_size)
            recorder.run.write_table("allreduce-times.csv", table)
            summary = summarise(samples, worker.world_size)
            print(summary.to_string(index=False, float_format="%.4g"))
            print(f"Written to {recorder.run.path}")


def measure(settings: AllReduceBenchmark, worker: Worker, recorder: Recorder) -> pd.DataFrame:
    """Visit the sizes in rotated rounds; the samples of every rank, on rank 0."""
    samples = recorder.stream("allreduce-samples.csv", SAMPLE_COLUMNS)
    progress = Progress(settings.rounds * len(settings.numel), worker.is_main)
    for round_ in range(settings.rounds):
        for numel in rotated(settings.numel, round_):
            samples.write(_sample_size(settings, worker, numel, round_))
            progress.step(f"round {round_ + 1}, {numel:,} elements")
    return samples.table()


def rotated(items: tuple, round_: int) -> tuple:
    """The order of a round: rotated by one every two rounds, each second round backwards.

    Over two rounds every item has the same mean position, so a steady drift of the machine
    favours none, and over many no item always follows the same other.
    """
    shift = round_ // 2 % len(items)
    order = items[shift:] + items[:shift]
    return order[::-1] if round_ % 2 else order


def _sample_size(
    settings: AllReduceBenchmark, worker: Worker, numel: int, round_: int
) -> list[dict]:
    dtype = DTYPES[settings.dtype]
    size_bytes = numel * dtype.itemsize
    in_flight = int(min(16, max(2, settings.in_flight_mib * 2**20 // size_bytes)))
    buffers = [torch.zeros(numel, dtype=dtype, device=worker.device) for _ in range(in_flight)]
    check_sum(buffers[0], worker)
    calls = settings.warmup_steps + settings.iterations
    batches = -(-calls // in_flight) + 1  # the first is warm-up
    idle = settings.launch_included
    alone_s = time_sequence(buffers[:1] * calls, worker, launch_included=idle)
    together_s = [time_in_flight(buffers, worker, launch_included=idle) for _ in range(batches)]
    times_s = {
        "sequential": alone_s[settings.warmup_steps :],
        "in_flight": [time_s / in_flight for time_s in together_s[1:]],
    }
    return [
        {
            "mode": mode,
            "total_elements": numel,
            "total_bytes": size_bytes,
            "in_flight": 1 if mode == "sequential" else in_flight,
            "round": round_,
            "iteration": iteration,
            "time_ms": time_s * 1e3,
        }
        for mode, samples in times_s.items()
        for iteration, time_s in enumerate(samples)
    ]


def slowest_rank(samples: pd.DataFrame) -> pd.DataFrame:
    """One row per sample: the time of the slowest rank."""
    keys = [column for column in samples.columns if column not in ("rank", "time_ms")]
    return samples.groupby(keys, as_index=False, sort=False)["time_ms"].max()


def course_table(samples: pd.DataFrame, backend: str, world_size: int) -> pd.DataFrame:
    """The course's ``allreduce-times.csv``: mean and standard deviation in seconds, sequential."""
    sequential = slowest_rank(samples[samples["mode"] == "sequential"])
    groups = sequential.groupby(["total_elements", "total_bytes"])["time_ms"]
    table = (groups.agg(["mean", "std"]).fillna(0) / 1e3).reset_index()
    table = table.rename(columns={"mean": "average_time", "std": "stdev_time"})
    table.insert(0, "backend", backend)
    table.insert(1, "world_size", world_size)
    return table


def summarise(samples: pd.DataFrame, world_size: int) -> pd.DataFrame:
    """p50 and p95 per size and mode, algorithm and bus bandwidth (GB = 1e9 bytes).

    Bus bandwidth is algorithm bandwidth times 2(n−1)/n (nccl-tests, doc/PERFORMANCE.md).
    """
    groups = slowest_rank(samples).groupby(["mode", "total_bytes"])["time_ms"]
    table = groups.quantile([0.5, 0.95]).unstack().reset_index()
    table.columns = ["mode", "size_bytes", "p50_ms", "p95_ms"]
    size, time_s = table["size_bytes"], table["p50_ms"] / 1e3
    table["algbw_gb_per_s"] = algorithm_bandwidth(size, time_s) / 1e9
    table["busbw_gb_per_s"] = bus_bandwidth(size, time_s, world_size) / 1e9
    return table
