"""The choice of a program's device, and the messages for a device that cannot be used."""

from __future__ import annotations

import logging
import os
import re
import warnings
from collections.abc import Mapping
from pathlib import Path

from common.errors import UserError
from common.runtime.machine.gpus import read_gpu_facts
from common.runtime.machine.memory_limit import is_out_of_memory
from common.runtime.processes.ranks import current_ranks
from common.runtime.wording import counted

logger = logging.getLogger(__name__)
DEVICES = ("cpu", "cuda")
NO_GPU = ("", "-1", "NoDevFiles")
"""First entries of CUDA_VISIBLE_DEVICES that hide all GPUs; the last is Slurm's."""
BUSY = "busy or unavailable"
"""Part of CUDA's message for cudaErrorDevicesUnavailable: another process has the GPU alone."""


def choose_device(
    device: str | None = None,
    *,
    env: Mapping[str, str] = os.environ,
    root: Path = Path("/"),
    instead: str = "--device cpu",
) -> str:
    """Returns ``cpu`` or ``cuda``: the device asked for, else CUDA where it can be used.

    A job that was granted GPUs never goes on the CPU unnoticed; elsewhere a GPU that cannot be used
    is a warning from rank 0. ``CUDA_VISIBLE_DEVICES=""`` asks for the CPU. CUDA is not initialised:
    no context is made on a GPU.

    Args:
        device: ``cpu``, ``cuda``, or None for the best that can be used.
        root: folder that holds ``dev`` and ``proc``.
        instead: the way to ask for the CPU, for messages.

    Raises:
        UserError: an unknown device; CUDA cannot be used, but was asked for or granted.
    """
    if device not in (None, *DEVICES):
        raise UserError(f"device {device!r}: legal are {' and '.join(DEVICES)}")
    if device == "cpu" or (device is None and hides_gpus(env)):
        return "cpu"
    import torch

    # torch warns at length of a driver that is too old; the one-line message below replaces that.
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        if torch.cuda.is_available():
            return "cuda"
    ranks, granted = current_ranks(env), granted_gpus(env)
    if device is None and not granted:
        if ranks.is_main and gpus_visible(env, root):
            logger.warning("computing on the CPU: %s; %s", why_unusable(env, root), remedy(instead))
        return "cpu"
    wanted = "device cuda"
    if device is None:
        wanted = f"the job was granted {counted(granted, 'GPU')}"
    # Other hosts may be in order, so the first rank of each host reports its own problem.
    raise UserError(
        f"{wanted}, but {why_unusable(env, root)}; {remedy(instead)}",
        this_rank_only=ranks.local_rank == 0,
    )


def hides_gpus(env: Mapping[str, str] = os.environ) -> bool:
    """Returns True if CUDA_VISIBLE_DEVICES hides all GPUs: CUDA stops at an invalid entry."""
    visible = env.get("CUDA_VISIBLE_DEVICES")
    return visible is not None and visible.split(",")[0].strip() in NO_GPU


def gpus_visible(env: Mapping[str, str] = os.environ, root: Path = Path("/")) -> bool:
    """Returns True if variables and device files show a GPU here; CUDA is not asked."""
    if "CUDA_VISIBLE_DEVICES" in env:
        return not hides_gpus(env)
    if (root / "proc/driver/nvidia").exists() or (root / "dev/dxg").exists():  # dxg: WSL
        return True
    return any((root / "dev").glob("nvidia[0-9]*"))


def granted_gpus(env: Mapping[str, str] = os.environ) -> int:
    """Returns the number of GPUs that Slurm granted on this host; 0 outside a job or step."""
    count = env.get("SLURM_GPUS_ON_NODE", "")
    if count.isdigit():
        return int(count)
    listed = env.get("SLURM_STEP_GPUS") or env.get("SLURM_JOB_GPUS") or ""
    return len([entry for entry in listed.split(",") if entry])


def why_unusable(env: Mapping[str, str] = os.environ, root: Path = Path("/")) -> str:
    """Returns the reason why torch can use no GPU here, with the driver's and torch's versions."""
    import torch

    if hides_gpus(env):
        return f"CUDA_VISIBLE_DEVICES={env['CUDA_VISIBLE_DEVICES']!r} hides all GPUs"
    driver, newest = driver_version(root), read_gpu_facts(()).driver_cuda
    driver = f"NVIDIA driver {driver}" if driver else "no NVIDIA driver"
    driver += f", for CUDA up to {newest}" if newest else ""
    build = f"built for CUDA {torch.version.cuda}" if torch.version.cuda else "a build without CUDA"
    return f"torch can use no GPU here ({driver}; torch {torch.__version__}, {build})"


def remedy(instead: str) -> str:
    """Returns the advice to a user whose torch can use no GPU."""
    return f'see "An older driver" in sbatch/README.md for another build, or use {instead}'


def driver_version(root: Path = Path("/")) -> str | None:
    """Returns the NVIDIA driver's version, such as ``535.183.01``; None if there is no driver."""
    version = read_gpu_facts(()).driver
    if version:
        return version
    try:
        text = (root / "proc/driver/nvidia/version").read_text()
    except OSError:
        return None
    match = re.search(r"Kernel Module.*?\s(\d+(\.\d+)+)", text)
    return match[1] if match else None


def refused_by_gpu(error: BaseException) -> UserError | None:
    """Returns a one-line error for a GPU that is out of memory, or busy with another process.

    None for any other error, and if it is the host that is out of memory.
    """
    text = str(error)
    if isinstance(error, RuntimeError) and BUSY in text:
        return UserError(
            "the GPU is busy: its compute mode lets one process at a time use it (or none); set it "
            "back with nvidia-smi -c DEFAULT, or start one process per GPU",
            this_rank_only=True,
        )
    import torch

    on_gpu = is_out_of_memory(error) and re.search("CUDA|CUBLAS", text)
    if not (on_gpu and torch.cuda.is_initialized()):
        return None
    gpu = torch.cuda.get_device_properties(torch.cuda.current_device())
    slice_ = ", a MIG slice of a GPU" if " MIG " in gpu.name else ""
    tried = re.search(r"Tried to allocate [\d.]+ \w+", text)
    return UserError(
        f"out of memory on {gpu.name} with {gpu.total_memory / 2**30:.1f} GiB{slice_}"
        f"{f' (t{tried[0][1:]})' if tried else ''}; take a smaller model, batch or sequence, or "
        "a larger GPU",
        this_rank_only=True,
    )
