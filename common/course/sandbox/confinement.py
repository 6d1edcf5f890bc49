"""Confines a student's process; runs inside the sandbox, before any of the student's code.

Limits bind a user, and root hardly at all: so a process first becomes somebody without rights.
"""

from __future__ import annotations

import ctypes
import functools
import importlib
import os
import resource
import subprocess
import sys
from pathlib import Path

GIB = 2**30
LIMITS = {
    "RLIMIT_DATA": 3 * GIB,
    "RLIMIT_FSIZE": GIB // 4,
    "RLIMIT_NPROC": 160,  # threads count
    "RLIMIT_NOFILE": 512,
    "RLIMIT_CPU": 300,
    "RLIMIT_CORE": 0,
}
PR_SET_DUMPABLE, PR_CAPBSET_DROP, PR_SET_NO_NEW_PRIVS = 4, 24, 38
CAPABILITIES = 64

# What the exercises build, as PyTorch has it: its names raise, and its files are empty.
WITHHELD = {
    "torch.nn.parallel": ("DistributedDataParallel",),
    "torch.distributed.fsdp": ("FullyShardedDataParallel", "fully_shard"),
    "torch.distributed._composable.replicate": ("replicate",),
    "torch.distributed.optim": ("ZeroRedundancyOptimizer", "DistributedOptimizer"),
    "torch.utils.flop_counter": ("FlopCounterMode",),
    "torch.nn.functional": ("scaled_dot_product_attention",),
    "torch._C._distributed_c10d": ("Reducer", "_compute_bucket_assignment_by_size"),
}
KERNELS = ("scaled_dot_product", "flash_attention", "efficient_attention")
"""Parts of the names by which PyTorch computes attention."""
HIDDEN_FILES = (
    "nn/parallel/distributed.py",
    "distributed/fsdp",
    "distributed/_composable",
    "distributed/optim",
    "utils/flop_counter.py",
)


def withhold() -> None:
    """Takes PyTorch's own solutions away from all processes that are forked from now on."""
    functions = {}
    for module, names in WITHHELD.items():
        try:
            there = importlib.import_module(module)
        except ImportError:  # of another version
            continue
        for name in names:
            value = getattr(there, name, None)
            if isinstance(value, type):  # whoever finds it, and in whatever way
                value.__init__ = refuse(name)
            elif value is not None:
                functions[id(value)] = name
    for module in list(sys.modules.values()):
        for name, value in list(getattr(module, "__dict__", {}).items()):
            if id(value) in functions:
                setattr(module, name, refuse(functions[id(value)]))
    withhold_attention()


@functools.cache  # the cache keeps the library, without which the operators are as before
def withhold_attention() -> object:
    """Puts refusals in the place of PyTorch's operators of attention, by whatever name called.

    Returns:
        the library that registers them.
    """
    import torch

    library = torch.library.Library("aten", "IMPL")
    for operator in torch._C._dispatch_get_all_op_names():
        space, _, name = operator.partition("::")
        if space == "aten" and "attention" in name:
            for key in ("CPU", "AutogradCPU"):
                library.impl(name, refuse(name), key)
    return library


def refuse(name: str):
    """Returns a function that stands for what is withheld."""

    def refused(*_: object, **__: object) -> None:
        raise PermissionError(f"{name} is not for exercises")

    return refused


def hide_files() -> None:
    """Puts nothing over the files of PyTorch's solutions; needs a mount namespace of one's own."""
    import torch

    nothing = Path("/sandbox/nothing")
    for name in HIDDEN_FILES:
        path = Path(torch.__file__).parent / name
        if path.exists():
            over = nothing / ("folder" if path.is_dir() else "file")
            subprocess.run(["mount", "--bind", str(over), str(path)], check=True)


def protect_this_process() -> None:
    """Lets nobody look into this process, of the same user neither."""
    ctypes.CDLL(None).prctl(PR_SET_DUMPABLE, 0, 0, 0, 0)


def confine(uid: int | None) -> None:
    """Gives up all rights of this process, for good, and limits what it takes.

    Args:
        uid: become this user, which needs root; if None only capabilities are given up, where root
            is nobody outside of a user namespace.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    if uid is None:
        for capability in range(CAPABILITIES):
            libc.prctl(PR_CAPBSET_DROP, capability, 0, 0, 0)
    for name, value in LIMITS.items():
        resource.setrlimit(getattr(resource, name), (value, value))
    if uid is not None:
        os.setgroups([])
        os.setresgid(uid, uid, uid)
        os.setresuid(uid, uid, uid)
    else:
        version_3 = (ctypes.c_uint32 * 2)(0x20080522, 0)
        none = (ctypes.c_uint32 * 6)()
        if libc.capset(version_3, none):
            raise OSError(ctypes.get_errno(), "capabilities cannot be given up")
    if libc.prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0):
        raise OSError(ctypes.get_errno(), "rights cannot be given up")
