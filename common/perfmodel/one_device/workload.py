"""The computation of one training step: the settings that change its time and its memory."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Annotated

from common.errors import UserError, require_known
from common.perfmodel.one_device.architecture import CONFIGS, TITLES, GPT2Config
from common.settings import AtLeast, Settings, part_of

CHOICES = {
    "precision": ("float32", "bfloat16", "float16"),
    "attention": ("sdpa", "eager"),
    "optimizer": ("adamw", "sgd"),
    "optimizer_implementation": ("for-loop", "foreach", "fused"),
}


@dataclass(frozen=True)
class Workload(Settings):
    """A training step of a GPT-2. Scripts extend this with settings of their own.

    A step is ``gradient_accumulation`` forward and backward passes over ``batch_size`` sequences
    of ``seq_len`` tokens each, then one update.
    """

    model: str = "gpt2"
    """gpt2-pico, gpt2-nano, gpt2, gpt2-medium, gpt2-large or gpt2-xl."""
    batch_size: Annotated[int, AtLeast(1)] = 8
    """Sequences per forward pass."""
    seq_len: Annotated[int, AtLeast(1)] = 1024
    """Tokens per sequence."""
    precision: str = "float32"
    """float32, bfloat16 or float16 (the latter two by autocast: weights and gradients stay
    float32, and float16 scales the loss)."""
    tf32: bool = False
    """Let float32 matrix products use TensorFloat-32 (Ampere GPUs and later)."""
    attention: str = "sdpa"
    """sdpa (PyTorch's fused attention) or eager (the score matrix is written out)."""
    compile: bool = False
    """torch.compile the model."""
    optimizer: str = "adamw"
    """adamw or sgd (without momentum: no state)."""
    optimizer_implementation: str = "for-loop"
    """for-loop, foreach or fused: PyTorch's three implementations of an optimizer."""
    vocab_multiple: Annotated[int, AtLeast(1)] = 1
    """Pad the vocabulary to a multiple of this; 64 gives the matrix product even tiles."""
    activation_checkpointing: bool = False
    """Keep each block's input only, and compute the rest again in the backward pass."""
    loss_chunks: Annotated[int, AtLeast(1)] = 1
    """Compute logits, loss and their gradients in this many pieces of the batch."""
    gradient_accumulation: Annotated[int, AtLeast(1)] = 1
    """Forward and backward passes per update."""
    async_batches: bool = False
    """Copy the next batch from pinned memory while this one is computed (GPUs only)."""
    vocab_size: int = 0
    """Give the model a vocabulary of this many tokens; 0 keeps its own."""

    def __post_init__(self) -> None:
        super().__post_init__()
        for name, choices in CHOICES.items():
            require_known(name, getattr(self, name), choices)
        if self.vocab_size < 0:
            raise UserError(f"vocab_size is {self.vocab_size}; at least 1, or 0 for the own")
        positions = GPT2Config.named(self.model).n_positions
        if self.seq_len > positions:
            raise UserError(
                f"seq_len {self.seq_len}: {self.model} has {positions} positions; "
                f"use --seq_len {positions} or less"
            )
        if self.loss_chunks > self.batch_size * self.seq_len:
            raise UserError(
                f"loss_chunks {self.loss_chunks}: more than the {self.batch_size * self.seq_len} "
                "tokens of a batch"
            )

    @classmethod
    def of(cls, settings: Mapping[str, object], **other: object) -> Workload:
        """Returns the step among a run's settings, with ``other`` in place of its own."""
        return part_of(Workload, settings, **other)

    @property
    def unpadded(self) -> GPT2Config:
        """Returns the sizes of the model without padding, which is no token."""
        sizes = GPT2Config.named(self.model)
        return replace(sizes, vocab_size=self.vocab_size or sizes.vocab_size)

    @property
    def config(self) -> GPT2Config:
        """Returns the sizes of the model, with the padded vocabulary."""
        return self.unpadded.padded_vocabulary(self.vocab_multiple)

    @property
    def title(self) -> str:
        """Returns the model's name as the course prints it, such as GPT-2 Small."""
        return TITLES[self.model if self.model in CONFIGS else f"gpt2-{self.model}"]

    @property
    def tokens_per_step(self) -> int:
        """Returns the tokens between two updates."""
        return self.batch_size * self.seq_len * self.gradient_accumulation

    def without_effect(self, device_type: str) -> list[str]:
        """Returns the options that are on and change nothing on ``device_type``, in words."""
        idle = {
            "tf32": self.tf32 and (device_type == "cpu" or self.precision != "float32"),
            "async_batches": self.async_batches and device_type == "cpu",
            "foreach": device_type == "cpu" and self.optimizer_implementation == "foreach",
        }
        reasons = {
            "tf32": "tf32 changes float32 matrix products on a GPU only",
            "async_batches": "async_batches needs a GPU to copy to",
            "foreach": "foreach saves kernel launches, of which a CPU has none",
        }
        return [reasons[name] for name, is_idle in idle.items() if is_idle]
