"""The watch of one rank, from the first update to the end of its window.

    update 1            who am I, what is trained: the record begins, hooks go on the model
    warmup + window     steps as they are; only moments are noted
    bucket_steps        gradients and buckets, too
    profile_steps       of a model that hooks cannot see into: under torch.profiler
    then                probes, and every hook is taken off (``to_end``: steps go on being timed)

All ranks count the same updates, so what they do together, the probes, they do after the same one.
"""

from __future__ import annotations

import atexit
import multiprocessing.util
import os
import socket
import sys
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ddplab_watch.options import Options
from ddplab_watch.record import Record

if TYPE_CHECKING:
    import torch

_active: Watch | None = None
MOST_PLACES = 50
"""Lines at which the host waits for its GPU."""


def start(folder: str | None = None, **settings: Any) -> None:
    """Starts the watch of this process, once; the first update opens the bundle.

    Args:
        folder: the bundle; by default as the environment says.
        settings: of ``Options``, such as ``window=50``.

    Raises:
        ValueError: a setting that is not legal.
    """
    global _active
    if _active is not None:
        return
    from dataclasses import replace

    options = Options.from_environment()
    chosen = {"folder": folder, "named": True} if folder else {}
    options = replace(options, **chosen, **settings)
    _active = Watch(options)
    _active.install()


def stop() -> None:
    """Ends the watch of this process now; what was seen is in the bundle."""
    global _active
    if _active is not None:
        _active.close("stopped")
        _active.update_hooks.remove()
        _active = None


class Watch:
    """Hooks, the loop that they tell of, and the record of it."""

    def __init__(self, options: Options) -> None:
        from ddplab_watch.feed import Feed
        from ddplab_watch.hooks import Hooks

        self.options = options
        self.hooks, self.update_hooks = Hooks(), Hooks()
        self.feed = Feed()
        self.is_over = False
        """Nothing more is looked at. Hooks may still be there: none can be taken off while it, or
        another one of its kind, is being called."""
        self.closed = False
        self.updated = 0
        """Steps that have been updated; the newest may not be written yet."""
        self.loads_elsewhere = False
        """Batches are fetched by a thread that does not train."""
        self.buckets: Any = None
        self.waits: Any = None
        self.profile: Any = None
        self.profiled_steps = 0
        """Steps that go on under the profiler: one to warm up, and those that it records."""
        # Known from the first update on; ``open`` sets these and what belongs to them.
        self.device: Any = None
        """The model's."""
        self.thread_id = 0
        """The thread that trains."""
        self.record: Record | None = None
        self.loop: Any = None
        self.roots: list[Any] = []
        """The outermost modules that are trained."""

    def install(self) -> None:
        """Hooks what tells of the loop."""
        from ddplab_watch import hooks

        hooks.watch_updates(self.update_hooks, self.after_update)
        hooks.watch_backward(
            self.hooks, self.guarded(self.backward_began), self.guarded(self.backward_ended)
        )
        hooks.watch_fetches(
            self.hooks,
            self.guarded(self.fetch_began),
            self.guarded(self.fetch_ended),
            self.guarded(self.emptied),
        )
        atexit.register(self.leave)
        if multiprocessing.parent_process() is not None:  # such a child leaves without atexit
            multiprocessing.util.Finalize(None, self.leave, exitpriority=100)

    def guarded(self, function: Any) -> Any:
        """Returns a function that ends the watch instead of raising: the training goes on.

        While a CUDA graph is captured nothing is noted: marks would be captured, too.
        """
        from ddplab_watch import private

        def call(*args: Any) -> Any:
            if self.is_over or private.is_capturing(self.device):
                return None
            try:
                return function(*args)
            except Exception as error:
                self.is_over = True
                print(f"ddplab-watch: stopped: {type(error).__name__}: {error}", file=sys.stderr)
                if os.environ.get("DDPLAB_WATCH_DEBUG"):
                    raise
                if self.record is not None:
                    self.record.unseen("the rest", f"{type(error).__name__}: {error}")
                    self.record.write()
                return None

        return call

    def after_update(self, optimizer: Any, skipped: bool) -> None:
        """Notes an update; no other hook is being called now, so the others may be taken off."""
        self.guarded(self.update_ended)(optimizer, skipped)
        if self.is_over and not self.closed:
            self.close("failed")

    def leave(self) -> None:
        """Ends the watch as the process ends: by itself, or by an exception such as Ctrl-C."""
        self.close("ended" if getattr(sys, "last_type", None) is None else "interrupted")

    def close(self, status: str) -> None:
        """Takes off all hooks but those of updates, and writes what is left; at most once."""
        if self.closed:
            return
        self.closed = self.is_over = True
        if self.buckets is not None:
            self.buckets.remove()
            self.buckets = None
        self.stop_counting_waits()
        self.end_profile("the script ended before")
        self.hooks.remove()
        if self.record is None:
            return
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
        self.roots, self.parameters = [], []  # nothing is kept alive
        self.calls.forget()
        self.feed.forget()

    # What the loop calls ------------------------------------------------------------------------

    def fetch_began(self) -> Any:
        """Notes that a batch is asked for."""
        return self.loop.fetch_began() if self.is_trained_here() else None

    def is_trained_here(self) -> bool:
        """Returns True in the thread that trains. One that loads ahead makes nobody wait."""
        if self.loop is None:
            return False
        if threading.get_ident() == self.thread_id:
            return True
        if not self.loads_elsewhere:
            self.loads_elsewhere = True
            self.record.unseen("waiting for data", "a thread that does not train loads it")
        return False

    def fetch_ended(self, began: Any, iterator: Any, ids: Any, batch: Any) -> None:
        """Notes a batch: its loader, its epoch, its samples."""
        self.feed.count_epochs(iterator)
        if self.loop is not None and began is not None:
            self.loop.fetch_ended(began, self.feed.fetch(iterator, ids, batch))

    def emptied(self) -> None:
        """Notes that an epoch's last batch has been fetched: what follows lies between steps."""
        if self.is_trained_here():
            self.loop.phase = "between"

    def backward_began(self) -> None:
        """Notes that backward() is called."""
        if self.loop:
            self.loop.backward_began()
            if self.buckets is not None:
                self.buckets.begin()

    def backward_ended(self) -> None:
        """Notes that backward() has returned."""
        if self.loop:
            newest = self.loop.current
            self.loop.backward_ended()
            if self.buckets is not None and newest is not None:
                newest.ready = self.buckets.ready

    def update_ended(self, optimizer: torch.optim.Optimizer, skipped: bool) -> None:
        """Notes an update; between two stages of the watch, goes to the next."""
        if self.record is None:
            self.open(optimizer)
            return
        before = self.loop.step
        self.loop.update_ended(id(optimizer), skipped)
        self.steps.collect()
        step = self.loop.step
        if step is None or step is before:
            return
        self.updated += 1
        step.watched = self.buckets is not None
        step.counts = self.pauses.taken() | self.memory.read()
        if self.waits is not None:
            step.counts["host_waits"] = self.waits.taken()
        options = self.options
        if self.updated == options.warmup:
            self.stacks.counting = True
        if self.updated == options.warmup + options.window:
            self.stacks.counting = False
            self.stacks.flush()
            self.look_around(self.cpu_times)
            if options.bucket_steps:
                self.watch_buckets()
                self.count_waits()
        step.profiled = self.updated > options.last_step and not options.to_end
        if self.buckets is not None:
            step.buckets = self.buckets.taken()
        if self.updated >= options.last_step:
            self.unwatch_buckets()
            self.stop_counting_waits()
            if not options.to_end:
                self.profile_or_end()

    def is_last_watched(self) -> bool:
        """Returns True in the last step of the window, whose gradients the probes start from."""
        options = self.options
        last = options.last_step + self.profiled_steps
        return options.probe and not options.to_end and self.updated == last - 1

    def is_near_end(self) -> bool:
        """Returns True in the steps after the window, a pass of which the probes repeat."""
        options = self.options
        after_window = self.updated >= options.warmup + options.window
        return options.probe and not options.to_end and after_window

    # Stages -------------------------------------------------------------------------------------

    def open(self, optimizer: torch.optim.Optimizer) -> None:
        """Begins the record: who this rank is, what it trains, where it runs."""
        import torch.distributed as dist
        from torch.nn.parallel import DistributedDataParallel

        from ddplab_watch import hooks, private, rows
        from ddplab_watch.calls import Calls
        from ddplab_watch.ended_steps import EndedSteps
        from ddplab_watch.machine_cores import read_cpu_times
        from ddplab_watch.marks import clock_of
        from ddplab_watch.pauses import Memory, Pauses
        from ddplab_watch.stacks import Stacks
        from ddplab_watch.steps import Loop

        self.thread_id = threading.get_ident()
        in_group = dist.is_available() and dist.is_initialized()
        self.rank = dist.get_rank() if in_group else int(os.environ.get("RANK", 0))
        self.ranks = dist.get_world_size() if in_group else int(os.environ.get("WORLD_SIZE", 1))
        self.parameters = [p for group in optimizer.param_groups for p in group["params"]]
        self.device = self.parameters[0].device
        options = self.options
        self.record = record = Record(self.file(in_group), options.anonymise)
        self.loop = Loop(clock_of(self.device), time.perf_counter, time.process_time)
        self.feed.counts_tokens = self.device.type != "cpu"
        self.calls = Calls(
            self.loop, self.device, self.feed, self.is_near_end, self.is_last_watched
        )
        self.steps = EndedSteps(self.loop, record, self.feed, options.warmup, self.facts)
        self.memory = Memory(self.device)
        self.pauses = Pauses(self.device)
        self.stacks = Stacks(
            record, lambda: self.loop.phase, lambda: (self.updated, self.steps.usual_s())
        )
        record.add("about", **rows.about(record, options, self.rank, self.ranks, self.device))
        record.add("placement", **rows.placement(record, self.device))
        self.look_around(None)
        self.cpu_times = read_cpu_times()
        for what, why in private.missing().items():
            record.unseen(what, why)
        self.roots = hooks.roots_of(self.parameters)
        began, ended = self.guarded(self.calls.began), self.guarded(self.calls.ended)
        inner = [r.module for r in self.roots if isinstance(r, DistributedDataParallel)]
        for root in [*self.roots, *inner]:  # an evaluation may call the model inside of DDP
            if private.is_compiled_in_place(root):
                record.unseen("forward passes", "the model is compiled in place")
            else:
                hooks.watch_forward(self.hooks, root, began, ended)
                self.loop.sees_calls = True
        if options.profile_steps and any(map(private.hides_its_passes, self.roots)):
            self.profiled_steps = 1 + options.profile_steps
        if not self.roots:
            record.unseen("forward passes", "no module holds the optimizer's parameters")
        self.pauses.install()
        self.stacks.start()

    def file(self, in_group: bool) -> Path:
        """Returns the path of this rank's record, in the folder that all ranks share.

        Raises:
            FileExistsError: an earlier run has used it.
        """
        from ddplab_watch import private
        from ddplab_watch.team import same_folder

        folder, name = Path(self.options.folder).absolute(), f"rank{self.rank}.jsonl"
        if not self.options.named:
            store = private.job_store() if in_group and self.ranks > 1 else None
            folder = same_folder(folder, store, self.rank, name)
        if (folder / name).exists():
            raise FileExistsError(f"{folder / name} exists; give each run a folder of its own")
        return folder / name

    def look_around(self, earlier: Any) -> None:
        """Records this rank's surroundings, and the processors' time since an earlier reading."""
        from ddplab_watch.surroundings import surroundings

        index = (self.device.index or 0) if self.device.type == "cuda" else None
        seen = surroundings(index, socket.gethostname(), earlier)
        self.record.add("surroundings", host=self.record.name(socket.gethostname()), **seen)

    def is_sharded(self) -> bool:
        """Returns True for a model under FSDP."""
        from ddplab_watch import private

        return any(private.is_fsdp(part) for root in self.roots for part in root.modules())

    def facts(self) -> dict[str, Any]:
        """Returns the row on what is trained, in which type, and from which data."""
        from ddplab_watch import rows

        trained_on = (self.calls.compute_dtype, self.feed.iterator, self.feed.on_host)
        return rows.facts(self.roots, self.parameters, trained_on)

    def watch_buckets(self) -> None:
        """Begins to watch gradients and buckets."""
        from ddplab_watch.buckets import BucketWatch

        if not self.roots or self.is_sharded():
            self.record.unseen("buckets", "FSDP has none" if self.roots else "no module was found")
            return
        self.buckets = BucketWatch(self.roots[0], self.loop.clock)
        self.buckets.install()
        if self.buckets.unseen:
            self.record.unseen("buckets", self.buckets.unseen)

    def unwatch_buckets(self) -> None:
        """Ends that."""
        if self.buckets is not None:
            self.buckets.remove()
            self.buckets = None

    def count_waits(self) -> None:
        """Begins to count how often the host waits for its GPU."""
        from ddplab_watch import host_waits

        if host_waits.can_be_counted(self.device):
            self.waits = host_waits.HostWaits(self.phase, self.stacks.named)
            self.waits.install()
            if self.waits.unseen:
                self.record.unseen("waits of the host for the GPU", self.waits.unseen)
                self.waits = None

    def stop_counting_waits(self) -> None:
        """Ends that, and records where the host waited."""
        if self.waits is None:
            return
        self.waits.remove()
        for (phase, place, call), count in self.waits.places.most_common(MOST_PLACES):
            self.record.add("host-waits", phase=phase, place=place, call=call, waits=count)
        self.waits = None

    def phase(self) -> str:
        """Returns the loop's phase; ``copy`` from a fetch of the training to its forward pass."""
        segment = self.loop.segment
        waiting = len(segment.fetches) - segment.first_fetch - len(segment.passes)
        return "copy" if self.loop.phase == "between" and waiting > 0 else self.loop.phase

    def profile_or_end(self) -> None:
        """Goes on with the profile of a model that hooks cannot see into; then ends the window."""
        done, most = self.updated - self.options.last_step, self.profiled_steps
        if done == 0 and most:
            from ddplab_watch.profile import ShortProfile

            self.profile = ShortProfile(self.device)
            self.profile.start()
        elif done < most:
            self.profile.begin_step(self.updated)
        else:
            self.end_window()

    def end_profile(self, unless_written: str = "") -> None:
        """Writes what was profiled into the bundle, or gives it up and says why."""
        if self.profile is None:
            return
        profile, self.profile = self.profile, None
        if unless_written:
            profile.give_up(unless_written)
        else:
            self.stacks.is_training = False  # a large trace takes seconds
            path = self.record.path
            profile.write(path.with_name(f"{path.stem}-trace.json.gz"), self.rank)
        if profile.unseen:
            self.record.unseen("operators", profile.unseen)

    def end_window(self) -> None:
        """Probes what a step is made of, and ends the watch."""
        from ddplab_watch.after_window import probe

        self.end_profile()
        if self.options.probe:
            self.stacks.is_training = False
            probe(self)
        self.close("complete")
