"""Predicts the step under each setting, and chooses the settings that are worth real steps.

Every distinct bucketing is predicted, and the options on top of the best of them. Predictions of
neighbours hardly differ, so candidates are taken some way apart: a prediction that is a few per
cent off in one place is then not off for all of them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

from common.perfmodel.buckets import MIB, DdpOptions
from common.perfmodel.calibration import calibrated_model
from common.perfmodel.ddp.best_cap import Candidate
from common.perfmodel.ddp.bucketings import Bucketing, distinct_bucketings
from common.perfmodel.ddp.comm_hooks import CastHook
from common.perfmodel.ddp.step import StepOptions, StepParts
from common.perfmodel.model import DdpModel
from common.tuning.ddp_setting import DEFAULT, DdpSetting

if TYPE_CHECKING:
    from common.tuning.measured import Measured

MOST_CANDIDATES = 8
APART = 1.5
"""Lower bound on the ratio of the caps of two candidates."""
ALIKE = 0.005
"""Relative difference up to which predictions count as equal."""
FIRST_SHARES = (1 / 16, 1 / 8, 1 / 4, 1 / 2)
"""Caps of a smaller first bucket, as shares of the other buckets' cap."""
WORTH_AN_OPTION = 0.002
"""Predicted gain from which a setting with a smaller first bucket is a candidate."""
ACCUMULATION = 2


@dataclass(frozen=True)
class Prediction:
    """A setting with the number of its buckets and the times predicted for it.

    ``step_s`` is the time of a forward and a backward pass, per micro-batch; ``backward_s`` that of
    the backward pass that exchanges gradients.
    """

    setting: DdpSetting
    num_buckets: int
    backward_s: float
    step_s: float


@dataclass(frozen=True)
class Predicted:
    """All that was predicted.

    Attributes:
        default: DDP as it comes.
        bucketings: every distinct bucketing, by cap.
        candidates: settings that compute the same numbers, the most promising first.
        options: settings that change the numbers: compression, then accumulation.
    """

    default: Prediction
    bucketings: tuple[Candidate, ...]
    candidates: tuple[Prediction, ...]
    options: tuple[Prediction, ...]


def predict_all(measured: Measured, with_first_bucket: bool = True) -> Predicted:
    """Predicts all bucketings and the options, and chooses the candidates.

    Args:
        measured: the inputs of all predictions.
        with_first_bucket: also try smaller first buckets. For that DDP must take caps one by one
            (``bucket_cap_mb_list``).
    """
    bucketings = distinct_bucketings(measured.profile)
    searched = ddp_model(measured).best_cap(bucketings=bucketings).candidates
    default = predict(measured, DEFAULT)
    plain = [predict(measured, setting) for setting in spread_settings(searched)]
    smaller_first = [
        predict(measured, setting)
        for setting in first_buckets(plain[0].setting)
        if with_first_bucket
    ]
    promising = plain[0].step_s * (1 - WORTH_AN_OPTION)
    first = [p for p in sorted(smaller_first, key=lambda p: p.step_s)[:1] if p.step_s <= promising]
    best = DEFAULT if _same_buckets(plain[0], default) else plain[0].setting
    view = predict(measured, replace(best, bucket_view=True))
    accumulated = predict(measured, replace(best, accumulation=ACCUMULATION))
    unlike = [prediction for prediction in plain if not _same_buckets(prediction, default)]
    # The first MOST_CANDIDATES are taken: the bucket view and the first bucket are always among
    # them. Sorted by predicted time, those that are predicted alike keep this order.
    ordered = [*unlike[:1], view, *first, *unlike[1:]]
    lowest = min(prediction.step_s for prediction in ordered)
    return Predicted(
        default=default,
        bucketings=searched,
        candidates=tuple(
            sorted(ordered[:MOST_CANDIDATES], key=lambda p: time_class(p.step_s, lowest))
        ),
        options=(*best_compressed(measured, bucketings), accumulated),
    )


def _same_buckets(first: Prediction, second: Prediction) -> bool:
    """Returns True if two plain settings are one bucketing: their predictions are then equal."""
    return (first.num_buckets, first.backward_s) == (second.num_buckets, second.backward_s)


def time_class(time_s: float, best_s: float) -> int:
    """Returns a time's distance from the best in steps of ALIKE; equal for times that are alike."""
    return int(np.log(time_s / best_s) / ALIKE)


def spread_settings(bucketings: Sequence[Candidate]) -> list[DdpSetting]:
    """Returns caps by predicted time, each at least a factor APART from all before it.

    Of caps that are predicted alike the largest comes first: what a bucket costs besides its bytes
    is easily predicted too low.
    """
    best_s = min((bucketing.total_s for bucketing in bucketings), default=0.0)
    chosen: list[float] = []
    for bucketing in sorted(bucketings, key=lambda b: (time_class(b.total_s, best_s), -b.low_mib)):
        cap = bucketing.short_cap_mib
        if all(max(cap / other, other / cap) >= APART for other in chosen):
            chosen.append(cap)
    return [DdpSetting(cap) for cap in chosen]


def first_buckets(setting: DdpSetting) -> Iterator[DdpSetting]:
    """Yields the setting with smaller first buckets, one for each of FIRST_SHARES."""
    for share in FIRST_SHARES:
        first = float(f"{setting.cap_mib * share:.3g}")
        if int(first * MIB) >= 1:
            yield replace(setting, first_mib=first)


def best_compressed(measured: Measured, bucketings: Sequence[Bucketing]) -> list[Prediction]:
    """Predicts the fastest compression hook, at its fastest cap, as a list of one.

    The list is empty unless all gradients are float32: others would not be compressed.
    """
    if set(measured.profile.kinds) != {"float32"}:
        return []
    predictions = []
    for name in measured.cast_s_per_byte:
        model, hook = ddp_model(measured, name), cast_hook(measured, name)
        best = model.best_cap(bucketings=bucketings, hook=hook)
        fastest = best.candidate(best.cap_mib).short_cap_mib
        predictions.append(predict(measured, DdpSetting(fastest, compression=name)))
    return [min(predictions, key=lambda p: p.step_s)]


def cast_hook(measured: Measured, name: str) -> CastHook:
    """Returns a compression hook with its measured cost, half of it after the exchange."""
    half = measured.cast_s_per_byte[name] / 2
    return CastHook(name, half, half)


def ddp_model(measured: Measured, compression: str = "none") -> DdpModel:
    """Returns the model of DDP with all-reduces in the format that a compression sends."""
    network = measured.networks[compression]
    return calibrated_model(
        measured.profile,
        network.curve,
        measured.costs,
        crowded=network.crowded,
        backend=measured.backend,
    )


def predict(measured: Measured, setting: DdpSetting) -> Prediction:
    """Predicts the step under a setting."""
    compressed = setting.compression != "none"
    options = StepOptions(
        ddp=DdpOptions(setting.cap_mib, bucket_cap_mib_list=tuple(setting.caps_mib_list)),
        accumulation=setting.accumulation,
        gradient_as_bucket_view=setting.bucket_view,
        hook=cast_hook(measured, setting.compression) if compressed else None,
    )
    parts = StepParts(forward_s=measured.forward_s, update_s=0.0)
    step = ddp_model(measured, setting.compression).step(parts, options)
    return Prediction(
        setting=setting,
        num_buckets=step.backward.num_buckets,
        backward_s=step.backward.total_s,
        step_s=step.total_s / setting.accumulation,
    )
