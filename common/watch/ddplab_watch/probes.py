"""Measures, after the window, what a step is made of: passes without exchange, and all-reduces.

The training goes on as if nothing had been: gradients are taken by ``torch.autograd.grad``, which
leaves ``.grad`` and DDP's hooks alone; buffers and random numbers are put back; no optimizer
updates. A pass starts from the model's outputs with the gradients that the script's own loss gave
them, so that the loss itself need not be known.
"""

from __future__ import annotations

import itertools
import random
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ddplab_watch.batches import halved, tensors_in
from ddplab_watch.record import Record

REPEATS = 5
ALONE = 3
"""Ranks that compute alone, one after another: the others wait for each."""
LONGEST_S = 120.0
"""Upper bound on what the probes may take; far below any watchdog's limit."""
SHARES = (1.0, 0.5, 0.25, 1 / 16, 1 / 64, 1 / 512)
"""Sizes of all-reduces, as shares of all gradients; and one element."""
CALLS, SMALL_CALLS, SMALL_BYTES = 3, 12, 2**16
"""All-reduces of a size in a round. Small ones may stall, and are repeated more often."""
WIRES = {
    "allreduce-samples": torch.float32,
    "allreduce-samples-bfloat16": torch.bfloat16,
}
"""Tables, and what gradients are sent as in each."""
ROUNDS = 3
COPY_BYTES = 2**26
HERE = timedelta(seconds=20)
"""Rank 0 waits so long for the other ranks' watches, which come after the same update."""


@dataclass
class Kept:
    """The last pass of the window: how the model was called, and what its outputs' gradients were.

    Attributes:
        module: the outermost module, and ``inner`` the same without DDP around it.
        samples: of its batch.
        gradients: by the place of an output among all of the pass's tensors.
    """

    module: nn.Module
    inner: nn.Module
    args: tuple
    kwargs: dict
    samples: int
    gradients: dict[int, Tensor]
    autocast: tuple[bool, torch.dtype]


def outputs_of(output: Any) -> list[Tensor]:
    """Returns the outputs that a loss is computed from: the loss where a model returns it."""
    found = list(tensors_in(output))
    named = [tensor for name, tensor in found if name == "loss" and tensor.requires_grad]
    return named or [tensor for _, tensor in found if tensor.requires_grad]


def keep_gradients(output: Any, into: dict[int, Tensor]) -> None:
    """Keeps the gradients of a pass's outputs, when they come."""
    for place, tensor in enumerate(outputs_of(output)):
        tensor.register_hook(lambda gradient, place=place: into.__setitem__(place, gradient))


@contextmanager
def left_as_it_was(module: nn.Module) -> Iterator[None]:
    """Puts back a module's buffers and all random numbers at the end of the block."""
    buffers = [(buffer, buffer.detach().to("cpu", copy=True)) for buffer in module.buffers()]
    states = (random.getstate(), torch.get_rng_state())
    on_gpu = torch.cuda.get_rng_state() if torch.cuda.is_initialized() else None
    numpy = sys.modules.get("numpy")
    of_numpy = numpy.random.get_state() if numpy is not None else None
    try:
        yield
    finally:
        with torch.no_grad():
            for buffer, before in buffers:
                buffer.copy_(before)
        random.setstate(states[0])
        torch.set_rng_state(states[1])
        if on_gpu is not None:
            torch.cuda.set_rng_state(on_gpu)
        if numpy is not None:
            numpy.random.set_state(of_numpy)


def all_are_here(store: Any, job: str, rank: int, ranks: int) -> bool:
    """Returns True on all ranks if the watch of every rank has come here; False on all others.

    A rank whose watch has ended trains on, and a collective of the probes would meet one of its
    training. So the ranks agree through the store, where nobody waits for ever: rank 0 waits for
    all of them, decides, and the others wait for that.

    Args:
        store: of the job.
        job: a text that no other watch of this job uses.
        rank, ranks: of this process.
    """
    if store is None:
        return False
    store.set(f"{job}/{rank}", "here")
    if rank == 0:
        try:
            store.wait([f"{job}/{other}" for other in range(ranks)], HERE)
            store.set(f"{job}/decided", "go on")
        except RuntimeError:  # of a store: it took too long
            store.set(f"{job}/decided", "leave out")
    try:
        store.wait([f"{job}/decided"], 2 * HERE)
    except RuntimeError:
        return False
    return store.get(f"{job}/decided") == b"go on"


class Probes:
    """The probes of one rank; all ranks of the group run them together.

    Args:
        kept: the last pass.
        group: the ranks; None for a process by itself.
        clock: of the device.
        record: where rows go.
        step_s: a step's usual time, which says how much may be repeated.
    """

    def __init__(self, kept: Kept, group: Any, clock: Any, record: Record, step_s: float) -> None:
        self.kept, self.group, self.clock, self.record = kept, group, clock, record
        self.ranks = dist.get_world_size(group) if group is not None else 1
        self.rank = dist.get_rank(group) if group is not None else 0
        self.device = next(kept.inner.parameters()).device
        self.step_s = step_s
        self.parameters = {name: p for name, p in kept.inner.named_parameters() if p.requires_grad}

    def run(self) -> None:
        """Measures all that can be; says what could not be."""
        began = time.monotonic()
        with left_as_it_was(self.kept.inner):
            worked, why = self.agreed(self.try_out)
            if worked:
                # A model may take one size of batch only; all ranks must leave out the same.
                self.sizes = [1.0]
                for size in (0.5, 2.0):
                    if self.agreed(lambda size=size: self.try_size(size))[0]:
                        self.sizes.append(size)
                self.passes()
            else:
                self.record.unseen("passes without exchange", why)
        gradient_bytes = sum(p.numel() * p.element_size() for p in self.parameters.values())
        self.copies(gradient_bytes)
        for table, dtype in WIRES.items():
            if self.ranks > 1 and self.agreed_to_go_on(time.monotonic() - began < LONGEST_S):
                try:
                    self.all_reduces(gradient_bytes // 4, dtype, table)
                except (RuntimeError, TypeError) as error:  # a backend that does not add these
                    self.record.unseen(f"all-reduces of {dtype}", str(error).splitlines()[0])
        self.record.add("probed", seconds=time.monotonic() - began)

    def agreed(self, attempt: Callable[[], None]) -> tuple[bool, str]:
        """Tries something on all ranks; returns whether it worked on each, and why not here."""
        why = ""
        try:
            attempt()
        except Exception as error:  # whatever a script's model raises
            why = f"{type(error).__name__}: {error}"
        failed = torch.tensor([float(bool(why))], device=self.device)
        if self.ranks > 1:
            dist.all_reduce(failed, group=self.group)
        worked = not failed.item()
        return worked, why or ("" if worked else "it failed on another rank")

    def agreed_to_go_on(self, here: bool) -> bool:
        """Returns True if every rank would: a rank by itself would wait for the others."""

        def attempt() -> None:
            if not here:
                raise RuntimeError

        return self.agreed(attempt)[0]

    def try_out(self) -> None:
        """Runs a pass; raises where there can be none."""
        if self.step_s * REPEATS * (3 + min(ALONE, self.ranks)) > LONGEST_S:
            raise RuntimeError(f"steps of {self.step_s:.0f} s: it would take too long")
        if not self.kept.gradients:
            raise RuntimeError("no output of the model has a gradient")
        self.one_pass(1.0)

    def try_size(self, size: float) -> None:
        """Runs a pass of another size; raises where there can be none, or memory is short."""
        if round(self.kept.samples * size) < 1 or (size > 1 and not self.has_room()):
            raise RuntimeError("no such batch")
        self.one_pass(size)

    def has_room(self) -> bool:
        """Returns True if twice the batch surely fits into memory."""
        if self.device.type == "cuda":
            free, _ = torch.cuda.mem_get_info()
            peak = torch.cuda.max_memory_allocated()
            return free + torch.cuda.memory_reserved() > 2.2 * peak
        try:
            lines = Path("/proc/meminfo").read_text().splitlines()
            known = dict(line.split(":") for line in lines)
            free_kib, all_kib = (int(known[n].split()[0]) for n in ("MemAvailable", "MemTotal"))
        except (OSError, KeyError, ValueError):
            return False
        return free_kib > all_kib / 2

    def passes(self) -> None:
        """Times passes in rotated order: all ranks at once, and a few of them alone."""
        arms: list[tuple[float, bool]] = [(size, True) for size in self.sizes]
        if self.ranks > 1:
            arms.append((1.0, False))
        alone = sorted({0, self.ranks - 1, *range(min(ALONE - 1, self.ranks))})
        for repeat in range(REPEATS):
            shift = repeat % len(arms)
            for size, together in arms[shift:] + arms[:shift]:
                self.one_pass(size)  # the size before must not be felt
                for turn in [None] if together else alone:
                    self.together()
                    if turn in (None, self.rank):
                        watched = together and size == 1.0
                        times, ready = self.one_pass(size, watched=watched)
                        self.record.add(
                            "probes",
                            batch_per_rank=max(1, round(self.kept.samples * size)),
                            together=together,
                            repeat=repeat,
                            **times,
                        )
                        for row in ready:
                            self.record.add("gradient-ready-times", iteration=repeat, **row)
                self.together()

    def one_pass(self, size: float, watched: bool = False) -> tuple[dict, list[dict]]:
        """Runs a forward and a backward pass without an exchange.

        Returns:
            forward_time_ms and backward_time_ms; rows of gradients' ready times if ``watched``.
        """
        kept, clock = self.kept, self.clock
        args = halved(kept.args, kept.samples, size)
        kwargs = halved(kept.kwargs, kept.samples, size)
        names, parameters = list(self.parameters), list(self.parameters.values())
        ready: dict[str, Any] = {}
        handles = []
        if watched:
            handles = [
                parameter.register_hook(lambda _, name=name: ready.__setitem__(name, clock.mark()))
                for name, parameter in self.parameters.items()
            ]
        enabled, dtype = kept.autocast
        clock.wait()
        marks = [clock.mark()]
        try:
            with torch.enable_grad():
                with torch.autocast(self.device.type, dtype, enabled=enabled):
                    outputs = outputs_of(kept.inner(*args, **kwargs))
                marks.append(clock.mark())
                chosen = [
                    (o, kept.gradients[i]) for i, o in enumerate(outputs) if i in kept.gradients
                ]
                tensors = [output for output, _ in chosen]
                starts = [halved(start, kept.samples, size) for _, start in chosen]
                torch.autograd.grad(tensors, parameters, starts, allow_unused=True)
            marks.append(clock.mark())
        finally:
            for handle in handles:
                handle.remove()
        clock.wait()
        forward_s, backward_s = (clock.elapsed_s(a, b) for a, b in itertools.pairwise(marks))
        times = {"forward_time_ms": forward_s * 1e3, "backward_time_ms": backward_s * 1e3}
        order = list(ready)
        rows = [
            {
                "parameter": name,
                "registration_index": names.index(name),
                "ready_index": order.index(name),
                "dtype": str(self.parameters[name].dtype).removeprefix("torch."),
                "size_bytes": self.parameters[name].numel() * self.parameters[name].element_size(),
                "ready_time_ms": clock.elapsed_s(marks[1], mark) * 1e3,
            }
            for name, mark in ready.items()
        ]
        return times, rows

    def together(self) -> None:
        """Waits until all ranks have come here."""
        if self.ranks > 1:
            self.clock.wait()
            dist.all_reduce(torch.zeros(1, device=self.device), group=self.group)
            self.clock.wait()

    def copies(self, gradient_bytes: int) -> None:
        """Times the way of a gradient into a bucket and back, as it is or through 16 bits."""
        numel = max(1, min(gradient_bytes, COPY_BYTES) // 4)
        gradient = torch.zeros(numel, device=self.device)
        bucket = torch.zeros_like(gradient)
        for repeat in range(-1, REPEATS):
            for name, narrow in (("copy", None), ("fp16", torch.float16), ("bf16", torch.bfloat16)):
                self.clock.wait()
                start = self.clock.mark()
                if narrow is None:
                    torch.mul(gradient, 0.5, out=bucket)
                    gradient.copy_(bucket)
                else:
                    gradient.copy_(gradient.to(narrow).div_(2))
                end = self.clock.mark()
                self.clock.wait()
                if repeat >= 0:
                    time_ms = self.clock.elapsed_s(start, end) * 1e3
                    row = {"cost": name, "size_bytes": numel * 4, "repeat": repeat}
                    self.record.add("costs", **row, time_ms=time_ms)

    def all_reduces(self, most: int, dtype: torch.dtype, table: str) -> None:
        """Times all-reduces of one element up to ``most``, one after another."""
        sizes = sorted({1, *(max(1, int(most * share)) for share in SHARES)})
        for round_ in range(ROUNDS):
            for numel in sizes if round_ % 2 == 0 else sizes[::-1]:
                size_bytes = numel * dtype.itemsize
                small = size_bytes <= SMALL_BYTES
                tensor = torch.zeros(numel, device=self.device, dtype=dtype)
                self.together()
                marks = [self.clock.mark()]
                for _ in range(SMALL_CALLS if small else CALLS):
                    dist.all_reduce(tensor, group=self.group)
                    marks.append(self.clock.mark())
                self.clock.wait()
                times = [self.clock.elapsed_s(a, b) * 1e3 for a, b in itertools.pairwise(marks)]
                if small:  # a stalled call has no weight, and all sizes have as many rows
                    times = [sorted(times)[len(times) // 2]] * CALLS
                for iteration, time_ms in enumerate(times):
                    self.record.add(
                        table,
                        mode="sequential",
                        total_elements=numel,
                        total_bytes=size_bytes,
                        in_flight=1,
                        round=round_,
                        iteration=iteration,
                        time_ms=time_ms,
                    )
