"""Conclusions of assignment 4: speedups of a synthetic model, on ranks and emulated hosts."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache

from common.analysis.conclusions.conclusion import (
    Look,
    Seen,
    above,
    below,
    every,
    numbered,
    opposite,
    published,
    within,
)
from common.analysis.scaling.laws import FITS_WITHIN, FittedLaw
from common.analysis.scaling.sweep_rounds import (
    correction_error,
    exchange_falls,
    grown_share,
    judged_predictions,
    more_hidden,
    slowed_passes,
    waits_and_sends,
)
from common.analysis.scaling.sweep_run import ScalingLab, Series, SweepRun, open_assignment4
from common.analysis.scaling.training_run import STRONG, WEAK
from common.errors import UserError
from common.judged import Judged
from common.perfmodel.scaling.published_mlp import Explanation, explain_published

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


def _contention(run_dir: str) -> Seen:
    return above(slowed_passes(_sweep(run_dir)))


def _share_of_communication(run_dir: str) -> Seen:
    return above(grown_share(_sweep(run_dir)), "{:+.0%}")


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


def _more_hidden(run_dir: str) -> Seen:
    return above(more_hidden(_sweep(run_dir)), "{:+.0%}")


def _falls_less(run_dir: str) -> Seen:
    fall = exchange_falls(_sweep(run_dir))
    batches = _sweep(run_dir).exchanges["batch_per_rank"]
    times = batches.max() / batches.min()
    outcome = every([above(fall), below(replace(fall, null=times))])
    return replace(outcome, number=f"by {outcome.number} for {times:.0f}")


def _correction_worse(run_dir: str) -> Seen:
    return above(correction_error(_sweep(run_dir)), "{:+.1%}")


def _no_law(run_dir: str) -> Seen:
    fitted = [(law, arms) for arms in _replay(run_dir).series for law in arms.laws[0]]
    if not fitted:
        raise UserError("no law was fitted")
    outcomes = [opposite(_describes(*pair)) for pair in fitted]
    number = ", ".join(f"{law.law.name} {law.largest_error:.0%}" for law, _ in fitted)
    return replace(every(outcomes), number=f"{number}; {every(outcomes).number}")


def _describes(law: FittedLaw, arms: Series) -> Seen:
    """Says whether a law is off by at most ``FITS_WITHIN`` at every point that it was fitted to."""
    return every(within(error, FITS_WITHIN) for error in arms.law_errors(law))


def _too_short(run_dir: str) -> Seen:
    replay = _replay(run_dir)
    table = judged_predictions(replay)
    if table is None:
        raise UserError(replay.predictions[1])
    longest = sorted(table["judged"], key=lambda error: -error.estimate)
    return every([below(error, "{:+.0%}") for error in longest])


def _half_waits(run_dir: str) -> Seen:
    return above(replace(waits_and_sends(_replay(run_dir)), null=0.5), "{:.0%}")


def _possible(look: Callable[[Explanation], tuple[bool, str]]) -> Look:
    return lambda _: published(*look(_published_pair()))


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
