"""Runs a script with faults planted from outside: ``planted_faults.py FAULT[=STRENGTH] SCRIPT ...``

The script and all that it imports are as they are; what changes is PyTorch, or where the process
may run, before the script starts. So a diagnosis cannot know of a fault but by what it does. A
strength is in the fault's own unit (see ``FAULTS``); ``healthy`` plants nothing. Several faults are
joined by ``+``.
"""

from __future__ import annotations

import functools
import gc
import logging
import os
import runpy
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import nullcontext
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

from common.diagnose.studies.planted_work import WORK_FAULTS
from common.diagnose.studies.planting import around_forward, change_ddp, rank
from common.errors import UserError, require_known
from common.runtime.script import exit_status, leave_rank

USAGE = "usage: planted_faults.py FAULT[=STRENGTH] SCRIPT [ARGUMENT ...]"


def missing_sampler(_: float) -> None:
    """Gives every rank all samples."""
    _replace_sampler(lambda data, kept: kept | {"num_replicas": 1, "rank": 0})


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


def _replace_sampler(change: Callable) -> None:
    class Changed(distributed.DistributedSampler):
        """PyTorch's sampler, with other arguments than the script gives."""

        def __init__(self, dataset, num_replicas=None, rank=None, **kept) -> None:
            arguments = {"num_replicas": num_replicas, "rank": rank} | kept
            super().__init__(dataset, **change(dataset, arguments))

    _use_sampler(Changed)


def _use_sampler(sampler: type) -> None:
    torch.utils.data.DistributedSampler = sampler
    torch.utils.data.distributed.DistributedSampler = sampler


def one_core(_: float) -> None:
    """Pins all ranks to the first core that they may use."""
    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})


def many_threads(count: float) -> None:
    """Makes every rank compute with ``count`` threads."""
    torch.set_num_threads(int(count))


def slow_rank(factor: float) -> None:
    """Multiplies rank 1's compute time by ``factor``, by a sleep after each forward pass.

    The sleep stands for the backward pass, too, which is taken to last two forward passes.
    """
    if rank() == 1:
        around_forward(lambda passed_s: (factor - 1) * 3 * passed_s)


def slow_compute(factor: float) -> None:
    """Makes rank 1 compute each linear layer ``factor`` times, in training and elsewhere."""
    if rank() != 1:
        return
    plain = nn.Linear.forward

    def repeated(self, values):
        for _ in range(round(factor) - 1):
            with torch.no_grad():
                plain(self, values)
        return plain(self, values)

    nn.Linear.forward = repeated


def slow_start(milliseconds: float) -> None:
    """Makes the first four forward passes under DDP take ``milliseconds`` longer."""
    calls = iter(range(1_000_000))
    around_forward(lambda _: milliseconds / 1e3 if next(calls) < 4 else 0.0)


def slow_data(milliseconds: float) -> None:
    """Makes each batch take ``milliseconds`` longer to put together."""
    for fetcher in (fetch._MapDatasetFetcher, fetch._IterableDatasetFetcher):

        def slower(self, indices, plain=fetcher.fetch):
            time.sleep(milliseconds / 1e3)
            return plain(self, indices)

        fetcher.fetch = slower


def slow_logging(milliseconds: float) -> None:
    """Writes each log message of rank 0 to a disk that takes ``milliseconds`` to confirm it."""
    if rank() != 0:
        return

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
    """Makes rank 0 compute each pass of an evaluation ``times`` times, while the others wait."""
    if rank() != 0:
        return
    plain = nn.Module.__call__

    def repeated(self, *inputs, **named):
        outer = not getattr(nn.Module, "_repeating", False)
        if outer and not self.training and not torch.is_grad_enabled():
            nn.Module._repeating = True
            try:
                for _ in range(round(times) - 1):
                    plain(self, *inputs, **named)
            finally:
                nn.Module._repeating = False
        return plain(self, *inputs, **named)

    nn.Module.__call__ = repeated


def always_synchronised(_: float) -> None:
    """Takes the effect from ``no_sync``: every micro-batch exchanges gradients."""

    def always(ddp: DistributedDataParallel) -> None:
        ddp.no_sync = nullcontext

    change_ddp(always)


def other_precision(_: float) -> None:
    """Makes rank 1 compute its linear layers in bfloat16."""
    if rank() != 1:
        return
    plain = nn.Linear.forward

    def narrow(self, values):
        with torch.autocast("cpu", torch.bfloat16):
            return plain(self, values)

    nn.Linear.forward = narrow


def slow_forward(milliseconds: float) -> None:
    """Makes each forward pass of rank 1 take ``milliseconds`` longer."""
    if rank() == 1:
        around_forward(lambda _: milliseconds / 1e3)


def slow_backward(milliseconds: float) -> None:
    """Makes each backward pass of rank 1 take ``milliseconds`` longer, at its start."""
    if rank() != 1:
        return
    plain = DistributedDataParallel.forward

    def late(gradient: torch.Tensor) -> torch.Tensor:
        time.sleep(milliseconds / 1e3)
        return gradient

    @functools.wraps(plain)
    def watched(self, *inputs, **named):
        outputs = plain(self, *inputs, **named)
        first = next(iter(outputs.values())) if isinstance(outputs, Mapping) else outputs
        if torch.is_tensor(first) and first.requires_grad:
            first.register_hook(late)
        return outputs

    DistributedDataParallel.forward = watched


def slow_loader(milliseconds: float) -> None:
    """Makes each batch of rank 1 take ``milliseconds`` longer to fetch."""
    if rank() == 1:
        slow_data(milliseconds)


def slow_update(milliseconds: float) -> None:
    """Makes each update of rank 0 take ``milliseconds`` longer."""
    if rank() == 0:
        register_optimizer_step_pre_hook(lambda *_: time.sleep(milliseconds / 1e3))


def lone_checkpoint(milliseconds: float) -> None:
    """Makes rank 0 write something for ``milliseconds`` after every second update."""
    if rank() != 0:
        return
    updates = iter(range(1_000_000))

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


def stuck(step: float) -> None:
    """Makes rank 1 stop for good in its forward pass after so many."""
    if rank() != 1:
        return
    calls = iter(range(1_000_000))
    around_forward(lambda _: 1e6 if next(calls) >= step else 0.0)


FAULTS: dict[str, tuple[Callable[[float], None], float]] = {
    "missing-sampler": (missing_sampler, 0.0),
    "overlapping-sampler": (overlapping_sampler, 0.25),
    "forgotten-epoch": (forgotten_epoch, 0.0),
    "one-core": (one_core, 0.0),
    "many-threads": (many_threads, 4),
    "slow-rank": (slow_rank, 1.6),
    "slow-compute": (slow_compute, 2),
    "slow-start": (slow_start, 200.0),
    "slow-data": (slow_data, 20.0),
    "slow-logging": (slow_logging, 20.0),
    "lone-evaluation": (lone_evaluation, 6),
    "always-synchronised": (always_synchronised, 0.0),
    "other-precision": (other_precision, 0.0),
    "slow-forward": (slow_forward, 20.0),
    "slow-backward": (slow_backward, 20.0),
    "slow-loader": (slow_loader, 20.0),
    "slow-update": (slow_update, 20.0),
    "lone-checkpoint": (lone_checkpoint, 60.0),
    "bucket-cap": (bucket_cap, 0.001),
    "unused-search": (unused_search, 0.0),
    "garbage": (garbage, 500.0),
    "growing-memory": (growing_memory, 20.0),
    "stuck": (stuck, 20.0),
    **WORK_FAULTS,
    "healthy": (lambda _: None, 0.0),
}
"""Fault → the function that plants it, and its strength where none is given: a share, a factor, a
number of threads, milliseconds and so on, as the function's docstring says."""


def parse_faults(text: str) -> list[tuple[str, float]]:
    """Returns names and strengths of a text such as ``slow-rank=2+one-core``.

    Raises UserError for an unknown fault or a strength that is not a number.
    """
    faults = []
    for part in text.split("+"):
        name, equals, strength = part.partition("=")
        require_known("fault", name, FAULTS)
        try:
            faults.append((name, float(strength) if equals else FAULTS[name][1]))
        except ValueError:
            raise UserError(f"fault {part!r}: {strength!r} is not a number") from None
    return faults


def plant(words: list[str]) -> Path:
    """Plants the faults in this process, whose arguments become the script's; returns that."""
    if len(words) < 2:
        raise UserError(USAGE)
    text, script = words[0], Path(words[1])
    faults = parse_faults(text)
    if not script.is_file():
        raise UserError(f"script {script}: no such file; {USAGE}")
    for name, strength in faults:
        FAULTS[name][0](strength)
    sys.argv = [str(script), *words[2:]]
    sys.path[0] = str(script.absolute().parent)
    return script


if __name__ == "__main__":
    with exit_status():
        chosen = plant(sys.argv[1:])
    runpy.run_path(str(chosen), run_name="__main__")
    leave_rank()  # as the lab's own scripts end, so that a rank that has finished fails no job
