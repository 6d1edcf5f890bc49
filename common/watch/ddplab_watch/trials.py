"""Tries what a diagnosis may propose: the last pass of the window, under DDP made otherwise.

A change is tried on a copy of the model, so that the script's own model, gradients, buckets and
optimizer are left alone. A visit makes a fresh DDP instance, as most noise is an instance's, and
times a few passes with their exchange; visits go in rounds whose order rotates, and the settings
as they are belong to every round. What a change makes of a pass is read from ratios within rounds.
"""

from __future__ import annotations

import contextlib
import copy
import gc
import os
import socket
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.nn.parallel import DistributedDataParallel

from ddplab_watch import private
from ddplab_watch.batches import tensors_in
from ddplab_watch.kept import Kept, free_host_bytes, left_as_it_was
from ddplab_watch.machine_cores import online_cores, own_cores
from ddplab_watch.record import Record
from ddplab_watch.team import Team

ROUNDS, WARMUP, STEPS = 6, 2, 3
"""Of six rounds the interval holds 95 %; DDP makes its final buckets in a visit's first pass."""
LEAST_ROUNDS = 3
LONGEST_S = 180.0
"""Upper bound on what all trials may take."""
CAPS_MIB = (0.5, 2.0, 8.0, 32.0)
"""Caps that are tried below the size of all gradients, and one bucket for all."""
FIRST_CAP_MIB = 1.0
"""Cap of DDP's first bucket, where a script gives none."""
COMPRESSIONS = {
    "fp16_compress_hook": default_hooks.fp16_compress_hook,
    "bf16_compress_hook": default_hooks.bf16_compress_hook,
}
AS_IT_IS = "as it is"


@dataclass(frozen=True)
class Change:
    """A change that is tried.

    Attributes:
        kind: what is changed: ``bucket_cap_mb``, ``compression``, ``no_sync``, ``threads`` …
        name: the change as a line of Python or a word.
        arguments: of DDP, where they differ from the script's.
        hook: the communication hook's name; None leaves the script's own.
        passes: forward and backward passes of a step; None leaves the script's own.
        last_only: exchange after a step's last pass only; None leaves it as it is.
        threads, cores: of this process; None leaves them.
    """

    kind: str
    name: str
    arguments: Mapping[str, Any] = field(default_factory=dict)
    hook: str | None = None
    passes: int | None = None
    last_only: bool | None = None
    threads: int | None = None
    cores: frozenset[int] | None = None


@dataclass(frozen=True)
class AsItIs:
    """The way in which the script exchanges gradients.

    Attributes:
        facts: of its DDP (``private.ddp_facts``).
        passes: forward and backward passes of a step.
        last_only: gradients are exchanged after the last of them only.
    """

    facts: Mapping[str, Any]
    passes: int
    last_only: bool

    @property
    def arguments(self) -> dict[str, Any]:
        """Returns the arguments that DDP was made with, where they are not its defaults."""
        defaults = {"bucket_cap_mb": None, "broadcast_buffers": True}
        names = ("find_unused_parameters", "static_graph", "gradient_as_bucket_view", *defaults)
        given = {name: self.facts[name] for name in names}
        return {name: v for name, v in given.items() if v != defaults.get(name, False)}


def changes(now: AsItIs, gradient_bytes: int, unused: bool, ranks: Sequence[dict]) -> list[Change]:
    """Returns the changes to try: the same ones, in one order, on all ranks.

    Args:
        now: how the script exchanges.
        gradient_bytes: of all gradients.
        unused: some rank's pass leaves a parameter without a gradient.
        ranks: of each rank ``host``, the ``cores`` that it may use and those of its ``machine``,
            and ``threads``; this rank's says ``own``.
    """
    found = [Change(AS_IT_IS, AS_IT_IS)]
    total_mib, cap_now = gradient_bytes / 2**20, now.facts["bucket_cap_mb"]
    caps = [cap for cap in CAPS_MIB if cap < total_mib]
    if total_mib > (cap_now or FIRST_CAP_MIB):  # else they are in one bucket as it is
        caps.append(float(f"{total_mib * 1.01:.3g}"))
    found += [
        Change("bucket_cap_mb", f"bucket_cap_mb={cap:g}", {"bucket_cap_mb": cap})
        for cap in caps
        if cap != cap_now
    ]
    found += [
        Change("compression", name, hook=name)
        for name in COMPRESSIONS
        if not now.facts["comm_hook"].endswith(name)
    ]
    if not now.facts["gradient_as_bucket_view"]:
        name = "gradient_as_bucket_view"
        found.append(Change(name, f"{name}=True", {name: True}))
    if now.facts["find_unused_parameters"] and not unused:
        name = "find_unused_parameters"
        found.append(Change(name, f"{name}=False", {name: False}))
    if not now.facts["static_graph"]:
        # It knows unused parameters from its first pass, and searches no more.
        static = {"static_graph": True, "find_unused_parameters": False}
        found.append(Change("static_graph", "static_graph=True", static))
    if not now.last_only:
        passes = max(2, now.passes)
        name = f"no_sync() but for the last of {passes} passes"
        found.append(Change("no_sync", name, passes=passes, last_only=True))
    return found + _of_the_process(ranks)


def _of_the_process(ranks: Sequence[dict]) -> list[Change]:
    """Returns changes of threads and cores: those of ranks that share a host's cores.

    Ranks that were all given fewer cores than they are get some of the machine's.
    """
    own = next(rank for rank in ranks if rank["own"])
    threads, cores = own["threads"], own["cores"]
    other_threads = other_cores = False
    for rank in ranks:
        beside = [r for r in ranks if r["host"] == rank["host"] and r["cores"] == rank["cores"]]
        has_enough = len(rank["cores"]) >= len(beside)
        pool = sorted(rank["cores"] if has_enough else rank["machine"])
        share = len(pool) // len(beside)
        if not share:
            continue
        other_threads |= has_enough and share != rank["threads"]
        other_cores |= len(beside) > 1
        if rank["own"]:
            place = [r["rank"] for r in beside].index(rank["rank"])
            threads = share if has_enough else threads
            cores = pool[place * share : (place + 1) * share]
    found = []
    if other_threads:
        found.append(Change("threads", "a thread for each core of a rank", threads=threads))
    if other_cores:
        name = "cores of its own for each rank"
        found.append(Change("affinity", name, cores=frozenset(cores)))
    return found


class Trials:
    """The trials of one rank; all ranks of the team make them together.

    Args:
        kept: the last pass.
        team: the ranks.
        record: where rows go.
        now: how the script exchanges.
        step_s: a step's usual time, which says how many rounds there can be.
    """

    def __init__(self, kept: Kept, team: Team, record: Record, now: AsItIs, step_s: float) -> None:
        self.kept, self.team, self.record, self.now, self.step_s = kept, team, record, now, step_s
        self.clock = team.clock
        self.model: nn.Module | None = None

    def run(self) -> None:
        """Tries all changes; says what could not be tried."""
        began = time.monotonic()
        self.now = self.team.gather(self.now)[0]
        with left_as_it_was(self.kept.inner), _quick_collection():
            worked, why = self.team.agreed(self.prepare)
            if worked:
                self.rounds(began)
            else:
                self.record.unseen("changes that were to be tried", why)
            self.model = None
        self.record.add("tried", seconds=time.monotonic() - began)

    def prepare(self) -> None:
        """Copies the model. Raises where that, or making the script's DDP anew, cannot be."""
        hook = self.now.facts["comm_hook"]
        if hook and not hook.endswith(tuple(COMPRESSIONS)):
            raise RuntimeError("the script has a communication hook of its own")
        if not self.kept.gradients:
            raise RuntimeError("no output of the model has a gradient")
        if any(t.requires_grad for _, t in tensors_in((self.kept.args, self.kept.kwargs))):
            # A backward pass would reach the script's own gradients through them.
            raise RuntimeError("the model is called with what another module computed")
        if not self.has_room():
            raise RuntimeError("a copy of the model may not fit into memory")
        self.model = copy.deepcopy(self.kept.inner)

    def has_room(self, more_bytes: int = 0) -> bool:
        """Returns True if weights, gradients and buckets surely fit into memory once more.

        Args:
            more_bytes: that have to be free besides.
        """
        needed = 4 * sum(p.numel() * p.element_size() for p in self.kept.inner.parameters())
        free = self.free_bytes()
        return free is not None and free > needed + more_bytes

    def free_bytes(self) -> int | None:
        """Returns the memory that is free where the model is; None if it is not known."""
        if self.team.device.type == "cuda":
            free, _ = torch.cuda.mem_get_info()
            return free + torch.cuda.memory_reserved() - torch.cuda.memory_allocated()
        known = free_host_bytes()
        return known[0] if known else None

    def leaves_some_unused(self) -> bool:
        """Returns True if the pass leaves a trained parameter without a gradient."""
        with torch.enable_grad():
            torch.autograd.backward(*self.kept.forward(self.model))
        trained = [p for p in self.model.parameters() if p.requires_grad]
        unused = any(parameter.grad is None for parameter in trained)
        self.model.zero_grad(set_to_none=True)
        return unused

    def rounds(self, began: float) -> None:
        """Visits all changes in rotated rounds."""
        here = {
            "rank": self.team.rank,
            "host": socket.gethostname(),
            "cores": sorted(own_cores()),
            "machine": sorted(online_cores()),
            "threads": torch.get_num_threads(),
            "unused": self.leaves_some_unused(),
        }
        ranks = self.team.gather(here)
        unused = any(rank["unused"] for rank in ranks)
        if unused and not self.now.facts["find_unused_parameters"]:
            # Static graph: DDP must learn it in training, and would wait here for a gradient.
            self.record.unseen("changes that were to be tried", "parameters without a gradient")
            return
        known = [rank | {"own": rank["rank"] == self.team.rank} for rank in ranks]
        left = changes(self.now, self.kept.gradient_bytes, unused, known)
        most = self.affordable(len(left))
        if most < LEAST_ROUNDS:
            why = f"steps of {self.step_s:.1f} s: it would take too long"
            self.record.unseen("changes that were to be tried", why)
            return
        free_before = self.free_bytes()
        for round_ in range(most):
            # A model that keeps something of each pass must not fill the memory: a round may take
            # as much as the one before.
            free = self.free_bytes()
            taken, free_before = max(0, free_before - free), free
            if not self.team.all_agree(self.has_room(more_bytes=taken)):
                why = "another round might fill the memory"
                self.record.unseen(f"changes after {round_} rounds", why)
                return
            if not self.team.all_agree(time.monotonic() - began < LONGEST_S):
                return
            turn = round_ % len(left)
            for order, change in enumerate([*left[turn:], *left[:turn]]):
                rows: list[dict] = []
                worked, why = self.team.agreed(
                    lambda change=change, rows=rows: rows.extend(self.visit(change))
                )
                if not worked:
                    self.record.unseen(f"the change {change.name}", why)
                    left = [other for other in left if other is not change]
                    continue
                keys = {"kind": change.kind, "setting": change.name, "round": round_}
                for row in rows:
                    self.record.add("trials", **keys, order=order, **row)

    def affordable(self, count: int) -> int:
        """Returns the rounds that there is time for; the same number on all ranks."""
        round_s = max(self.team.gather(self.step_s)) * count * (WARMUP + STEPS)
        return min(ROUNDS, int(LONGEST_S / max(round_s, 1e-9)))

    def visit(self, change: Change) -> list[dict]:
        """Times steps of a fresh DDP instance; returns a row for each that is no warm-up."""
        passes = change.passes or self.now.passes
        last_only = self.now.last_only if change.last_only is None else change.last_only
        with _threads(change.threads), _cores(change.cores):
            ddp = self.wrapped(change)
            times_s = [self.step_s_of(ddp, passes, last_only) for _ in range(WARMUP + STEPS)]
            self.model.zero_grad(set_to_none=True)
            del ddp
            gc.collect()  # its hooks and buckets
        return [
            {"iteration": iteration, "passes": passes, "step_time_ms": taken_s / passes * 1e3}
            for iteration, taken_s in enumerate(times_s[WARMUP:])
        ]

    def wrapped(self, change: Change) -> DistributedDataParallel:
        """Wraps the copy in DDP, made as the script's but for the change."""
        arguments = self.now.arguments | dict(change.arguments)
        ddp = DistributedDataParallel(self.model, process_group=self.team.group, **arguments)
        hook = change.hook or self.now.facts["comm_hook"].rpartition(".")[2]
        if hook:
            ddp.register_comm_hook(self.team.group, COMPRESSIONS[hook])
        return ddp

    def step_s_of(self, ddp: DistributedDataParallel, passes: int, last_only: bool) -> float:
        """Runs a step of so many passes; returns its seconds, without an update."""
        self.model.zero_grad(set_to_none=True)
        self.team.meet()
        start = self.clock.mark()
        for index in range(passes):
            silent = last_only and index < passes - 1
            with ddp.no_sync() if silent else contextlib.nullcontext(), torch.enable_grad():
                torch.autograd.backward(*self.kept.forward(ddp))
        end = self.clock.mark()
        self.clock.wait()
        return self.clock.elapsed_s(start, end)


def exchange_of(ddp: DistributedDataParallel, passes: int, sent_bytes: int) -> AsItIs:
    """Returns how a script exchanges, from its DDP and what its last step was seen to send.

    Where no bucket was seen, ``sent_bytes`` is 0, and one exchange a step is taken for granted.
    """
    facts = private.ddp_facts(ddp)
    trained = [p for p in ddp.parameters() if p.requires_grad]
    gradient_bytes = sum(p.numel() * p.element_size() for p in trained)
    last_only = passes > 1 and sent_bytes < 1.5 * gradient_bytes
    return AsItIs(facts, passes, last_only)


@contextmanager
def _quick_collection() -> Iterator[None]:
    """Hides all objects that exist from Python's collector, so that collecting DDP is quick."""
    ours = not gc.get_freeze_count()  # else the script has hidden some, and they stay so
    if ours:
        gc.collect()
        gc.freeze()
    try:
        yield
    finally:
        if ours:
            gc.unfreeze()


@contextmanager
def _threads(count: int | None) -> Iterator[None]:
    before = torch.get_num_threads()
    if count is not None:
        torch.set_num_threads(count)
    try:
        yield
    finally:
        if count is not None:
            torch.set_num_threads(before)


@contextmanager
def _cores(cores: frozenset[int] | None) -> Iterator[None]:
    """Binds all threads of this process to cores, and puts back what each was bound to."""
    if cores is None:
        yield
        return
    before = {}
    for thread in _thread_ids():
        with contextlib.suppress(OSError):  # it has ended
            before[thread] = os.sched_getaffinity(thread)
            os.sched_setaffinity(thread, cores)
    allowed = before[os.getpid()]
    try:
        yield
    finally:
        for thread in _thread_ids():
            with contextlib.suppress(OSError):
                os.sched_setaffinity(thread, before.get(thread, allowed))


def _thread_ids() -> list[int]:
    return [int(entry.name) for entry in Path("/proc/self/task").iterdir()]
