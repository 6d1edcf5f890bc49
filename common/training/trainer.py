"""Trains a GPT-2 on one device, with DDP or with FSDP; the numbers are the same.

Read ``train`` from top to bottom: data, model, strategy, the checkpoint of a run that was cut off,
then step after step. Ranks agree once a step, after its time was taken: on the loss, and on
stopping, if one of them was asked to.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Iterable, Iterator
from dataclasses import replace
from functools import partial
from itertools import chain
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from common.data.markov_text import synthetic_shards
from common.data.token_shards import TokenBatches, TokenShards
from common.errors import Preempted
from common.runtime.group.process_group import Worker, process_group
from common.runtime.paths import relative_to_project
from common.runtime.records.recorder import record_run
from common.training.checkpoints.files import mark_stopped
from common.training.checkpoints.resume import (
    checkpoint_facts,
    free_run_id,
    open_checkpoints,
    recorded_settings,
    restore_scaler,
)
from common.training.config import GLOBAL_BATCH_SIZE, TrainingConfig
from common.training.divergence import require_finite
from common.training.learning_rate import cosine, set_learning_rate
from common.training.parallel import gradient_sync, parallelise
from common.training.recording.step_log import StepLog
from common.training.recording.tracing import write_trace_tables
from common.training.step import TokenBatch, TrainingStep, build_model
from common.training.stop_request import StopRequest, stop_requests

logger = logging.getLogger(__name__)

CHECKED_AHEAD = 100_000_000
"""Upper bound on the tokens that are checked against the vocabulary before training starts."""


def train(config: TrainingConfig) -> None:
    """Trains as ``config`` says, writes the run directory and prints what is done.

    Raises:
        UserError: settings, data or checkpoints that do not go together.
        Preempted: a signal asked to stop, and a checkpoint was made.
    """
    with process_group(config.device, config.backend) as worker:
        resolved = config.resolved(worker)
        chosen = resolved.global_batch_size
        if worker.is_main and chosen not in (config.global_batch_size, GLOBAL_BATCH_SIZE):
            logger.warning(
                "global batch of %d sequences, a multiple of %d ranks × %d; the default of %d is "
                "none",
                chosen,
                worker.world_size,
                resolved.micro_batch_size,
                GLOBAL_BATCH_SIZE,
            )
        with stop_requests(resolved.checkpointing) as stop:
            _train(resolved, worker, stop)


def _train(config: TrainingConfig, worker: Worker, stop: StopRequest) -> None:
    say = print if worker.is_main else lambda line: None
    data = open_data(config, worker)
    batches = TokenBatches(
        shards=data,
        global_batch_size=config.global_batch_size,
        micro_batch_size=config.micro_batch_size,
        seq_len=config.seq_len,
        rank=worker.rank,
        world_size=worker.world_size,
        vocab_size=config.workload(1).config.vocab_size,
    )
    workload = config.workload(batches.accumulation)
    ignored = chain(config.without_effect(), workload.without_effect(worker.device.type))
    for reason in ignored if worker.is_main else ():
        logger.warning("without effect: %s", reason)

    checkpoints, saved = open_checkpoints(config, worker, workload, data)
    first = saved.step if saved else 0
    if first >= config.num_steps:
        say(
            f"Nothing left to do: {relative_to_project(saved.path)} is at step {first} of "
            f"{config.num_steps}; raise --num_steps, or give another --checkpoint_dir"
        )
        return

    # Each rank draws its own weights; the strategy gives all of them those of rank 0.
    model = build_model(workload, worker.device, config.seed + worker.rank)
    if config.precision == "float64":
        model = model.double()
    model = parallelise(model, config, worker)
    step = TrainingStep(
        workload,
        worker.device,
        model=model,
        lr=config.lr,
        weight_decay=config.weight_decay,
        gradient_sync=partial(gradient_sync, model, config.strategy),
        max_gradient_norm=config.grad_clip or math.inf,
        shard_states=config.strategy == "MY_ZERO1",
    )
    if saved:
        checkpoints.load(saved, model, step.optimizer)
        restore_scaler(saved, step.scaler)
        batches.position = saved.position
        say(f"Resumed from {relative_to_project(saved.path)} ({saved.origin})")
    to_do = (config.num_steps - first) * config.global_batch_size * config.seq_len
    data.check_vocabulary(batches.vocab_size, batches.position, min(to_do, CHECKED_AHEAD))

    named = replace(config, run_id=free_run_id(config))
    with record_run(
        named, config.folder, worker, recorded_settings=recorded_settings(config, data, saved)
    ) as recorder:
        say(f"Tokens in shard: {data.lengths[0]:,}")
        began = time.perf_counter()
        with StepLog(config, worker, recorder, first, model, step.optimizer) as log:
            for index in range(first, config.num_steps):
                lr = learning_rate(index, config)
                set_learning_rate(step.optimizer, lr)
                log.begin_step(index)
                loss = step.run(on_device(batches.next_step(), worker.device))
                log.end_step(index)

                loss, gradient_norm, stopping = agree(loss, step.gradient_norm, stop, worker)
                next_lr = learning_rate(index + 1, config)
                log.add(loss, gradient_norm, lr, next_lr)
                done = index + 1
                is_last = done == config.num_steps
                numbers = {"loss": loss, "gradient norm": gradient_norm}
                broken = [name for name, number in numbers.items() if not math.isfinite(number)]
                if broken and is_lost(loss, step.scaler, is_last):
                    log.flush()
                    if checkpoints:
                        checkpoints.wait()
                    require_finite([numbers[broken[0]]], index, what=broken[0])
                if checkpoints and (stopping or is_last or is_due(done, config.save_every)):
                    log.flush()
                    facts = checkpoint_facts(
                        done, batches.position, config, workload, data, step.scaler
                    )
                    with log.checkpoint():
                        checkpoints.save(model, step.optimizer, facts, wait=stopping or is_last)
                if stopping and not is_last:
                    if worker.is_main:
                        mark_stopped(checkpoints.folder, done)
                    worker.barrier()  # as the first rank to leave ends the others
                    folder = relative_to_project(checkpoints.folder)
                    raise Preempted(
                        f"checkpoint of step {done} made in {folder}; the same command goes on"
                    )
            log.flush()
        say(f"Training completed in {time.perf_counter() - began:.1f}s")
        say(f"{config.title} completed!")
        traced = range(log.traced_from, config.num_steps)
        if log.trace and write_trace_tables(recorder, log.trace, traced):
            say(f"Traces saved to: {relative_to_project(recorder.folder)}/traces/{config.folder}/")
        if log.throughput:
            say(log.throughput)
        say(f"Written to {relative_to_project(recorder.folder)}")


def learning_rate(step: int, config: TrainingConfig) -> float:
    """Returns the learning rate of step ``step`` (from 0)."""
    return cosine(step, config.lr, config.min_lr, config.warmup_steps, config.num_steps)


def is_lost(loss: float, scaler: torch.amp.GradScaler, is_last: bool) -> bool:
    """Returns True if a loss or gradient that is no number ends a training.

    In float16 the scaler leaves out an update that overflows, and lowers its scale until none does.
    Below 1 that helps no more.
    """
    if not scaler.is_enabled():
        return True
    return not math.isfinite(loss) and (is_last or scaler.get_scale() < 1)


def is_due(steps: int, save_every: int) -> bool:
    """Returns True if a checkpoint is made after so many steps."""
    return bool(save_every) and steps % save_every == 0


def on_device(batches: Iterable[TokenBatch], device: torch.device) -> Iterator[TokenBatch]:
    """Yields the micro-batches of a step on ``device``, each copied when it is needed.

    A copy from other memory than pinned would wait for all that was launched before it.
    """
    for tokens, targets in batches:
        if device.type == "cuda":
            tokens, targets = tokens.pin_memory(), targets.pin_memory()
        yield tokens.to(device, non_blocking=True), targets.to(device, non_blocking=True)


def agree(
    loss: Tensor, gradient_norm: Tensor, stop: StopRequest, worker: Worker
) -> tuple[float, float, bool]:
    """Averages the loss over all ranks, and finds out if any rank was asked to stop.

    A GPU is waited for once, as the three numbers are read from it together.

    Returns:
        (mean loss, gradient norm, True if a rank was asked to stop), the same on all ranks.
    """
    stops = torch.full((), bool(stop.signal_name), dtype=torch.float64, device=worker.device)
    sums = torch.stack((loss.double(), stops))
    dist.all_reduce(sums)
    total, stops, norm = torch.cat((sums, gradient_norm.double().view(1))).tolist()
    return total / worker.world_size, norm, stops > 0


def open_data(config: TrainingConfig, worker: Worker) -> TokenShards:
    """Opens the run's token shards on every rank; makes synthetic ones if none are given.

    Raises:
        UserError: no shards there, a file that is none, or synthetic text that cannot be written.
    """
    if config.data:
        with worker.mistakes_shared():
            return TokenShards.open(config.data)
    folder = Path(config.output_dir) / "tokens"
    with worker.mistakes_shared():
        if worker.ranks.local_rank == 0:  # on each node, as nodes need not share a file system
            synthetic_shards(folder)
    return TokenShards.open(synthetic_shards(folder))
