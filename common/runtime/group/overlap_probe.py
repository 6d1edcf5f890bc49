"""Tries whether DDP can overlap its exchange: does ``get_future()`` wait for the all-reduce?

    python -m common.runtime.group.overlap_probe

This runs one rank over NCCL on a GPU, with the process group that every run gets, and prints what
it found as a line of JSON. ``try_group`` does it in a child.
"""

from __future__ import annotations

import contextlib
import json
import os
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from ddplab_watch.marks import LAUNCH_S, LAUNCHES_AHEAD

from common.errors import RunFailed
from common.runtime.group.network import GROUP_CHOICE
from common.runtime.group.process_group import process_group
from common.runtime.processes.child import run_child
from common.runtime.timing import clock_for

TRIES = 3
"""A host that comes late finds the all-reduce done, which looks like waiting."""
TIMEOUT_S = 90


@dataclass(frozen=True)
class Tried:
    """A process group that was tried; ``group`` is the name of its class."""

    group: str
    waits: bool


def try_group(choice: str | None = None) -> Tried:
    """Tries the process group that NCCL gets, in a child process on the first GPU.

    Args:
        choice: value of TORCH_DIST_USE_NCCL2; None for this process's, or the project's choice.

    Raises:
        RunFailed: the child failed, or did not end; with its reason.
    """
    lines: list[str] = []
    # NCCL's words, which would come among the child's lines of JSON, go to its log.
    elsewhere = {"NCCL_DEBUG_FILE": "/dev/stderr"}
    environment = elsewhere | os.environ | ({} if choice is None else {GROUP_CHOICE: choice})
    with tempfile.TemporaryDirectory() as folder:
        ended = run_child(
            "common.runtime.group.overlap_probe",
            [],
            Path(folder) / "log",
            lines.append,
            environment=environment,
            timeout_s=TIMEOUT_S,
        )
        if ended.reason:
            raise RunFailed(ended.reason)
    return Tried(**json.loads(lines[-1]))


def get_future_waits(device: torch.device) -> bool:
    """Returns True if nothing after ``get_future()`` came before the end of the all-reduce.

    On a GPU the all-reduce is launched behind a stream that is held. On a CPU the default group's
    all-reduce must take a while by itself.
    """
    tensor = torch.ones(1 << 10, device=device)
    dist.all_reduce(tensor)  # the first one also connects
    return not any(_came_before_the_end(tensor) for _ in range(TRIES))


def _came_before_the_end(tensor: torch.Tensor) -> bool:
    clock = clock_for(tensor.device)
    clock.wait()
    with _stream_of_its_own(tensor.device):
        clock.hold(LAUNCHES_AHEAD * LAUNCH_S)
        work = dist.all_reduce(tensor, async_op=True)
    with _stream_of_its_own(tensor.device):
        work.get_future()
        moment = clock.mark()
    came_before = False
    while not (came_before or work.is_completed()):
        # Asked again: both may have happened since.
        came_before = clock.passed(moment) and not work.is_completed()
        time.sleep(1e-4)
    work.wait()
    return came_before


def _stream_of_its_own(device: torch.device) -> contextlib.AbstractContextManager:
    """Makes a new stream the current one in a block; a CPU has none."""
    if device.type == "cpu":
        return contextlib.nullcontext()
    return torch.cuda.stream(torch.cuda.Stream(device))


def main() -> None:
    """Joins NCCL as every run does, and prints what was found."""
    with process_group("cuda", "nccl") as worker:
        print(json.dumps(asdict(Tried(worker.group_class, get_future_waits(worker.device)))))


if __name__ == "__main__":
    main()
