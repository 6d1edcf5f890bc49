"""Tokens per second of a training step on one device, by batch size, each in its own process."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Annotated

import numpy as np
import pandas as pd
import torch

from common.analysis.one_device import throughput_text as text
from common.benchmarks.one_device.device_peak import (
    SAMPLE_COLUMNS,
    cpu_peak,
    measure_cpu,
    peak_table,
)
from common.benchmarks.one_device.throughput_point import (
    FAILED,
    MEASURED,
    OUT_OF_MEMORY,
    REFUSED,
    PointOutcome,
    ThroughputPoint,
)
from common.errors import RunFailed, UserError
from common.perfmodel.one_device.memory_fit import what_would_fit
from common.perfmodel.one_device.peaks import DevicePeak, known_peak
from common.perfmodel.one_device.workload import Workload
from common.runtime.machine.environment import cpu_model
from common.runtime.machine.memory_limit import available_memory_bytes, can_limit
from common.runtime.processes.child import run_forked
from common.runtime.records.recorder import record_run, single_device
from common.runtime.records.run_directory import RunDirectory
from common.samples import student
from common.settings import AtLeast, DeviceOptions, NonEmpty, NonNegative, Positive, Seed, part_of
from common.training.precision import check_precision
from common.training.step import check_compiler

logger = logging.getLogger(__name__)

POINT = "common.benchmarks.one_device.throughput_point"
TIME_COLUMNS = ("batch_size", "round", "iteration", "step_time_ms")
USABLE = {"cpu": 0.85, "cuda": 0.95}
"""Share of the memory that a step can have when a batch is said to fit: the rest goes to gaps
between blocks and to the buffers of libraries, which on a CPU come out of the same heap."""
BATCH_COLUMNS = (
    "batch_size",
    "status",
    "reason",
    "tokens_per_s",
    "tokens_per_s_q25",
    "tokens_per_s_q75",
    "steps_per_s",
    "peak_allocated_mib",
    "peak_reserved_mib",
    "peak_resident_mib",
)


@dataclass(frozen=True)
class ThroughputBenchmark(DeviceOptions, Workload):
    """Measure tokens per second, MFU, and how both depend on the batch size.

    Every visit to a batch size is a process of its own and ends in a result, "out of memory" or a
    failure. Writes throughput-times.csv (raw, one row per measured step; the warm-up's are in
    throughput-warmup-times.csv), throughput-batches.csv (a row per batch size) and
    device-peak.csv (on a CPU from device-peak-samples.csv).
    Settings may also come from --config FILE (a YAML file; flags win).
    """

    batch_sizes: Annotated[tuple[int, ...], NonEmpty, AtLeast(1)] = (1, 4, 8, 16, 32, 64)
    """Batch sizes of the sweep, each measured once; batch_size is measured in any case, --rounds
    times, and not once more for standing among them."""
    rounds: Annotated[int, Positive] = 1
    """Visits to batch_size, the headline's, spread over the sweep; six settle a rate."""
    num_steps: Annotated[int, Positive] = 20
    """Measured steps per visit."""
    warmup_steps: Annotated[int, NonNegative] = 5
    """Untimed steps before the timed ones."""
    keep_memory: bool = False
    """Keep freed memory mapped from step to step (CPUs with glibc; PyTorch always does on GPUs)."""
    memory_limit_gib: Annotated[float, NonNegative] = 0
    """Let the measured process take this much memory and no more; 0 is what the machine has."""
    seed: Annotated[int, Seed] = 42
    """Seed of the initial weights and of the random tokens."""
    output_dir: str = "outputs/assignment0"

    def __post_init__(self) -> None:
        super().__post_init__()
        for batch_size in self.batch_sizes:
            self.point(batch_size)

    def point(self, batch_size: int, **how: object) -> ThroughputPoint:
        """Returns the settings of one point. Raises UserError where such a batch cannot be."""
        return part_of(ThroughputPoint, vars(self) | {"batch_size": batch_size}, **how)


def main(settings: ThroughputBenchmark) -> None:
    """Measures all batch sizes and prints what they say."""
    with single_device("throughput", settings.device, starts_children=True) as worker:
        check_precision(settings.precision, worker.device)
        if settings.compile:
            check_compiler(worker.device)
        for reason in settings.without_effect(worker.device.type):
            logger.warning("without effect: %s", reason)
        if settings.keep_memory and worker.device.type == "cuda":
            logger.warning("without effect: keep_memory is what PyTorch does on a GPU anyway")
        with record_run(settings, "throughput", worker) as recorder:
            report(settings, Points(settings, worker.device, recorder.run))
            print(f"Written to {recorder.run.path}")


def report(settings: ThroughputBenchmark, points: Points) -> None:
    """Measures and prints, in the course's order and words."""
    print("Task 2: Throughput Measurement & Scaling")
    print(text.workload_lines(settings, points.device.type))
    headline = points.measure(settings.batch_size, show=print)
    if headline.status != MEASURED:
        points.write_headline()
    require_result(headline, settings, points)
    elapsed_s = sum(headline.step_times_ms) / 1e3
    tokens_per_s = settings.tokens_per_step * settings.num_steps / elapsed_s
    print(text.results_block(headline.step_times_ms, settings.tokens_per_step))
    parameters = settings.unpadded.num_parameters()
    print(text.naive_block(settings.title, tokens_per_s, parameters))
    for batch_size in settings.batch_sizes:
        print(f"Testing batch_size={batch_size}...", flush=True)
        outcome = points.measure(batch_size)
        if outcome.status == OUT_OF_MEMORY:
            print(f"OOM at batch_size={batch_size}")
        elif outcome.status != MEASURED:
            print(f"Failed at batch_size={batch_size}: {outcome.reason}")
        if points.visits < settings.rounds:
            points.visit(settings.batch_size)
    while points.visits < settings.rounds:
        points.visit(settings.batch_size)
    points.write_headline()
    peak = write_peak(settings, points.device, points.run)
    print(text.batch_block(points.table(), points.device.type))
    table = points.table().set_index("batch_size")
    rate = float(table.loc[settings.batch_size, "tokens_per_s"])  # as the notebook has it
    print(text.operations_block(settings, rate, peak, device_name(points.device)))


def require_result(outcome: PointOutcome, settings: Workload, points: Points) -> None:
    """Raises UserError if the batch does not fit or is refused, RunFailed if its process died."""
    where = f"batch_size {settings.batch_size}"
    if outcome.status == OUT_OF_MEMORY:
        usable = USABLE[points.device.type] * (points.capacity_bytes - outcome.held_bytes)
        raise UserError(
            f"{where}: out of memory on {device_name(points.device)} with "
            f"{points.capacity_bytes / 2**30:.1f} GiB; {what_would_fit(settings, usable)}"
        )
    if outcome.status == REFUSED:
        raise UserError(outcome.reason)
    if outcome.status == FAILED:
        raise RunFailed(f"{where}: {outcome.reason}")


class Points:
    """The batch sizes measured so far, whose samples are written at once.

    Attributes:
        capacity_bytes: the memory that a point can have.
        limit_bytes: limit that is set for the process; 0 where the device says no by itself.
    """

    def __init__(
        self, settings: ThroughputBenchmark, device: torch.device, run: RunDirectory
    ) -> None:
        self.settings = settings
        self.device = device
        self.run = run
        self.capacity_bytes, self.limit_bytes = memory_for(settings, device)
        self._outcomes: dict[int, list[PointOutcome]] = {}
        self._times = run.stream("throughput-times.csv", TIME_COLUMNS)
        self._warmup_times = run.stream("throughput-warmup-times.csv", TIME_COLUMNS)
        self._batches = run.stream("throughput-batches.csv", BATCH_COLUMNS)
        self._logs = run.path / "logs"
        self._logs.mkdir()

    def measure(
        self, batch_size: int, show: Callable[[str], None] = lambda line: None
    ) -> PointOutcome:
        """Returns the outcome of a batch size, which is measured when first asked for.

        ``show`` gets the lines that its process prints, but for progress.
        """
        if batch_size not in self._outcomes:
            self.visit(batch_size, show)
            if batch_size != self.settings.batch_size:
                self._batches.write([self._row(batch_size)])
        return self._outcomes[batch_size][0]

    @property
    def visits(self) -> int:
        """Returns the number of visits to the headline's batch size."""
        return len(self._outcomes[self.settings.batch_size])

    def visit(self, batch_size: int, show: Callable[[str], None] = lambda line: None) -> None:
        """Measures a batch size in a process of its own, and writes its steps."""
        outcome = self._run(batch_size, show)
        outcomes = self._outcomes.setdefault(batch_size, [])
        round_ = len(outcomes)
        outcomes.append(outcome)
        self._warmup_times.write(_time_rows(batch_size, round_, outcome.warmup_times_ms))
        self._times.write(_time_rows(batch_size, round_, outcome.step_times_ms))

    def write_headline(self) -> None:
        """Writes the row of the headline's batch size, of all visits to it."""
        self._batches.write([self._row(self.settings.batch_size)])

    def table(self) -> pd.DataFrame:
        """Returns throughput-batches.csv so far, the smallest batch first."""
        return pd.DataFrame([self._row(batch_size) for batch_size in sorted(self._outcomes)])

    def _row(self, batch_size: int) -> dict:
        tokens = self.settings.point(batch_size).tokens_per_step
        return batch_row(batch_size, tokens, self._outcomes[batch_size])

    def _run(self, batch_size: int, show: Callable[[str], None]) -> PointOutcome:
        point = self.settings.point(
            batch_size, device=str(self.device), memory_limit_bytes=self.limit_bytes
        )
        number = len(self._outcomes.get(batch_size, []))
        log = self._logs / f"batch-{batch_size}{f'-{number}' if number else ''}.log"
        result = log.with_suffix(".json").absolute()

        def pass_on(line: str) -> None:
            logger.info(line) if line.startswith("[") else show(line)

        ended = run_forked(POINT, [json.dumps(asdict(point)), str(result)], log, pass_on)
        if ended.reason:
            return PointOutcome(FAILED, ended.reason)
        outcome = PointOutcome(**json.loads(result.read_text()))
        result.unlink()  # its contents go into the tables
        return outcome


def _time_rows(batch_size: int, round_: int, times_ms: Sequence[float]) -> list[dict]:
    return [
        dict(zip(TIME_COLUMNS, (batch_size, round_, iteration, time_ms), strict=True))
        for iteration, time_ms in enumerate(times_ms)
    ]


def batch_row(batch_size: int, tokens_per_step: int, outcomes: Sequence[PointOutcome]) -> dict:
    """Returns a row of throughput-batches.csv, if any steps ran: the mean over visits of the rate
    of the median step, quartiles of the rates of all steps, and the first visit's end."""
    row: dict = dict.fromkeys(BATCH_COLUMNS)
    first, visits = outcomes[0], [visit.step_times_ms for visit in outcomes if visit.step_times_ms]
    row |= {"batch_size": batch_size, "status": first.status, "reason": first.reason}
    if visits:
        # A long step is a low rate: the upper quartile of the times gives the lower one of rates.
        slow_ms, fast_ms = np.quantile(np.concatenate(visits), [0.75, 0.25])
        steps_per_s = student([1e3 / np.median(times_ms) for times_ms in visits]).estimate
        rates = {"": steps_per_s, "_q25": 1e3 / slow_ms, "_q75": 1e3 / fast_ms}
        row |= {f"tokens_per_s{name}": tokens_per_step * rate for name, rate in rates.items()}
        row["steps_per_s"] = steps_per_s
    for kind in ("allocated", "reserved", "resident"):
        peak_bytes = getattr(first, f"peak_{kind}_bytes")
        row[f"peak_{kind}_mib"] = None if peak_bytes is None else peak_bytes / 2**20
    return row


def memory_for(settings: ThroughputBenchmark, device: torch.device) -> tuple[int, int]:
    """Returns the bytes that a point can have, and the limit to set for that (0 is none)."""
    if device.type == "cuda":
        has = torch.cuda.get_device_properties(device).total_memory
    else:
        has = available_memory_bytes()
    wanted = round(settings.memory_limit_gib * 2**30)
    if wanted > has:
        logger.warning(
            "memory_limit_gib %g: there are %.1f GiB, which is the limit",
            settings.memory_limit_gib,
            has / 2**30,
        )
    if wanted:
        return min(wanted, has), min(wanted, has)
    # A GPU's allocator fails by itself; Linux would kill the process instead.
    needs_limit = device.type == "cpu" and can_limit("cpu")
    return has, has if needs_limit else 0


def write_peak(settings: Workload, device: torch.device, run: RunDirectory) -> DevicePeak | None:
    """Writes the device's peak in the workload's precision, measured on a CPU, and returns it."""
    if device.type == "cuda":
        peak = known_peak(torch.cuda.get_device_name(device))
    else:
        samples = measure_cpu((settings.precision,))
        run.write_table("device-peak-samples.csv", pd.DataFrame(samples, columns=SAMPLE_COLUMNS))
        peak = cpu_peak(samples)
    run.write_table("device-peak.csv", peak_table(peak))
    return peak


def device_name(device: torch.device) -> str:
    """Returns the name of the GPU or processor."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else cpu_model()
