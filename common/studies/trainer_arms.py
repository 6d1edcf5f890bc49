"""The two trainers of the trainer study, and what is recorded of each while it trains.

Our trainer runs unchanged; the moments at which it begins a step and saves are recorded. For the
time of a run, subclasses that also read the clock take the place of two of its classes.
Transformers' trainer offers callbacks for that.
"""

from __future__ import annotations

import itertools
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset, SequentialSampler

from common.data.markov_text import synthetic_shards
from common.data.token_shards import TokenShards
from common.runtime.process_group import Worker
from common.training import resume, trainer
from common.training.checkpoint import Checkpoints
from common.training.config import TrainingConfig
from common.training.step import build_model, build_optimizer
from common.training.step_log import StepLog


@dataclass
class Seen:
    """A training run as recorded on this rank. Moments are in seconds of one clock."""

    begins: list[float] = field(default_factory=list)
    """Beginning of each step."""
    losses: list[float] = field(default_factory=list)
    saves: dict[int, tuple[float, float]] = field(default_factory=dict)
    """Steps done → call of ``save`` and its return."""
    writes: dict[int, tuple[float, float]] = field(default_factory=dict)
    """Steps done → beginning of the writing of a checkpoint's files, and its end."""

    def step_times_ms(self) -> list[float]:
        """Returns the times from each step's beginning to the next's: one fewer than steps."""
        return [(end - start) * 1e3 for start, end in itertools.pairwise(self.begins)]


def run_ours(config: TrainingConfig, worker: Worker) -> Seen:
    """Trains with this project's trainer, in the process group that is there."""
    seen = Seen()
    with watched(seen):
        trainer.train(config)
    return seen


@contextmanager
def watched(seen: Seen) -> Iterator[None]:
    """Lets the trainer use classes that record in ``seen`` when their methods are called."""

    class WatchedLog(StepLog):
        def begin_step(self, index: int) -> None:
            seen.begins.append(time.perf_counter())
            super().begin_step(index)

        def add(self, loss: float, *others: float) -> None:
            seen.losses.append(loss)
            super().add(loss, *others)

    class WatchedCheckpoints(Checkpoints):
        def save(self, *states: object, **options: bool) -> None:
            step = states[2]["step"]
            seen.saves[step] = timed(
                lambda: super(WatchedCheckpoints, self).save(*states, **options)
            )

        def _write(self, *states: object) -> None:
            write = super()._write
            seen.writes[states[2]["step"]] = timed(lambda: write(*states))

    trainer.StepLog, resume.Checkpoints = WatchedLog, WatchedCheckpoints
    try:
        yield
    finally:
        trainer.StepLog, resume.Checkpoints = StepLog, Checkpoints


def timed(action: Callable[[], None]) -> tuple[float, float]:
    """Runs an action; returns the moments at which it began and was done."""
    began = time.perf_counter()
    action()
    return began, time.perf_counter()


class Sequences(Dataset):
    """The sequences of a token stream one behind the other, as ``TokenBatches`` counts them."""

    def __init__(self, shards: TokenShards, count: int, seq_len: int) -> None:
        self.shards, self.count, self.seq_len = shards, count, seq_len

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        tokens = torch.from_numpy(self.shards.read(index * self.seq_len, self.seq_len + 1))
        return {"tokens": tokens[:-1], "targets": tokens[1:]}


class WithLoss(nn.Module):
    """A model that returns its loss as transformers' Trainer wants it, and remembers it."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model
        self.losses: list[Tensor] = []

    def forward(self, tokens: Tensor, targets: Tensor) -> dict[str, Tensor]:
        """Returns the mean loss, in a dictionary."""
        loss = self.model(tokens, targets)
        self.losses.append(loss.detach())
        return {"loss": loss}


def run_theirs(config: TrainingConfig, worker: Worker) -> Seen:
    """Trains with transformers' Trainer as ``config`` says, in the process group that is there.

    Its data loader gives micro-batch k of rank r the same sequences as ours, and its cosine
    schedule is the same. It gets our optimizer, as its own would decay only some weights. Neither
    DDP looks for unused parameters.
    """
    os.environ["HF_HUB_OFFLINE"] = "1"
    from transformers import Trainer, TrainerCallback, TrainingArguments

    seen = Seen()

    class Watch(TrainerCallback):
        def on_step_begin(self, *_: object, **__: object) -> None:
            seen.begins.append(time.perf_counter())

    class InOrder(Trainer):
        def _get_train_sampler(self, *_: object) -> SequentialSampler:
            return SequentialSampler(self.train_dataset)

    config = config.resolved(worker)
    accumulation = config.global_batch_size // (config.micro_batch_size * worker.world_size)
    workload = config.workload(accumulation)
    model = WithLoss(build_model(workload, worker.device, config.seed + worker.rank))
    optimizer = build_optimizer(model.parameters(), workload, config.lr, config.weight_decay)
    shards = TokenShards.open(synthetic_shards(Path(config.output_dir) / "tokens"))
    arguments = TrainingArguments(
        output_dir=f"{config.output_dir}/transformers",
        max_steps=config.num_steps,
        per_device_train_batch_size=config.micro_batch_size,
        gradient_accumulation_steps=accumulation,
        learning_rate=config.lr,
        lr_scheduler_type="cosine",
        max_grad_norm=config.grad_clip,
        use_cpu=True,
        ddp_backend="gloo",
        ddp_find_unused_parameters=False,
        dataloader_pin_memory=False,
        remove_unused_columns=False,
        logging_strategy="no",
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        average_tokens_across_devices=False,
    )
    sequences = Sequences(shards, config.num_steps * config.global_batch_size, config.seq_len)
    InOrder(
        model,
        arguments,
        train_dataset=sequences,
        optimizers=(optimizer, None),
        callbacks=[Watch()],
    ).train()
    # A step's loss: the mean over its micro-batches, [steps, accumulation], and then over ranks.
    own = torch.stack(model.losses).view(config.num_steps, accumulation).mean(1)
    seen.losses = torch.tensor(worker.gather(own.tolist())).mean(0).tolist()
    return seen
