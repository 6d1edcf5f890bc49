"""Plans the training of a model on the ranks of this job: it is sized, measured, searched and run.

All ranks call ``plan_model`` together. What is predicted is decided on rank 0, and what is run on
all of them. Memory decides before time: nothing is measured where nothing fits.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace

import pandas as pd
import psutil
import torch

from common.planning.answer import VerifiedPlan, as_json, plan_to_take
from common.planning.measured_times import Inputs, MeasuredTimes
from common.planning.network import network_health, recorded_tables
from common.planning.search import (
    Searched,
    TimedPlan,
    named_fields,
    named_plan,
    named_plans,
    search,
    sized_plans,
)
from common.planning.space import Plan, Question, SizedPlan, candidates
from common.planning.tuned import Tuned
from common.runtime.group.process_group import Worker
from common.runtime.records.recorder import Recorder
from common.tuning.plans.measuring import half_is_no_slower, measure_inputs, sizes_to_time
from common.tuning.plans.plan_settings import PlanSettings
from common.tuning.plans.plan_tuning import tune_plan, verify
from common.tuning.plans.plan_visits import PlanVisits
from common.tuning.plans.planned_step import checkpointing_switch, drop_unused, why_unshardable
from common.tuning.plans.sized_model import SizedModel
from common.tuning.same_graph import on_main
from common.tuning.tuner import environment_of

CONTENDERS = 3
"""Plans that are run, besides one that was named."""
TRACED = 8
"""Samples that a model is followed with, at most."""
ROOM = 0.8
"""Share of a machine's free memory that passes may take, or a plan that was refused."""


@dataclass(frozen=True)
class Planned:
    """The answer on rank 0: what was found, run and tuned, where, and what predictions rest on."""

    searched: Searched
    best: TimedPlan | None
    verified: tuple[VerifiedPlan, ...] | None
    where: str
    inputs: Inputs | None = None
    tuned: Tuned | None = None

    def as_json(self) -> dict:
        """Returns the answer as plain values."""
        tuned = self.tuned.as_json() if self.tuned else None
        return as_json(self.searched, self.verified, self.best) | {"tuned": tuned}


def question_of(model: SizedModel, worker: Worker, settings: PlanSettings) -> Question:
    """Follows the model and returns the question, on every rank; nothing is written yet.

    Raises UserError where the model cannot be followed, or the question has no answer.
    """
    return on_main(worker, lambda: _question(model, worker, settings))


def plan_model(
    model: SizedModel,
    question: Question,
    recorder: Recorder,
    verify_best: bool = True,
    tune_seconds: float = 0.0,
    options: Sequence[str] = (),
    named: Mapping[str, object] | None = None,
) -> Planned | None:
    """Plans a model's training; returns the answer on rank 0, None on the others.

    Args:
        verify_best: run the best plans.
        tune_seconds: seconds in which settings of the verified plan are tried; 0 tries none.
        options: precisions that a plan of FSDP is tried in beside its own, if products of this
            device are no slower in it; never chosen.
        named: fields of a plan that is run beside the best ones; where it does not fit, in place
            of the nearest that was refused.
    """
    worker = recorder.worker
    plans = list(candidates(question))
    fitting, _ = on_main(worker, lambda: sized_plans(question, plans))
    if not fitting:
        where = environment_of(worker)["hardware"]
        nothing = Planned(search(question, None), None, None, where)
        return nothing if worker.is_main else None
    wanted = [sized.plan for sized in fitting]
    options = [name for name in options if name not in question.precisions]
    options = options if options and half_is_no_slower(worker) else []
    in_others = [replace(plan, precision=p) for plan in wanted if plan.is_sharded for p in options]
    measured = [*wanted, *in_others]
    drop_unused(worker)  # what followed the model
    free = ROOM * min(worker.gather(free_bytes(worker)))
    sizes = on_main(worker, lambda: sizes_to_time(question, wanted, free))
    inputs = measure_inputs(model, question, measured, sizes, recorder)
    environment = environment_of(worker)
    health = network_health(
        inputs.curve, environment["network"], worker.world_size, recorded_tables()
    )
    inputs = replace(inputs, network=health)
    times = MeasuredTimes(question, inputs)
    searched = on_main(worker, lambda: search(question, times, named))
    if recorder.run:
        recorder.run.write_table("plan-predictions.csv", predictions_of(searched))
    verified = tuned = None
    best = searched.best
    if verify_best:
        contenders = contenders_of(searched, CONTENDERS)
        mine = on_main(worker, lambda: named_plan(searched, named or {}))
        if isinstance(mine, TimedPlan) and mine not in contenders:
            contenders.append(mine)
        too_large = [mine] if isinstance(mine, SizedPlan) else searched.refused
        refused = on_main(worker, lambda: _runnable(too_large, question, worker))
        visits = PlanVisits(model, recorder, question.ranks_per_node, "plan")
        verified = verify(visits, [timed.plan for timed in contenders], refused, mine and mine.plan)
        best = plan_to_take(searched, verified)
        ran = any(plan.plan == best.plan and plan.step for plan in verified)
        if tune_seconds and ran:
            tuned = tune_plan(best, times, visits, tune_seconds, options)
            best = tuned.best
    if not worker.is_main:
        return None
    planned = Planned(searched, best, verified, environment["hardware"], inputs, tuned)
    if recorder.run and verified:
        rows = pd.DataFrame(planned.as_json()["verified"])
        recorder.run.write_table("plan-verified.csv", rows)
    return planned


def _question(model: SizedModel, worker: Worker, settings: PlanSettings) -> Question:
    per_node = worker.ranks.local_world_size
    batch = settings.global_batch or model.samples * worker.world_size
    on_gpu = worker.device.type == "cuda"
    memory = settings.memory_bytes
    if not memory and on_gpu:
        memory = torch.cuda.get_device_properties(worker.device).total_memory
    user = model.make(model.samples, worker.device)
    sizes = (1,) if model.fixed else (model.samples,) if settings.keeps_batch else ()
    traced = min(TRACED, max(2, model.samples))
    traced = model.samples if model.refusals([traced]) else traced
    question = Question(
        architecture=model.architecture(traced, worker.device.type),
        ranks=worker.world_size,
        ranks_per_node=per_node,
        global_batch=batch,
        memory_bytes=memory,
        precisions=settings.precisions,
        device=worker.device.type,
        strategies=settings.strategies,
        micro_batches=sizes,
        checkpointing=settings.checkpointing,
        unshardable=why_unshardable(user.module, worker),
        checkpointing_switch=checkpointing_switch(user.module),
    )
    question = question.without(model.refusals(question.sizes))
    named_plans(question, named_fields(settings.mine))
    return question


def contenders_of(searched: Searched, count: int) -> list[TimedPlan]:
    """Returns the best plan and the fastest ones that differ from it in kind.

    Plans of one kind differ in the size of a micro-batch or a unit only; they follow where there
    are too few kinds.
    """
    picked = [searched.best]
    for timed in searched.timed:
        if all(_kind(timed.plan) != _kind(other.plan) for other in picked):
            picked.append(timed)
    return [*picked, *(timed for timed in searched.timed if timed not in picked)][:count]


def _kind(plan: Plan) -> tuple[str, str, str]:
    return plan.strategy, plan.checkpointing, plan.precision


def _runnable(plans: Iterable[SizedPlan], question: Question, worker: Worker) -> Plan | None:
    """Returns the first of plans that do not fit which this machine has the memory to try."""
    free = free_bytes(worker)
    for refused in plans:
        over = refused.peak_bytes > question.usable_bytes
        if over and refused.peak_bytes <= ROOM * free:
            return refused.plan
    return None


def free_bytes(worker: Worker) -> float:
    """Returns the memory that is free for this rank: its share where ranks have one memory."""
    if worker.device.type == "cuda":
        return torch.cuda.mem_get_info(worker.device)[0] / worker.ranks_per_gpu
    return psutil.virtual_memory().available / worker.ranks.local_world_size


def predictions_of(searched: Searched) -> pd.DataFrame:
    """Returns a row for each plan that was predicted: its fields, step_s, its band, peak_bytes."""
    rows = [
        {
            **asdict(timed.plan),
            "step_s": timed.time.step_s,
            "step_low_s": timed.time.low_s,
            "step_high_s": timed.time.high_s,
            "computation_s": timed.time.computation_s,
            "peak_bytes": timed.peak_bytes,
        }
        for timed in searched.timed
    ]
    return pd.DataFrame(rows)
