"""The memory of a training step of any architecture, moment by moment, from sizes alone.

The step is followed through the moments that can be its peak: each group of equal layers in the
forward pass, the loss, the last and the first of each group in the backward pass, and the update.
What layers hold comes from their ``Activations``; states, buckets and gathered units come from
``Sharding``. Nothing is fitted. Figures are bytes of eager execution on one rank.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from common.errors import UserError
from common.exercises.step_memory import FLOAT32, state_bytes
from common.perfmodel.architectures.activations import (
    CPU,
    FLOAT32_NUMERICS,
    Activations,
    Numerics,
    Piece,
    in_parts,
)
from common.perfmodel.architectures.architecture import Architecture, Layer, Tensor
from common.perfmodel.one_device.memory import (
    COMPONENTS,
    MemoryPrediction,
    Moment,
    largest_that_fits,
)
from common.perfmodel.one_device.sharding import Sharding

LIBRARIES_BYTES = 10**9
"""Memory of a GPU that the CUDA context and the libraries take, beside the allocator's."""


@dataclass(frozen=True)
class Passes:
    """The passes of a training step of any model, as far as memory goes.

    Attributes:
        batch_size: samples of a micro-batch.
        checkpointing: none, selective (torchtitan's: the output of every second matrix product is
            kept) or block.
        accumulation: micro-batches of a step.
        reduces_each: whether FSDP reduces gradients in every micro-batch, and keeps none whole.
    """

    architecture: Architecture
    batch_size: int
    numerics: Numerics = FLOAT32_NUMERICS
    checkpointing: str = "none"
    accumulation: int = 1
    reduces_each: bool = False


def predict_training_memory(passes: Passes, sharding: Sharding | None = None) -> MemoryPrediction:
    """Predicts the memory of one rank at each moment of a step that is not the first.

    HYBRID_SHARD's ranks are those that share a copy. The optimizer is AdamW, with float32 moments
    and a fused update.

    Raises UserError for an architecture whose activations are not known.
    """
    if not any(layer.activations.kept for layer in passes.architecture.layers):
        raise UserError(f"{passes.architecture.name}: its activations are not known")
    return MemoryPrediction(tuple(_Step(passes, sharding or Sharding()).moments()))


def largest_micro_batch(
    passes: Passes, capacity_bytes: float, sharding: Sharding | None = None
) -> int:
    """Returns the most samples of a micro-batch whose peak fits; 0 if not even one does."""

    def peak_bytes(samples: int) -> int:
        sized = replace(passes, batch_size=samples)
        return predict_training_memory(sized, sharding).peak_bytes

    return largest_that_fits(peak_bytes, capacity_bytes)


def sharding_on(strategy: str, gpus: int, gpus_per_node: int) -> Sharding:
    """Returns how a strategy shares a model out over a job's GPUs; a single one shares nothing."""
    if gpus == 1:
        return Sharding()
    ranks = min(gpus, gpus_per_node) if strategy == "HYBRID_SHARD" else gpus
    return Sharding(strategy, ranks)


def reserved_bytes(passes: Passes, prediction: MemoryPrediction) -> float:
    """Estimates what CUDA's caching allocator holds of the driver at the peak.

    Blocks that are freed whole are used again, but what outlives a step (moments that are made in
    the first one, gradients) splits one of the largest, which is then asked for anew. So about one
    largest tensor comes on top: 0.3 to 1.0 of one in six steps on an H100
    (data/h100-1/one-gpu/assignment0). It is no bound: on an H200 it was up to 8 where that tensor
    is small (data/h200-1/study-models).
    """
    numerics, samples = passes.numerics, passes.batch_size
    head = passes.architecture.layers[-1].activations
    tables = [
        *head.kept,
        *(piece for layer in passes.architecture.layers for piece in layer.activations.entering),
    ]
    return prediction.peak_bytes + samples * max(
        (piece.bytes_in(numerics) for piece in tables), default=0.0
    )


@dataclass(frozen=True)
class _Position:
    """A layer of a model: how many of its group and of all blocks come up to it, it included."""

    layer: Layer
    group: int
    of_group: int
    block: int


class _Step:
    """The sizes that the moments of a step are made of."""

    def __init__(self, passes: Passes, sharding: Sharding) -> None:
        self.passes, self.sharding = passes, sharding
        self.architecture, self.numerics = passes.architecture, passes.numerics
        self.layers = passes.architecture.layers
        self.casts = passes.numerics.casts == "autocast"
        self.made_bytes = 2 if passes.numerics.casts == "half" else FLOAT32
        self.states = state_bytes(self.architecture.num_parameters, "adamw")
        self.all_gradients = self.states["gradients"]
        self.optimizer_bytes = sharding.of_states(
            self.states["optimizer states"], self.architecture
        )
        several = passes.accumulation > 1
        self.adds_parts = several and passes.reduces_each and sharding.shards
        self.accumulates = several and not self.adds_parts

    def moments(self) -> Iterator[Moment]:
        last = len(self.layers) - 1
        for group, layer in enumerate(self.layers):
            position = self._position(group, layer.count)
            name = "loss" if group == last else f"forward of {layer.name}"
            yield self._forward(name, position, "loss" if group == last else "forward")
        for group in reversed(range(len(self.layers))):
            layer = self.layers[group]
            for of_group in dict.fromkeys((layer.count, 1)):
                yield from self._backward(self._position(group, of_group))
        yield self._moment("update", "update", gradients=self.all_gradients, parts={})

    def _position(self, group: int, of_group: int) -> _Position:
        layer = self.layers[group]
        blocks = sum(other.count for other in self.layers[:group] if other.is_block)
        return _Position(layer, group, of_group, blocks + (of_group if layer.is_block else 0))

    def _moment(
        self, name: str, phase: str, gradients: float, parts: dict[str, float], block: int = 1
    ) -> Moment:
        sharding = self.sharding
        base = {
            "parameters": sharding.of_parameters(self.states["parameters"]),
            "gradients": self._held(gradients, phase, block),
            "optimizer states": self.optimizer_bytes,
            "batch": self.passes.batch_size * self.architecture.sample_bytes,
            "communication": sharding.communication_bytes(
                self.architecture,
                phase,
                block,
                item_bytes=self.numerics.compute_bytes,
                root_bytes=self.numerics.root_bytes,
                holds_gradients=self.accumulates,
            ),
        }
        for part, size in parts.items():
            base[part] = base.get(part, 0) + size
        sizes = {part: round(base[part]) for part in COMPONENTS if base.get(part)}
        return Moment(name, sizes)

    def _held(self, gradients: float, phase: str, block: int) -> float:
        """Returns a rank's gradients that are not in DDP's buckets, of ``gradients`` made so far.

        FSDP that waits for the last micro-batch keeps them whole from one to the next, and reduces
        a block's when that one's backward pass is through it; FSDP that reduces in each keeps a
        rank's part.
        """
        if self.adds_parts:
            return self.sharding.of_gradients(self.all_gradients)
        if not self.accumulates:
            return self.sharding.of_gradients(round(gradients))
        blocks = [layer.elements for layer in self.architecture.one_by_one() if layer.is_block]
        through = {"backward": blocks[block:], "embedding": blocks}.get(phase, ())
        reduced = self.all_gradients if phase == "update" else FLOAT32 * sum(through)
        return self.all_gradients - reduced + self.sharding.of_gradients(reduced)

    def _kept(self, position: _Position, inside: bool) -> dict[str, float]:
        """Returns what layers up to a position keep; inside its backward pass, all of its own."""
        pieces: dict[str, float] = {}
        for group, layer in enumerate(self.layers[: position.group + 1]):
            count = position.of_group if group == position.group else layer.count
            current = inside and group == position.group
            held = self._held_by(layer)
            _add(pieces, in_parts(held, self.numerics, self.passes.batch_size * (count - current)))
            if current:
                again = layer.activations.kept
                if layer.is_block and self.passes.checkpointing == "selective":
                    again += layer.activations.selected
                _add(pieces, self._in_parts(again))
        return pieces

    def _held_by(self, layer: Layer) -> tuple[Piece, ...]:
        """Returns the pieces that a layer holds between its passes."""
        held: Activations = layer.activations
        if not layer.is_block or self.passes.checkpointing == "none":
            return held.kept
        selected = held.selected if self.passes.checkpointing == "selective" else ()
        return held.entering + selected

    def _forward(self, name: str, position: _Position, phase: str) -> Moment:
        parts = self._kept(position, inside=False)
        _add(parts, self._in_parts(position.layer.activations.forward))
        if self.casts:
            layers = self.layers if not self.sharding.shards else ()  # units are gathered as cast
            copies = sum(tensor.elements for layer in layers for tensor in self._cast(layer))
            shared = self.layers[-1].shared_elements
            _add(parts, {"autocast copies": 2 * (copies + shared)})
        return self._moment(name, phase, 0, parts, max(position.block, 1))

    def _cast(self, layer: Layer, biases: bool = True) -> list[Tensor]:
        """Returns the parameters of one layer's products, of which autocast makes copies."""
        if not layer.forward_flops:
            return []
        matrices = [tensor for tensor in layer.tensors if len(tensor.shape) > 1]
        modules = {tensor.module for tensor in matrices}
        vectors = [tensor for tensor in layer.tensors if len(tensor.shape) == 1]
        linear = [tensor for tensor in vectors if tensor.module in modules] if biases else []
        return layer.count * (matrices + linear)

    def _backward(self, position: _Position) -> Iterator[Moment]:
        """Yields the moments of one layer's backward pass."""
        layer, is_last = position.layer, position.group == len(self.layers) - 1
        is_embedding = position.group == 0
        later = self.layers[position.group + 1 :]
        made = sum(other.count * other.elements for other in later)
        made += (layer.count - position.of_group) * layer.elements
        for number, extra in enumerate(layer.activations.backward):
            parts = self._kept(position, inside=True)
            _add(parts, self._in_parts(extra))
            weights = self._own_gradients(position, number)
            waiting = 0 if is_last or is_embedding else self._waiting()
            _add(parts, {"temporary buffers": weights + waiting})
            _add(parts, {"autocast copies": self._copies(position, is_last)})
            phase = self._phase(position)
            name = f"backward of {layer.name}"
            if is_last:
                name = ("loss backward", "head backward")[number]
            elif layer.is_block:
                name = f"{'attention ' * (number > 0)}backward of {layer.name} {position.block}"
            block = max(position.block, 1)
            behind = layer.tensors if number > 0 and layer.is_block else ()
            behind_scores = sum(tensor.elements for tensor in behind if not _before_scores(tensor))
            yield self._moment(name, phase, FLOAT32 * (made + behind_scores), parts, block)

    def _phase(self, position: _Position) -> str:
        """Returns the phase of a layer's backward pass, by the blocks before and after it."""
        later = any(layer.is_block for layer in self.layers[position.group + 1 :])
        if position.group == len(self.layers) - 1 or not (position.layer.is_block or later):
            return "loss"
        return "backward" if position.block else "embedding"

    def _own_gradients(self, position: _Position, number: int) -> float:
        """Returns bytes of weights' gradients as they are made in a layer's backward pass.

        A block's is one matrix's at the first moment; by the second, those behind attention count
        as made. On a CPU oneDNN has a convolution's twice, in a layout of its own, too. A head's
        come at its second. A tied embedding's are the head's, its own, and
        their sum.
        """
        layer, is_embedding = position.layer, position.group == 0
        is_last = position.group == len(self.layers) - 1
        numbers = self.made_bytes + (2 if self.casts else 0)
        if is_last:
            return number * numbers * (layer.elements + layer.shared_elements)
        if number > 0:
            return 0.0
        if not layer.is_block:
            tied = self.layers[-1].shared_elements if self.architecture.ties_head else 0
            return self.made_bytes * (layer.elements + (2 * tied if is_embedding else 0))
        on_cpu = self.numerics.device == CPU
        matrices = [
            tensor.elements * (2 if on_cpu and len(tensor.shape) == 4 else 1)
            for tensor in layer.tensors
            if len(tensor.shape) > 1
        ]
        return self.numerics.compute_bytes * max(matrices, default=0)

    def _waiting(self) -> float:
        """Returns bytes of the head's gradient that wait: for the embedding's, or to be reduced."""
        head = self.layers[-1]
        waiting = head.elements if self.sharding.shards else 0
        return self.made_bytes * (
            waiting + (head.shared_elements if self.architecture.ties_head else 0)
        )

    def _copies(self, position: _Position, is_last: bool) -> float:
        """Returns bytes of autocast's copies that the rest of the backward pass needs."""
        if not self.casts:
            return 0.0
        head = self.layers[-1]
        elements = 0
        if is_last:
            elements = head.shared_elements + sum(t.elements for t in self._cast(head, False))
        if not self.sharding.shards:
            if self.passes.checkpointing == "none":
                for group, layer in enumerate(self.layers[: position.group + 1]):
                    matrices = sum(tensor.elements for tensor in self._cast(layer, False))
                    share = position.of_group / layer.count if group == position.group else 1
                    elements += 0 if group == len(self.layers) - 1 else matrices * share
            elif position.layer.is_block:
                matrices = sum(tensor.elements for tensor in self._cast(position.layer, False))
                elements += matrices / position.layer.count
        return 2 * elements

    def _in_parts(self, pieces: tuple[Piece, ...]) -> dict[str, float]:
        return in_parts(pieces, self.numerics, self.passes.batch_size)


def _before_scores(tensor: Tensor) -> bool:
    """Returns whether a parameter's gradient comes after the scores' in the backward pass."""
    return tensor.name.startswith("attention") and not tensor.name.startswith("attention.output")


def _add(parts: dict[str, float], more: dict[str, float]) -> None:
    """Adds bytes by part, in place."""
    for part, size in more.items():
        parts[part] = parts.get(part, 0) + size
