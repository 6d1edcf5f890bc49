"""The record of a text run's epochs: epochs.csv, the original's metrics.csv, losses.csv, lines."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from common.errors import RunFailed
from common.runtime.process_group import Worker
from common.runtime.recorder import Recorder
from common.tables import EPOCH_COLUMNS, METRIC_COLUMNS

LOSS_COLUMNS = ("epoch", "step", "loss", "learning_rate")


@dataclass(frozen=True)
class EpochSteps:
    """The steps of one epoch on this rank."""

    losses: list[float]
    """Means over the rank's samples of each step."""
    rates: list[float]
    """Learning rates."""
    train_s: float
    samples: int


class EpochLog:
    """The writer of a run's epochs. All ranks make it, and add to it together."""

    def __init__(self, worker: Worker, recorder: Recorder, epochs: int) -> None:
        self.worker, self.number = worker, epochs
        self._epochs = recorder.stream("epochs.csv", EPOCH_COLUMNS)
        self._metrics = self._losses = None
        if recorder.run:
            self._metrics = recorder.run.stream("metrics.csv", METRIC_COLUMNS)
            self._losses = recorder.run.stream("losses.csv", LOSS_COLUMNS)

    def add(
        self, epoch: int, done: EpochSteps, evaluation_s: float, val_loss: float, val_acc: float
    ) -> None:
        """Writes an epoch that has ended, and prints a line; all ranks call it.

        Args:
            epoch: the epoch's number, from 1.
            done: the epoch's steps on this rank.
            evaluation_s: seconds of the evaluation after it.
            val_loss, val_acc: mean loss and accuracy on the validation split.

        Raises:
            RunFailed: on all ranks, if the last loss is not finite.
        """
        # The ranks' batches are of equal size: the mean of their means is that of all samples.
        losses = np.mean(self.worker.gather(done.losses), axis=0)
        train_loss, first = float(losses.mean()), (epoch - 1) * len(losses)
        row = {
            "epoch": epoch,
            "train_time_s": done.train_s,
            "evaluation_time_s": evaluation_s,
            "epoch_time_s": done.train_s + evaluation_s,
            "steps": len(losses),
            "samples": done.samples,
            "train_loss": train_loss,
        }
        self._epochs.write([row | {"val_loss": val_loss, "val_acc": val_acc}])
        if self._metrics:
            values = (epoch, train_loss, done.train_s, val_loss, val_acc)
            self._metrics.write([dict(zip(METRIC_COLUMNS, values, strict=True))])
            self._losses.write(
                {"epoch": epoch, "step": step, "loss": loss, "learning_rate": rate}
                for step, (loss, rate) in enumerate(
                    zip(losses.tolist(), done.rates, strict=True), start=first
                )
            )
            print(
                f"epoch {epoch}/{self.number} | train_loss={train_loss:.4f} | "
                f"train_time={done.train_s:.2f}s | val_loss={val_loss:.4f} | val_acc={val_acc:.4f}",
                flush=True,
            )
        if not math.isfinite(losses[-1]):
            bad = first + int(np.flatnonzero(~np.isfinite(losses))[0])
            raise RunFailed(
                f"the loss is {losses[-1]} since step {bad}: training went apart; lower --lr, or "
                "take --precision fp32"
            )
