"""What ``ddplab study accuracy`` starts on every cluster: one model, all its arms in one rotation.

What a prediction is made of (the step without DDP, the moments of its gradients, all-reduces one
after another and several at once, DDP's bookkeeping, all-reduces beside the backward pass, and one
*calibration* bucketing) and what it is held against (the *judged* bucketings) are visited in the
same rotation, so that a drift of the machine is in both. Each visit to a bucketing makes a new DDP
instance. Rounds go on until the judged bucketings are known to ``noise``, or the time is up.
"""

from __future__ import annotations

import gc
import time
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch

from common.analysis.sweep import BucketSweep, slowest_steps
from common.benchmarks.allreduce import SAMPLE_COLUMNS, rotated
from common.benchmarks.ddp import (
    LOCAL_COLUMNS,
    STEP_COLUMNS,
    DdpBenchmark,
    timed_step,
    visit,
)
from common.benchmarks.ddp_record import describe_buckets
from common.benchmarks.latency_hook import LatencyHook, added_latency
from common.benchmarks.overlap import COLUMNS as OVERLAP_COLUMNS
from common.benchmarks.overlap import Arm, OverlapLab
from common.errors import UserError
from common.perfmodel.buckets import cap_label
from common.perfmodel.distinct_caps import DistinctCap, choose_caps
from common.runtime.collective_timing import time_in_flight, time_sequence
from common.runtime.gradient_marks import READY_COLUMNS, ready_marks, ready_rows
from common.runtime.process_group import Worker, process_group
from common.runtime.progress import Progress
from common.runtime.recorder import Recorder, record_run, require_positive
from common.runtime.script import run_script
from common.runtime.timing import clock_for
from common.studies.accuracy_models import accuracy_step

CAP_COLUMNS = (
    "rank",
    "role",
    "bucket_cap_mib",
    "num_buckets",
    "first_bucket_bytes",
    "last_bucket_bytes",
)
SMALLEST_MESSAGE_BYTES = 4096
INITIAL_STEPS = 8
CONTINUOUS_SHARES = (512, 64, 8)
"""All-reduces beside the backward pass are of these parts of all gradients."""


@dataclass(frozen=True)
class CaseSettings:
    """One model on one network: calibration and judged bucketings in one rotation."""

    model: str = "gpt2-nano"
    batch_size: int = 4
    replay_factor: float = 1.0
    replay_time_factor: float = 1.0
    added_latency_ms: float = 0.0
    judged: int = 4
    """Distinct bucketings to judge; one more calibrates contention."""
    max_buckets: int = 48
    """No bucketing has more: caps below that lead to it are left out."""
    sizes: int = 7
    """Message sizes of the all-reduce curve."""
    steps: int = 5
    """Measured steps of each visit; few, as noise is mostly that of a DDP instance."""
    probes: int = 2
    """Measured repetitions of all-reduces and watched passes in each round."""
    warmup_steps: int = 3
    rounds: int = 8
    max_rounds: int = 60
    noise: float = 0.015
    """Rounds go on after ``rounds`` while the noise of the judged bucketings is above this."""
    budget_s: float = 90.0
    """No further pair of rounds is begun that would end after this time; the first two always."""
    device: str = "cpu"
    output_dir: str = "outputs/studies"
    run_id: str = ""

    def __post_init__(self) -> None:
        require_positive(
            self, "judged", "sizes", "steps", "probes", "rounds", "max_rounds", "budget_s"
        )


def main(case: CaseSettings) -> None:
    """Measure the case."""
    with process_group(case.device, "gloo") as worker:
        if worker.world_size < 2:
            raise UserError("accuracy case on 1 rank: there is nothing to exchange")
        step = accuracy_step(
            *(case.model, case.batch_size, worker), case.replay_factor, case.replay_time_factor
        )
        with (
            added_latency(case.added_latency_ms, worker.device) as hook,
            record_run(
                *(case, "accuracy_case", worker), recorded_settings=step.recorded_settings
            ) as recorder,
        ):
            CaseRounds(case, step, worker, recorder, hook).run()


class CaseRounds:
    """The arms of one case and the tables they are written to."""

    def __init__(
        self, case: CaseSettings, step, worker: Worker, recorder: Recorder, hook: LatencyHook | None
    ) -> None:
        self.case, self.step, self.worker, self.hook = case, step, worker, hook
        self.lab = OverlapLab(step, worker)
        stream = recorder.stream
        self.ready = stream("gradient-ready-times.csv", READY_COLUMNS)
        self.local = stream("local-times.csv", LOCAL_COLUMNS)
        self.all_reduce = stream("allreduce-samples.csv", SAMPLE_COLUMNS)
        self.overlap = stream("overlap-times.csv", OVERLAP_COLUMNS)
        self.ddp = stream("ddp-times.csv", STEP_COLUMNS)
        self.caps_table = stream("caps.csv", CAP_COLUMNS)
        self.passes = 0

    @cached_property
    def caps(self) -> tuple[DistinctCap, ...]:
        """The distinct bucketings of rank 0's order of gradients, which is the one DDP uses."""
        sizes = [p.numel() * p.element_size() for p, _ in self.lab.ready_order]
        chosen = choose_caps(sizes, self.case.judged + 1, self.case.max_buckets)
        return self.worker.broadcast(chosen)

    @cached_property
    def calibration(self) -> DistinctCap:
        """The bucketing in the middle: its all-reduces run both beside computation and after."""
        return self.caps[len(self.caps) // 2]

    @cached_property
    def message_sizes(self) -> list[int]:
        """Elements of the all-reduce curve's points: from the smallest message to all gradients."""
        total = self.lab.gradient_bytes
        sizes = np.geomspace(SMALLEST_MESSAGE_BYTES, total, self.case.sizes)
        return sorted({max(1, int(size) // 4) for size in sizes})

    def run(self) -> None:
        """Visit all arms in rotated rounds until enough is known."""
        for _ in range(INITIAL_STEPS):
            timed_step(self.step, self.step.forward_model, self.worker, 0)
        gc.collect()
        gc.freeze()  # a collection after every visit then takes hardly any time
        between = self.between()
        arms = ("local", *self.caps, *between, "watch", "curve")
        fewer = tuple(arm for arm in arms if not (arm in between and arm.messages))
        progress = Progress(self.case.max_rounds, self.worker.is_main)
        started = time.monotonic()
        for round_ in range(self.case.max_rounds):
            # What all-reduces take from computation enters a prediction in part only: every other
            # pair of rounds is enough.
            for arm in rotated(fewer if round_ % 4 >= 2 else arms, round_):
                self._visit(arm, round_)
            progress.step(f"round {round_ + 1}")
            if self._enough(round_ + 1, time.monotonic() - started):
                break

    def between(self) -> tuple[Arm, ...]:
        """What DDP adds to the pass. A replay's sleep takes as long whatever runs beside it."""
        total = self.lab.gradient_bytes
        arms = self.lab.plan((), [max(4, total // share) for share in CONTINUOUS_SHARES])
        alone = self.case.model == "replay"
        return tuple(arm for arm in arms if not (alone and arm.messages))

    def _enough(self, rounds: int, elapsed_s: float) -> bool:
        done = False
        if self.worker.is_main and rounds % 2 == 0:  # in pairs, as the noise is taken
            noise = judged_noise(self.ddp.table(), self.calibration.cap_mib)
            late = elapsed_s * (rounds + 2) / rounds > self.case.budget_s
            done = late or (rounds >= self.case.rounds and noise <= self.case.noise)
        return self.worker.broadcast(done)

    def _visit(self, arm: Arm | DistinctCap | str, round_: int) -> None:
        if isinstance(arm, Arm):
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
        else:
            self._curve(round_)

    def _curve(self, round_: int) -> None:
        for numel in rotated(tuple(self.message_sizes), round_):
            buffers = [torch.zeros(numel) for _ in range(self._crowd(numel))]
            repetitions = range(1 + self.case.probes)
            alone_s = time_sequence([buffers[0] for _ in repetitions], self.worker)
            together_s = [time_in_flight(buffers, self.worker) for _ in repetitions]
            for mode, in_flight, times_s in (
                ("sequential", 1, alone_s[1:]),
                ("in_flight", len(buffers), together_s[1:]),
            ):
                keys = {"mode": mode, "total_elements": numel, "total_bytes": 4 * numel}
                keys |= {"in_flight": in_flight, "round": round_}
                self.all_reduce.write(
                    [
                        keys | {"iteration": iteration, "time_ms": time_s / in_flight * 1e3}
                        for iteration, time_s in enumerate(times_s)
                    ]
                )

    def _crowd(self, numel: int) -> int:
        """How many messages of a size to launch at once: fewer where each takes long."""
        return 4 if 4 * numel * 4 <= self.lab.gradient_bytes else 2

    def _beside(self, arm: Arm, round_: int) -> None:
        warmup = 3 if arm.kind == "bookkeeping" else 1
        count = self.case.probes if arm.messages else self.case.steps
        passes = self.lab.run(arm, warmup + count)[warmup:]
        self.overlap.write(self.lab.rows(arm, round_, passes))

    def _watch(self) -> None:
        clock = clock_for(self.worker.device)
        with ready_marks(self.step.model, clock) as marks:
            for iteration in range(-1, self.case.probes):
                self.step.zero_grad()
                loss = self.step.forward()
                clock.wait()
                self.worker.barrier()
                marks.clear()
                start = clock.mark()
                loss.backward()
                clock.wait()
                if iteration >= 0:
                    at = {name: clock.elapsed_s(start, mark) for name, mark in marks.items()}
                    self.ready.write(ready_rows(self.step.model, at, self.passes))
                    self.passes += 1

    def _ddp(self, arm: DistinctCap, round_: int) -> None:
        settings = DdpBenchmark(
            bucket_cap_mb=(cap_label(arm.cap_mib),),
            warmup_steps=self.case.warmup_steps,
            num_steps=self.case.steps,
        )
        rows, records = visit(settings, self.step, self.worker, arm.cap_mib, self.hook)
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
            role = "calibration" if arm == self.calibration else "judged"
            self.caps_table.write([{"role": role, "bucket_cap_mib": arm.cap_mib} | sizes])


def judged_noise(table, calibration_mib: float) -> float:
    """Noise floor of the judged bucketings' backward times: two halves of the rounds."""
    table = table.assign(bucket_cap_mib=table["bucket_cap_mib"].astype(float))
    judged = table[~np.isclose(table["bucket_cap_mib"], calibration_mib)]
    return BucketSweep(slowest_steps(judged), 2).noise_floor()


if __name__ == "__main__":
    run_script(main, CaseSettings)
