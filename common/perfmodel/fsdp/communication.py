"""The bytes that data-parallel strategies send in one step, predicted from the model's sizes.

A step is a list of collectives (``step_collectives``), the same on every backend; what a rank sends
for one depends on the algorithm (``wire_bytes``). Both are exact for DDP and for ``fully_shard``
over gloo, held by tests/perfmodel/test_communication.py against what two ranks really send; over
NCCL the bytes are those of its ring.

Sources: torch/distributed/fsdp/_fully_shard/ (_fsdp_param.py, _fsdp_collectives.py) for FSDP2,
torch/csrc/distributed/c10d/ProcessGroupGloo.cpp and gloo/allreduce.cc for gloo.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import NamedTuple

import pandas as pd

from common.errors import NotYetWritten, UserError, require_known
from common.perfmodel.buckets import DdpOptions, ddp_buckets
from common.perfmodel.one_device.architecture import GPT2Config

PYTORCHS = ("single", "DDP", "SHARD_GRAD_OP", "FULL_SHARD", "HYBRID_SHARD")
EXERCISES = ("MY_DDP", "MY_BUCKETS", "MY_ZERO1", "MY_FSDP")
STRATEGIES = (*PYTORCHS, *EXERCISES)
SHARDED = (*PYTORCHS[2:], "MY_FSDP")
"""Strategies that gather parameters."""
OPERATIONS = ("all_reduce", "all_gather", "reduce_scatter", "broadcast")
BACKENDS = ("nccl", "gloo")
FLOAT32_BYTES = 4
ROOT = "root"
"""FSDP's unit of what is in no block."""

GLOO_MESSAGE_BYTES = 144
"""Bytes that a rank sends beside the payload for a message out and one in: three headers of 48, the
message's own and two that say it is ready to send and to receive (``Op::preamble`` in
gloo/transport/tcp/pair.h)."""
GLOO_SEGMENT_BYTES = 2**20
"""The largest piece that gloo's all-reduce sends (``kMaxSegmentSize`` in gloo/allreduce.h)."""


@dataclass(frozen=True)
class Collective:
    """Equal collectives of one step.

    Attributes:
        operation: one of ``OPERATIONS``.
        unit: tensors exchanged: ``bucket 0``, ``block`` (any of them), ``root``, ``parameter``.
        size_bytes: the whole message: the tensor that is reduced, gathered, sent to all, or about
            to be scattered, padding included.
        count: number of these collectives in a step.
        group_size: ranks that take part.
    """

    operation: str
    unit: str
    size_bytes: int
    count: int
    group_size: int


class Unit(NamedTuple):
    """Equal units of FSDP.

    Attributes:
        shapes: shapes of the trained parameters of one.
        count: number of such units.
        item_bytes: bytes of a number as they are gathered.
        frozen: shapes of the parameters of one that are not trained: they are gathered, too.
        has_backward: whether gradients are made in one, or pass through it or a part of it.
    """

    shapes: Sequence[tuple[int, ...]]
    count: int
    item_bytes: int
    frozen: Sequence[tuple[int, ...]] = ()
    has_backward: bool = True


def step_collectives(
    config: GPT2Config,
    strategy: str,
    ranks: int,
    *,
    accumulation: int = 1,
    shard_size: int | None = None,
    parameter_bytes: int = 4,
    bucket_cap_mb: float | None = None,
) -> list[Collective]:
    """Returns the collectives of one training step of a GPT-2, exactly.

    DDP reduces its buckets, those after the rebuild, in the last micro-batch only. Sharded models
    have one unit per block and one for the rest (the root), and reduce in the last micro-batch
    only. FULL_SHARD gathers a block for every forward and every backward pass, and the root once a
    step: ``common.training.parallel`` keeps it from one micro-batch to the next (with
    ``set_reshard_after_backward``; left alone, FSDP2 would gather it once a micro-batch).
    SHARD_GRAD_OP gathers everything once a step. HYBRID_SHARD is FULL_SHARD inside groups of
    ``shard_size`` ranks, each with a copy of the model; every rank's part of the gradients is then
    reduced over the groups.

    Activation checkpointing changes nothing: blocks are there when they are computed again.

    The exercises: MY_DDP reduces every gradient by itself, MY_BUCKETS in buckets over the reverse
    of the registration. MY_ZERO1 is DDP, and sends every parameter from its owner. MY_FSDP
    exchanges gradients in every micro-batch, and reduces those of the norms, which are replicated.

    Args:
        strategy: one of ``STRATEGIES``.
        accumulation: micro-batches a step.
        shard_size: ranks that share one copy; HYBRID_SHARD only.
        parameter_bytes: bytes of a block's parameter as it is gathered, 2 under FSDP's mixed
            precision. The root's are gathered in float32, and gradients are reduced in it.
        bucket_cap_mb: DDP's argument, in MiB; None is its default.

    Raises UserError for an unknown strategy, counts below 1, and a ``shard_size`` that does not
    divide the ranks, is missing, or has no effect.
    """
    _check(strategy, ranks, accumulation, shard_size)
    if strategy == "single":
        return []
    if strategy in ("DDP", "MY_DDP", "MY_BUCKETS", "MY_ZERO1"):
        return _replicated_collectives(config, strategy, ranks, bucket_cap_mb)
    if strategy == "MY_FSDP":
        return _own_fsdp_collectives(config, ranks, accumulation, parameter_bytes)
    return sharded_collectives(
        units={
            "block": Unit(config.block_shapes(), config.n_layer, parameter_bytes),
            ROOT: Unit(config.root_shapes(), 1, FLOAT32_BYTES),
        },
        strategy=strategy,
        ranks=ranks,
        shards=shard_size or ranks,
        accumulation=accumulation,
    )


def sharded_collectives(
    units: Mapping[str, Unit],
    strategy: str,
    ranks: int,
    *,
    shards: int,
    accumulation: int = 1,
    reduces_each: bool = False,
    prefetch: int = 1,
) -> list[Collective]:
    """Returns the collectives of one training step of any model under ``fully_shard``.

    Args:
        units: name → its sizes, in the order of the forward pass; ``ROOT``, the last, has what is
            in no block.
        strategy: SHARD_GRAD_OP, FULL_SHARD or HYBRID_SHARD.
        ranks: ranks of the whole job.
        shards: ranks that share one copy.
        accumulation: micro-batches a step.
        reduces_each: whether every micro-batch gathers and reduces, as a step of its own does.
        prefetch: units that are gathered ahead in the backward pass.
    """
    steps = accumulation if reduces_each else 1
    passes = 1 if strategy == "SHARD_GRAD_OP" else 2
    gathers = passes * (accumulation if passes == 2 else steps)
    collectives = []
    passing = [unit.has_backward for unit in units.values()]
    for index, (unit, (shapes, count, item_bytes, frozen, _)) in enumerate(units.items()):
        times = steps if unit == ROOT else gathers
        in_vain = 0
        if not passing[index]:
            times = gathers // passes
            ahead = min(prefetch, count) * passing[index + 1]  # of the unit behind them
            in_vain = (gathers - times) * ahead
        trained = padded_elements(shapes, shards)
        gathered = item_bytes * (trained + padded_elements(frozen, shards))
        reduced = FLOAT32_BYTES * trained
        collectives.append(
            Collective("all_gather", unit, gathered, count * times + in_vain, shards)
        )
        reductions = count * steps if trained else 0
        collectives.append(Collective("reduce_scatter", unit, reduced, reductions, shards))
        if strategy == "HYBRID_SHARD":
            part = reduced // shards
            collectives.append(Collective("all_reduce", unit, part, reductions, ranks // shards))
    return collectives


def gathered_item_bytes(strategy: str, precision: str) -> int:
    """Returns the bytes of an element of a block's parameters as they are gathered.

    They are 2 where a sharded model computes in bfloat16, as its blocks are gathered in that
    (``block_precision`` in common/training/parallel.py); else 4. The root's are always 4.
    """
    return 2 if precision == "bfloat16" and strategy in SHARDED else 4


def wire_bytes(collective: Collective, backend: str) -> int:
    """Computes the payload that a rank sends for one collective (not times ``count``), in bytes.

    With n ranks and S bytes: a ring sends 2(n−1)/n·S for an all-reduce and (n−1)/n·S for an
    all-gather or a reduce-scatter (Patarasuk and Yuan 2009). gloo runs the ring at every size, but
    its reduce-scatter is an all-reduce of which the rank keeps its part. A broadcast is sent on
    from rank to rank, n − 1 times in all; this is the mean over the ranks.

    Exact for gloo where n divides the message, else within a few bytes; see ``control_bytes`` for
    what comes on top. For NCCL exact where it runs the ring with protocol Simple, which it does
    with large messages; its tree sends the same on average over the ranks, LL twice as much, and
    NVLS leaves the sum to the switch.

    Raises UserError for an unknown operation or backend.
    """
    require_known("operation", collective.operation, OPERATIONS)
    require_known("backend", backend, BACKENDS)
    n = collective.group_size
    once = collective.operation in ("all_gather", "broadcast") or (
        collective.operation == "reduce_scatter" and backend == "nccl"
    )
    return round((1 if once else 2) * (n - 1) * collective.size_bytes / n)


def control_bytes(collective: Collective, backend: str) -> int:
    """Computes the bytes that a rank sends beside the payload for one collective.

    gloo: the headers of its messages, exact where the message is large enough for all pieces to
    have a part of it (64 bytes a rank are). NCCL: 0, as its flags travel with the data.
    """
    n = collective.group_size
    if backend != "gloo" or n == 1:
        return 0
    if collective.operation == "broadcast":  # a message to each other rank, the mean over ranks
        return round((n - 1) * GLOO_MESSAGE_BYTES / n)
    messages = 2 * (n - 1)
    if collective.operation != "all_gather":  # each rank's part goes in two pieces or more
        messages *= max(2, -(-collective.size_bytes // (GLOO_SEGMENT_BYTES * n)))
    return messages * GLOO_MESSAGE_BYTES


def step_wire_bytes(collectives: Sequence[Collective], backend: str) -> int:
    """Sums the payload of one rank over a step's ``collectives`` with their counts, in bytes."""
    return sum(c.count * wire_bytes(c, backend) for c in collectives)


def step_control_bytes(collectives: Sequence[Collective], backend: str) -> int:
    """Sums the bytes that one rank sends in a step beside the payload."""
    return sum(c.count * control_bytes(c, backend) for c in collectives)


def strategy_table(config: GPT2Config, ranks: int) -> pd.DataFrame:
    """Tabulates the bytes that a rank sends in a step of 1 and of 4 micro-batches, by strategy.

    Columns: backend, accumulation (micro-batches a step), strategy, collectives (a step),
    sent_bytes (payload, of one rank and step), ratio_to_ddp (at the same backend and accumulation;
    NaN for a single rank).
    """
    rows = []
    for backend in BACKENDS:
        for accumulation in (1, 4):
            for strategy in ("DDP", "SHARD_GRAD_OP", "FULL_SHARD"):
                collectives = step_collectives(config, strategy, ranks, accumulation=accumulation)
                count = sum(collective.count for collective in collectives)
                sent = step_wire_bytes(collectives, backend)
                rows.append((backend, accumulation, strategy, count, sent))
    columns = ["backend", "accumulation", "strategy", "collectives", "sent_bytes"]
    table = pd.DataFrame(rows, columns=columns)
    ddp = table[table["strategy"] == "DDP"].set_index(["backend", "accumulation"])["sent_bytes"]
    of_ddp = table.join(ddp.rename("ddp_bytes"), on=["backend", "accumulation"])["ddp_bytes"]
    return table.assign(ratio_to_ddp=table["sent_bytes"] / of_ddp.where(of_ddp > 0))


def padded_elements(shapes: Sequence[tuple[int, ...]], shards: int) -> int:
    """Counts an FSDP2 unit's elements, every parameter padded to a multiple of ``shards`` rows.

    Source: ``_get_dim0_padded_size`` in _fsdp_common.py. A bias has its elements as rows.
    """
    return sum(-(-rows // shards) * shards * prod(row_shape) for rows, *row_shape in shapes)


def _replicated_collectives(
    config: GPT2Config, strategy: str, ranks: int, bucket_cap_mb: float | None
) -> list[Collective]:
    sizes = [FLOAT32_BYTES * size for size in config.parameter_sizes()]
    order = list(reversed(range(len(sizes))))
    if strategy in ("DDP", "MY_ZERO1"):
        order = config.ready_order()
    buckets = [[index] for index in order]
    if strategy != "MY_DDP":
        buckets = _buckets(sizes, order, bucket_cap_mb)
    collectives = [
        Collective("all_reduce", f"bucket {index}", sum(sizes[i] for i in bucket), 1, ranks)
        for index, bucket in enumerate(buckets)
    ]
    if strategy == "MY_ZERO1":
        counts = Counter(sizes).items()
        collectives += [Collective("broadcast", "parameter", size, n, ranks) for size, n in counts]
    return collectives


def all_broadcasts(collectives: Sequence[Collective]) -> Collective:
    """Returns the broadcasts of a step as one of their size: they are under way together."""
    broadcasts = [call for call in collectives if call.operation == "broadcast"]
    size_bytes = sum(call.count * call.size_bytes for call in broadcasts)
    return Collective("broadcast", "all parameters", size_bytes, 1, broadcasts[0].group_size)


def _own_fsdp_collectives(
    config: GPT2Config, ranks: int, accumulation: int, parameter_bytes: int
) -> list[Collective]:
    """Returns MY_FSDP's: norms are replicated, all other tensors sharded, each padded."""
    collectives = []
    for unit, shapes, norms, units, passes in (
        ("block", config.block_shapes(), 4, config.n_layer, 2),  # two norms have four tensors
        ("root", config.root_shapes(), 2, 1, 1),
    ):
        in_parts = [-(-prod(shape) // ranks) * ranks for shape in shapes]
        elements = sum(in_parts) - norms * (-(-config.n_embd // ranks) * ranks)
        replicated = norms * config.n_embd
        times = units * accumulation
        collectives += [
            Collective("all_gather", unit, parameter_bytes * elements, passes * times, ranks),
            Collective("reduce_scatter", unit, FLOAT32_BYTES * elements, times, ranks),
            Collective("all_reduce", unit, FLOAT32_BYTES * replicated, times, ranks),
        ]
    return collectives


def _check(strategy: str, ranks: int, accumulation: int, shard_size: int | None) -> None:
    require_known("strategy", strategy, STRATEGIES)
    for name, count in (("ranks", ranks), ("accumulation", accumulation)):
        if count < 1:
            raise UserError(f"{name} is {count}; it must be at least 1")
    if strategy == "single" and ranks > 1:
        several = ", ".join(PYTORCHS[1:])
        raise UserError(f"strategy single has one rank, not {ranks}; for several: {several}")
    if strategy != "HYBRID_SHARD":
        if shard_size is not None:
            raise UserError(f"shard_size {shard_size} has no effect on {strategy}")
    elif shard_size is None or shard_size < 1 or ranks % shard_size:
        raise UserError(f"shard_size {shard_size} for HYBRID_SHARD: it must divide {ranks} ranks")


def _buckets(
    sizes: Sequence[int], ready_order: Sequence[int], bucket_cap_mb: float | None
) -> list[list[int]]:
    """Returns DDP's buckets; one for all in a student's tree in which task A2.1 is open."""
    try:
        return ddp_buckets(sizes, ready_order, DdpOptions(bucket_cap_mb))
    except NotYetWritten:
        return [list(ready_order)]
