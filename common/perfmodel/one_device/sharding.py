"""The parameters, gradients and optimizer states that one of N ranks holds.

DDP keeps all of them on every rank. ``HYBRID_SHARD`` shards among ``ranks`` ranks, and copies of
those reduce between them. ``ZERO1`` is DDP whose optimizer states are divided, each
parameter's as a whole, as the sharded optimizer of exercise A1.4 does. ``SHARD_GRAD_OP`` and
``FULL_SHARD`` are stages 2 and 3 of ZeRO (Rajbhandari et al. 2020, arXiv 1910.02054) in PyTorch's
words, as ``fully_shard`` does them with one unit per block and one for the rest (embeddings and
last norm).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated

from common.errors import UserError
from common.exercises.step_memory import FLOAT32
from common.perfmodel.architectures.architecture import Architecture
from common.settings import AtLeast, OneOf, Settings

IN_FORWARD = ("gather", "forward", "loss")
AT_LOSS = ("loss", "gather last", "loss backward")
STRATEGIES = ("none", "DDP", "ZERO1", "SHARD_GRAD_OP", "FULL_SHARD", "HYBRID_SHARD")


@dataclass(frozen=True)
class Sharding(Settings):
    """A strategy over ``ranks`` ranks; ``none`` is a single one.

    Raises UserError for an unknown strategy, for less than one rank, and for several without one.
    """

    strategy: Annotated[str, OneOf(STRATEGIES, "sharding")] = "none"
    ranks: Annotated[int, AtLeast(1)] = 1
    gradient_as_bucket_view: bool = False
    largest_first: bool = False
    """Whether ZERO1 hands parameters out from the largest on, as torch's ZeroRedundancyOptimizer
    does; A1.4's goes by their order."""
    blocks_per_unit: Annotated[int, AtLeast(1)] = 1
    """Blocks in a row that FSDP gathers at once."""
    prefetch: Annotated[int, AtLeast(0)] = 1
    """Units that FSDP gathers ahead of the one that computes; left alone, one."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.strategy == "none" and self.ranks > 1:
            raise UserError(
                f"ranks {self.ranks} without --sharding: {', '.join(STRATEGIES[1:])} say how"
            )

    @property
    def shards(self) -> bool:
        """Returns True if parameters, gradients and states are spread over the ranks."""
        return self.strategy in ("SHARD_GRAD_OP", "FULL_SHARD", "HYBRID_SHARD")

    @property
    def keeps_all(self) -> bool:
        """Returns True if a unit stays gathered from its forward to its backward pass."""
        return self.strategy == "SHARD_GRAD_OP"

    @property
    def has_buckets(self) -> bool:
        """Returns True if gradients are exchanged in DDP's buckets."""
        return self.strategy in ("DDP", "ZERO1")

    def of_parameters(self, size_bytes: int) -> int:
        """Returns the bytes of a rank's own parameters (those gathered for use count apart)."""
        return -(-size_bytes // self.ranks) if self.shards else size_bytes

    def of_gradients(self, size_bytes: int) -> int:
        """Returns the bytes of a rank's own part of the gradients."""
        return -(-size_bytes // self.ranks) if self.shards else size_bytes

    def of_states(self, size_bytes: int, architecture: Architecture) -> int:
        """Returns the bytes of the optimizer's states on the rank that has most of them."""
        if self.strategy == "ZERO1":
            sizes = architecture.parameter_sizes()
            if self.largest_first:
                sizes = sorted(sizes, reverse=True)
            shares = whole_tensors(sizes, self.ranks)
            return size_bytes * max(shares) // sum(shares)
        return -(-size_bytes // self.ranks) if self.shards else size_bytes

    def communication_bytes(
        self,
        architecture: Architecture,
        phase: str,
        block: int = 1,
        item_bytes: int = FLOAT32,
        root_bytes: int = FLOAT32,
        holds_gradients: bool = False,
    ) -> int:
        """Computes the bytes of buffers for communication in ``phase`` of a step.

        DDP: its buckets, as large as all gradients, which may be views of them. Sharded: the unit
        of the embeddings, gathered from the first use to the last, and units of blocks. A gather
        has a buffer, which gloo fills from a copy; a unit is copied out of it. In the forward pass
        the buffer lives on until the next unit's is there, so that of the last unit until the loss
        is made. FULL_SHARD's backward pass gathers the last unit before it begins, and each unit's
        gathers the next one. What is to be reduced is a copy, and a unit's lives on until the next
        one's is made. SHARD_GRAD_OP keeps all units until their backward pass is done.
        ``prefetch`` counts units that are gathered ahead in the backward pass, and above 1 also in
        the forward pass. Found with ``fully_shard`` on two ranks (tests/perfmodel/test_sharding.py,
        tests/planning/frozen_worker.py).

        Args:
            phase: ``gather`` (over gloo), ``forward``, ``gather again`` (of the next unit, over
                gloo), ``backward`` or ``reduce`` (at its end), all of ``block``; ``loss``, ``gather
                last`` (after it, over gloo), ``loss backward``, ``embedding`` (its backward pass)
                or ``update``.
            block: number of the block whose pass it is, counted from 1.
            item_bytes: bytes of a number in a gathered block. Numbers of gradients take 4.
            root_bytes: bytes of a number in the embeddings' unit.
            holds_gradients: whether whole gradients are held anyway, between micro-batches, in
                which SHARD_GRAD_OP gathers nothing.
        """
        if self.has_buckets:
            return FLOAT32 * architecture.num_trained
        if not self.shards or phase == "update":
            return 0
        blocks = [layer for layer in architecture.one_by_one() if layer.is_block]
        size = self.blocks_per_unit
        units = [blocks[first : first + size] for first in range(0, len(blocks), size)] or [[]]
        elements = [sum(layer.all_elements for layer in layers) for layers in units]
        gathered = [item_bytes * count for count in elements]
        trained = [FLOAT32 * sum(layer.elements for layer in layers) for layers in units] + [0]
        root = root_bytes * (architecture.num_parameters - sum(elements))
        index = len(units) - 1 if phase in AT_LOSS else (block - 1) // size
        if phase == "embedding":
            return root + trained[0]
        if phase in IN_FORWARD:
            gathers = not (self.keeps_all and holds_gradients)
            return root + (
                self._in_forward(phase, gathered, index, root) if gathers else sum(gathered)
            )
        if phase in AT_LOSS:
            copy = gathered[-1] if phase == "gather last" else 0
            ahead = sum(gathered[max(0, len(units) - self.prefetch) :])
            return root + copy + (sum(gathered) if self.keeps_all else ahead)
        later = FLOAT32 * sum(layer.elements for layer in blocks[block : self.unit_end(block)])
        made = {"gather again": 0, "backward": later, "reduce": trained[index]}[phase]
        made = 0 if holds_gradients else made
        return root + made + self._in_backward(phase, gathered, trained, index)

    def _in_forward(self, phase: str, gathered: Sequence[int], index: int, root: int) -> int:
        """Returns bytes of gathered units and buffers in the forward pass of a unit, by index.

        Args:
            phase: one of ``IN_FORWARD``.
            gathered: bytes of each unit.
            root: bytes of what is gathered before the first unit.
        """
        unit, before = gathered[index], gathered[index - 1] if index else root
        kept = sum(gathered[:index]) if self.keeps_all else 0
        ahead = gathered[index + 1 :][: self.prefetch] if self.prefetch > 1 else []
        if phase == "loss":
            return kept + (2 * unit if self.keeps_all else unit)
        copy = (ahead[-1] if ahead else before) if phase == "gather" else 0
        return kept + 2 * unit + sum(ahead) + copy

    def _in_backward(
        self, phase: str, gathered: Sequence[int], trained: Sequence[int], index: int
    ) -> int:
        """Returns bytes of gathered units and of what is being reduced in a unit's backward pass.

        Args:
            phase: ``gather again``, ``backward`` or ``reduce``.
            gathered, trained: bytes of each unit, and of its gradients with 0 at the end.
        """
        first = 0 if self.keeps_all else max(0, index - self.prefetch)
        below, handed_over = gathered[first:index], trained[index + 1]
        waiting = gathered[index] + handed_over
        if phase == "reduce":  # the unit is dropped, then its gradients are copied and divided
            waiting = max(waiting, trained[index] + self.of_gradients(trained[index]))
        copy = sum(below[:1]) if phase == "gather again" else 0
        return sum(below) + copy + waiting

    def unit_end(self, block: int) -> int:
        """Returns the number of the last block in the unit of a block, if the unit is full."""
        return -(-block // self.blocks_per_unit) * self.blocks_per_unit


def sharding_on(strategy: str, gpus: int, gpus_per_node: int) -> Sharding:
    """Returns how a strategy shares a model out over a job's GPUs; a single one shares nothing."""
    if gpus == 1:
        return Sharding()
    ranks = min(gpus, gpus_per_node) if strategy == "HYBRID_SHARD" else gpus
    return Sharding(strategy, ranks)


def whole_tensors(sizes: Sequence[int], ranks: int) -> list[int]:
    """Returns each rank's size if each tensor in turn goes to the rank that has least.

    Ranks without a tensor are left out.
    """
    shares = [0] * min(ranks, len(sizes))
    for size in sizes:
        shares[shares.index(min(shares))] += size
    return shares
