"""NCCL's ranking of its algorithms: latency and bandwidth of each, from its tuner's constants.

NCCL finds a graph of channels at start, gives every pair of algorithm and protocol a latency and a
bandwidth from it, and for a message takes the pair with the smallest
``latency + size / bandwidth``. The constants and formulas are those of NCCL 2.30
(``ncclTopoTuneModel`` and ``ncclTopoGetAlgoTime`` in src/graph/tuning.cc). Left out are what needs
the network's switches (CollNet) and several operations in one launch.

Over several nodes three things are as the wires have it rather than as in NCCL's file: a ring's
channels share the nodes' network; a tree sends each byte twice through a node's cards, once where
there are only two nodes; and a correction for mid-size messages on trees is interpolated between
its powers of two.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from common.perfmodel.cluster.clusters import Cluster

PROTOCOLS = ("LL", "LL128", "Simple")
ALGORITHMS = ("Ring", "Tree", "NVLS", "NVLSTree")

# Latencies in µs, by protocol: once a call, and for each hop inside a node and over the network.
BASE_US = {"Ring": (6.6, 14.0, 8.4), "Tree": (6.8, 14.0, 8.4)}
NVLINK_US = {"Ring": (0.6, 1.9, 3.4), "Tree": (0.6, 1.25, 4.0)}
PCIE_US = {"Ring": (1.0, 2.5, 5.7), "Tree": (1.0, 1.9, 4.0)}
NETWORK_US = {"Ring": (2.7, 4.0, 14.0), "Tree": (5.0, 8.5, 14.0)}
NVLS_US = 25.0
NVLS_TREE_NETWORK_US = 20.9
NETWORK_OVERHEAD_US = {"intel": 1.0, "amd": 2.0, "arm": 1.0}
"""Lower bound on a ring's hop inside one of several nodes, in µs; three times it for Simple."""
TUNED_AS = {"turing": "volta", "ada": "ampere"}
"""NCCL's tuner knows four generations; others are the next older one to it."""
RING_PLATEAU = {"volta": 1.9, "ampere": 1.4, "hopper": 1.4, "blackwell": 1.4}
"""Factor on the latency of Ring/Simple over several nodes."""

# Limits in GB/s on 1, 2 and more nodes. LL's is the GPU's on one node and the CPU's on several.
LL_ONE_NODE = {"volta": 39.0, "ampere": 87.7, "hopper": 141.0, "blackwell": 282.0}
LL_NODES = {"intel": (39.0, 20.4), "amd": (22.5, 19.0), "arm": (39.0, 20.4)}
RING_LL128_CHANNEL = {"volta": 20.0, "ampere": 20.0, "hopper": 36.7, "blackwell": 40.0}
TREE_LL128_CHANNEL = {
    "volta": (20.0,) * 3,
    "ampere": (20.0,) * 3,
    "hopper": (36.7, 36.7, 29.0),
    "blackwell": (55.6, 31.67, 20.0),
}
TREE_CHANNEL = {
    "volta": (26.5, 18.5, 10.0),
    "ampere": (24.0, 23.6, 17.8),
    "hopper": (38.7, 41.4, 36.0),
    "blackwell": (70.0, 42.8, 24.0),
}
NVLS_TREE_CHANNEL = {"hopper": (0.0, 57.7, 45.5), "blackwell": (0.0, 96.0, 80.0)}
NVLS_EFFICIENCY = {"hopper": 0.85, "blackwell": 0.74}
NVLS_SPEEDS = {
    "hopper": (60.0, 50.0, 40.0, 30.0, 24.0, 20.0, 15.0, 12.0, 11.0, 6.0, 3.0),
    "blackwell": (90.0, 80.0, 70.0, 60.0, 50.0, 45.0, 40.0, 30.0, 24.0, 20.0, 19.0, 18.0),
}
"""Bandwidths in GB/s that NCCL's search tries for a channel, from the fastest (search.cc)."""
NVLS_BLOCKS = {"hopper": 16, "blackwell": 24}
NVLS_CHUNK_BYTES = 64 * 1024
"""Thread blocks of NVLink SHARP on one node, and what each holds for every GPU (transport/nvls.cc;
enqueue.cc halves the chunk of 128 KiB for messages below 64 rounds of them)."""

# Factors on a tree's bandwidth at 64 B, 128 B, … 512 MiB, by protocol; 1 above.
_LL_FACTORS = (
    [1.0] * 4 + [0.9, 0.8] + [0.7] * 4 + [0.6, 0.5, 0.4, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9] + [1.0] * 6
)
_LL128_FACTORS = [1.0] * 5 + [0.9] + [0.8] * 3 + [0.7] + [0.6] * 6 + [0.8] + [0.9] * 4 + [1.0] * 4
_SIMPLE_FACTORS = (
    [0.9] * 7
    + [0.8, 0.7, 0.6, 0.6]
    + [0.5] * 4
    + [0.6, 0.7, 0.8, 0.7, 0.7, 0.8, 0.9, 0.9, 0.9, 1.0]
)
_TREE_FACTORS = np.array([_LL_FACTORS, _LL128_FACTORS, _SIMPLE_FACTORS])
_FACTOR_FROM_BYTES = 64


@dataclass(frozen=True)
class Choice:
    """One way to do a collective.

    Attributes:
        algorithm, protocol: NCCL's names.
        latency_s: duration of a message without length.
        bandwidth_bytes_per_s: algorithm bandwidth, size over time, of a long message.
        steps: hops in a row that each piece of a message makes.
        channel_bytes_per_s: bandwidth of one channel, the same for all protocols.
        slice_bytes: slice that each step waits for; None is the slice that the ramp has.
        hops_s: the part of ``latency_s`` that hops of a ring between nodes take: pieces are many
            there, and one is sent while another is on its way.
    """

    algorithm: str
    protocol: str
    latency_s: float
    bandwidth_bytes_per_s: float
    steps: int
    channel_bytes_per_s: float
    slice_bytes: float | None = None
    hops_s: float = 0.0

    @property
    def name(self) -> str:
        """Returns the name, such as ``Ring/LL128``."""
        return f"{self.algorithm}/{self.protocol}"


def all_reduce_choices(cluster: Cluster, gpus: int) -> tuple[Choice, ...]:
    """Returns NCCL's ways to all-reduce; none for one GPU. Raises UserError for too many GPUs."""
    nodes = cluster.nodes(gpus)
    if gpus == 1:
        return ()
    choices = [*ring_choices(cluster, gpus, 2), *_trees(cluster, gpus, nodes)]
    if cluster.nvls_channels and nodes == 1:
        choices.append(_nvls(cluster, gpus))
    if cluster.nvls_channels and nodes > 1:
        choices.append(_nvls_tree(cluster, gpus, nodes))
    return tuple(choices)


def ring_choices(cluster: Cluster, gpus: int, rounds: int) -> tuple[Choice, ...]:
    """Returns rings in each protocol; ``rounds`` is 2 for an all-reduce, 1 for half of one.

    Half of one is a reduce-scatter or an all-gather; its size is that of the whole tensor.
    """
    nodes = cluster.nodes(gpus)
    if gpus == 1:
        return ()
    steps, network_steps = rounds * (gpus - 1), rounds * (nodes - 1)
    generation, channels = _tuned_as(cluster), cluster.channels_of(gpus)
    bus = channels * cluster.channel_gb_per_s
    if nodes > 1:
        bus = min(bus, cluster.network_gb_per_s)
    limits = (
        min(_ll_limit(cluster, nodes), bus / 2),
        min(0.92 * bus, channels * RING_LL128_CHANNEL[generation]),
        bus,
    )
    choices = []
    for index in _protocols(cluster, nodes):
        simple = index == 2
        inside = _inside_us(cluster)["Ring"][index]
        between = _network_us(cluster, gpus, nodes, "Ring", index)
        if nodes > 1:
            inside = max(inside, NETWORK_OVERHEAD_US[cluster.cpu] * (3 if simple else 1))
        latency = BASE_US["Ring"][index] + (steps - network_steps) * inside
        latency += network_steps * between
        if simple and nodes > 1 and rounds == 2:
            latency *= RING_PLATEAU[generation]
        bandwidth = limits[index] * gpus / steps
        choice = _choice("Ring", index, latency, bandwidth, steps, bus / channels)
        hops_s = choice.latency_s - BASE_US["Ring"][index] * 1e-6 if nodes > 1 else 0.0
        choices.append(replace(choice, hops_s=hops_s))
    return tuple(choices)


def tree_factor(protocols: NDArray, size_bytes: NDArray) -> NDArray:
    """Returns factors on trees' bandwidths [protocols, sizes], by index into ``PROTOCOLS``."""
    # Linear in log2 of the size between the table's powers of two; 1.001 keeps ``below + 1`` in it.
    position = np.log2(np.maximum(size_bytes, _FACTOR_FROM_BYTES) / _FACTOR_FROM_BYTES)
    position = np.minimum(position, _TREE_FACTORS.shape[1] - 1.001)
    below = position.astype(int)
    table = _TREE_FACTORS[protocols]
    low = table[:, below]
    return low + (table[:, below + 1] - low) * (position - below)


def _trees(cluster: Cluster, gpus: int, nodes: int) -> list[Choice]:
    generation, channels = _tuned_as(cluster), cluster.channels_of(gpus)
    bus = channels * cluster.channel_gb_per_s
    if nodes > 1:
        bus = min(bus, cluster.network_gb_per_s * _crossings(nodes))
    rate = bus / channels
    bus = min(0.92 * bus, channels * _at(TREE_CHANNEL[generation], nodes))
    ll128 = channels * _at(TREE_LL128_CHANNEL[generation], nodes)
    limits = (
        min(bus / 3.8, _ll_limit(cluster, nodes)),
        min(bus * (7 / 9 if nodes == 1 else 120 / 128), ll128),
        bus,
    )
    inside, levels = gpus // nodes - 1, nodes.bit_length() - 1
    choices = []
    for index in _protocols(cluster, nodes):
        hop = _network_us(cluster, gpus, nodes, "Tree", index)
        latency = BASE_US["Tree"][index]
        latency += 2 * (inside * _inside_us(cluster)["Tree"][index] + levels * hop)
        steps = 2 * (inside + levels)
        choices.append(_choice("Tree", index, latency, limits[index] / 2, steps, rate))
    return choices


def _nvls(cluster: Cluster, gpus: int) -> Choice:
    """Returns NVLink SHARP on one node, where each GPU is the head of one channel.

    A message goes in rounds, of which the first is not hidden by others.
    """
    heads = min(gpus, cluster.nvls_channels)
    bandwidth = heads * _nvls_channel(cluster, heads) * gpus / (2 * (gpus - 1))
    choice = _choice("NVLS", 2, NVLS_US, bandwidth, 1, bandwidth)
    round_bytes = NVLS_BLOCKS[_tuned_as(cluster)] * heads * NVLS_CHUNK_BYTES
    return replace(choice, slice_bytes=round_bytes)


def _nvls_tree(cluster: Cluster, gpus: int, nodes: int) -> Choice:
    channels = cluster.nvls_channels
    inside = _nvls_channel(cluster, channels)
    inside = min(inside, _at(NVLS_TREE_CHANNEL[_tuned_as(cluster)], nodes)) * channels
    bus = min(inside, cluster.network_gb_per_s * _crossings(nodes))
    levels = nodes.bit_length() - 1
    latency = NVLS_US + 2 * levels * (NVLS_TREE_NETWORK_US + 2 * cluster.network_latency_us)
    bandwidth = bus * gpus / (2 * (gpus - 1))
    return _choice("NVLSTree", 2, latency, bandwidth, 2 + 2 * levels, bus / channels)


def _nvls_channel(cluster: Cluster, heads: int) -> float:
    """Computes the bus bandwidth in GB/s of a channel of NVLink SHARP with this many in all.

    Each GPU's link carries every channel once, and twice the one whose head it is. So fewer GPUs
    have fewer but faster channels, up to the fastest that NCCL tries; with four, a ring is faster.
    """
    generation = _tuned_as(cluster)
    link = (cluster.nvls_channels + 1) * cluster.nvls_channel_gb_per_s
    speeds = {cluster.nvls_channel_gb_per_s, *NVLS_SPEEDS[generation]}
    rate = max(speed for speed in speeds if (heads + 1) * speed <= link * 1.001)
    return rate * NVLS_EFFICIENCY[generation] * (heads - 1) / heads * 2


def _crossings(nodes: int) -> int:
    """Returns a tree's bandwidth over a node's network: an inner node sends each byte twice."""
    return 2 if nodes == 2 else 1


def _network_us(cluster: Cluster, gpus: int, nodes: int, algorithm: str, index: int) -> float:
    """Computes the µs of a hop between nodes; Simple waits again, to flush what it received."""
    if gpus == nodes:  # nothing inside a node to hide it behind
        algorithm = "Tree"
    return NETWORK_US[algorithm][index] + cluster.network_latency_us * (2 if index == 2 else 1)


def _protocols(cluster: Cluster, nodes: int) -> tuple[int, ...]:
    """Returns the protocols; LL128 needs NVLink inside of a node, and between nodes RDMA."""
    has_ll128 = cluster.interconnect != "pcie" and (nodes == 1 or cluster.ll128)
    return (0, 1, 2) if has_ll128 else (0, 2)


def _tuned_as(cluster: Cluster) -> str:
    return TUNED_AS.get(cluster.generation, cluster.generation)


def _inside_us(cluster: Cluster) -> dict[str, tuple[float, float, float]]:
    return PCIE_US if cluster.interconnect == "pcie" else NVLINK_US


def _ll_limit(cluster: Cluster, nodes: int) -> float:
    if nodes == 1:
        return LL_ONE_NODE[_tuned_as(cluster)]
    return LL_NODES[cluster.cpu][min(nodes, 3) - 2]


def _at(limits: tuple[float, ...], nodes: int) -> float:
    return limits[min(nodes, 3) - 1]


def _choice(
    algorithm: str, index: int, latency_us: float, gb_per_s: float, steps: int, channel: float
) -> Choice:
    return Choice(
        algorithm, PROTOCOLS[index], latency_us * 1e-6, gb_per_s * 1e9, steps, channel * 1e9
    )
