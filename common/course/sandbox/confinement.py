"""Confines a student's process; runs inside the sandbox, before any of the student's code.

Limits bind a user, and root hardly at all: so a process first becomes somebody without rights.
"""

from __future__ import annotations

import ctypes
import functools
import importlib
import inspect
import os
import platform
import resource
import struct
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
PR_SET_DUMPABLE, PR_SET_SECCOMP, PR_CAPBSET_DROP, PR_SET_NO_NEW_PRIVS = 4, 22, 24, 38
SECCOMP_MODE_FILTER, SECCOMP_ALLOW, SECCOMP_REFUSE = 2, 0x7FFF0000, 0x00050001
"""The last one is a refusal with EPERM."""
CAPABILITIES = 64
REFUSED_CALLS = {
    "x86_64": (0xC000003E, (29, 59, 64, 68, 101, 240, 248, 249, 250, 272, 308, 319, 322, 447)),
    "aarch64": (0xC00000B7, (97, 117, 180, 186, 190, 194, 217, 218, 219, 221, 268, 279, 281, 447)),
}
"""Machine → its number in <linux/audit.h>, and those of system calls that are refused: a program
that is executed would have what is withheld here (execve, execveat); memory, messages and keys that
no process has would be there in the next check, or be seen by no measurement (shmget, semget,
msgget, mq_open, add_key, request_key, keyctl, memfd_create, memfd_secret); further namespaces, and
other processes' memory (unshare, setns, ptrace)."""
OTHER_NUMBERING = 0x40000000
"""First number of x86_64's system calls with pointers of 32 bits."""
LOAD, EQUAL, AT_LEAST, RETURN = 0x20, 0x15, 0x35, 0x06
"""Instructions of a filter (<linux/bpf_common.h>)."""

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
                for method in ("__init__", *methods_of(value)):
                    setattr(value, method, refuse(name))
            elif value is not None:
                functions[id(value)] = name
    for module in list(sys.modules.values()):
        for name, value in list(getattr(module, "__dict__", {}).items()):
            if id(value) in functions:
                setattr(module, name, refuse(functions[id(value)]))
    withhold_attention()


def methods_of(kind: type) -> list[str]:
    """Returns the names of a class's own functions written in Python."""
    return [name for name, value in vars(kind).items() if inspect.isfunction(value)]


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
    refuse_calls()


def refuse_calls() -> None:
    """Lets the kernel refuse ``REFUSED_CALLS`` to this process and all that it forks.

    A kernel without such filters, or another machine, refuses nothing.
    """
    if platform.machine() not in REFUSED_CALLS:
        return
    machine, numbers = REFUSED_CALLS[platform.machine()]
    tests = [(EQUAL, number) for number in numbers] + [(AT_LEAST, OTHER_NUMBERING)]
    steps = [(LOAD, 0, 0, 4), (EQUAL, 0, len(tests) + 2, machine), (LOAD, 0, 0, 0)]
    steps += [(test, len(tests) - index, 0, value) for index, (test, value) in enumerate(tests)]
    steps += [(RETURN, 0, 0, SECCOMP_ALLOW), (RETURN, 0, 0, SECCOMP_REFUSE)]
    filters = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *step) for step in steps))
    program = struct.pack("HP", len(steps), ctypes.addressof(filters))
    ctypes.CDLL(None).prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, program, 0, 0)
