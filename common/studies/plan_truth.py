"""``ddplab study plan``: is the plan that ``ddplab plan`` chooses the best of all, and does it fit?

Four models, over loopback and between two emulated hosts, under two memory budgets each: one that
all plans keep, and one that excludes the plan that was chosen there (``TIGHT``). A model on a
network is measured once for both (``plan_sweep``). What counts is how much slower plan's choice is
than the fastest plan within the budget, in rounds of their own that chose neither, and the peak
that its steps took. Beside it stand plan without its tuning, its search alone, the same search with
free gathers, and what many would do: one micro-batch under DDP or FULL_SHARD, or the largest that
fits under DDP.

Half of the cases are held out: they are on a list that was made before any case had run, and what
was adjusted by the others is judged by them. ``cases.csv`` has a row per case, ``choices.csv`` one
per choice in it, ``peaks.csv`` one per plan, ``verdicts.csv`` one per promise. A cut study is
continued by ``ddplab study plan --continues RUN_DIR``, which takes over complete cases, and of the
one that was cut what was planned and whole rounds.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Annotated

import pandas as pd

from common.analysis.runs import Run
from common.cluster.emulated import EmulatedCluster, why_no_hosts
from common.csv_tables import read_table
from common.errors import UserError, require_known
from common.judged import DISTURBED, DRIFTING, NOT_WITNESSED, QUIET
from common.runtime.machine.environment import describe_environment
from common.runtime.paths import project_root
from common.runtime.records.study import say_tables, study_run, with_verdicts
from common.runtime.stage_progress import StageProgress
from common.runtime.wording import counted
from common.samples import per_round
from common.settings import AtLeast, NonEmpty, OneOf, Positive, Settings
from common.studies.plan_models import MODELS
from common.studies.plan_regrets import PLAN, RIVALS, peak_of_plans, with_regrets
from common.tuning.launched import run_job
from common.tuning.plans.plan_settings import PlanSettings
from common.tuning.plans.plan_visits import STEPS
from common.tuning.visits import WARMUP_STEPS

CASES, CHOICES, PEAKS = "cases.csv", "choices.csv", "peaks.csv"
SWEPT, RUN_OFF = "sweep/plans.csv", "sweep/runoff-visits.csv"
"""The first file of a case's sweep, and one that gets its name when it is complete."""
SWEEP = project_root() / "common" / "studies" / "plan_sweep.py"
RANKS = 2
LOOPBACK = "loopback"
HELD_OUT = (
    "bert-2x1gbit",
    "resnet-loopback",
    "resnet-2x100mbit",
    "llama-2x100mbit",
    "experts-loopback",
    "experts-2x1gbit",
)
"""Cases by which nothing was adjusted."""
WITHIN, SHARE_WITHIN = 0.05, 0.9
"""Regret that is promised, and in which share of cases."""
PEAK_WITHIN, SHARE_OF_TIME = 0.03, 0.2
"""Upper bounds: error of a predicted peak; planning's share of an exhaustive search's time."""
ALIKE = 0.01
"""Relative difference up to which neither of two choices wins."""
MINUTES = {LOOPBACK: 5, "2x1gbit": 5, "2x100mbit": 11}
"""Minutes that a model on a network took on two idle cores, the mean of four."""


@dataclass(frozen=True)
class PlanStudy(Settings):
    """Settings of the study: models, networks, and how carefully plans are compared."""

    models: Annotated[tuple[str, ...], NonEmpty, OneOf(tuple(MODELS), "model")] = tuple(
        name for name in MODELS if name != "tiny"
    )
    """Models of common.studies.plan_models."""
    rates: tuple[str, ...] = ("1gbit", "100mbit")
    """Rates of the links of two emulated hosts, a network each."""
    rounds: Annotated[int, Positive] = 4
    """Visits to each plan that stays in the race."""
    runoff_rounds: Annotated[int, Positive] = 8
    """Rounds that a run-off adds at a time, until the regrets are known."""
    most_runoff_rounds: Annotated[int, Positive] = 24
    """Most rounds of the run-off."""
    tune_seconds: Annotated[float, AtLeast(0)] = PlanSettings.tune_seconds
    """Seconds in which plan tries other settings of its choice."""
    only: tuple[str, ...] = ()
    """Cases to run under both budgets, such as llama-loopback; by default all."""
    continues: str = ""
    """Run directory of a study that was cut."""

    def __post_init__(self) -> None:
        super().__post_init__()
        names = sorted(f"{model}-{network}" for model, network, _ in self._all())
        for name in self.only:
            require_known("case", name, names)

    def _all(self) -> Iterator[tuple[str, str, EmulatedCluster | None]]:
        networks: dict[str, EmulatedCluster | None] = {LOOPBACK: None}
        for rate in self.rates:
            networks[f"{RANKS}x{rate}"] = EmulatedCluster.of(RANKS, [rate])
        for (network, hosts), model in product(networks.items(), self.models):
            yield model, network, hosts

    def cases(self) -> list[tuple[str, str, EmulatedCluster | None]]:
        """Returns model, network and hosts (None for loopback) of what is measured."""
        return [case for case in self._all() if not self.only or "-".join(case[:2]) in self.only]


SETTINGS = PlanStudy


def run_study(study: PlanStudy, output_dir: str, progress: StageProgress) -> Path:
    """Plans and sweeps each case; returns the run directory.

    Raises UserError where this machine cannot emulate hosts, or there is nothing to continue.
    """
    cases = study.cases()
    if any(hosts for *_, hosts in cases) and (reason := why_no_hosts()):
        raise UserError(reason)
    begun = Path(study.continues) if study.continues else None
    if begun and not any(begun.glob(f"*/{SWEPT}")):
        raise UserError(f"--continues {begun}: no case of it was planned")
    complete = {path.parent.parent.name for path in begun.glob(f"*/{RUN_OFF}")} if begun else set()
    networks = [network for model, network, _ in cases if f"{model}-{network}" not in complete]
    minutes = sum(MINUTES.get(network, max(MINUTES.values())) for network in networks)
    measurements = counted(len(networks), "measurement")
    progress.say(f"{measurements} for two budgets each, about {minutes} minutes on two idle cores")
    tables: dict[str, list[pd.DataFrame]] = {CASES: [], CHOICES: [], PEAKS: []}
    environment = describe_environment("gloo", "cpu", RANKS)
    with study_run("plan", study, output_dir, progress, environment) as run:
        for model, network, hosts in cases:
            name = f"{model}-{network}"
            folder = run.path.absolute() / name  # ranks start in another folder
            if name in complete:
                shutil.copytree(begun / name, folder)
            else:
                cut = begun and (begun / name / SWEPT).is_file() and begun / name / "sweep"
                measure(study, model, hosts, folder, cut or None, progress)
            keys = {"model": model, "network": network}
            for table, rows in compare(folder / "sweep", study.rounds).items():
                tables[table].append(rows.assign(**keys)[[*keys, *rows]])
                run.write_table(table, pd.concat(tables[table]))  # whole after each
        cases_table, choices, peaks = (pd.concat(tables[name]) for name in tables)
        verdicts = judge(cases_table, choices, peaks)
        run.write_table("verdicts.csv", verdicts)
    tables = (cases_table, choices.drop(columns="memory_bytes"), peaks_by_model(peaks))
    say_tables(progress, *tables, float_format="%.4g", na_rep="–")
    say_tables(progress, verdicts)
    return run.path


def measure(
    study: PlanStudy,
    model: str,
    hosts: EmulatedCluster | None,
    folder: Path,
    cut: Path | None,
    progress: StageProgress,
) -> None:
    """Plans a model under both budgets, runs every plan, and runs the choices off.

    ``cut`` is the sweep that goes on; None for one that begins.
    """
    folder.mkdir()
    for planned in cut.parent.glob("plan-*") if cut else ():  # plan's own runs tell its disturbance
        shutil.copytree(planned, folder / planned.name)
    settings = {
        "model": model,
        "rounds": study.rounds,
        "runoff_rounds": study.runoff_rounds,
        "most_runoff_rounds": study.most_runoff_rounds,
        "tune_seconds": study.tune_seconds,
        "device": "cpu",
        "output_dir": folder,
        "run_id": "sweep",
    } | ({"continues": cut.absolute()} if cut else {})
    with progress.stage(f"plan and sweep {folder.name}") as update:
        run_job(SWEEP, settings, RANKS, hosts=hosts, on_output=update)


def compare(sweep: Path, rounds: int) -> dict[str, pd.DataFrame]:
    """Compares choices with the sweep; returns rows of the study's tables by name.

    ``spread`` is the slowest plan's time over the fastest one's, of those within the budget.
    ``exhaustive_s`` is less than visits to every plan in all rounds take: that of their steps
    alone, at the times of the first round. The race, and making instances, are not in it.
    """
    names = ("planning", "choices", "plans", "sweep-peaks", "sweep-visits", "runoff-visits")
    read = {name: read_table(sweep / f"{name}.csv", ()) for name in names}
    tops = peak_of_plans(read["sweep-peaks"])
    choices = with_regrets(read["choices"], read["sweep-visits"], read["runoff-visits"], tops)
    predicted = read["plans"].set_index("plan")["predicted_bytes"][tops.index]
    peaks = pd.DataFrame({"peak_bytes": tops, "predicted_bytes": predicted})
    peaks["error"] = peaks["predicted_bytes"] / peaks["peak_bytes"] - 1
    visits = read["sweep-visits"]
    first = per_round(visits[visits["round"] == 0], "step_time_ms", "plan").iloc[0]
    exhaustive_s = rounds * (WARMUP_STEPS + STEPS) * first.sum() / 1e3
    excluded = read["planning"]["predicted_bytes"].iloc[0]
    rows = []
    for budget in read["planning"].itertuples():
        chosen = choices[(choices["budget"] == budget.budget) & (choices["who"] == PLAN)].iloc[0]
        fitting = first[tops[first.index] <= budget.memory_bytes]
        row = {"budget": budget.budget, "memory_bytes": budget.memory_bytes}
        row |= {"excludes_fastest": excluded > budget.memory_bytes, "chosen": chosen["plan"]}
        row |= {name: chosen[name] for name in ("regret", "low", "high", "rounds")}
        row |= {"plans": len(tops), "plans_that_fit": len(fitting)}
        row |= {"spread": fitting.max() / fitting.min(), "peak_bytes": tops[chosen["plan"]]}
        row |= {"over_budget": tops[chosen["plan"]] > budget.memory_bytes}
        row |= {"planning_s": budget.planning_s, "exhaustive_s": exhaustive_s}
        row |= {"share": budget.planning_s / exhaustive_s}
        measured_in = (sweep, sweep.with_name(f"plan-{budget.budget}"))
        rows.append(row | {"machine": worst_state(measured_in)})
    return {CASES: pd.DataFrame(rows), CHOICES: choices, PEAKS: peaks.reset_index()}


def worst_state(folders: Iterable[Path]) -> str:
    """Returns the worst state of the machine in runs; NOT_WITNESSED if no one of them tells."""
    states = {Run(folder, folder).machine_state for folder in folders if folder.is_dir()}
    order = (DISTURBED, DRIFTING, QUIET)
    return next((state for state in order if state in states), NOT_WITNESSED)


def peaks_by_model(peaks: pd.DataFrame) -> pd.DataFrame:
    """Returns how many plans of a model on a network have their peak as predicted.

    Columns: model, network, plans, within (of PEAK_WITHIN), least and most (errors).
    """
    errors = peaks.groupby(["model", "network"], sort=False)["error"]
    table = errors.agg(plans="size", least="min", most="max")
    table.insert(1, "within", errors.agg(lambda error: (error.abs() <= PEAK_WITHIN).sum()))
    return table.reset_index()


def within_and_open(cases: pd.DataFrame) -> tuple[pd.Series, pd.Series]:
    """Returns which cases are told to have a regret up to ``WITHIN``, and which do not tell."""
    is_disturbed = cases["machine"] == DISTURBED
    within = (cases["high"] <= WITHIN) & ~is_disturbed
    is_open = ~within & ((cases["low"] <= WITHIN) | (is_disturbed & cases["low"].notna()))
    return within, is_open


def judge(cases: pd.DataFrame, choices: pd.DataFrame, peaks: pd.DataFrame) -> pd.DataFrame:
    """Compares the cases with what is promised; returns a row per promise.

    A case counts as within by its whole interval. A choice over the budget has no regret, and no
    case of it counts. plan wins a case against a rival that does not fit or is slower by more than
    ``ALIKE``.

    Columns: promise, at_least, at_most, found and held.
    """
    within, is_open = within_and_open(cases)
    held_out = (cases["model"] + "-" + cases["network"]).isin(HELD_OUT)
    rows = [
        (f"share of cases with a regret up to {WITHIN:.0%}", SHARE_WITHIN, None, within.mean()),
        ("cases that do not tell", None, None, is_open.sum()),
        ("choices over the budget", None, 0, cases["over_budget"].sum()),
        (
            f"share of plans whose predicted peak is within {PEAK_WITHIN:.0%}",
            1.0,
            None,
            (peaks["error"].abs() <= PEAK_WITHIN).mean(),
        ),
        ("largest share of an exhaustive search's time", None, SHARE_OF_TIME, cases["share"].max()),
    ]
    for part, chosen in (("held out", held_out), ("not held out", ~held_out)):
        if chosen.any():
            name = f"share of cases {part} with a regret up to {WITHIN:.0%}"
            rows.append((name, SHARE_WITHIN, None, within[chosen].mean()))
    keys = ["model", "network", "budget"]
    wide = choices.pivot_table(index=keys, columns="who", values="regret", dropna=False)
    for rival in RIVALS:
        rows_of_rival = choices.loc[choices["who"] == rival, keys]
        if rows_of_rival.empty:  # a study that was cut may have begun without it
            continue
        of_plan, of_rival = (
            wide.loc[pd.MultiIndex.from_frame(rows_of_rival), who] for who in (PLAN, rival)
        )
        ratio = (1 + of_rival) / (1 + of_plan)
        won = (ratio > 1 + ALIKE) | (of_rival.isna() & of_plan.notna())
        lost = (ratio < 1 / (1 + ALIKE)) | (of_plan.isna() & of_rival.notna())
        name = f"cases that plan wins against {rival}, less those that it loses"
        rows.append((name, 1, None, won.sum() - lost.sum()))
    return with_verdicts(rows)


def closing_line(path: Path) -> str:
    """Returns the study's result in a line."""
    cases, peaks = pd.read_csv(path / CASES), pd.read_csv(path / PEAKS)
    within, is_open = within_and_open(cases)
    near = (peaks["error"].abs() <= PEAK_WITHIN).sum()
    share = cases["share"]
    return (
        f"regret ≤ {_percent(WITHIN)} in {within.sum()} of {len(cases)} cases "
        f"({is_open.sum()} do not tell), "
        f"peaks within {_percent(PEAK_WITHIN)} in {near} of {len(peaks)}, "
        f"over budget {cases['over_budget'].sum()}, "
        f"planning {_percent(share.median())} of exhaustive (at most {_percent(share.max())})"
    )


def _percent(share: float) -> str:
    return f"{100 * share:.0f} %"
