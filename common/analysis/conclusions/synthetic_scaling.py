"""Conclusions of assignment 4: speedups of a synthetic model, on ranks and emulated hosts."""

from __future__ import annotations

from collections.abc import Callable
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
    every,
    is_behind,
    numbered,
    opposite,
    within,
)
from common.analysis.scaling.laws import FITS_WITHIN, FittedLaw
from common.analysis.scaling.sweep_run import ScalingLab, Series, SweepRun, open_assignment4
from common.analysis.scaling.training_run import STRONG, WEAK
from common.analysis.sweep_speedups import step_times_by_round
from common.errors import UserError
from common.judged import Judged
from common.perfmodel.scaling.published_mlp import Explanation, explain_published
from common.samples import Interval, paired_ratio, student

GOOD = 0.8

_lab = cache(open_assignment4)
_published_pair = cache(explain_published)


def _sweep(run_dir: str) -> SweepRun:
    return _lab(run_dir).sweep


def _replay(run_dir: str) -> SweepRun:
    lab: ScalingLab = _lab(run_dir)
    if lab.left_out or lab.replay is None:
        raise UserError(lab.left_out or "no replay in this run")
    return lab.replay


def _ends(run_dir: str, regime: str = WEAK) -> tuple[Series, Series]:
    """Returns the series of the smallest and of the largest batch."""
    series = [arms for arms in _sweep(run_dir).series if arms.regime == regime]
    if not series:
        raise UserError(f"no series of {regime} scaling")
    return series[0], series[-1]


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


def _judged(run: SweepRun, interval: Interval, null: float) -> Judged:
    return Judged(interval, null=null, machine=run.opened.machine_state)


def _contention(run_dir: str) -> Seen:
    run = _sweep(run_dir)
    arms = _weak(run)
    largest = arms[arms["batch_per_rank"] == arms["batch_per_rank"].max()]["arm"]
    if len(largest) < 2:
        raise UserError("the largest batch was measured on one number of ranks")
    passes_ms = _by_arm(run, lambda parts: parts["forward_ms"] + parts["backward_ms"])
    ratio = paired_ratio(passes_ms[largest.iloc[-1]], passes_ms[largest.iloc[0]])
    return above(_judged(run, ratio, 1.0))


def _share_of_communication(run_dir: str) -> Seen:
    run = _sweep(run_dir)
    arms = _weak(run)
    most = arms[arms["world_size"] == arms["world_size"].max()]
    shares = _by_arm(run, lambda parts: parts["communication_ms"] / parts["sum_ms"])
    smallest, largest = _first_and_last(most)
    more = difference(shares[smallest], shares[largest])
    number = ", ".join(
        f"{shares[row.arm].mean():.0%} with {row.batch_per_rank}" for row in most.itertuples()
    )
    outcome = above(_judged(run, more, 0.0), "{:+.0%}")
    return replace(outcome, number=f"{number}: {outcome.number}")


def _first_and_last(arms: pd.DataFrame) -> tuple[int, int]:
    """Returns the arms of the smallest and of the largest batch."""
    if arms["batch_per_rank"].nunique() < 2:
        raise UserError("a single batch")
    return arms["arm"].iloc[0], arms["arm"].iloc[-1]


def _speedup(series: Series) -> Judged:
    """Returns the speedup of the most ranks, as its section judges it."""
    return series.table["judged"].iloc[-1]


def _largest_weak(run_dir: str) -> Seen:
    return above(_speedup(_ends(run_dir)[1]))


def _smallest_weak(run_dir: str) -> Seen:
    return below(_speedup(_ends(run_dir)[0]))


def _smallest_strong(run_dir: str) -> Seen:
    return below(_speedup(_ends(run_dir, STRONG)[0]))


def _none_good(run_dir: str) -> Seen:
    table = _sweep(run_dir).speedups
    several = table[(table["world_size"] > 1) & table["judged"].notna()]
    if several.empty:
        raise UserError("no arm on several ranks beside one on a single rank")
    efficiencies = [
        replace(
            row.judged,
            interval=row.judged.interval.map(lambda speedup, n=row.world_size: speedup / n),
            null=GOOD,
        )
        for row in several.sort_values("efficiency", ascending=False).itertuples()
    ]
    return every([below(efficiency, "{:.0%}") for efficiency in efficiencies])


def _exchanges(run: SweepRun, value: Callable[[pd.DataFrame], pd.Series]) -> pd.DataFrame:
    """Returns a value of exchanges that were watched: a row per round, a column per batch.

    It is the mean of the arms that have the batch.
    """
    arms = run.exchanges
    if arms.empty:
        raise UserError("buckets were not watched")
    if arms["batch_per_rank"].nunique() < 2:
        raise UserError("a single batch")
    batches = arms.set_index("arm")["batch_per_rank"]
    by_arm = _by_arm(run, value)[batches.index].astype(float)
    return by_arm.T.groupby(batches).mean().T


def _more_hidden(run_dir: str) -> Seen:
    run = _sweep(run_dir)
    hidden = _exchanges(run, lambda parts: 1 - parts["exposed_ratio"] / parts["total_ratio"])
    more = difference(hidden.iloc[:, -1], hidden.iloc[:, 0])
    number = ", ".join(f"{share:.0%} with {batch}" for batch, share in hidden.mean().items())
    outcome = above(_judged(run, more, 0.0), "{:+.0%}")
    return replace(outcome, number=f"{number}: {outcome.number}")


def _falls_less(run_dir: str) -> Seen:
    run = _sweep(run_dir)
    ratios = _exchanges(run, lambda parts: parts["total_ratio"])
    batches = ratios.columns[-1] / ratios.columns[0]
    fall = paired_ratio(ratios.iloc[:, 0], ratios.iloc[:, -1])
    outcome = every([above(_judged(run, fall, 1.0)), below(_judged(run, fall, batches))])
    return replace(outcome, number=f"by {outcome.number} for {batches:.0f}")


def _errors(run: SweepRun) -> pd.DataFrame:
    if run.errors is None:
        raise UserError(run.predictions[1])
    return run.errors


def _correction_worse(run_dir: str) -> Seen:
    run = _sweep(run_dir)
    errors = _errors(run)
    predicted = errors[~errors["reference"].astype(bool)].set_index("arm")
    if predicted.empty:
        raise UserError("no arm but the one that was fitted to")
    rounds = step_times_by_round(run.steps)[predicted.index]
    plain, adjusted = (
        (predicted[f"{name}_step_ms"] / rounds - 1).abs().median(axis=1)
        for name in ("predicted", "adjusted")
    )
    outcome = above(_judged(run, difference(adjusted, plain), 0.0), "{:+.1%}")
    number = f"{plain.mean():.0%} → {adjusted.mean():.0%} in the median: {outcome.number}"
    return replace(outcome, number=number)


def _no_law(run_dir: str) -> Seen:
    fitted = [(law, arms) for arms in _replay(run_dir).series for law in arms.laws[0]]
    if not fitted:
        raise UserError("no law was fitted")
    outcomes = [opposite(_describes(*pair)) for pair in fitted]
    number = ", ".join(f"{law.law.name} {law.largest_error:.0%}" for law, _ in fitted)
    return replace(every(outcomes), number=f"{number}; {every(outcomes).number}")


def _describes(law: FittedLaw, arms: Series) -> Seen:
    """Says whether a law is off by at most ``FITS_WITHIN`` at every point that it was fitted to."""
    points = arms.table[arms.table["world_size"] > 1]
    return every(
        within(
            replace(
                row.judged,
                interval=row.judged.interval.map(
                    lambda speedup, n=row.world_size: float(law.predict([n])[0]) / speedup - 1
                ),
            ),
            FITS_WITHIN,
        )
        for row in points.itertuples()
    )


def _falls_again(run_dir: str) -> Seen:
    [series, *_more] = _replay(run_dir).series
    times = pd.DataFrame(1 / series.rounds, columns=series.table["world_size"])
    return is_behind(times, times.columns[-1])


def _too_short(run_dir: str) -> Seen:
    replay = _replay(run_dir)
    predicted_ms = _errors(replay).set_index("arm")["predicted_step_ms"]
    rounds = step_times_by_round(replay.steps)[predicted_ms.index]
    ratios = [
        paired_ratio(np.full(len(rounds), predicted_ms[arm]), rounds[arm], claims=rounds.shape[1])
        for arm in rounds
    ]
    longest = sorted(ratios, key=lambda ratio: -ratio.estimate)
    return every([below(_judged(replay, ratio, 1.0)) for ratio in longest])


def _half_waits(run_dir: str) -> Seen:
    replay = _replay(run_dir)
    row = replay.parts.sort_values("world_size").iloc[-1]
    shares = _by_arm(
        replay, lambda parts: (parts["waiting_ms"] + parts["communication_ms"]) / parts["sum_ms"]
    )
    outcome = above(_judged(replay, student(shares[row["arm"]]), 0.5), "{:.0%}")
    return replace(outcome, number=f"{outcome.number} on {row['world_size']} hosts")


def _possible(look: Callable[[Explanation], tuple[bool, str]]) -> Look:
    return lambda _: counted(*look(_published_pair()))


def _bandwidth(pair: Explanation) -> tuple[bool, str]:
    return pair.share_of_pcie < 1, f"{pair.share_of_pcie:.0%} of PCIe's"


def _slowdown(pair: Explanation) -> tuple[bool, str]:
    return 1 < pair.slowdown < 1.4, f"{pair.slowdown - 1:.0%}"


def _one_unknown(pair: Explanation) -> tuple[bool, str]:
    error = pair.at_mean_slowdown[1]
    return error < 0.01, f"off by at most {error:.1%}"


CONCLUSIONS = {
    "assignment4_synthetic_scaling": (
        *numbered(
            [
                (1, "passes take longer on several ranks", _contention),
                (1, "with a smaller batch communication's share grows", _share_of_communication),
                (2, "weak scaling, largest batch: faster than one rank", _largest_weak),
                (2, "weak scaling, smallest batch: slower than one rank", _smallest_weak),
                (2, "strong scaling, smallest batch: slower than one rank", _smallest_strong),
                (2, "no series reaches 80 %", _none_good),
                (3, "more is hidden with the larger batch", _more_hidden),
                (3, "all-reduces over computation fall less than batches grow", _falls_less),
                (4, "the correction makes the other arms' predictions worse", _correction_worse),
                (5, "no law describes the points", _no_law),
                (5, "the most hosts are slower than the best number", _falls_again),
                (6, "all steps of the replay are predicted too short", _too_short),
                (6, "on the most hosts ranks wait or send for half of the step", _half_waits),
            ]
        ),
        *numbered(
            [
                (7, "the bandwidth is one that PCIe can carry", _possible(_bandwidth)),
                (7, "the slowdown is one that others measured", _possible(_slowdown)),
                (7, "with others' mean one unknown explains both steps", _possible(_one_unknown)),
            ],
            of_run=False,
        ),
    ),
}
