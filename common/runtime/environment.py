"""The record of where a number was measured: machine, software, commit and settings."""

from __future__ import annotations

import datetime
import importlib.metadata
import os
import platform
import socket
import subprocess
import sys
from pathlib import Path

from common.runtime.network import emulated_network, network_name
from common.runtime.paths import project_root
from common.runtime.ranks import current_ranks

PACKAGES = ("torch", "transformers", "datasets", "numpy", "pandas", "ddplab")
VARIABLES = ("CUDA_", "GLOO_", "MKL_", "NCCL_", "OMP_", "PYTORCH_", "SLURM_", "TORCH_")


def now() -> str:
    """The present time in UTC, ISO 8601, to the second."""
    return datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")


def describe_environment(
    backend: str | None = None,
    device: str | None = None,
    world_size: int | None = None,
    note: str = "",
) -> dict:
    """All that is known about where this process runs, ready for ``environment.json``.

    ``hardware`` is the short form for captions, such as ``2 × AMD EPYC (2 cores), gloo``; it ends
    with the ``note``, where there is something that every caption must say.
    """
    ranks = current_ranks()
    gpus = _gpus() if device != "cpu" else []
    record = {
        "status": "running",
        "start_time": now(),
        "end_time": None,
        "host": socket.gethostname(),
        "pid": os.getpid(),
        "command": _command(),
        "git": _git(),
        "packages": _versions(),
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.release()}",
        "cpu": {"model": cpu_model(), "cores": usable_cores()},
        "gpus": gpus,
        "interconnect": _interconnect(bool(gpus), backend),
        "network": network_name(backend),
        "backend": backend,
        "device": device,
        "note": note,
        "world_size": world_size or ranks.world_size,
        "ranks_per_node": ranks.local_world_size,
        "launcher": ranks.launcher,
        "slurm_job_id": os.environ.get("SLURM_JOB_ID"),
        "variables": {k: v for k, v in sorted(os.environ.items()) if k.startswith(VARIABLES)},
    }
    record["hardware"] = hardware_line(record)
    return record


def hardware_line(record: dict) -> str:
    """One line for a caption: ranks, device, backend, and the network where it was emulated."""
    size = record["world_size"]
    ranks = f"{size} rank{'s' if size != 1 else ''}"
    if emulated_network():
        ranks += f" on {record['network']}"
    cores = f"{record['cpu']['cores']} cores of {record['cpu']['model']}"
    where = record["gpus"][0]["name"] if record["gpus"] else cores
    parts = (ranks, where, record["backend"], record.get("note"))
    return ", ".join(part for part in parts if part)


def usable_cores() -> int:
    """Cores this process may run on, which a job or container can make fewer than the host's."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def cpu_model() -> str:
    """The processor's name as the system gives it, or its architecture."""
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


def _command() -> str:
    """The command line with paths below the project made relative to it."""
    root = str(project_root())
    shown = (text.replace(f"{root}{os.sep}", "").replace(root, ".") for text in sys.argv)
    return " ".join(["python", *shown])


def _git() -> dict:
    def ask(*arguments: str) -> str | None:
        try:
            done = subprocess.run(
                ["git", *arguments], cwd=project_root(), capture_output=True, text=True, timeout=10
            )
        except (OSError, subprocess.TimeoutExpired):
            return None
        return done.stdout.strip() if done.returncode == 0 else None

    status = ask("status", "--porcelain")
    return {"commit": ask("rev-parse", "HEAD"), "dirty": None if status is None else bool(status)}


def _versions() -> dict[str, str | None]:
    versions: dict[str, str | None] = {}
    for package in PACKAGES:
        try:
            versions[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            versions[package] = None
    return versions


def _gpus() -> list[dict]:
    import torch

    if not torch.cuda.is_available():
        return []
    return [
        {
            "name": torch.cuda.get_device_name(index),
            "memory_bytes": torch.cuda.get_device_properties(index).total_memory,
        }
        for index in range(torch.cuda.device_count())
    ]


def _interconnect(has_gpus: bool, backend: str | None) -> dict:
    """As far as it can be read: GPU topology, InfiniBand devices, speeds of network cards."""
    found: dict = {}
    if has_gpus:
        try:
            topology = subprocess.run(
                ["nvidia-smi", "topo", "-m"], capture_output=True, text=True, timeout=20
            )
            found["nvidia_smi_topo"] = topology.stdout.splitlines()
        except (OSError, subprocess.TimeoutExpired):
            found["nvidia_smi_topo"] = None
    emulated = emulated_network()
    if emulated:
        return found | {"emulated": emulated, "transport": "TCP over emulated links"}
    infiniband = Path("/sys/class/infiniband")
    found["infiniband"] = (
        sorted(p.name for p in infiniband.iterdir()) if infiniband.is_dir() else []
    )
    speeds = {}
    for card in sorted(Path("/sys/class/net").glob("*/speed")):
        try:
            speed = int(card.read_text())
        except (OSError, ValueError):
            continue
        if speed > 0:  # −1: the driver does not know
            speeds[card.parent.name] = speed
    found["network_mbit_per_s"] = speeds
    if network_name(backend):
        found["transport"] = network_name(backend)
    return found
