"""The error to expect of a prediction: what the recorded accuracy study found in the same regime.

A regime says what takes the time. ``compute-bound``, ``balanced`` and ``communication-bound`` go by
the time of all gradients' all-reduce over that of the backward pass, each alone. Over ``loopback``
ranks share the cores that all-reduces run on; with ``added latency`` every bucket waits.

The study's 90 % quantile makes an interval around a new prediction, in which nine of ten measured
medians are to be expected. ``ddplab study accuracy`` tells how many were: each case is then held
against the errors of the others alone.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path

from common.csv_tables import read_table
from common.errors import UserError
from common.perfmodel.model import DdpModel
from common.perfmodel.published import DATA

REGIMES = {"communication-bound": 1.8, "balanced": 1.0, "compute-bound": 0.45}
"""Regime → all communication over the backward pass, in seconds of each alone, in the study."""
LOOPBACK, LATENCY = "loopback", "added latency"
ERRORS = "errors-by-regime.csv"
"""The study's summary: ``ERROR_COLUMNS``, shares as fractions."""
ERROR_COLUMNS = (
    "regime",
    "bucketings",
    "noise",
    "median_error",
    "p90_error",
    "worst_error",
    "hardware",
    "date",
)


@dataclass(frozen=True)
class ExpectedError:
    """The study's errors for bucketings of a regime: |predicted / measured − 1| of the pass.

    Attributes:
        noise: difference between two halves of the same measurements, the median of the cases.
        source: hardware and date.
    """

    regime: str
    bucketings: int
    noise: float
    median: float
    p90: float
    source: str

    def interval_s(self, predicted_s: float, chance: float = 0.0) -> tuple[float, float]:
        """Returns the ends of the interval that holds nine of ten measured medians, in seconds.

        ``chance`` is half the width of the prediction's own band, relative to it, as in
        ``Chance.share``. The study's errors hold as much of it as its calibrations had.
        """
        return interval_s(predicted_s, math.hypot(self.p90, chance))

    def text(self) -> str:
        """Formats the errors as a sentence for the terminal."""
        return (
            f"{self.regime}: in the recorded accuracy study ({self.source}) the median error was "
            f"{self.median:.1%}, 90 % were within {self.p90:.1%}, of {self.bucketings} bucketings "
            f"(noise {self.noise:.1%})"
        )


def interval_s(predicted_s: float, error: float) -> tuple[float, float]:
    """Returns the ends of what a prediction with at most this |predicted / measured − 1| allows."""
    return predicted_s / (1 + error), predicted_s / (1 - min(error, 0.99))


def regime_of(model: DdpModel, loopback: bool) -> str:
    """Returns the regime of a system; ``loopback``: ranks communicate on the machine they share."""
    if model.added_latency_s:
        return LATENCY
    if loopback:
        return LOOPBACK
    all_at_once_s = float(model.network.time_s(model.profile.total_bytes))
    ratio = all_at_once_s / model.profile.backward_s
    # Nearest by ratio: between two regimes their geometric mean divides.
    return min(REGIMES, key=lambda name: max(REGIMES[name] / ratio, ratio / REGIMES[name]))


def expectation(
    model: DdpModel, backend: str, network: str, predicted_s: float, chance: float = 0.0
) -> str:
    """Returns the error to expect of a prediction, and the interval around it, as two sentences.

    ``network`` is the name that runs record, such as ``TCP over loopback``; ``chance`` as for
    ``ExpectedError.interval_s``.
    """
    if backend != "gloo":
        return f"Expected error: not known; no system with {backend} is in the recorded study"
    expected = expected_error(regime_of(model, "loopback" in network))
    low_s, high_s = expected.interval_s(predicted_s, chance)
    return (
        f"Expected error, {expected.text()}. So expect {low_s * 1e3:.1f} to {high_s * 1e3:.1f} ms, "
        f"in nine of ten cases"
    )


def expected_error(regime: str, data: Path = DATA) -> ExpectedError:
    """Returns the errors of the newest recorded study in a regime.

    Raises UserError where no study is recorded, or the newest has no such regime.
    """
    tables = [read_table(path, ERROR_COLUMNS) for path in data.glob(f"*/study-accuracy*/{ERRORS}")]
    if not tables:
        raise UserError(f"no accuracy study is recorded below {data}")
    newest = max(tables, key=lambda table: str(table["date"].iloc[0])).set_index("regime")
    if regime not in newest.index:
        raise UserError(f"the recorded accuracy study has no regime {regime!r}")
    row = newest.loc[regime]
    return ExpectedError(
        regime=regime,
        bucketings=int(row["bucketings"]),
        noise=float(row["noise"]),
        median=float(row["median_error"]),
        p90=float(row["p90_error"]),
        source=f"{row['hardware']}; {row['date']}",
    )
