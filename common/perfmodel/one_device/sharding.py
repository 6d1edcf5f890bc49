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

        DDP: its buckets, as large as all gradients, which may be views of them. Sharded: the
        unit of the embeddings, gathered from the first use to the last, and blocks: gathered ones,
        and in the backward pass one whole gradient as made and the next block's, handed over.
        A unit is held twice while it is copied out of its gather, and over gloo, which gathers into
        a copy, once more; SHARD_GRAD_OP keeps all from the forward pass until their backward pass
        is done. Units of several blocks are dropped before they are reduced, and those that are
        gathered ahead are there then. ``prefetch`` counts those of the backward pass, and above 1
        also of the forward pass. Found with ``fully_shard`` on two ranks
        (tests/perfmodel/test_sharding.py, tests/planning/frozen_worker.py).

        Args:
            phase: ``forward``, ``gather`` or ``backward`` (of ``block``), ``loss``, ``embedding``
                (its backward pass) or ``update``.
            block: number of the block whose pass it is, counted from 1.
            item_bytes: bytes of a number in a gathered block. Numbers of gradients take 4.
            root_bytes: bytes of a number in the embeddings' unit.
            holds_gradients: whether whole gradients are held anyway, between micro-batches.
        """
        if self.has_buckets:
            return FLOAT32 * architecture.num_trained
        if not self.shards or phase == "update":
            return 0
        blocks = [layer for layer in architecture.one_by_one() if layer.is_block]
        size = self.blocks_per_unit
        in_units = [blocks[first : first + size] for first in range(0, len(blocks), size)] or [[]]
        units = [sum(block.all_elements for block in unit) for unit in in_units]
        number = min(max(1, -(-block // size)), len(units))
        index = {"loss": len(units), "embedding": 1}.get(phase, number) - 1
        current, trained = units[index], sum(block.elements for block in in_units[index])
        keeps_all, alone = self.keeps_all, size == 1
        if keeps_all:
            count = {"backward": number, "embedding": 1 if alone else 0}.get(phase, len(units))
            gathered = sum(units[:count]) + {"forward": 1, "gather": 2}.get(phase, 0) * current
        else:
            ahead = min(self.prefetch, max(number - 1, 1)) if alone else 1
            copies = {"forward": 2, "gather": 3, "loss": 1, "backward": ahead, "embedding": 0}
            gathered = copies[phase] * current
            if self.prefetch > 1 and phase in ("forward", "gather", "loss"):
                explicit = units[-2::-1] if phase == "loss" else units[number:]
                gathered += sum(explicit[: self.prefetch - (phase == "loss")])
        gradients = 0 if phase in ("forward", "gather", "loss") else 2 * trained
        if phase == "backward":
            made = 0 if holds_gradients or (keeps_all and alone) else trained
            handed_over = trained if alone and number < len(units) else 0
            gradients = made + handed_over
            if alone and not keeps_all:  # the next unit is there before what is frozen is dropped
                gathered += current - trained
            if not (keeps_all or alone):
                gathered += sum(units[max(0, number - 1 - self.prefetch) : number - 1])
        root = architecture.num_parameters - sum(units)
        return root_bytes * root + item_bytes * gathered + FLOAT32 * gradients


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
