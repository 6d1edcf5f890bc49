"""A run whose micro-batches PyTorch's sampler draws, epoch after epoch, all of the same size.

``SampledRun`` is what ``text_trainer`` trains, ``SampledBatches`` its source of micro-batches, and
``EpochLog`` its record: epochs.csv, the original's metrics.csv, losses.csv, and lines. Before
anything is trained, passes and all-reduces are timed by themselves, from which a step is predicted.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from common.models.text_classifier import TextClassifier
from common.runtime.group.network import ranks_on_machine
from common.runtime.group.process_group import Worker
from common.runtime.machine.environment import usable_cores
from common.runtime.records.recorder import Recorder
from common.tables import EPOCH_COLUMNS, METRIC_COLUMNS
from common.training.divergence import require_finite
from common.training.evaluation import LabelledBatch, own_batches
from common.training.precision import check_precision
from common.training.scaling.data_parallel_step import Batch, DataParallelStep, StepTimes
from common.training.scaling.log import ScalingLog, StepKey, single_arm
from common.training.scaling.probes import Probed, ProbePlan, probe
from common.training.texts.config import TextScalingConfig
from common.training.texts.data import Collate, drawn_batch, open_loader, open_texts
from common.training.texts.model import build_on_rank, make_optimizer

logger = logging.getLogger(__name__)

LOSS_COLUMNS = ("epoch", "step", "loss", "learning_rate")


class SampledRun:
    """The texts of both splits, their loader, and the step that learns from them.

    All ranks open it.
    """

    kind = "assignment4-text"

    def __init__(self, config: TextScalingConfig, worker: Worker) -> None:
        check_precision(config.precision, worker.device)
        torch.backends.cudnn.benchmark = config.cudnn_benchmark
        if config.threads:
            torch.set_num_threads(config.threads)
        self.config, self.worker = config, worker
        with worker.mistakes_shared():
            self.train, self.validation = open_texts(config.texts())
        self.collate = Collate(self.train.texts.pad_id, config.width)
        self.loader = open_loader(self.train, self.collate, config, worker)
        sizes = config.classifier(self.train.texts.num_labels)
        self.model = build_on_rank(
            functools.partial(TextClassifier, sizes),
            seed=config.seed,
            precision=config.precision,
            worker=worker,
        )
        self.step = DataParallelStep(
            self.model,
            make_optimizer(self.model.parameters(), config.lr, config.weight_decay),
            loss_of,
            worker,
            config.step_options(),
        )
        self.step.settle(lambda: self.collate([self.train[0]]))
        # Counted by the loader: a faulty sampler that gives every rank all texts makes epochs
        # longer.
        steps = len(self.loader) // config.accumulation
        self.spans = [range(epoch * steps, (epoch + 1) * steps) for epoch in range(config.epochs)]

    def without_effect(self) -> Iterator[str]:
        """Yields the settings that change nothing in this run, each with the reason."""
        worker = self.worker
        return self.config.without_effect(
            worker.world_size, worker.device.type, self.spans[-1].stop
        )

    def facts(self) -> dict[str, object]:
        """Returns the entries of ``config.yaml`` that are not among the settings."""
        return {
            "world_size": self.worker.world_size,
            "global_batch": self.config.global_batch(self.worker.world_size),
            "steps_per_epoch": len(self.spans[0]),
            "data_source": self.train.texts.source,
            "train_texts": len(self.train),
            "validation_texts": len(self.validation),
            "parameters": self.model.num_parameters(),
        }

    def validation_batches(self) -> Iterator[LabelledBatch]:
        """Yields this rank's part of the validation split."""
        data = self.validation
        for indices in own_batches(data.texts.lengths, self.config.batch_size, self.worker):
            batch = self.collate([data[index] for index in indices]).to(self.worker.device)
            yield batch.inputs, batch.targets

    @contextmanager
    def begin(self, recorder: Recorder) -> Iterator[tuple[SampledBatches, EpochLog]]:
        """Measures the parts of a step, each by itself; yields the source and the log."""
        config, worker = self.config, self.worker
        warn_of_processes(config.workers, worker)
        if config.probe_repeats:
            self._probe(recorder)
        arm = single_arm(worker.world_size, config.batch_size, self.step.options)
        steps = ScalingLog(worker, recorder, [arm | {"precision": config.precision}])
        self._write_facts(steps)
        yield SampledBatches(self.loader), EpochLog(self, recorder, steps)

    def _probe(self, recorder: Recorder) -> None:
        """Times the parts of a step, at several batch sizes and in the formats of gradients."""
        config = self.config
        probed = Probed(
            model=self.model,
            make_optimizer=functools.partial(
                make_optimizer, lr=config.lr, weight_decay=config.weight_decay
            ),
            loss_of=loss_of,
            make_batch=lambda size: drawn_batch(self.train, self.collate, size, config.seed),
            batch_size=config.batch_size,
            options=self.step.options,
        )
        formats = tuple(dict.fromkeys(("none", "bf16", config.compression)))
        probe(probed, self.worker, recorder, ProbePlan(config.probe_repeats, formats=formats))

    def _write_facts(self, log: ScalingLog) -> None:
        """Writes facts.csv: the model and the data, by which runs are compared."""
        sizes = self.config.classifier(self.train.texts.num_labels)
        log.facts(
            self.step,
            self.collate([self.train[0]]),
            model=(
                f"encoder of {sizes.n_layer} layers, d_model {sizes.d_model}, {sizes.n_head} "
                f"heads, d_ff {sizes.d_ff}, vocabulary {sizes.vocab_size}, dropout "
                f"{sizes.dropout:g}"
            ),
            data=self.train.texts.source,
            data_samples=len(self.train),
            longest=self.collate.width or int(self.train.texts.lengths.max()),
        )


class SampledBatches:
    """Micro-batches of this rank in each epoch, as its loader draws them."""

    def __init__(self, loader: torch.utils.data.DataLoader) -> None:
        self.loader = loader

    def begin(self, span: int) -> Callable[[], Batch]:
        """Returns the function that gives the next micro-batch of the epoch ``span`` (from 0)."""
        self.loader.sampler.set_epoch(span)
        return functools.partial(next, iter(self.loader))

    def learn(self, times: StepTimes, batches: list[Batch]) -> None:
        """Does nothing: which samples are drawn does not depend on how long others took."""


def loss_of(outputs: Tensor, batch: Batch) -> Tensor:
    """Computes the mean cross-entropy of a micro-batch; ``outputs`` are logits [batch, labels]."""
    return functional.cross_entropy(outputs, batch.targets)


def warn_of_processes(workers: int, worker: Worker) -> None:
    """Warns, on rank 0, of more loading processes here than there are cores."""
    processes = workers * ranks_on_machine(worker.ranks.local_world_size)
    if worker.is_main and processes > usable_cores():
        logger.warning(
            f"workers: {workers} for each rank here are {processes} processes beside "
            f"the ranks, on {usable_cores()} cores"
        )


class EpochLog:
    """The tables and lines of a run's epochs. All ranks make it, and add to it together.

    All that is written about a step is written between epochs, so that nothing but a line now and
    then comes between two steps.

    ``scaling`` writes the steps' parts.
    """

    def __init__(self, run: SampledRun, recorder: Recorder, scaling: ScalingLog) -> None:
        self.worker, self.config, self.scaling = run.worker, run.config, scaling
        self.steps_per_epoch, self.train_texts = len(run.spans[0]), len(run.train)
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

        Times are those of the steps and of the evaluation after them; loss and accuracy are those
        of the validation split. Raises RunFailed on all ranks if the last loss is not finite.
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
