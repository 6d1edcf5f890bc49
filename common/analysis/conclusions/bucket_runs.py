"""What the notebooks of assignment 2 have in common: their runs, and conclusions on caps."""

from __future__ import annotations

from functools import cache

import pandas as pd

from common.analysis.accuracy.study import recorded_study
from common.analysis.buckets import ablation, networks
from common.analysis.buckets.measurements import open_run
from common.analysis.buckets.sweep import BucketSweep
from common.analysis.conclusions.conclusion import (
    Look,
    Seen,
    Status,
    above,
    counted,
    unsettled,
)
from common.errors import UserError
from common.judged import compared, fastest
from common.perfmodel.model import FULL
from common.samples import per_round

run_of = cache(open_run)
study_of = cache(recorded_study)
models_of = cache(lambda run_dir: ablation.compare(run_of(run_dir)))


def rounds_of(sweep: BucketSweep) -> pd.DataFrame:
    """Returns the median backward pass: a row per round, a column per distinct bucketing (MiB)."""
    return per_round(sweep.distinct().steps, "backward_time_ms", "bucket_cap_mib")


def best_of(rounds: pd.DataFrame) -> float:
    first = fastest(rounds)
    if first is None:
        raise UserError("a single bucketing was measured")
    return first.arm


@cache
def networks_of(run_dir: str) -> networks.Networks:
    opened = networks.open_networks(run_dir)
    if opened.left_out:
        raise UserError(opened.left_out)
    return opened


def imperfect(run_dir: str) -> Seen:
    return above(models_of(run_dir)[FULL].error, "{:.1%}")


def choice_not_worse(run_dir: str) -> Seen:
    rounds, chosen = rounds_of(run_of(run_dir).sweep), models_of(run_dir)[FULL].predicted_best_mib
    best = best_of(rounds)
    if chosen == best:
        return counted(True, f"{chosen:g} MiB is the best measured")
    outcome = above(compared(rounds, best, claims=1)[chosen])
    number = f"{chosen:g} MiB over {best:g}: {outcome.number}"
    return unsettled(number) if outcome.status is Status.OPEN else counted(False, number)


def slower_than_best(sweep: BucketSweep, place: int) -> Seen:
    """Says whether the smallest cap (place 0) or the largest one (−1) is slower than the best."""
    rounds = rounds_of(sweep)
    best, end = best_of(rounds), rounds.columns[place]
    if best == end:
        return counted(False, f"{best:g} MiB is the best")
    return above(compared(rounds, best)[end])


def at_end(place: int) -> Look:
    return lambda run_dir: slower_than_best(run_of(run_dir).sweep, place)


GOOD = (1, "the prediction can be told from a perfect one", imperfect)
"""A conclusion of two notebooks."""
