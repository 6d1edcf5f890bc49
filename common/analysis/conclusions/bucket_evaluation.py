"""Conclusions of assignment 2, part 3: the prediction against measurement."""

from __future__ import annotations

from dataclasses import replace

import pandas as pd

from common.analysis.buckets import ablation
from common.analysis.buckets.measurements import WRITTEN_BY
from common.analysis.buckets.sweep import exposed_steps
from common.analysis.conclusions.bucket_runs import (
    GOOD,
    at_end,
    choice_not_worse,
    models_of,
    networks_of,
    run_of,
    study_of,
)
from common.analysis.conclusions.conclusion import (
    Seen,
    above,
    below,
    counted,
    difference,
    every,
    is_first,
    numbered,
    within,
)
from common.csv_tables import read_table
from common.judged import Judged
from common.perfmodel import uncertainty
from common.perfmodel.model import COMPUTE, CURVE, FULL
from common.runtime.records.run_directory import find_table
from common.samples import paired_ratio, slowest_rank, student

LOCAL, RECORD = "local-times.csv", "ddp-overlap-times.csv"
LOCAL_COLUMNS = ("round", "iteration", "rank", "backward_time_ms")


def _small_errors(run_dir: str) -> Seen:
    errors = models_of(run_dir)[FULL].errors
    largest = sorted(errors, key=lambda cap: -abs(errors[cap].estimate))
    outcome = every([within(errors[cap], 0.05) for cap in largest])
    return replace(outcome, number=f"{outcome.number} at {largest[0]:g} MiB")


def _speed_changed(run_dir: str) -> Seen:
    run = run_of(run_dir)
    times = read_table(find_table(run.run_dir, LOCAL, WRITTEN_BY[LOCAL]), LOCAL_COLUMNS)
    steps = slowest_rank(times, "backward_time_ms", by=["round", "iteration"])
    by_round = steps.groupby("round").median()
    timed_ms = pd.Series(run.profile.backward_s * 1e3, by_round.index)
    return above(Judged(paired_ratio(by_round, timed_ms)))


def _communication_short(run_dir: str) -> Seen:
    run, accuracy = run_of(run_dir), models_of(run_dir)[FULL]
    computed_ms = (run.profile.backward_s - run.local_s) * 1e3
    other_ms = accuracy.table["predicted_ms"].to_numpy() - accuracy.rounds - computed_ms
    return below(Judged(student(other_ms.median(axis=1)), null=0.0), "{:+.1f} ms")


def _exposes_less(run_dir: str) -> Seen:
    run = run_of(run_dir)
    recorded = exposed_steps(find_table(run.run_dir, RECORD, WRITTEN_BY[RECORD]))
    rounds = recorded.groupby(["round", "bucket_cap_mib"]).median().unstack()
    predicted_ms = ablation.exposed_communication(run).set_index("bucket_cap_mib")["predicted_ms"]
    less_ms = rounds[predicted_ms.index] - predicted_ms
    judged = [
        Judged(student(less_ms[cap], claims=less_ms.shape[1]), null=0.0)
        for cap in less_ms.mean().sort_values().index
    ]
    return every([above(less, "{:+.1f} ms") for less in judged])


def _contention_most(run_dir: str) -> Seen:
    models = models_of(run_dir)
    ladder = run_of(run_dir).model.ladder()
    errors = pd.DataFrame({name: models[name].errors_by_round for name in ladder})
    gained = -errors.diff(axis=1).iloc[:, 1:]
    outcome = is_first(-gained, COMPUTE, "{:+.1%}", ratio=difference, null=0.0)
    before, after = (models[name].median_error for name in _step_to(COMPUTE, list(ladder)))
    return replace(
        outcome,
        number=f"{before:.1%} → {after:.1%}; {outcome.number} more than its closest rival",
    )


def _step_to(name: str, ladder: list[str]) -> tuple[str, str]:
    return ladder[ladder.index(name) - 1], name


def _slow_link_terms(run_dir: str) -> Seen:
    slowest = networks_of(run_dir).runs[0]
    ladder = slowest.model.ladder()
    names = list(ladder)[list(ladder).index(CURVE) :]
    errors = [slowest.sweep.accuracy_of(ladder[name]).error for name in names]
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
