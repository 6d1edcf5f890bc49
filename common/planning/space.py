"""The plans of a training at a fixed global batch, and the memory that each takes.

A plan is a strategy, a split of the global batch into micro-batches, and what is computed again.
Memory is that of ``predict_training_memory``; nothing here knows of time.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import product

from common.errors import UserError, require_known
from common.perfmodel.architectures.activations import CUDA, Numerics
from common.perfmodel.architectures.architecture import Architecture
from common.perfmodel.one_device.memory_fit import reserved_bytes
from common.perfmodel.one_device.moments import MemoryPrediction
from common.perfmodel.one_device.sharding import Sharding
from common.perfmodel.one_device.training_memory import (
    LIBRARIES_BYTES,
    Passes,
    predict_training_memory,
)
from common.runtime.wording import counted

SINGLE = "single"
"""One rank that does the whole global batch; the others idle."""
STRATEGIES = (SINGLE, "DDP", "ZERO1", "SHARD_GRAD_OP", "FULL_SHARD", "HYBRID_SHARD")
SHARDED = STRATEGIES[3:]
CHECKPOINTING = ("none", "selective", "block")
PRECISIONS = ("float32", "bfloat16")
BLOCKS_PER_UNIT = (1, 2, 4)
"""Blocks that FSDP gathers at once; beside these, all of them."""
PREFETCH = (0, 1, 2)
"""Units that FSDP gathers ahead of the one that computes; left alone, it gathers one."""
MARGIN = 0.03
"""Share of the memory that a chosen plan leaves free: predicted peaks are up to so far off."""


@dataclass(frozen=True)
class Plan:
    """A way to make one step of the global batch.

    Attributes:
        strategy: one of ``STRATEGIES``.
        micro_batch: samples of a rank's forward pass.
        accumulation: micro-batches of a rank's step.
        checkpointing: one of ``CHECKPOINTING``.
        precision: one of ``PRECISIONS``. Weights are float32; in bfloat16 FSDP casts what it
            gathers, and anything else computes under autocast.
        blocks_per_unit: blocks that FSDP gathers at once; 1 where nothing is gathered.
        reduces_each: whether FSDP reduces gradients in every micro-batch, as it does where nobody
            tells it which is the last; else they are kept whole until then.
        bucket_cap_mib: DDP's ``bucket_cap_mb``; None until it is chosen, and where there is none.
        prefetch: units that FSDP gathers ahead of the one that computes, one of ``PREFETCH``.
    """

    strategy: str
    micro_batch: int
    accumulation: int = 1
    checkpointing: str = "none"
    precision: str = "float32"
    blocks_per_unit: int = 1
    reduces_each: bool = False
    bucket_cap_mib: float | None = None
    prefetch: int = 1

    @property
    def is_sharded(self) -> bool:
        """Returns True if FSDP spreads the parameters."""
        return self.strategy in SHARDED

    @property
    def has_buckets(self) -> bool:
        """Returns True if DDP exchanges gradients in buckets."""
        return self.strategy in ("DDP", "ZERO1")

    @property
    def label(self) -> str:
        """Returns the plan's name: ``FULL_SHARD, 4 × 8 samples, checkpointing block``."""
        parts = [self.strategy, f"{self.accumulation} × {self.micro_batch} samples"]
        if self.checkpointing != "none":
            parts.append(f"checkpointing {self.checkpointing}")
        parts.append(self.precision)
        if self.blocks_per_unit > 1:
            parts.append(f"{self.blocks_per_unit} blocks a unit")
        if self.reduces_each:
            parts.append("reduced in each")
        if self.prefetch != 1:
            parts.append(f"{self.prefetch or 'no'} units ahead")
        return ", ".join(parts)

    @property
    def name(self) -> str:
        """Returns the label with the cap of DDP's buckets, where one was chosen."""
        if self.bucket_cap_mib is None:
            return self.label
        return f"{self.label}, buckets of {self.bucket_cap_mib:.6g} MiB"


@dataclass(frozen=True)
class Question:
    """What is to be trained, and on what.

    Attributes:
        architecture: the model, with the size of its samples.
        ranks: ranks of the job.
        ranks_per_node: ranks of a node, which HYBRID_SHARD shards among.
        global_batch: samples of a step on all ranks.
        memory_bytes: memory of a rank.
        precisions: precisions that may be chosen.
        device: cuda or cpu.
        strategies: strategies that may be chosen.
        micro_batches: sizes of a micro-batch that may be chosen; empty for all.
        checkpointing: kinds of checkpointing that may be chosen.
        unshardable: why FSDP cannot take the model; empty where it can.
        prefetch: units that FSDP may gather ahead.
        untaken: which micro-batches the model cannot take, and why; empty where it can take all.
        checkpointing_switch: the method by which a model of transformers recomputes its blocks by
            itself; empty for others.
        fused_loss: whether a kernel makes the loss without float32 logits, where the architecture
            leaves that open: one that was followed has the loss of its own function.
    """

    architecture: Architecture
    ranks: int
    ranks_per_node: int
    global_batch: int
    memory_bytes: float
    precisions: tuple[str, ...] = ("bfloat16",)
    device: str = CUDA
    strategies: tuple[str, ...] = STRATEGIES
    micro_batches: tuple[int, ...] = ()
    checkpointing: tuple[str, ...] = CHECKPOINTING
    unshardable: str = ""
    prefetch: tuple[int, ...] = (1,)
    untaken: str = ""
    fused_loss: bool = False
    checkpointing_switch: str = ""

    def __post_init__(self) -> None:
        for strategy in self.strategies:
            require_known("strategy", strategy, STRATEGIES)
        for precision in self.precisions:
            require_known("precision", precision, PRECISIONS)
        for name in ("ranks", "ranks_per_node", "global_batch"):
            if getattr(self, name) < 1:
                raise UserError(f"{name} is {getattr(self, name)}; at least 1")
        if not self.memory_bytes > 0:
            raise UserError(f"memory of {self.memory_bytes:g} bytes: above 0")
        if self.global_batch % self.ranks:
            nearest = max(1, round(self.global_batch / self.ranks)) * self.ranks
            raise UserError(
                f"global batch of {self.global_batch} samples: {self.ranks} ranks cannot split it "
                f"evenly; {nearest} is the nearest that they can"
            )
        if not self.legal_strategies():
            why = self.unshardable or "one rank has single alone"
            if self.ranks > 1 and not self.unshardable:
                why = "HYBRID_SHARD needs several nodes of 2 ranks or more"
            raise UserError(f"strategies {', '.join(self.strategies)}: none is possible; {why}")
        if not self.sizes:
            sizes = ", ".join(map(str, self.micro_batches))
            raise UserError(
                f"global batch of {self.global_batch} samples on {self.ranks} ranks: no number of "
                f"micro-batches of {sizes} samples makes it"
            )

    @property
    def usable_bytes(self) -> float:
        """Returns the memory that a step may take: on a GPU, what libraries leave."""
        return max(0.0, self.memory_bytes - (LIBRARIES_BYTES if self.device == CUDA else 0))

    def shards(self, plan: Plan) -> int:
        """Returns the ranks that hold one copy of the model under a sharded plan."""
        return self.ranks_per_node if plan.strategy == "HYBRID_SHARD" else self.ranks

    @property
    def sizes(self) -> list[int]:
        """Returns the sizes of micro-batches that a plan can have, from the smallest on."""
        splits = map(self.splits, self.legal_strategies())
        return sorted({size for of_strategy in splits for size, _ in of_strategy})

    @property
    def left_out(self) -> list[str]:
        """Returns sentences on what was not planned, as the model cannot have it."""
        fsdp = f"FSDP was left out: {self.unshardable}" if self.unshardable else ""
        return [line for line in (fsdp, self.untaken) if line]

    def without(self, refusals: Mapping[int, str]) -> Question:
        """Returns the question without micro-batches that the model cannot take.

        Args:
            refusals: size of a micro-batch → why the model cannot take it.

        Raises UserError where none is left.
        """
        if not refusals:
            return self
        taken = tuple(size for size in self.sizes if size not in refusals)
        sizes, why = ", ".join(map(str, refusals)), next(iter(refusals.values()))
        if not taken:
            raise UserError(
                f"global batch of {self.global_batch} samples on {counted(self.ranks, 'rank')}: the"
                f" model takes no micro-batch that makes it (size {sizes}); {why}"
            )
        untaken = f"micro-batches of size {sizes} were left out: {why}"
        return replace(self, micro_batches=taken, untaken=untaken)

    def splits(self, strategy: str) -> list[tuple[int, int]]:
        """Returns the micro-batches that a rank's samples can be split into: (size, number)."""
        of_rank = self.global_batch // (1 if strategy == SINGLE else self.ranks)
        sizes = [size for size in range(1, of_rank + 1) if of_rank % size == 0]
        legal = [size for size in sizes if not self.micro_batches or size in self.micro_batches]
        return [(size, of_rank // size) for size in legal]

    def legal_strategies(self) -> list[str]:
        """Returns the strategies that make sense on the ranks."""
        if self.ranks == 1:
            return [name for name in self.strategies if name == SINGLE]
        chosen = [name for name in self.strategies if not (self.unshardable and name in SHARDED)]
        nodes = self.ranks // self.ranks_per_node
        hybrid = nodes > 1 and self.ranks % self.ranks_per_node == 0 and self.ranks_per_node > 1
        return [name for name in chosen if name != "HYBRID_SHARD" or hybrid]


def candidates(question: Question) -> Iterator[Plan]:
    """Yields every plan of a question, whether it fits or not; no bucket cap is chosen yet."""
    blocks = sum(layer.count for layer in question.architecture.blocks)
    kinds = question.checkpointing if blocks else CHECKPOINTING[:1]
    grouped = sorted({size for size in (*BLOCKS_PER_UNIT, blocks) if 1 <= size <= blocks} or {1})
    for strategy in question.legal_strategies():
        units = grouped if strategy in SHARDED else [1]
        splits = question.splits(strategy)
        for precision, kind, (size, count), unit in product(
            question.precisions, kinds, splits, units
        ):
            plan = Plan(strategy, size, count, kind, precision, unit)
            for ahead in _depths(question, plan, blocks):
                yield replace(plan, prefetch=ahead)
                if plan.is_sharded and count > 1:
                    yield replace(plan, prefetch=ahead, reduces_each=True)


def _depths(question: Question, plan: Plan, blocks: int) -> list[int]:
    """Returns how many units a plan may gather ahead, of those that make a difference.

    SHARD_GRAD_OP gathers nothing in the backward pass, and in the forward pass one ahead at least.
    """
    if not plan.is_sharded or blocks <= plan.blocks_per_unit:
        return [1]
    least = 1 if plan.strategy == "SHARD_GRAD_OP" else 0
    return [ahead for ahead in question.prefetch if ahead >= least]


def variations(question: Question, plan: Plan) -> list[Plan]:
    """Returns the plans that do a plan's work under other settings of FSDP.

    They have its micro-batches and recompute what it does. What differs is one of the blocks of a
    unit, when units are dropped and the mesh (which are strategies), units gathered ahead, and the
    precision, of those that the question allows.
    """
    narrowed = replace(
        question,
        strategies=tuple(name for name in question.strategies if name in SHARDED),
        micro_batches=(plan.micro_batch,),
        checkpointing=(plan.checkpointing,),
        prefetch=PREFETCH,
    )
    return [
        other
        for other in candidates(narrowed)
        if other.reduces_each == plan.reduces_each and other != plan
    ]


def numerics_of(question: Question, plan: Plan) -> Numerics:
    """Returns the types of a plan's passes: FSDP casts its units, anything else runs autocast."""
    casts = "float32"
    if plan.precision != "float32":
        casts = "half" if plan.is_sharded else "autocast"
    return Numerics(casts, fused_loss=question.fused_loss, device=question.device)


def passes_of(question: Question, plan: Plan) -> Passes:
    """Returns the passes of one rank's step under a plan."""
    return Passes(
        architecture=question.architecture,
        batch_size=plan.micro_batch,
        numerics=numerics_of(question, plan),
        checkpointing=plan.checkpointing,
        accumulation=plan.accumulation,
        reduces_each=plan.reduces_each,
    )


def sharding_of(question: Question, plan: Plan) -> Sharding:
    """Returns how a plan shares the model out over the ranks."""
    if plan.strategy == SINGLE:
        return Sharding()
    return Sharding(
        strategy=plan.strategy,
        ranks=question.shards(plan),
        largest_first=True,
        blocks_per_unit=plan.blocks_per_unit,
        prefetch=plan.prefetch,
    )


@dataclass(frozen=True)
class SizedPlan:
    """A plan with its memory: the peak that is allocated, and what CUDA may hold at it, in bytes.

    ``held_bytes`` equals the peak on a CPU.
    """

    plan: Plan
    memory: MemoryPrediction
    held_bytes: float

    @property
    def peak_bytes(self) -> int:
        """Returns the bytes at the peak."""
        return self.memory.peak_bytes


def sized(question: Question, plan: Plan) -> SizedPlan:
    """Returns a plan with its memory. Raises UserError where activations are not known."""
    passes = passes_of(question, plan)
    memory = predict_training_memory(passes, sharding_of(question, plan))
    held = reserved_bytes(passes, memory) if question.device == CUDA else memory.peak_bytes
    return SizedPlan(plan, memory, held)


def fits(question: Question, plan: SizedPlan) -> bool:
    """Returns True if a plan's peak leaves MARGIN of the memory free."""
    return plan.peak_bytes * (1 + MARGIN) <= question.usable_bytes


def least_ranks(question: Question, most: int = 2**20) -> int | None:
    """Returns the least number of ranks, doubled from the question's, on which full sharding fits.

    Each rank has one sample a step, or as few as the model takes. None if no number up to ``most``
    does.
    """
    ranks, size = question.ranks, question.sizes[0] if question.untaken else 1
    while ranks <= most:
        larger = replace(question, ranks=ranks, global_batch=ranks * size, micro_batches=())
        for precision, kind in product(question.precisions, CHECKPOINTING):
            plan = Plan("FULL_SHARD", size, checkpointing=kind, precision=precision)
            if fits(larger, sized(larger, plan)):
                return ranks
        ranks *= 2
    return None
