"""A rank that takes its gloo group for an NCCL one on GPUs, which are pretended.

The end of its group waits for the other rank, as NCCL's does. Rank 1 fails as the settings say
while rank 0 is in an all-reduce with it.
"""

import contextlib
import ctypes
import json
import sys
import time
from dataclasses import dataclass
from types import SimpleNamespace
from unittest import mock

import torch
import torch.distributed as dist

from common.errors import Preempted, RunFailed, UserError
from common.runtime.group.process_group import process_group
from common.runtime.records.recorder import record_run
from common.runtime.script import parse_settings, run_script

ERRORS = {
    "user": UserError("the batch is no batch", this_rank_only=True),
    "failed": RunFailed("the disk of rank 1 is full"),
    "interrupted": KeyboardInterrupt(),
    "bug": ZeroDivisionError("of rank 1"),
    "memory": torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 MiB. GPU 0 has"),
}
join = dist.init_process_group


@dataclass(frozen=True)
class Settings:
    """What the GPUs are, and how rank 1 fails."""

    how: str = "none"
    gpus: int = 2
    backend: str = "nccl"
    output_dir: str = ""
    run_id: str = "run"
    peer_waits_outside_python: bool = False


def main(settings: Settings) -> None:
    """Joins, fails if told to, and says where this rank is."""
    if settings.how == "again":
        with contextlib.suppress(ZeroDivisionError), process_group("cuda"):
            raise ERRORS["bug"]
    with process_group("cuda", settings.backend) as worker:
        worker.gather("both are there")
        if settings.how == "stopped":
            raise Preempted("by all ranks")
        if settings.how in ERRORS and worker.rank == 1:
            print("failing", flush=True)
            raise ERRORS[settings.how]
        if settings.peer_waits_outside_python:
            wait_for_good()
        dist.all_reduce(torch.ones(1))
        if settings.output_dir:
            with record_run(settings, "pretended", worker):
                pass
        with process_group() as inner:
            place = [worker.device.index, worker.ranks_per_gpu]
            print(json.dumps([*place, inner.device.index, inner.ranks_per_gpu, inner.backend]))
        blocking_end.stop()  # from here on the end of the group is gloo's


def wait_for_good() -> None:
    """Waits where no signal leads back to Python, as a thread does that waits for a GPU."""
    libc, mutex = ctypes.CDLL(None), (ctypes.c_char * 64)()
    libc.pthread_mutex_lock(mutex)
    libc.pthread_mutex_lock(mutex)


def properties(index: torch.device | int) -> SimpleNamespace:
    """Returns a small slice of a GPU, with an identity of its own."""
    uuid = getattr(index, "index", index)
    return SimpleNamespace(uuid=uuid, name="NVIDIA A100 MIG 1g.5gb", total_memory=5 * 2**30)


def init_process_group(backend: str, device_id: torch.device | None, **rest: object) -> None:
    """Joins gloo's group, whichever it is to be."""
    assert (backend == "nccl") == (device_id is not None)
    if settings.how == "registered":
        dist.Backend._ensure_backend_registered(backend)
        print(dist.Backend._plugins[backend.upper()].creator_fn.__name__)
    join("gloo", **rest)


def wait_for_peers() -> None:
    """Waits for the other rank, which does not come, as ncclCommDestroy does."""
    time.sleep(1000)


sys.argv[0] = "pretended"
settings = parse_settings(Settings, sys.argv[1:], "pretended")
answers = {"is_available": True, "is_initialized": True, "current_device": 0}
answers |= {"device_count": settings.gpus, "set_device": None, "synchronize": None}
gpus = mock.patch.multiple(
    "torch.cuda",
    get_device_properties=properties,
    **{name: lambda *_, answer=answer: answer for name, answer in answers.items()},
)
blocking_end = mock.patch("torch.distributed.destroy_process_group", wait_for_peers)
if settings.how != "stopped":
    blocking_end.start()
group_class = {"nccl": "ProcessGroupNCCL", "gloo": "ProcessGroupGloo"}[settings.backend]
group = mock.patch("common.runtime.group.nccl.group_class", return_value=group_class)
with gpus, group, mock.patch("torch.distributed.init_process_group", init_process_group):
    run_script(main, Settings)
