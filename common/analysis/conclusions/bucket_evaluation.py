"""Conclusions of assignment 2, part 3: the prediction against measurement."""

from __future__ import annotations

import pandas as pd

from common.analysis.buckets import ablation
from common.analysis.buckets.measurements import WRITTEN_BY
from common.analysis.conclusions.bucket_runs import (
    GOOD,
    at_end,
    choice_not_worse,
    models_of,
    networks_of,
    rounds_of,
    run_of,
    study_of,
)
from common.analysis.conclusions.conclusion import (
    Seen,
    above,
    below,
    counted,
    numbered,
)
from common.csv_tables import read_table
from common.judged import Judged
from common.perfmodel import uncertainty
from common.perfmodel.model import COMPUTE, CURVE, FULL
from common.runtime.records.run_directory import find_table
from common.samples import paired_ratio, slowest_rank, student

LOCAL = "local-times.csv"
LOCAL_COLUMNS = ("round", "iteration", "rank", "backward_time_ms")


def _small_errors(run_dir: str) -> Seen:
    worst = models_of(run_dir)[FULL].worst_error
    return counted(worst < 0.05, f"at most {worst:.1%}")


def _speed_changed(run_dir: str) -> Seen:
    run = run_of(run_dir)
    times = read_table(find_table(run.run_dir, LOCAL, WRITTEN_BY[LOCAL]), LOCAL_COLUMNS)
    steps = slowest_rank(times, "backward_time_ms", by=["round", "iteration"])
    by_round = steps.groupby("round").median()
    timed_ms = pd.Series(run.profile.backward_s * 1e3, by_round.index)
    return above(Judged(paired_ratio(by_round, timed_ms)))


def _communication_short(run_dir: str) -> Seen:
    run, table = run_of(run_dir), models_of(run_dir)[FULL].table
    rounds = rounds_of(run.sweep)[table["bucket_cap_mib"]]
    computed_ms = (run.profile.backward_s - run.local_s) * 1e3
    other_ms = table["predicted_ms"].to_numpy() - rounds - computed_ms
    return below(Judged(student(other_ms.median(axis=1)), null=0.0), "{:+.1f} ms")


def _exposes_less(run_dir: str) -> Seen:
    table = ablation.exposed_communication(run_of(run_dir))
    less_ms = table["recorded_ms"] - table["predicted_ms"]
    return counted(bool((less_ms > 0).all()), f"by {less_ms.min():.1f} to {less_ms.max():.1f} ms")


def _contention_most(run_dir: str) -> Seen:
    models = models_of(run_dir)
    errors = pd.Series({name: models[name].median_error for name in run_of(run_dir).model.ladder()})
    drop = -errors.diff()
    before, after = errors.shift()[COMPUTE], errors[COMPUTE]
    return counted(drop.idxmax() == COMPUTE, f"{before:.1%} → {after:.1%}; most: {drop.idxmax()}")


def _slow_link_terms(run_dir: str) -> Seen:
    slowest = networks_of(run_dir).runs[0]
    ladder = slowest.model.ladder()
    names = list(ladder)[list(ladder).index(CURVE) :]
    errors = [slowest.sweep.accuracy_of(ladder[name]).median_error for name in names]
    return counted(max(errors) < 0.03, f"{min(errors):.1%} to {max(errors):.1%}")


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


def _regret(name: str) -> pd.Series:
    return study_of().regrets()[f"regret of {name}"].dropna()


def _study_one_bucket(_: str) -> Seen:
    regret = _regret("largest").median()
    return counted(regret > 0.1, f"{regret:.0%} longer")


def _study_smallest(_: str) -> Seen:
    regrets = _regret("smallest")
    number = f"{regrets.median():.0%} longer, at worst {regrets.max():.0%}"
    return counted(regrets.median() < 0.1 < regrets.max(), number)


def _study_hardest(_: str) -> Seen:
    medians = study_of().by_regime()["median"]
    hidden, dominant = medians["compute-bound"], medians["communication-bound"]
    return counted(hidden > dominant, f"{hidden:.1%} against {dominant:.1%}")


def _copies_told(run_dir: str) -> Seen:
    added_ms = run_of(run_dir).calibration.overlap.bookkeeping_s * 1e3
    return above(Judged(student(added_ms), null=0.0), "{:+.1f} ms")


CONCLUSIONS = {
    "assignment2_part3_evaluation": (
        *numbered(
            [
                GOOD,
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
            ]
        ),
        *numbered(
            [
                (5, "one bucket costs over 10 % in the median", _study_one_bucket),
                (5, "the smallest cap does so at worst, not in the median", _study_smallest),
                (5, "errors are larger where computation hides all", _study_hardest),
            ],
            of_run=False,
        ),
        *numbered([(6, "DDP's copies can be told from nothing", _copies_told)]),
    ),
}
