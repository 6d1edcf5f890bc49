"""Measures the inputs of predictions: ready times, all-reduces, DDP's copies and contention.

The tables have the columns of the benchmarks of assignment 2, and the same readers read them.
Little is measured, so that tuning takes a fraction of a sweep: few message sizes, two calls of
large all-reduces, and contention at three sizes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import pandas as pd
import torch

from common.benchmarks.buckets.calibration import PASS_COLUMNS, crowd, passes_without_ddp
from common.benchmarks.buckets.lasting_messages import gradient_dtype
from common.benchmarks.buckets.overlap_lab import OVERLAP_TIME_COLUMNS, OverlapLab
from common.benchmarks.steps import FixedBatchStep
from common.errors import UserError
from common.perfmodel.ddp.profile import BackwardProfile, DdpCosts
from common.perfmodel.tables import (
    AllReduceTable,
    read_all_reduce,
    read_costs,
    read_ready_times,
)
from common.runtime.group.collective_timing import ALL_REDUCE_COLUMNS, TimedCalls, time_all_reduces
from common.runtime.group.gradient_marks import READY_COLUMNS, ready_rows
from common.runtime.records.recorder import Recorder, gather_rows
from common.samples import slowest_rank
from common.training.scaling.probes import ProbePlan, time_copies
from common.tuning.same_graph import on_main, together
from common.tuning.user_model import listed

WARMUP_PASSES, PASSES = 3, 8
SMALLEST_BYTES, GROWTH = 2**10, 4
CURVE_ROUNDS = 2
CONTENTION_ROUNDS, CONTENTION_PASSES = 2, 2
WIRE_DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16}


@dataclass(frozen=True)
class Measured:
    """The inputs of all predictions, on every rank.

    Attributes:
        forward_s: the forward pass of the slowest rank.
        profile: profile of the backward pass without DDP, all ranks computing at the same time.
        networks: compression → all-reduces of bytes in that format, over the job's network; of
            ``none`` in the dtype that most bytes of gradients have.
        costs: DDP's copies, and what computation and communication take from each other.
        backend: backend of the process group.
        cast_s_per_byte: compression → rounding a byte of gradient and turning it back.
    """

    forward_s: float
    profile: BackwardProfile
    networks: dict[str, AllReduceTable]
    costs: DdpCosts
    backend: str
    cast_s_per_byte: dict[str, float]


@dataclass(frozen=True)
class WatchedPasses:
    """Rows of this rank: when each gradient was ready, and how long the passes took."""

    ready: list[dict]
    times: list[dict]


def measure_all(step: FixedBatchStep, passes: WatchedPasses, recorder: Recorder) -> Measured:
    """Measures all inputs but those from ``passes``, and writes all tables."""
    worker = recorder.worker
    forward_s, profile = write_passes(passes, recorder)
    networks = measure_all_reduces(profile, gradient_dtype(step.model.parameters()), recorder)
    costs = measure_costs(step, recorder)
    copies = time_copies(profile.total_bytes, recorder, ProbePlan(repeats=3))
    casts = pd.DataFrame(gather_rows(worker, copies)).groupby("cost")
    cast_s = casts["time_ms"].median() / 1e3 / casts["size_bytes"].first()
    return Measured(
        forward_s=forward_s,
        profile=profile,
        networks=networks,
        costs=costs,
        backend=worker.backend,
        cast_s_per_byte={name: float(cast_s[name]) for name in WIRE_DTYPES},
    )


def watch_passes(step: FixedBatchStep) -> WatchedPasses:
    """Runs forward and backward passes without DDP, all ranks computing at the same time.

    Raises UserError where the graph is not the same in each.
    """
    expected = {name for name, _ in step.model.named_parameters()}
    ready, times, missing = [], [], set()
    passes = passes_without_ddp(step, warmup=WARMUP_PASSES, passes=PASSES, barrier_before="forward")
    for iteration, watched in passes:
        missing |= expected - set(watched.ready_s)
        if iteration >= 0 and not missing:
            ready += ready_rows(step.model, watched.ready_s, iteration)
            times.append(watched.row(iteration))
    step.zero_grad()
    together(step.worker, lambda: _refuse_changing(step.name, missing))
    return WatchedPasses(ready, times)


def write_passes(passes: WatchedPasses, recorder: Recorder) -> tuple[float, BackwardProfile]:
    """Writes gradient-ready-times.csv and local-step-times.csv; reads them into a profile.

    Returns:
        Seconds of the slowest rank's forward pass without DDP (the median over passes), and the
        profile of the backward pass; the same on every rank.
    """
    worker = recorder.worker
    path = _write(recorder, "gradient-ready-times.csv", READY_COLUMNS, passes.ready)
    times = pd.DataFrame(gather_rows(worker, passes.times))
    if recorder.run:
        recorder.run.write_table("local-step-times.csv", times[list(PASS_COLUMNS)])
    slowest = slowest_rank(times, "forward_time_ms", by=["iteration"])
    return float(slowest.median()) / 1e3, on_main(worker, lambda: read_ready_times(path))


def _refuse_changing(name: str, missing: set[str]) -> None:
    if missing:
        raise UserError(
            f"{name}: the graph changes from pass to pass: in some of them no gradient reaches "
            f"{listed(sorted(missing))}"
        )


def curve_sizes(total_bytes: int) -> list[int]:
    """Returns message sizes in bytes from 1 KiB to all gradients, each four times the last."""
    sizes = [SMALLEST_BYTES]
    while sizes[-1] * GROWTH < total_bytes:
        sizes.append(sizes[-1] * GROWTH)
    return sorted({*sizes, max(total_bytes, 2 * SMALLEST_BYTES)})


def measure_all_reduces(
    profile: BackwardProfile,
    dtype: torch.dtype,
    recorder: Recorder,
    formats: Sequence[str] = tuple(WIRE_DTYPES),
) -> dict[str, AllReduceTable]:
    """Times all-reduces in the gradients' ``dtype`` (``none``), and in ``formats`` at fewer sizes.

    Writes allreduce-samples.csv and one for each format. Returns the tables by format.
    """
    sizes = curve_sizes(profile.total_bytes)
    rows = _time_sizes(sizes, dtype, recorder)
    path = _write(recorder, "allreduce-samples.csv", ALL_REDUCE_COLUMNS, rows)
    networks = {"none": on_main(recorder.worker, lambda: read_all_reduce(path))}
    for name in formats:
        # Gradients take half the bytes of float32. The smallest size is timed, all gradients at
        # once and, of the larger sizes between them, every second one.
        between = (size // 2 for size in sizes[len(sizes) // 2 : -1 : 2])
        some = {sizes[0], *between, max(sizes[-1] // 2, 2 * sizes[0])}
        narrow = _time_sizes(sorted(some), WIRE_DTYPES[name], recorder)
        path = _write(recorder, f"allreduce-samples-{name}.csv", ALL_REDUCE_COLUMNS, narrow)
        networks[name] = on_main(recorder.worker, lambda path=path: read_all_reduce(path))
    return networks


def _time_sizes(sizes: list[int], dtype: torch.dtype, recorder: Recorder) -> list[dict]:
    rows = []
    for round_, size in recorder.rounds(sizes, CURVE_ROUNDS, stage="curve"):
        calls = 2 if size > 2**22 else 6 if size > 2**18 else 16
        together = crowd(size, sizes[-1])
        rows += time_all_reduces(
            max(1, size // dtype.itemsize),
            dtype,
            recorder.worker,
            round_,
            TimedCalls(
                alone=calls,
                in_flight=together,
                batches=max(1, calls // together) if together > 1 else 0,
            ),
            checked=round_ == 0,
        )
    return rows


def measure_costs(step: FixedBatchStep, recorder: Recorder) -> DdpCosts:
    """Measures DDP's copies and contention (``overlap_lab``); writes overlap-times.csv."""
    worker = recorder.worker
    lab = OverlapLab(step)
    rows = []
    arms = lab.arms()
    for round_, arm in recorder.rounds(arms, CONTENTION_ROUNDS, stage="contention"):
        rows += lab.visit(arm, round_, passes=CONTENTION_PASSES)
    path = _write(recorder, "overlap-times.csv", OVERLAP_TIME_COLUMNS, rows)
    return on_main(worker, lambda: read_costs(path, worker.backend))


def _write(recorder: Recorder, name: str, columns: tuple[str, ...], rows: list[dict]) -> Path:
    """Writes the rows of all ranks; returns the table's path, which is valid on rank 0 only."""
    table = pd.DataFrame(gather_rows(recorder.worker, rows))
    if recorder.run is None:
        return Path(name)
    return recorder.run.write_table(name, table[list(columns)])
