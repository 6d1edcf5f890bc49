"""The surroundings of a rank: cores, limits, memory, network and GPU, in one flat row.

``surroundings`` reads; it changes nothing, starts nothing and waits for nothing. What the system
does not tell is None, never 0.
"""

from __future__ import annotations

import hashlib
import os
import shlex
import sys
from collections.abc import Callable, Mapping
from pathlib import Path

from ddplab_watch import cgroups, interfaces, machine_cores, nvml
from ddplab_watch.files import ROOT, read_memory_bytes, read_text

COLUMNS = {
    # This process and its cores.
    "machine": (
        "equal for two ranks whose hosts run on one kernel (containers, emulated hosts), else "
        "different; a checksum, from which nothing can be read"
    ),
    "backend": "of torch's default process group: ``gloo``, ``nccl``; None without one",
    "cores": "number of cores that the process may run on (its affinity)",
    "core_list": "those cores, as Linux writes them: ``0-3,8``",
    "own_physical_cores": "physical cores that they are hyper-threads of",
    "core_numa_nodes": "NUMA nodes that they belong to: ``0-1``",
    "machine_cores": "cores of the machine that are online",
    "physical_cores": "physical cores of the machine",
    "threads": "threads that torch computes an operator with",
    "omp_num_threads": "OMP_NUM_THREADS (of a list, the first number)",
    "load_1min": "mean number of the machine's tasks that ran or wanted to, last minute",
    "cpu_mhz": "clock of the core that the process is on, now",
    "cpu_max_mhz": "its largest clock",
    # Limits.
    "cgroup_cpu_quota": "smallest quota of its cgroups, in cores; None for none",
    "cgroup_throttled_share": (
        "share of the kernel's periods (100 ms) in which a cgroup with a quota was stopped, "
        "since it was made"
    ),
    "dev_shm_bytes": "size of /dev/shm, through which loader workers and NCCL hand over data",
    "dev_shm_free_bytes": "free bytes of /dev/shm",
    "memory_bytes": "memory of the machine",
    "memory_available_bytes": "memory that new processes can have",
    "memory_limit_bytes": "smallest limit of the cgroups; None for none",
    # Since an earlier reading (``machine_cores.read_cpu_times``); None without one.
    "interval_s": "the time between the two, in s",
    "interval_own_cores": "cores that this process and those that it started computed on",
    "interval_busy_cores": (
        "cores of the machine that computed for anybody; less the own ones of all ranks, these "
        "are other jobs'"
    ),
    "interval_stolen_cores": "cores that a hypervisor gave to other machines",
    "interval_throttled_share": "as cgroup_throttled_share, of the periods in between",
    "interval_heat_stops": "times that heat has lowered the clocks of the process's cores",
    # Network.
    "interface": "the one that gloo or NCCL (over sockets) takes",
    "interface_source": "the variable that names the interface, or what it was taken from",
    "interface_mbit": "its speed in Mbit/s; None for virtual ones, and where nobody tells",
    "fastest_interface": "the fastest one that is up",
    "fastest_interface_mbit": "its speed in Mbit/s",
    "infiniband": "active ports and their rates, joined by ``; ``",
    "nccl_settings": (
        "variables of NCCL and torch that change how ranks exchange, where set: ``NAME=value`` "
        "with blanks between, quoted for a shell"
    ),
    # GPU (``nvml``).
    "gpu_uuid": "of the GPU, or of its MIG slice",
    "gpu_name": "of the GPU, or of its MIG slice",
    "gpu_bus_id": "on the PCI bus, as NVML writes it",
    "gpu_numa_node": "the NUMA node that it hangs on",
    "gpu_pcie_width": "lanes of its PCIe link, now",
    "gpu_pcie_width_max": "most lanes, in this machine",
    "gpu_pcie_generation": "generation of the link, now (an idle link is slower)",
    "gpu_pcie_generation_max": "latest generation of the link, in this machine",
    "gpu_sm_clock_mhz": "clock of its multiprocessors, now",
    "gpu_sm_clock_max_mhz": "largest clock of its multiprocessors",
    "gpu_throttle_reasons": "why it is not higher, names of NVML with blanks between; or ``none``",
    "gpu_power_limit_w": "the limit that is set, in W",
    "gpu_power_default_w": "the limit that it came with, in W",
    "gpu_utilisation_share": "share of the last second or so in which it computed",
    "gpu_mig": "True if it is split into slices, or is one",
    "gpu_compute_mode": "``DEFAULT`` lets several processes use it",
    "gpu_other_processes": "number of other processes that compute on it, other ranks included",
}
"""Column → its meaning."""
SETTINGS = (
    "NCCL_P2P_DISABLE",
    "NCCL_P2P_LEVEL",
    "NCCL_SHM_DISABLE",
    "NCCL_IB_DISABLE",
    "NCCL_IB_HCA",
    "NCCL_NET",
    "NCCL_NET_GDR_LEVEL",
    "NCCL_NVLS_ENABLE",
    "NCCL_SOCKET_IFNAME",
    "NCCL_SOCKET_NTHREADS",
    "NCCL_NSOCKS_PERTHREAD",
    "NCCL_ALGO",
    "NCCL_PROTO",
    "NCCL_MIN_NCHANNELS",
    "NCCL_MAX_NCHANNELS",
    "NCCL_NTHREADS",
    "NCCL_BUFFSIZE",
    "NCCL_DEBUG",
    "NCCL_DEBUG_SUBSYS",
    "GLOO_SOCKET_IFNAME",
    "TORCH_NCCL_BLOCKING_WAIT",
    "TORCH_DISTRIBUTED_DEBUG",
    "CUDA_LAUNCH_BLOCKING",
    "CUDA_DEVICE_MAX_CONNECTIONS",
)
"""Variables of NCCL, gloo, torch and CUDA that change how fast ranks compute or exchange."""


def surroundings(
    device_index: int | None, host: str, earlier: machine_cores.CpuTimes | None = None
) -> dict[str, object]:
    """Returns this rank's surroundings: ``COLUMNS`` with numbers, texts, booleans and None.

    Takes milliseconds. Raises nothing: what cannot be read is None.

    Args:
        device_index: the GPU that the rank computes on, as CUDA numbers it; None on a CPU.
        host: this host's name, by which gloo finds its interface.
        earlier: reading from which the columns ``interval_…`` count.
    """
    backend = _unless_it_fails(process_group_backend)
    socket_user = backend or ("gloo" if device_index is None else "nccl")
    row: dict[str, object] = dict.fromkeys(COLUMNS)
    row["backend"] = backend
    readers: list[Callable[[], Mapping[str, object]]] = [
        core_facts,
        thread_facts,
        limit_facts,
        memory_facts,
        lambda: network_facts(socket_user, host, os.environ),
        lambda: {"nccl_settings": write_settings(with_nccl_files(os.environ))},
    ]
    if earlier is not None:
        readers.append(lambda: machine_cores.used_between(earlier, machine_cores.read_cpu_times()))
    if device_index is not None:
        readers.append(lambda: nvml.gpu_facts(device_index))
    for reader in readers:
        row.update(_unless_it_fails(reader) or {})
    return row


def _unless_it_fails(reader: Callable[[], object]) -> object | None:
    """Returns what a reader returns; None where it fails: a training must not, for its watcher."""
    try:
        return reader()
    except Exception:
        return None


def process_group_backend() -> str | None:
    """Returns the default process group's backend; None without one.

    ``nccl-legacy`` is torch 2.15's name for the group that was ``nccl`` before.
    """
    dist = sys.modules.get("torch.distributed")
    if dist is None or not dist.is_available() or not dist.is_initialized():
        return None
    return str(dist.get_backend()).removesuffix("-legacy")


def core_facts(root: Path = ROOT) -> dict[str, object]:
    """Reads the columns on cores."""
    allowed, online = machine_cores.own_cores(), machine_cores.online_cores(root)
    boot = read_text(root / "proc/sys/kernel/random/boot_id")
    now_mhz, most_mhz = machine_cores.clocks_mhz(root)
    return {
        "machine": f"m{hashlib.sha256(boot.encode()).hexdigest()[:11]}" if boot else None,
        "cores": len(allowed) or None,
        "core_list": machine_cores.write_cores(allowed) or None,
        "own_physical_cores": machine_cores.physical_cores(allowed, root),
        "core_numa_nodes": machine_cores.numa_nodes(allowed, root),
        "machine_cores": len(online) or os.cpu_count(),
        "physical_cores": machine_cores.physical_cores(online, root),
        "load_1min": machine_cores.load_1min(root),
        "cpu_mhz": now_mhz,
        "cpu_max_mhz": most_mhz,
    }


def thread_facts(env: Mapping[str, str] = os.environ) -> dict[str, object]:
    """Reads the columns on threads; torch is asked where it was imported."""
    torch = sys.modules.get("torch")
    first = env.get("OMP_NUM_THREADS", "").partition(",")[0].strip()
    return {
        "threads": torch.get_num_threads() if torch else None,
        "omp_num_threads": int(first) if first.isdigit() else None,
    }


def limit_facts(root: Path = ROOT) -> dict[str, object]:
    """Reads the columns on cgroups."""
    return {
        "cgroup_cpu_quota": cgroups.cpu_quota(root),
        "cgroup_throttled_share": cgroups.throttled_share(root),
        "memory_limit_bytes": cgroups.memory_limit_bytes(root),
    }


def memory_facts(root: Path = ROOT) -> dict[str, object]:
    """Reads the columns on memory."""
    available, total = read_memory_bytes(root)
    shared = root / "dev/shm"
    space = os.statvfs(shared) if shared.is_dir() else None
    return {
        "memory_bytes": total,
        "memory_available_bytes": available,
        "dev_shm_bytes": space.f_blocks * space.f_frsize if space else None,
        "dev_shm_free_bytes": space.f_bavail * space.f_frsize if space else None,
    }


def network_facts(
    backend: str, host: str, env: Mapping[str, str], root: Path = ROOT
) -> dict[str, object]:
    """Reads the columns on the network, for ranks that exchange by this backend."""
    candidates = interfaces.interfaces(root)
    speeds = {interface.name: interface.speed_mbit for interface in candidates}
    settings = with_nccl_files(env, root)
    used, source = interfaces.interface_in_use(backend, host, settings, root)
    fastest = interfaces.fastest(candidates)
    return {
        "interface": used,
        "interface_source": source,
        "interface_mbit": speeds.get(used),
        "fastest_interface": fastest.name if fastest else None,
        "fastest_interface_mbit": fastest.speed_mbit if fastest else None,
        "infiniband": interfaces.infiniband(root),
    }


def with_nccl_files(env: Mapping[str, str], root: Path = ROOT) -> dict[str, str]:
    """Returns the variables, with those of NCCL's own files that they do not set.

    The files are /etc/nccl.conf and, which counts more, a user's: the one that NCCL_CONF_FILE
    names, else ~/.nccl.conf.
    """
    user_file = env.get("NCCL_CONF_FILE") or f"{env.get('HOME', '')}/.nccl.conf"
    settings = {}
    for path in (root / "etc/nccl.conf", root / user_file.lstrip("/")):
        for line in (read_text(path) or "").splitlines():
            name, equals, value = line.partition("#")[0].partition("=")
            if equals:
                settings[name.strip()] = value.strip()
    return {**settings, **env}


def write_settings(env: Mapping[str, str]) -> str | None:
    """Returns those of ``SETTINGS`` that are set as text; None for none."""
    words = (f"{name}={shlex.quote(env[name])}" for name in SETTINGS if name in env)
    return " ".join(words) or None
