"""The memory of a training step of any architecture, moment by moment, from sizes alone.

The step is followed through the moments that can be its peak: each group of equal layers in the
forward pass, the loss, the last and the first of each group in the backward pass, and the update.
What layers hold comes from their ``Activations``; states, buckets and gathered units come from
``Sharding``. Nothing is fitted. Figures are bytes of eager execution on one rank.

On a CPU oneDNN's products of bfloat16 take room of their own, as the processor's instructions let
them: nothing with AVX2 alone, up to 6 % of a small step with instructions for bfloat16, up to 40 %
with AVX-512 alone. It is not predicted.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
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
from common.perfmodel.one_device.moments import COMPONENTS, MemoryPrediction, Moment
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
        optimizer: adamw, or sgd without momentum.
        optimizer_implementation: for-loop, foreach or fused, which AdamW's temporaries depend on.
        loss_in_pieces: whether the head makes its gradients with the loss, and keeps nothing else.
    """

    architecture: Architecture
    batch_size: int
    numerics: Numerics = FLOAT32_NUMERICS
    checkpointing: str = "none"
    accumulation: int = 1
    reduces_each: bool = False
    optimizer: str = "adamw"
    optimizer_implementation: str = "fused"
    loss_in_pieces: bool = False


def predict_training_memory(passes: Passes, sharding: Sharding | None = None) -> MemoryPrediction:
    """Predicts the memory of one rank at each moment of a step that is not the first.

    HYBRID_SHARD's ranks are those that share a copy. The optimizer's states are float32.

    Raises UserError for an architecture whose activations are not known.
    """
    if not any(layer.activations.kept for layer in passes.architecture.layers):
        raise UserError(f"{passes.architecture.name}: its activations are not known")
    return MemoryPrediction(tuple(_Step(passes, sharding or Sharding()).moments()))


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
        one_by_one = passes.architecture.one_by_one()
        self.blocks = [layer.elements for layer in one_by_one if layer.is_block]
        self.casts = passes.numerics.casts == "autocast"
        self.made_bytes = 2 if passes.numerics.casts == "half" else FLOAT32
        self.states = state_bytes(self.architecture.num_trained, passes.optimizer)
        self.all_gradients = self.states["gradients"]
        self.optimizer_bytes = sharding.of_states(
            self.states["optimizer states"], self.architecture
        )
        self.tied = self.layers[-1].shared_elements if self.architecture.ties_head else 0
        self.has_views = sharding.has_buckets and sharding.gradient_as_bucket_view
        several = passes.accumulation > 1
        self.adds_parts = several and passes.reduces_each and sharding.shards
        self.accumulates = several and not self.adds_parts
        self.has_copies = sharding.shards and self.numerics.device == CPU  # of gloo's gathers
        self.gathers_again = not sharding.keeps_all and sharding.prefetch > 0

    def moments(self) -> Iterator[Moment]:
        last = len(self.layers) - 1
        for group, layer in enumerate(self.layers):
            position = self._position(group, layer.count)
            name = f"forward of {layer.name}"
            if group == last:
                name = "loss in pieces" if self.passes.loss_in_pieces else "loss"
            yield self._forward(name, position, "loss" if group == last else "forward")
            if layer.is_block and self.has_copies:
                yield from self._gathering(group)
        if self.has_copies and self.gathers_again:
            held = self._kept(self._position(last, self.layers[last].count), inside=False)
            yield self._moment("gather of the last unit", "gather last", 0, held)
        for group in reversed(range(len(self.layers))):
            layer = self.layers[group]
            for of_group in self._looked_at(layer.count):
                position = self._position(group, of_group)
                is_unit = layer.is_block and layer.has_backward and self.sharding.shards
                if is_unit and self.has_copies and self.gathers_again:
                    yield from self._gathering_again(position)
                yield from self._backward(position)
                if is_unit:
                    yield from self._reducing(position)
        parts = {"temporary buffers": self._update_temporaries()}
        yield self._moment("update", "update", gradients=self.all_gradients, parts=parts)

    def _looked_at(self, count: int) -> Iterable[int]:
        """Returns which of equal layers' backward passes may be the peak.

        The last one and the first; of units both ends of the last, of that before, behind which
        one is being reduced, and of the first ones, before which as many are gathered as ever.
        """
        size = self.sharding.blocks_per_unit
        ends = []
        if self.sharding.shards:
            begun = (count - 1) // size * size  # blocks before the last unit, which may be smaller
            ends = [begun + 1, begun, begun - size + 1]
            firsts = dict.fromkeys((self.sharding.prefetch + 1, 2, 1))
            ends += [end for unit in firsts for end in (unit * size, (unit - 1) * size + 1)]
        return dict.fromkeys(min(max(number, 1), count) for number in (count, *ends, 1))

    def _position(self, group: int, of_group: int) -> _Position:
        layer = self.layers[group]
        blocks = sum(other.count for other in self.layers[:group] if other.is_block)
        return _Position(layer, group, of_group, blocks + (of_group if layer.is_block else 0))

    def _moment(
        self, name: str, phase: str, gradients: float, parts: dict[str, float], block: int = 1
    ) -> Moment:
        sharding = self.sharding
        base = {
            "parameters": sharding.of_parameters(FLOAT32 * self.architecture.num_parameters),
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
        sizes = Counter(base)
        sizes.update(parts)
        return Moment(name, {part: round(sizes[part]) for part in COMPONENTS if sizes[part]})

    def _held(self, gradients: float, phase: str, block: int) -> float:
        """Returns a rank's gradients that are not in DDP's buckets, of ``gradients`` made so far.

        FSDP that waits for the last micro-batch keeps them whole from one to the next, and reduces
        a block's when that one's backward pass is through it; FSDP that reduces in each keeps a
        rank's part.
        """
        if self.has_views:
            return self.all_gradients if self.accumulates and phase != "update" else 0
        if self.adds_parts:
            return self.sharding.of_gradients(self.all_gradients)
        if not self.accumulates:
            return self.sharding.of_gradients(round(gradients))
        through = self.blocks if phase == "embedding" else []
        if phase in ("backward", "gather again", "reduce"):
            through = self.blocks[self.sharding.unit_end(block) :]
        reduced = self.all_gradients if phase == "update" else FLOAT32 * sum(through)
        return self.all_gradients - reduced + self.sharding.of_gradients(reduced)

    def _kept(self, position: _Position, inside: bool) -> Counter[str]:
        """Returns what layers up to a position keep; inside its backward pass, all of its own."""
        pieces: Counter[str] = Counter()
        for group, layer in enumerate(self.layers[: position.group + 1]):
            count = position.of_group if group == position.group else layer.count
            current = inside and group == position.group
            held = self._held_by(layer)
            pieces.update(in_parts(held, self.numerics, self.passes.batch_size * (count - current)))
            if current:
                activations = layer.activations
                pieces.update(self._in_parts(activations.kept))
                if layer.is_block and self.passes.checkpointing != "none":
                    is_selective = self.passes.checkpointing == "selective"
                    again = activations.selected if is_selective else ()
                    pieces.update(self._in_parts(activations.borrowed + again))
        return pieces

    def _held_by(self, layer: Layer) -> tuple[Piece, ...]:
        """Returns the pieces that a layer holds between its passes."""
        held: Activations = layer.activations
        again = layer.is_block and layer.has_backward
        if not again or self.passes.checkpointing == "none":
            return held.kept
        selected = held.selected if self.passes.checkpointing == "selective" else ()
        return held.entering + selected

    def _forward(self, name: str, position: _Position, phase: str) -> Moment:
        parts = self._kept(position, inside=False)
        parts.update(self._in_parts(position.layer.activations.forward))
        parts.update(self._fixed(position.layer.activations.fixed[:1]))
        if self.casts:
            layers = self.layers if not self.sharding.shards else ()  # units are gathered as cast
            copies = sum(self._cast(layer) for layer in layers)
            shared = self.layers[-1].shared_elements
            parts["autocast copies"] += 2 * (copies + shared)
        return self._moment(name, phase, 0, parts, max(position.block, 1))

    def _gathering(self, group: int) -> Iterator[Moment]:
        """Yields moments at which gloo gathers a block, which it holds once more meanwhile."""
        layer, prefetch = self.layers[group], self.sharding.prefetch
        behind = layer.count - (prefetch if prefetch > 1 else 0)  # all that is gathered ahead
        for of_group in dict.fromkeys((1, max(behind, 1), layer.count)):
            position = self._position(group, of_group)
            parts = self._kept(replace(position, of_group=of_group - 1), inside=False)
            name = f"gather of {layer.name} {position.block}"
            yield self._moment(name, "gather", 0, parts, position.block)

    def _cast(self, layer: Layer, biases: bool = True) -> int:
        """Returns the parameters of equal layers' products, of which autocast makes copies."""
        if not layer.forward_flops:
            return 0
        modules = {tensor.module for tensor in layer.tensors if len(tensor.shape) > 1}
        elements = sum(
            tensor.elements
            for tensor in layer.tensors
            if len(tensor.shape) > 1 or (biases and tensor.module in modules)
        )
        # No cache has a frozen weight's copy: it is there for a gradient that passes, if at all.
        again = biases and layer.is_block and self.passes.checkpointing != "none"
        frozen = layer.frozen if layer.backward_ratio and not again else ()
        elements += sum(tensor.elements for tensor in frozen if len(tensor.shape) > 1)
        return layer.count * elements

    def _backward(self, position: _Position) -> Iterator[Moment]:
        """Yields the moments of one layer's backward pass."""
        layer, is_last = position.layer, position.group == len(self.layers) - 1
        is_embedding = position.group == 0
        made = self._made(position)
        for number, extra in enumerate(layer.activations.backward):
            parts = self._kept(position, inside=True)
            parts.update(self._in_parts(extra))
            parts.update(self._fixed(layer.activations.fixed[1:]))
            weights = self._own_gradients(position, number)
            waiting = 0 if is_last or is_embedding else self._waiting()
            parts["temporary buffers"] += weights + waiting
            parts["autocast copies"] += self._copies(position, is_last)
            if is_embedding and self.tied and not (self.accumulates or self.has_views):
                parts["gradients"] = self.made_bytes * (layer.elements - self.tied)
            phase = self._phase(position)
            name = f"backward of {layer.name}"
            if is_last:
                name = ("loss backward", "head backward")[number or self.passes.loss_in_pieces]
            elif layer.is_block:
                name = f"{'attention ' * (number > 0)}backward of {layer.name} {position.block}"
            block = max(position.block, 1)
            behind = layer.tensors if number > 0 and layer.is_block else ()
            behind_scores = sum(tensor.elements for tensor in behind if not _before_scores(tensor))
            yield self._moment(name, phase, FLOAT32 * (made + behind_scores), parts, block)

    def _gathering_again(self, position: _Position) -> Iterator[Moment]:
        """Yields the moment at which gloo gathers a unit while that behind it begins its backward.

        Yields none for a block that does not end its unit.
        """
        if position.block in (self.sharding.unit_end(position.block), len(self.blocks)):
            parts, gradients = self._kept(position, inside=False), FLOAT32 * self._made(position)
            name = f"gather before {position.layer.name} {position.block}"
            yield self._moment(name, "gather again", gradients, parts, position.block)

    def _reducing(self, position: _Position) -> Iterator[Moment]:
        """Yields the moment at which FSDP has a unit's gradients; none within the unit."""
        if self.sharding.unit_end(position.block - 1) < position.block:
            parts = self._kept(replace(position, of_group=position.of_group - 1), inside=False)
            gradients = FLOAT32 * self._made(position)
            name = f"reduction of {position.layer.name} {position.block}"
            yield self._moment(name, "reduce", gradients, parts, position.block)

    def _made(self, position: _Position) -> int:
        """Returns the elements of later layers, whose gradients are made before a layer's.

        Those of FSDP's units that are not reduced yet count as communication.
        """
        layer = position.layer
        later = sum(other.count * other.elements for other in self.layers[position.group + 1 :])
        made = later + (layer.count - position.of_group) * layer.elements
        if layer.is_block and self.sharding.shards:
            made -= sum(self.blocks[position.block : self.sharding.unit_end(position.block)])
        return made

    def _phase(self, position: _Position) -> str:
        """Returns the phase of a layer's backward pass, by the blocks before and after it."""
        later = any(layer.is_block for layer in self.layers[position.group + 1 :])
        if position.group == len(self.layers) - 1 or not (position.layer.is_block or later):
            return "loss backward"
        return "backward" if position.block else "embedding"

    def _own_gradients(self, position: _Position, number: int) -> float:
        """Returns bytes of weights' gradients as they are made in a layer's backward pass.

        A block's is one matrix's at the first moment; by the second, those behind attention count
        as made. On a CPU oneDNN has a convolution's twice, in a layout of its own, too. A head's
        come at its second. A tied embedding's are the head's, its own, and their sum.
        """
        layer, is_embedding = position.layer, position.group == 0
        is_last = position.group == len(self.layers) - 1
        numbers = self.made_bytes + (2 if self.casts else 0)
        if is_last:
            return number * numbers * (layer.elements + layer.shared_elements)
        if number > 0:
            return 0.0
        if not layer.is_block:
            if is_embedding and self.tied:
                return 3 * self.made_bytes * self.tied
            return self.made_bytes * layer.elements
        on_cpu = self.numerics.device == CPU
        matrices = [
            tensor.elements * (2 if on_cpu and len(tensor.shape) == 4 else 1)
            for tensor in layer.tensors
            if len(tensor.shape) > 1
        ]
        return self.numerics.compute_bytes * max(matrices, default=0)

    def _waiting(self) -> float:
        """Returns bytes of the head's gradient that wait: for the embedding's, or to be reduced."""
        reduced = 0 if self.accumulates else self.layers[-1].elements * self.sharding.shards
        return self.made_bytes * (reduced + self.tied)

    def _copies(self, position: _Position, is_last: bool) -> float:
        """Returns bytes of autocast's copies that the rest of the backward pass needs."""
        if not self.casts:
            return 0.0
        layer, elements = position.layer, 0.0
        if is_last and not self.passes.loss_in_pieces:
            head = self.layers[-1]
            elements = head.shared_elements + self._cast(head, biases=False)
        if not self.sharding.shards:
            matrices = self._cast(layer, biases=False) / layer.count
            if self.passes.checkpointing == "none":
                before = self.layers[: position.group]
                elements += sum(self._cast(other, biases=False) for other in before)
                elements += 0 if is_last else position.of_group * matrices
            elif layer.is_block:
                elements += matrices
        return 2 * elements

    def _update_temporaries(self) -> float:
        """Returns bytes that AdamW's update takes beside its states; SGD's takes none."""
        if self.passes.optimizer == "sgd":
            return 0.0
        return {
            "fused": 0.0,
            "foreach": self.optimizer_bytes / 2,
            "for-loop": self.sharding.of_parameters(
                2 * FLOAT32 * max(self.architecture.parameter_sizes())
            ),
        }[self.passes.optimizer_implementation]

    def _fixed(self, pieces: tuple[Piece, ...]) -> dict[str, float]:
        is_seen = not self.sharding.shards and self.passes.checkpointing == "none"
        return in_parts(pieces, self.numerics) if is_seen else {}

    def _in_parts(self, pieces: tuple[Piece, ...]) -> dict[str, float]:
        return in_parts(pieces, self.numerics, self.passes.batch_size)


def _before_scores(tensor: Tensor) -> bool:
    """Returns whether a parameter's gradient comes after the scores' in the backward pass."""
    return tensor.name.startswith("attention") and not tensor.name.startswith("attention.output")
