"""Runs a script with faults planted from outside: ``FAULT[=STRENGTH][@PASSES] SCRIPT ...``

The script and all that it imports are as they are; what changes is PyTorch, or where the process
may run, before the script starts or after so many passes under DDP. So a diagnosis cannot know of a
fault but by what it does. A strength is in the fault's own unit (see ``FAULTS``); ``healthy``
plants nothing. Several faults are joined by ``+``.
"""

from __future__ import annotations

import gc
import itertools
import logging
import os
import runpy
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from tempfile import TemporaryFile

import torch
import torch.utils.data
import torch.utils.data.distributed
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)
from torch.utils.data import distributed
from torch.utils.data._utils import fetch

from common.cluster.links import limit_own_link
from common.diagnose.studies.planting import (
    Fault,
    around_forward,
    change_ddp,
    in_place_of,
)
from common.errors import UserError, require_known
from common.runtime.group.network import EMULATED_NETWORK
from common.runtime.processes.orphans import ending_with_parent
from common.runtime.script import exit_status, leave_rank

USAGE = "usage: planted_faults.py FAULT[=STRENGTH][@PASSES] SCRIPT [ARGUMENT ...]"


def missing_sampler(_: float) -> None:
    """Gives every rank all samples."""

    class Alone(distributed.DistributedSampler):
        """PyTorch's sampler of a process by itself, whatever the script gives."""

        def __init__(self, dataset, num_replicas=None, rank=None, **kept) -> None:
            super().__init__(dataset, num_replicas=1, rank=0, **kept)

    _use_sampler(Alone)


def overlapping_sampler(share: float) -> None:
    """Makes each rank take this share of its samples, at most a half, from the next rank's."""

    class Overlapping(distributed.DistributedSampler):
        """A rank's own samples; every so often one that the next rank takes just before."""

        def __iter__(self) -> Iterator[int]:
            indices = list(super().__iter__())
            mine, self.rank = self.rank, (self.rank + 1) % self.num_replicas
            next_indices = list(super().__iter__())
            self.rank = mine
            # Spread over the epoch, as a run may see little of it.
            for index in range(1, len(indices)):
                if int((index + 1) * share) > int(index * share):
                    indices[index] = next_indices[index - 1]
            return iter(indices)

    _use_sampler(Overlapping)


def forgotten_epoch(_: float) -> None:
    """Takes the effect from ``set_epoch``: every epoch has the same order of samples."""
    distributed.DistributedSampler.set_epoch = lambda self, epoch: None


def _use_sampler(sampler: type) -> None:
    torch.utils.data.DistributedSampler = sampler
    torch.utils.data.distributed.DistributedSampler = sampler


def one_core(_strength: float) -> None:
    """Pins all ranks to the first core that they may use."""
    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})


def many_threads(count: float) -> None:
    """Makes every rank compute with ``count`` threads."""
    torch.set_num_threads(int(count))


def slow_rank(factor: float) -> None:
    """Multiplies a rank's compute time by ``factor``, by a sleep after each forward pass.

    The sleep stands for the backward pass, too, which is taken to last two forward passes.
    """
    around_forward(lambda passed_s: (factor - 1) * 3 * passed_s)


def slow_compute(factor: float) -> None:
    """Computes each linear layer ``factor`` times, in training and elsewhere."""

    @in_place_of(nn.Linear, "forward")
    def repeated(plain, layer, values):
        for _ in range(round(factor) - 1):
            with torch.no_grad():
                plain(layer, values)
        return plain(layer, values)


def slow_start(milliseconds: float) -> None:
    """Makes the first four forward passes under DDP take ``milliseconds`` longer."""
    calls = itertools.count()
    around_forward(lambda _: milliseconds / 1e3 if next(calls) < 4 else 0.0)


def slow_data(milliseconds: float) -> None:
    """Makes each batch take ``milliseconds`` longer to put together."""
    for fetcher in (fetch._MapDatasetFetcher, fetch._IterableDatasetFetcher):

        @in_place_of(fetcher, "fetch")
        def slower(plain, *arguments):
            time.sleep(milliseconds / 1e3)
            return plain(*arguments)


def slow_logging(milliseconds: float) -> None:
    """Writes each log message to a disk that takes ``milliseconds`` to confirm it."""

    class OnDisk(logging.Handler):
        """A handler that waits for the disk."""

        def emit(self, record: logging.LogRecord) -> None:
            with TemporaryFile("w") as file:
                file.write(self.format(record))
                file.flush()
                os.fsync(file.fileno())
            time.sleep(milliseconds / 1e3)

    logging.getLogger().addHandler(OnDisk())
    logging.getLogger().setLevel(logging.INFO)


def lone_evaluation(times: float) -> None:
    """Computes each pass of an evaluation ``times`` times, while the other ranks wait."""

    @in_place_of(nn.Module, "__call__")
    def repeated(plain, module, *inputs, **named):
        outer = not getattr(nn.Module, "_repeating", False)
        if outer and not module.training and not torch.is_grad_enabled():
            nn.Module._repeating = True
            try:
                for _ in range(round(times) - 1):
                    plain(module, *inputs, **named)
            finally:
                nn.Module._repeating = False
        return plain(module, *inputs, **named)


def always_synchronised(_: float) -> None:
    """Takes the effect from ``no_sync``: every micro-batch exchanges gradients."""

    def always(ddp: DistributedDataParallel) -> None:
        ddp.no_sync = nullcontext

    change_ddp(always)


def other_precision(_: float) -> None:
    """Computes linear layers in bfloat16."""

    @in_place_of(nn.Linear, "forward")
    def narrow(plain, *inputs):
        with torch.autocast("cpu", torch.bfloat16):
            return plain(*inputs)


def slow_forward(milliseconds: float) -> None:
    """Makes each forward pass under DDP take ``milliseconds`` longer."""
    around_forward(lambda _: milliseconds / 1e3)


def slow_backward(milliseconds: float) -> None:
    """Makes each backward pass take ``milliseconds`` longer, at its start."""

    def late(gradient: torch.Tensor) -> torch.Tensor:
        time.sleep(milliseconds / 1e3)
        return gradient

    @in_place_of(DistributedDataParallel, "forward")
    def watched(plain, *inputs, **named):
        outputs = plain(*inputs, **named)
        first = next(iter(outputs.values())) if isinstance(outputs, Mapping) else outputs
        if torch.is_tensor(first) and first.requires_grad:
            first.register_hook(late)
        return outputs


def slow_update(milliseconds: float) -> None:
    """Makes each update take ``milliseconds`` longer."""
    register_optimizer_step_pre_hook(lambda *_: time.sleep(milliseconds / 1e3))


def lone_checkpoint(milliseconds: float) -> None:
    """Writes something for ``milliseconds`` after every second update."""
    updates = itertools.count()

    def save_checkpoint(*_: object) -> None:
        if next(updates) % 2:
            time.sleep(milliseconds / 1e3)

    register_optimizer_step_post_hook(save_checkpoint)


def bucket_cap(mebibytes: float) -> None:
    """Gives DDP this bucket cap."""
    change_ddp(bucket_cap_mb=mebibytes)


def unused_search(_: float) -> None:
    """Makes DDP look for unused parameters."""
    change_ddp(find_unused_parameters=True)


def garbage(thousands: float) -> None:
    """Keeps so many thousand lists and collects garbage in each forward pass."""
    kept = [[] for _ in range(int(thousands * 1000))]

    def collect(_: float) -> float:
        gc.collect()
        return 0.0 * len(kept)

    around_forward(collect)


def growing_memory(mebibytes: float) -> None:
    """Keeps so much more memory after each forward pass."""
    kept: list[bytearray] = []

    def keep(_: float) -> float:
        kept.append(bytearray(os.urandom(1)) * int(mebibytes * 2**20))
        return 0.0

    around_forward(keep)


def busy_neighbour(processes: float) -> None:
    """Pins the process to the last of its cores, and keeps that busy with other processes."""
    os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})
    for _ in range(int(processes)):
        subprocess.Popen(ending_with_parent([sys.executable, "-c", "while True: pass"]))


def slow_link(megabits: float) -> None:
    """Limits what an emulated host sends to so many Mbit/s; raises UserError on any other host."""
    if EMULATED_NETWORK not in os.environ:
        raise UserError("slow-link: on emulated hosts only")
    limit_own_link(megabits * 1e6)


def stuck(step: float) -> None:
    """Stops for good in a forward pass after so many."""
    calls = itertools.count()
    around_forward(lambda _: 1e6 if next(calls) >= step else 0.0)


FAULTS: dict[str, Fault] = {
    "missing-sampler": Fault(missing_sampler),
    "overlapping-sampler": Fault(overlapping_sampler, 0.25),
    "forgotten-epoch": Fault(forgotten_epoch),
    "one-core": Fault(one_core),
    "many-threads": Fault(many_threads, 4),
    "slow-rank": Fault(slow_rank, 1.6, rank=1),
    "slow-compute": Fault(slow_compute, 2, rank=1),
    "slow-start": Fault(slow_start, 200.0),
    "slow-data": Fault(slow_data, 20.0),
    "slow-logging": Fault(slow_logging, 20.0, rank=0),
    "lone-evaluation": Fault(lone_evaluation, 6, rank=0),
    "always-synchronised": Fault(always_synchronised),
    "other-precision": Fault(other_precision, rank=1),
    "slow-forward": Fault(slow_forward, 20.0, rank=1),
    "slow-backward": Fault(slow_backward, 20.0, rank=1),
    "slow-loader": Fault(slow_data, 20.0, rank=1),
    "slow-update": Fault(slow_update, 20.0, rank=0),
    "lone-checkpoint": Fault(lone_checkpoint, 60.0, rank=0),
    "bucket-cap": Fault(bucket_cap, 0.001),
    "unused-search": Fault(unused_search),
    "garbage": Fault(garbage, 500.0),
    "growing-memory": Fault(growing_memory, 20.0),
    "busy-neighbour": Fault(busy_neighbour, 1, rank=1),
    "slow-link": Fault(slow_link, 100.0),
    "stuck": Fault(stuck, 20.0, rank=1),
    "healthy": Fault(lambda _: None),
}
"""Faults by name."""


def parse_faults(text: str) -> list[tuple[str, float, int]]:
    """Returns names, strengths and passes before them of a text such as ``slow-rank=2@90+garbage``.

    Raises UserError for an unknown fault, a strength that is not a number, or no number of passes.
    """
    faults = []
    for part in text.split("+"):
        fault, at, passes = part.partition("@")
        name, equals, strength = fault.partition("=")
        require_known("fault", name, FAULTS)
        if at and not passes.isdecimal():
            raise UserError(f"fault {part!r}: {passes!r} is not a number of passes")
        try:
            value = float(strength) if equals else FAULTS[name].strength
        except ValueError:
            raise UserError(f"fault {part!r}: {strength!r} is not a number") from None
        faults.append((name, value, int(passes or 0)))
    return faults


def after_passes(passes: int, begin: Callable[[], None]) -> None:
    """Calls ``begin`` after so many forward passes under DDP in this process; at once for none."""
    if not passes:
        begin()
        return
    counted = itertools.count(1)

    def count(_: float) -> float:
        if next(counted) == passes:
            begin()
        return 0.0

    around_forward(count)


def plant(words: list[str]) -> Path:
    """Plants the faults in this process, whose arguments become the script's; returns that."""
    if len(words) < 2:
        raise UserError(USAGE)
    text, script = words[0], Path(words[1])
    faults = parse_faults(text)
    if not script.is_file():
        raise UserError(f"script {script}: no such file; {USAGE}")
    for name, strength, passes in faults:
        if FAULTS[name].concerns_this_rank():
            after_passes(passes, partial(FAULTS[name].plant, strength))
    sys.argv = [str(script), *words[2:]]
    sys.path[0] = str(script.absolute().parent)
    return script


if __name__ == "__main__":
    with exit_status():
        chosen = plant(sys.argv[1:])
    runpy.run_path(str(chosen), run_name="__main__")
    leave_rank()  # as the lab's own scripts end, so that a rank that has finished fails no job
