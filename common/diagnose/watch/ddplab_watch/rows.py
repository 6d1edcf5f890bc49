"""The rows that a watch records: who a rank is, what it trains, and what its steps were.

Rows of steps that have ended are written once the device has passed their marks.
"""

from __future__ import annotations

import os
import platform
import socket
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel.distributed import DistributedDataParallel

from ddplab_watch import __version__, torch_internals
from ddplab_watch.feed import Feed
from ddplab_watch.long_watch import LongWatch
from ddplab_watch.marks import Clock, Mark
from ddplab_watch.options import Options
from ddplab_watch.record import FORMAT, Record
from ddplab_watch.step_blocks import COPY
from ddplab_watch.steps import Loop, Step
from ddplab_watch.surroundings import process_group_backend

VARIABLES = ("DDPLAB_", "NCCL_", "GLOO_", "TORCH_", "OMP_", "CUDA_", "SLURM_JOB_ID", "MASTER_ADDR")
"""Beginnings of the variables that are recorded."""
USUAL_OF = 20
"""A step's usual time is the median of so many of the last."""


def about(
    record: Record, options: Options, rank: int, ranks: int, device: torch.device
) -> dict[str, Any]:
    """Returns who this rank is, in which job, with which versions and settings."""
    is_gpu = device.type == "cuda"
    in_group = dist.is_available() and dist.is_initialized()
    return {
        "format": FORMAT,
        "version": __version__,
        "rank": rank,
        "world_size": ranks,
        "local_rank": int(os.environ.get("LOCAL_RANK", 0)),
        "backend": process_group_backend(),
        "process_group": torch_internals.group_class(dist.group.WORLD, device) if in_group else "",
        "host": record.name_or_hash(socket.gethostname()),
        "process": os.getpid(),
        "started": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "cpu": platform.processor() or platform.machine(),
        "device": str(device),
        "device_name": torch.cuda.get_device_name(device) if is_gpu else "",
        "command": [record.name_or_hash(word) for word in sys.argv],
        "variables": {
            name: record.name_or_hash(value) if "ADDR" in name or os.sep in value else value
            for name, value in sorted(os.environ.items())
            if name.startswith(VARIABLES) and name != "DDPLAB_WATCH"
        },
        "warmup": options.warmup,
        "window": options.window,
        "bucket_steps": options.bucket_steps,
    }


def facts(
    roots: Sequence[nn.Module],
    parameters: Sequence[nn.Parameter],
    trained_on: tuple[str, Any, bool | None],
) -> dict[str, Any]:
    """Returns what is trained: sizes and types of tensors, DDP's options, the loader's workers.

    Args:
        roots: the outermost modules.
        parameters: the optimizer's, for a model that was not found.
        trained_on: the type that the model computes in, the iterator that feeds it, and whether
            its batches are in the host's memory.
    """
    compute_dtype, iterator, on_host = trained_on
    data = torch_internals.data_set(iterator) if iterator is not None else None
    modules = [module for root in roots for module in root.modules()]
    ddp = [module for module in modules if isinstance(module, DistributedDataParallel)]
    sharded = [module for module in modules if torch_internals.is_fsdp(module)]
    narrowed = next(filter(None, map(torch_internals.fsdp_compute_dtype, sharded)), None)
    device = parameters[0].device
    capability = torch.cuda.get_device_capability(device) if device.type == "cuda" else ()
    held = [p for root in roots for p in root.parameters()] or parameters
    # A script may freeze in turns what it trains.
    once = {id(p): p for p in held}.values()
    trained = [p for p in once if p.requires_grad or p.grad is not None]
    try:
        samples = len(data) if data is not None else None
    except TypeError:
        samples = None
    row = {
        "parameters": sum(p.numel() for p in trained),
        "gradient_bytes": sum(p.nbytes for p in trained),
        "gradient_dtype": " ".join(sorted({str(p.dtype)[6:] for p in trained})),
        "compute_dtype": str(narrowed or compute_dtype).removeprefix("torch."),
        "float32_matmul_precision": torch_internals.matmul_precision(),
        "gpu_capability": ".".join(map(str, capability)),
        "model": " ".join(type(inside(root)).__name__ for root in roots),
        "data": type(data).__name__ if data is not None else "",
        "data_samples": samples,
        "loader_workers": torch_internals.workers(iterator) if iterator is not None else None,
        "persistent_workers": torch_internals.keeps_workers(iterator)
        if iterator is not None
        else None,
        "pin_memory": torch_internals.loader_arguments(iterator)["pin_memory"]
        if iterator is not None
        else None,
        "batches_on_host": on_host,
        "buffers_bytes": sum(b.numel() * b.element_size() for r in roots for b in r.buffers()),
        "synchronised_norms": sum(isinstance(m, nn.SyncBatchNorm) for m in modules),
        "sharded_modules": sum(map(torch_internals.is_fsdp, modules)),
        "wrapper": "DDP" if ddp else "FSDP" if sharded else "",
    }
    return row | (torch_internals.ddp_facts(ddp[0]) if ddp else {})


FRAMEWORKS = {
    "Trainer": ("transformers.trainer",),
    "Lightning": ("lightning.", "pytorch_lightning."),
    "accelerate": ("accelerate.",),
}
"""Who may call an optimizer for a script: what it is called, and how its modules' names begin."""


def how_updated(optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Returns who updates and how; ``framework`` is the one that calls the optimizer just now."""
    names, frame = [], sys._getframe()
    while frame is not None:
        names.append(frame.f_globals.get("__name__", ""))
        frame = frame.f_back
    calling = (
        kind
        for kind, starts in FRAMEWORKS.items()
        if any(name.startswith(starts) for name in names)
    )
    return {
        "optimizer": type(optimizer).__name__,
        "is_fused": bool(optimizer.param_groups[0].get("fused")),
        "framework": next(calling, ""),
    }


def inside(root: Any) -> Any:
    """Returns the module that DDP or torch.compile has wrapped."""
    for name in ("module", "_orig_mod"):
        root = getattr(root, name, root)
    return root


def autocast(device: torch.device) -> tuple[bool, torch.dtype]:
    """Returns whether autocast is on here, and the type that it computes in."""
    return torch.is_autocast_enabled(device.type), torch.get_autocast_dtype(device.type)


def row_of_step(step: Step, clock: Clock, epoch: int) -> dict[str, Any]:
    """Returns the row of a step of an epoch that has ended; its parts add up to it.

    Where buckets were watched, what followed this rank's last gradient is the exchange, and what
    came before it the backward pass. Elsewhere the backward pass holds both. A forward pass begins
    when DDP has sent its buffers: until then a rank may have waited for a late one.
    """
    elapsed = clock.elapsed_s
    parts_ms = _parts_ms(step, clock)
    backward_ms, exchange_ms = parts_ms["backward"], None
    if step.watched:
        exchange_ms = sum(elapsed(p.ready, p.ended) for p in step.passes if p.ready) * 1e3
        backward_ms -= exchange_ms
    row = {
        "kind": "timed" if step.watched else "plain",
        "epoch": epoch,
        "samples": sum(p.samples for p in step.passes),
        "tokens": sum(p.tokens for p in step.passes),
        "padded_tokens": sum(p.padded_tokens for p in step.passes),
        "longest": max((p.longest for p in step.passes), default=0),
        "elements": sum(p.elements for p in step.passes),
        "micro_batches": len(step.passes),
        "step_time_ms": elapsed(step.began, step.ended) * 1e3,
        "data_time_ms": parts_ms["data"],
        "fetch_time_ms": sum(f.ended_s - f.began_s for f in step.fetches) * 1e3,
        "buffers_time_ms": parts_ms["buffers"],
        "forward_time_ms": parts_ms["forward"],
        "backward_time_ms": backward_ms,
        "exchange_time_ms": exchange_ms,
        "optimizer_time_ms": parts_ms["update"],
        "began_s": step.began_s,
        "ended_s": step.ended_s,
        "evaluation_time_ms": step.evaluation_s * 1e3,
        "cpu_time_ms": step.cpu_s * 1e3,
        "exchanged_bytes": sum(b.size_bytes for b in step.buckets) or None,
        "skipped": step.skipped,
    }
    return row | step.counts


def phases(step: Step, clock: Clock, before: Mark | None) -> dict[str, float]:
    """Returns ms of a step's phases as ``change_points`` has them, and the elements of its batch.

    ``before`` is the end of the step before.
    """
    since = step.began if before is None else before
    parts_ms = _parts_ms(step, clock)
    parts_ms["backward"] += parts_ms.pop("buffers")
    copy_ms = 0.0
    if step.fetches:  # else nobody knows what comes before the forward pass
        fetched_ms = sum(clock.elapsed_s(f.began, f.ended) for f in step.fetches) * 1e3
        copy_ms = max(0.0, parts_ms["data"] - fetched_ms)
    parts_ms["data"] -= copy_ms
    return parts_ms | {
        COPY: copy_ms,
        "between": clock.elapsed_s(since, step.began) * 1e3,
        "step": clock.elapsed_s(since, step.ended) * 1e3,
        "elements": sum(part.elements for part in step.passes),
    }


def _parts_ms(step: Step, clock: Clock) -> dict[str, float]:
    """Returns ms of a step's data, buffers, forward and backward passes, and updates."""
    passes = step.passes
    marks = {
        "data": [(p.fetched, p.forward) for p in passes],
        "buffers": [sent for p in passes for sent in p.sending],
        "forward": [(p.forward, p.backward) for p in passes],
        "backward": [(p.backward, p.ended) for p in passes],
        "update": step.updates,
    }
    parts_ms = {
        name: sum(clock.elapsed_s(start, end) for start, end in pairs) * 1e3
        for name, pairs in marks.items()
    }
    parts_ms["forward"] -= parts_ms["buffers"]
    return parts_ms


def of_buckets(step: Step, clock: Clock) -> Iterator[dict[str, Any]]:
    """Yields a row for each bucket of a step, in ms from the start of its last backward pass."""
    start = step.passes[-1].backward
    for index, bucket in enumerate(step.buckets):
        if bucket.done is not None:
            yield {
                "bucket": index,
                "size_bytes": bucket.size_bytes,
                "ready_time_ms": clock.elapsed_s(start, bucket.ready) * 1e3,
                "done_time_ms": clock.elapsed_s(start, bucket.done) * 1e3,
            }


class EndedSteps:
    """Takes a loop's steps as they end, and writes their rows.

    Args:
        feed: keeps the samples of the steps after warm-up.
        warmup: steps that are recorded as warm-up.
        facts: returns the row on what is trained; called when the first step is written.
    """

    def __init__(
        self,
        loop: Loop,
        record: Record,
        feed: Feed,
        warmup: int,
        facts: Callable[[], dict[str, Any]],
    ) -> None:
        self.loop, self.record, self.feed = loop, record, feed
        self.warmup, self.facts = warmup, facts
        self.written = 0
        self._unread: list[Step] = []
        self._last_ended: Mark | None = None
        """Mark of the end of the step that was written last."""
        self._epoch = 0
        """Epoch of the newest batch: a loop that loads ahead fetches none in an epoch's last step.
        """
        self._recent_s: list[float] = []
        self._recent_waits_s: list[float] = []
        """Times that the same steps took for data."""
        self.long: LongWatch | None = None
        """Takes the steps between windows."""

    def collect(self) -> None:
        """Takes the steps that have ended since, and writes those that can be read."""
        self._unread += self.loop.ended
        self.loop.ended = []
        while self._unread and self.loop.clock.passed(self._unread[0].ended):
            self._write(self._unread.pop(0))

    def finish(self, wait: bool) -> None:
        """Ends the newest step; writes the rest if ``wait``, else what can be read."""
        self.loop.finish()
        if wait and (self._unread or self.loop.ended):
            self.loop.clock.wait()
        self.collect()
        self._unread = []

    def usual_s(self) -> float:
        """Returns a step's usual time in seconds; 0 before there is one."""
        return statistics.median(self._recent_s) if self._recent_s else 0.0

    def share_waited(self) -> float:
        """Returns the share of the last steps in which this rank waited for its data."""
        return sum(self._recent_waits_s) / max(sum(self._recent_s), 1e-9)

    def _write(self, step: Step) -> None:
        if step.profiled:
            return
        number, clock = self.written + step.untimed, self.loop.clock
        self.written = number + 1
        self._epoch = step.fetches[0].epoch if step.fetches else self._epoch
        # By the same clock as the step: a host that waits for its GPU does so within the step.
        before = self._last_ended if step.since is None else step.since
        self._last_ended = None if step.before_probes else step.ended
        between_ms = None if before is None else clock.elapsed_s(before, step.began) * 1e3
        self._recent_s = [*self._recent_s[1 - USUAL_OF :], clock.elapsed_s(step.began, step.ended)]
        waited_s = sum(clock.elapsed_s(p.fetched, p.forward) for p in step.passes)
        self._recent_waits_s = [*self._recent_waits_s[1 - USUAL_OF :], waited_s]
        if step.between_windows:
            if self.long is not None:
                self.long.add(number, phases(step, clock, before))
            return
        if number == 0:
            self.record.add("facts", **self.facts())
        is_warmup = number < self.warmup
        self.record.add(
            "steps",
            step=number,
            warmup=is_warmup,
            between_time_ms=between_ms,
            **row_of_step(step, clock, self._epoch),
        )
        for row in of_buckets(step, clock):
            self.record.add("buckets", step=number, **row)
        if not is_warmup:
            for fetch in step.fetches:
                self.feed.keep(fetch)
