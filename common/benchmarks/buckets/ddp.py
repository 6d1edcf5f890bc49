"""DDP training steps at each bucket cap: the measurement that predictions are held against."""

from __future__ import annotations

import gc
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated

import pandas as pd
import torch
from torch.nn.parallel import DistributedDataParallel

from common.benchmarks.buckets.bucket_timeline import TIMELINE_COLUMNS, watch
from common.benchmarks.buckets.ddp_record import (
    bucket_columns,
    describe_buckets,
    lateness_rows,
    overlap_rows,
)
from common.benchmarks.buckets.latency_hook import LatencyHook, added_latency, latency_note
from common.benchmarks.steps import FixedBatchStep, UpdatedStepOptions, make_step
from common.errors import UserError
from common.models.replay import ReplayModel
from common.perfmodel.buckets import cap_label, parse_cap
from common.runtime import torch_internals
from common.runtime.group.process_group import process_group
from common.runtime.progress import Progress
from common.runtime.records.recorder import Recorder, record_run
from common.runtime.timing import clock_for
from common.samples import per_round, slowest_rank
from common.settings import AtLeast, NonNegative, Positive, RoundOptions
from common.training.ddp import make_ddp

TIMES = ("forward_time_ms", "backward_time_ms", "step_time_ms")
STEP_COLUMNS = (
    "bucket_cap_mib",
    "num_buckets",
    "first_bucket_bytes",
    "last_bucket_bytes",
    "round",
    "iteration",
    "rank",
    *TIMES,
)
TIMES_COLUMNS = (*STEP_COLUMNS, "bucket_bytes")
"""``ddp-times.csv``; ``bucket_bytes``: the sizes of all buckets in order, blank-separated."""
BUCKET_COLUMNS = ("bucket_cap_mib", "rank", "bucket", "size_bytes", "parameters")
OVERLAP_COLUMNS = (
    "bucket_cap_mib",
    "round",
    "iteration",
    "rank",
    "backward_compute_time_ms",
    "communication_time_ms",
    "overlap_time_ms",
)
LATENESS_COLUMNS = ("bucket_cap_mib", "round", "iteration", "rank", "lateness_ms")
LOCAL_COLUMNS = ("round", "iteration", "rank", *TIMES)


@dataclass(frozen=True)
class DdpBenchmark(RoundOptions, UpdatedStepOptions):
    """Time DDP training steps of a GPT-2 over bucket caps; a step's time is its slowest rank's.

    Recipe: uv run torchrun --nproc_per_node=2 assignments/assignment2/ddp_benchmark.py
    --bucket_cap_mb 1 5 25. The variable BUCKET_SIZE sets the list too.

    Caps are visited in rounds whose order rotates, each time in a fresh DDP instance; every
    round also times the step without DDP. All ranks start the backward pass together.
    Writes ddp-times.csv (raw, one row per measured iteration and rank), ddp-warmup-times.csv,
    ddp-buckets.csv (the buckets DDP really made), ddp-overlap-times.csv (DDP's own record of
    computation, communication and overlap) and local-times.csv (without DDP); of a replay also
    replay-lateness.csv (by how much its gradients were late in each measured step, at worst).
    After the rounds one more instance per cap is watched bucket by bucket (bucket-timeline.csv).
    Settings may also come from --config FILE (a YAML file; flags win).
    """

    bucket_cap_mb: tuple[str, ...] = ("1", "5", "10", "25", "50", "100", "200", "400")
    """Caps in DDP's unit (MiB); None is DDP's default (a first bucket of 1 MiB, then 25)."""
    num_steps: Annotated[int, Positive] = 5
    """Measured steps per cap and round."""
    warmup_steps: Annotated[int, AtLeast(3, "DDP forms its buckets in the first two")] = 3
    """Steps before the measured ones; at least 3, as DDP forms its buckets in the first two."""
    initial_steps: Annotated[int, NonNegative] = 10
    """Warm-up steps before the first round, until the machine runs at its usual speed."""
    timeline_steps: Annotated[int, NonNegative] = 3
    """Passes per cap that are watched after the rounds; 0 leaves bucket-timeline.csv out."""
    static_graph: bool = False
    """DDP's static_graph: the same parameters get gradients in every step."""
    gradient_as_bucket_view: bool = False
    """DDP's gradient_as_bucket_view: gradients are views of the buckets."""
    find_unused_parameters: bool = False
    """DDP's find_unused_parameters: look for parameters that get no gradient in a step."""
    added_latency_ms: Annotated[float, NonNegative] = 0.0
    """Delay every bucket by this, with a comm hook that reduces one bucket after another."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.caps()
        self.step_settings()

    def caps(self) -> tuple[float | None, ...]:
        """Returns the caps in MiB, each once, None for DDP's default.

        Raises UserError where there is none, or one that is no cap.
        """
        if not self.bucket_cap_mb:
            raise UserError("bucket_cap_mb is empty; give at least one cap")
        return tuple(dict.fromkeys(parse_cap(text) for text in self.bucket_cap_mb))


def main(settings: DdpBenchmark) -> None:
    """Runs the benchmark and prints the medians."""
    with process_group(settings.device, settings.backend) as worker:
        step = make_step(settings.step_settings(), worker)
        notes = (step.note, latency_note(settings.added_latency_ms))
        with (
            added_latency(settings.added_latency_ms, worker.device) as hook,
            record_run(
                settings,
                "ddp_benchmark",
                worker,
                recorded_settings=step.recorded_settings,
                notes=notes,
            ) as recorder,
        ):
            samples = measure(settings, step, recorder, hook)
            if recorder.run:
                print(medians(samples, ("bucket_cap_mib", "num_buckets"), TIMES))
                print(f"Written to {recorder.run.path}")


def measure(
    settings: DdpBenchmark,
    step: FixedBatchStep,
    recorder: Recorder,
    hook: LatencyHook | None = None,
) -> pd.DataFrame:
    """Visits the caps in rotated rounds; returns the measured samples of all ranks, on rank 0."""
    worker = recorder.worker
    times = recorder.stream("ddp-times.csv", TIMES_COLUMNS)
    warmup = recorder.stream("ddp-warmup-times.csv", TIMES_COLUMNS)
    buckets = recorder.stream("ddp-buckets.csv", BUCKET_COLUMNS)
    overlap = recorder.stream("ddp-overlap-times.csv", OVERLAP_COLUMNS)
    local = recorder.stream("local-times.csv", LOCAL_COLUMNS)
    late = recorder.stream("replay-lateness.csv", LATENESS_COLUMNS) if settings.replay else None
    arms = ("local", *settings.caps())
    watched = settings.caps() if settings.timeline_steps else ()
    progress = Progress(settings.rounds * len(arms) + len(watched), worker.is_main)
    for _ in range(settings.initial_steps):
        timed_step(step, step.forward_model, 0)
    rounds = recorder.rounds(
        arms,
        settings,
        stage="caps",
        times=lambda: per_round(times.table(), "backward_time_ms", "bucket_cap_mib"),
        progress=progress,
    )
    for round_, arm in rounds:
        if arm == "local":
            rows = [timed_step(step, step.forward_model, i) for i in _steps(settings)]
            local.write([{"round": round_} | row for row in rows if row["iteration"] >= 0])
            progress.step(f"round {round_ + 1}, without DDP")
            continue
        rows, records = visit(settings, step, arm, hook)
        gc.collect()  # the DDP instance of this visit, its hooks and its buckets
        described = describe_buckets(records[-1], step)
        keys = {"bucket_cap_mib": cap_label(arm), "round": round_}
        sizes = bucket_columns(described)
        sizes["bucket_bytes"] = " ".join(str(row["size_bytes"]) for row in described)
        times.write([keys | sizes | row for row in rows if row["iteration"] >= 0])
        warmup.write([keys | sizes | row for row in rows if row["iteration"] < 0])
        overlap.write([keys | row for row in overlap_rows(records, settings.warmup_steps)])
        if late:
            late.write([keys | row for row in lateness_rows(records, settings.warmup_steps)])
        if round_ == 0:
            buckets.write([{"bucket_cap_mib": cap_label(arm)} | row for row in described])
        progress.step(f"round {round_ + 1}, cap {cap_label(arm)} MiB")
    if watched:
        timelines = recorder.stream("bucket-timeline.csv", TIMELINE_COLUMNS)
    for cap in watched:
        rows = watch_buckets(settings, step, cap, hook)
        gc.collect()
        timelines.write([{"bucket_cap_mib": cap_label(cap)} | row for row in rows])
        progress.step(f"bucket by bucket, cap {cap_label(cap)} MiB")
    return times.table()


def _steps(settings: DdpBenchmark) -> range:
    return range(-settings.warmup_steps, settings.num_steps)


def visit(
    settings: DdpBenchmark,
    step: FixedBatchStep,
    cap_mib: float | None,
    hook: LatencyHook | None = None,
    *,
    init_sync: bool = True,
) -> tuple[list[dict], list[dict]]:
    """Runs the steps of a fresh DDP instance; returns their times and DDP's own records.

    Warm-up steps are among them.
    """
    ddp = wrapped(settings, step, cap_mib, init_sync=init_sync)
    if hook:
        hook.register(ddp)
    torch_internals.record_every_step(ddp)
    model = torch.compile(ddp) if settings.compile else ddp
    rows, records = [], []
    for iteration in _steps(settings):
        rows.append(timed_step(step, model, iteration))
        records.append(torch_internals.ddp_record(ddp))
        if isinstance(step.model, ReplayModel):
            records[-1]["replay_lateness_s"] = step.model.lateness_s
    step.zero_grad()
    return rows, records


def wrapped(
    settings: DdpBenchmark,
    step: FixedBatchStep,
    cap_mib: float | None,
    *,
    init_sync: bool = True,
) -> DistributedDataParallel:
    """Makes a fresh DDP instance of the step's model.

    With ``init_sync`` rank 0 sends its weights; without, all ranks must have the same already.
    """
    if settings.compile:
        torch.compiler.reset()  # a compiled graph is split for one cap
    return make_ddp(
        step.model,
        step.device,
        bucket_cap_mb=cap_mib,
        static_graph=settings.static_graph,
        gradient_as_bucket_view=settings.gradient_as_bucket_view,
        find_unused_parameters=settings.find_unused_parameters,
        init_sync=init_sync,
    )


def watch_buckets(
    settings: DdpBenchmark,
    step: FixedBatchStep,
    cap_mib: float | None,
    hook: LatencyHook | None = None,
) -> list[dict]:
    """Watches one more instance; returns rows of TIMELINE_COLUMNS, but for the cap and the rank."""
    ddp = wrapped(settings, step, cap_mib)
    return watch(
        ddp,
        torch.compile(ddp) if settings.compile else ddp,
        step,
        passes=settings.timeline_steps,
        warmup_steps=settings.warmup_steps,
        hook=hook,
    )


def timed_step(step: FixedBatchStep, model: torch.nn.Module, iteration: int) -> dict:
    """Times one training step, with a barrier of all ranks before the backward pass.

    The wait at the barrier counts in the step's time, but in neither forward nor backward time.
    Without the barrier it would be part of the first all-reduce.
    """
    clock = clock_for(step.device)
    step.zero_grad()
    step.worker.barrier()
    clock.wait()
    marks = [clock.mark()]
    loss = step.forward(model)
    marks.append(clock.mark())
    clock.wait()
    step.worker.barrier()
    marks.append(clock.mark())
    loss.backward()
    marks.append(clock.mark())
    step.optimize()
    marks.append(clock.mark())
    clock.wait()
    return {
        "iteration": iteration,
        "forward_time_ms": clock.elapsed_s(marks[0], marks[1]) * 1e3,
        "backward_time_ms": clock.elapsed_s(marks[2], marks[3]) * 1e3,
        "step_time_ms": clock.elapsed_s(marks[0], marks[4]) * 1e3,
    }


def medians(samples: pd.DataFrame, keys: Sequence[str], times: Sequence[str]) -> str:
    """Returns a table of the median times of the slowest rank, a row per value of the keys."""
    steps = [*keys, "round", "iteration"]
    slowest = slowest_rank(samples, [*times], by=steps, sort=False)
    table = slowest.groupby([*keys], sort=False).median().reset_index()
    return table.to_string(index=False, float_format="%.4g")
