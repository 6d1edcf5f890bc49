"""Conclusions of assignment 2 on its own runs: the model of DDP's backward pass, what it predicts,
and what simpler models and other systems say."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache

import numpy as np
import pandas as pd

from common.analysis.buckets import ablation, choice, networks
from common.analysis.buckets.measurements import open_run
from common.analysis.buckets.sweep import Accuracy
from common.analysis.conclusions.conclusion import (
    TABLES,
    Look,
    Seen,
    above,
    by_prediction,
    counted,
    is_behind,
    is_first,
)
from common.errors import UserError
from common.perfmodel import whatif
from common.perfmodel.calibration import calibrated_model
from common.perfmodel.collectives import PLAUSIBLE_ALPHA_S, AlphaBeta, as_alpha_beta, with_latency
from common.perfmodel.ddp.closed_form import closed_form
from common.perfmodel.model import CURVE, FULL, DdpModel
from common.perfmodel.published import UMD_A100, load_recorded

FACTORS = (1, 16)

run_of = cache(open_run)
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


IMPERFECT = (1, "the prediction can be told from a perfect one", imperfect)
"""A conclusion of two notebooks."""


# Part 1: the model.


def _embedding_last(run_dir: str) -> Seen:
    profile = run_of(run_dir).profile
    share = profile.sizes_bytes[-1] / profile.total_bytes
    return counted("wte" in profile.names[-1], f"{profile.names[-1]}, {share:.0%} of the bytes")


def _passes(run_dir: str) -> tuple:
    """Returns the predicted passes with small buckets, medium ones and a single one."""
    run = run_of(run_dir)
    caps = (run.gradient_mib / 26, run.gradient_mib / 3, max(64, 2 * run.gradient_mib))
    return tuple(map(run.model.at_cap, caps))


def _one_bucket_has(extreme: Callable[[list[float]], float], part: str) -> Look:
    """Says whether a part of the pass is shortest (min) or longest (max) with a single bucket."""

    def look(run_dir: str) -> Seen:
        times_ms = [getattr(view, part) * 1e3 for view in _passes(run_dir)]
        listed = ", ".join(f"{time_ms:.1f}" for time_ms in times_ms)
        return by_prediction(times_ms[-1] == extreme(times_ms), f"{listed} ms")

    return look


def _computation_slowed(run_dir: str) -> Seen:
    small, _, single = (v.total_s - v.exposed_communication_s for v in _passes(run_dir))
    return by_prediction(small > single, f"{small * 1e3:.1f} against {single * 1e3:.1f} ms")


def _compute_bound(run_dir: str) -> Seen:
    run = run_of(run_dir)
    line = as_alpha_beta(run.all_reduce.curve)
    compute_ns = closed_form(run.profile, line).seconds_per_byte * 1e9
    send_ns = 1e9 / line.bandwidth_bytes_per_s
    return counted(compute_ns > send_ns, f"{compute_ns:.2f} against {send_ns:.2f} ns")


def _layers_decide(run_dir: str) -> Seen:
    run = run_of(run_dir)
    by_hand = closed_form(run.profile, as_alpha_beta(run.all_reduce.curve))
    smallest_mib = run.gradient_mib / by_hand.layers
    best_mib = by_hand.best_bucket_bytes() / 2**20
    return counted(np.isclose(best_mib, smallest_mib), f"B/L is {smallest_mib:.2f} MiB")


def _hiding_saves_nothing(run_dir: str) -> Seen:
    run = run_of(run_dir)
    if not run.costs.lost_compute:
        raise UserError("this run did not measure contention")
    sizes, lost_s = map(np.array, run.costs.lost_compute)
    longer = lost_s / run.all_reduce.curve.time_s(sizes) - 1
    return counted(bool((longer > 0).all()), f"takes {longer.min():+.0%} to {longer.max():+.0%}")


# Part 2: what it predicts.


def _lines(run_dir: str) -> tuple[float, float]:
    """Returns the median errors of the course's line and of the fitted one."""
    curve = run_of(run_dir).all_reduce.curve
    sizes, times_s = curve.sizes_bytes, curve.times_s
    lines = AlphaBeta.from_endpoints(sizes, times_s), AlphaBeta.fit(sizes, times_s)
    return tuple(float(np.median(abs(line.time_s(sizes) / times_s - 1))) for line in lines)


def _course_line(run_dir: str) -> Seen:
    course, fitted = _lines(run_dir)
    return counted(course < fitted, f"{course:.0%} against {fitted:.0%}")


def _no_line(run_dir: str) -> Seen:
    better = min(_lines(run_dir))
    return counted(better > 0.05, f"the better one by {better:.0%}")


def _single_chosen(run_dir: str) -> Seen:
    best = run_of(run_dir).model.best_cap()
    last = best.candidates[-1]
    holds = last.num_buckets == 1 and best.near_mib[-1][1] >= last.high_mib
    return by_prediction(holds, choice.near_text(best))


def _published_model() -> DdpModel:
    system = load_recorded(UMD_A100)
    return calibrated_model(system.profile, system.all_reduce)


def _published_band(_: str) -> Seen:
    low, high = whatif.near_interval(_published_model().best_cap())
    return by_prediction(high / low > 10, f"a factor of {high / low:.0f}")


def _published_default(_: str) -> Seen:
    model = _published_model()
    longer = model.backward_s(None) / model.best_cap().total_s - 1
    return by_prediction(longer < 0.01, f"{longer:+.1%}")


# Discussion: simpler models and other systems.


def _simpler_worse(run_dir: str) -> Seen:
    return above(ablation.error_without(models_of(run_dir), CURVE), "{:+.1%}")


def _moves(model: DdpModel, ranks: int) -> pd.DataFrame:
    """Returns best caps before and after each quantity grows, by the quantity."""
    best_caps = whatif.best_caps(whatif.cases(model, ranks, FACTORS))
    return choice.moves(best_caps, *FACTORS).set_index("quantity")


def _latency_moves(run_dir: str) -> Seen:
    run = run_of(run_dir)
    before, after, *simulated = _moves(run.model, run.all_reduce.world_size).loc["latency α"]
    stays = np.isclose(*simulated)
    number = f"equation {before:.2f} → {after:.2f} MiB, simulation "
    number += " → ".join(f"{cap:.3g}" for cap in simulated)
    return counted(stays and after > before, number)


def _directions(_: str) -> Seen:
    system = load_recorded(UMD_A100)
    model = calibrated_model(system.profile, with_latency(system.all_reduce, PLAUSIBLE_ALPHA_S))
    moves = _moves(model, system.world_size)
    before, after = (moves[column] for column in choice.MOVED[:2])
    up = after > before
    grows = up.drop(["bandwidth β", "compute time g"]).all()
    falls = not up[["bandwidth β", "compute time g"]].any()
    return by_prediction(bool(grows and falls), ", ".join(up.index[up]) + " raise it")


CONCLUSIONS = {
    "assignment2_part1_model": [
        (1, "the last gradient is the token embedding's", _embedding_last),
        (2, "a single bucket exposes the most", _one_bucket_has(max, "exposed_communication_s")),
        (2, "small buckets make computation longer", _computation_slowed),
        (2, "a single bucket has the shortest pass", _one_bucket_has(min, "total_s")),
        (3, "a byte takes longer to compute than to send", _compute_bound),
        (3, "b* by hand is limited by B/L", _layers_decide),
        (4, "hiding an all-reduce takes more than it saves", _hiding_saves_nothing),
    ],
    "assignment2_part2_prediction": [
        (1, "the course's line is closer than the fitted one", _course_line),
        (1, "both lines are off by more than 5 % in the median", _no_line),
        (3, "one bucket is within 1 % of b*", _single_chosen),
        (3, "measured, the smallest cap is slower than the best", at_end(0)),
        (3, "what is chosen is not slower than the best", choice_not_worse),
        (4, "caps within 1 % of b* span a factor of ten", _published_band, TABLES),
        (4, "DDP's default is within 1 % of b*", _published_default, TABLES),
    ],
    "assignment2_discussion": [
        IMPERFECT,
        (1, "without copies and contention the error is larger", _simpler_worse),
        (2, "more latency raises b* by hand, not the simulated one", _latency_moves),
        (3, "bandwidth and computation lower b*, all else raises it", _directions, TABLES),
    ],
}
