"""A band around a prediction: what else might have come out of the same measurements.

A prediction is made of medians of samples. Drawing as many samples again from those that there
are, with replacement, and predicting from them, many times over, shows how far chance carries it
(the bootstrap: Efron 1979; ``Calibration.drawn``).

The band is that of the *prediction*: it knows nothing of what the model leaves out, nor of how
instances of DDP differ, so a measured median may lie outside. The interval that
``expected_error`` gives knows of both, from the recorded study.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from common.errors import UserError
from common.perfmodel.buckets import DdpOptions
from common.perfmodel.calibration import SOURCES, Calibration
from common.perfmodel.ddp.bucketings import profile_buckets
from common.perfmodel.model import DdpModel
from common.samples import Interval, middle


@dataclass(frozen=True, eq=False)
class PredictionBands:
    """A prediction and its band for each cap.

    Attributes:
        table: a row per cap: ``bucket_cap_mib`` (NaN is DDP's default), ``predicted_ms`` (from all
            samples), ``median_ms``, ``low_ms`` and ``high_ms`` (of the drawn ones), and
            ``best_share``: in which share of the draws no other cap was faster.
        drawn_s: T of every draw [draws, caps].
    """

    table: pd.DataFrame
    drawn_s: NDArray


def prediction_bands(
    calibration: Calibration,
    caps_mib: Sequence[float | None],
    *,
    draws: int = 200,
    seed: int = 0,
    level: float = 0.9,
) -> PredictionBands:
    """Predicts T at each cap, with the band between the quantiles (1 ± level)/2 of the draws.

    The same seed gives the same band. Raises UserError without caps or with fewer than 2 draws.
    """
    if not len(caps_mib):
        raise UserError("no caps to predict")
    if draws < 2 or not 0 < level < 1:
        raise UserError(f"{draws} draws, level {level:g}: at least 2 draws, a level inside 0 and 1")
    generator = np.random.default_rng(seed)
    model = calibration.model()
    bucketings = [profile_buckets(model.profile, DdpOptions(cap)) for cap in caps_mib]
    # Caps with the same buckets have the same T, so one cap of each bucketing is predicted. The
    # last gradient of each bucket identifies a bucketing.
    distinct = {
        str([bucket[-1] for bucket in buckets]): cap
        for buckets, cap in zip(bucketings, caps_mib, strict=True)
    }
    row_of = {key: index for index, key in enumerate(distinct)}
    of_cap = [row_of[str([bucket[-1] for bucket in buckets])] for buckets in bucketings]

    def times(drawn_model: DdpModel) -> list[float]:
        return [drawn_model.backward_s(cap) for cap in distinct.values()]

    predicted = np.array(times(model))[of_cap]
    drawn = np.array([times(calibration.drawn(generator)) for _ in range(draws)])[:, of_cap]
    low, high = middle(drawn, confidence=level)
    table = pd.DataFrame(
        {
            "bucket_cap_mib": [np.nan if cap is None else float(cap) for cap in caps_mib],
            "predicted_ms": predicted * 1e3,
            "median_ms": np.median(drawn, axis=0) * 1e3,
            "low_ms": low * 1e3,
            "high_ms": high * 1e3,
            "best_share": (drawn <= drawn.min(axis=1, keepdims=True)).mean(axis=0),
        }
    )
    return PredictionBands(table, drawn)


def spread_by_source(calibration: Calibration, cap_mib: float | None) -> dict[str, float]:
    """Returns by source the width of the 90 % band, relative to T, where it alone is drawn."""
    generator = np.random.default_rng(0)
    predicted_s = calibration.model().backward_s(cap_mib)
    spreads = {}
    for source in SOURCES:
        drawn_s = [calibration.drawn(generator, (source,)).backward_s(cap_mib) for _ in range(50)]
        low, high = middle(drawn_s, confidence=0.9)
        spreads[source] = float(high - low) / predicted_s
    return spreads


@dataclass(frozen=True)
class Chance:
    """The effect of chance in the measurements on a prediction.

    Attributes:
        predicted_s: T, from all samples, with its 90 % band.
        widest: the source whose samples move it most.
        moved: the width of the band where that source alone is drawn, relative to T.
    """

    predicted_s: Interval
    widest: str
    moved: float

    @property
    def share(self) -> float:
        """Returns half the band's width, relative to T."""
        return self.predicted_s.half_width / self.predicted_s.estimate

    def around(self, predicted_s: float) -> Chance:
        """Returns a band of the same relative width around another prediction, in seconds."""
        factor = predicted_s / self.predicted_s.estimate
        return replace(self, predicted_s=self.predicted_s.map(lambda time_s: time_s * factor))

    def text(self) -> str:
        """Formats it as a sentence for the terminal."""
        return (
            f"Chance in the measurements: in 90 % of draws the backward pass takes "
            f"{self.predicted_s.low * 1e3:.1f} to {self.predicted_s.high * 1e3:.1f} ms. More "
            f"{self.widest} would narrow this most: they alone move it by {self.moved:.1%}"
        )


def chance_at(calibration: Calibration, cap_mib: float | None) -> Chance:
    """Computes by how much chance moves the prediction at a cap, and which samples do it most."""
    row = prediction_bands(calibration, [cap_mib], draws=100).table.iloc[0]
    spreads = spread_by_source(calibration, cap_mib)
    widest = max(spreads, key=spreads.__getitem__)
    predicted_s = Interval(*row[["predicted_ms", "low_ms", "high_ms"]] / 1e3, confidence=0.9)
    return Chance(predicted_s, widest, spreads[widest])
