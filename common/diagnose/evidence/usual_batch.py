"""Passes measured apart, as if their batches had been as large as the steps' were on the mean.

A watch repeats one pass. Where batches differ in size, even the one closest to the mean may be far
from it, and each rank has another one. A line through the passes' times over their elements says
how much longer they would have been.
"""

from __future__ import annotations

import pandas as pd

from common.analysis.step_parts import PLAIN, flags
from common.diagnose.evidence.evidence import ELEMENTS
from common.perfmodel.scaling.step_model import LinearTime

PASSES = ("forward_time_ms", "backward_time_ms")


def of_usual_batch(
    probes: pd.DataFrame, exchanging: pd.DataFrame, steps: pd.DataFrame, batch: int
) -> tuple[pd.DataFrame, pd.DataFrame]:
    """Scales passes to batches of the steps' mean size.

    Args:
        probes, exchanging: as the ranks wrote them; the second may be empty.
        steps: ``steps.csv``.
        batch: samples of a pass, to be those of the mean size.

    Returns:
        both tables; unchanged where the sizes of batches are not known (of an earlier watch).
    """
    usual = _mean_elements(steps)
    if ELEMENTS not in probes or not usual or not (probes[ELEMENTS] > 0).all():
        return probes, exchanging
    own = probes["rank"].map(probes[probes["size"] == 1].groupby("rank")[ELEMENTS].median())
    share = probes[ELEMENTS] / own
    scaled = {"batch_per_rank": (share * batch).round().clip(lower=1).astype(int)}
    several = probes[flags(probes["together"])]
    for column in PASSES:
        medians = several.groupby(["rank", ELEMENTS])[column].median()
        line = LinearTime.fit(medians.index.get_level_values(ELEMENTS), medians / 1e3)
        scaled[column] = probes[column] * line.time_s(share * usual) / line.time_s(probes[ELEMENTS])
        if len(exchanging):
            longer = line.time_s(usual) / line.time_s(exchanging[ELEMENTS])
            exchanging = exchanging.assign(**{column: exchanging[column] * longer})
    return probes.assign(**scaled), exchanging


def _mean_elements(steps: pd.DataFrame) -> float:
    """Returns the elements of a pass's batch in the steps that a run's speed is taken from."""
    if ELEMENTS not in steps:
        return 0.0
    measured = steps[~flags(steps["warmup"])]
    plain = measured[measured["kind"] == PLAIN]
    rows = plain if len(plain) else measured
    return float(rows[ELEMENTS].sum() / max(1, rows["micro_batches"].sum()))
