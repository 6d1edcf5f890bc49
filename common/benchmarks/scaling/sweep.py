"""Every number of ranks up to the job's own, in one job: speedups from runs side by side.

A world size of n is a process group of the first n ranks; the others wait. All arms are visited in
rotated rounds, each visit with a fresh DDP instance, so that drift of the machine and luck of one
instance favour none. An arm is visited plain (DDP as it is: its step time is the one that counts)
and timed (what the step is made of).

Strong: the global batch stays, and each rank's share of it shrinks. Weak: each rank's batch stays.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import pandas as pd
import torch.distributed as dist
from torch import nn

from common.analysis.sweep_speedups import step_times_by_round
from common.benchmarks.scaling.workloads import Workload
from common.errors import UserError
from common.runtime.group.process_group import Worker
from common.runtime.progress import Progress
from common.runtime.records.recorder import Recorder
from common.settings import RoundOptions, Settings
from common.training.scaling.data_parallel_step import (
    Batch,
    DataParallelStep,
    StepOptions,
    StepTimes,
)
from common.training.scaling.log import ScalingLog, StepKey, single_arm
from common.training.scaling.probes import Probed, ProbePlan, probe

logger = logging.getLogger(__name__)
WARMUP_STEPS = 1
"""Warm-up steps of a visit, after DDP's buckets have settled."""
MOST_STEPS = 8
"""Upper bound on the multiplier of steps in the visit of a small arm (``Arm.steps_factor``)."""
TIMED_SHARE = 0.5
"""Share of a visit's steps that a timed visit makes."""


@dataclass(frozen=True)
class Arm:
    """One condition: so many ranks, a micro-batch per rank, and how a step is made.

    ``change`` is what was changed on one rank and on all alike, ``none`` without a change.
    """

    regime: str
    world_size: int
    batch_per_rank: int
    options: StepOptions
    change: str = "none"

    def steps_factor(self, arms: Sequence[Arm]) -> int:
        """Returns the multiplier of steps in this arm's visits, between 1 and MOST_STEPS.

        It is the largest global batch of ``arms`` over this arm's: a smaller batch takes less time,
        so more steps of it are measured.
        """
        most = max(arm.global_batch for arm in arms)
        return min(MOST_STEPS, max(1, most // self.global_batch))

    @property
    def global_batch(self) -> int:
        """Returns the samples of a step on all ranks."""
        return self.world_size * self.options.accumulation * self.batch_per_rank

    def row(self, index: int) -> dict:
        """Returns this arm as a row of ``arms.csv``."""
        row = single_arm(
            ranks=self.world_size,
            batch_size=self.batch_per_rank,
            options=self.options,
            regime=self.regime,
            change=self.change,
        )
        return row | {"arm": index}


@dataclass(frozen=True)
class SweepPlan(Settings):
    """The arms and visits of a sweep; ``batch_sizes`` are those per rank on the most ranks."""

    world_sizes: tuple[int, ...]
    regimes: tuple[str, ...]
    batch_sizes: tuple[int, ...]
    options: StepOptions
    rounds: RoundOptions
    steps_per_visit: int
    kinds: tuple[str, ...] = ("plain", "timed")

    def __post_init__(self) -> None:
        super().__post_init__()
        if len(self.world_sizes) < 2:
            raise UserError(
                f"--sweep with world size {self.world_sizes[0]} only: no speedup can be computed; "
                "start the job on 2 ranks or more, or give two --world_sizes"
            )

    def arms(self) -> list[Arm]:
        """Returns all arms, weak ones first.

        A strong arm whose ranks could not share the global batch evenly is left out.
        """
        most, arms = max(self.world_sizes), []
        for batch in self.batch_sizes:
            if "weak" in self.regimes:
                arms += [Arm("weak", size, batch, self.options) for size in self.world_sizes]
            if "strong" in self.regimes:
                for size in self.world_sizes:
                    if batch * most % size:
                        logger.warning(
                            f"strong scaling on {size} ranks is left out: they cannot share a "
                            f"global batch of {batch * most} evenly"
                        )
                        continue
                    arms.append(Arm("strong", size, batch * most // size, self.options))
        return arms


def sweep(plan: SweepPlan, workload: Workload, recorder: Recorder) -> None:
    """Visits the arms of a plan, and probes what they are made of."""
    visit_arms(
        plan.arms(),
        workload,
        recorder,
        rounds=plan.rounds,
        steps=plan.steps_per_visit,
        kinds=plan.kinds,
    )
    batch_size = max(plan.batch_sizes)
    model, formats = workload.build(batch_size), ("none", "fp16", "bf16")
    probe_workload(workload, model, batch_size, plan.options, recorder, ProbePlan(formats=formats))


def visit_arms(
    arms: Sequence[Arm],
    workload: Workload,
    recorder: Recorder,
    rounds: RoundOptions,
    steps: int,
    kinds: tuple[str, ...] = ("plain", "timed"),
) -> None:
    """Visits all arms in rotated rounds, in each of ``kinds``; all ranks call it."""
    worker = recorder.worker
    log = ScalingLog(worker, recorder, [arm.row(index) for index, arm in enumerate(arms)])
    groups = {size: dist.new_group(range(size)) for size in sorted({a.world_size for a in arms})}
    describe(max(arms, key=lambda arm: arm.world_size), workload, log)
    visits = tuple(
        (index, kind)
        for index, arm in enumerate(arms)
        for kind in (kinds if arm.world_size > 1 else kinds[-1:])
    )
    progress, rows = Progress(rounds.rounds * len(visits), worker.is_main), []
    visited = recorder.rounds(
        visits,
        rounds,
        stage="arms",
        times=lambda: step_times_by_round(pd.DataFrame(rows)),
        progress=progress,
    )
    for round_, (index, kind) in visited:
        arm = arms[index]
        if worker.rank < arm.world_size:
            step = open_step(arm, workload, worker, groups[arm.world_size], kind == "timed")
            halved = kind == "timed" and arm.world_size > 1
            count = max(2, round(TIMED_SHARE * steps)) if halved else steps * arm.steps_factor(arms)
            counted = kind == kinds[0] or arm.world_size == 1
            _visit(step, workload, log, Visit(index, kind, round_, count, counted))
        worker.barrier()
        rows += log.write()
        if kind == kinds[0] or arm.world_size == 1:
            log.end_epoch(round_, arm=index)
        progress.step(f"round {round_ + 1}, {arm.world_size} ranks, {arm.regime} scaling")


@dataclass(frozen=True)
class Visit:
    """One stay at an arm: its place in the table, and how many steps are measured."""

    arm: int
    kind: str
    round_: int
    steps: int
    counted: bool
    """True if its samples count as those of the arm's epoch."""


def open_step(
    arm: Arm, workload: Workload, worker: Worker, group: dist.ProcessGroup | None, timed: bool
) -> DataParallelStep:
    """Makes the step of an arm, with a model and a DDP instance of its own."""
    model = workload.build(arm.batch_per_rank)
    return DataParallelStep(
        model=model,
        optimizer=workload.make_optimizer(model.parameters()),
        loss_of=workload.loss_of,
        worker=worker,
        options=arm.options,
        group=group,
        timed=timed,
    )


def _visit(step: DataParallelStep, workload: Workload, log: ScalingLog, visit: Visit) -> None:
    """Warms up and makes the steps of a visit; batches are made before each step."""
    size = log.arms[visit.arm]["batch_per_rank"]
    log.pause()
    settle(step, workload, visit.round_)
    for index in range(WARMUP_STEPS + visit.steps):
        warmup = index < WARMUP_STEPS
        key = StepKey(step=index, arm=visit.arm, kind=visit.kind, round=visit.round_, warmup=warmup)
        times, used = run_step(step, workload, size, visit.round_ * 1000 + index)
        log.pause()
        log.add(times, used, key, counted=not warmup and visit.counted)
    step.close()


def settle(step: DataParallelStep, workload: Workload, draw: int = 0) -> None:
    """Lets DDP's buckets settle, on a batch of one sample; ``draw`` tells batches apart."""
    batch = workload.make_batch(1, draw, step.worker.rank, step.ranks)
    step.settle(lambda: batch)


def micro_batches(
    step: DataParallelStep, workload: Workload, batch_size: int, index: int
) -> Iterator[Batch]:
    """Makes the micro-batches of a step with this index, all of them before it begins."""
    passes = step.options.accumulation
    return iter(
        [
            workload.make_batch(batch_size, micro, step.worker.rank, step.ranks)
            for micro in range(index * passes, (index + 1) * passes)
        ]
    )


def run_step(
    step: DataParallelStep, workload: Workload, batch_size: int, index: int
) -> tuple[StepTimes, list[Batch]]:
    """Runs the step with this index, which its ranks begin together."""
    batches = micro_batches(step, workload, batch_size, index)
    step.worker.barrier(step.group)  # no rank's step holds the making of another's data
    return step.run(batches.__next__)


def describe(arm: Arm, workload: Workload, log: ScalingLog) -> None:
    """Writes the facts of what runs (``facts.csv``), from one pass on all ranks."""
    step = open_step(arm, workload, log.worker, None, timed=False)
    # A static graph must not begin with a pass that exchanges nothing, as accumulation has.
    settle(step, workload)
    batch = workload.make_batch(arm.batch_per_rank, 0, log.worker.rank, step.ranks)
    step.run(lambda: batch)
    log.facts(step, batch, model=workload.model, data=workload.data, longest=workload.longest)
    step.close()


def probe_workload(
    workload: Workload,
    model: nn.Module,
    batch_size: int,
    options: StepOptions,
    recorder: Recorder,
    plan: ProbePlan,
) -> None:
    """Probes the job's ranks at a batch per rank; all ranks call it."""
    worker = recorder.worker
    probed = Probed(
        model=model,
        make_optimizer=workload.make_optimizer,
        loss_of=workload.loss_of,
        make_batch=lambda size: workload.make_batch(size, 0, worker.rank, worker.world_size),
        batch_size=batch_size,
        options=options,
    )
    probe(probed, worker, recorder, plan)
