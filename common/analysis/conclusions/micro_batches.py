"""Conclusions of assignment 3: what dynamic micro-batches gain, and where they do not."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache

import pandas as pd

from common.analysis.conclusions.conclusion import Look, Seen, above, below, counted
from common.analysis.micro_batches import calibration
from common.analysis.micro_batches.lab import open_assignment3
from common.analysis.micro_batches.mode_comparison import DYNAMIC, PAYS_FROM, STATIC, ModeComparison
from common.analysis.micro_batches.summary import SAME_CURVE, loss_agreement
from common.analysis.micro_batches.training_runs import mode_name
from common.analysis.micro_batches.waiting import (
    COMPUTED_ALIKE,
    STEPS_ALIKE,
    static_imbalance,
    static_waits,
    unequal_ranks_ms,
    waiting_points,
)
from common.errors import UserError
from common.judged import Judged

TOKENS_SQ, EQUAL_COUNTS = "dynamic_tokens_sq", "karmarkar_karp"

_lab = cache(open_assignment3)


def _comparison(run_dir: str, like: str = "") -> ModeComparison:
    """Returns the comparison on texts of a data set's lengths; by default the main one."""
    for comparison in _lab(run_dir).comparisons:
        if comparison.like == like or not like:
            return comparison
    raise UserError(f"no comparison on {like}")


def _step(comparison: ModeComparison, mode: str) -> Judged:
    """Returns steps over static's on the same global batches, as their section judges them."""
    if mode not in comparison.modes:
        raise UserError(f"mode {mode} was not measured")
    return comparison.judged[mode]


def _shorter(mode: str, like: str = "") -> Look:
    return lambda run_dir: below(_step(_comparison(run_dir, like), mode))


def _waits(run_dir: str) -> Seen:
    """Says whether ranks wait less than the padded tokens alone would make them."""
    comparison = _comparison(run_dir)
    if comparison.ranks != 2:
        raise UserError(f"{comparison.ranks} ranks: the estimate is for two")
    imbalance, measured = static_imbalance(comparison), static_waits(comparison)
    guess = (imbalance["fullest"] - imbalance["emptiest"]) / 2 / imbalance["fullest"]
    outcome = below(replace(measured, null=guess), "{:.1%}")
    return replace(outcome, number=f"{outcome.number} against {guess:.1%}")


def _above_promise(run_dir: str) -> Seen:
    comparison = _comparison(run_dir)
    judged = _step(comparison, DYNAMIC)
    promised = comparison.dynamic["padded_ratio"]
    outcome = above(replace(judged, null=promised))
    return Seen(outcome.status, f"{outcome.number}; {promised:.2f} promised")


def _worse_plan(run_dir: str) -> Seen:
    return above(_over_dynamic(run_dir, TOKENS_SQ))


def _over_dynamic(run_dir: str, mode: str) -> Judged:
    """Returns a mode's steps over dynamic's, or its time per text, as their section judges them."""
    over = _comparison(run_dir).over_dynamic
    if mode not in over:
        raise UserError(f"mode {mode} was not measured beside {DYNAMIC}")
    return over[mode]


def _equal_counts(run_dir: str) -> Seen:
    return above(replace(_step(_comparison(run_dir), EQUAL_COUNTS), null=0.98))


def _own_batches(mode: str) -> Look:
    return lambda run_dir: below(_over_dynamic(run_dir, mode))


def _pays(like: str, pays: bool) -> Look:
    def look(run_dir: str) -> Seen:
        judged = _step(_comparison(run_dir, like), DYNAMIC)
        gain = replace(judged, null=PAYS_FROM)
        return below(gain) if pays else above(gain)

    return look


def _same_losses(run_dir: str) -> Seen:
    table = loss_agreement(_lab(run_dir).training)
    if table.empty:
        raise UserError(_lab(run_dir).left_out or "no losses were recorded")
    row = table.iloc[0]
    number = f"{row['largest difference']:.1g} of the loss in {row['steps']} steps"
    return counted(row["largest difference"] <= SAME_CURVE, number)


def _unequal(name: str, look: Callable[[Judged, str], Seen]) -> Look:
    def on_run(run_dir: str) -> Seen:
        judged = unequal_ranks_ms(_comparison(run_dir))
        if name not in judged:
            raise UserError(f"mode {DYNAMIC} was not measured")
        return look(judged[name], "{:+.1f} ms")

    return on_run


def _points(run_dir: str, mode: str, above_what: str) -> Judged:
    """Returns by how many points ranks wait more under a mode, as the section judges it."""
    judged = waiting_points(_comparison(run_dir))[above_what].get(mode)
    if judged is None:
        raise UserError(f"mode {mode} or the control was not measured")
    return judged


def _near_control(run_dir: str) -> Seen:
    return below(replace(_points(run_dir, DYNAMIC, "above_control"), null=2.0), "{:+.1f} points")


def _waits_more(run_dir: str) -> Seen:
    return above(_points(run_dir, TOKENS_SQ, "above_static"), "{:+.1f} points")


_steps_alike = _unequal(STEPS_ALIKE, above)
_balances = _unequal(COMPUTED_ALIKE, below)


def _calibrated_gains_little(run_dir: str) -> Seen:
    return above(replace(_over_dynamic(run_dir, calibration.CALIBRATED), null=0.95))


def _slow_steps(run_dir: str) -> pd.DataFrame:
    table = _comparison(run_dir).slow_rank
    if table is None:
        raise UserError("no rank was slowed")
    return table


def _untold(run_dir: str) -> Seen:
    outcome = above(_over_told(run_dir, mode_name(calibration.NOT_TOLD)))
    expected = _expected(run_dir)
    return Seen(outcome.status, f"{outcome.number}; {expected:.2f} by the factor alone")


def _over_told(run_dir: str, plan: str) -> Judged:
    """Returns a plan's steps over those of one that was told, as their section judges them."""
    plans = calibration.slow_plans(_slow_steps(run_dir), **_comparison(run_dir).conditions)
    judged = plans.set_index("plan")["judged"]
    if plan not in judged:
        raise UserError(f"no steps under {plan}")
    return judged[plan]


def _expected(run_dir: str) -> float:
    """Returns what equal parts take over parts by speed: one rank slower by the factor."""
    factor = calibration.slow_summary(_slow_steps(run_dir)).factor
    ranks = _comparison(run_dir).ranks
    return factor / ranks * (ranks - 1 + 1 / factor)


def _rank_found(run_dir: str) -> Seen:
    slowed = calibration.slow_summary(_slow_steps(run_dir))
    number = f"{slowed.estimate:.2f} for {slowed.factor:g}, from step {slowed.found_at}"
    return counted(slowed.found_at is not None, number)


def _as_told(run_dir: str) -> Seen:
    plan = f"{mode_name(calibration.CALIBRATED)}: from then on"
    return below(replace(_over_told(run_dir, plan), null=1.1))


def _simulated(run_dir: str) -> pd.DataFrame:
    simulation = _lab(run_dir).simulation
    if simulation is None:
        raise UserError("no simulation in this run")
    return simulation.extremes().set_index(["data set", "mode"])


def _approaches_bound(run_dir: str) -> Seen:
    dynamic = _simulated(run_dir).xs(DYNAMIC, level="mode")
    few, most = dynamic.iloc[:, 0], dynamic.iloc[:, 1]
    number = f"{few.max():.2f} → {most.max():.2f} times the bound at most"
    return counted(bool((most < few).all()), number)


def _far_from_bound(run_dir: str) -> Seen:
    table = _simulated(run_dir)
    ratios = table.xs(STATIC, level="mode").iloc[:, 1]
    number = ", ".join(f"{name} {ratio:.2f}" for name, ratio in ratios.items())
    return counted(ratios["imdb"] < 1.5 < ratios.drop("imdb").min(), number)


def _plans_fast(run_dir: str) -> Seen:
    simulation = _lab(run_dir).simulation
    if simulation is None or simulation.planning is None:
        raise UserError("planning was not timed")
    longest_ms = simulation.plan_times()["time_ms"].max()
    return counted(longest_ms < 10, f"{longest_ms:.2f} ms")


CONCLUSIONS = {
    "assignment3_dynamic_batches": [
        (2, "ranks wait less than padded tokens alone would say", _waits),
        (4, "dynamic takes less than static", _shorter(DYNAMIC)),
        (4, "dynamic takes more than its plan promises", _above_promise),
        (4, "the plan for tokens² is worse than dynamic's", _worse_plan),
        (4, "equal counts gain less than 2 % (Karmarkar–Karp)", _equal_counts),
        (5, "token budget takes less per text than dynamic", _own_batches("token_budget")),
        (5, "length-grouped takes less per text than dynamic", _own_batches("length_grouped")),
        (6, "dynamic pays on SST-2", _pays("sst2", True)),
        (6, "dynamic pays on AG News", _pays("ag_news", True)),
        (6, "on IMDB dynamic takes less than static", _shorter(DYNAMIC, "imdb")),
        (6, "on IMDB dynamic does not pay", _pays("imdb", False)),
        (7, "the losses of static and dynamic differ by rounding only", _same_losses),
        (8, "under static whole steps differ less than computation", _steps_alike),
        (8, "dynamic makes ranks compute more equally long", _balances),
        (9, "under dynamic ranks wait at most 2 points more than the control", _near_control),
        (9, "ranks wait more under tokens² than under static", _waits_more),
        (10, "the calibrated plan gains less than 5 % more", _calibrated_gains_little),
        (11, "a plan that is not told of a slow rank takes longer", _untold),
        (11, "the calibrated mode finds the slow rank", _rank_found),
        (11, "then its steps take less than 10 % more than if told", _as_told),
        (12, "with more ranks dynamic comes closer to the bound", _approaches_bound),
        (12, "static stays far from it, but on IMDB", _far_from_bound),
        (12, "a plan takes less than 10 ms", _plans_fast),
    ],
}
