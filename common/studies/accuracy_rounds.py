"""The arms of one case of the accuracy study, and the tables they are written to.

A case is a model on a network. Its arms: the step without DDP, every judged bucketing in a fresh
DDP instance, DDP's bookkeeping, all-reduces beside the backward pass and by themselves, and a
backward pass whose gradients are watched.
"""

from __future__ import annotations

import gc
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np
import torch

from common.analysis.sweep import BucketSweep, slowest_steps
from common.benchmarks.calibration import crowd, forward_passes, passes_without_ddp
from common.benchmarks.ddp import (
    LOCAL_COLUMNS,
    STEP_COLUMNS,
    DdpBenchmark,
    timed_step,
    visit,
    wrapped,
)
from common.benchmarks.ddp_record import describe_buckets
from common.benchmarks.latency_hook import LatencyHook
from common.benchmarks.overlap_lab import OVERLAP_TIME_COLUMNS, OverlapArm, OverlapLab
from common.benchmarks.rounds import rotated
from common.cluster.links import limit_own_link
from common.perfmodel.buckets import cap_label
from common.perfmodel.distinct_caps import DistinctCap, choose_caps
from common.runtime.collective_timing import ALL_REDUCE_COLUMNS, time_all_reduces
from common.runtime.gradient_marks import READY_COLUMNS, ready_rows
from common.runtime.recorder import Recorder

if TYPE_CHECKING:
    from common.studies.accuracy_ranks import JobSettings

SMALLEST_MESSAGE_BYTES = 4096
CALIBRATION_EVERY = 3
"""Rounds; what enters a prediction in part only need not be known as well as what is judged."""
FORWARD_COLUMNS = ("round", "iteration", "rank", "forward_time_ms")
CAP_COLUMNS = (
    "rank",
    "bucket_cap_mib",
    "num_buckets",
    "first_bucket_bytes",
    "last_bucket_bytes",
)


class CaseRounds:
    """The arms of one case, a model on a network, and the tables they are written to."""

    def __init__(
        self,
        settings: JobSettings,
        rate_mbit: float,
        lab: OverlapLab,
        recorder: Recorder,
        hook: LatencyHook | None,
    ) -> None:
        self.case, self.rate_mbit = settings, rate_mbit
        self.lab, self.step, self.worker, self.hook = lab, lab.step, lab.worker, hook
        stream = recorder.stream
        self.ready = stream("gradient-ready-times.csv", READY_COLUMNS)
        self.local = stream("local-times.csv", LOCAL_COLUMNS)
        self.forward = stream("forward-times.csv", FORWARD_COLUMNS)
        self.all_reduce = stream("allreduce-samples.csv", ALL_REDUCE_COLUMNS)
        self.overlap = stream("overlap-times.csv", OVERLAP_TIME_COLUMNS)
        self.ddp = stream("ddp-times.csv", STEP_COLUMNS)
        self.caps_table = stream("caps.csv", CAP_COLUMNS)
        self.passes = 0

    @cached_property
    def caps(self) -> tuple[DistinctCap, ...]:
        """The distinct bucketings of rank 0's order of gradients, which is the one DDP uses."""
        sizes = [p.numel() * p.element_size() for p in self.lab.ready_order]
        chosen = choose_caps(sizes, self.case.judged, self.case.max_buckets)
        return self.worker.broadcast(chosen)

    @cached_property
    def message_sizes(self) -> list[int]:
        """Elements of the all-reduce curve's points: from the smallest message to all gradients."""
        total = self.lab.gradient_bytes
        sizes = np.geomspace(SMALLEST_MESSAGE_BYTES, total, self.case.sizes)
        return sorted({max(1, int(size) // 4) for size in sizes})

    def visit_round(self, round_: int) -> None:
        """All arms once, on the case's network."""
        if self.rate_mbit:
            self.worker.barrier()
            limit_own_link(self.rate_mbit * 1e6)
            self.worker.barrier()
        arms = ("local", *self.caps, "curve")
        if round_ % CALIBRATION_EVERY == 0:
            arms = (*arms, *self.between, "watch", "forward")
        for arm in rotated(arms, round_):
            self._visit(arm, round_)

    @cached_property
    def between(self) -> tuple[OverlapArm, ...]:
        """What DDP adds to the pass. A replay's sleep takes as long whatever runs beside it."""
        arms = self.lab.plan()
        alone = self.case.model == "replay"
        return tuple(arm for arm in arms if not (alone and arm.messages))

    def known(self) -> bool:
        """Whether the judged bucketings are known well enough; rank 0's table tells."""
        return self.worker.is_main and noise_floor(self.ddp.table()) <= self.case.noise

    def _visit(self, arm: OverlapArm | DistinctCap | str, round_: int) -> None:
        if isinstance(arm, OverlapArm):
            self._beside(arm, round_)
        elif isinstance(arm, DistinctCap):
            self._ddp(arm, round_)
        elif arm == "local":
            count = self.case.steps
            rows = [
                timed_step(self.step, self.step.forward_model, self.worker, i)
                for i in range(-2, count)
            ]
            self.local.write([{"round": round_} | row for row in rows if row["iteration"] >= 0])
        elif arm == "watch":
            self._watch()
        elif arm == "forward":
            self._forward(round_)
        else:
            self._curve(round_)

    def _curve(self, round_: int) -> None:
        """Times all-reduces of every size; of all but the largest several at once, too."""
        for numel in rotated(self.message_sizes, round_):
            together = crowd(4 * numel, self.lab.gradient_bytes)
            rows = time_all_reduces(
                numel,
                torch.float32,
                self.worker,
                round_,
                calls=self.case.probes,
                in_flight=together,
                batches=self.case.probes if together > 1 else 0,
            )
            self.all_reduce.write(rows)

    def _beside(self, arm: OverlapArm, round_: int) -> None:
        passes = self.case.probes if arm.messages else self.case.steps
        self.overlap.write(self.lab.visit(arm, round_, passes=passes))

    def _watch(self) -> None:
        passes = passes_without_ddp(
            self.step,
            self.worker,
            warmup=1,
            passes=self.case.probes,
            barrier_before="backward",
        )
        for iteration, watched in passes:
            if iteration >= 0:
                self.ready.write(ready_rows(self.step.model, watched.ready_s, self.passes))
                self.passes += 1

    @property
    def benchmark(self) -> DdpBenchmark:
        """How each fresh DDP instance is visited."""
        return DdpBenchmark(warmup_steps=self.case.warmup_steps, num_steps=self.case.steps)

    def _forward(self, round_: int) -> None:
        ddp = wrapped(self.benchmark, self.step, self.worker, None, init_sync=False)
        passes = forward_passes(ddp, self.step, self.worker, warmup=2, passes=self.case.steps)
        for iteration, forward_s in passes:
            row = {"round": round_, "iteration": iteration, "forward_time_ms": forward_s * 1e3}
            self.forward.write([row])
        del ddp
        gc.collect()

    def _ddp(self, arm: DistinctCap, round_: int) -> None:
        rows, records = visit(
            *(self.benchmark, self.step, self.worker, arm.cap_mib, self.hook), init_sync=False
        )
        gc.collect()  # the DDP instance of this visit, its hooks and its buckets
        described = describe_buckets(records[-1], self.step)
        sizes = {
            "num_buckets": len(described),
            "first_bucket_bytes": described[0]["size_bytes"],
            "last_bucket_bytes": described[-1]["size_bytes"],
        }
        keys = {"bucket_cap_mib": cap_label(arm.cap_mib), "round": round_}
        self.ddp.write([keys | sizes | row for row in rows if row["iteration"] >= 0])
        if round_ == 0:
            self.caps_table.write([{"bucket_cap_mib": arm.cap_mib} | sizes])


def noise_floor(table) -> float:
    """Noise floor of the judged bucketings' backward times: two halves of the rounds."""
    table = table.assign(bucket_cap_mib=table["bucket_cap_mib"].astype(float))
    return BucketSweep(slowest_steps(table), 2).noise_floor()
