"""The checkpoints of a run: opening them, their facts, and the refusal of another model's."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict
from itertools import count
from pathlib import Path

import torch

from common.data.markov_text import read_source
from common.data.token_shards import TokenShards
from common.errors import UserError
from common.perfmodel.one_device.workload import Workload
from common.runtime.group.process_group import Worker
from common.runtime.paths import relative_to_project
from common.training.checkpoints.checkpoint import Checkpoints
from common.training.checkpoints.files import SavedCheckpoint
from common.training.config import TrainingConfig

logger = logging.getLogger(__name__)

DECISIVE = (
    "data",
    "global_batch_size",
    "seq_len",
    "num_steps",
    "lr",
    "min_lr",
    "warmup_steps",
    "weight_decay",
    "grad_clip",
    "precision",
    "seed",
)
"""Settings that losses depend on. Strategy, ranks and micro-batch are not among them."""


def open_checkpoints(
    config: TrainingConfig, worker: Worker, workload: Workload, data: TokenShards
) -> tuple[Checkpoints | None, SavedCheckpoint | None]:
    """Opens the run's checkpoints, if it makes any, and finds the one that it resumes from.

    Settings and data that differ from the checkpoint's are named in the log.

    Returns:
        (the checkpoints, or None if none are made; the one to resume from, or None).

    Raises:
        UserError: the folder cannot be written, holds damaged checkpoints only, or another model's.
    """
    if not config.checkpointing:
        return None, None
    asynchronous = config.async_checkpoints == "on"
    folder = Path(config.checkpoint_dir)
    checkpoints = Checkpoints(folder, worker, config.keep_checkpoints, asynchronous)
    saved = checkpoints.newest_intact()
    if saved:
        _refuse_other_model(saved, config, workload)
        if worker.is_main:
            for name, was, now in changed_settings(saved, config, data):
                logger.warning("%s was %s in the checkpoint and is %s now", name, was, now)
    return checkpoints, saved


def checkpoint_facts(
    step: int,
    position: int,
    config: TrainingConfig,
    workload: Workload,
    data: TokenShards,
    scaler: torch.amp.GradScaler,
) -> dict:
    """Returns the facts for a manifest, after ``step`` steps and ``position`` tokens.

    The loss scaler's are numbers, the same on all ranks; none where nothing is scaled.
    """
    return {
        "step": step,
        "position": position,
        "strategy": config.strategy,
        "model": asdict(workload.config),
        "optimizer": config.optimizer,
        "data_tokens": data.num_tokens,
        "settings": {name: getattr(config, name) for name in DECISIVE},
        "scaler": scaler.state_dict(),
    }


def restore_scaler(saved: SavedCheckpoint, scaler: torch.amp.GradScaler) -> None:
    """Sets a loss scaler to its state in the checkpoint.

    Without one, as after another precision or in an older checkpoint, the scaler starts anew.
    """
    state = saved.facts.get("scaler")
    if state:
        scaler.load_state_dict(state)


def _refuse_other_model(saved: SavedCheckpoint, config: TrainingConfig, workload: Workload) -> None:
    for name, now in {"model": asdict(workload.config), "optimizer": config.optimizer}.items():
        was = saved.facts[name]
        if was != now:
            raise UserError(
                f"{relative_to_project(saved.path)} is of another {name} "
                f"({_difference(was, now)}); give another --checkpoint_dir"
            )


def _difference(was: object, now: object) -> str:
    if not isinstance(was, Mapping):
        return f"{was}, this run has {now}"
    other = [name for name in now if was.get(name) != now[name]]
    return ", ".join(f"{name} {was.get(name)}, this run has {now[name]}" for name in other[:2])


def changed_settings(
    saved: SavedCheckpoint, config: TrainingConfig, data: TokenShards
) -> list[tuple[str, object, object]]:
    """Returns what losses depend on and is not as it was, the size of the data included.

    Each is (name, value in the checkpoint, value now).
    """
    was = {"data_tokens": saved.facts.get("data_tokens", data.num_tokens)}
    was |= saved.facts["settings"]
    now = {name: getattr(config, name) for name in DECISIVE} | {"data_tokens": data.num_tokens}
    return [
        (name, was[name], value)
        for name, value in now.items()
        if name in was and was[name] != value
    ]


def recorded_settings(
    config: TrainingConfig, data: TokenShards, saved: SavedCheckpoint | None
) -> dict[str, object]:
    """Returns the entries of ``config.yaml`` that are not among the settings."""
    folder = data.paths[0].parent
    source = read_source(folder) or {}
    with suppress(UserError):  # a shard beside the run's that cannot be read
        if source and source.get("num_tokens") != TokenShards.open(folder).num_tokens:
            source = {}  # that of shards which stood there before
    return {
        "strategy": config.strategy,
        "data_tokens": data.num_tokens,
        "entropy_nats": source.get("entropy_nats"),
        "unigram_entropy_nats": source.get("unigram_entropy_nats"),
        "resumed_from_step": saved.step if saved else None,
    }


def free_run_id(config: TrainingConfig) -> str:
    """Returns ``config.run_id``, with a number if a run of that name exists and is resumed."""
    if not (config.run_id and config.checkpointing):
        return config.run_id
    names = (f"{config.run_id}-{number}" if number > 1 else config.run_id for number in count(1))
    return next(name for name in names if not (Path(config.output_dir) / name).exists())
