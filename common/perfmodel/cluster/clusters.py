"""Clusters of GPU nodes as NCCL's tuner has to know them, read from ``data/clusters``.

A cluster is a kind of node (GPUs, what joins them, NVLink SHARP channels) and a network between
nodes. Channels and their bandwidths are those of the graph that NCCL finds at start (its log names
them); a file states where they come from and what is assumed. A workstation is one node.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import MISSING, dataclass, field, fields, replace
from pathlib import Path

import yaml

from common.errors import UserError, naming, unknown_name
from common.perfmodel.one_device.peaks import GPUS, known_peak
from common.perfmodel.published import DATA

CLUSTERS = DATA / "clusters"
GENERATIONS = ("volta", "turing", "ampere", "ada", "hopper", "blackwell")
INTERCONNECTS = ("nvlink", "nvlink-mesh", "pcie")
NETWORKS = ("infiniband", "roce", "ethernet", "slingshot", "none")
CPUS = ("intel", "amd", "arm")
COURSE_CLUSTERS = ("a100-ib", "a100-roce", "h100-a3mega", "h100-ib", "h100-roce", "h200-ib")
"""The clusters that pages and figures are about: thousands of GPUs that compute in bfloat16."""

# One direction of a GPU's NVLink, and of its PCIe, as the data sheets have the fastest card of a
# generation: V100, Quadro RTX 8000, A100, H100 and B200. Ada has no NVLink.
NVLINK_GB_PER_S = {
    "volta": 150.0,
    "turing": 50.0,
    "ampere": 300.0,
    "ada": 0.0,
    "hopper": 450.0,
    "blackwell": 900.0,
}
PCIE_GB_PER_S = {
    "volta": 15.75,
    "turing": 15.75,
    "ampere": 31.5,
    "ada": 31.5,
    "hopper": 63.0,
    "blackwell": 63.0,
}


@dataclass(frozen=True)
class Cluster:
    """Nodes of one kind and their network. GB is 10⁹ bytes; rates are of one direction.

    Attributes:
        generation: one of ``GENERATIONS``, which chooses NCCL's constants.
        gpu: a name that ``peaks`` knows.
        gpus_per_node, max_nodes: size of the largest job.
        channels, channel_gb_per_s: rings and trees inside a node.
        nvls_channels, nvls_channel_gb_per_s: NVLink SHARP on all GPUs of a node, a channel for
            each; 0 where there is none.
        network: one of ``NETWORKS``; ``none`` of a single node.
        network_gb_per_s: payload that a node sends, all its network cards together.
        source: origin of the figures.
        assumptions: sentences to be shown with a result.
        network_latency_us: time of a hop beyond NCCL's constants for InfiniBand.
        cpu: one of ``CPUS``, on which NCCL's constants for several nodes depend.
        ll128: whether NCCL may use its LL128 protocol between nodes (it needs GPUDirect RDMA).
        interconnect: one of ``INTERCONNECTS``: ``nvlink`` through switches or between two GPUs,
            ``nvlink-mesh`` from GPU to GPU, ``pcie`` through the host, whose version is that of
            the GPU's generation.
        channels_of_fewer: number of GPUs of a mesh or on PCIe → channels between them, where
            they are not all; a number that is missing has the channels of the next smaller one.
        measured: (size, factor): what a message takes as a multiple of what the model of NCCL
            gives, where that was measured (``nccl.with_measured``); in no file.
        measured_gpus: number of GPUs that this was measured on; in no file.
    """

    name: str
    generation: str
    gpu: str
    gpus_per_node: int
    max_nodes: int
    channels: int
    channel_gb_per_s: float
    nvls_channels: int
    nvls_channel_gb_per_s: float
    network: str
    network_gb_per_s: float
    source: str
    assumptions: tuple[str, ...]
    network_latency_us: float = 0.0
    cpu: str = "intel"
    ll128: bool = True
    interconnect: str = "nvlink"
    channels_of_fewer: Mapping[int, int] = field(default_factory=dict, hash=False)
    measured: tuple[tuple[float, float], ...] = ()
    measured_gpus: int = 0

    def __post_init__(self) -> None:
        _check(self)

    def nodes(self, gpus: int) -> int:
        """Returns the number of nodes of ``gpus`` GPUs. Raises UserError where they do not fit."""
        most = self.gpus_per_node * self.max_nodes
        if not _whole(gpus) or gpus < 1:
            raise UserError(f"{gpus} GPUs on {self.name}: at least 1 is needed")
        if gpus > most:
            raise UserError(
                f"{gpus} GPUs on {self.name}: it has at most {most} "
                f"({self.max_nodes} nodes of {self.gpus_per_node})"
            )
        if gpus <= self.gpus_per_node:
            return 1
        if gpus % self.gpus_per_node:
            raise UserError(
                f"{gpus} GPUs on {self.name}: above one node it takes whole nodes, "
                f"multiples of {self.gpus_per_node}"
            )
        return int(gpus) // self.gpus_per_node

    def channels_of(self, gpus: int) -> int:
        """Returns the channels inside a node of a job of ``gpus`` GPUs."""
        if gpus >= self.gpus_per_node:
            return self.channels
        named = [number for number in self.channels_of_fewer if number <= gpus]
        return self.channels_of_fewer[max(named)] if named else self.channels

    def with_fewer(self, gpus_per_node: int) -> Cluster:
        """Returns the cluster with fewer GPUs a node, which have their share of its network."""
        fewer = {gpus: n for gpus, n in self.channels_of_fewer.items() if gpus < gpus_per_node}
        nvls = {"nvls_channels": 0, "nvls_channel_gb_per_s": 0.0} if gpus_per_node == 1 else {}
        return replace(
            self,
            gpus_per_node=gpus_per_node,
            network_gb_per_s=self.network_gb_per_s * gpus_per_node / self.gpus_per_node,
            channels=self.channels_of(gpus_per_node),
            # A mesh of two GPUs is a link between them.
            interconnect=self.interconnect if fewer or self.interconnect == "pcie" else "nvlink",
            channels_of_fewer=fewer,
            **nvls,
        )


def known_clusters() -> list[str]:
    """Returns the names of the clusters under ``data/clusters``."""
    return sorted(path.stem for path in CLUSTERS.glob("*.yaml"))


def load_cluster(name_or_file: str | Path) -> Cluster:
    """Loads a known cluster by name, or a user's from a YAML file with the same keys.

    Raises UserError for an unknown name, a file that cannot be read, and illegal keys and values.
    """
    names = known_clusters()
    path = Path(name_or_file)
    if str(name_or_file) in names:
        path = CLUSTERS / f"{name_or_file}.yaml"
    elif path.suffix not in (".yaml", ".yml") and not path.is_file():
        raise UserError(f"{unknown_name('cluster', str(name_or_file), names)}, or a YAML file")
    return _read(path)


def _read(path: Path) -> Cluster:
    try:
        values = yaml.safe_load(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise UserError(f"{path}: no such cluster file") from None
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        reason = " ".join(str(error).split())
        raise UserError(f"{path}: cannot be read as YAML: {reason}") from None
    if not isinstance(values, dict):
        raise UserError(f"{path}: a cluster file is a YAML mapping of keys to values")
    keys = {attribute.name for attribute in fields(Cluster)} - {"measured", "measured_gpus"}
    for key in values:
        if key not in keys:
            raise UserError(f"{path}: {unknown_name('key', str(key), sorted(keys))}")
    values.setdefault("name", path.stem)
    required = [
        attribute.name
        for attribute in fields(Cluster)
        if attribute.default is MISSING and attribute.default_factory is MISSING
    ]
    missing = [name for name in required if name not in values]
    if missing:
        raise UserError(f"{path}: no {', '.join(missing)}")
    stated = values["assumptions"]
    if not isinstance(stated, list) or not all(isinstance(sentence, str) for sentence in stated):
        raise UserError(f"{path}: assumptions is a list of sentences")
    values["assumptions"] = tuple(stated)
    with naming(path):
        return Cluster(**values)


def _whole(value: object) -> bool:
    return hasattr(value, "__index__") and not isinstance(value, bool)


def _check(cluster: Cluster) -> None:
    """Raises UserError that names the first illegal value."""

    def refuse(name: str, legal: str) -> None:
        raise UserError(f"{name} = {getattr(cluster, name)!r}: {legal}")

    for name in ("name", "source"):
        if not isinstance(getattr(cluster, name), str) or not getattr(cluster, name).strip():
            refuse(name, "a text is needed")
    legal_names = {
        "generation": GENERATIONS,
        "network": NETWORKS,
        "cpu": CPUS,
        "interconnect": INTERCONNECTS,
    }
    for name, legal in legal_names.items():
        if getattr(cluster, name) not in legal:
            refuse(name, f"one of {', '.join(legal)}")
    if not isinstance(cluster.ll128, bool):
        refuse("ll128", "true or false")
    if not isinstance(cluster.gpu, str) or known_peak(cluster.gpu) is None:
        raise UserError(unknown_name("gpu", str(cluster.gpu), GPUS))
    counts = {"gpus_per_node": 1, "max_nodes": 1, "channels": 1, "nvls_channels": 0}
    for name, least in counts.items():
        if not _whole(getattr(cluster, name)) or getattr(cluster, name) < least:
            refuse(name, f"a whole number of at least {least}")
    has_network = cluster.network != "none"
    for name in ("channel_gb_per_s", "network_gb_per_s")[: 1 + has_network]:
        if not _number(getattr(cluster, name)) or getattr(cluster, name) <= 0:
            refuse(name, "a number above 0, in GB/s")
    if not has_network and (cluster.max_nodes > 1 or cluster.network_gb_per_s != 0):
        refuse("network", "one node has none, with max_nodes 1 and network_gb_per_s 0")
    for name in ("nvls_channel_gb_per_s", "network_latency_us"):
        if not _number(getattr(cluster, name)) or getattr(cluster, name) < 0:
            refuse(name, "a number of at least 0")
    _check_mesh(cluster)
    _check_physics(cluster)


def _check_mesh(cluster: Cluster) -> None:
    """Raises UserError unless a mesh says what fewer GPUs have, and nvlink does not."""
    fewer = cluster.channels_of_fewer
    if not isinstance(fewer, Mapping) or not all(
        _whole(gpus) and _whole(channels) and 2 <= gpus < cluster.gpus_per_node and channels >= 1
        for gpus, channels in fewer.items()
    ):
        raise UserError(
            f"channels_of_fewer = {fewer!r}: numbers of GPUs from 2 to below "
            f"{cluster.gpus_per_node}, each with at least 1 channel"
        )
    if 2 not in fewer and (fewer or cluster.interconnect == "nvlink-mesh"):
        raise UserError("channels_of_fewer names the channels of 2 GPUs, and an nvlink-mesh has it")
    if fewer and cluster.interconnect == "nvlink":
        raise UserError("channels_of_fewer of nvlink: any number of GPUs has all channels there")


def _check_physics(cluster: Cluster) -> None:
    """Raises UserError for values that no hardware of the generation reaches."""
    nvls = cluster.nvls_channels * cluster.nvls_channel_gb_per_s
    has_switches = (
        cluster.generation in ("hopper", "blackwell") and cluster.interconnect == "nvlink"
    )
    if not has_switches and nvls:
        raise UserError(
            f"nvls_channels of {cluster.generation} over {cluster.interconnect}: "
            "it has no NVLink SHARP, so 0"
        )
    if cluster.nvls_channels == 1 or (cluster.nvls_channels and not nvls):
        raise UserError("NVLink SHARP takes at least 2 nvls_channels and a bandwidth, or 0 and 0")
    is_pcie = cluster.interconnect == "pcie"
    link = (PCIE_GB_PER_S if is_pcie else NVLINK_GB_PER_S)[cluster.generation]
    channels = max(cluster.channels, *cluster.channels_of_fewer.values(), 0)
    for name, total in (("channels", channels * cluster.channel_gb_per_s), ("nvls", nvls)):
        if total > link:
            raise UserError(
                f"{name} of {total:g} GB/s together: {'PCIe' if is_pcie else 'NVLink'} of "
                f"{cluster.generation} carries {link:g}"
            )
    bus = cluster.gpus_per_node * PCIE_GB_PER_S[cluster.generation]
    if cluster.network_gb_per_s > bus:
        raise UserError(
            f"network_gb_per_s = {cluster.network_gb_per_s:g}: {cluster.gpus_per_node} GPUs reach "
            f"their network cards with at most {bus:g} GB/s (gigabytes, not gigabits, per second)"
        )


def _number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
