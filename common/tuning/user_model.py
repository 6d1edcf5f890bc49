"""A user's model: loads it from MODULE:FUNCTION and checks that it keeps the contract.

The contract: FUNCTION takes no arguments and returns ``(module, batch, loss)``: a
``torch.nn.Module``, one example batch (tensors in any nest of tuples, lists and dicts), and a
function with ``loss(module, batch)`` → a scalar tensor. It is called on every rank, with the same
seed, and must build the same module there. ``loss`` is called with the module wrapped in DDP, too,
so it calls ``module(...)`` and nothing else of it, as any training step under DDP does.
"""

from __future__ import annotations

import importlib
import inspect
import re
import sys
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.utils._pytree import tree_map

from common.benchmarks.steps import FixedBatchStep
from common.errors import UserError, unknown_name
from common.models.traced import ModelBatchLoss, traced_architecture
from common.perfmodel.architectures.architecture import Architecture
from common.runtime.group.gradient_marks import ready_marks
from common.runtime.group.process_group import Worker
from common.runtime.timing import clock_for
from common.tuning.tune_settings import no_module, parse_target

CONTRACT = "(module, batch, loss) with loss(module, batch) a scalar tensor"
NOT_THE_USERS = rf"site-packages|importlib|{re.escape(__file__)}"
SHOWN = 5
"""Upper bound on the names that a message lists."""


@dataclass(frozen=True)
class UserModel:
    """A module, a batch and its loss, on this rank's device; ``name`` is for messages."""

    module: nn.Module
    batch: object
    loss: Callable[[nn.Module, object], Tensor]
    name: str = "the model"


class TrainedPart(nn.Module):
    """A module with only the parameters that it trains: those whose gradients DDP exchanges."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, *inputs: object, **named: object) -> object:
        """Returns what the module returns."""
        return self.module(*inputs, **named)

    def named_parameters(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, nn.Parameter]]:
        """Yields the parameters that require a gradient, under the module's own names."""
        if recurse:
            for name, parameter in self.module.named_parameters(prefix, True, remove_duplicate):
                if parameter.requires_grad:
                    yield name, parameter


def user_step(user: UserModel, worker: Worker, precision: str = "float32") -> FixedBatchStep:
    """Makes the step of a user's model: forward and backward pass.

    There is no optimizer: nothing is trained here, and its time is the same under any setting.
    """
    return FixedBatchStep(
        TrainedPart(user.module),
        lambda called: user.loss(called, user.batch),
        worker,
        forward_model=user.module,
        precision=precision,
        name=user.name,
    )


def load_user_model(target: str, folder: Path, device: torch.device) -> UserModel:
    """Imports MODULE from ``folder`` or the installed packages and calls FUNCTION.

    Raises UserError, with what is wrong in one line.
    """
    function = function_of(target, folder)
    try:
        made = function()
    except (Exception, SystemExit) as error:
        raise UserError(f"{target} raised {said(error)}") from None
    return checked_model(made, target, device)


def function_of(target: str, folder: Path) -> Callable:
    """Imports MODULE and returns FUNCTION. Raises UserError, in one line, where there is none."""
    module_name, function_name = parse_target(target)
    if str(folder) not in sys.path:
        sys.path.insert(0, str(folder))
    try:
        module = importlib.import_module(module_name)
    except (Exception, SystemExit) as error:  # as of a script that trains when it is imported
        missing = isinstance(error, ModuleNotFoundError) and error.name
        if missing and f"{module_name}.".startswith(f"{error.name}."):
            raise UserError(no_module(module_name, folder)) from None
        raise UserError(f"module {module_name!r} cannot be imported: {said(error)}") from None
    if not hasattr(module, function_name):
        functions = [
            name
            for name, value in vars(module).items()
            if inspect.isfunction(value)
            and value.__module__ == module.__name__  # not what it has imported
            and not name.startswith("_")
        ]
        raise UserError(f"{module_name}: {unknown_name('function', function_name, functions)}")
    function = getattr(module, function_name)
    if not callable(function):
        raise UserError(f"{module_name}:{function_name} is {_kind(function)}, not a function")
    return function


def followed_model(target: str, folder: Path) -> Architecture:
    """Returns the architecture of what FUNCTION makes, followed on fake tensors.

    Raises UserError as ``load_user_model`` does, and where the module cannot be followed.
    """

    def make() -> ModelBatchLoss:
        user = load_user_model(target, folder, torch.device("cpu"))
        return user.module, user.batch, user.loss

    return traced_architecture(make, target)


def checked_model(made: object, name: str, device: torch.device) -> UserModel:
    """Checks what a FUNCTION returned, and moves it to ``device``.

    Raises UserError unless it keeps the contract.
    """
    if not isinstance(made, (tuple, list)) or len(made) != 3:
        count = f" of {len(made)}" if isinstance(made, (tuple, list)) else ""
        raise UserError(f"{name} returned {_kind(made)}{count}; expected {CONTRACT}")
    module, batch, loss = made
    if not isinstance(module, nn.Module):
        raise UserError(
            f"{name}: the first it returned is {_kind(module)}, not a torch.nn.Module; expected "
            f"{CONTRACT}"
        )
    states = (*module.named_parameters(), *module.named_buffers())
    if lazy := [key for key, value in states if is_lazy(value)]:
        raise UserError(
            f"{name}: {listed(lazy)} have no shape before a first forward pass; make one in the "
            "function, before it returns the module"
        )
    if not callable(loss):
        raise UserError(f"{name}: loss is {_kind(loss)}, not a function; expected {CONTRACT}")
    if not any(parameter.requires_grad for parameter in module.parameters()):
        raise UserError(
            f"{name}: no parameter of the module requires a gradient; nothing to exchange"
        )
    # Fake tensors cannot be moved, and need not be.
    if any(value.device != device for _, value in states):
        module = module.to(device)
    batch = tree_map(lambda leaf: leaf.to(device) if hasattr(leaf, "to") else leaf, batch)
    return UserModel(module, batch, loss, name)


def ready_order(user: UserModel, device: torch.device) -> list[str]:
    """Runs one pass without DDP; returns the parameters with a gradient, in the order they got it.

    Raises UserError where the loss is not one, or a gradient is sparse.
    """
    step_module = TrainedPart(user.module)
    user.module.zero_grad(set_to_none=True)
    with ready_marks(step_module, clock_for(device)) as marks:
        loss = checked_loss(user, user.module)
        try:
            loss.backward()
        except Exception as error:
            raise UserError(f"{user.name}: the backward pass raised {said(error)}") from None
        order = list(marks)
    for name, parameter in step_module.named_parameters():
        if parameter.grad is not None and parameter.grad.is_sparse:
            raise UserError(
                f"{user.name}: the gradient of {name} is sparse; DDP sends those apart from its "
                "buckets, make it dense (sparse=False)"
            )
    user.module.zero_grad(set_to_none=True)
    return order


def checked_loss(user: UserModel, module: nn.Module) -> Tensor:
    """Returns the loss of the batch. Raises UserError unless it is a scalar tensor with a graph."""
    under = "" if module is user.module else " under DDP"
    try:
        loss = user.loss(module, user.batch)
    except Exception as error:
        raise UserError(f"{user.name}: loss(module, batch){under} raised {said(error)}") from None
    if not isinstance(loss, Tensor):
        raise UserError(f"{user.name}: loss(module, batch) is {_kind(loss)}, not a scalar tensor")
    if loss.numel() != 1:
        shape = " × ".join(map(str, loss.shape))
        raise UserError(f"{user.name}: loss(module, batch) is a tensor of {shape}, not a scalar")
    if not loss.requires_grad:
        raise UserError(f"{user.name}: the loss depends on no parameter that requires a gradient")
    return loss


def listed(names: list[str]) -> str:
    """Joins the first SHOWN names with commas, and says how many more there are."""
    more = f" and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
    return ", ".join(names[:SHOWN]) + more


def said(error: BaseException) -> str:
    """Returns an exception of the user's code in one line: its type, message, file and line."""
    text = " ".join(str(error).split())
    text = f"{text[:200]}…" if len(text) > 200 else text
    if isinstance(error, SyntaxError):
        position = (error.filename, error.lineno)
        text = error.msg
    else:
        frames = traceback.extract_tb(error.__traceback__)
        user_frames = [frame for frame in frames if not re.search(NOT_THE_USERS, frame.filename)]
        position = (user_frames[-1].filename, user_frames[-1].lineno) if user_frames else None
    where = f" ({Path(position[0]).name}, line {position[1]})" if position and position[0] else ""
    return f"{type(error).__name__}: {text}{where}"


def _kind(value: object) -> str:
    return "None" if value is None else f"a {type(value).__name__}"
