"""NCCL's collectives on a cluster from its description alone: nothing is measured.

NCCL's tuner (``nccl_tuning_table``) says what each algorithm and protocol would take. Added to that
is what the tuner leaves out:

- A launch: the kernel's start, on top of every call.
- A ramp. A step forwards its piece in slices, each while the next arrives, but the first has to be
  whole before it can go on. So short messages pay their own transfer about once more, and long ones
  a slice for every step: ``min(slowdown · size / bandwidth, steps · slice / channel bandwidth)``,
  rounded at the corner.
- What a ring over several nodes hides. Every GPU sends in every step, so a step takes as long as
  its piece, or as its hop and slice where that is longer: the sum of hops and ramp is not added to
  ``size / bandwidth``, the larger of the two counts (rounded at the corner). The tuner, which adds
  them, is up to a third too slow on 16 to 64 published GH200s.

The time is that of the fastest way: NCCL is taken to choose well. Trees and rings of thousands of
GPUs are extrapolations of constants that NCCL's authors measured on few nodes.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import ArrayLike, NDArray

from common.errors import UserError, naming, require_known
from common.perfmodel.cluster.clusters import Cluster
from common.perfmodel.cluster.nccl_tuning_table import (
    ALGORITHMS,
    PROTOCOLS,
    Choice,
    all_reduce_choices,
    ring_choices,
    tree_factor,
)
from common.perfmodel.tables import AllReduceTable

COLLECTIVES = ("all_gather", "reduce_scatter")


@dataclass(frozen=True)
class Ramp:
    """The time of a call beyond what NCCL's tuner counts.

    Attributes:
        launch_s: seconds on top of every call.
        slowdown: number of times that a short message pays its transfer in addition.
        slice_bytes: slice that each step of a long message waits for, unless its algorithm has
            another.
    """

    launch_s: float
    slowdown: float
    slice_bytes: float


RAMP = Ramp(launch_s=16.8e-6, slowdown=1.66, slice_bytes=102e3)
"""Fitted to data/nccl-tests-published/a100-8.csv, no other table (data/nccl-models)."""

NO_RAMP = Ramp(0.0, 0.0, 0.0)
"""NCCL's tuner alone."""


class Collective:
    """The ways to do a collective, and the fastest of them for a size.

    ``measured``: (size, factor) of a cluster whose all-reduces were measured.
    """

    def __init__(
        self,
        choices: tuple[Choice, ...],
        ramp: Ramp,
        measured: Collection[tuple[float, float]] = (),
    ) -> None:
        self.choices = choices
        self.ramp = ramp
        self._measured = np.array([*measured]).reshape(-1, 2)
        # Each quantity becomes a column [choices, 1], so that it goes with any array of sizes.
        column = np.array(
            [
                (
                    c.latency_s,
                    1 / c.bandwidth_bytes_per_s,
                    c.steps * (c.slice_bytes or ramp.slice_bytes) / c.channel_bytes_per_s,
                    c.hops_s,
                )
                for c in choices
            ]
        ).reshape(-1, 4, 1)
        self._latency_s, self._s_per_byte = column[:, 0], column[:, 1]
        self._step_s, self._hops_s = column[:, 2], column[:, 3]
        trees = [i for i, c in enumerate(choices) if c.algorithm == "Tree"]
        self._trees = np.array(trees, dtype=int)
        self._tree_protocols = np.array([PROTOCOLS.index(choices[i].protocol) for i in trees], int)

    def transfers_s(self, size_bytes: NDArray) -> NDArray:
        """Computes size over bandwidth of each choice, in seconds [choices, sizes]."""
        transfer = self._s_per_byte * size_bytes
        if len(self._trees):
            transfer[self._trees] /= tree_factor(self._tree_protocols, size_bytes)
        return transfer

    def times_s(self, size_bytes: NDArray) -> NDArray:
        """Computes the seconds that each choice takes, [choices, sizes]."""
        transfer = self.transfers_s(size_bytes)
        if not (self.ramp.slowdown and self.ramp.slice_bytes):
            return self.ramp.launch_s + self._latency_s + transfer
        ramp = soft_minimum(self.ramp.slowdown * transfer, self._step_s)
        hidden = self._hops_s > 0
        sent = np.where(hidden, np.hypot(transfer, self._hops_s + ramp), transfer + ramp)
        return self.ramp.launch_s + self._latency_s - self._hops_s + sent

    def time_s(self, size_bytes: ArrayLike) -> float | NDArray:
        """Computes the seconds for ``size_bytes``; a scalar for a scalar, else an array."""
        sizes = np.atleast_1d(np.asarray(size_bytes, dtype=float))
        if self.choices:
            times = self.times_s(sizes.ravel()).min(axis=0).reshape(sizes.shape)
            if len(self._measured):
                logs = np.log(np.maximum(sizes, 1.0))
                times = times * np.interp(logs, np.log(self._measured[:, 0]), self._measured[:, 1])
        else:
            times = np.zeros(sizes.shape)
        return float(times[0]) if np.ndim(size_bytes) == 0 else times

    def choice(self, size_bytes: float) -> str:
        """Returns the way taken for a size, such as ``Ring/LL128``; ``none`` for one GPU."""
        if not self.choices:
            return "none"
        return self.choices[int(self.times_s(np.array([float(size_bytes)])).argmin())].name


class NcclAllReduce(Collective):
    """An all-reduce over ``gpus`` GPUs of a cluster (``AllReduceModel``).

    Args:
        gpus: number of GPUs: up to one node's, else whole nodes.
        algorithms: members of ``ALGORITHMS`` allowed, as NCCL_ALGO would; all by default.
        ramp: rise of the bandwidth with the size; ``NO_RAMP`` for NCCL's tuner alone.

    Raises UserError where the cluster cannot hold ``gpus``, or none of ``algorithms`` does.
    """

    def __init__(
        self,
        cluster: Cluster,
        gpus: int,
        *,
        algorithms: Collection[str] | None = None,
        ramp: Ramp = RAMP,
    ) -> None:
        self.cluster, self.gpus = cluster, gpus
        choices = all_reduce_choices(cluster, gpus)
        for name in algorithms or ():
            require_known("algorithm", name, ALGORITHMS)
        if algorithms is not None and choices:
            has = dict.fromkeys(choice.algorithm for choice in choices)
            choices = tuple(choice for choice in choices if choice.algorithm in algorithms)
            if not choices:
                raise UserError(
                    f"{gpus} GPUs on {cluster.name} have no {' or '.join(algorithms)}; "
                    f"they have {', '.join(has)}"
                )
        super().__init__(choices, ramp, cluster.measured)


class NcclRing(Collective):
    """An all-gather or a reduce-scatter by ring, as FSDP makes them.

    ``time_s`` takes the size of the whole tensor, of which each GPU holds a part. NCCL could use
    NVLink SHARP on one node, and its tuner finds that slower than a ring.

    Raises UserError where the cluster cannot hold ``gpus``.
    """

    def __init__(
        self, cluster: Cluster, gpus: int, collective: str = "all_gather", *, ramp: Ramp = RAMP
    ) -> None:
        require_known("collective", collective, COLLECTIVES)
        self.cluster, self.gpus, self.collective = cluster, gpus, collective
        super().__init__(ring_choices(cluster, gpus, rounds=1), ramp, cluster.measured)


def between_nodes(cluster: Cluster, gpus: int) -> NcclAllReduce:
    """Returns the all-reduce that each GPU makes with the same GPU of the other nodes.

    All GPUs of a node make theirs at once, so each has its share of the node's network.
    """
    return NcclAllReduce(cluster.with_fewer(1), cluster.nodes(gpus))


def with_measured(cluster: Cluster, table: AllReduceTable) -> Cluster:
    """Returns the cluster with collectives as many times slower than the model as the table's are.

    On the table's ranks an all-reduce takes what was measured. Other numbers of GPUs and other
    collectives are off from the model by as much, by size.

    Raises UserError where the cluster cannot hold the table's ranks.
    """
    ranks = table.world_size
    if ranks is None or ranks < 2:
        raise UserError(f"{table.source}: {ranks or 'no'} ranks: a network is between two or more")
    with naming(table.source):
        model = NcclAllReduce(cluster, ranks)
    sizes, times = table.curve.sizes_bytes, table.curve.times_s
    factors = times / model.time_s(sizes)
    return replace(
        cluster,
        measured=tuple(zip(sizes.tolist(), factors.tolist(), strict=True)),
        measured_gpus=ranks,
        assumptions=(
            *cluster.assumptions,
            f"all-reduces over {ranks} GPUs are those of {table.source}, {factors.min():.2g} to "
            f"{factors.max():.2g} times what the model of NCCL gives; other collectives, and other "
            "numbers of GPUs, are off from it by as much at the same size",
        ),
    )


def soft_minimum(first: NDArray, second: NDArray) -> NDArray:
    """Computes the smaller of two amounts, less where they are alike: ``ab / √(a² + b²)``."""
    # Written with the ratio of the smaller to the larger, it neither overflows nor divides by 0.
    smaller, larger = np.minimum(first, second), np.maximum(first, second)
    ratio = np.divide(smaller, larger, out=np.zeros_like(larger), where=larger > 0)
    return smaller / np.sqrt(1 + ratio * ratio)
