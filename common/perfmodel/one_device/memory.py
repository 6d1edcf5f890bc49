"""The memory of a training step, byte by byte, from sizes alone.

What PyTorch keeps for the backward pass is written down per token and layer, and the step is
followed through the moments at which most memory is in use; the largest of them is the peak. The
formulas are for eager execution: a compiled model saves less. They follow what autograd's nodes
save (derivatives.yaml of PyTorch) and, for mixed precision, autocast's rules; Korthikanti et al.
2022 (arXiv 2205.05198) count activations the same way, Rajbhandari et al. 2020 (arXiv 1910.02054)
the states. All figures are bytes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from common.exercises.step_memory import FLOAT32, state_bytes
from common.perfmodel.one_device.activations import block_activations, compute_size
from common.perfmodel.one_device.sharding import Sharding
from common.perfmodel.one_device.workload import Workload

STATE = ("parameters", "gradients", "optimizer states")
COMPONENTS = (
    *STATE,
    "residual stream",
    "norm outputs",
    "attention",
    "attention scores",
    "feed-forward",
    "dropout",
    "selected",
    "activations",
    "logits and loss",
    "autocast copies",
    "temporary buffers",
    "communication",
    "batch",
)
"""The uses of a moment's bytes, in the order of a table."""


@dataclass(frozen=True)
class Moment:
    """The contents of memory at one point of the step: component → bytes."""

    name: str
    components: Mapping[str, int]

    @property
    def total_bytes(self) -> int:
        return sum(self.components.values())

    @property
    def state_bytes(self) -> int:
        """Returns the bytes of parameters, gradients and optimizer states."""
        return sum(self.components.get(name, 0) for name in STATE)


@dataclass(frozen=True)
class MemoryPrediction:
    """The moments of a step; ``peak`` is the one that decides whether it fits."""

    moments: tuple[Moment, ...]

    @property
    def peak(self) -> Moment:
        return max(self.moments, key=lambda moment: moment.total_bytes)

    @property
    def peak_bytes(self) -> int:
        return self.peak.total_bytes

    def at(self, name: str) -> Moment:
        """Returns the moment of that name."""
        return next(moment for moment in self.moments if moment.name == name)


def largest_that_fits(peak_bytes: Callable[[int], float], capacity_bytes: float) -> int:
    """Returns the largest batch whose peak, which grows with it, fits; 0 if not even 1 does."""
    if peak_bytes(1) > capacity_bytes:
        return 0
    below, above = 1, 2
    while peak_bytes(above) <= capacity_bytes:
        below, above = above, 2 * above
    while above - below > 1:
        middle = (below + above) // 2
        fits = peak_bytes(middle) <= capacity_bytes
        below, above = (middle, above) if fits else (below, middle)
    return below


def predict_memory(workload: Workload, sharding: Sharding | None = None) -> MemoryPrediction:
    """Predicts the memory of one rank at each moment of a step that is not the first.

    The first step has no optimizer states yet. What the libraries take (CUDA context, workspaces)
    is not in it. Sharded blocks are gathered in the type that they are computed in, as this
    project's trainer does it.
    """
    return _Step(workload, sharding or Sharding()).prediction()


def estimated_states(workload: Workload) -> dict[str, int]:
    """Estimates as the course does: bytes of parameters, gradients and states, unsharded."""
    return state_bytes(workload.config.num_parameters(), workload.optimizer)


class _Step:
    """The sizes that the moments of a step are made of."""

    def __init__(self, workload: Workload, sharding: Sharding) -> None:
        self.workload, self.sharding = workload, sharding
        config = self.config = workload.config
        self.architecture = config.architecture(workload.seq_len)
        self.size = compute_size(workload)
        self.mixed = self.size < FLOAT32
        self.tokens = workload.batch_size * workload.seq_len
        self.width = self.tokens * config.n_embd
        self.head = config.vocab_size * config.n_embd
        self.all_gradients = FLOAT32 * config.num_parameters()
        self.block_parameters = config.parameters_per_layer()
        self.block = block_activations(workload)

    def prediction(self) -> MemoryPrediction:
        layers = self.config.n_layer
        kept = 0 if self.workload.gradient_accumulation == 1 else self.all_gradients
        moments = [self.forward_of_block(layers, kept)]
        if self.workload.loss_chunks == 1:
            moments += [self.loss(kept), self.loss_backward(kept), self.head_backward(kept)]
        else:
            moments += [self.chunked_loss(kept), self.chunked_head_backward(kept)]
        moments += [self.block_backward(layers, kept), self.block_backward(1, kept)]
        if self.workload.attention == "eager":
            moments += [self.attention_backward(layers, kept), self.attention_backward(1, kept)]
        moments += [self.embedding_backward(kept), self.update()]
        return MemoryPrediction(tuple(moments))

    def moment(self, name: str, phase: str, block: int = 1, **parts: int) -> Moment:
        """Makes a moment of the states and of ``parts``, whose names have _ for spaces.

        ``phase`` and ``block`` are as for ``Sharding.communication_bytes``.
        """
        named = {key.replace("_", " "): int(value) for key, value in parts.items()}
        states = estimated_states(self.workload)
        base = {
            "parameters": self.sharding.of_parameters(states["parameters"]),
            "gradients": self.held_gradients(named.pop("gradients", 0), phase, block),
            "optimizer states": self.sharding.of_states(
                states["optimizer states"], self.architecture
            ),
        }
        base["batch"] = 16 * self.tokens  # tokens and targets
        base["communication"] = self.sharding.communication_bytes(
            self.architecture,
            phase,
            block,
            item_bytes=self.size,
            holds_gradients=self.workload.gradient_accumulation > 1,
        )
        sizes = base | named
        return Moment(name, {key: sizes[key] for key in COMPONENTS if sizes.get(key)})

    def held_gradients(self, gradients: int, phase: str, block: int) -> int:
        """Returns the bytes of a rank's gradients that are not in DDP's buckets.

        Views of buckets are made where gradients are exchanged: in a step's last backward pass.
        FSDP keeps gradients whole from one micro-batch to the next, and a unit has its part only
        when that last pass has gone through it.
        """
        accumulates = self.workload.gradient_accumulation > 1
        if self.sharding.has_buckets and self.sharding.gradient_as_bucket_view:
            return gradients if accumulates and phase != "update" else 0
        if not self.sharding.shards or not accumulates:
            return self.sharding.of_gradients(gradients)
        layers = self.config.n_layer
        blocks = {"backward": layers - block, "embedding": layers, "update": layers}.get(phase, 0)
        reduced = FLOAT32 * blocks * self.block_parameters
        if phase == "update":
            reduced = self.all_gradients
        return self.all_gradients - reduced + self.sharding.of_gradients(reduced)

    def saved(self, blocks: int, *, in_backward: bool = False) -> dict[str, int]:
        """Returns the bytes of the first ``blocks`` blocks' activations and the last norm's input.

        The norm's input is gone once the blocks' backward passes begin. Under checkpointing all
        activations of the block at hand are there again then, beside its input.
        """
        last_norm = 0 if in_backward else FLOAT32 * self.width + 2 * FLOAT32 * self.tokens
        if not self.workload.activation_checkpointing:
            parts = {name: blocks * size for name, size in self.block.items()}
        else:
            parts = dict(self.block) if in_backward else {"residual stream": 0}
            inputs = blocks - 1 if in_backward else blocks
            parts["residual stream"] += FLOAT32 * self.width * inputs
        parts["residual stream"] += last_norm
        return {name.replace(" ", "_"): size for name, size in parts.items()}

    def casts(self, blocks: int, head: bool) -> int:
        """Returns bytes of weights (and biases) that autocast copied and autograd still needs."""
        if not self.mixed:
            return 0
        if self.sharding.shards:
            blocks = 0  # they are gathered in 16 bits: nothing is cast
        elif self.workload.activation_checkpointing:
            blocks = 0 if head else 1  # the one that is computed again
        matrices = blocks * self.config.matrix_parameters_per_layer()
        return 2 * (matrices + (self.head if head else 0))

    def cached_casts(self) -> int:
        """Returns the forward pass's autocast cache in bytes: all linear weights and biases."""
        if not self.mixed:
            return 0
        block = self.config.matrix_parameters_per_layer() + 9 * self.config.n_embd
        blocks = 0 if self.sharding.shards else self.config.n_layer  # as in ``casts``
        return 2 * (blocks * block + self.head)

    def forward_of_block(self, blocks: int, gradients: int) -> Moment:
        """Returns the moment of the last block's forward pass.

        There written-out attention has its temporaries.
        """
        return self.moment(
            name="forward",
            phase="forward",
            gradients=gradients,
            temporary_buffers=self.attention_temporaries() + FLOAT32 * self.width,
            autocast_copies=self.cached_casts(),
            **self.saved(blocks),
        )

    def attention_temporaries(self) -> int:
        """Returns bytes of score matrices that a written-out softmax needs beside its result."""
        if self.workload.attention == "sdpa":
            return 0
        scores = self.tokens * self.config.n_head * self.workload.seq_len
        return self.size * (scores + self.workload.seq_len**2)  # and the mask

    def normed(self) -> int:
        """Returns the bytes of the head's input: the last norm's output."""
        return self.size * self.width

    def loss(self, gradients: int) -> Moment:
        """Returns the moment of the loss: logits and their log-softmax, both float32."""
        logits = 2 * FLOAT32 * self.tokens * self.config.vocab_size
        return self.moment(
            name="loss",
            phase="loss",
            gradients=gradients,
            logits_and_loss=logits + self.normed(),
            autocast_copies=self.cached_casts(),
            **self.saved(self.config.n_layer),
        )

    def loss_backward(self, gradients: int) -> Moment:
        """Returns the moment of the loss's backward pass, with three tables of logits.

        They are the log-softmax, its gradient and that of the logits.
        """
        logits = 3 * FLOAT32 * self.tokens * self.config.vocab_size
        return self.moment(
            name="loss backward",
            phase="loss",
            gradients=gradients,
            logits_and_loss=logits + self.normed(),
            autocast_copies=self.casts(self.config.n_layer, head=True),
            **self.saved(self.config.n_layer),
        )

    def head_backward(self, gradients: int) -> Moment:
        """Returns the moment of the head's backward pass.

        The logits' gradient is there while that of the head's weight is made (and, mixed, cast).
        """
        logits = self.size * self.tokens * self.config.vocab_size
        weight = self.head * (FLOAT32 + (self.size if self.mixed else 0))
        return self.moment(
            name="head backward",
            phase="loss",
            gradients=gradients,
            logits_and_loss=logits + self.normed(),
            temporary_buffers=weight + self.size * self.width,
            autocast_copies=self.casts(self.config.n_layer, head=True),
            **self.saved(self.config.n_layer),
        )

    def chunked_loss(self, gradients: int) -> Moment:
        """Returns the moment of the loss in pieces.

        One piece's logits are there, and the head's gradients, which are made with them.
        """
        piece = -(-self.tokens // self.workload.loss_chunks) * self.config.vocab_size
        logits, weight = FLOAT32 * piece, FLOAT32 * self.head
        unrounded = FLOAT32 * self.width if self.mixed else 0  # the last norm's output
        if self.mixed:  # rounded logits, and exact ones or the part of the weight's gradient
            logits = self.size * piece + max(FLOAT32 * piece, self.size * self.head)
        return self.moment(
            name="loss in pieces",
            phase="loss",
            gradients=gradients,
            logits_and_loss=logits + self.normed(),
            temporary_buffers=weight + self.size * self.width + unrounded,
            autocast_copies=self.cached_casts(),
            **self.saved(self.config.n_layer),
        )

    def chunked_head_backward(self, gradients: int) -> Moment:
        """Returns the moment of the head's gradients, as made in pieces and as scaled."""
        return self.moment(
            name="head backward",
            phase="loss",
            gradients=gradients,
            temporary_buffers=2 * (FLOAT32 * self.head + self.size * self.width),
            autocast_copies=self.casts(self.config.n_layer, head=False),
            **self.saved(self.config.n_layer),
        )

    def block_backward(self, block: int, gradients: int) -> Moment:
        """Returns the moment when the feed-forward half of block ``block`` makes its gradients.

        Blocks count from 1. The gradients of the GELU's output and input live at once while its
        saved output is gone, beside the gradient of the residual stream; the head's gradient waits
        for the embedding's.
        """
        later_blocks = self.config.n_layer - block
        made = FLOAT32 * later_blocks * self.block_parameters
        return self.moment(
            name=f"backward of block {block}",
            phase="backward",
            block=block,
            gradients=max(gradients, made),
            temporary_buffers=self.block_inside_backward(),
            autocast_copies=self.casts(block, head=False),
            **self.saved(block, in_backward=True),
        )

    def block_inside_backward(self) -> int:
        """Returns bytes of gradients on their way through the feed-forward or attention half."""
        stream = (FLOAT32 + (self.size if self.mixed else 0)) * self.width
        weight = 4 * self.config.n_embd**2 * self.size
        feed_forward = 4 * self.size * self.width + weight
        return stream + feed_forward + FLOAT32 * self.head

    def attention_backward(self, block: int, gradients: int) -> Moment:
        """Returns the moment of block ``block``'s attention in the backward pass.

        Three score matrices are there: the softmax, its gradient and its input's. The feed-forward
        half of the block is gone, and so are the values.
        """
        made = FLOAT32 * (self.config.n_layer - block) * self.block_parameters
        made += 9 * self.config.n_embd**2 * FLOAT32
        scores = self.size * self.tokens * self.config.n_head * self.workload.seq_len
        kept = self.saved(block, in_backward=True)
        kept["residual_stream"] -= FLOAT32 * self.width
        kept["norm_outputs"] -= self.size * self.width
        kept["attention"] -= 2 * self.size * self.width
        kept["feed-forward"] -= 8 * self.size * self.width
        way = (FLOAT32 + self.size) * self.width + FLOAT32 * self.head
        return self.moment(
            name=f"attention backward of block {block}",
            phase="backward",
            block=block,
            gradients=max(gradients, made),
            temporary_buffers=2 * scores + way,
            autocast_copies=self.casts(block, head=False),
            **kept,
        )

    def embedding_backward(self, gradients: int) -> Moment:
        """Returns the moment with both gradients of the tied embedding, and their sum."""
        return self.moment(
            name="embedding backward",
            phase="embedding",
            gradients=max(gradients, self.all_gradients - FLOAT32 * self.head),
            temporary_buffers=3 * FLOAT32 * self.head,
            residual_stream=FLOAT32 * self.width,
        )

    def update(self) -> Moment:
        """Returns the moment of the update: all gradients, and the optimizer's temporaries."""
        temporary = 0
        if self.workload.optimizer == "adamw":
            temporary = {
                "fused": 0,
                "foreach": self.sharding.of_states(self.all_gradients, self.architecture),
                "for-loop": self.sharding.of_parameters(2 * FLOAT32 * self.head),
            }[self.workload.optimizer_implementation]
        return self.moment(
            "update", "update", gradients=self.all_gradients, temporary_buffers=temporary
        )
