"""This process's rank and the world size, from torchrun's variables or Slurm's, else 0 of 1."""

from __future__ import annotations

import os
import re
import socket
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass

from common.errors import UserError


@dataclass(frozen=True)
class Ranks:
    """The place of this process among the processes of the job."""

    rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    local_world_size: int = 1
    launcher: str = "single"

    @property
    def is_main(self) -> bool:
        """Returns True on rank 0, which prints and writes the files."""
        return self.rank == 0


def current_ranks(env: Mapping[str, str] = os.environ) -> Ranks:
    """Reads the ranks from torchrun's variables, else from those of a Slurm step.

    A batch script's own shell also has ``SLURM_PROCID``; it is one process, not a rank, unless
    ``srun`` started it (then ``SLURM_STEP_ID`` is set).

    Raises:
        UserError: a variable is missing or is not an integer, or the rank is not below the world
            size.
    """
    if "RANK" in env or "WORLD_SIZE" in env:
        ranks = Ranks(
            rank=_integer(env, "RANK"),
            world_size=_integer(env, "WORLD_SIZE"),
            local_rank=_integer(env, "LOCAL_RANK"),
            local_world_size=_ranks_on_this_node(env),
            launcher="torchrun",
        )
    elif "SLURM_PROCID" in env and not _is_batch_shell(env):
        size = "SLURM_STEP_NUM_TASKS" if "SLURM_STEP_NUM_TASKS" in env else "SLURM_NTASKS"
        ranks = Ranks(
            rank=_integer(env, "SLURM_PROCID"),
            world_size=_integer(env, size, default=1),
            local_rank=_integer(env, "SLURM_LOCALID"),
            local_world_size=tasks_on_this_node(env),
            launcher="slurm",
        )
    else:
        return Ranks()
    if not 0 <= ranks.rank < ranks.world_size:
        raise UserError(f"rank {ranks.rank} of {ranks.world_size}: a rank is below the world size")
    if not 0 <= ranks.local_rank < ranks.local_world_size:
        raise UserError(
            f"local rank {ranks.local_rank} of {ranks.local_world_size} on this node: a local rank "
            "is below the node's number of ranks"
        )
    return ranks


def rendezvous_environment(env: Mapping[str, str] = os.environ) -> dict[str, str]:
    """Returns ``MASTER_ADDR`` and ``MASTER_PORT`` of a job, as init_process_group reads them.

    torchrun sets both. Under Slurm the address is the step's first host and the port comes from
    the job and step ids, so that two jobs on one node do not meet.

    Raises:
        UserError: neither torchrun's nor Slurm's variables are set.
    """
    if "MASTER_ADDR" in env and "MASTER_PORT" in env:
        return {"MASTER_ADDR": env["MASTER_ADDR"], "MASTER_PORT": env["MASTER_PORT"]}
    hosts = env.get("SLURM_STEP_NODELIST") or env.get("SLURM_JOB_NODELIST")
    if not hosts:
        raise UserError(
            "no rendezvous: MASTER_ADDR and MASTER_PORT are not set; start with torchrun"
        )
    job = _integer(env, "SLURM_JOB_ID", 0) * 31 + _integer(env, "SLURM_STEP_ID", 0)
    return {
        "MASTER_ADDR": env.get("MASTER_ADDR") or _first_host(hosts),
        "MASTER_PORT": env.get("MASTER_PORT", str(20000 + job % 12000)),
    }


def node_address(node: str) -> str:
    """Returns a Slurm node's name if it resolves, as almost everywhere, else Slurm's address."""
    try:
        socket.getaddrinfo(node, None)
    except OSError:
        match = re.search(r"\bNodeAddr=(\S+)", _ask_scontrol("node", node))
        return match[1] if match else node
    return node


def meeting_port(env: Mapping[str, str]) -> int:
    """Returns ``MASTER_PORT``; raises UserError where it is no port."""
    port = _integer(env, "MASTER_PORT")
    if not 0 < port < 2**16:
        raise UserError(f"MASTER_PORT={port} is no port; legal are 1 to {2**16 - 1}")
    return port


def free_port() -> int:
    """Finds a port of this machine that nobody listens on now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def _ranks_on_this_node(env: Mapping[str, str]) -> int:
    """Returns ``LOCAL_WORLD_SIZE``; where only the others were set, what Slurm says."""
    if "LOCAL_WORLD_SIZE" in env:
        return _integer(env, "LOCAL_WORLD_SIZE")
    on_node, local_rank = tasks_on_this_node(env), _integer(env, "LOCAL_RANK")
    if local_rank and on_node == 1:
        raise UserError(
            f"LOCAL_WORLD_SIZE is not set, though LOCAL_RANK is {local_rank}: set it to the number "
            "of ranks on this node, or use torchrun",
            this_rank_only=True,
        )
    return on_node


def _integer(env: Mapping[str, str], name: str, default: int | None = None) -> int:
    if name not in env:
        if default is None:
            raise UserError(f"{name} is not set, though other ranks' variables are; use torchrun")
        return default
    try:
        return int(env[name])
    except ValueError:
        raise UserError(f"{name}={env[name]!r} is not an integer") from None


def _is_batch_shell(env: Mapping[str, str]) -> bool:
    in_step = "SLURM_STEP_ID" in env or "SLURM_STEP_NUM_TASKS" in env
    return env.get("ENVIRONMENT") == "BATCH" and not in_step


def tasks_on_this_node(env: Mapping[str, str]) -> int:
    """Returns the number of tasks on this node, from Slurm's list such as ``4(x2),3``."""
    if "SLURM_STEP_TASKS_PER_NODE" in env or "SLURM_TASKS_PER_NODE" in env:
        text = env.get("SLURM_STEP_TASKS_PER_NODE") or env["SLURM_TASKS_PER_NODE"]
        counts: list[int] = []
        for part in text.split(","):
            match = re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", part.strip())
            if match is None:
                raise UserError(f"cannot read Slurm's tasks per node {text!r}; like 4(x2),3")
            counts += [int(match[1])] * int(match[2] or 1)
        node = _integer(env, "SLURM_NODEID", default=0)
        if node < len(counts):
            return counts[node]
    return _integer(env, "SLURM_NTASKS_PER_NODE", default=1)


def listed_hosts(hosts: str) -> list[str]:
    """Returns the hosts of a Slurm host list such as ``n[1-2]``; none if there is no Slurm."""
    return _ask_scontrol("hostnames", hosts).split()


def _first_host(hosts: str) -> str:
    """Returns the first host of a Slurm host list, whose full grammar only ``scontrol`` knows."""
    listed = listed_hosts(hosts)
    return listed[0] if listed else re.sub(r"\[(\d+).*", r"\1", hosts.split(",")[0])


def _ask_scontrol(*what: str) -> str:
    """Returns the output of ``scontrol show``; empty where no Slurm answers."""
    try:
        process = subprocess.run(
            ["scontrol", "show", *what], capture_output=True, text=True, check=True, timeout=30
        )
    except (OSError, subprocess.SubprocessError):
        return ""
    return process.stdout
