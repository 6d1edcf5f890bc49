"""Conclusions of assignment 4: speedups of a synthetic model, on ranks and emulated hosts."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache

from common.analysis.conclusions.conclusion import (
    TABLES,
    Look,
    Seen,
    above,
    below,
    every,
    opposite,
    published,
    within,
)
from common.analysis.scaling.laws import FITS_WITHIN
from common.analysis.scaling.sweep_rounds import (
    Judge,
    correction_error,
    exchange_falls,
    grown_share,
    judged_predictions,
    more_hidden,
    slowed_passes,
    waits_and_sends,
)
from common.analysis.scaling.sweep_run import ScalingLab, SweepRun, open_assignment4
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


def _above(judge: Judge, form: str = "{:.2f}") -> Look:
    """Says whether what the rounds of the sweep say of its steps lies above its null."""
    return lambda run_dir: above(judge(_sweep(run_dir)), form)


_contention = _above(slowed_passes)
_share_of_communication = _above(grown_share, "{:+.0%}")
_more_hidden = _above(more_hidden, "{:+.0%}")
_correction_worse = _above(correction_error, "{:+.1%}")


def _speedup(run_dir: str, regime: str, index: int) -> Judged:
    """Returns the speedup on the most ranks with the smallest (index 0) or the largest batch (−1),
    as its section judges it."""
    series = [arms for arms in _sweep(run_dir).series if arms.regime == regime]
    if not series:
        raise UserError(f"no series of {regime} scaling")
    return series[index].table["judged"].iloc[-1]


def _largest_weak(run_dir: str) -> Seen:
    return above(_speedup(run_dir, WEAK, -1))


def _smallest(regime: str) -> Look:
    return lambda run_dir: below(_speedup(run_dir, regime, 0))


def _none_good(run_dir: str) -> Seen:
    table = _sweep(run_dir).speedups
    several = table[(table["world_size"] > 1) & table["judged"].notna()]
    if several.empty:
        raise UserError("no arm on several ranks beside one on a single rank")
    efficiencies = [
        row.judged.map(lambda speedup, n=row.world_size: speedup / n, null=GOOD)
        for row in several.sort_values("efficiency", ascending=False).itertuples()
    ]
    return every([below(efficiency, "{:.0%}") for efficiency in efficiencies])


def _falls_less(run_dir: str) -> Seen:
    fall = exchange_falls(_sweep(run_dir))
    batches = _sweep(run_dir).exchanges["batch_per_rank"]
    times = batches.max() / batches.min()
    outcome = every([above(fall), below(replace(fall, null=times))])
    return replace(outcome, number=f"by {outcome.number} for {times:.0f}")


def _no_law(run_dir: str) -> Seen:
    fitted = [(law, arms) for arms in _replay(run_dir).series for law in arms.laws[0]]
    if not fitted:
        raise UserError("no law was fitted")
    outcome = every(
        opposite(every(within(error, FITS_WITHIN) for error in arms.law_errors(law)))
        for law, arms in fitted
    )
    errors = ", ".join(f"{law.law.name} {law.largest_error:.0%}" for law, _ in fitted)
    return replace(outcome, number=f"{errors}; {outcome.number}")


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
    "assignment4_synthetic_scaling": [
        (1, "passes take longer on several ranks", _contention),
        (1, "with a smaller batch communication's share grows", _share_of_communication),
        (2, "weak scaling, largest batch: faster than one rank", _largest_weak),
        (2, "weak scaling, smallest batch: slower than one rank", _smallest(WEAK)),
        (2, "strong scaling, smallest batch: slower than one rank", _smallest(STRONG)),
        (2, "no series reaches 80 %", _none_good),
        (3, "more is hidden with the larger batch", _more_hidden),
        (3, "all-reduces over computation fall less than batches grow", _falls_less),
        (4, "the correction makes the other arms' predictions worse", _correction_worse),
        (5, "no law describes the points", _no_law),
        (6, "all steps of the replay are predicted too short", _too_short),
        (6, "on the most hosts ranks wait or send for half of the step", _half_waits),
        (7, "the bandwidth is one that PCIe can carry", _possible(_bandwidth), TABLES),
        (7, "the slowdown is one that others measured", _possible(_slowdown), TABLES),
        (
            7,
            "with others' mean one unknown explains both steps",
            _possible(_one_unknown),
            TABLES,
        ),
    ],
}
