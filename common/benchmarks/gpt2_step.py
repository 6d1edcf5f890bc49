"""What the benchmarks train, and the step of a GPT-2: model, data, precision and optimizer."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from types import MappingProxyType

import torch
from torch import Tensor, nn

from common.benchmarks.replayed_profile import ReplayedProfile, open_replayed
from common.data.synthetic import random_tokens
from common.errors import UserError, unknown_name
from common.models.gpt2 import GPT2, GPT2Config
from common.runtime.process_group import Worker
from common.runtime.seeding import seed_everything

DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}


@dataclass(frozen=True)
class StepSettings:
    """What is trained. ``dtype`` other than float32 means autocast: gradients stay float32.

    With ``replay``, a recorded backward pass, the fields before it do not count.
    """

    model: str
    batch_size: int
    max_seq_len: int
    dtype: str = "float32"
    optimizer: str = "adamw"
    lr: float = 6e-4
    compile: bool = False
    seed: int = 42
    replay: str = ""
    replay_factor: float = 1.0
    replay_time_factor: float = 1.0

    def __post_init__(self) -> None:
        for name in ("batch_size", "max_seq_len"):
            if getattr(self, name) < 1:
                raise UserError(f"{name} is {getattr(self, name)}; it must be at least 1")
        if self.dtype not in DTYPES:
            raise UserError(unknown_name("dtype", self.dtype, DTYPES))
        if self.optimizer not in ("adamw", "sgd"):
            raise UserError(unknown_name("optimizer", self.optimizer, ("adamw", "sgd")))
        config = GPT2Config.named(self.model)
        if self.max_seq_len > config.n_positions:
            raise UserError(
                f"max_seq_len {self.max_seq_len}: {self.model} has {config.n_positions} positions"
            )
        self._check_replay()

    def _check_replay(self) -> None:
        if not self.replay:
            for name in ("replay_factor", "replay_time_factor"):
                if getattr(self, name) != 1:
                    raise UserError(f"{name} {getattr(self, name):g} without --replay: of what?")
            return
        if self.compile:
            raise UserError("--compile with --replay: a replay computes nothing to compile")
        self.replayed_profile()

    def replayed_profile(self) -> ReplayedProfile:
        """What ``replay`` names, scaled. Raises UserError where it cannot be opened."""
        return open_replayed(self.replay, self.replay_factor, self.replay_time_factor)


class Gpt2Step:
    """Forward, backward and optimizer step on one fixed batch, each callable on its own.

    ``note`` and ``recorded_settings`` are what the record of a run must say besides its settings.
    """

    note = ""
    recorded_settings: Mapping[str, object] = MappingProxyType({})

    def __init__(self, settings: StepSettings, worker: Worker) -> None:
        self.settings = settings
        self.device = worker.device
        seed_everything(settings.seed)
        config = GPT2Config.named(settings.model)
        self.model = GPT2(config).to(worker.device)
        self.forward_model: nn.Module = (
            torch.compile(self.model) if settings.compile else self.model
        )
        seed_everything(settings.seed, worker.rank)
        self.tokens, self.targets = random_tokens(
            settings.batch_size, settings.max_seq_len, config.vocab_size, worker.device
        )
        self.scaler = torch.amp.GradScaler(
            worker.device.type, enabled=settings.dtype == "float16" and worker.device.type == "cuda"
        )

    def forward(self, model: nn.Module | None = None) -> Tensor:
        """The loss of the batch under ``model`` (by default the step's own), ready for backward."""
        dtype = DTYPES[self.settings.dtype]
        enabled = dtype is not torch.float32
        with torch.autocast(self.device.type, dtype=dtype if enabled else None, enabled=enabled):
            loss = (model or self.forward_model)(self.tokens, self.targets)
        return self.scaler.scale(loss)

    @cached_property
    def optimizer(self) -> torch.optim.Optimizer:
        """Made when first needed: torch's optimizers take seconds to import."""
        return _optimizer(self.model, self.settings)

    def optimize(self) -> None:
        """Update the parameters; gradients stay until ``zero_grad``."""
        self.scaler.step(self.optimizer)
        self.scaler.update()

    def zero_grad(self) -> None:
        """Forget the gradients, as the optimizers do by default (set to None)."""
        self.model.zero_grad(set_to_none=True)


def _optimizer(model: nn.Module, settings: StepSettings) -> torch.optim.Optimizer:
    if settings.optimizer == "sgd":
        return torch.optim.SGD(model.parameters(), lr=settings.lr)
    return torch.optim.AdamW(model.parameters(), lr=settings.lr, weight_decay=0.1)
