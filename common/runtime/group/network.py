"""The network that joins the ranks, as far as it is known: loopback, emulated or a real one."""

from __future__ import annotations

import json
import os
import socket
from collections import Counter
from collections.abc import Mapping, MutableMapping, Sequence

from common.errors import UserError
from common.runtime.processes.ranks import current_ranks
from common.runtime.wording import counted

OVER_LOOPBACK = "TCP over loopback"
EMULATED_NETWORK = "DDPLAB_EMULATED_NETWORK"
GROUP_CHOICE = "TORCH_DIST_USE_NCCL2"
"""Torch's variable, read once, when a process first uses the name ``nccl``."""
UNKNOWN_GROUP = "implementation not known"
OLD_GROUP = "ProcessGroupNCCL"
"""The process group of all measurements over NCCL whose record does not name another."""


def emulated_network(env: Mapping[str, str] = os.environ) -> dict | None:
    """Returns the emulated network that this process runs in, as its switch describes it, or None.

    Keys: hosts, rates_bit_per_s, ranks_per_host, delay_ms, burst_bytes, congestion_control and
    probe (the rate of a plain TCP stream on each link, in bit/s of payload).
    """
    return json.loads(env[EMULATED_NETWORK]) if EMULATED_NETWORK in env else None


def ranks_on_machine(ranks_on_host: int) -> int:
    """Returns the number of ranks that share this machine's memory and cores.

    Emulated hosts are one machine.
    """
    emulated = emulated_network()
    return ranks_on_host * (emulated["hosts"] if emulated else 1)


def require_interfaces(env: Mapping[str, str] = os.environ) -> None:
    """Raises UserError where GLOO_SOCKET_IFNAME names an interface that this host has not."""
    legal = [name for _, name in socket.if_nameindex()]
    for name in filter(None, env.get("GLOO_SOCKET_IFNAME", "").split(",")):
        if name not in legal:
            raise UserError(
                f"GLOO_SOCKET_IFNAME={name}: {socket.gethostname()} has no such interface; it has "
                f"{', '.join(legal)}",
                this_rank_only=True,
            )


def give_gloo_the_interface_of_nccl(
    env: MutableMapping[str, str] = os.environ, interfaces: Sequence[str] | None = None
) -> None:
    """Sets GLOO_SOCKET_IFNAME to NCCL_SOCKET_IFNAME where that names one interface of this host.

    Ranks on NCCL exchange objects over gloo. Its own choice, the address of the host's name, may be
    one that other nodes do not reach. NCCL also takes lists, prefixes and exclusions, which gloo
    does not; these change nothing here, nor does anything where the user named gloo's interface.

    Args:
        interfaces: names of this host's interfaces; by default they are looked up.
    """
    if interfaces is None:
        interfaces = [name for _, name in socket.if_nameindex()]
    named = env.get("NCCL_SOCKET_IFNAME")
    if named in interfaces:
        env.setdefault("GLOO_SOCKET_IFNAME", named)


def backend_name(backend: str | None, group_class: str | None = None) -> str | None:
    """Returns ``gloo``, ``nccl``, or ``nccl (ProcessGroupNCCL2)`` for another group than the old.

    DDP overlaps over one and may not over the other (``nccl.py``), so measurements over
    them cannot be compared.

    Args:
        group_class: class of torch's process group; None where it is not recorded.
    """
    if backend != "nccl" or group_class in (None, OLD_GROUP):
        return backend
    return f"{backend} ({group_class})"


def describe_network(
    backend: str | None,
    hosts: Sequence[int],
    *,
    ranks_per_gpu: int = 1,
    device_name: str | None = None,
    env: Mapping[str, str] = os.environ,
) -> str | None:
    """Returns a short name of the network between the ranks; None where nothing is exchanged.

    Measurements over networks with different names are not comparable.

    Args:
        backend: name that ``backend_name`` returns.
        hosts: number of ranks on each host.
        ranks_per_gpu: above 1 where ranks share a GPU, which the name then tells.
        device_name: name of the GPU that ranks share.
        env: variables of a rank, which say whether its network is emulated.
    """
    emulated = emulated_network(env)
    name = layout_name(backend, hosts)
    if emulated:
        name = emulated_name(
            emulated["hosts"], emulated["rates_bit_per_s"], delay_ms=emulated["delay_ms"]
        )
    if ranks_per_gpu == 1:
        return name
    where = name if emulated or len(hosts) > 1 else backend
    return f"{where}, {ranks_per_gpu} ranks on one {device_name or 'GPU'}"


def layout_name(backend: str | None, hosts: Sequence[int]) -> str | None:
    """Returns the name of a network that is not emulated, with the arguments of the whole name.

    Examples: ``NCCL, 2 hosts × 4 ranks``, ``NCCL, hosts with 4 + 2 ranks``, ``TCP over loopback``.
    """
    if backend is None or not backend.startswith(("gloo", "nccl")):
        return None
    if backend == "gloo" and len(hosts) == 1:
        return OVER_LOOPBACK
    if sum(hosts) == 1:
        return None
    library = backend.replace("nccl", "NCCL")
    if len(set(hosts)) > 1:
        return f"{library}, hosts with {' + '.join(map(str, hosts))} ranks"
    return f"{library}, {counted(len(hosts), 'host')} × {counted(hosts[0], 'rank')}"


def ranks_by_host(world_size: int | None, rank_hosts: Sequence[str]) -> tuple[int, ...]:
    """Returns the number of ranks on each host of the job, in the order of the hosts.

    If hosts were not gathered, each is assumed to have as many ranks as this one, and the last host
    the rest. A process that is alone starts its ranks on its own host.

    Args:
        world_size: ranks of the job that this process starts; by default of its own job.
        rank_hosts: the host of every rank, in rank order; empty where they were not gathered.
    """
    if rank_hosts:
        return tuple(Counter(rank_hosts).values())
    ranks = current_ranks()
    if ranks.world_size == 1:
        return (world_size or 1,)
    hosts, remainder = divmod(ranks.world_size, ranks.local_world_size)
    return (ranks.local_world_size,) * hosts + ((remainder,) if remainder else ())


def emulated_name(hosts: int, rates_bit_per_s: Sequence[float], *, delay_ms: float) -> str:
    """Returns ``2 emulated hosts at 1 Gbit/s, 5 ms delay``, with all rates where they differ."""
    unit, name = (1e9, "Gbit/s") if max(rates_bit_per_s) >= 1e9 else (1e6, "Mbit/s")
    printed = rates_bit_per_s if len(set(rates_bit_per_s)) > 1 else rates_bit_per_s[:1]
    rates = ", ".join(f"{rate / unit:g}" for rate in printed)
    delay = f", {delay_ms:g} ms delay" if delay_ms else ""
    return f"{counted(hosts, 'emulated host')} at {rates} {name}{delay}"
