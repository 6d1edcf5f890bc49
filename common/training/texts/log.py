"""The record of epochs: epochs.csv, the original's metrics.csv, losses.csv, and lines."""

from __future__ import annotations

import logging
from collections.abc import Sequence

import numpy as np

from common.runtime.group.process_group import Worker
from common.runtime.records.recorder import Recorder
from common.tables import EPOCH_COLUMNS, METRIC_COLUMNS
from common.training.divergence import require_finite
from common.training.scaling.data_parallel_step import Batch, StepTimes
from common.training.scaling.log import ScalingLog, StepKey
from common.training.texts.config import TextScalingConfig

logger = logging.getLogger(__name__)

LOSS_COLUMNS = ("epoch", "step", "loss", "learning_rate")


class EpochLog:
    """The tables and lines of a run's epochs. All ranks make it, and add to it together.

    All that is written about a step is written between epochs, so that nothing but a line now and
    then comes between two steps.

    Args:
        worker: this rank.
        recorder: the run's writer.
        scaling: the writer of the steps' parts.
        config: the run's settings.
        steps_per_epoch: number of steps of each.
        train_texts: texts of the training split.
    """

    def __init__(
        self,
        worker: Worker,
        recorder: Recorder,
        scaling: ScalingLog,
        *,
        config: TextScalingConfig,
        steps_per_epoch: int,
        train_texts: int,
    ) -> None:
        self.worker, self.scaling = worker, scaling
        self.config, self.steps_per_epoch, self.train_texts = config, steps_per_epoch, train_texts
        self._own_losses: list[float] = []
        """Means over the rank's samples of each step of the epoch."""
        self._rates: list[float] = []
        self._samples = 0
        self._epochs = recorder.stream("epochs.csv", EPOCH_COLUMNS)
        self._metrics = self._losses = None
        if recorder.run:
            self._metrics = recorder.run.stream("metrics.csv", METRIC_COLUMNS)
            self._losses = recorder.run.stream("losses.csv", LOSS_COLUMNS)

    def add(self, step: int, lr: float, times: StepTimes, batches: Sequence[Batch]) -> None:
        """Adds a step that has ended; nothing is written yet."""
        epoch, index = step // self.steps_per_epoch + 1, step % self.steps_per_epoch
        warmup = step < self.config.discard_steps
        self.scaling.add(times, batches, StepKey(step=step, epoch=epoch, warmup=warmup))
        self._own_losses.append(times.loss)
        self._rates.append(lr)
        self._samples += sum(len(batch.identities) for batch in batches)
        if self.worker.is_main and (index + 1) % self.config.log_every == 0:
            logger.info(
                f"epoch {epoch} step {index + 1}/{self.steps_per_epoch} | loss={times.loss:.4f} | "
                f"lr={lr:.2e} | time={times.step_s * 1e3:.0f} ms"
            )

    def end_span(
        self, span: range, train_s: float, evaluation_s: float, loss: float, accuracy: float
    ) -> None:
        """Writes the epoch of the steps ``span``, and prints a line; all ranks call it.

        Args:
            span: the epoch's steps.
            train_s: seconds of the steps.
            evaluation_s: seconds of the evaluation after them.
            loss, accuracy: loss and accuracy on the validation split.

        Raises:
            RunFailed: on all ranks, if the last loss is not finite.
        """
        epoch = span.start // self.steps_per_epoch + 1
        self.scaling.write()
        self.scaling.end_epoch(epoch, self.train_texts)
        self.scaling.pause()
        # The ranks' batches are of equal size: the mean of their means is that of all samples.
        losses = np.mean(self.worker.gather(self._own_losses), axis=0)
        train_loss = float(losses.mean())
        row = {
            "epoch": epoch,
            "train_time_s": train_s,
            "evaluation_time_s": evaluation_s,
            "epoch_time_s": train_s + evaluation_s,
            "steps": len(losses),
            "samples": self._samples,
            "train_loss": train_loss,
        }
        self._epochs.write([row | {"val_loss": loss, "val_acc": accuracy}])
        if self._metrics:
            values = (epoch, train_loss, train_s, loss, accuracy)
            self._metrics.write([dict(zip(METRIC_COLUMNS, values, strict=True))])
            self._losses.write(
                {"epoch": epoch, "step": step, "loss": of_step, "learning_rate": rate}
                for step, of_step, rate in zip(span, losses.tolist(), self._rates, strict=True)
            )
            print(
                f"epoch {epoch}/{self.config.epochs} | train_loss={train_loss:.4f} | "
                f"train_time={train_s:.2f}s | val_loss={loss:.4f} | val_acc={accuracy:.4f}",
                flush=True,
            )
        require_finite(losses.tolist(), span.start, "lower --lr, or take --precision fp32")
        self._own_losses, self._rates, self._samples = [], [], 0
