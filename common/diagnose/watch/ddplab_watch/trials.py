"""Tries what a diagnosis may propose: the last pass of the window, under DDP made otherwise.

A change is tried on a copy of the model, so that the script's own model, gradients, buckets and
optimizer are left alone. A visit makes a fresh DDP instance, as most noise is an instance's, and
times a few passes with their exchange; visits go in rounds whose order rotates, and the settings
as they are belong to every round. What a change makes of a pass is read from ratios within rounds.

Where a rank waits for its data, other numbers of loader workers are tried in rounds of their own:
each pass then follows a batch that is loaded for it.
"""

from __future__ import annotations

import contextlib
import copy
import gc
import itertools
import os
import socket
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn.parallel.distributed import DistributedDataParallel

from ddplab_watch.batches import tensors_in
from ddplab_watch.changes import COMPRESSIONS, AsItIs, Change, changes, worker_changes
from ddplab_watch.kept import Kept, free_bytes, has_room, left_as_it_was, with_threads
from ddplab_watch.loading import Loading
from ddplab_watch.machine_cores import online_cores, own_cores
from ddplab_watch.owed import OwedPasses
from ddplab_watch.record import Record
from ddplab_watch.team import Failed, Team, telling

ROUNDS = 6
"""Rounds of trials; with six the interval is one of 95 %."""
LEAST_ROUNDS = 3
LEAST_FREE = 0.75
"""Share of the free memory that trials leave to the script, where its model keeps something of each
pass: the training goes on after them."""
LONGEST_S = 180.0
"""Upper bound on what all trials may take."""
LEAST_WAIT = 0.05
"""Share of a step that a rank waits for its data, from which on workers are tried."""


class Trials:
    """The trials of one rank; all ranks of the team make them together.

    Args:
        now: exchange of the script.
        step_s: usual time of a step, which says how many rounds there can be.
        waits: the share of it in which this rank waits for its data.
        loading: reads how the script loads; may raise.
    """

    def __init__(
        self,
        kept: Kept,
        team: Team,
        record: Record,
        now: AsItIs,
        step_s: float,
        waits: float,
        loading: Callable[[], Loading],
    ) -> None:
        self.kept, self.team, self.record, self.now, self.step_s = kept, team, record, now, step_s
        self.waits, self.read_loading = waits, loading
        self.clock = team.clock
        self.model: nn.Module | None = None
        self.loading: Loading | None = None

    def run(self) -> None:
        """Tries all changes; says what could not be tried."""
        began = time.monotonic()
        self.now = self.team.gather(self.now)[0]
        with ExitStack() as stack:
            stack.enter_context(_quick_collection())
            putting_back = left_as_it_was(self.kept.inner, self.team.device)
            with telling(self.record, "changes that were to be tried"):
                self.team.on_all(lambda: stack.enter_context(putting_back))
                self.team.on_all(self.prepare)
                self.team.on_all(self.look_for_unused)
                self.rounds(began)
            self.model = self.loading = None
        self.record.add("tried", seconds=time.monotonic() - began)

    def prepare(self) -> None:
        """Copies the model. Raises where that, or making the script's DDP anew, cannot be."""
        if why := self.kept.why_once():
            raise RuntimeError(why)
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

    def has_room(self) -> bool:
        """Returns True if a second model, its gradients and buckets surely fit into memory."""
        if self.team.device.type == "cuda":
            return has_room(self.team.device)
        needed = 4 * sum(parameter.nbytes for parameter in self.kept.inner.parameters())
        free = free_bytes(self.team.device)
        return free is not None and free > needed

    def look_for_unused(self) -> None:
        """Notes whether the pass leaves a trained parameter without a gradient."""
        with torch.enable_grad():
            torch.autograd.backward(*self.kept.forward(self.model))
        trained = [p for p in self.model.parameters() if p.requires_grad]
        self.used = [parameter for parameter in trained if parameter.grad is not None]
        self.has_unused = len(self.used) < len(trained)
        self.model.zero_grad(set_to_none=True)

    def rounds(self, began: float) -> None:
        """Visits all changes in rotated rounds."""
        this_rank = {
            "rank": self.team.rank,
            "host": socket.gethostname(),
            "cores": sorted(own_cores()),
            "machine": sorted(online_cores()),
            "threads": torch.get_num_threads(),
            "unused": self.has_unused,
        }
        ranks = self.team.gather(this_rank)
        unused = any(rank["unused"] for rank in ranks)
        if unused and not self.now.facts["find_unused_parameters"]:
            # Static graph: DDP must learn it in training, and would wait here for a gradient.
            self.record.unseen("changes that were to be tried", "parameters without a gradient")
            return
        all_ranks = [rank | {"own": rank["rank"] == self.team.rank} for rank in ranks]
        self.free_at_first = free_bytes(self.team.device)
        self.visits(changes(self.now, self.kept.gradient_bytes, unused, all_ranks), began)
        if max(self.team.gather(self.waits)) >= LEAST_WAIT:
            self.other_workers(all_ranks, began)

    def other_workers(self, ranks: Sequence[dict], began: float) -> None:
        """Tries other numbers of loader workers, the same ones on all ranks."""
        with telling(self.record, "loader workers that were to be tried"):
            self.loading = self.team.on_all(self.read_loading)
            now = self.loading.workers
            self.visits(worker_changes(now, max(self.team.gather(now)), ranks), began)

    def visits(self, remaining: list[Change], began: float) -> None:
        """Visits changes in rotated rounds; the first is the script as it is."""
        most = self.affordable(remaining)
        if most < LEAST_ROUNDS:
            why = f"steps of {self.step_s:.1f} s: it would take too long"
            self.record.unseen("changes that were to be tried", why)
            return
        free_before = free_bytes(self.team.device)
        for round_ in range(most):
            if not remaining:  # each of them failed
                return
            # A model may keep something of each pass: a round may take as much as the one before.
            free = free_bytes(self.team.device)
            taken, free_before = max(0, free_before - free), free
            leaves_free = free - taken > LEAST_FREE * self.free_at_first
            if not self.team.all_agree(leaves_free and self.has_room()):
                why = "another round would leave the script too little memory"
                self.record.unseen(f"changes after {round_} rounds", why)
                return
            if not self.team.all_agree(time.monotonic() - began < LONGEST_S):
                return
            turn = round_ % len(remaining)
            for order, change in enumerate([*remaining[turn:], *remaining[:turn]]):
                try:
                    rows = self.visit(change)
                except Failed as failed:
                    self.record.unseen(f"the change {change.name}", str(failed))
                    remaining = [other for other in remaining if other is not change]
                    continue
                keys = {"kind": change.kind, "setting": change.name, "round": round_}
                for row in rows:
                    self.record.add("trials", **keys, order=order, **row)

    def affordable(self, remaining: Sequence[Change]) -> int:
        """Returns the rounds that there is time for; the same number on all ranks."""
        round_s = max(self.team.gather(self.step_s)) * sum(
            sum(change.steps) for change in remaining
        )
        return min(ROUNDS, int(LONGEST_S / max(round_s, 1e-9)))

    def visit(self, change: Change) -> list[dict]:
        """Times steps of a fresh DDP instance; returns a row for each that is no warm-up.

        Steps that load batches make one row, of their mean: several come at once from workers.
        What may fail on one rank alone is agreed on before the others wait for it.

        Raises Failed: on all ranks, if a part of it has failed on any.
        """
        steps = change.steps[0] + change.steps[1]
        times_s: list[float] = []
        with ExitStack() as stack:
            stack.callback(gc.collect)  # DDP's hooks and buckets
            fetches = self.team.on_all(lambda: self.apply_change(change, steps, stack))
            stack.callback(self.model.zero_grad, set_to_none=True)
            passes = self.team.on_all(lambda: OwedPasses(self.wrap_in_ddp(change), self.used))
            stack.callback(passes.remove)
            for _ in range(steps):
                taken_s = self.team.on_all(
                    lambda: self.step_s_without_update(passes, change, fetches)
                )
                times_s.append(taken_s)
            if change.workers is not None:
                next(fetches, None)  # there is none, and workers end
        times_s = times_s[change.steps[0] :]
        if change.workers is not None:
            times_s = [statistics.fmean(times_s)]
        count = change.passes or self.now.passes
        return [
            {"iteration": iteration, "passes": count, "step_time_ms": taken_s / count * 1e3}
            for iteration, taken_s in enumerate(times_s)
        ]

    def apply_change(self, change: Change, steps: int, stack: ExitStack) -> Iterator[Any]:
        """Changes threads and cores until ``stack`` ends.

        Returns:
            what is fetched before each pass of so many steps: batches, or nothing.
        """
        if change.threads is not None:
            stack.enter_context(with_threads(change.threads))
        stack.enter_context(_cores(change.cores))
        if change.workers is None:
            return itertools.repeat(None)
        return self.loading.fetches(change.workers, steps * (change.passes or self.now.passes))

    def wrap_in_ddp(self, change: Change) -> DistributedDataParallel:
        """Wraps the copy in DDP, made as the script's but for the change."""
        arguments = self.now.arguments | dict(change.arguments)
        ddp = DistributedDataParallel(self.model, process_group=self.team.group, **arguments)
        hook = change.hook or self.now.facts["comm_hook"].rpartition(".")[2]
        if hook:
            ddp.register_comm_hook(self.team.group, COMPRESSIONS[hook])
        return ddp

    def step_s_without_update(
        self, passes: OwedPasses, change: Change, fetches: Iterator[Any]
    ) -> float:
        """Runs a step's passes, each after a fetch; returns its seconds: all but the update.

        The ranks have met, as they have agreed on what came before.

        Raises what a pass has raised here, after what it owed the other ranks was sent.
        """
        count = change.passes or self.now.passes
        last_only = self.now.last_only if change.last_only is None else change.last_only
        self.model.zero_grad(set_to_none=True)
        self.clock.wait()
        start = self.clock.mark()
        for index in range(count):
            silent = last_only and index < count - 1
            passes.run(self.kept, silent, load=lambda: next(fetches))
        end = self.clock.mark()
        self.clock.wait()
        passes.check()
        return self.clock.elapsed_s(start, end)


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
def _cores(cores: frozenset[int] | None) -> Iterator[None]:
    """Binds all threads of this process to cores, and puts back what each was bound to.

    Raises OSError where it may not compute on them.
    """
    if cores is None:
        yield
        return
    before = {}
    try:
        for thread in _thread_ids():
            with contextlib.suppress(ProcessLookupError):  # it has ended
                before[thread] = os.sched_getaffinity(thread)
                os.sched_setaffinity(thread, cores)
        yield
    finally:
        allowed = before[os.getpid()]
        for thread in _thread_ids():
            with contextlib.suppress(OSError):
                os.sched_setaffinity(thread, before.get(thread, allowed))


def _thread_ids() -> list[int]:
    return [int(entry.name) for entry in Path("/proc/self/task").iterdir()]
