"""Trains a text classifier on one rank or with DDP, and records the parts of every step's time.

Read ``train_text`` from top to bottom: texts, model, the cost of passes and all-reduces by
themselves, then epoch after epoch. All that is written about a step is written between epochs, so
that nothing but a line now and then comes between two steps.
"""

from __future__ import annotations

import functools
import logging
import time
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from common.models.text_classifier import TextClassifier, TextClassifierConfig
from common.runtime.environment import usable_cores
from common.runtime.paths import relative_to_project
from common.runtime.process_group import Worker, process_group
from common.runtime.recorder import Recorder, record_run
from common.runtime.seeding import seed_everything
from common.training.data_parallel_step import Batch, DataParallelStep, StepOptions
from common.training.evaluation import LabelledBatch, evaluate, own_share
from common.training.precision import check_precision
from common.training.scaling_log import ScalingLog, single_arm
from common.training.scaling_probes import Probed, ProbePlan, probe
from common.training.schedule import linear, set_learning_rate
from common.training.text_scaling_config import TextScalingConfig
from common.training.text_scaling_data import (
    Collate,
    IndexedTexts,
    collate_for,
    drawn_batch,
    open_loader,
    open_texts,
)
from common.training.text_scaling_log import EpochLog, EpochSteps

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class TextRun:
    """The texts of both splits, their loader, and the step that learns from them."""

    train: IndexedTexts
    validation: IndexedTexts
    collate: Collate
    loader: torch.utils.data.DataLoader
    step: DataParallelStep
    steps_per_epoch: int


def train_text(config: TextScalingConfig) -> None:
    """Trains as ``config`` says, writes the run directory and prints a line per epoch.

    Raises:
        UserError: settings or data that do not go together.
        RunFailed: the loss is no number any more.
    """
    with process_group(config.device, config.backend) as worker:
        config = config.resolved(worker)
        check_precision(config.precision, worker.device)
        torch.backends.cudnn.benchmark = config.cudnn_benchmark
        if config.threads:
            torch.set_num_threads(config.threads)
        run = open_text_run(config, worker)
        warn_of_settings(config, run, worker)
        with record_run(
            config, "assignment4-text", worker, recorded_settings=run_facts(config, run, worker)
        ) as recorder:
            if config.probe_repeats:
                probe_run(config, run, worker, recorder)
            run_epochs(config, run, worker, recorder)
            if recorder.run:
                print(f"Written to {relative_to_project(recorder.run.path)}")


def open_text_run(config: TextScalingConfig, worker: Worker) -> TextRun:
    """Opens the texts, and makes the model, the optimizer and their step.

    Raises:
        UserError: settings or data that do not go together.
    """
    train, validation = (IndexedTexts(split) for split in open_texts(config))
    collate = collate_for(config, train.texts)
    loader = open_loader(train, config, worker)
    seed_everything(config.seed)
    sizes = classifier_sizes(config, train.texts.num_labels)
    double = config.precision == "float64"
    model = TextClassifier(sizes).to(worker.device, torch.float64 if double else None)
    seed_everything(config.seed, worker.rank)  # each rank draws its own dropout
    optimizer = make_optimizer(config, model.parameters())
    step = DataParallelStep(model, optimizer, loss_of, worker, step_options(config))
    step.settle(lambda: collate([train[0]]))
    # Counted by the loader: a faulty sampler that gives every rank all texts makes epochs longer.
    return TextRun(train, validation, collate, loader, step, len(loader) // config.accumulation)


def classifier_sizes(config: TextScalingConfig, num_labels: int) -> TextClassifierConfig:
    """Returns the sizes of the model that a run trains."""
    return TextClassifierConfig(
        vocab_size=config.vocab_size,
        num_labels=num_labels,
        max_length=config.max_length,
        d_model=config.d_model,
        n_head=config.n_head,
        n_layer=config.n_layer,
        d_ff=config.d_ff,
        dropout=config.dropout,
    )


def make_optimizer(config: TextScalingConfig, parameters: object) -> torch.optim.Optimizer:
    """Makes the run's optimizer: AdamW in its fused implementation."""
    return torch.optim.AdamW(parameters, lr=config.lr, weight_decay=config.weight_decay, fused=True)


def loss_of(outputs: Tensor, batch: Batch) -> Tensor:
    """Computes the mean cross-entropy of a micro-batch; ``outputs`` are logits [batch, labels]."""
    return functional.cross_entropy(outputs, batch.targets)


def step_options(config: TextScalingConfig) -> StepOptions:
    """Returns the options of a step.

    Under float64 the weights have that type, and no autocast is needed: the option is float32.
    """
    return StepOptions(
        accumulation=config.accumulation,
        precision="float32" if config.precision == "float64" else config.precision,
        compression=config.compression,
        bucket_cap_mb=config.bucket_cap_mb,
        static_graph=config.static_graph,
        gradient_as_bucket_view=config.gradient_as_bucket_view,
        max_gradient_norm=config.max_gradient_norm or None,
    )


def warn_of_settings(config: TextScalingConfig, run: TextRun, worker: Worker) -> None:
    """Warns, on rank 0, of settings without effect, and of more processes than cores."""
    steps = config.epochs * run.steps_per_epoch
    if worker.is_main:
        for said in config.without_effect(worker.world_size, worker.device.type, steps):
            logger.warning("without effect: %s", said)
        processes = config.workers * worker.ranks.local_world_size
        if processes > usable_cores():
            logger.warning(
                f"workers: {config.workers} for each rank here are {processes} processes beside "
                f"the ranks, on {usable_cores()} cores"
            )


def run_facts(config: TextScalingConfig, run: TextRun, worker: Worker) -> dict[str, object]:
    """Returns the entries of ``config.yaml`` that are not among the settings."""
    return {
        "world_size": worker.world_size,
        "global_batch": config.global_batch(worker.world_size),
        "steps_per_epoch": run.steps_per_epoch,
        "data_source": run.train.texts.source,
        "train_texts": len(run.train),
        "validation_texts": len(run.validation),
        "parameters": run.step.model.num_parameters(),
    }


def probe_run(config: TextScalingConfig, run: TextRun, worker: Worker, recorder: Recorder) -> None:
    """Measures the parts of the step, each by itself, before anything is trained."""
    formats = dict.fromkeys(("none", "bf16", config.compression))
    plan = ProbePlan(repeats=config.probe_repeats, formats=tuple(formats))
    probed = Probed(
        model=run.step.model,
        make_optimizer=functools.partial(make_optimizer, config),
        loss_of=loss_of,
        make_batch=lambda size: drawn_batch(run.train, run.collate, size, config.seed),
        batch_size=config.batch_size,
        options=run.step.options,
    )
    probe(probed, worker, recorder, plan)


def run_epochs(config: TextScalingConfig, run: TextRun, worker: Worker, recorder: Recorder) -> None:
    """Runs all epochs, each with its evaluation, and writes their tables."""
    arm = single_arm(worker.world_size, config.batch_size, run.step.options)
    log = ScalingLog(worker, recorder, [arm | {"precision": config.precision}])
    epochs = EpochLog(worker, recorder, config.epochs)
    for epoch in range(1, config.epochs + 1):
        done = run_steps(config, run, worker, log, epoch)
        began = time.perf_counter()
        batches = validation_batches(config, run.validation, worker)
        loss, accuracy = evaluate(run.step.model, batches, worker, config.precision)
        evaluation_s = time.perf_counter() - began
        # Written now, outside of what is timed, as writing makes the ranks communicate.
        log.write()
        log.end_epoch(epoch, len(run.train))
        if epoch == 1:
            write_facts(config, run, log)
        epochs.add(epoch, done, evaluation_s, loss, accuracy)


def run_steps(
    config: TextScalingConfig, run: TextRun, worker: Worker, log: ScalingLog, epoch: int
) -> EpochSteps:
    """Runs the steps of one epoch; returns this rank's losses, learning rates and time."""
    run.loader.sampler.set_epoch(epoch - 1)
    run.step.model.train()
    log.pause()
    steps, rates, losses, samples = run.steps_per_epoch, [], [], 0
    began = time.perf_counter()
    micro_batches = iter(run.loader)
    for index in range(steps):
        step = (epoch - 1) * steps + index
        rates.append(linear(step, config.lr, config.warmup_steps, config.epochs * steps))
        set_learning_rate(run.step.optimizer, rates[-1])
        times, batches = run.step.run(functools.partial(next, micro_batches))
        log.add(times, batches, step=step, epoch=epoch, warmup=step < config.discard_steps)
        losses.append(times.loss)
        samples += sum(len(batch.identities) for batch in batches)
        if worker.is_main and (index + 1) % config.log_every == 0:
            logger.info(
                f"epoch {epoch} step {index + 1}/{steps} | loss={times.loss:.4f} | "
                f"lr={rates[-1]:.2e} | time={times.step_s * 1e3:.0f} ms"
            )
    return EpochSteps(losses, rates, time.perf_counter() - began, samples)


def validation_batches(
    config: TextScalingConfig, data: IndexedTexts, worker: Worker
) -> Iterator[LabelledBatch]:
    """Yields this rank's part of a split."""
    collate, own = collate_for(config, data.texts), own_share(data.texts.lengths, worker)
    for start in range(0, len(own), config.batch_size):
        batch = collate([data[index] for index in own[start : start + config.batch_size]])
        batch = batch.to(worker.device)
        yield batch.inputs, batch.targets


def write_facts(config: TextScalingConfig, run: TextRun, log: ScalingLog) -> None:
    """Writes facts.csv: the model and the data, by which runs are compared."""
    padded = config.pad == "max_length"
    log.facts(
        run.step,
        run.collate([run.train[0]]),
        model=(
            f"encoder of {config.n_layer} layers, d_model {config.d_model}, {config.n_head} heads, "
            f"d_ff {config.d_ff}, vocabulary {config.vocab_size}, dropout {config.dropout:g}"
        ),
        data=run.train.texts.source,
        data_samples=len(run.train),
        longest=config.max_length if padded else int(run.train.texts.lengths.max()),
    )
