"""The arms of one case of the studies of T(b), and the tables they are written to.

A case is a model on a network (``accuracy``: links of emulated hosts; ``exchange``: a group whose
all-reduces take a given time). It is calibrated first: the step without DDP, DDP's bookkeeping and
its forward pass, all-reduces beside the backward pass and by themselves, and backward passes whose
gradients are watched. Then what is predicted is written down. Only then come the judged arms: every
bucketing in a fresh DDP instance, and the step without DDP once more, as a witness of how fast the
machine is now.

All cases of a job take turns, so that a slow minute of the machine meets all of them. Rounds of a
case go on until its bucketings are known to ``noise``, or the time is up.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Annotated

import numpy as np
import pandas as pd
import torch

from common.analysis.buckets.sweep import BucketSweep, slowest_steps
from common.benchmarks.buckets.calibration import crowd, forward_passes, passes_without_ddp
from common.benchmarks.buckets.ddp import (
    LOCAL_COLUMNS,
    STEP_COLUMNS,
    DdpBenchmark,
    timed_step,
    visit,
    wrapped,
)
from common.benchmarks.buckets.ddp_record import bucket_columns, describe_buckets
from common.benchmarks.buckets.latency_hook import LatencyHook
from common.benchmarks.buckets.overlap_lab import OVERLAP_TIME_COLUMNS, OverlapArm, OverlapLab
from common.benchmarks.steps import FixedBatchStep
from common.perfmodel.buckets import DdpOptions, assign_buckets, cap_label
from common.perfmodel.calibration import Calibration
from common.perfmodel.ddp.bucketings import DistinctCap, choose_caps
from common.perfmodel.samples import AllReduceSamples, OverlapSamples, ReadySamples
from common.perfmodel.uncertainty import prediction_bands
from common.runtime.group.collective_timing import ALL_REDUCE_COLUMNS, TimedCalls, time_all_reduces
from common.runtime.group.gradient_marks import READY_COLUMNS, ready_rows
from common.runtime.group.process_group import Worker
from common.runtime.progress import Progress
from common.runtime.records.recorder import Recorder
from common.samples import rotated
from common.settings import Positive, Settings

INITIAL_STEPS = 12
SMALLEST_MESSAGE_BYTES = 4096
DEFAULT = DistinctCap(cap_mib=None, num_buckets=0)
"""DDP's own caps: 1 MiB for the first bucket, then 25."""
PREDICTION_COLUMNS = ("bucket_cap_mib", "predicted_ms", "low_ms", "high_ms", "written_s")
"""Columns of ``predictions.csv``. A cap of NaN is DDP's default; 90 % of the draws lie between low
and high; ``written_s`` is on the clock of the case, like ``began_s`` of caps.csv, when the cap's
first visit began."""
FORWARD_COLUMNS = ("round", "iteration", "rank", "forward_time_ms")
CAP_COLUMNS = (
    "rank",
    "bucket_cap_mib",
    "num_buckets",
    "first_bucket_bytes",
    "last_bucket_bytes",
    "began_s",
)


@dataclass(frozen=True, kw_only=True)
class RoundSettings(Settings):
    """Settings by which a job's cases are calibrated and judged."""

    judged: Annotated[int, Positive] = 3
    """Distinct bucketings to judge, beside DDP's default."""
    max_buckets: int = 48
    """Most buckets of a bucketing; caps that lead to more are left out."""
    sizes: Annotated[int, Positive] = 7
    """Message sizes of the all-reduce curve."""
    steps: Annotated[int, Positive] = 3
    """Measured steps of each visit: few, as visits differ by more than the steps of one."""
    probes: Annotated[int, Positive] = 3
    """Measured repetitions of all-reduces and watched passes in each round."""
    warmup_steps: int = 3
    calibration_rounds: Annotated[int, Positive] = 6
    rounds: Annotated[int, Positive] = 8
    max_rounds: Annotated[int, Positive] = 80
    noise: float = 0.01
    """Rounds go on after ``rounds`` while the standard error of a judged median is above this."""
    budget_s: Annotated[float, Positive] = 90.0
    """Time after which no further round may end; the first two rounds are always run."""
    output_dir: str = "outputs/studies"
    run_id: str = ""
    """Beginning of the run directories' names; each ends with the name of its network."""


class CaseRounds:
    """The arms of one case, a model on a network, and the tables they are written to.

    Args:
        connect: puts the case's network between the ranks; all ranks call it before each round.
        lab: the model beside all-reduces.
        hook: delays each bucket by ``latency_s``.
        contention: measure what computation and all-reduces take from each other.
    """

    def __init__(
        self,
        settings: RoundSettings,
        connect: Callable[[], None],
        lab: OverlapLab,
        recorder: Recorder,
        *,
        hook: LatencyHook | None = None,
        latency_s: float = 0.0,
        contention: bool = True,
    ) -> None:
        self.latency_s, self.started = latency_s, time.monotonic()
        self.case, self.connect, self.contention = settings, connect, contention
        self.lab, self.step, self.worker, self.hook = lab, lab.step, lab.worker, hook
        stream = recorder.stream
        self.ready = stream("gradient-ready-times.csv", READY_COLUMNS)
        self.local = stream("local-times.csv", LOCAL_COLUMNS)
        self.witness = stream("witness-times.csv", LOCAL_COLUMNS)
        self.forward = stream("forward-times.csv", FORWARD_COLUMNS)
        self.all_reduce = stream("allreduce-samples.csv", ALL_REDUCE_COLUMNS)
        self.overlap = stream("overlap-times.csv", OVERLAP_TIME_COLUMNS)
        self.ddp = stream("ddp-times.csv", STEP_COLUMNS)
        self.caps_table = stream("caps.csv", CAP_COLUMNS)
        self.recorder = recorder
        self.passes = 0

    @cached_property
    def caps(self) -> tuple[DistinctCap, ...]:
        """Returns the caps to judge, each of which makes other buckets, and DDP's default.

        Buckets are those of rank 0's order of gradients, which is the one that DDP uses. The
        default is left out where it makes the same buckets as one of the caps.
        """
        sizes = [p.numel() * p.element_size() for p in self.lab.ready_order]
        chosen = choose_caps(sizes, self.case.judged, self.case.max_buckets)
        default = assign_buckets(sizes, DdpOptions().limits_bytes())
        bucketings = [
            assign_buckets(sizes, DdpOptions(cap.cap_mib).limits_bytes()) for cap in chosen
        ]
        if default not in bucketings:
            chosen = (*chosen, DEFAULT)
        return self.worker.broadcast(chosen)

    @cached_property
    def message_sizes(self) -> list[int]:
        """Returns the message sizes of the all-reduce curve, in elements of float32.

        They grow by a constant factor, from the smallest message to all gradients at once.
        """
        total = self.lab.gradient_bytes
        sizes = np.geomspace(SMALLEST_MESSAGE_BYTES, total, self.case.sizes)
        return sorted({max(1, int(size) // 4) for size in sizes})

    def calibrate(self, round_: int) -> None:
        """Measures every input of the predictions once, on the case's network."""
        self.connect()
        self.recorder.witness("calibration", round_)
        arms = ("local", *self.between, "watch", "curve", "forward")
        for arm in rotated(arms, round_):
            self._visit(arm, round_)

    def predict(self) -> None:
        """Writes the predictions of all judged bucketings; none has been measured yet."""
        caps = [arm.cap_mib for arm in self.caps]
        run = self.recorder.run
        if run is None:
            return
        samples = self.all_reduce.table()
        one_by_one, several = (
            AllReduceSamples.of(samples[samples["mode"] == mode])
            for mode in ("sequential", "in_flight")
        )
        calibration = Calibration(
            ready=ReadySamples.of(self.ready.table()),
            all_reduce=one_by_one,
            crowded=several,
            overlap=OverlapSamples.of(self.overlap.table(), self.worker.backend),
            backend=self.worker.backend,
            added_latency_s=self.latency_s,
        )
        table = prediction_bands(calibration, caps).table
        table = table.assign(written_s=time.monotonic() - self.started)
        run.write_table("predictions.csv", table[list(PREDICTION_COLUMNS)])

    def judge(self, round_: int) -> None:
        """Visits every judged bucketing once, and the step without DDP, on the case's network."""
        self.connect()
        self.recorder.witness("bucketings", round_)
        for arm in rotated(("witness", *self.caps), round_):
            self._visit(arm, round_)

    @cached_property
    def between(self) -> tuple[OverlapArm, ...]:
        """Returns the arms that measure DDP's bookkeeping and contention."""
        return tuple(arm for arm in self.lab.arms() if self.contention or not arm.messages)

    def is_precise_enough(self) -> bool:
        """Returns True on rank 0 if no standard error of a judged median exceeds the target.

        The target is the setting ``noise``, a fraction of the median. Only rank 0 has the table;
        the other ranks return False.
        """
        if not self.worker.is_main:
            return False
        table = self.ddp.table()
        caps = pd.to_numeric(table["bucket_cap_mib"], errors="coerce")  # NaN is DDP's default
        table = table.assign(bucket_cap_mib=caps)
        return (
            BucketSweep(slowest_steps(table), self.worker.world_size).standard_errors().max()
            <= self.case.noise
        )

    def _visit(self, arm: OverlapArm | DistinctCap | str, round_: int) -> None:
        if isinstance(arm, OverlapArm):
            self._beside(arm, round_)
        elif isinstance(arm, DistinctCap):
            self._ddp(arm, round_)
        elif arm in ("local", "witness"):
            rows = [
                timed_step(self.step, self.step.forward_model, i)
                for i in range(-2, self.case.steps)
            ]
            stream = self.local if arm == "local" else self.witness
            stream.write([{"round": round_} | row for row in rows if row["iteration"] >= 0])
        elif arm == "watch":
            self._watch()
        elif arm == "forward":
            self._forward(round_)
        else:
            self._curve(round_)

    def _curve(self, round_: int) -> None:
        """Times all-reduces of every size one by one; all but the largest also in flight."""
        for numel in rotated(self.message_sizes, round_):
            together = crowd(4 * numel, self.lab.gradient_bytes)
            rows = time_all_reduces(
                numel,
                torch.float32,
                self.worker,
                round_,
                TimedCalls(
                    alone=self.case.probes,
                    in_flight=together,
                    batches=self.case.probes if together > 1 else 0,
                ),
            )
            self.all_reduce.write(rows)

    def _beside(self, arm: OverlapArm, round_: int) -> None:
        passes = self.case.probes if arm.messages else self.case.steps
        self.overlap.write(self.lab.visit(arm, round_, passes=passes))

    def _watch(self) -> None:
        passes = passes_without_ddp(
            self.step, warmup=1, passes=self.case.probes, barrier_before="backward"
        )
        for iteration, watched in passes:
            if iteration >= 0:
                self.ready.write(ready_rows(self.step.model, watched.ready_s, self.passes))
                self.passes += 1

    @property
    def benchmark(self) -> DdpBenchmark:
        """Returns the settings by which each fresh DDP instance is visited."""
        return DdpBenchmark(warmup_steps=self.case.warmup_steps, num_steps=self.case.steps)

    def _forward(self, round_: int) -> None:
        ddp = wrapped(self.benchmark, self.step, None, init_sync=False)
        passes = forward_passes(ddp, self.step, warmup=2, passes=self.case.steps)
        for iteration, forward_s in passes:
            row = {"round": round_, "iteration": iteration, "forward_time_ms": forward_s * 1e3}
            self.forward.write([row])
        del ddp
        gc.collect()

    def _ddp(self, arm: DistinctCap, round_: int) -> None:
        began = time.monotonic()
        rows, records = visit(
            settings=self.benchmark,
            step=self.step,
            cap_mib=arm.cap_mib,
            hook=self.hook,
            init_sync=False,
        )
        gc.collect()  # the DDP instance of this visit, its hooks and its buckets
        described = describe_buckets(records[-1], self.step)
        sizes = bucket_columns(described)
        keys = {"bucket_cap_mib": cap_label(arm.cap_mib), "round": round_}
        self.ddp.write([keys | sizes | row for row in rows if row["iteration"] >= 0])
        if round_ == 0:
            first = {"bucket_cap_mib": arm.cap_mib, "began_s": began - self.started}
            self.caps_table.write([first | sizes])


def computation_s(step: FixedBatchStep, worker: Worker) -> float:
    """Returns the median time of a backward pass without DDP, in seconds; it also warms up."""
    rows = [timed_step(step, step.forward_model, index) for index in range(INITIAL_STEPS)]
    times_ms = [row["backward_time_ms"] for row in rows[INITIAL_STEPS // 3 :]]
    gc.collect()
    gc.freeze()  # a collection after every visit then takes hardly any time
    # A step takes as long as its slowest rank: first the maximum over ranks, then the median.
    return float(np.median(np.max(worker.gather(times_ms), axis=0))) / 1e3


def take_turns(settings: RoundSettings, cases: list[CaseRounds], worker: Worker) -> None:
    """Calibrates and predicts all cases, then judges them until each is known well enough."""
    progress = Progress(settings.calibration_rounds + settings.max_rounds, worker.is_main)
    started = time.monotonic()
    for round_ in range(settings.calibration_rounds):
        for case in rotated(cases, round_):
            case.calibrate(round_)
        progress.step(f"calibration, round {round_ + 1} of {len(cases)} cases")
    for case in cases:
        case.predict()
    judging = time.monotonic()
    for round_ in range(settings.max_rounds):
        for case in rotated(cases, round_):
            case.judge(round_)
        progress.step(f"round {round_ + 1} of {len(cases)} cases")
        if round_ == 0:
            continue  # one round does not show the noise
        now = time.monotonic()
        # The moment at which a further round would end, if it took as long as the mean so far.
        next_s = now - started + (now - judging) / (round_ + 1)
        if worker.broadcast(next_s) > settings.budget_s:
            break
        if round_ + 1 >= settings.rounds:
            settled = worker.broadcast([case.is_precise_enough() for case in cases])
            cases = [case for case, enough in zip(cases, settled, strict=True) if not enough]
            if not cases:
                break
