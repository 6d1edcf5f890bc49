"""Conclusions of assignment 2, part 3 and emulated hosts: the prediction against measurement."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache

import pandas as pd

from common.analysis.accuracy.study import recorded_study
from common.analysis.accuracy.tables import median_regret
from common.analysis.buckets import ablation, choice, networks
from common.analysis.buckets.networks import NetworkRun
from common.analysis.conclusions.buckets import (
    IMPERFECT,
    at_end,
    choice_not_worse,
    models_of,
    networks_of,
    run_of,
    slower_than_best,
)
from common.analysis.conclusions.conclusion import (
    TABLES,
    Look,
    Seen,
    above,
    below,
    counted,
    every,
    is_first,
    within,
)
from common.errors import UserError
from common.judged import Judged, Verdict
from common.perfmodel import uncertainty
from common.perfmodel.model import COMPUTE, CURVE, FULL
from common.samples import paired_difference

LOOPBACK = "loopback"

_study = cache(recorded_study)


def _small_errors(run_dir: str) -> Seen:
    errors = models_of(run_dir)[FULL].errors
    largest = sorted(errors, key=lambda cap: -abs(errors[cap].estimate))
    outcome = every([within(errors[cap], 0.05) for cap in largest])
    return replace(outcome, number=f"{outcome.number} at {largest[0]:g} MiB")


def _speed_changed(run_dir: str) -> Seen:
    return above(run_of(run_dir).local_over_timed)


def _communication_short(run_dir: str) -> Seen:
    gap_ms = choice.communication_gap(run_of(run_dir), models_of(run_dir)[FULL])
    return below(gap_ms, "{:+.1f} ms")


def _exposes_less(run_dir: str) -> Seen:
    more_ms = ablation.exposed_communication(run_of(run_dir))["judged"]
    least = sorted(more_ms, key=lambda judged: judged.estimate)
    return every([above(more, "{:+.1f} ms") for more in least])


def _contention_most(run_dir: str) -> Seen:
    models = models_of(run_dir)
    removed, names = ablation.removed_errors(models), list(models)
    outcome = is_first(-removed, COMPUTE, "{:+.1%}", ratio=paired_difference, null=0.0)
    before, after = (models[names[names.index(COMPUTE) + at]].median_error for at in (-1, 0))
    return replace(
        outcome,
        number=f"{before:.1%} → {after:.1%}; {outcome.number} more than its closest rival",
    )


def _slow_link_terms(run_dir: str) -> Seen:
    slowest = networks_of(run_dir).runs[0]
    rungs = [*ablation.of_ladder(slowest.model, slowest.sweep).items()]
    names = [name for name, _ in rungs]
    errors = [accuracy.error for _, accuracy in rungs[names.index(CURVE) :]]
    largest = sorted(errors, key=lambda error: -error.estimate)
    return every([below(replace(error, null=0.03), "{:.1%}") for error in largest])


def _bands(run_dir: str) -> pd.DataFrame:
    run = run_of(run_dir)
    caps = list(run.sweep.distinct().measured_s())
    return uncertainty.prediction_bands(run.calibration, caps).table


def _bands_apart(run_dir: str) -> Seen:
    table = _bands(run_dir)
    single, smallest = table.iloc[-1], table.iloc[0]
    number = f"{single['high_ms']:.1f} and {smallest['low_ms']:.1f} ms"
    return counted(single["high_ms"] < smallest["low_ms"], number)


def _in_bands(run_dir: str) -> Seen:
    table, measured = _bands(run_dir), models_of(run_dir)[FULL].table["measured_ms"].to_numpy()
    inside = int(((measured >= table["low_ms"]) & (measured <= table["high_ms"])).sum())
    return counted(inside > len(table) / 2, f"{inside} of {len(table)}")


def _over_a_tenth(name: str) -> Judged:
    return replace(median_regret(_study(), name), null=0.1)


def _study_one_bucket(_: str) -> Seen:
    return _of_cases(above(_over_a_tenth("largest"), "{:.1%}"))


def _study_smallest(_: str) -> Seen:
    worst = _study().regrets()["regret of smallest"].max()
    text = f"at worst {worst:.1%}"
    outcome = every([below(_over_a_tenth("smallest"), "{:.1%}"), counted(worst > 0.1, text)])
    return _of_cases(replace(outcome, number=f"{outcome.number}, {text}"))


def _of_cases(outcome: Seen) -> Seen:
    """Returns what is said of cases, which are the repetitions."""
    number = outcome.number.replace(" rounds", " cases")
    return replace(outcome, number=number if "cases" in number else f"{number}, over cases")


def _copies_told(run_dir: str) -> Seen:
    return above(run_of(run_dir).copies, "{:+.1f} ms")


# Emulated hosts.


def _on_slowest(look: Callable[[NetworkRun], Seen]) -> Look:
    return lambda run_dir: look(networks_of(run_dir).runs[0])


def _on_loopback(look: Callable[[NetworkRun], Seen]) -> Look:
    def on_last(run_dir: str) -> Seen:
        fastest_run = networks_of(run_dir).runs[-1]
        if fastest_run.name != LOOPBACK:
            raise UserError("the ranks were not on loopback")
        return look(fastest_run)

    return on_last


def _streams(run_dir: str) -> Seen:
    reached = networks.links(networks_of(run_dir))[networks.REACHED]
    return counted(bool((reached <= 1).all()), f"{reached.min():.1%} to {reached.max():.1%}")


def _one_bucket(run: NetworkRun) -> Seen:
    return slower_than_best(run.accuracy(), -1)


def _off(run: NetworkRun) -> Seen:
    return above(run.accuracy().error, "{:.1%}")


def _over_default(run: NetworkRun) -> Seen:
    gain = run.gain_over_default(run.accuracy().predicted_best_mib)
    if gain.verdict is Verdict.NOT_MEASURED:
        raise UserError("the sweep has no steps with the default")
    return above(gain, "{:.1%}")


CONCLUSIONS = {
    "assignment2_part3_evaluation": [
        IMPERFECT,
        (1, "no error is above 5 %", _small_errors),
        (1, "the smallest cap is slower than the best", at_end(0)),
        (1, "what is chosen is not slower than the best", choice_not_worse),
        (2, "the pass without DDP was slower in the sweep", _speed_changed),
        (2, "communication is predicted too short", _communication_short),
        (2, "less is exposed than DDP recorded, at every cap", _exposes_less),
        (3, "contention removes the most error over loopback", _contention_most),
        (3, "on the slowest link a(x) is enough for 3 %", _slow_link_terms),
        (4, "bands tell one bucket from the smallest cap", _bands_apart),
        (4, "most measured medians lie in their band", _in_bands),
        (5, "one bucket costs over 10 % in the median", _study_one_bucket, TABLES),
        (5, "the smallest cap does so at worst, not in the median", _study_smallest, TABLES),
        (6, "DDP's copies can be told from nothing", _copies_told),
    ],
    "assignment2_emulated_hosts": [
        (1, "no stream is faster than its link", _streams),
        (2, "over loopback the smallest cap is slower than the best", at_end(0)),
        (2, "on the slowest link one bucket is slower than the best", _on_slowest(_one_bucket)),
        (2, "on the slowest link the chosen cap beats the default", _on_slowest(_over_default)),
        (2, "over loopback the error is told from noise", _on_loopback(_off)),
        (2, "on the slowest link the error is told from noise", _on_slowest(_off)),
    ],
}
