"""The parts of a watch from the first update on: what a rank is, what it trains, where rows go."""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from ddplab_watch import hooks, private, rows
from ddplab_watch.calls import Calls
from ddplab_watch.ended_steps import EndedSteps
from ddplab_watch.feed import Feed
from ddplab_watch.hooks import Hooks
from ddplab_watch.machine_cores import CpuTimes
from ddplab_watch.marks import clock_of
from ddplab_watch.options import Options
from ddplab_watch.pauses import Memory, Pauses
from ddplab_watch.placement import placement
from ddplab_watch.record import Record
from ddplab_watch.stacks import Stacks
from ddplab_watch.steps import Loop
from ddplab_watch.surroundings import surroundings
from ddplab_watch.team import same_folder


@dataclass
class Progress:
    """The steps of a watch so far.

    Attributes:
        options: settings of the watch, which say how long its stages are.
        updated: steps that have been updated; the newest may not be written yet.
        profiled_steps: steps that go on under the profiler: one to warm up, and those that it
            records.
    """

    options: Options
    updated: int = 0
    profiled_steps: int = 0

    def is_near_end(self) -> bool:
        """Returns True in the steps after the window, a pass of which the probes repeat."""
        options = self.options
        after_window = self.updated >= options.warmup + options.window
        return options.probe and not options.to_end and after_window

    def is_last(self) -> bool:
        """Returns True in the last step that is watched, whose gradients the probes start from."""
        last = self.options.last_step + self.profiled_steps
        return self.options.probe and not self.options.to_end and self.updated == last - 1


@dataclass(frozen=True)
class Session:
    """A watch that has begun.

    Attributes:
        thread_id: identity of the thread that trains.
        rank, ranks: number of this rank, and how many there are.
        device: device of the model.
        parameters: parameters of the optimizer.
        roots: outermost modules that hold the parameters; found by ``begin``.
    """

    options: Options
    progress: Progress
    thread_id: int
    rank: int
    ranks: int
    device: torch.device
    parameters: list[nn.Parameter]
    roots: list[nn.Module]
    record: Record
    loop: Loop
    feed: Feed
    calls: Calls
    steps: EndedSteps
    memory: Memory
    pauses: Pauses
    stacks: Stacks

    @classmethod
    def opened(cls, optimizer: Optimizer, options: Options, feed: Feed) -> Session:
        """Makes the parts of a watch at an optimizer's first update.

        Raises:
            FileExistsError: an earlier run has used the bundle.
        """
        in_group = dist.is_available() and dist.is_initialized()
        rank = dist.get_rank() if in_group else int(os.environ.get("RANK", 0))
        ranks = dist.get_world_size() if in_group else int(os.environ.get("WORLD_SIZE", 1))
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        roots: list[nn.Module] = []
        device = parameters[0].device
        feed.counts_tokens = device.type != "cpu"
        store = private.job_store() if in_group and ranks > 1 else None
        record = Record(record_path(options, rank, store), options.anonymise)
        progress = Progress(options)
        loop = Loop(clock_of(device), time.perf_counter, time.process_time)
        calls = Calls(loop, device, feed, progress.is_near_end, progress.is_last)
        steps = EndedSteps(
            loop,
            record,
            feed,
            options.warmup,
            facts=lambda: rows.facts(
                roots, parameters, (calls.compute_dtype, feed.iterator, feed.on_host)
            ),
        )
        return cls(
            options=options,
            progress=progress,
            thread_id=threading.get_ident(),
            rank=rank,
            ranks=ranks,
            device=device,
            parameters=parameters,
            roots=roots,
            record=record,
            loop=loop,
            feed=feed,
            calls=calls,
            steps=steps,
            memory=Memory(device),
            pauses=Pauses(device),
            stacks=Stacks(record, lambda: loop.phase, lambda: (progress.updated, steps.usual_s())),
        )

    def introduce(self) -> None:
        """Records who this rank is and where it runs."""
        about = rows.about(self.record, self.options, self.rank, self.ranks, self.device)
        self.record.add("about", **about)
        place = placement(self.device)
        place["host"] = self.record.name(place["host"])
        self.record.add("placement", **place)
        self.look_around(None)

    def begin(self, kept: Hooks, guarded: Callable[[Callable], Callable]) -> None:
        """Finds the model, and begins to listen to its calls and to what interrupts the training.

        Args:
            kept: keeps the hooks on the model.
            guarded: makes a function end the watch where it would raise.
        """
        for what, why in private.missing().items():
            self.record.unseen(what, why)
        self.roots.extend(hooks.roots_of(self.parameters))
        began, ended = guarded(self.calls.began), guarded(self.calls.ended)
        inner = [root.module for root in self.roots if isinstance(root, DistributedDataParallel)]
        for root in [*self.roots, *inner]:  # an evaluation may call the model inside of DDP
            if private.is_compiled_in_place(root):
                self.record.unseen("forward passes", "the model is compiled in place")
            else:
                hooks.watch_forward(kept, root, began, ended)
                self.loop.sees_calls = True
        if self.options.profile_steps and any(map(private.hides_its_passes, self.roots)):
            self.progress.profiled_steps = 1 + self.options.profile_steps
        if not self.roots:
            self.record.unseen("forward passes", "no module holds the optimizer's parameters")
        self.pauses.install()
        self.stacks.start()

    def look_around(self, earlier: CpuTimes | None) -> None:
        """Records this rank's surroundings, and the processors' time since an earlier reading."""
        index = (self.device.index or 0) if self.device.type == "cuda" else None
        seen = surroundings(index, socket.gethostname(), earlier)
        self.record.add("surroundings", host=self.record.name(socket.gethostname()), **seen)

    def is_sharded(self) -> bool:
        """Returns True for a model under FSDP."""
        return any(private.is_fsdp(part) for root in self.roots for part in root.modules())

    def phase(self) -> str:
        """Returns the loop's phase; ``copy`` from a fetch of the training to its forward pass."""
        segment = self.loop.segment
        waiting = len(segment.fetches) - segment.first_fetch - len(segment.passes)
        return "copy" if self.loop.phase == "between" and waiting > 0 else self.loop.phase

    def end(self, status: str) -> None:
        """Writes what is left, and lets go of the model and its data."""
        self.pauses.remove()
        self.memory.close()
        try:
            self.steps.finish(wait=status != "failed")
        except RuntimeError as error:  # of a GPU that has failed
            self.record.unseen("the last steps", str(error).splitlines()[0])
        for row in self.feed.rows():
            self.record.add("identities", **row)
        self.stacks.flush()
        self.record.add("end", status=status, steps=self.steps.written, unix_s=time.time())
        self.stacks.stop()
        self.roots.clear()
        self.parameters.clear()
        self.calls.forget()
        self.feed.forget()


def record_path(options: Options, rank: int, store: dist.Store | None) -> Path:
    """Returns the path of this rank's record, in the folder that all ranks share.

    Raises:
        FileExistsError: an earlier run has used it.
    """
    folder, name = Path(options.folder).absolute(), f"rank{rank}.jsonl"
    if not options.named:
        folder = same_folder(folder, store, rank, name)
    if (folder / name).exists():
        raise FileExistsError(f"{folder / name} exists; give each run a folder of its own")
    return folder / name
