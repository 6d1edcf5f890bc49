"""The task of training on texts: the texts, the model, memory limits, and the step they make."""

from __future__ import annotations

import functools
import logging
from dataclasses import dataclass

import torch

from common.data.text_sources import LabelledTexts
from common.data.text_splits import TextOptions, open_splits
from common.data.text_tokens import TokenizedTexts, open_tokenizer, tokenize_texts
from common.errors import UserError
from common.models.text_classifier import build_text_classifier, model_limit
from common.runtime.group.process_group import Worker
from common.scheduling.loader import MicroBatch, collate
from common.scheduling.memory_probe import probe_largest_batches
from common.scheduling.modes import Planner, StepPlan
from common.training.micro_batches.config import TextSettings
from common.training.micro_batches.micro_batch_step import MicroBatchStep
from common.training.precision import autocast, check_precision, resolved_precision
from common.training.scaling.timed_exchange import TimedExchange
from common.training.texts.model import build_on_rank, make_optimizer

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Task:
    """The texts of both splits, and the step that learns from them."""

    train: TokenizedTexts
    validation: TokenizedTexts
    step: MicroBatchStep
    limits: list[int]
    """Most texts of a micro-batch, by rank."""

    def facts(self) -> dict[str, object]:
        """Returns entries of ``config.yaml`` beyond the settings, by which runs are comparable."""
        model = self.step.exchange.model
        return {
            "precision": self.step.precision,
            "data_source": self.train.source,
            "train_texts": len(self.train.labels),
            "vocabulary": self.train.vocab_size,
            "parameters": sum(parameter.numel() for parameter in model.parameters()),
            "world_size": len(self.limits),
            "local_batch_limits": self.limits,
        }


def open_task(
    config: TextSettings,
    worker: Worker,
    slow_factor: float = 1.0,
    eval_samples: int = 200,
    *,
    lr: float = 0.0,
    weight_decay: float = 0.0,
) -> Task:
    """Opens the texts, makes model, optimizer and step, and finds the limits; all ranks call it.

    Args:
        slow_factor: factor that multiplies this rank's compute time.
        eval_samples: texts of the validation split; 0 for all.
        lr, weight_decay: settings of AdamW; by default steps leave the weights as they are.

    Raises:
        UserError: settings, data or model that do not go together, or a precision that the device
            lacks.
    """
    precision = resolved_precision(config.precision, worker.device)
    check_precision(precision, worker.device)
    with worker.mistakes_shared():
        limit = model_limit(config.model_name)
    if limit is not None and config.max_length > limit:
        raise UserError(
            f"max_length {config.max_length}: {config.model_name} takes at most {limit} tokens; "
            f"give --max_length {limit} or less"
        )
    with worker.mistakes_shared():
        train, validation = open_texts(config.texts(eval_samples), config.model_name)
    if len(train.labels) < config.global_batch:
        raise UserError(
            f"global_batch {config.global_batch}: {train.name} has {len(train.labels)} texts"
        )
    build = functools.partial(
        build_text_classifier,
        config.model_name,
        num_labels=train.num_labels,
        vocab_size=train.vocab_size,
        max_length=config.max_length,
        dropout=config.dropout,
        pad_id=train.pad_id,
    )
    with worker.mistakes_shared():
        model = build_on_rank(build, seed=config.seed, precision=precision, worker=worker)
    limits = find_limits(config, model, train, worker, precision)
    exchange = TimedExchange(
        model,
        worker,
        slow_factor=slow_factor,
        sync_buffers=False,  # a collective that a rank without memory would owe, too
        bucket_cap_mb=config.bucket_cap_mb,
        gradient_as_bucket_view=True,
    )
    optimizer = make_optimizer(model.parameters(), lr, weight_decay)
    step = MicroBatchStep(exchange, optimizer, precision=precision, loss_mean=config.loss_mean)
    step.settle(few_tokens(train, worker))
    step.make_states()
    return Task(train, validation, step, limits)


def open_texts(options: TextOptions, model_name: str) -> tuple[TokenizedTexts, TokenizedTexts]:
    """Loads or draws the training and the validation split, as tokens of a model's tokenizer."""

    def tokenize(*splits: LabelledTexts) -> list[TokenizedTexts]:
        tokenizer = open_tokenizer(model_name, texts=splits[0].texts, vocab_size=options.vocab_size)
        return [tokenize_texts(split, tokenizer, options.max_length) for split in splits]

    return open_splits(options, tokenize)


def find_limits(
    config: TextSettings,
    model: torch.nn.Module,
    data: TokenizedTexts,
    worker: Worker,
    precision: str,
) -> list[int]:
    """Returns the upper bound on each rank's micro-batch, in texts and rank order.

    It is the user's cap, or what a probe of memory found.

    Raises:
        UserError: the ranks together cannot hold the global batch.
    """
    limits = [config.max_local_batch_cap] * worker.world_size
    if not config.max_local_batch_cap:
        limits = probe_largest_batches(
            model,
            int(max(data.lengths)),
            config.probe_max_batch,
            worker,
            precision=functools.partial(autocast, precision, worker.device),
        )
    if sum(limits) < config.global_batch:
        raise UserError(
            f"global_batch {config.global_batch}: {worker.world_size} ranks take at most "
            f"{' + '.join(map(str, limits))} texts; lower it, or raise --max_local_batch_cap or "
            "--probe_max_batch"
        )
    bound = config.probe_max_batch
    if not config.max_local_batch_cap and bound == min(limits) < most_texts(config, worker):
        logger.warning(
            f"no micro-batch has more than {bound} texts, as --probe_max_batch says: dynamic plans "
            f"could use up to {most_texts(config, worker)}"
        )
    return limits


def most_texts(config: TextSettings, worker: Worker) -> int:
    """Returns the largest micro-batch of any plan, in texts: each other rank has at least one."""
    return config.global_batch - worker.world_size + 1


def planner_for(config: TextSettings, mode: str, task: Task, worker: Worker) -> Planner:
    """Makes the planner of a mode, from the seed and the lengths of all texts.

    Raises:
        UserError: this mode has no plan for these texts, ranks and limits.
    """
    planner = Planner(
        mode,
        task.train.lengths,
        world_size=worker.world_size,
        global_batch=config.global_batch,
        seed=config.seed,
        max_tokens=config.max_tokens,
    )
    if mode != "dynamic":  # whose plans go by costs, which are measured in the run
        planner(0, None, task.limits)
    return planner


def few_tokens(data: TokenizedTexts, worker: Worker) -> MicroBatch:
    """Returns a few tokens of one text for this rank, enough to let DDP form its buckets."""
    groups = tuple((rank,) for rank in range(worker.world_size))
    return collate(data, StepPlan(groups, data.lengths), worker.rank).first_tokens()
