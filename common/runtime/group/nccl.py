"""NCCL as torch uses it here: which process group, which version, and whether ranks share a GPU.

Under the name ``nccl``, torch 2.15 and newer make another process group than before,
``ProcessGroupNCCL2``. ``get_future()`` of its all-reduces makes the current stream wait for them.
DDP calls it for every bucket in the backward pass, which therefore waits for each bucket's
exchange: nothing is hidden behind computation, the best bucket cap is the largest, and each
prediction of overlap is wrong. ``work.wait()`` at the end of a pass does no such harm.
"""

from __future__ import annotations

import ctypes
import logging
import os
from collections.abc import Mapping

import torch
import torch.distributed as dist

from common.runtime.group.network import GROUP_CHOICE, OLD_GROUP, UNKNOWN_GROUP

SHARING = "NCCL_MULTI_RANK_GPU_ENABLE"
SHARING_SINCE = (2, 30)
"""First NCCL that reads SHARING; the ones before refuse a second rank on a GPU."""

logger = logging.getLogger(__name__)


def choose_group() -> None:
    """Makes ``nccl`` the process group whose exchange DDP overlaps, unless the user chose.

    Must come before ``init_process_group``. No version of torch ends this: ``ddplab doctor`` tries
    both groups on a GPU, and says if the newer one overlaps as well. Until then, and after,
    ``TORCH_DIST_USE_NCCL2=1`` takes the newer one. Torch before 2.15 does not read the variable.
    """
    os.environ.setdefault(GROUP_CHOICE, "0")


def group_class(device: torch.device) -> str:
    """Returns the class of the default group's backend for a device: ``ProcessGroupNCCL2``."""
    group = dist.group.WORLD
    try:
        backend = group._get_backend(device)
    except AttributeError:
        return UNKNOWN_GROUP
    except RuntimeError:  # a group written in Python has no other backend than itself
        return type(group).__name__
    # TORCH_DISTRIBUTED_DEBUG=DETAIL wraps it.
    return type(getattr(backend, "wrapped_pg", backend)).__name__


def warn_of_group(group: str, env: Mapping[str, str] = os.environ) -> None:
    """Logs a line if the choice had no effect: ``nccl`` was in use before, or has no old group."""
    if env.get(GROUP_CHOICE) == "0" and group not in (OLD_GROUP, UNKNOWN_GROUP):
        logger.warning(
            "NCCL's process group is %s in spite of %s=0: set it before torch first uses NCCL, or "
            "this torch has no other; DDP may not overlap, ddplab doctor tries it",
            group,
            GROUP_CHOICE,
        )


def loaded_version() -> tuple[int, int, int] | None:
    """Returns the version of the NCCL that this process has loaded; None if its torch has none.

    ``torch.cuda.nccl.version()`` is that of the headers torch was built with; the library may be
    another, by the package ``nvidia-nccl-cu13`` or by LD_PRELOAD.
    """
    code = ctypes.c_int()
    try:
        # Symbols are looked for in the library and in those that it needs.
        torch_cuda = ctypes.CDLL("libtorch_cuda.so", mode=os.RTLD_NOLOAD)
        if torch_cuda.ncclGetVersion(ctypes.byref(code)):
            return None
    except (OSError, AttributeError):
        return None
    return code.value // 10000, code.value // 100 % 100, code.value % 100


def shares_gpus(env: Mapping[str, str] = os.environ) -> bool:
    """Returns True if NCCL lets several ranks use one GPU, which it must be told to."""
    return env.get(SHARING) == "1" and (loaded_version() or (0,)) >= SHARING_SINCE


def sharing_advice() -> str:
    """Returns what makes NCCL accept several ranks on one GPU, and which version is loaded."""
    version = loaded_version()
    return (
        f"set {SHARING}=1 (NCCL {'.'.join(map(str, SHARING_SINCE))} or newer; here "
        f"{'.'.join(map(str, version)) if version else 'of unknown version'})"
    )
