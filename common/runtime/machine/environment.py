"""The record of a measurement's environment: machine, software, commit and variables."""

from __future__ import annotations

import datetime
import importlib.metadata
import os
import platform
import re
import socket
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from ddplab_watch.cgroups import cpu_quota
from ddplab_watch.interfaces import interfaces
from ddplab_watch.machine_cores import own_cores

from common.runtime.group.network import (
    backend_name,
    describe_network,
    emulated_network,
    ranks_by_host,
)
from common.runtime.machine.gpus import GpuFacts, build_versions, cuda_devices, read_gpu_facts
from common.runtime.paths import git, project_root
from common.runtime.processes.process_identity import LAUNCHER, own_identity
from common.runtime.processes.ranks import current_ranks, listed_hosts
from common.runtime.wording import counted

PACKAGES = ("torch", "transformers", "datasets", "numpy", "pandas", "ddplab")
COMMIT = "DDPLAB_COMMIT"
"""Variable that names the commit of a copy of the project without its history."""
VARIABLES = ("CUDA_", "GLOO_", "MKL_", "NCCL_", "OMP_", "PYTORCH_", "SLURM_", "TORCH_")


def now() -> str:
    """Returns the present time in UTC, ISO 8601, to the second."""
    return datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")


def today() -> str:
    """Returns the date where this machine stands, for a reader; records are in UTC."""
    return datetime.datetime.now().astimezone().date().isoformat()


@dataclass(frozen=True)
class RankGroup:
    """The ranks that were joined.

    Attributes:
        hosts: the host of every rank, in rank order; empty where they were not gathered.
        ranks_per_gpu: above 1 where ranks share a GPU.
        network: name of the network between them; None for what ``describe_network`` finds.
        process_group: class that sends gradients, such as ProcessGroupNCCL; None without one.
    """

    hosts: Sequence[str] = ()
    ranks_per_gpu: int = 1
    network: str | None = None
    process_group: str | None = None


def describe_environment(
    backend: str | None = None,
    device: str | None = None,
    world_size: int | None = None,
    note: str = "",
    *,
    group: RankGroup | None = None,
) -> dict:
    """Returns all that is known of this process's environment, for ``environment.json``.

    ``hardware`` is the short form for captions, such as ``8 ranks on 2 hosts, NVIDIA H100, nccl``;
    it ends with the note. Measurements can be compared only if ``network`` and ``device_name``
    agree.

    Args:
        backend: backend that joins the ranks; None for a single device.
        device: ``cpu`` or ``cuda``; by default GPUs are described where there are any.
        world_size: ranks of the job that this process starts; by default of its own job.
        group: the ranks and their network, where this process is one of them.
    """
    group = group or RankGroup()
    ranks = current_ranks()
    devices = cuda_devices() if device != "cpu" else []
    facts = read_gpu_facts(devices) if devices else GpuFacts()
    driver = {"driver": facts.driver, "driver_cuda": facts.driver_cuda}
    device_name = name_of_device([gpu.name for gpu in devices])
    hosts = ranks_by_host(world_size, group.hosts)
    network = group.network or describe_network(
        backend_name(backend, group.process_group),
        hosts,
        ranks_per_gpu=group.ranks_per_gpu,
        device_name=device_name,
    )
    record = {
        "status": "running",
        "start_time": now(),
        "end_time": None,
        "host": socket.gethostname(),
        "process": own_identity(),
        "launched_by": os.environ.get(LAUNCHER, ""),
        "command": _command(),
        "git": _git(),
        "packages": {package: package_version(package) for package in PACKAGES},
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.release()}",
        "cpu": {"model": cpu_model(), "cores": usable_cores()},
        "cuda": driver | build_versions() if devices else None,
        "gpus": [asdict(gpu) for gpu in facts.gpus],
        "gpu_pairs": [asdict(pair) for pair in facts.pairs],
        "interconnect": _interconnect(network if backend else None),
        "network": network,
        "backend": backend,
        "process_group": group.process_group,
        "device": device,
        "device_name": device_name,
        "ranks_per_gpu": group.ranks_per_gpu,
        "note": note,
        "world_size": world_size or ranks.world_size,
        "ranks_per_node": ranks.local_world_size,
        "hosts": (emulated_network() or {}).get("hosts", len(hosts)),
        "host_names": _host_names(group.hosts, len(hosts)),
        "launcher": ranks.launcher,
        "slurm_job_id": os.environ.get("SLURM_JOB_ID"),
        "variables": {k: v for k, v in sorted(os.environ.items()) if k.startswith(VARIABLES)},
    }
    record["hardware"] = hardware_line(record)
    return record


def hardware_line(record: dict) -> str:
    """Returns one line for a caption: ranks, hosts where there are several, device and backend."""
    ranks = counted(record["world_size"], "rank")
    hosts, shared = record.get("hosts", 1), record.get("ranks_per_gpu", 1)
    if emulated_network():
        ranks += f" on {record['network']}"
    elif hosts > 1:
        ranks += f" on {counted(hosts, 'host')}"
    where = f"{record['cpu']['cores']} cores of {record['cpu']['model']}"
    if record["gpus"]:
        where = name_of_device([gpu["name"] for gpu in record["gpus"]])
    if shared > 1 and not emulated_network():  # an emulated network's name has it
        where = f"{shared} ranks on one {where}"
        ranks = "" if record["world_size"] == shared else ranks
    backend = backend_name(record["backend"], record.get("process_group"))
    parts = (ranks, where, backend, record.get("note"))
    return ", ".join(part for part in parts if part)


def name_of_device(gpus: Sequence[str]) -> str:
    """Returns the name of the GPUs, all names if they differ, or of the CPU."""
    return " + ".join(dict.fromkeys(gpus)) or cpu_model()


def usable_cores() -> int:
    """Returns the number of cores this process may use, in a job or container not always all.

    A container's quota of processor time counts as whole cores, as threads beyond it only wait.
    """
    cores, quota = len(own_cores()) or os.cpu_count() or 1, cpu_quota()
    return cores if quota is None else max(1, min(cores, int(quota)))


def cpu_model() -> str:
    """Returns the processor's name as the system gives it, or its architecture."""
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


def _command() -> str:
    """Returns the command line, with paths below the project made relative to it."""
    root = str(project_root())
    inside, itself = rf"{re.escape(root)}{os.sep}", rf"{re.escape(root)}$"
    words = (re.sub(itself, ".", re.sub(inside, "", text)) for text in sys.argv)
    return " ".join(["python", *words])


def _git() -> dict:
    """Returns the commit, and whether files differ from it; a copy without history has COMMIT."""

    def ask(*arguments: str) -> str | None:
        try:
            process = git(project_root(), *arguments, timeout_s=10)
        except (OSError, subprocess.TimeoutExpired):
            return None
        return process.stdout.strip() if process.returncode == 0 else None

    status = ask("status", "--porcelain")
    commit = ask("rev-parse", "HEAD") or os.environ.get(COMMIT)
    return {"commit": commit, "dirty": None if status is None else bool(status)}


def package_version(package: str) -> str | None:
    """Returns the installed version of a package, or None."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _host_names(rank_hosts: Sequence[str], count: int) -> list[str] | None:
    """Returns the names of the job's hosts; None if only their number is known."""
    if rank_hosts:
        return list(dict.fromkeys(rank_hosts))
    if count == 1:
        return [socket.gethostname()]
    nodes = os.environ.get("SLURM_STEP_NODELIST") or os.environ.get("SLURM_JOB_NODELIST")
    return (listed_hosts(nodes) or None) if nodes else None


def _interconnect(transport: str | None) -> dict:
    """Describes the links between hosts: InfiniBand devices and speeds of cards, where readable."""
    emulated = emulated_network()
    if emulated:
        return {"emulated": emulated, "transport": "TCP over emulated links"}
    infiniband = sorted(path.name for path in Path("/sys/class/infiniband").glob("*"))
    speeds = {card.name: card.speed_mbit for card in interfaces() if card.speed_mbit}
    links = {"infiniband": infiniband, "network_mbit_per_s": speeds}
    return links | ({"transport": transport} if transport else {})
