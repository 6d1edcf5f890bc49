"""Is a table of collectives normal? Each row beside what its hardware should give, and the fault.

What should come is the model of NCCL on a cluster that is known (``data/clusters``), or on each of
those that it may be. Bus bandwidth decides for long messages, the time for short ones. A fault is
looked for where long messages are slow: it leaves a bandwidth that is typical of it.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from functools import cache

import numpy as np

from common.errors import UserError
from common.perfmodel.cluster.clusters import (
    PCIE_GB_PER_S,
    Cluster,
    known_clusters,
    load_cluster,
)
from common.perfmodel.cluster.nccl import Collective, NcclAllReduce, NcclRing
from common.perfmodel.one_device.peaks import known_peak
from common.perfmodel.printed.collectives import PrintedCollective

EXPECTED, LOW, NOT_KNOWN = "expected", "low", "not known"
LONG_BYTES, MIDDLE_BYTES, LEAST_BYTES = 256 * 2**20, 64 * 2**20, 16 * 2**20
"""Sizes from which on bandwidth decides everywhere, decides on several nodes by and large, and from
which on rows tell how fast a table is."""
MARGIN, MARGIN_SHORT, MARGIN_SHORT_NODES = 1.5, 2.0, 10.0
"""How many times what the model gives a healthy row may take: of a long message, of a short one on
one node, and on several. In 39 published tables of healthy hardware (GH200 on Slingshot, A100,
H200) all but 12 of 1,552 rows take less; the best long row of a table takes up to 1.30 times."""
MARGIN_MIDDLE, MARGIN_NO_LONG = 2.5, 8.0
"""The same for the best row of a table over several nodes that has no long message: with one of
``MIDDLE_BYTES``, where these tables, cut there, took up to 1.91 times; and with none (5.02)."""
SOCKETS_GB_PER_S = 12.5
"""100 Gbit/s of a node, which TCP streams of NCCL hardly exceed."""
FAULT_BYTES = 2**30
"""Size of the message by which faults between nodes are told."""
NO_P2P, SOCKETS, ONE_CARD, NO_SHARED_MEMORY, ACROSS_SOCKETS = (
    "no P2P between GPUs (they exchange through host memory, SHM)",
    "sockets (TCP) in place of InfiniBand or RoCE",
    "one network card in use where a node has several",
    "shared memory off (GPUs of a node exchange over network sockets)",
    "PCIe across the processors' sockets",
)


@dataclass(frozen=True)
class JudgedRow:
    """A row beside what should come.

    Attributes:
        time_s, busbw_gb_per_s: what was measured.
        low_s, high_s: time that should come, on the fastest and slowest hardware that it may be;
            NaN where that is not known.
        verdict: EXPECTED, LOW or NOT_KNOWN.
    """

    size_bytes: float
    time_s: float
    busbw_gb_per_s: float
    low_s: float
    high_s: float
    verdict: str


@dataclass(frozen=True)
class JudgedTable:
    """A table of one collective, judged.

    Attributes:
        clusters: names of the hardware that it may be from; empty where that is not known.
        nodes: number of hosts.
        why_not: why nothing is known; empty where something is.
        faults: faults that it looks like, of a table that is low.
    """

    table: PrintedCollective
    clusters: tuple[str, ...]
    nodes: int
    rows: tuple[JudgedRow, ...]
    why_not: str = ""
    faults: tuple[str, ...] = ()

    @property
    def slowness(self) -> float:
        """Returns how many times what should come the best long row takes; NaN if not known."""
        long = [row for row in self.rows if row.size_bytes >= LEAST_BYTES] or self.rows
        return min(row.time_s / row.high_s for row in long)

    @property
    def margin(self) -> float:
        """Returns how many times what should come the best row of a healthy table may take."""
        largest = max(row.size_bytes for row in self.rows)
        if largest >= LONG_BYTES or self.nodes == 1:
            return margin_of(largest, self.nodes)
        return MARGIN_MIDDLE if largest >= MIDDLE_BYTES else MARGIN_NO_LONG

    @property
    def is_low(self) -> bool:
        """Returns True if even its best row is slow."""
        return self.slowness > self.margin

    @property
    def best(self) -> JudgedRow:
        """Returns the row with the most bus bandwidth, by which faults are told."""
        return max(self.rows, key=lambda row: row.busbw_gb_per_s)


def clusters_of(gpu: str, nodes: int) -> list[Cluster]:
    """Returns the known clusters that hosts with such a GPU may be.

    Virtual machines whose GPUs do not reach each other are none: that is a fault. A GPU does not
    tell the network between nodes: it may be any that nodes have which are the same inside.
    """
    name = gpu.removeprefix("NVIDIA ").removeprefix("Tesla ")
    inside = {_node(c): c for c in _known() if c.gpu == name and not c.name.endswith("-vm")}
    if nodes == 1:
        return list(inside.values())
    return [c for c in _known() if c.network != "none" and _node(c) in inside]


@cache
def _known() -> tuple[Cluster, ...]:
    return tuple(load_cluster(title) for title in known_clusters())


def _node(cluster: Cluster) -> tuple:
    """Returns what a node is inside, whatever its GPUs' memory and its network are."""
    rings = cluster.channels, cluster.channel_gb_per_s
    return cluster.generation, cluster.interconnect, cluster.gpus_per_node, *rings


def judge_rows(
    table: PrintedCollective,
    hardware: Cluster | None = None,
    gpu: str = "",
    faults: Collection[str] = (),
) -> JudgedTable:
    """Judges a table.

    Args:
        hardware: cluster that it is from; by default what its GPU's name says.
        gpu: name of the GPUs, where the table does not tell.
        faults: faults that other evidence shows, such as NCCL's log.
    """
    table = replace(table, gpu=table.gpu or gpu)
    nodes = _nodes(table, hardware)
    clusters = [hardware] if hardware else clusters_of(table.gpu, nodes)
    models = []
    reason = _why_not(table, nodes)
    for cluster in clusters:
        try:
            models += [(cluster, model) for model in nccl_models(cluster, table, nodes)]
        except UserError as error:
            reason = str(error)
    busbw = table.busbw_gb_per_s()
    sizes = np.array(table.sizes_bytes)
    times = np.array([model.time_s(sizes) for _, model in models]).reshape(-1, len(sizes))
    rows = tuple(
        _row((size, seconds, rate), times[:, index], margin_of(size, nodes))
        for index, (size, seconds, rate) in enumerate(
            zip(table.sizes_bytes, table.times_s, busbw, strict=True)
        )
    )
    fits = {cluster.name: cluster for cluster, _ in models}
    judged = JudgedTable(table, tuple(fits), nodes, rows, "" if models else reason)
    if not (models and judged.is_low):
        return judged
    shares = _left_by(list(fits.values()), table, nodes)
    return replace(judged, faults=faults_of(judged, shares, faults))


def _nodes(table: PrintedCollective, hardware: Cluster | None) -> int:
    if table.nodes:
        return table.nodes
    sizes = (cluster.gpus_per_node for cluster in clusters_of(table.gpu, 1))
    per_node = hardware.gpus_per_node if hardware else max(sizes, default=8)
    return max(1, -(-table.ranks // per_node))


def _why_not(table: PrintedCollective, nodes: int) -> str:
    if not table.gpu:
        return "the file does not name the GPUs"
    if known_peak(table.gpu) is None:
        return f"nothing is known of a {table.gpu}"
    where = f"between {nodes} nodes of" if nodes > 1 else "with"
    return f"no cluster {where} {table.gpu} is known"


def nccl_models(cluster: Cluster, table: PrintedCollective, nodes: int) -> list[Collective]:
    """Returns NCCL's models of a table's collective: as it chooses, and over two nodes a ring, too.

    Over two nodes there is a second model, of a ring: a tree sends each byte over the network once
    there, and a ring twice, which is chosen where the network is looked at (NCCL_ALGO=RING).

    Raises UserError where the cluster cannot hold the ranks.
    """
    cluster = _part_of(cluster, table.ranks, nodes)
    if table.collective != "all_reduce":
        return [NcclRing(cluster, table.ranks, table.collective)]
    rings = [NcclAllReduce(cluster, table.ranks, algorithms=("Ring",))] if nodes == 2 else []
    return [NcclAllReduce(cluster, table.ranks), *rings]


def _part_of(cluster: Cluster, ranks: int, nodes: int) -> Cluster:
    """Returns the cluster of the GPUs that took part, each with its card of the network."""
    per_node = ranks // nodes
    if nodes == 1 or per_node * nodes != ranks or per_node >= cluster.gpus_per_node:
        return cluster
    return cluster.with_fewer(per_node)


def _row(measured: tuple[float, float, float], times_s: np.ndarray, margin: float) -> JudgedRow:
    """Judges a row: size, seconds and bus bandwidth beside the seconds of each model."""
    if not len(times_s):
        return JudgedRow(*measured, np.nan, np.nan, NOT_KNOWN)
    low_s, high_s = float(times_s.min()), float(times_s.max())
    seconds = measured[1]
    # Slower than the slowest hardware that it may be is low; between, it depends on which it is.
    if seconds > high_s * margin:
        verdict = LOW
    else:
        verdict = EXPECTED if seconds <= low_s * margin else NOT_KNOWN
    return JudgedRow(*measured, low_s, high_s, verdict)


def margin_of(size_bytes: float, nodes: int) -> float:
    """Returns how many times what should come a healthy row may take."""
    if size_bytes >= LONG_BYTES:
        return MARGIN
    return MARGIN_SHORT if nodes == 1 else MARGIN_SHORT_NODES


def faults_of(
    judged: JudgedTable,
    shares: Mapping[str, Collection[tuple[float, float]]],
    faults: Collection[str],
) -> tuple[str, ...]:
    """Returns the faults that other evidence shows; without it, those that leave such a bandwidth.

    ``shares`` has the bus bandwidths that a fault may leave.
    """
    if in_log := tuple(fault for fault in shares if fault in faults):
        return in_log
    rate = judged.best.busbw_gb_per_s
    return tuple(
        fault for fault, ranges in shares.items() if any(low < rate < high for low, high in ranges)
    )


def _left_by(
    clusters: Collection[Cluster], table: PrintedCollective, nodes: int
) -> dict[str, list[tuple[float, float]]]:
    """Returns the bus bandwidths, in GB/s, that faults leave of long messages, on any cluster."""
    if nodes > 1:
        parts = [_part_of(cluster, table.ranks, nodes) for cluster in clusters]
        cards = {
            part: part.network_gb_per_s / part.gpus_per_node
            for part in parts
            if part.gpus_per_node > 1
        }
        sockets = max(_reached(part, table, nodes, SOCKETS_GB_PER_S) for part in parts)
        return {
            SOCKETS: [(0.0, sockets)],
            ONE_CARD: [
                (0.5 * card, 1.15 * _reached(part, table, nodes, card))
                for part, card in cards.items()
            ],
        }
    bus = [PCIE_GB_PER_S[cluster.generation] for cluster in clusters]
    return {
        NO_SHARED_MEMORY: [(0.0, 3.0)],
        NO_P2P: [(2.0, 0.45 * rate) for rate in bus],
        ACROSS_SOCKETS: [(0.25 * rate, 0.75 * rate) for rate in bus],
    }


def _reached(
    cluster: Cluster, table: PrintedCollective, nodes: int, network_gb_per_s: float
) -> float:
    """Computes the bus bandwidth, in GB/s, where a node's network is as slow as that."""
    slow = replace(cluster, network_gb_per_s=min(network_gb_per_s, cluster.network_gb_per_s))
    times_s = (float(nccl_models(slow, table, nodes)[0].time_s(FAULT_BYTES)),)
    return float(replace(table, sizes_bytes=(FAULT_BYTES,), times_s=times_s).busbw_gb_per_s()[0])
