"""The GPUs in ``ddplab doctor``: what they are, and what would break or slow a job there, and why.

Each check goes from facts to a row, or to None where the question does not arise.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from common.runtime.group.network import GROUP_CHOICE
from common.runtime.machine.gpus import Clock, Gpu, GpuFacts, GpuPair, Nearest
from common.runtime.wording import counted

if TYPE_CHECKING:
    from common.runtime.group.overlap_probe import Tried

OVERLAP = "overlap over NCCL"
SHARED_MEMORY = Path("/dev/shm")
SHARED_MEMORY_BYTES = 2**30
"""NVIDIA's recommendation for containers that run NCCL (``--shm-size=1g``)."""
LARGEST_MODEL = "gpt2-large"
STATE_BYTES = 12
"""Bytes per parameter: the weight and both moments of AdamW, in float32."""


@dataclass(frozen=True)
class Check:
    """A feature that works here or not; ``detail`` says why, or what would make it work."""

    feature: str
    works: bool
    detail: str
    required: bool = False


def driver_for_build(
    driver: str | None, driver_cuda: str | None, build: str | None
) -> Check | None:
    """Checks that the driver can run this torch; all CUDA versions of one major go together."""
    if not driver_cuda or not build:
        return None
    versions = f"driver {driver or 'of unknown version'} runs CUDA {driver_cuda}"
    works = int(driver_cuda.split(".")[0]) >= int(build.split(".")[0])
    if works:
        return Check("driver", True, f"{versions}, torch was built with {build}")
    return Check(
        "driver",
        False,
        f"{versions}, too old for this torch, built with {build}: update it, or install a torch "
        f"built with CUDA {driver_cuda.split('.')[0]} (sbatch/README.md)",
    )


def several_processes(gpus: Sequence[Gpu]) -> Check | None:
    """Checks that a second process may use a GPU, such as a second rank or a notebook."""
    feature = "shared GPUs"
    modes = {gpu.compute_mode for gpu in gpus} - {None}
    if not modes:
        return None
    strict = sorted(modes - {"DEFAULT"})
    if not strict:
        return Check(feature, True, "compute mode DEFAULT")
    allowed = "no process" if "PROHIBITED" in strict else "one process"
    return Check(
        feature,
        False,
        f"compute mode {' and '.join(strict)}: {allowed} a GPU, so two ranks on one, or a notebook "
        "left open beside a job, fail; an administrator sets DEFAULT with nvidia-smi -c 0",
    )


def mig_slices(gpus: Sequence[Gpu]) -> Check | None:
    """Checks for slices of GPUs: they have a part of the memory, and a process sees only one."""
    slices = [gpu for gpu in gpus if gpu.mig_slice]
    if not slices:
        return None
    sizes = {f"{gpu.memory_bytes / 2**30:.1f} GiB" for gpu in slices if gpu.memory_bytes}
    return Check(
        "whole GPUs",
        False,
        f"{counted(len(slices), 'MIG slice')} of {' or '.join(sorted(sizes)) or 'unknown size'}: "
        "CUDA shows a process one, so one rank each; choose a model that fits, and for several "
        "ranks whole GPUs or --backend gloo (NCCL between slices was never tried here)",
    )


def reachable_peers(listed: int | None, granted: int) -> Check | None:
    """Checks that a rank can open its node's other GPUs, as NCCL does to copy between them.

    Args:
        listed: GPUs that the driver lists: those a cgroup hides are not among them, those that
            CUDA_VISIBLE_DEVICES leaves out are (NCCL reaches them, p2pCanConnect in its p2p.cc).
        granted: GPUs that Slurm gave the job on this node; 0 outside a job.
    """
    if listed is None or granted < 2:
        return None
    feature = "peers reachable"
    if listed >= granted:
        return Check(feature, True, f"all {granted} granted GPUs")
    return Check(
        feature,
        False,
        f"{listed} of {granted} granted GPUs (--gpus-per-task hides the others), so NCCL copies "
        "through host memory; use --gpus-per-node with --gpu-bind=none",
    )


def peer_access(pairs: Sequence[GpuPair]) -> Check | None:
    """Checks that each GPU can read the others' memory."""
    answered = [pair for pair in pairs if pair.peer_to_peer is not None]
    if not answered:
        return None
    feature = "peer-to-peer"
    off = [pair for pair in answered if pair.peer_to_peer != "ok"]
    if not off:
        return Check(feature, True, f"between {counted(len(answered), 'pair')} of GPUs")
    names = ", ".join(f"{pair.first}–{pair.second}" for pair in off)
    reasons = " and ".join(sorted({pair.peer_to_peer for pair in off}))
    return Check(
        feature,
        False,
        f"not between GPUs {names} ({reasons}): NCCL copies through host memory there, and "
        "measures the host's speed; choose GPUs that NVLink or one PCIe switch joins",
    )


def overlap(used: Tried, default: Tried | None) -> Check:
    """Checks that DDP's exchange over NCCL runs beside the backward pass.

    Args:
        used: the process group of this project's runs.
        default: torch's own choice, where it was tried and the user has not chosen.
    """
    if used.waits:
        return Check(
            OVERLAP,
            False,
            f"get_future of {used.group} waits for the all-reduce, so DDP's backward pass does: "
            f"set {GROUP_CHOICE}=0, or take a torch before 2.15",
        )
    detail = f"get_future of {used.group} does not wait"
    if default and default.group != used.group:
        detail += f"; that of {default.group}, torch's own choice, "
        if default.waits:
            detail += f"does, so runs set {GROUP_CHOICE}=0"
        else:
            detail += f"does not either: {GROUP_CHOICE}=1 takes it"
    return Check(OVERLAP, True, detail)


def host_memory(gpus: int, available_bytes: int) -> Check | None:
    """Checks that a checkpoint of ``LARGEST_MODEL`` fits: a node's ranks stage the states once."""
    from common.perfmodel.one_device.architecture import GPT2Config

    if not gpus:
        return None
    needed = STATE_BYTES * GPT2Config.named(LARGEST_MODEL).num_parameters()
    detail = (
        f"{available_bytes / 1e9:.1f} GB of host memory; a checkpoint of {LARGEST_MODEL} stages "
        f"{needed / 1e9:.1f} GB, divided among the ranks"
    )
    if needed <= available_bytes:
        return Check("host memory", True, detail)
    return Check("host memory", False, f"{detail}: ask for more (--mem=0 is the whole node's)")


def shared_memory(gpus: int, free_bytes: int | None) -> Check | None:
    """Checks that NCCL's ranks on a node have room to exchange; containers often give 64 MiB."""
    if gpus < 2 or free_bytes is None:
        return None
    detail = f"{free_bytes / 2**20:,.0f} MiB free in {SHARED_MEMORY}"
    if free_bytes >= SHARED_MEMORY_BYTES:
        return Check("shared memory", True, detail)
    return Check(
        "shared memory",
        False,
        f"{detail}: NCCL may fail with 'No space left on device'; start the container with "
        "--shm-size=1g or --ipc=host",
    )


def job_memory_bytes(available_bytes: int, env: Mapping[str, str] = os.environ) -> int:
    """Returns the host memory that a job may use: what can be had, or less where Slurm says so.

    ``SLURM_MEM_PER_NODE`` is in MiB, and 0 for the whole node.
    """
    limit = env.get("SLURM_MEM_PER_NODE", "")
    if not limit.isdigit() or limit == "0":
        return available_bytes
    return min(available_bytes, int(limit) * 2**20)


def free_shared_memory() -> int | None:
    """Returns the bytes free in /dev/shm, or None where there is none."""
    return shutil.disk_usage(SHARED_MEMORY).free if SHARED_MEMORY.is_dir() else None


UNKNOWN = "not known"
MANY = 8
"""Upper bound on the GPUs or pairs with one value that are named one by one."""


def gpu_rows(facts: GpuFacts) -> list[tuple[str, str]]:
    """Returns (name, value) rows; GPUs and pairs with the same value share a line."""
    driver = f"{facts.driver or UNKNOWN}, for CUDA up to {facts.driver_cuda or UNKNOWN}"
    rows: list[tuple[str, str]] = [("driver", driver)]
    questions: tuple[tuple[str, Callable[[Gpu], str]], ...] = (
        ("name", _name),
        ("UUID", lambda gpu: gpu.uuid or UNKNOWN),
        ("SM clock", lambda gpu: _clock(gpu.sm_clock)),
        ("memory clock", lambda gpu: _clock(gpu.memory_clock)),
        ("power limit", lambda gpu: _watts(gpu.power_limit_w)),
        ("ECC", lambda gpu: _on_or_off(gpu.ecc)),
        ("MIG", _mig),
        ("compute mode", lambda gpu: gpu.compute_mode or UNKNOWN),
        ("persistence", lambda gpu: _on_or_off(gpu.persistence)),
        ("PCIe", _pcie),
        ("NUMA node", _numa),
        ("nearest network", _nearest),
    )
    for name, answer in questions:
        rows.append((name, _grouped({str(i): answer(gpu) for i, gpu in enumerate(facts.gpus)})))
    rows.append(("power draw", ", ".join(_watts(gpu.power_draw_w) for gpu in facts.gpus)))
    if facts.pairs:
        pairs = {f"{pair.first}–{pair.second}": _pair(pair) for pair in facts.pairs}
        rows.append(("between GPUs", _grouped(pairs)))
    return rows


def _grouped(values: Mapping[str, str]) -> str:
    """Returns the one value of all, else a line for each value with those that have it.

    Where more than MANY share the most frequent value, it stands last, without their names.
    """
    owners: dict[str, list[str]] = {}
    for owner, value in values.items():
        owners.setdefault(value, []).append(owner)
    if len(owners) == 1:
        return next(iter(owners))
    usual = max(owners, key=lambda value: len(owners[value]))
    last = [f"all others: {usual}"] if len(owners[usual]) > MANY else []
    lines = [
        f"{', '.join(names)}: {value}"
        for value, names in owners.items()
        if not last or value != usual
    ]
    return "\n".join(lines + last)


def _name(gpu: Gpu) -> str:
    memory = f"{gpu.memory_bytes / 2**30:.1f} GiB" if gpu.memory_bytes else "memory not known"
    return f"{gpu.name}, {memory}, compute capability {gpu.compute_capability or UNKNOWN}"


def _clock(clock: Clock) -> str:
    if clock.current_mhz is None:
        return UNKNOWN
    parts = [f"at most {clock.max_mhz}"] if clock.max_mhz is not None else []
    if clock.application_mhz is not None:
        parts.append(f"set to {clock.application_mhz}")
    return f"{clock.current_mhz} MHz" + (f" ({', '.join(parts)})" if parts else "")


def _watts(value: float | None) -> str:
    return UNKNOWN if value is None else f"{value:.0f} W"


def _on_or_off(value: bool | None) -> str:
    return UNKNOWN if value is None else "on" if value else "off"


def _mig(gpu: Gpu) -> str:
    return "a slice of a GPU" if gpu.mig_slice else _on_or_off(gpu.mig_mode)


def _pcie(gpu: Gpu) -> str:
    if gpu.pcie_generation is None or gpu.pcie_width is None:
        return UNKNOWN
    text = f"generation {gpu.pcie_generation} × {gpu.pcie_width}"
    if gpu.pcie_generation_max is None or gpu.pcie_width_max is None:
        return text
    return f"{text} (at most {gpu.pcie_generation_max} × {gpu.pcie_width_max})"


def _numa(gpu: Gpu) -> str:
    if gpu.numa_node is None:
        return UNKNOWN
    return f"{gpu.numa_node}" + (f" (cores {gpu.local_cores})" if gpu.local_cores else "")


def _nearest(gpu: Gpu) -> str:
    parts = [
        f"{', '.join(card.names)} (same {card.by})" if card.by != "PCIe" else ", ".join(card.names)
        for card in _cards(gpu)
    ]
    return "; ".join(parts) or "none found"


def _cards(gpu: Gpu) -> Sequence[Nearest]:
    return [card for card in (gpu.nearest_infiniband, gpu.nearest_network) if card is not None]


def _pair(pair: GpuPair) -> str:
    if pair.nvlinks:
        way = counted(pair.nvlinks, "NVLink")
    else:
        way = f"PCIe through {pair.pcie}" if pair.pcie else UNKNOWN
    peer = f", peer-to-peer {pair.peer_to_peer}" if pair.peer_to_peer else ""
    return way + peer
