"""The placement of a job's ranks on hosts and devices, and the mistakes in it.

It is read from the variables that torchrun and Slurm set, so that a placement can be checked before
a GPU is touched (and on a machine without one).
"""

from __future__ import annotations

import itertools
import os
import socket
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from common.runtime.machine.device import NO_GPU
from common.runtime.processes.ranks import current_ranks, tasks_on_this_node


@dataclass(frozen=True)
class Placement:
    """One rank's place.

    Attributes:
        device: ``GPU 3`` (the entry of CUDA_VISIBLE_DEVICES), ``cpu`` where none is visible, or
            ``none`` for a local rank beyond the visible devices.
        identity: equal for two ranks on one device: its UUID where CUDA tells it (each of several
            containers may call its own GPU 0), else the device.
        visible: CUDA_VISIBLE_DEVICES, or None where it is not set.
        launchers_on_host: tasks that Slurm started on the host, each with ranks of its own.
        ranks_per_launcher: ranks that this rank's launcher started on the host.
        granted_gpus: GPUs that Slurm gave the job on this host, or None where it does not say.
    """

    rank: int
    host: str
    local_rank: int
    device: str
    identity: str
    visible: str | None
    launchers_on_host: int
    ranks_per_launcher: int
    granted_gpus: int | None


def own_placement(
    env: Mapping[str, str] = os.environ, gpus: Sequence[str] = (), ranks_per_gpu: int = 1
) -> Placement:
    """Returns this rank's placement.

    Args:
        gpus: UUIDs of the GPUs that CUDA shows this rank, where it was asked.
        ranks_per_gpu: above 1 where ranks share GPUs on purpose: local ranks take turns on them.
    """
    ranks = current_ranks(env)
    visible = env.get("CUDA_VISIBLE_DEVICES")
    devices = [str(i) for i in range(len(gpus))] if visible is None else _entries(visible)
    turn = ranks.local_rank
    if ranks_per_gpu > 1 and devices:
        turn %= len(devices)
    device = _device(devices, turn)
    index = 0 if len(gpus) == 1 else turn
    torchrun = ranks.launcher == "torchrun"
    in_step = "SLURM_STEP_ID" in env or "SLURM_STEP_NUM_TASKS" in env
    granted = env.get("SLURM_GPUS_ON_NODE")
    return Placement(
        rank=ranks.rank,
        host=env.get("SLURMD_NODENAME") or socket.gethostname(),
        local_rank=ranks.local_rank,
        device=device,
        identity=gpus[index] if index < len(gpus) else device,
        visible=visible,
        launchers_on_host=tasks_on_this_node(env) if torchrun and in_step else 1,
        ranks_per_launcher=ranks.local_world_size,
        granted_gpus=int(granted) if granted and granted.isdigit() else None,
    )


def _entries(visible: str) -> list[str]:
    """Returns the devices that CUDA shows: those before an invalid entry."""
    entries = (entry.strip() for entry in visible.split(","))
    return list(itertools.takewhile(lambda entry: entry not in NO_GPU, entries))


def _device(devices: Sequence[str], local_rank: int) -> str:
    if not devices:
        return "cpu"
    if len(devices) == 1:  # Slurm's --gpus-per-task shows each rank its own GPU only
        return f"GPU {devices[0]}"
    return f"GPU {devices[local_rank]}" if local_rank < len(devices) else "none"


def too_many_workers(placement: Placement, ranks_per_gpu: int = 1) -> list[str]:
    """Returns a sentence if more workers run on the host than its GPUs allow, else nothing.

    All ranks of a host find the same. The check exchanges nothing with other ranks: if there are
    too many launchers, they cannot reach each other.
    """
    workers = placement.launchers_on_host * placement.ranks_per_launcher
    if not placement.granted_gpus or workers <= placement.granted_gpus * ranks_per_gpu:
        return []
    how = ""
    if placement.launchers_on_host > 1:
        how = (
            f" ({placement.launchers_on_host} srun tasks, each with a torchrun that starts "
            f"{placement.ranks_per_launcher})"
        )
    return [
        f"{placement.host}: {workers} workers for {placement.granted_gpus} GPUs{how}; start one "
        "torchrun on each node (srun --ntasks-per-node=1), or one rank per GPU without torchrun"
    ]


def placement_problems(placements: Sequence[Placement], ranks_per_gpu: int = 1) -> list[str]:
    """Returns a sentence with the remedy for each mistake: too many workers, shared devices.

    ``ranks_per_gpu`` ranks may share a GPU; it is above 1 only where gloo joins ranks that share
    GPUs on purpose.
    """
    problems = []
    for host in dict.fromkeys(placement.host for placement in placements):
        on_host = [placement for placement in placements if placement.host == host]
        problems += too_many_workers(on_host[0], ranks_per_gpu)
        problems += [
            f"{host}: local rank {placement.local_rank} has no device (CUDA_VISIBLE_DEVICES="
            f"{placement.visible}); start one rank per GPU"
            for placement in on_host
            if placement.device == "none"
        ]
        used: dict[str, list[int]] = {}
        for placement in on_host:
            if placement.device in ("cpu", "none"):
                continue
            sharing = used.setdefault(placement.identity, [])
            sharing.append(placement.rank)
            if len(sharing) > ranks_per_gpu:
                ranks = " and ".join(map(str, sharing))
                rule = "one rank" if ranks_per_gpu == 1 else f"{ranks_per_gpu} ranks"
                problems.append(
                    f"{host}: ranks {ranks} share {placement.device}; start {rule} per GPU"
                )
    return problems


def split_groups(hosts: Sequence[str], size: int) -> list[str]:
    """Returns a sentence for each group of ranks on several hosts, though one host has as many.

    Args:
        hosts: host of every rank, in rank order.
        size: ranks of a group, which follow each other.
    """
    if size > max(Counter(hosts).values()):
        return []  # as was asked for
    problems = []
    for first in range(0, len(hosts), size):
        on = list(dict.fromkeys(hosts[first : first + size]))
        if len(on) > 1:
            problems.append(
                f"the group of ranks {first} to {first + size - 1} is on hosts {', '.join(on)}; "
                "number the ranks host by host (torchrun, or srun --distribution=block), in groups "
                "that divide those of a host"
            )
    return problems
