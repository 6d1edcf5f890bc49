"""The work of one GPU of a cluster: a model, its micro-batch, and what it computes again."""

from __future__ import annotations

from dataclasses import dataclass, replace

from common.errors import UserError, require_known
from common.perfmodel.architectures.activations import Numerics
from common.perfmodel.architectures.architecture import Architecture, Layer
from common.perfmodel.one_device.training_memory import Passes
from common.perfmodel.one_device.workload import CHOICES, Workload
from common.settings import part_of

RECOMPUTED = {"none": 0.0, "selective": 0.5, "block": 1.0}
"""Kind of activation checkpointing → share of a block's forward pass that is computed again.
``selective`` is torchtitan's default, which keeps every second matrix product."""


@dataclass(frozen=True)
class Job:
    """A training step of any model, as each GPU computes it.

    Attributes:
        architecture: the model, with the size of its samples.
        batch_size: samples of a micro-batch.
        precision: float32, bfloat16 or float16 (by autocast: weights and gradients stay float32).
        tf32: whether float32 products take the TF32 units.
        checkpointing: a key of ``RECOMPUTED``.
        accumulation: micro-batches of a step under weak scaling.
        reduces_each: whether FSDP reduces gradients in every micro-batch, its default; then none
            are kept whole.
        prefetch: units that FSDP gathers ahead of the one that computes.
        gradient_bytes: bytes of a gradient's number as it is exchanged: 2 where all of a model is
            in 16 bits.
        types: types and kernels that decide memory, and what FSDP gathers; None: ``usual_types``.
            The time of passes has constants for those alone.
        compile: whether a compiler joins operators (torch.compile).
    """

    architecture: Architecture
    batch_size: int = 8
    precision: str = "bfloat16"
    tf32: bool = False
    checkpointing: str = "none"
    accumulation: int = 1
    reduces_each: bool = False
    prefetch: int = 1
    gradient_bytes: int = 4
    types: Numerics | None = None
    compile: bool = False

    def __post_init__(self) -> None:
        require_known("checkpointing", self.checkpointing, RECOMPUTED)
        require_known("precision", self.precision, CHOICES["precision"])
        for name in ("batch_size", "accumulation"):
            if getattr(self, name) < 1:
                raise UserError(f"{name} is {getattr(self, name)}; at least 1")
        if self.tf32 and self.precision != "float32":
            raise UserError(f"tf32 has no effect in {self.precision}: give precision float32")

    @classmethod
    def of(cls, workload: Workload) -> Job:
        """Returns the step of a GPT-2. Raises UserError for what is not modelled on clusters."""
        if workload.optimizer != "adamw":
            raise UserError(f"optimizer {workload.optimizer}: the update modelled here is adamw's")
        return cls(
            architecture=replace(
                workload.config.architecture(workload.seq_len), name=workload.model
            ),
            batch_size=workload.batch_size,
            precision=workload.precision,
            tf32=workload.tf32,
            checkpointing="block" if workload.activation_checkpointing else "none",
            accumulation=workload.gradient_accumulation,
            compile=workload.compile,
        )

    @property
    def tokens_per_sample(self) -> int:
        """Returns the tokens of a sequence."""
        return self.architecture.tokens_per_sample

    @property
    def micro_batch_words(self) -> str:
        """Returns the size of a micro-batch in words: 8 sequences of 1024 tokens, or 8 samples."""
        if self.tokens_per_sample == 1:
            return f"{self.batch_size} samples"
        return f"{self.batch_size} sequences of {self.tokens_per_sample} tokens"

    @property
    def usual_types(self) -> Numerics:
        """Returns the types of autocast, or of float32, with fused attention."""
        return Numerics("float32" if self.precision == "float32" else "autocast")

    @property
    def passes(self) -> Passes:
        """Returns the passes whose memory ``predict_training_memory`` predicts."""
        return part_of(Passes, vars(self), numerics=self.types or self.usual_types)

    def recomputed(self, layer: Layer) -> float:
        """Returns the share of a layer's forward pass that its backward pass repeats."""
        return RECOMPUTED[self.checkpointing] if layer.is_block and layer.has_backward else 0.0
