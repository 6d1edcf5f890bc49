"""What the rounds of a sweep say of its steps' parts, each number with its interval and verdict."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np
import pandas as pd

from common.analysis.scaling.sweep_run import SweepRun
from common.analysis.scaling.training_run import WEAK
from common.analysis.show import judged_format
from common.analysis.sweep_speedups import step_times_by_round
from common.errors import UserError
from common.judged import Judged
from common.samples import Interval, paired_difference, paired_ratio, student

Judge = Callable[[SweepRun], Judged]


def told_by_rounds(run: SweepRun, judges: Mapping[str, tuple[Judge, str]]) -> dict[str, str]:
    """Returns numbers in words, or why a run lacks them, by title; each with its format."""
    facts = {}
    for title, (judge, form) in judges.items():
        try:
            facts[title] = judged_format(form)(judge(run))
        except UserError as missing:
            facts[title] = f"not measured: {missing}"
    return facts


def slowed_passes(run: SweepRun) -> Judged:
    """Judges the passes on the most ranks over those on one: weak scaling, the largest batch."""
    arms = _weak(run)
    largest = arms[arms["batch_per_rank"] == arms["batch_per_rank"].max()]["arm"]
    if len(largest) < 2:
        raise UserError("the largest batch was measured on one number of ranks")
    passes_ms = _by_arm(run, lambda parts: parts["forward_ms"] + parts["backward_ms"])
    return _judged(run, paired_ratio(passes_ms[largest.iloc[-1]], passes_ms[largest.iloc[0]]), 1.0)


def grown_share(run: SweepRun) -> Judged:
    """Judges communication's share of a step on the most ranks with the smallest batch, above that
    with the largest: weak scaling."""
    arms = _weak(run)
    most = arms[arms["world_size"] == arms["world_size"].max()]
    if most["batch_per_rank"].nunique() < 2:
        raise UserError("a single batch")
    shares = _by_arm(run, lambda parts: parts["communication_ms"] / parts["sum_ms"])
    smallest, largest = (shares[most["arm"].iloc[at]] for at in (0, -1))
    return _judged(run, paired_difference(smallest, largest))


def more_hidden(run: SweepRun) -> Judged:
    """Judges the share of all-reduces that is hidden with the largest batch, above that with the
    smallest."""
    hidden = _exchanges(run, lambda parts: 1 - parts["exposed_ratio"] / parts["total_ratio"])
    return _judged(run, paired_difference(hidden.iloc[:, -1], hidden.iloc[:, 0]))


def exchange_falls(run: SweepRun) -> Judged:
    """Judges all-reduces over computation with the smallest batch, over that with the largest."""
    ratios = _exchanges(run, lambda parts: parts["total_ratio"])
    return _judged(run, paired_ratio(ratios.iloc[:, 0], ratios.iloc[:, -1]), 1.0)


def correction_error(run: SweepRun) -> Judged:
    """Judges the median error of the adjusted predictions above that of the plain ones, of the arms
    that the correction was not taken from."""
    errors = _errors(run)
    tested = errors[~errors["reference"].astype(bool)].set_index("arm")
    if tested.empty:
        raise UserError("no arm but the one that was fitted to")
    rounds = step_times_by_round(run.steps)[tested.index]
    plain, adjusted = (
        (tested[f"{name}_step_ms"] / rounds - 1).abs().median(axis=1)
        for name in ("predicted", "adjusted")
    )
    return _judged(run, paired_difference(adjusted, plain))


def judged_predictions(run: SweepRun) -> pd.DataFrame | None:
    """Returns ``run.errors`` with each error as it may be said, judged; intervals hold at once."""
    if run.errors is None:
        return None
    rounds = step_times_by_round(run.steps)
    judged = [
        _judged(
            run,
            paired_ratio(
                np.full(len(rounds), row.predicted_step_ms), rounds[row.arm], claims=len(run.errors)
            ).map(lambda ratio: ratio - 1),
        )
        for row in run.errors.itertuples()
    ]
    return run.errors.assign(judged=judged)


def waits_and_sends(run: SweepRun) -> Judged:
    """Judges the share of waiting and communication in a step on the most ranks."""
    arm = run.parts.sort_values("world_size").iloc[-1]["arm"]
    shares = _by_arm(
        run, lambda parts: (parts["waiting_ms"] + parts["communication_ms"]) / parts["sum_ms"]
    )
    return _judged(run, student(shares[arm]), None)


def _by_arm(run: SweepRun, value: Callable[[pd.DataFrame], pd.Series]) -> pd.DataFrame:
    """Returns a value of each arm's parts: a row per round, a column per arm."""
    parts = run.parts_by_round
    return parts.assign(value=value(parts)).pivot(index="round", columns="arm", values="value")


def _weak(run: SweepRun) -> pd.DataFrame:
    """Returns the arms of weak scaling that were measured in parts, by batch and ranks."""
    arms = run.parts[run.parts["regime"] == WEAK]
    if arms.empty:
        raise UserError("no arms of weak scaling")
    return arms.sort_values(["batch_per_rank", "world_size"])


def _exchanges(run: SweepRun, value: Callable[[pd.DataFrame], pd.Series]) -> pd.DataFrame:
    """Returns a value of watched exchanges, the mean over a batch's arms: rounds × batches."""
    arms = run.exchanges
    if arms.empty:
        raise UserError("buckets were not watched")
    if arms["batch_per_rank"].nunique() < 2:
        raise UserError("a single batch")
    batches = arms.set_index("arm")["batch_per_rank"]
    by_arm = _by_arm(run, value)[batches.index].astype(float)
    return by_arm.T.groupby(batches).mean().T


def _errors(run: SweepRun) -> pd.DataFrame:
    if run.errors is None:
        raise UserError(run.predictions[1])
    return run.errors


def _judged(run: SweepRun, interval: Interval, null: float | None = 0.0) -> Judged:
    return Judged(interval, null=null, machine=run.opened.machine_state)
