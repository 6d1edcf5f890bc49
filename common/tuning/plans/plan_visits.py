"""Visits of plans in rotated rounds: each visit a fresh instance, with a few steps of it timed."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Sequence

import pandas as pd
import torch

from common.planning.space import Plan
from common.runtime.group.process_group import Worker
from common.runtime.progress import Progress
from common.runtime.records.recorder import RankStream, Recorder
from common.samples import per_round
from common.tuning.plans.planned_step import PlannedStep, close_ddp, drop_unused
from common.tuning.plans.sized_model import SizedModel
from common.tuning.visits import WARMUP_STEPS

STEPS = 3
"""Steps of a visit after those that warm up."""
FIRST = 1
"""First round whose times are judged: in round 0 peaks are measured, and nothing is warm yet."""
VISIT_COLUMNS = ("plan", "round", "iteration", "rank", "step_time_ms")
PEAK_COLUMNS = ("plan", "rank", "peak_bytes")


class PlanVisits:
    """Visits plans, all ranks together; every rank knows times and peaks of all.

    Args:
        ranks_per_node: for HYBRID_SHARD.
        name: what its two tables are called: ``plan`` for plan-visits.csv and plan-peaks.csv.
        progress: counts the visits.

    Attributes:
        died: plan → why it did not end. It is not visited again; ranks do equal work, so all of
            them have it here.
    """

    def __init__(
        self,
        model: SizedModel,
        recorder: Recorder,
        ranks_per_node: int,
        name: str,
        progress: Progress | None = None,
    ) -> None:
        self.model, self.recorder, self.ranks_per_node = model, recorder, ranks_per_node
        self.worker, self.progress = recorder.worker, progress
        self.streams = (
            recorder.stream(f"{name}-visits.csv", VISIT_COLUMNS),
            recorder.stream(f"{name}-peaks.csv", PEAK_COLUMNS),
        )
        self.died: dict[Plan, str] = {}
        self._spent_s: dict[Plan, list[float]] = defaultdict(list)

    def rounds(
        self, stage: str, plans: Sequence[Plan], rounds: int, first: int = 0
    ) -> pd.DataFrame:
        """Visits plans; returns the seconds of a step: a row per round so far, a column per plan.

        A plan that died has no column. ``first`` is the number of the first round; in round 0 the
        peak of a step is measured, too.
        """
        for round_, plan in self.recorder.rounds(plans, first + rounds, stage=stage, first=first):
            began = time.perf_counter()
            if plan not in self.died:
                streams, per_node = self.streams, self.ranks_per_node
                if why := visit(self.model, plan, round_, self.worker, streams, per_node):
                    self.died[plan] = why
            if round_:
                self._spent_s[plan].append(time.perf_counter() - began)
            if self.progress:
                self.progress.step(f"{stage}, round {round_ + 1}, {plan.name}")
        visits = self.worker.broadcast(self.streams[0].table())
        if visits.empty:
            return pd.DataFrame()
        times = per_round(visits, "step_time_ms", "plan") / 1e3
        return times.drop(columns=[plan.name for plan in self.died], errors="ignore")

    def peaks(self) -> dict[str, int]:
        """Returns the largest peak of a rank in bytes, by a plan's name."""
        table = self.worker.broadcast(self.streams[1].table())
        return {} if table.empty else table.groupby("plan")["peak_bytes"].max().to_dict()

    def visit_s(self, plan: Plan) -> float:
        """Returns the mean seconds of a plan's visits but the first; the same on every rank."""
        spent = self._spent_s[plan]
        return self.worker.broadcast(sum(spent) / max(len(spent), 1))


def visit(
    model: SizedModel,
    plan: Plan,
    round_: int,
    worker: Worker,
    streams: tuple[RankStream, RankStream],
    ranks_per_node: int,
) -> str:
    """Runs the steps of one fresh instance; returns why it could not, the same on every rank.

    Args:
        round_: the round; in round 0 the peak of a step is measured, too.
        streams: tables of VISIT_COLUMNS and PEAK_COLUMNS that rows are added to.
        ranks_per_node: ranks of a node, for HYBRID_SHARD.
    """
    visits, peaks = streams
    rows, sizes, died = [], [], ""
    try:
        user = model.make(plan.micro_batch, worker.device)
        step = PlannedStep(user, plan, worker, ranks_per_node=ranks_per_node)
        times = [step.timed_s() for _ in range(WARMUP_STEPS + STEPS)][WARMUP_STEPS:]
        rows = [{"iteration": i, "step_time_ms": s * 1e3} for i, s in enumerate(times)]
        sizes = [{"peak_bytes": step.peak_bytes()}] if round_ == 0 else []
        close_ddp(step.model)
    except torch.OutOfMemoryError:
        died = "ran out of memory"
    step = user = None
    drop_unused(worker)
    died = next((why for why in worker.gather(died) if why), "")
    keys = {"plan": plan.name, "round": round_}
    visits.write([keys | row for row in rows if not died])
    peaks.write([{"plan": plan.name} | row for row in sizes if not died])
    return died
