"""What the notebooks of assignment 2 have in common: their runs, and conclusions on caps."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

from common.analysis.accuracy.study import recorded_study
from common.analysis.buckets import ablation, networks
from common.analysis.buckets.measurements import open_run
from common.analysis.buckets.sweep import Accuracy
from common.analysis.conclusions.conclusion import Look, Seen, above, is_behind, is_first
from common.errors import UserError
from common.perfmodel.model import FULL

run_of = cache(open_run)
study_of = cache(recorded_study)
models_of = cache(lambda run_dir: ablation.compare(run_of(run_dir)))


@cache
def networks_of(run_dir: str) -> networks.Networks:
    opened = networks.open_networks(run_dir)
    if opened.left_out:
        raise UserError(opened.left_out)
    return opened


def imperfect(run_dir: str) -> Seen:
    return above(models_of(run_dir)[FULL].error, "{:.1%}")


def choice_not_worse(run_dir: str) -> Seen:
    accuracy = models_of(run_dir)[FULL]
    outcome = is_first(accuracy.rounds, accuracy.predicted_best_mib, **accuracy.conditions)
    number = f"{outcome.number}, its rival over {accuracy.predicted_best_mib:g} MiB"
    return replace(outcome, number=number)


def slower_than_best(accuracy: Accuracy, place: int) -> Seen:
    """Says whether the smallest cap (place 0) or the largest one (−1) is slower than the best."""
    return is_behind(accuracy.rounds, accuracy.rounds.columns[place], **accuracy.conditions)


def at_end(place: int) -> Look:
    return lambda run_dir: slower_than_best(models_of(run_dir)[FULL], place)


GOOD = (1, "the prediction can be told from a perfect one", imperfect)
"""A conclusion of two notebooks."""
