"""Loss curves in numbers: how far apart strategies are, how near the entropy a run comes."""

from __future__ import annotations

import pandas as pd

from common.analysis.assignment1 import Training, TrainingRun

LAST_SHARE = 0.1
"""Part of a run's steps that its final loss is the mean of."""
WINDOWS = 40
"""A smoothed curve is a mean over this part of all steps."""


def losses(training: Training) -> pd.DataFrame:
    """A column per compared run, on the steps that all of them have."""
    curves = [
        run.loss.rename(name) for name, run in zip(training.names(), training.compared, strict=True)
    ]
    return pd.concat(curves, axis=1, join="inner")


def loss_differences(training: Training) -> pd.DataFrame:
    """How far each run's loss is from the first one's, by step, in nats."""
    table = losses(training)
    return table.sub(table.iloc[:, 0], axis=0).abs()


def largest_difference(training: Training) -> tuple[float, int]:
    """The largest difference of any two curves at any step, in nats, and that step."""
    table = losses(training)
    spread = table.max(axis=1) - table.min(axis=1)
    return float(spread.max()), int(spread.idxmax())


def smoothed_loss(run: TrainingRun) -> pd.Series:
    """A centred moving mean of the loss; ``attrs['window']`` is how many steps it takes."""
    window = max(3, len(run.loss) // WINDOWS) | 1
    smooth = run.loss.rolling(window, center=True, min_periods=1).mean()
    smooth.attrs["window"] = window
    return smooth


def final_loss(run: TrainingRun) -> tuple[float, int]:
    """The mean loss of the last tenth of the steps, and how many these are."""
    count = max(1, round(LAST_SHARE * len(run.loss)))
    return float(run.loss.iloc[-count:].mean()), count
