"""Plans a model under two memory budgets, and then runs every plan of the space.

Left out as absurd: more than ``MOST_MICRO_BATCHES`` micro-batches, units of FSDP other than one
block and all blocks, and caps of DDP's buckets other than ``CAPS`` and those that the planner
chooses. All plans run in the same processes, in rotated rounds, as a race (``plan_regrets``).
What was chosen, the best measured and simple choices are then run off in rounds of their own.

A sweep that was cut goes on: what was planned and every whole round are taken over.
"""

from __future__ import annotations

import io
import math
import time
from collections.abc import Collection, Iterator
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Annotated

import pandas as pd

from common.csv_tables import read_table
from common.perfmodel.collectives import AlphaBeta
from common.planning.measured_times import MeasuredTimes
from common.planning.search import search
from common.planning.space import MARGIN, Plan, Question, candidates, sized
from common.runtime.group.process_group import Worker, process_group
from common.runtime.progress import Progress
from common.runtime.records.recorder import RankStream, Recorder, record_run
from common.runtime.records.study import whole_lines
from common.runtime.script import run_script
from common.samples import per_round
from common.settings import AtLeast, OneOf, Positive, RankOptions, part_of
from common.studies.plan_models import MODELS, sized_model
from common.studies.plan_regrets import (
    ALWAYS_DDP,
    ALWAYS_FULL,
    FREE,
    LARGEST,
    PLAN,
    SEARCH,
    UNTUNED,
    peak_of_plans,
    racing,
    with_regrets,
)
from common.tuning.plans import plan_visits
from common.tuning.plans.plan_settings import PlanSettings
from common.tuning.plans.plan_visits import PEAK_COLUMNS, VISIT_COLUMNS, visit
from common.tuning.plans.planner import Planned, plan_model, question_of
from common.tuning.plans.sized_model import SizedModel
from common.tuning.same_graph import on_main, together

MOST_MICRO_BATCHES = 4
CAPS = (None, 0.25)
"""Caps of DDP's buckets in MiB; None is PyTorch's default, which is one bucket of these models."""
GENEROUS_BYTES = 4e9
"""The generous budget: more than any of the plans takes."""
TIGHT = 0.9
"""Share of the predicted peak of the plan chosen under the generous budget that is the tight one,
or what the smallest plan needs to be chosen, if that is more."""
BUDGETS = ("generous", "tight")
BEST = 2
"""Plans of the sweep under each budget that are run off: the fastest ones."""
PLANNED = ("plans.csv", "planning.csv", "asked.csv")
"""What planning writes: every plan with its predicted peak, what a budget's answer cost, and who
chooses which plan."""


@dataclass(frozen=True)
class PlanSweep(RankOptions):
    """Plan a model under two budgets, run every plan, and run the choices off.

    Recipe: uv run torchrun --nproc_per_node=2 common/studies/plan_sweep.py --model llama.
    Writes plans.csv, choices.csv, planning.csv (seconds), and the samples of sweep and run-off.
    """

    model: Annotated[str, OneOf(tuple(MODELS), "model")] = "llama"
    """Model of the study."""
    rounds: Annotated[int, Positive] = 4
    """Visits to each plan that stays in the race."""
    runoff_rounds: Annotated[int, Positive] = 8
    """Rounds that the run-off adds at a time, while a regret's interval is wider than ``within``
    to either side."""
    most_runoff_rounds: Annotated[int, Positive] = 24
    """Most rounds of the run-off."""
    within: Annotated[float, Positive] = 0.02
    """Relative half-width at which the run-off ends."""
    tune_seconds: Annotated[float, AtLeast(0)] = PlanSettings.tune_seconds
    """Seconds in which plan tries other settings of its choice."""
    continues: str = ""
    """Run directory of a sweep of this model that was cut."""
    seed: int = 42
    """Seed of the initial weights and of the random inputs."""
    output_dir: str = "outputs/plan-sweep"


def main(settings: PlanSweep) -> None:
    """Plans twice, sweeps, and runs the choices off; all ranks do so together."""
    with process_group(settings.device, settings.backend) as worker:
        model = together(worker, lambda: sized_model(settings.model, settings.seed))
        earlier = Path(settings.continues) if settings.continues else None
        if earlier:
            planned = on_main(worker, lambda: {n: read_table(earlier / n, ()) for n in PLANNED})
        else:
            planned = planned_tables(model, worker, settings)
        with record_run(settings, "plan-sweep", worker) as recorder:
            if recorder.run:
                for name, table in planned.items():
                    recorder.run.write_table(name, table)
            plans, planning, wanted = (planned[name] for name in PLANNED)
            run = _Visits(model, plans, planning["memory_bytes"], recorder, earlier)
            swept = run.sweep(settings.rounds)
            choices = choices_of(wanted, plans, swept, run.tops)
            run.runoff(choices, swept, settings)
            if recorder.run:
                recorder.run.write_table("choices.csv", choices)


def planned_tables(
    model: SizedModel, worker: Worker, settings: PlanSweep
) -> dict[str, pd.DataFrame]:
    """Plans under both budgets; returns the tables of PLANNED, the same on every rank."""
    generous, generous_s = _plan(model, worker, settings, BUDGETS[0], GENEROUS_BYTES)
    tight_bytes = on_main(worker, lambda: tight_budget(generous))
    tight, tight_s = _plan(model, worker, settings, BUDGETS[1], tight_bytes)
    answers = {BUDGETS[0]: generous, BUDGETS[1]: tight}
    seconds = {BUDGETS[0]: generous_s, BUDGETS[1]: tight_s}
    return on_main(worker, lambda: tables_of(answers, seconds))


def tables_of(answers: dict[str, Planned], seconds: dict[str, float]) -> dict[str, pd.DataFrame]:
    """Returns the tables of PLANNED.

    Args:
        answers: budget → what was planned.
        seconds: budget → seconds that it took.
    """
    planning, wanted = [], []
    question = answers[BUDGETS[0]].searched.question
    plans = {plan.name: plan for plan in plans_of(question)}
    for budget, planned in answers.items():
        keys = {"budget": budget, "memory_bytes": planned.searched.question.memory_bytes}
        facts = {"predicted_bytes": planned.best.peak_bytes, "planning_s": seconds[budget]}
        planning.append(keys | facts)
        choices = choices_in(planned)
        plans |= {plan.name: plan for plan in choices.values()}
        wanted += [keys | {"who": who, "plan": plan.name} for who, plan in choices.items()]
    predicted = (
        {"plan": name, **asdict(plan), "predicted_bytes": sized(question, plan).peak_bytes}
        for name, plan in plans.items()
    )
    tables = (pd.DataFrame(predicted), pd.DataFrame(planning), pd.DataFrame(wanted))
    return dict(zip(PLANNED, tables, strict=True))


def plans_of(question: Question) -> Iterator[Plan]:
    """Yields the plans of a question that are not absurd."""
    blocks = sum(layer.count for layer in question.architecture.blocks)
    for plan in candidates(question):
        if plan.accumulation <= MOST_MICRO_BATCHES and plan.blocks_per_unit in (1, blocks):
            for cap in CAPS if plan.has_buckets else CAPS[:1]:
                yield replace(plan, bucket_cap_mib=cap)


def tight_budget(generous: Planned) -> float:
    """Returns the bytes of the tight budget."""
    question = generous.searched.question
    smallest = min(sized(question, plan).peak_bytes for plan in candidates(question))
    return max(TIGHT * generous.best.peak_bytes, math.ceil(smallest * (1 + MARGIN)))


def _plan(
    model: SizedModel, worker: Worker, settings: PlanSweep, budget: str, memory_bytes: float
) -> tuple[Planned | None, float]:
    """Plans as ``ddplab plan`` does, in a run directory of its own; returns answer and seconds."""
    plan_settings = part_of(
        PlanSettings,
        vars(settings),
        memory_bytes=memory_bytes,
        global_batch=MODELS[settings.model].global_batch,
        run_id=f"plan-{budget}",
    )
    worker.barrier()
    began = time.perf_counter()
    question = question_of(model, worker, plan_settings)
    with record_run(plan_settings, "plan", worker) as recorder:
        planned = plan_model(model, question, recorder, tune_seconds=settings.tune_seconds)
    return planned, time.perf_counter() - began


def choices_in(planned: Planned) -> dict[str, Plan]:
    """Returns what plan chose, and what it would have without tuning, trials and gathers' cost."""
    question, inputs = planned.searched.question, planned.inputs
    free = dict.fromkeys(inputs.collectives, AlphaBeta(0.0, math.inf))
    without = search(question, MeasuredTimes(question, replace(inputs, collectives=free)))
    of_rank = question.global_batch // question.ranks
    return {
        PLAN: planned.best.plan,
        UNTUNED: (planned.tuned.base if planned.tuned else planned.best).plan,
        SEARCH: planned.searched.best.plan,
        FREE: without.best.plan,
        ALWAYS_DDP: Plan("DDP", of_rank),
        ALWAYS_FULL: Plan("FULL_SHARD", of_rank),
    }


def read_plans(table: pd.DataFrame) -> dict[str, Plan]:
    """Returns plans by name, from a table of their fields."""
    names = [field.name for field in fields(Plan) if field.name in table]
    caps = table["bucket_cap_mib"].astype(object)
    rows = table.assign(bucket_cap_mib=caps.where(caps.notna(), None))[names].to_dict("records")
    return {name: Plan(**row) for name, row in zip(table["plan"], rows, strict=True)}


class _Visits:
    """Visits plans, all ranks together, and keeps samples and peaks.

    Args:
        plans: plans.csv.
        budgets: bytes of each budget.
        earlier: run directory of a sweep that was cut, whose whole rounds are taken over.

    Attributes:
        tops: plan → its measured peak in bytes, of the rank with the largest one.
    """

    def __init__(
        self,
        model: SizedModel,
        plans: pd.DataFrame,
        budgets: Collection[float],
        recorder: Recorder,
        earlier: Path | None,
    ) -> None:
        self.model, self.plans, self.budgets = model, read_plans(plans), list(budgets)
        self.recorder, self.worker, self.earlier = recorder, recorder.worker, earlier
        self.peaks = recorder.stream("sweep-peaks.csv", PEAK_COLUMNS)
        self.tops = pd.Series(dtype=float)

    def _earlier(self, name: str) -> pd.DataFrame:
        """Returns the rows of a table of the earlier sweep; none on ranks other than 0."""
        lines = whole_lines(self.earlier / name) if self.earlier and self.worker.is_main else ""
        return pd.read_csv(io.StringIO(lines or "plan,round"))

    def _round(self, names: list[str], round_: int, samples: RankStream, stage: str) -> None:
        """Visits plans once, or takes the round over from the earlier sweep."""
        before = self._earlier(f"{stage}-visits.csv")
        before = before[before["round"] == round_]
        sizes = self._earlier("sweep-peaks.csv") if round_ == 0 else before
        of_visit = plan_visits.STEPS * self.worker.world_size
        has_all = (before["plan"].value_counts() == of_visit).all()
        is_whole = has_all and set(before["plan"]) == set(names) == set(sizes["plan"])
        if self.worker.broadcast(is_whole):
            samples.write(before.to_dict("records"))
            self.peaks.write(sizes.to_dict("records") if round_ == 0 else [])
            rows = witnessed(self._earlier("witness.csv"), stage, round_)
            self.recorder.take_witness(rows.to_dict("records"))
            return
        progress = Progress(len(names), self.worker.is_main)
        for _, name in self.recorder.rounds(names, round_ + 1, stage=stage, first=round_):
            streams, per_node = (samples, self.peaks), self.worker.ranks.local_world_size
            visit(self.model, self.plans[name], round_, self.worker, streams, per_node)
            progress.step(f"{stage}, round {round_ + 1}, {name}")

    def sweep(self, rounds: int) -> pd.DataFrame:
        """Races all plans; returns all samples."""
        samples = self.recorder.stream("sweep-visits.csv", VISIT_COLUMNS)
        names, swept = list(self.plans), pd.DataFrame()
        for round_ in range(rounds):
            self._round(names, round_, samples, "sweep")
            swept = self.worker.broadcast(samples.table())
            self.tops = peak_of_plans(self.worker.broadcast(self.peaks.table()))
            names = racing(swept, self.tops, self.budgets)
        return swept

    def runoff(self, choices: pd.DataFrame, swept: pd.DataFrame, settings: PlanSweep) -> None:
        """Runs plan's choices and all that stay in the race off until plan's regrets are known."""
        names = choices["plan"]
        stay = (choices["who"] == PLAN) | names.isin(racing(swept, self.tops, self.budgets))
        finalists = [*names[stay].unique()]
        samples = self.recorder.stream("runoff-visits.csv", VISIT_COLUMNS)
        for round_ in range(1, settings.most_runoff_rounds + 1):  # peaks are of round 0
            self._round(finalists, round_, samples, "runoff")
            if round_ % settings.runoff_rounds:
                continue
            runoff = self.worker.broadcast(samples.table())
            regrets = with_regrets(choices, swept, runoff, self.tops)
            chosen = regrets[regrets["who"] == PLAN]
            if ((chosen["high"] - chosen["low"]) / 2 <= settings.within).all():
                return


def witnessed(rows: pd.DataFrame, stage: str, round_: int) -> pd.DataFrame:
    """Returns the witness's rows at the beginning and the end of a round of a sweep.

    The next round begins with further rows of the same number.
    """
    if "stage" not in rows:  # a sweep that nothing watched
        return rows[:0]
    rows = rows[rows["stage"] == stage]
    begin = rows[rows["round"] == round_].groupby("rank").tail(1)
    return pd.concat([begin, rows[rows["round"] == round_ + 1].groupby("rank").head(1)])


def choices_of(
    wanted: pd.DataFrame, plans: pd.DataFrame, swept: pd.DataFrame, tops: pd.Series
) -> pd.DataFrame:
    """Returns who chooses which plan under each budget, with the best of the sweep.

    The largest micro-batch under DDP is that whose measured peak fits. One that does not exist is
    left out. Columns: budget, memory_bytes, who, plan.
    """
    times = per_round(swept, "step_time_ms", "plan")
    medians = times.loc[:, times.iloc[-1].notna()].median().sort_values()
    is_plain = (plans["strategy"] == "DDP") & (plans["checkpointing"] == "none")
    plain = plans[is_plain & plans["bucket_cap_mib"].isna()].sort_values("micro_batch")
    rows = []
    for (budget, memory_bytes), of_budget in wanted.groupby(["budget", "memory_bytes"]):
        fitting = tops[tops <= memory_bytes].index
        choices = dict(zip(of_budget["who"], of_budget["plan"], strict=True))
        if able := [name for name in plain["plan"] if name in fitting]:
            choices[LARGEST] = able[-1]
        best = [name for name in medians.index if name in fitting][:BEST]
        choices |= {f"best {rank}": name for rank, name in enumerate(best, start=1)}
        keys = {"budget": budget, "memory_bytes": memory_bytes}
        rows += [keys | {"who": who, "plan": name} for who, name in choices.items()]
    return pd.DataFrame(rows)


if __name__ == "__main__":
    run_script(main, PlanSweep)
