"""Loss curves in numbers: how far apart strategies are, and how near a run comes to the entropy."""

from __future__ import annotations

from dataclasses import dataclass

import pandas as pd

from common.analysis.data_parallel.training_runs import Training, TrainingRun

LAST_SHARE = 0.1
"""Part of a run's steps that its final loss is the mean of."""
WINDOWS = 40
"""A smoothed curve is a mean over this part of all steps."""
ROUNDING_NATS = {"float32": 1e-3, "float64": 1e-9}
"""Differences that rounding explains over a short run, by precision."""
ROUGH_ROUNDING_NATS = 0.05
"""Differences that rounding explains in formats of fewer digits."""


@dataclass(frozen=True)
class Agreement:
    """Largest difference between the loss curves of a comparison, and the tolerance for rounding.

    Attributes:
        largest_nats, step: the largest difference of any two curves at any step, and that step.
        rounding_nats: the largest difference that rounding explains over a short run.
    """

    curves: int
    precision: str
    largest_nats: float
    step: int
    rounding_nats: float

    @property
    def equal(self) -> bool | None:
        """Returns True if rounding explains all differences; None for a single curve."""
        return None if self.curves < 2 else self.largest_nats <= self.rounding_nats


@dataclass(frozen=True)
class Learned:
    """Relates a run's final loss to the entropy of its text; losses in nats per token.

    Attributes:
        final_nats, averaged_steps: the mean loss of the last steps, and the number of these.
        entropy_nats: the entropy of the text, below which no model's loss can stay.
        unigram_nats: the loss of a model that knows only how often each token comes; NaN where it
            was not recorded.
    """

    final_nats: float
    averaged_steps: int
    steps: int
    entropy_nats: float
    unigram_nats: float

    @property
    def above_entropy_nats(self) -> float:
        """Returns the final loss less the entropy."""
        return self.final_nats - self.entropy_nats

    @property
    def share(self) -> float:
        """Returns the learned part of what the order of the tokens is worth.

        0 at the unigram entropy, 1 at the entropy, negative above the unigram entropy.
        """
        worth_nats = self.unigram_nats - self.entropy_nats
        return (self.unigram_nats - self.final_nats) / worth_nats


def losses(training: Training) -> pd.DataFrame:
    """Returns a column per compared run, on the steps that all of them have."""
    curves = [run.loss.rename(name) for name, run in training.named()]
    return pd.concat(curves, axis=1, join="inner")


def loss_differences(training: Training) -> pd.DataFrame:
    """Returns the distance of each run's loss from the first one's, by step, in nats."""
    table = losses(training)
    return table.sub(table.iloc[:, 0], axis=0).abs()


def agreement(training: Training) -> Agreement:
    """Returns how far apart the compared curves are, and how far rounding may carry them."""
    table = losses(training)
    spread = table.max(axis=1) - table.min(axis=1)
    settings = training.compared[0].settings
    precision = "TensorFloat-32" if settings.get("tf32") else settings["precision"]
    return Agreement(
        curves=len(training.compared),
        precision=precision,
        largest_nats=float(spread.max()),
        step=int(spread.idxmax()),
        rounding_nats=ROUNDING_NATS.get(precision, ROUGH_ROUNDING_NATS),
    )


def smoothed_loss(run: TrainingRun) -> pd.Series:
    """Returns a centred moving mean of the loss; ``attrs['window']`` is its number of steps."""
    # An odd window is centred on its step; at the ends the mean is over what is there.
    window = max(3, len(run.loss) // WINDOWS) | 1
    smooth = run.loss.rolling(window, center=True, min_periods=1).mean()
    smooth.attrs["window"] = window
    return smooth


def learned(run: TrainingRun) -> Learned:
    """Returns how near a run on text of known entropy came to it."""
    averaged_steps = max(1, round(LAST_SHARE * len(run.loss)))
    unigram_nats = run.settings.get("unigram_entropy_nats")
    return Learned(
        final_nats=float(run.loss.iloc[-averaged_steps:].mean()),
        averaged_steps=averaged_steps,
        steps=len(run.loss),
        entropy_nats=run.entropy_nats,
        unigram_nats=float("nan") if unigram_nats is None else unigram_nats,
    )
