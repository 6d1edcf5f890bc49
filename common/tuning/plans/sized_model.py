"""A user's model with a batch of any size: by ``batch_size``, or by rows of its batch."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable
from contextlib import suppress
from functools import partial
from pathlib import Path

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import DataDependentOutputException
from torch.utils._pytree import tree_leaves, tree_map

from common.errors import UserError
from common.models.from_config import random_model
from common.models.traced import ModelBatchLoss, faked, traced_architecture
from common.perfmodel.architectures.architecture import Architecture
from common.perfmodel.architectures.published_sizes import (
    SEQ_LEN,
    configuration_of,
    sized_architecture,
)
from common.runtime.seeding import seed_everything
from common.tuning.user_model import UserModel, checked_model, function_of, said

ARGUMENT = "batch_size"
IMAGES = ("resnet", "vit")
"""Families whose samples are images."""


class SizedModel:
    """Makes a user's model with a micro-batch of a size.

    Attributes:
        name: MODULE:FUNCTION, for messages.
        samples: samples of the batch that FUNCTION makes by default.
        fixed: whether no other size can be made.
    """

    def __init__(self, make: Callable[..., ModelBatchLoss], name: str, seed: int) -> None:
        self.name, self._make, self._seed = name, make, seed
        self._takes_size = ARGUMENT in inspect.signature(make).parameters
        batch = self._made()[1]
        rows = {
            len(leaf) if leaf.dim() else 0
            for leaf in tree_leaves(batch)
            if isinstance(leaf, Tensor)
        }
        self.fixed = not self._takes_size and (len(rows) != 1 or 0 in rows)
        self.samples = 1 if self.fixed else max(rows, default=1)

    @classmethod
    def load(cls, target: str, folder: Path, seed: int) -> SizedModel:
        """Loads MODULE:FUNCTION. Raises UserError as ``load_user_model`` does."""
        return cls(function_of(target, folder), target, seed)

    @classmethod
    def of_fakes(cls, target: str, folder: Path, seed: int) -> SizedModel:
        """Loads MODULE:FUNCTION as ``load`` does, where the model may exceed the memory here."""
        with faked(partial(cls.load, target, folder, seed)) as model:
            return model

    def _made(self, batch_size: int | None = None, draw: int = 0) -> ModelBatchLoss:
        """Calls FUNCTION with the seed set. Raises UserError unless it returns three values."""
        seed_everything(self._seed + draw)
        sized = {ARGUMENT: batch_size} if batch_size and self._takes_size else {}
        try:
            made = self._make(**sized)
        except UserError:
            raise
        except (Exception, SystemExit) as error:
            raise UserError(f"{self.name} raised {said(error)}") from None
        if not isinstance(made, (tuple, list)) or len(made) != 3:
            checked_model(made, self.name, torch.device("cpu"))  # which says what is wrong
        return tuple(made)

    def make(self, batch_size: int, device: torch.device, draw: int = 0) -> UserModel:
        """Returns the model with a micro-batch of so many samples, on a device.

        Weights and batch are random; another ``draw`` has others, the same on every rank.

        Raises UserError unless FUNCTION keeps the contract.
        """
        module, batch, loss = self._made(batch_size, draw)
        if not self._takes_size and not self.fixed:
            rows = torch.arange(batch_size) % self.samples
            batch = tree_map(lambda leaf: leaf[rows] if isinstance(leaf, Tensor) else leaf, batch)
        return checked_model((module, batch, loss), self.name, device)

    def architecture(self, batch_size: int, device: str) -> Architecture:
        """Follows the model's passes on fake tensors, with the kernels of cuda or cpu.

        Raises UserError where that cannot be, and where frozen parameters are not float32, as all
        are counted.
        """

        def made() -> ModelBatchLoss:
            module, batch, loss = self._on_cpu(batch_size)
            frozen = [weight for weight in module.parameters() if not weight.requires_grad]
            if others := [weight.dtype for weight in frozen if weight.dtype != torch.float32]:
                raise UserError(
                    f"{self.name}: {len(others)} of its {len(frozen)} frozen parameters are "
                    f"{others[0]}; plans are made of float32 weights"
                )
            return module, batch, loss

        samples = 1 if self.fixed else batch_size
        return traced_architecture(made, self.name, device, samples)

    def refusals(self, sizes: Iterable[int]) -> dict[int, str]:
        """Returns the sizes of a micro-batch that the model cannot train on, and why.

        Its forward pass runs on fake tensors: a batch norm raises where a channel has one value.
        A pass that asks for a tensor's value refuses nothing.
        """
        why = {size: self._refusal(size) for size in sizes}
        return {size: refusal for size, refusal in why.items() if refusal}

    def _refusal(self, batch_size: int) -> str:
        try:
            with faked(partial(self._on_cpu, batch_size)) as (module, batch, loss):
                loss(module.train(), batch)
        except DataDependentOutputException:
            return ""
        except Exception as error:
            return str(error) if isinstance(error, UserError) else said(error)
        return ""

    def _on_cpu(self, batch_size: int) -> ModelBatchLoss:
        user = self.make(batch_size, torch.device("cpu"))
        return user.module, user.batch, user.loss


def of_configuration(name_or_path: str, seq_len: int | None, seed: int) -> SizedModel:
    """Returns a model of transformers by its configuration, with random weights and batches.

    Raises UserError for what is no published size and no ``config.json``.
    """
    values = configuration_of(name_or_path, seq_len)
    if seq_len is None and values["model_type"] not in IMAGES:
        seq_len = SEQ_LEN
        with suppress(UserError):  # of a family that is not known the length is not either
            seq_len = sized_architecture(name_or_path, None)[1]
    return SizedModel(partial(random_model, values, seq_len), name_or_path, seed)
