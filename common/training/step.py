"""One training step of a language model, with every option that makes it faster or smaller.

The order is the usual one: for each micro-batch forward and backward, then the update, then the
gradients are dropped. What is switched on is the ``Workload``'s to say; nothing here measures.
"""

from __future__ import annotations

import importlib.util
import math
import os
import shutil
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from itertools import pairwise

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.profiler import record_function

from common.errors import UserError
from common.exercises.fsdp import FSDP
from common.exercises.sharded_optimizer import ShardedOptimizer
from common.models.chunked_loss import chunked_cross_entropy
from common.models.gpt2 import GPT2
from common.perfmodel.one_device.workload import Workload
from common.runtime import torch_internals
from common.runtime.seeding import seed_everything
from common.runtime.timing import clock_for
from common.training.precision import autocast, check_precision, grad_scaler, set_tf32

TokenBatch = tuple[Tensor, Tensor]
"""Tokens and next-token targets, both int64 [batch, length]."""


def build_model(workload: Workload, device: torch.device, seed: int = 42) -> GPT2:
    """Builds the workload's GPT-2, with random weights, drawn on ``device``.

    A core of the CPU takes ten seconds for gpt2-large, in which a GPU would wait.
    """
    seed_everything(seed)
    with device:
        return GPT2(
            workload.config,
            attention=workload.attention,
            activation_checkpointing=workload.activation_checkpointing,
            loss_chunks=workload.loss_chunks,
        )


def build_optimizer(
    parameters: Iterable[nn.Parameter],
    workload: Workload,
    lr: float = 6e-4,
    weight_decay: float = 0.1,
    *,
    shard_states: bool = False,
) -> torch.optim.Optimizer:
    """Builds AdamW, or SGD without momentum, in the workload's implementation.

    Args:
        parameters: parameters that it updates.
        workload: names the optimizer and its implementation.
        lr: learning rate.
        weight_decay: weight decay of AdamW.
        shard_states: keep the states of some parameters only on each rank (exercise A1.4).
    """
    settings: dict[str, object] = {"lr": lr}
    settings |= {name: workload.optimizer_implementation == name for name in ("foreach", "fused")}
    kind: type[torch.optim.Optimizer] = torch.optim.SGD
    if workload.optimizer == "adamw":
        kind = torch.optim.AdamW
        settings["weight_decay"] = weight_decay
    if shard_states:
        return ShardedOptimizer(parameters, kind, **settings)
    return kind(parameters, **settings)


class TrainingStep:
    """Model, optimizer and loss scaler, and the step they make together.

    Args:
        workload: the computation of a step.
        device: device of the model.
        model: called as ``model(tokens, targets)``, returns the loss; by default the workload's.
        lr: learning rate.
        weight_decay: weight decay of AdamW.
        seed: seed of the initial weights.
        gradient_sync: makes the context of each micro-batch's forward and backward pass, where
            ranks exchange gradients; it is given True for the step's last.
        max_gradient_norm: upper bound of the gradients' joint norm; None leaves them, and does not
            measure it.
        shard_states: see ``build_optimizer``.

    Raises:
        UserError: a precision that the device lacks, or compilation without a compiler.
    """

    def __init__(
        self,
        workload: Workload,
        device: torch.device,
        *,
        model: nn.Module | None = None,
        lr: float = 6e-4,
        weight_decay: float = 0.1,
        seed: int = 42,
        gradient_sync: Callable[[bool], AbstractContextManager] = lambda is_last: nullcontext(),
        max_gradient_norm: float | None = None,
        shard_states: bool = False,
    ) -> None:
        check_precision(workload.precision, device)
        if workload.compile:
            check_compiler(device)
        self.workload = workload
        self.device = device
        self.model = model if model is not None else build_model(workload, device, seed)
        self.loss_of: Callable[[Tensor, Tensor], Tensor] = (
            compiled(self.model, device) if workload.compile else self.model
        )
        self.optimizer = build_optimizer(
            self.model.parameters(), workload, lr, weight_decay, shard_states=shard_states
        )
        self.gradient_sync = gradient_sync
        self.max_gradient_norm = max_gradient_norm
        self.gradient_norm: Tensor | None = None
        """Norm of all gradients of the last update, before it was limited; a scalar."""
        self.scaler = grad_scaler(workload.precision, device)

    def run(self, batches: Iterable[TokenBatch]) -> Tensor:
        """Makes one update from ``gradient_accumulation`` micro-batches; returns the mean loss,
        detached.

        Ranges named data, forward, backward and optimizer show in a profile.
        """
        set_tf32(self.workload.tf32)
        source = iter(batches)
        passes = self.workload.gradient_accumulation
        total = None
        for index in range(passes):
            with record_function("data"):
                tokens, targets = next(source)
            with self.gradient_sync(index == passes - 1):
                with record_function("forward"):
                    loss = self.forward(tokens, targets)
                    scaled = loss if passes == 1 else loss / passes
                with record_function("backward"):
                    self.scaler.scale(scaled).backward()
            total = scaled.detach() if total is None else total + scaled.detach()
        with record_function("optimizer"):
            self.update()
        return total

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        """Returns the mean loss of one micro-batch, in the workload's precision."""
        with autocast(self.workload.precision, self.device):
            return self.loss_of(tokens, targets)

    def update(self) -> None:
        """Limits the gradients, updates the parameters and drops the gradients."""
        self.gradient_norm = update(
            self.model, self.optimizer, self.scaler, max_gradient_norm=self.max_gradient_norm
        )


def update(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    scaler: torch.amp.GradScaler,
    *,
    max_gradient_norm: float | None = None,
    set_to_none: bool = True,
) -> Tensor | None:
    """Limits the gradients, updates the parameters and drops the gradients.

    Args:
        max_gradient_norm: upper bound of the gradients' joint L2 norm; None leaves them.
        set_to_none: drop gradients; else they are set to 0 and stay where they are, such as in
            DDP's buckets.

    Returns:
        the norm before it was limited, a scalar; None where it was not measured.
    """
    norm = None
    if max_gradient_norm is not None:
        scaler.unscale_(optimizer)
        norm = limit_gradients(model, max_gradient_norm)
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad(set_to_none=set_to_none)
    return norm


@torch.no_grad()
def limit_gradients(model: nn.Module, max_norm: float) -> Tensor:
    """Scales all gradients so that their joint L2 norm is at most ``max_norm``.

    Gradients may be parts of sharded ones: the norm is that of the whole, on every rank.

    Returns:
        the norm before, a scalar.
    """
    if isinstance(model, FSDP):
        norm = model.gradient_norm()
        if math.isfinite(max_norm):
            nn.utils.clip_grads_with_norm_(model.parameters(), max_norm, norm)
        return norm
    gradients = [p.grad for p in model.parameters() if p.grad is not None]
    if gradients and gradients[0].device.type != "cpu":
        return limit_in_few_launches(gradients, max_norm)
    # Row by row first: on a CPU the norm of two million float32 at once is off by 4 in 10,000, as
    # they are added up one after another.
    rows = [torch.linalg.vector_norm(g, dim=-1) if g.dim() > 1 else g for g in gradients]
    norm = nn.utils.get_total_norm(rows)
    if hasattr(norm, "full_tensor"):  # a DTensor, whose module takes seconds to import
        norm = norm.full_tensor()
    if math.isfinite(max_norm):
        nn.utils.clip_grads_with_norm_(model.parameters(), max_norm, norm)
    return norm


def limit_in_few_launches(gradients: Sequence[Tensor], max_norm: float) -> Tensor:
    """Does what ``limit_gradients`` does on a GPU, whose launches cost more than its sums.

    torch's foreach operations take all gradients in one launch, but no DTensors: they get the
    parts that are on this rank, and the squared norm is added up over the ranks that hold others.
    """
    parts = [g.to_local() if hasattr(g, "to_local") else g for g in gradients]
    by_layout: dict[tuple, list[Tensor]] = {}
    for gradient, part in zip(gradients, parts, strict=True):
        layout = getattr(gradient, "device_mesh", None), getattr(gradient, "placements", ())
        by_layout.setdefault(layout, []).append(part)
    squares = []
    for (mesh, placements), same_layout in by_layout.items():
        square = nn.utils.get_total_norm(same_layout).square()
        # What a mesh dimension replicates (HYBRID_SHARD's groups) is the same on all its ranks.
        for dimension, placement in enumerate(placements):
            if placement.is_shard():
                dist.all_reduce(square, group=mesh.get_group(dimension))
        squares.append(square)
    norm = torch.stack(squares).sum().sqrt()
    if math.isfinite(max_norm):
        torch_internals.multiply(parts, (max_norm / (norm + 1e-6)).clamp(max=1.0))  # as torch's own
    return norm


def compiled(model: nn.Module, device: torch.device) -> Callable[[Tensor, Tensor], Tensor]:
    """Returns the model, to be compiled when it is first called.

    On a CPU not its loss in pieces: the compiler would compute each exponential twice, and undo
    the layout that makes its matrix products fast.
    """
    if device.type == "cpu" and isinstance(model, GPT2):
        model.loss_in_pieces = torch.compiler.disable(chunked_cross_entropy)
    return torch.compile(model)


def check_compiler(device: torch.device) -> None:
    """Raises UserError where torch.compile finds no compiler to call."""
    names = [os.environ.get("CXX", ""), "g++", "clang++", "c++"]
    if device.type == "cpu" and not any(name and shutil.which(name) for name in names):
        raise UserError(
            "compile: needs a C++ compiler, and neither g++ nor clang++ is installed; install one, "
            "or leave out --compile"
        )
    if device.type == "cuda":
        names = [os.environ.get("CC", ""), "gcc", "clang", "cc"]
        if importlib.util.find_spec("triton") is None:
            raise UserError("compile: needs the package triton on a GPU; leave out --compile")
        if not any(name and shutil.which(name) for name in names):
            raise UserError(
                "compile: Triton needs a C compiler, and neither gcc nor clang is installed; "
                "install one, or leave out --compile"
            )


def time_steps(
    step: TrainingStep,
    batches: Iterable[TokenBatch],
    count: int,
    after_step: Callable[[], None] = lambda: None,
) -> list[float]:
    """Returns the seconds of each of ``count`` steps, one right after another.

    On a GPU the marks are events, read at the end: the host runs ahead, as it does in training.
    """
    clock = clock_for(step.device)
    clock.wait()
    marks = [clock.mark()]
    for _ in range(count):
        step.run(batches)
        marks.append(clock.mark())
        after_step()
    clock.wait()
    return [clock.elapsed_s(start, end) for start, end in pairwise(marks)]
