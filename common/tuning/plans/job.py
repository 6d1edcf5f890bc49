"""Plans the training of a model on the ranks of this job, prints the answer, and trains by it."""

from __future__ import annotations

import io
import json
from functools import partial
from pathlib import Path

import torch
from rich.console import Console

from common.errors import UserError
from common.planning.code import step_lines, wrapping_lines
from common.planning.search import named_fields
from common.planning.space import SINGLE, Plan, Question
from common.planning.terminal import WIDTH, print_answer
from common.runtime.group.process_group import process_group
from common.runtime.records.recorder import Recorder, record_run
from common.runtime.records.run_directory import write_atomically
from common.runtime.script import run_script
from common.runtime.wording import counted, digits
from common.samples import slowest_rank
from common.tuning.plans import ANSWER, PRINTED
from common.tuning.plans.plan_settings import PlanSettings
from common.tuning.plans.planned_step import close_ddp, seconds_of
from common.tuning.plans.planner import Planned, plan_model, question_of
from common.tuning.plans.sized_model import SizedModel, of_configuration
from common.tuning.same_graph import together

LEARNING_RATE = 3e-4
TRAINING_COLUMNS = ("iteration", "rank", "loss", "step_time_ms")
"""``plan-training.csv``: a row per rank and step, with the loss of its last micro-batch."""


def main(settings: PlanSettings) -> None:
    """Loads the model on every rank, plans, prints the answer, and trains if asked to."""
    with process_group(settings.device, settings.backend) as worker:
        if worker.device.type == "cpu" and not settings.memory_bytes:
            raise UserError("a CPU has no memory of its own: say how much a rank may take")
        model = together(worker, lambda: _model(settings))
        question = question_of(model, worker, settings)
        with record_run(settings, "plan", worker) as recorder:
            steps = settings.verify, settings.tune_seconds, settings.options
            mine = named_fields(settings.mine)
            planned = plan_model(model, question, recorder, *steps, mine)
            if planned and recorder.run:
                write_answer(planned, recorder.run.path, settings)
            if settings.train_steps:
                train_as_planned(model, question, planned, settings.train_steps, recorder)


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
    rows = []
    for iteration in range(steps):
        seconds = seconds_of(partial(exec, step, names), worker, together=False)
        loss = float(names["loss"].detach())
        rows.append({"iteration": iteration, "loss": loss, "step_time_ms": seconds * 1e3})
    close_ddp(names["model"])
    return rows


def write_answer(planned: Planned, folder: Path, settings: PlanSettings) -> None:
    """Writes the answer to the run's folder and to the files that settings name, and prints it."""
    text = json.dumps(planned.as_json(), indent=1)
    answer = (planned.searched, planned.best, planned.where)
    for path in (folder / ANSWER, *([Path(settings.json)] if settings.json else [])):
        write_atomically(path, f"{text}\n")
    if settings.page:
        from common.analysis.plans.page import page

        html = page(*answer, planned.verified, planned.tuned)
        write_atomically(Path(settings.page), html)
    printed = io.StringIO()
    console = Console(width=WIDTH, file=printed)
    print_answer(*answer, console, planned.verified, planned.tuned)
    write_atomically(folder / PRINTED, printed.getvalue())
    print(printed.getvalue(), end="")


def _model(settings: PlanSettings) -> SizedModel:
    if settings.model:
        return of_configuration(settings.model, settings.seq_len or None, settings.seed)
    return SizedModel.load(settings.function, Path(settings.folder).absolute(), settings.seed)


if __name__ == "__main__":
    run_script(main, PlanSettings)
