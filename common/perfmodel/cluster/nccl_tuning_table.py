"""NCCL's ranking of its algorithms: latency and bandwidth of each, from its tuner's constants.

NCCL finds a graph of channels at start, gives every pair of algorithm and protocol a latency and a
bandwidth from it, and for a message takes the pair with the smallest
``latency + size / bandwidth``. The constants and formulas are those of NCCL 2.30
(``ncclTopoTuneModel`` and ``ncclTopoGetAlgoTime`` in src/graph/tuning.cc). Left out are what needs
the network's switches (CollNet), several operations in one launch, and PCIe between GPUs.

Over several nodes three things are as the wires have it rather than as in NCCL's file: a ring's
channels share the nodes' network; a tree sends each byte twice through a node's cards, once where
there are only two nodes; and a correction for mid-size messages on trees is interpolated between
its powers of two.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from common.perfmodel.cluster.clusters import Cluster

PROTOCOLS = ("LL", "LL128", "Simple")
ALGORITHMS = ("Ring", "Tree", "NVLS", "NVLSTree")

# Latencies in µs, by protocol: once a call, and for each hop over NVLink and over the network.
BASE_US = {"Ring": (6.6, 14.0, 8.4), "Tree": (6.8, 14.0, 8.4)}
NVLINK_US = {"Ring": (0.6, 1.9, 3.4), "Tree": (0.6, 1.25, 4.0)}
NETWORK_US = {"Ring": (2.7, 4.0, 14.0), "Tree": (5.0, 8.5, 14.0)}
NVLS_US = 25.0
NVLS_TREE_NETWORK_US = 20.9
NETWORK_OVERHEAD_US = {"intel": 1.0, "amd": 2.0}
"""Lower bound on a ring's hop inside one of several nodes, in µs; three times it for Simple."""
RING_PLATEAU = 1.4
"""Factor on the latency of Ring/Simple over several nodes."""

# Limits in GB/s on 1, 2 and more nodes. LL's is the GPU's on one node and the CPU's on several.
LL_ONE_NODE = {"ampere": 87.7, "hopper": 141.0}
LL_NODES = {"intel": (39.0, 20.4), "amd": (22.5, 19.0)}
RING_LL128_CHANNEL = {"ampere": (20.0,) * 3, "hopper": (36.7,) * 3}
TREE_LL128_CHANNEL = {"ampere": (20.0,) * 3, "hopper": (36.7, 36.7, 29.0)}
TREE_CHANNEL = {"ampere": (24.0, 23.6, 17.8), "hopper": (38.7, 41.4, 36.0)}
NVLS_TREE_CHANNEL = (0.0, 57.7, 45.5)
NVLS_EFFICIENCY = 0.85

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
    """

    algorithm: str
    protocol: str
    latency_s: float
    bandwidth_bytes_per_s: float
    steps: int
    channel_bytes_per_s: float

    @property
    def name(self) -> str:
        """Returns the name, such as ``Ring/LL128``."""
        return f"{self.algorithm}/{self.protocol}"


def all_reduce_choices(cluster: Cluster, gpus: int) -> tuple[Choice, ...]:
    """Returns the choices that NCCL has for an all-reduce; none for one GPU.

    Raises UserError where the cluster cannot hold ``gpus``.
    """
    nodes = cluster.nodes(gpus)
    if gpus == 1:
        return ()
    choices = [*ring_choices(cluster, gpus, 2), *_trees(cluster, gpus, nodes)]
    if cluster.nvls_channels and nodes == 1 and gpus > 2:  # two GPUs have nothing to multicast
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
    bus = cluster.channels * cluster.channel_gb_per_s
    if nodes > 1:
        bus = min(bus, cluster.network_gb_per_s)
    limits = (
        min(_ll_limit(cluster, nodes), bus / 2),
        min(0.92 * bus, cluster.channels * _at(RING_LL128_CHANNEL[cluster.generation], nodes)),
        bus,
    )
    choices = []
    for index in _protocols(cluster, nodes):
        simple = index == 2
        inside, between = NVLINK_US["Ring"][index], _network_us(cluster, gpus, nodes, "Ring", index)
        if nodes > 1:
            inside = max(inside, NETWORK_OVERHEAD_US[cluster.cpu] * (3 if simple else 1))
        latency = BASE_US["Ring"][index] + (steps - network_steps) * inside
        latency += network_steps * between
        if simple and nodes > 1 and rounds == 2:
            latency *= RING_PLATEAU
        bandwidth = limits[index] * gpus / steps
        choices.append(_choice("Ring", index, latency, bandwidth, steps, bus / cluster.channels))
    return tuple(choices)


def tree_factor(protocols: NDArray, size_bytes: NDArray) -> NDArray:
    """Returns the factors on trees' bandwidths, [protocols, sizes].

    ``protocols`` are indices into ``PROTOCOLS``.
    """
    # Linear in log2 of the size between the table's powers of two; 1.001 keeps ``below + 1`` in it.
    position = np.log2(np.maximum(size_bytes, _FACTOR_FROM_BYTES) / _FACTOR_FROM_BYTES)
    position = np.minimum(position, _TREE_FACTORS.shape[1] - 1.001)
    below = position.astype(int)
    table = _TREE_FACTORS[protocols]
    low = table[:, below]
    return low + (table[:, below + 1] - low) * (position - below)


def _trees(cluster: Cluster, gpus: int, nodes: int) -> list[Choice]:
    bus = cluster.channels * cluster.channel_gb_per_s
    if nodes > 1:
        bus = min(bus, cluster.network_gb_per_s * _crossings(nodes))
    rate = bus / cluster.channels
    bus = min(0.92 * bus, cluster.channels * _at(TREE_CHANNEL[cluster.generation], nodes))
    ll128 = cluster.channels * _at(TREE_LL128_CHANNEL[cluster.generation], nodes)
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
        latency += 2 * (inside * NVLINK_US["Tree"][index] + levels * hop)
        steps = 2 * (inside + levels)
        choices.append(_choice("Tree", index, latency, limits[index] / 2, steps, rate))
    return choices


def _nvls(cluster: Cluster, gpus: int) -> Choice:
    rate = _nvls_channel(cluster)
    bandwidth = cluster.nvls_channels * rate * gpus / (2 * (gpus - 1))
    return _choice("NVLS", 2, NVLS_US, bandwidth, 2, rate)


def _nvls_tree(cluster: Cluster, gpus: int, nodes: int) -> Choice:
    inside = min(_nvls_channel(cluster), _at(NVLS_TREE_CHANNEL, nodes)) * cluster.nvls_channels
    bus = min(inside, cluster.network_gb_per_s * _crossings(nodes))
    levels = nodes.bit_length() - 1
    latency = NVLS_US + 2 * levels * (NVLS_TREE_NETWORK_US + 2 * cluster.network_latency_us)
    bandwidth = bus * gpus / (2 * (gpus - 1))
    return _choice("NVLSTree", 2, latency, bandwidth, 2 + 2 * levels, bus / cluster.nvls_channels)


def _nvls_channel(cluster: Cluster) -> float:
    channels = cluster.nvls_channels
    return cluster.nvls_channel_gb_per_s * NVLS_EFFICIENCY * (channels - 1) / channels * 2


def _crossings(nodes: int) -> int:
    """Returns a tree's bandwidth as a multiple of a node's network.

    Of two nodes each sends a byte once; in a longer tree an inner one sends it up and down.
    """
    return 2 if nodes == 2 else 1


def _network_us(cluster: Cluster, gpus: int, nodes: int, algorithm: str, index: int) -> float:
    """Computes the µs of a hop between nodes; Simple waits again, to flush what it received."""
    if gpus == nodes:  # nothing inside a node to hide it behind
        algorithm = "Tree"
    return NETWORK_US[algorithm][index] + cluster.network_latency_us * (2 if index == 2 else 1)


def _protocols(cluster: Cluster, nodes: int) -> tuple[int, ...]:
    return (0, 1, 2) if nodes == 1 or cluster.ll128 else (0, 2)


def _ll_limit(cluster: Cluster, nodes: int) -> float:
    if nodes == 1:
        return LL_ONE_NODE[cluster.generation]
    return LL_NODES[cluster.cpu][min(nodes, 3) - 2]


def _at(limits: tuple[float, ...], nodes: int) -> float:
    return limits[min(nodes, 3) - 1]


def _choice(
    algorithm: str, index: int, latency_us: float, gb_per_s: float, steps: int, channel: float
) -> Choice:
    return Choice(
        algorithm, PROTOCOLS[index], latency_us * 1e-6, gb_per_s * 1e9, steps, channel * 1e9
    )
