"""A limit on the memory of a process, and the memory that it has used.

Linux promises more memory than there is and kills a process when it runs out, so a benchmark that
looks for the largest size that fits would die without a message. Under a limit the allocation
fails, as on a GPU, and Python can report what did not fit.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

import psutil
from ddplab_watch.cgroups import own_groups
from ddplab_watch.files import ROOT, read_fields, read_integer

from common.errors import UserError

NO_PRIMITIVE = "could not create a primitive"
"""oneDNN's message when memory runs out; it does not name the reason."""
WORDS = (
    "out of memory",
    "can't allocate memory",  # torch's allocator on a CPU
    "Cannot allocate memory",
    "not enough memory",  # the same on Windows
    "CUBLAS_STATUS_ALLOC_FAILED",
    "std::bad_alloc",
    NO_PRIMITIVE,
)


def limit_memory(limit_bytes: int, device: str = "cpu") -> None:
    """Makes allocations beyond ``limit_bytes`` fail, for the rest of this process.

    On CUDA the limit is on the memory that PyTorch reserves. On a CPU it is on all memory that this
    process can write to, the interpreter and PyTorch included; only Linux has such a limit.

    Raises:
        UserError: a system without such limits, or less than the process holds already.
    """
    if device.startswith("cuda"):
        import torch

        total = torch.cuda.get_device_properties(device).total_memory
        torch.cuda.set_per_process_memory_fraction(min(1.0, limit_bytes / total), device)
        return
    if not can_limit(device):
        raise UserError("memory_limit_gib: only Linux can limit a process on a CPU; leave it out")
    import resource

    held = writable_bytes()
    if limit_bytes <= held:
        raise UserError(
            f"memory_limit_gib {limit_bytes / 2**30:.2g}: Python and PyTorch alone take "
            f"{held / 2**30:.2g} GiB; give at least {held / 2**30 + 0.5:.1f}"
        )
    _, hard = resource.getrlimit(resource.RLIMIT_DATA)
    resource.setrlimit(resource.RLIMIT_DATA, (limit_bytes, hard))


def can_limit(device: str) -> bool:
    """Returns True if ``limit_memory`` can limit a process that computes on ``device``."""
    return device.startswith("cuda") or sys.platform == "linux"


def is_out_of_memory(error: BaseException) -> bool:
    """Returns True if an exception means that memory ran out, on either kind of device."""
    if isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError":
        return True
    return isinstance(error, RuntimeError | OSError) and any(word in str(error) for word in WORDS)


def available_memory_bytes(root: Path = ROOT) -> int:
    """Returns the bytes of RAM that are still available: the system's, or less within a cgroup.

    A job or a container has a limit of its own, set on its own cgroup or on any above it, by
    version 2 or 1 of cgroups.
    """
    limits = map(_left_in_group, own_groups("memory", root))
    return min([psutil.virtual_memory().available, *(b for b in limits if b is not None)])


def writable_bytes() -> int:
    """Returns the writable bytes of this process, which a CPU's limit counts; 0 if unknown."""
    return _status_bytes("VmData") if sys.platform == "linux" else 0


def peak_resident_bytes() -> int:
    """Returns the peak RAM of this process since ``reset_peak_resident``, or since its start.

    In bytes. On Linux it is not ``getrusage``'s figure, which a process inherits from its parent.
    """
    if sys.platform == "linux":
        return _status_bytes("VmHWM")
    import resource

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def resettable_peak_bytes() -> int | None:
    """Returns the peak RAM since ``reset_peak_resident``, in bytes; None where it has no effect."""
    try:
        return _status_bytes("VmHWM")
    except (OSError, LookupError):
        return None


def reset_peak_resident() -> None:
    """Sets the peak to the RAM in use now, where the system allows it (Linux).

    proc(5): 5 in this file sets the peak resident set size to the present one.
    """
    try:
        Path("/proc/self/clear_refs").write_text("5")
    except OSError:
        return


def _status_bytes(field: str) -> int:
    """Reads a field of /proc/self/status, in bytes; OSError or LookupError where it is not."""
    status = Path("/proc/self/status").read_text()
    match = re.search(rf"^{field}:\s+(\d+) kB", status, flags=re.M)
    if not match:
        raise LookupError(f"/proc/self/status has no {field}")
    return int(match[1]) * 1024


def _left_in_group(folder: Path) -> int | None:
    """Returns the bytes that a cgroup has left; None if it has no limit.

    Cached pages of files count as used but as available, too, as the kernel can drop them.
    """
    for limit_file, usage_file, droppable in (
        ("memory.max", "memory.current", "inactive_file"),
        ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
    ):
        limit = read_integer(folder / limit_file)  # "max" is no number
        usage = read_integer(folder / usage_file)
        if limit is not None and usage is not None:
            dropped = read_fields(folder / "memory.stat").get(droppable, 0)
            return max(0, limit - usage + dropped)
    return None
