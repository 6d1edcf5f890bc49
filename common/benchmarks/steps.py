"""The training step that benchmarks time, on one fixed batch: of a GPT-2, a replay or any module.

Its parts are called one at a time: ``forward``, ``backward`` on the loss it returns, ``optimize``,
``zero_grad``. What a benchmark puts around them, such as DDP, it hands to ``forward``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property, partial
from types import MappingProxyType
from typing import Annotated

import torch
from torch import Tensor, nn

from common.benchmarks.one_device.replayed_profile import ReplayedProfile, open_replayed
from common.data.batches import random_tokens
from common.errors import UserError
from common.models.gpt2 import GPT2, GPT2Config
from common.models.replay import ReplayModel
from common.runtime.group.process_group import Worker, process_group
from common.runtime.machine.kept_memory import settle_heap
from common.runtime.records.recorder import Recorder, record_run
from common.runtime.seeding import seed_everything
from common.settings import AtLeast, OneOf, Positive, RankOptions, Seed, Settings, part_of
from common.training.precision import DTYPES, autocast, grad_scaler

MakeOptimizer = Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]


@dataclass(frozen=True)
class StepSettings(Settings):
    """Settings of a training step: model, batch, precision and optimizer, or a replay.

    ``dtype`` other than float32 means autocast: gradients stay float32. With ``replay``, a recorded
    backward pass, the fields before it do not count.
    """

    model: str
    batch_size: Annotated[int, AtLeast(1)]
    max_seq_len: Annotated[int, AtLeast(1)]
    dtype: Annotated[str, OneOf(DTYPES)] = "float32"
    optimizer: Annotated[str, OneOf(("adamw", "sgd"))] = "adamw"
    lr: float = 6e-4
    compile: bool = False
    seed: int = 42
    replay: str = ""
    replay_factor: float = 1.0
    replay_time_factor: float = 1.0

    def __post_init__(self) -> None:
        super().__post_init__()
        config = GPT2Config.named(self.model)
        if self.max_seq_len > config.n_positions:
            raise UserError(
                f"max_seq_len {self.max_seq_len}: {self.model} has {config.n_positions} positions"
            )
        if self.replay:
            if self.compile:
                raise UserError("--compile with --replay: a replay computes nothing to compile")
            self.replayed_profile()
            return
        for name in ("replay_factor", "replay_time_factor"):
            if getattr(self, name) != 1:
                raise UserError(f"{name} {getattr(self, name):g} without --replay: of what?")

    def replayed_profile(self) -> ReplayedProfile:
        """Opens the recording that ``replay`` names, scaled. Raises UserError if it cannot."""
        return open_replayed(self.replay, self.replay_factor, self.replay_time_factor)


@dataclass(frozen=True, kw_only=True)
class StepRunOptions(RankOptions):
    """The step that a benchmark times: a GPT-2's, or a replay of one."""

    model: str = "gpt2-large"
    """gpt2-pico, gpt2-nano, gpt2, gpt2-medium, gpt2-large or gpt2-xl."""
    batch_size: int = 4
    """Sequences per rank and step."""
    max_seq_len: int = 1024
    """Tokens per sequence."""
    dtype: str = "float32"
    """float32, float16 or bfloat16 (the latter two by autocast; gradients stay float32)."""
    replay: str = ""
    """Instead of training a model, sleep as this recorded backward pass computed: a system below
    data/, a run directory or a gradient-ready-times.csv. Model, batch, sequence, dtype, optimizer
    and seed then mean nothing."""
    replay_factor: float = 1.0
    """Divide the gradient sizes of the recording (--replay) by this; links as much slower
    then give the same picture."""
    replay_time_factor: float = 1.0
    """Divide the times of the recording (--replay) by this."""
    seed: Annotated[int, Seed] = 42
    """Seed of the initial weights and of the random inputs."""
    output_dir: str = "outputs/assignment2"

    def step_settings(self) -> StepSettings:
        """Returns the part of the settings that says what is trained."""
        return part_of(StepSettings, vars(self))


@dataclass(frozen=True, kw_only=True)
class UpdatedStepOptions(StepRunOptions):
    """The step that a benchmark times with its update."""

    optimizer: str = "adamw"
    """adamw or sgd."""
    lr: Annotated[float, Positive] = 6e-4
    """Learning rate of the optimizer."""
    compile: bool = False
    """Compile the model. Hooks then mark when the compiled backward pass hands gradients over."""


class FixedBatchStep:
    """Forward pass, optimizer step and dropping of gradients on one batch, each by itself.

    Attributes:
        model: the module whose parameters are trained, on ``device``.
        forward_model: the module that the loss is computed with, unless another one is given.
        name: the model's name in messages.
        note: text of a run's record on the step, besides its settings.
        recorded_settings: settings that the record shows in place of the flags'.
    """

    def __init__(
        self,
        model: nn.Module,
        loss_of: Callable[[nn.Module], Tensor],
        worker: Worker,
        *,
        forward_model: nn.Module | None = None,
        make_optimizer: MakeOptimizer | None = None,
        precision: str = "float32",
        name: str = "the model",
        note: str = "",
        recorded_settings: Mapping[str, object] = MappingProxyType({}),
    ) -> None:
        """Makes the step.

        Args:
            model: module to train; it is moved to the worker's device.
            loss_of: the loss of the batch, a scalar, under the module it is called with (the
                model, or DDP around it).
            forward_model: a compiled model, or one that ``model`` is a part of.
            make_optimizer: makes the optimizer; without one ``optimize`` does nothing.
            precision: float32, or autocast to bfloat16 or float16 (with a gradient scaler).
        """
        self.worker, self.device = worker, worker.device
        self.model = model.to(worker.device)
        self.forward_model = self.model if forward_model is None else forward_model
        self.loss_of, self.make_optimizer = loss_of, make_optimizer
        self.precision = precision
        self.scaler = grad_scaler(precision, worker.device)
        self.name, self.note, self.recorded_settings = name, note, recorded_settings
        # Passes with DDP and without must find the same heap, or they cannot be compared.
        settle_heap(sum(p.numel() * p.element_size() for p in self.model.parameters()))

    def forward(self, model: nn.Module | None = None) -> Tensor:
        """Returns the loss under ``model`` (by default the step's own), ready for backward."""
        with autocast(self.precision, self.device):
            loss = self.loss_of(self.forward_model if model is None else model)
        return self.scaler.scale(loss)

    @cached_property
    def optimizer(self) -> torch.optim.Optimizer | None:
        """Makes the optimizer when first needed: torch's optimizers take seconds to import."""
        return self.make_optimizer(self.model.parameters()) if self.make_optimizer else None

    def optimize(self) -> None:
        """Updates the parameters; gradients stay until ``zero_grad``."""
        if self.optimizer is not None:
            self.scaler.step(self.optimizer)
            self.scaler.update()

    def zero_grad(self) -> None:
        """Drops the gradients, as the optimizers do by default (set to None)."""
        self.model.zero_grad(set_to_none=True)


def make_step(settings: StepSettings, worker: Worker) -> FixedBatchStep:
    """Makes the step that the settings ask for: of a replay, or of a GPT-2."""
    return replay_step(settings, worker) if settings.replay else gpt2_step(settings, worker)


@contextmanager
def recorded_step(
    settings: StepRunOptions, label: str
) -> Iterator[tuple[FixedBatchStep, Recorder]]:
    """Yields the step that a benchmark's settings ask for and its recorder, among all ranks."""
    with process_group(settings.device, settings.backend) as worker:
        step = make_step(settings.step_settings(), worker)
        about = {"recorded_settings": step.recorded_settings, "notes": (step.note,)}
        with record_run(settings, label, worker, **about) as recorder:
            yield step, recorder


def gpt2_step(settings: StepSettings, worker: Worker) -> FixedBatchStep:
    """Makes the step of a GPT-2 with random weights and tokens; tokens differ between ranks."""
    seed_everything(settings.seed)
    config = GPT2Config.named(settings.model)
    with worker.device:  # drawn there: a core of the CPU takes ten seconds for gpt2-large
        model = GPT2(config)
    seed_everything(settings.seed, worker.rank)
    tokens, targets = random_tokens(
        settings.batch_size, settings.max_seq_len, config.vocab_size, worker.device
    )
    return FixedBatchStep(
        model,
        lambda called: called(tokens, targets),
        worker,
        forward_model=torch.compile(model) if settings.compile else None,
        make_optimizer=partial(_optimizer, settings=settings),
        precision=settings.dtype,
        name=settings.model,
    )


def _optimizer(parameters: Iterable[nn.Parameter], settings: StepSettings) -> torch.optim.Optimizer:
    if settings.optimizer == "sgd":
        return torch.optim.SGD(parameters, lr=settings.lr)
    return torch.optim.AdamW(parameters, lr=settings.lr, weight_decay=0.1)


def replay_step(settings: StepSettings, worker: Worker) -> FixedBatchStep:
    """Makes the step of a replay: a backward pass that sleeps as a recorded one computed.

    There is nothing else to a step. On rank r every element of a gradient is r + 1, so that their
    mean over the ranks shows that they were reduced. The loss is 0. A recording has no optimizer
    step, and parameters that nobody uses stay.

    Raises UserError on a GPU: a sleep of the CPU would not keep it busy.
    """
    if worker.device.type != "cpu":
        raise UserError(f"replay on {worker.device.type}: it sleeps on the CPU; use --device cpu")
    replayed = settings.replayed_profile()
    return FixedBatchStep(
        ReplayModel(replayed.profile, value=worker.rank + 1.0),
        lambda called: called(),
        worker,
        name=replayed.label,
        note=replayed.label,
        # What the flags say of a model does not hold: the record says what does.
        recorded_settings={
            "replay": replayed.source,
            "model": replayed.label,
            "batch_size": "as recorded",
            "max_seq_len": "as recorded",
            "dtype": "float32",
        },
    )


def module_step(
    model: nn.Module, loss_of: Callable[[nn.Module], Tensor], worker: Worker
) -> FixedBatchStep:
    """Makes the step of any module with SGD at a learning rate of 0: each computes the same.

    Args:
        loss_of: the loss of the batch, a scalar, under the module it is called with.
    """
    return FixedBatchStep(model, loss_of, worker, make_optimizer=partial(torch.optim.SGD, lr=0.0))
