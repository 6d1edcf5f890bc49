"""Trains a text classifier with DDP; a batch source says which texts a rank takes in a step.

Read ``train_text`` and ``run_steps`` from top to bottom. There are two kinds of run: micro-batches
of equal size from PyTorch's sampler (``sampled_run``, assignment 4), and micro-batches that a
planner chooses anew for each rank and step (``planned_run``, assignment 3). Their models, steps
and tables differ; the order in which things happen is the same, and stands here.
"""

from __future__ import annotations

import logging
import time

from common.runtime.group.process_group import process_group
from common.runtime.paths import relative_to_project
from common.runtime.records.recorder import record_run
from common.training.evaluation import evaluate
from common.training.learning_rate import linear, set_learning_rate
from common.training.micro_batches.config import MicroBatchConfig
from common.training.micro_batches.log import MicroBatchLog
from common.training.micro_batches.planned_run import PlannedBatches, PlannedRun
from common.training.micro_batches.sampled_run import EpochLog, SampledBatches, SampledRun
from common.training.texts.config import TextScalingConfig

logger = logging.getLogger(__name__)


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
                run_steps(run, source, log)
            if recorder.run:
                print(f"Written to {relative_to_project(recorder.run.path)}")


def run_steps(
    run: PlannedRun | SampledRun,
    source: PlannedBatches | SampledBatches,
    log: MicroBatchLog | EpochLog,
) -> None:
    """Runs all steps, and evaluates after each span of them.

    The learning rate rises for ``warmup_steps`` steps, and then falls to 0 in a straight line.

    Args:
        source: the micro-batches of each span of steps.
        log: the writer of the run's tables.
    """
    config, step = run.config, run.step
    for number, span in enumerate(run.spans):
        began = time.perf_counter()
        next_batch = source.begin(number)
        for index in span:
            lr = linear(index, config.lr, config.warmup_steps, run.spans[-1].stop)
            set_learning_rate(step.optimizer, lr)
            times, batches = step.run(next_batch)
            source.learn(times, batches)
            log.add(index, lr, times, batches)
        trained = time.perf_counter()
        validation = run.validation_batches()
        loss, accuracy = evaluate(run.model, validation, run.worker, config.precision)
        evaluated = time.perf_counter()
        log.end_span(span, trained - began, evaluated - trained, loss, accuracy)
