"""Causes in how NCCL connects GPUs and hosts, from its log.

What the machine is (its topology) and what a container or a setting keeps a job from using are told
apart: the first can only be worked around, the second is mended.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

from common.diagnose.causes.settings import Signal, of_signals
from common.diagnose.evidence.case import Verdict
from common.diagnose.evidence.evidence import NotJudged
from common.diagnose.evidence.left_behind import LeftBehind
from common.runtime.wording import counted
from common.traces.logs.nccl_log import NcclLog

MOST_WARNINGS = 5
NO_LOG = "no log of NCCL (NCCL_DEBUG=INFO)"
CONTAINER, NETWORK, RANKS = "container", "network", "ranks"
OPEN_DEVICES = (
    "give the container the devices: docker run --device=/dev/infiniband --cap-add=IPC_LOCK "
    "--ulimit memlock=-1 (Kubernetes: the RDMA device plugin)"
)


@dataclass(frozen=True)
class Meaning:
    """What a warning of NCCL means, and the change; ``kind`` says which cause it belongs to."""

    pattern: str
    kind: str
    sentence: str
    change: str
    level: str = "high"


MEANINGS = (
    Meaning(
        r"Call to ibv_open_device failed",
        CONTAINER,
        "an InfiniBand device is there and cannot be opened",
        OPEN_DEVICES,
    ),
    Meaning(
        r"failed to extend (\S+) to (\d+) bytes|creating shared memory segment",
        CONTAINER,
        "shared memory is too small for NCCL",
        "a larger /dev/shm: docker run --shm-size=8g (Kubernetes: an emptyDir of medium Memory)",
    ),
    Meaning(
        r"ibv_(?:reg_mr|create_cq|create_qp|alloc_pd)\w* failed.*Cannot allocate memory",
        CONTAINER,
        "memory cannot be locked for InfiniBand",
        "docker run --ulimit memlock=-1 --cap-add=IPC_LOCK (Slurm: PropagateResourceLimitsExcept="
        "MEMLOCK)",
    ),
    Meaning(
        r"no (?:socket )?interface found|No IP interface found",
        CONTAINER,
        "NCCL finds no network interface that it may use",
        "name one that the container has (ip addr): NCCL_SOCKET_IFNAME; docker run --network=host",
    ),
    Meaning(
        r"Could not find real path of /sys",
        CONTAINER,
        "NCCL cannot see /sys, and so not how devices are connected",
        "let the container see /sys, or name a topology: NCCL_TOPO_FILE",
        "medium",
    ),
    Meaning(
        r"P2P is disabled between",
        CONTAINER,
        "GPUs that are connected may not copy to each other",
        "turn off ACS in the firmware or the hypervisor; all GPUs of the host in one container; "
        "unset NCCL_P2P_DISABLE",
    ),
    Meaning(
        r"Duplicate GPU detected",
        RANKS,
        "two ranks use one GPU",
        "torch.cuda.set_device(int(os.environ['LOCAL_RANK'])) before the process group is made",
    ),
    Meaning(
        r"Got completion from peer .*(?:status=12|error 12)\b",
        NETWORK,
        "a peer did not answer over InfiniBand",
        "look at that peer: its process first, then cable, port (ibstat, perfquery) and GID "
        "(NCCL_IB_GID_INDEX for RoCE)",
        "medium",
    ),
    Meaning(
        r"async (?:fatal |error )?event|async fatal event",
        NETWORK,
        "an InfiniBand port or adapter reported an error",
        "look at the port (ibstat, dmesg): a cable or a switch",
    ),
    Meaning(
        r"No route to host|Connection timed out|Connection refused|connect to .* failed",
        NETWORK,
        "hosts cannot reach each other",
        "let NCCL use an interface over which all hosts see each other (NCCL_SOCKET_IFNAME), and "
        "open the ports between them",
        "medium",
    ),
    Meaning(
        r"[Cc]onnection (?:closed|reset) by",
        NETWORK,
        "a peer closed its connection",
        "look for the rank that ended first; this follows from it",
        "low",
    ),
)


def _judged_log(job: LeftBehind) -> NcclLog:
    if not job.printed.nccl.lines:
        raise NotJudged(NO_LOG)
    return job.printed.nccl


def nccl_connections(job: LeftBehind) -> Verdict | None:
    """Judges whether NCCL connects ranks by slower ways than it could, and what it warned of."""
    log = _judged_log(job)
    signals = [*_detours(job), *_sockets(log)]
    for adapter, where in log.no_direct.items():
        signals.append(
            Signal(
                f"{adapter} cannot read a GPU's memory by itself (GPUDirect RDMA is off) {where}.",
                "load nvidia_peermem on the host, or a driver and kernel with DMA-BUF",
                "medium",
            )
        )
    signals += _of_kind(log, "")
    if not signals and not log.largest.transports:
        raise NotJudged("NCCL's log has no line on how ranks are connected (NCCL_DEBUG=INFO)")
    return of_signals("nccl-connections", "NCCL connects ranks by slow ways, or warns", signals)


def _detours(job: LeftBehind) -> Iterator[Signal]:
    """Yields pairs of GPUs of one host that do not copy to each other directly."""
    log, links = job.printed.nccl, _links(job)
    ranks = log.largest
    for transport, way in (("SHM", "through host memory (via SHM)"), ("NET", "over the network")):
        pairs = ranks.pairs(transport, one_host=True)
        if not pairs:
            continue
        first, second = pairs[0]
        devices = sorted(ranks.devices.get(rank, -1) for rank in pairs[0])
        link = links.get((devices[0], devices[1]), "")
        level = "medium" if transport == "SHM" else "high"
        change = (
            "let them copy directly: nvidia-smi topo -m shows how they are connected; unset "
            "NCCL_P2P_DISABLE and NCCL_P2P_LEVEL, turn off ACS"
            if transport == "SHM"
            else "unset NCCL_P2P_DISABLE and NCCL_SHM_DISABLE; a larger /dev/shm for containers"
        )
        why = ""
        for name, values in (("NCCL_P2P_DISABLE", ("1",)), ("NCCL_P2P_LEVEL", ("LOC", "0"))):
            value, where = log.settings.get(name, ("", ""))
            if value in values:
                why, level, change = f"; {name}={value} is set {where}", "high", f"unset {name}"
        if link.startswith("NV"):
            why, level = f"{why}, though NVLink connects them ({link})", "high"
        elif link in ("SYS", "SOC", "NODE", "PHB") and not why:
            why, level = f"; no switch connects them ({link}), so it can be no other way", "low"
            change = "ranks on GPUs of one PCIe switch where there are some (CUDA_VISIBLE_DEVICES)"
        yield Signal(
            f"{counted(len(pairs), 'pair')} of GPUs of one host exchange {way}, such as ranks "
            f"{first} and {second} of {ranks.hosts[first]}{why} {ranks.places[pairs[0]]}.",
            change,
            level,
        )


def _links(job: LeftBehind) -> dict[tuple[int, int], str]:
    """Returns the links between GPUs; where several hosts print theirs, those that all have."""
    matrices = [topology.between_gpus() for topology in job.printed.smi.topologies]
    first = matrices[0] if matrices else {}
    return {
        pair: link
        for pair, link in first.items()
        if all(other.get(pair, link) == link for other in matrices)
    }


def _sockets(log: NcclLog) -> Iterator[Signal]:
    sockets = log.largest.pairs("NET/Socket", one_host=False)
    if not sockets or log.not_opened:  # what keeps NCCL from InfiniBand is the container's
        return
    why = f"; NCCL found no InfiniBand {log.no_infiniband}" if log.no_infiniband else ""
    change = (
        "use InfiniBand or RoCE where there is some (ibstat; the container needs "
        "/dev/infiniband), or the fastest interface: NCCL_SOCKET_IFNAME"
    )
    for name in ("NCCL_IB_DISABLE", "NCCL_NET"):
        value, where = log.settings.get(name, ("0", ""))
        if value not in ("0", "IB"):
            why, change = f"; {name}={value} is set {where}", f"unset {name}"
    yield Signal(
        f"{counted(len(sockets), 'pair')} of ranks of two hosts exchange over sockets (NET/Socket)"
        f"{why} {log.largest.places[sockets[0]]}.",
        change,
        "medium",
    )


def _of_kind(log: NcclLog, kind: str) -> Iterator[Signal]:
    """Yields the warnings that belong to a cause; those that no cause knows for the empty kind."""
    remaining = MOST_WARNINGS
    ranked = sorted(log.warnings.items(), key=lambda item: -item[1].count)
    for text, warned in ranked:
        meaning = next((m for m in MEANINGS if re.search(m.pattern, text)), None)
        if (meaning.kind if meaning else "") != kind or not remaining:
            continue
        remaining -= 1
        host = f" on {warned.host}" if warned.host else ""
        times = f"NCCL warned {counted(warned.count, 'time')}{host}: {text} {warned.where}"
        if meaning:
            yield Signal(f"{times}: {meaning.sentence}.", meaning.change, meaning.level)
        else:
            yield Signal(f"{times}.", "look the warning up", "low")


def nccl_container(job: LeftBehind) -> Verdict | None:
    """Judges whether a container or a limit keeps NCCL from what the machine has."""
    log = _judged_log(job)
    signals, used = [], bool(log.networks & {"IB", "IBext"})
    if log.no_library and len(set(log.largest.hosts.values())) > 1:
        signals.append(
            Signal(
                f"NCCL cannot load libibverbs {log.no_library}, and so does not look for "
                "InfiniBand at all.",
                "install it in the image (rdma-core, libibverbs1) where the hosts have InfiniBand",
                "medium",
            )
        )
    for device, warned in log.not_opened.items():
        none = f" (that NCCL then finds no device {log.no_infiniband} follows from it)"
        none = none if log.no_infiniband else "; others could, and are used" if used else ""
        signals.append(
            Signal(
                f"{device} is there and could not be opened on {warned.host or 'a host'} "
                f"{warned.where}{none}.",
                OPEN_DEVICES,
                "low" if used else "high",
            )
        )
    signals += _of_kind(log, CONTAINER)
    title = "a container or a limit keeps NCCL from what the machine has"
    return of_signals("nccl-container", title, signals)


def nccl_errors(job: LeftBehind) -> Verdict | None:
    """Judges whether NCCL's connections broke, or ranks share a GPU."""
    log = _judged_log(job)
    signals = [*_of_kind(log, RANKS), *_of_kind(log, NETWORK)]
    return of_signals("nccl-errors", "NCCL's connections failed", signals)
