"""Trains a text classifier with DDP; a batch source says which texts a rank takes in a step.

Read ``train_text`` and ``run_steps`` from top to bottom. There are two kinds of run: micro-batches
of equal size from PyTorch's sampler (``sampled_batches``, assignment 4), and micro-batches that a
planner chooses anew for each rank and step (``planned_batches``, assignment 3). Their models, steps
and tables differ; the order in which things happen is the same, and stands here.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol

from torch import nn

from common.runtime.group.process_group import Worker, process_group
from common.runtime.paths import relative_to_project
from common.runtime.records.recorder import Recorder, record_run
from common.training.evaluation import LabelledBatch, evaluate
from common.training.learning_rate import linear, set_learning_rate
from common.training.micro_batches.config import MicroBatchConfig
from common.training.micro_batches.micro_batch_step import MicroBatchStep
from common.training.micro_batches.planned_run import PlannedRun
from common.training.micro_batches.sampled_run import SampledRun
from common.training.scaling.data_parallel_step import DataParallelStep
from common.training.texts.config import TextScalingConfig

logger = logging.getLogger(__name__)


class BatchSource(Protocol):
    """Source of this rank's micro-batches: a sampler or a planner."""

    def begin(self, span: int) -> Callable[[], Any]:
        """Returns the function that gives the next micro-batch of a span of steps.

        It is called inside of a step, so that the time that it holds the step up is counted.
        """

    def learn(self, times: Any, batches: Any) -> None:
        """Takes note of a step's times on this rank, from which later plans may follow."""


class TextLog(Protocol):
    """The writer of a run's tables and lines."""

    def add(self, step: int, lr: float, times: Any, batches: Any) -> None:
        """Adds a step that has ended."""

    def end_span(
        self, span: range, train_s: float, evaluation_s: float, loss: float, accuracy: float
    ) -> None:
        """Adds the evaluation after a span of steps."""


class TextRun(Protocol):
    """Texts, model and step of a run, open on all ranks."""

    kind: str
    """Name of its run directories."""
    model: nn.Module
    step: MicroBatchStep | DataParallelStep
    spans: Sequence[range]
    """All steps of the run, cut where it evaluates."""

    def without_effect(self) -> Iterable[str]:
        """Returns the settings that change nothing in this run."""

    def facts(self) -> dict[str, object]:
        """Returns the entries of ``config.yaml`` that are not among the settings."""

    def validation_batches(self) -> Iterator[LabelledBatch]:
        """Yields this rank's part of the validation split."""

    def begin(self, recorder: Recorder) -> AbstractContextManager[tuple[BatchSource, TextLog]]:
        """Measures what is measured before training; gives the source and the log."""


def train_text(config: MicroBatchConfig | TextScalingConfig) -> None:
    """Trains as ``config`` says, writes the run directory and prints what is done.

    Raises:
        UserError: settings, data or model that do not go together.
        RunFailed: a single text needs more memory than a rank has, or the loss is no number.
    """
    open_run = PlannedRun if isinstance(config, MicroBatchConfig) else SampledRun
    with process_group(config.device, config.backend) as worker:
        config = config.resolved(worker)
        run = open_run(config, worker)
        for setting in run.without_effect() if worker.is_main else ():
            logger.warning("without effect: %s", setting)
        with record_run(config, run.kind, worker, recorded_settings=run.facts()) as recorder:
            with run.begin(recorder) as (source, log):
                run_steps(
                    run,
                    source,
                    log,
                    worker,
                    lr=config.lr,
                    warmup_steps=config.warmup_steps,
                    precision=config.precision,
                )
            if recorder.run:
                print(f"Written to {relative_to_project(recorder.run.path)}")


def run_steps(
    run: TextRun,
    source: BatchSource,
    log: TextLog,
    worker: Worker,
    *,
    lr: float,
    warmup_steps: int,
    precision: str,
) -> None:
    """Runs all steps, and evaluates after each span of them.

    Args:
        run: the model and its step.
        source: the micro-batches of each span of steps.
        log: the writer of the run's tables.
        worker: this rank.
        lr: learning rate after ``warmup_steps`` steps; it then falls to 0 in a straight line.
        precision: precision of the evaluation.
    """

    def learning_rate(step: int) -> float:
        return linear(step, lr, warmup_steps, run.spans[-1].stop)

    for number, span in enumerate(run.spans):
        began = time.perf_counter()
        run_span(run.step, source.begin(number), span, learning_rate, source, log)
        trained = time.perf_counter()
        loss, accuracy = evaluate(run.model, run.validation_batches(), worker, precision)
        evaluated = time.perf_counter()
        log.end_span(span, trained - began, evaluated - trained, loss, accuracy)


def run_span(
    step: MicroBatchStep | DataParallelStep,
    next_batch: Callable[[], Any],
    span: range,
    learning_rate: Callable[[int], float],
    source: BatchSource,
    log: TextLog,
) -> None:
    """Runs the steps up to the next evaluation."""
    for index in span:
        lr = learning_rate(index)
        set_learning_rate(step.optimizer, lr)
        times, batches = step.run(next_batch)
        source.learn(times, batches)
        log.add(index, lr, times, batches)
