"""Trains a model by the lines of Python that its plan prints."""

from __future__ import annotations

import torch

from common.errors import UserError
from common.planning.code import step_lines, wrapping_lines
from common.planning.space import SINGLE, Plan, Question
from common.runtime.records.recorder import Recorder
from common.runtime.timing import clock_for
from common.runtime.wording import counted, digits
from common.samples import slowest_rank
from common.tuning.plans.planned_step import close_ddp
from common.tuning.plans.planner import Planned
from common.tuning.plans.sized_model import SizedModel

LEARNING_RATE = 3e-4
TRAINING_COLUMNS = ("iteration", "rank", "loss", "step_time_ms")
"""``plan-training.csv``: a row per rank and step, with the loss of its last micro-batch."""


def train_as_planned(
    model: SizedModel,
    question: Question,
    planned: Planned | None,
    steps: int,
    recorder: Recorder,
) -> None:
    """Trains on one global batch, of which every rank and micro-batch has samples of its own.

    All ranks call it together; rank 0 prints a line. Ranks that a plan leaves idle do nothing.

    Args:
        planned: the answer, on rank 0.
        steps: number of optimizer steps.

    Raises UserError where no plan fits.
    """
    worker = recorder.worker
    best = worker.broadcast(planned.best if planned else None)
    if best is None:
        raise UserError("nothing fits, so nothing is trained")
    is_idle = best.plan.strategy == SINGLE and not worker.is_main
    rows = [] if is_idle else _trained(model, question, best.plan, steps, recorder)
    table = recorder.stream("plan-training.csv", TRAINING_COLUMNS)
    table.write(rows)
    if worker.is_main:
        losses = table.table().groupby("iteration")["loss"].mean()
        times_s = slowest_rank(table.table(), "step_time_ms", by=["iteration"]) / 1e3
        print(
            f"Trained for {counted(steps, 'step')} of {best.plan.label}: the loss went from "
            f"{digits(losses.iloc[0])} to {digits(losses.iloc[-1])}; the median step took "
            f"{digits(times_s.median())} s in one instance, planned: {digits(best.time.step_s)} s"
        )


def _trained(
    model: SizedModel, question: Question, plan: Plan, steps: int, recorder: Recorder
) -> list[dict]:
    """Runs the lines; returns this rank's rows of TRAINING_COLUMNS, but for the rank."""
    worker, count = recorder.worker, plan.accumulation
    user = model.make(plan.micro_batch, worker.device)
    draws = range(1 + worker.rank * count, 1 + (worker.rank + 1) * count)
    parts = [model.make(plan.micro_batch, worker.device, draw).batch for draw in draws]
    names = {"torch": torch, "model": user.module.train(), "lr": LEARNING_RATE}
    names |= {"loss_of": user.loss, "micro_batches": parts, "batch": parts[0]}
    names["local_rank"] = worker.device.index
    exec("\n".join(wrapping_lines(question, plan)), names)
    step = compile("\n".join(step_lines(question, plan)), "the plan's step", "exec")
    rows, clock = [], clock_for(worker.device)
    for iteration in range(steps):
        start = clock.mark()
        exec(step, names)
        end = clock.mark()
        clock.wait()
        times = {"step_time_ms": clock.elapsed_s(start, end) * 1e3}
        rows.append({"iteration": iteration, "loss": float(names["loss"].detach())} | times)
    close_ddp(names["model"])
    return rows
