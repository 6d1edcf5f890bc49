"""Conclusions of assignment 3: what dynamic micro-batches gain, and where they do not."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import numpy as np
import pandas as pd

from common.analysis.conclusions.conclusion import (
    Look,
    Seen,
    above,
    below,
    counted,
    difference,
    numbered,
    unsettled,
)
from common.analysis.micro_batches import calibration
from common.analysis.micro_batches.lab import open_assignment3
from common.analysis.micro_batches.mode_comparison import (
    CONTROL,
    PAYS_FROM,
    STATIC,
    ModeComparison,
)
from common.analysis.micro_batches.summary import SAME_CURVE, loss_agreement
from common.errors import UserError
from common.judged import Judged
from common.samples import student

DYNAMIC, TOKENS_SQ, EQUAL_COUNTS = "dynamic", "dynamic_tokens_sq", "karmarkar_karp"

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
    padded = comparison.times[comparison.times["mode"] == STATIC].groupby("step")["padded_tokens"]
    guess = (padded.max() - padded.min()) / 2 / padded.max()
    waiting = _waiting(run_dir)[STATIC].reindex(guess.index)
    less = Judged(difference(waiting, guess), null=0.0, **comparison.conditions)
    number = f"{waiting.mean():.1%} against {guess.mean():.1%}"
    outcome = below(less, "{:+.1%}")
    return replace(outcome, number=f"{number}: {outcome.number}")


def _above_promise(run_dir: str) -> Seen:
    row = _row(run_dir, DYNAMIC)
    judged = _step(_comparison(run_dir), DYNAMIC)
    outcome = above(replace(judged, null=row["padded_ratio"]))
    return Seen(outcome.status, f"{outcome.number}; {row['padded_ratio']:.2f} promised")


def _row(run_dir: str, mode: str) -> pd.Series:
    comparison = _comparison(run_dir)
    if mode not in comparison.modes:
        raise UserError(f"mode {mode} was not measured")
    return comparison.summary.loc[mode]


def _worse_plan(run_dir: str) -> Seen:
    return above(_over_dynamic(run_dir, TOKENS_SQ))


def _over_dynamic(run_dir: str, mode: str) -> Judged:
    """Judges a mode's steps over dynamic's on the same global batches, as ``judged`` does."""
    comparison = _comparison(run_dir)
    for name in (mode, DYNAMIC):
        _step(comparison, name)
    return comparison.over(DYNAMIC)[mode]


def _equal_counts(run_dir: str) -> Seen:
    return above(replace(_step(_comparison(run_dir), EQUAL_COUNTS), null=0.98))


def _own_batches(mode: str) -> Look:
    def look(run_dir: str) -> Seen:
        _row(run_dir, DYNAMIC)
        comparison = _comparison(run_dir)
        table = comparison.per_sample
        if mode not in table.index:
            raise UserError(f"mode {mode} was not measured")
        # Their steps have other texts, so nothing is paired: intervals lie apart, or they do not.
        other, dynamic = table.loc[mode], table.loc[DYNAMIC]
        number = f"{other['ratio']:.2f} ({other['ratio_low']:.2f} to {other['ratio_high']:.2f})"
        number += f" of static's time, dynamic {dynamic['ratio']:.2f}"
        is_apart = (
            other["ratio_high"] < dynamic["ratio_low"] or other["ratio_low"] > dynamic["ratio_high"]
        )
        judged = [comparison.judged[name] for name in (mode, DYNAMIC)]
        if not is_apart or any(side.rounds < side.least_rounds for side in judged):
            return unsettled(number)
        return counted(other["ratio"] < dynamic["ratio"], number)

    return look


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


def _deviations(run_dir: str, column: str) -> pd.DataFrame:
    """Returns the standard deviation over ranks in ms: a row per step, a column per mode."""
    runs = _lab(run_dir).training
    if not runs:
        raise UserError(_lab(run_dir).left_out)
    return pd.DataFrame({mode: run.over_ranks(column) for mode, run in runs.items()}).dropna()


def _steps_alike(run_dir: str) -> Seen:
    steps, compute = (
        _deviations(run_dir, f"{name}_time_ms")[STATIC] for name in ("step", "compute")
    )
    return above(Judged(student(compute - steps), null=0.0), "{:+.1f} ms")


def _balances(run_dir: str) -> Seen:
    compute = _deviations(run_dir, "compute_time_ms")
    return below(Judged(student(compute[DYNAMIC] - compute[STATIC]), null=0.0), "{:+.1f} ms")


def _waiting(run_dir: str) -> pd.DataFrame:
    """Returns the share of all ranks' time in a step that they wait: a column per mode."""
    sums = (
        _comparison(run_dir)
        .times.groupby(["step", "mode"])[["waiting_time_ms", "step_time_ms"]]
        .sum()
    )
    return (sums["waiting_time_ms"] / sums["step_time_ms"]).unstack("mode")


def _little_left(run_dir: str) -> Seen:
    waiting = _waiting(run_dir)
    if CONTROL not in waiting or DYNAMIC not in waiting:
        raise UserError("no control was measured")
    # The control has batches of its own: its mean is taken as it is.
    rest = waiting[DYNAMIC] - waiting[CONTROL].mean()
    of_static = waiting[STATIC] - waiting[CONTROL].mean()
    judged = Judged(student((rest - of_static / 4).dropna()), null=0.0)
    return below(judged, "{:+.1%}")


def _waits_more(run_dir: str) -> Seen:
    _row(run_dir, TOKENS_SQ)
    waiting = _waiting(run_dir)
    return above(Judged(student(waiting[TOKENS_SQ] - waiting[STATIC]), null=0.0), "{:+.1%}")


def _calibrated_gains_little(run_dir: str) -> Seen:
    return above(replace(_over_dynamic(run_dir, calibration.CALIBRATED), null=0.95))


def _slow_steps(run_dir: str) -> pd.DataFrame:
    table = _comparison(run_dir).slow_rank
    if table is None:
        raise UserError("no rank was slowed")
    return table


def _untold(run_dir: str) -> Seen:
    table = _slow_steps(run_dir)
    if calibration.NOT_TOLD not in set(table["mode"]):
        raise UserError("no plan was left untold")
    ratios = calibration.slow_steps(table, calibration.NOT_TOLD)
    outcome = above(Judged(student(np.log(ratios)).map(np.exp), null=1.0))
    expected = _expected(run_dir)
    return Seen(outcome.status, f"{outcome.number}; {expected:.2f} by the factor alone")


def _expected(run_dir: str) -> float:
    """Returns what equal parts take over parts by speed: one rank slower by the factor."""
    factor, ranks = (
        calibration.slow_summary(_slow_steps(run_dir)).factor,
        _comparison(run_dir).ranks,
    )
    return factor / ranks * (ranks - 1 + 1 / factor)


def _rank_found(run_dir: str) -> Seen:
    slowed = calibration.slow_summary(_slow_steps(run_dir))
    number = f"{slowed.estimate:.2f} for {slowed.factor:g}, from step {slowed.found_at}"
    return counted(slowed.found_at is not None, number)


def _as_told(run_dir: str) -> Seen:
    table = _slow_steps(run_dir)
    found_at = calibration.slow_summary(table).found_at
    if found_at is None:
        raise UserError("the slow rank was not found")
    ratios = calibration.slow_steps(table, calibration.CALIBRATED).loc[found_at:]
    return below(Judged(student(np.log(ratios)).map(np.exp), null=1.1))


def _simulated(run_dir: str) -> pd.DataFrame:
    simulation = _lab(run_dir).simulation
    if simulation is None:
        raise UserError("no simulation in this run")
    return simulation.extremes().set_index(["data set", "mode"])


def _approaches_bound(run_dir: str) -> Seen:
    dynamic = _simulated(run_dir).xs(DYNAMIC, level="mode")
    few, most = dynamic.iloc[:, 0], dynamic.iloc[:, 1]
    return counted(
        bool((most < few).all()), f"{few.max():.2f} → {most.max():.2f} times the bound at most"
    )


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
    "assignment3_dynamic_batches": numbered(
        [
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
            (9, "dynamic leaves less than a quarter of static's avoidable wait", _little_left),
            (9, "ranks wait more under tokens² than under static", _waits_more),
            (10, "the calibrated plan gains less than 5 % more", _calibrated_gains_little),
            (11, "a plan that is not told of a slow rank takes longer", _untold),
            (11, "the calibrated mode finds the slow rank", _rank_found),
            (11, "then its steps take less than 10 % more than if told", _as_told),
            (12, "with more ranks dynamic comes closer to the bound", _approaches_bound),
            (12, "static stays far from it, but on IMDB", _far_from_bound),
            (12, "a plan takes less than 10 ms", _plans_fast),
        ]
    ),
}
