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
import statistics
import sys
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

from ddplab_watch.options import Options
from ddplab_watch.record import Record

if TYPE_CHECKING:
    import torch

_active: Watch | None = None
USUAL_OF = 20
"""A step's usual time is the median of so many of the last."""
MOST_IDENTITIES = 200_000
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
        from ddplab_watch.hooks import Hooks

        self.options = options
        self.hooks, self.update_hooks = Hooks(), Hooks()
        self.device: Any = None
        """The model's; None before the first update."""
        self.is_over = False
        """Nothing more is looked at. Hooks may still be there: none can be taken off while it, or
        another one of its kind, is being called."""
        self.record: Record | None = None
        self.loop: Any = None
        self.closed = False
        self.updated = 0
        """Steps that have been updated; the newest may not be written yet."""
        self.written = 0
        self.recent_s: list[float] = []
        self.epochs: dict[int, int] = {}
        """Passes over each data set so far; ``epoch_of``: which of them an iterator makes."""
        self.epoch_of: WeakKeyDictionary[Any, int] = WeakKeyDictionary()
        self.identities: dict[int, list[int]] = {}
        self.identities_left = MOST_IDENTITIES
        self.hashed: set[int] = set()
        """Epochs whose samples are told apart by their content."""
        self.thread_id = 0
        """The thread that trains."""
        self.loads_elsewhere = False
        """Batches are fetched by a thread that does not train."""
        self.last_ended: Any = None
        """Mark of the end of the step that was read last."""
        self.facts: dict[str, Any] = {}
        self.kept: Any = None
        self.buckets: Any = None
        self.waits: Any = None
        self.profile: Any = None
        self.profiled_steps = 0
        """Steps that go on under the profiler: one to warm up, and those that it records."""
        self.unread: list[Any] = []
        """Steps that have ended and are not written yet."""
        self.newest_iterator: Any = None
        self.asked: list[Any] = []
        """Indices that it was asked for of late, batch by batch."""
        self.recent_waits_s: list[float] = []
        """Of the same steps as ``recent_s``, the time for data."""
        self.output_gradients: dict[int, Any] = {}
        self._evaluating: float | None = None
        self._depth = 0

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
        self.loop.finish()
        self.collect()
        self.read(wait=status != "failed")
        self.write_identities()
        self.stacks.flush()
        self.record.add("end", status=status, steps=self.written, unix_s=time.time())
        self.stacks.stop()
        self.roots, self.parameters, self.unread = [], [], []  # nothing is kept alive
        self.kept = self.newest_iterator = None
        self.asked = []
        self.output_gradients = {}

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
        from ddplab_watch import private
        from ddplab_watch.batches import tensors_in
        from ddplab_watch.steps import Fetch

        loader = private.loader_of(iterator)
        if private.fetched(iterator) <= 1 or iterator not in self.epoch_of:
            data = id(private.data_set(iterator))  # a loop may make a loader anew for each epoch
            self.epoch_of[iterator] = self.epochs[data] = self.epochs.get(data, -1) + 1
        if self.loop is None or began is None:
            return
        self.remember(iterator, ids)
        if "batches_on_host" not in self.facts:
            devices = {tensor.device.type for _, tensor in tensors_in(batch)}
            self.facts["batches_on_host"] = "cpu" in devices if devices else None
        hashed = None
        if ids is None:
            from ddplab_watch.batches import content_hashes

            hashed = content_hashes(batch)
        elif not isinstance(ids, list | tuple):
            ids = [ids]
        if ids is not None and not (
            ids and isinstance(ids[0], int)
        ):  # of a sampler of its own kind
            ids = None
        self.loop.fetch_ended(
            began,
            Fetch(
                loader=loader,
                began=None,
                began_s=0.0,
                ended_s=0.0,
                epoch=self.epoch_of[iterator],
                identities=list(ids) if ids is not None else hashed,
                is_hashed=ids is None,
            ),
        )

    def remember(self, iterator: Any, ids: Any) -> None:
        """Keeps which iterator gave the newest batch, and for which indices."""
        from ddplab_watch import private
        from ddplab_watch.loading import SEEN

        if self.newest_iterator is not None and (
            private.loader_of(self.newest_iterator) != private.loader_of(iterator)
        ):
            self.asked = []
        if ids is not None:
            self.asked = [*self.asked[1 - SEEN :], ids]
        self.newest_iterator = iterator

    def emptied(self) -> None:
        """Notes that an epoch's last batch has been fetched: what follows lies between steps."""
        if self.is_trained_here():
            self.loop.phase = "between"

    def forward_began(self, module: Any, args: tuple, kwargs: dict) -> None:
        """Notes that the model is called."""
        import torch

        from ddplab_watch import rows
        from ddplab_watch.batches import counts

        self._depth += 1
        if self._depth > 1:  # of a model inside of DDP, whose call is under way
            return
        if not torch.is_grad_enabled():
            self._evaluating = time.perf_counter()
            self.loop.phase = "evaluation"
            return
        self.loop.forward_began(**counts((args, kwargs)))
        if self.is_last_watched():
            self.kept = (module, args, kwargs, rows.autocast(self.device))

    def forward_ended(self, module: Any, output: Any) -> None:
        """Notes that the model has returned."""
        from ddplab_watch import private, rows
        from ddplab_watch.batches import tensors_in
        from ddplab_watch.kept import keep_gradients

        self._depth -= 1
        if self._depth > 0:
            return
        if self._evaluating is not None:
            self.loop.evaluated(time.perf_counter() - self._evaluating)
            self._evaluating = None
            return
        if "compute_dtype" not in self.facts:
            floats = [t for _, t in tensors_in(output) if t.is_floating_point()]
            if floats:
                enabled, dtype = rows.autocast(self.device)
                own = private.dtype_before_casts(floats[-1])
                self.facts["compute_dtype"] = str(dtype if enabled else own)
        if self.kept is not None and self.kept[0] is module:
            self.output_gradients = {}
            keep_gradients(output, self.output_gradients)

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
        self.collect()
        self.read(wait=False)
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
        """Returns True in the last step of the window, whose pass the probes repeat."""
        options = self.options
        last = options.last_step + self.profiled_steps
        return options.probe and not options.to_end and self.updated == last - 1

    # Stages -------------------------------------------------------------------------------------

    def open(self, optimizer: torch.optim.Optimizer) -> None:
        """Begins the record: who this rank is, what it trains, where it runs."""
        import torch.distributed as dist
        from torch.nn.parallel import DistributedDataParallel

        from ddplab_watch import hooks, private, rows
        from ddplab_watch.machine_cores import read_cpu_times
        from ddplab_watch.marks import clock_of
        from ddplab_watch.pauses import Memory, Pauses
        from ddplab_watch.stacks import Stacks
        from ddplab_watch.steps import Loop
        from ddplab_watch.team import same_folder

        self.thread_id = threading.get_ident()
        in_group = dist.is_available() and dist.is_initialized()
        self.rank = dist.get_rank() if in_group else int(os.environ.get("RANK", 0))
        self.ranks = dist.get_world_size() if in_group else int(os.environ.get("WORLD_SIZE", 1))
        self.parameters = [p for group in optimizer.param_groups for p in group["params"]]
        self.device = self.parameters[0].device
        options, folder = self.options, Path(self.options.folder).absolute()
        file = f"rank{self.rank}.jsonl"
        if not options.named:
            store = private.job_store() if in_group and self.ranks > 1 else None
            folder = same_folder(folder, store, self.rank, file)
        self.folder, path = folder, folder / file
        if path.exists():
            raise FileExistsError(f"{path} exists; give each run a folder of its own")
        self.record = record = Record(path, options.anonymise)
        record.add("about", **rows.about(record, options, self.rank, self.ranks, self.device))
        record.add("placement", **rows.placement(record, self.device))
        self.look_around(None)
        self.cpu_times = read_cpu_times()
        for what, why in private.missing().items():
            record.unseen(what, why)
        self.loop = Loop(clock_of(self.device), time.perf_counter, time.process_time)
        self.memory = Memory(self.device)
        self.pauses = Pauses(self.device)
        self.pauses.install()
        self.roots = hooks.roots_of(self.parameters)
        began, ended = self.guarded(self.forward_began), self.guarded(self.forward_ended)
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
        self.stacks = Stacks(
            record, lambda: self.loop.phase, lambda: (self.updated, self.usual_s())
        )
        self.stacks.start()

    def look_around(self, earlier: Any) -> None:
        """Records this rank's surroundings, and the processors' time since an earlier reading."""
        from ddplab_watch.surroundings import surroundings

        index = (self.device.index or 0) if self.device.type == "cuda" else None
        seen = surroundings(index, socket.gethostname(), earlier)
        self.record.add("surroundings", host=self.record.name(socket.gethostname()), **seen)

    def usual_s(self) -> float:
        """Returns a step's usual time in seconds; 0 before there is one."""
        return statistics.median(self.recent_s) if self.recent_s else 0.0

    def watch_buckets(self) -> None:
        """Begins to watch gradients and buckets."""
        from ddplab_watch import private
        from ddplab_watch.buckets import BucketWatch

        if not self.roots or any(private.is_fsdp(m) for r in self.roots for m in r.modules()):
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
        self.end_profile()
        if self.options.probe:
            self.probe()
        self.close("complete")

    def probe(self) -> None:
        """Runs the probes, or says why there are none."""
        self.stacks.is_training = False
        import torch.distributed as dist
        from torch.nn.parallel import DistributedDataParallel

        from ddplab_watch import private
        from ddplab_watch.kept import Kept
        from ddplab_watch.probes import Probes
        from ddplab_watch.team import Team, all_are_here

        if self.ranks > 1:
            job = f"ddplab-watch/{self.folder}"
            if not all_are_here(private.job_store(), job, self.rank, self.ranks):
                self.record.unseen("passes without exchange", "not every rank is watched")
                return
        if self.kept is None or any(private.is_fsdp(m) for r in self.roots for m in r.modules()):
            why = "FSDP" if self.kept else "the model's call was not seen"
            self.record.unseen("passes without exchange", why)
            return
        module, args, kwargs, autocast = self.kept
        is_ddp = isinstance(module, DistributedDataParallel)
        group = module.process_group if is_ddp else None  # under torch.compile it is further in
        if group is None and dist.is_initialized() and self.ranks > 1:
            self.record.unseen("passes without exchange", "the model is not under DDP")
            return
        step = self.loop.step
        kept = Kept(
            module=module,
            inner=module.module if is_ddp else module,
            args=args,
            kwargs=kwargs,
            samples=step.passes[-1].samples,
            gradients=self.output_gradients,
            autocast=autocast,
        )
        self.kept = None
        team = Team(group, kept.device, self.loop.clock)
        Probes(kept, team, self.record, self.usual_s()).run()
        if self.options.verify:
            self.try_changes(kept, team, is_ddp)

    def try_changes(self, kept: Any, team: Any, is_ddp: bool) -> None:
        """Tries what a diagnosis may propose, or says why not."""
        from ddplab_watch.changes import exchange_of
        from ddplab_watch.loading import Loading
        from ddplab_watch.trials import Trials

        if not is_ddp or team.ranks < 2:
            self.record.unseen("changes that were to be tried", "nothing is exchanged")
            return
        step = self.loop.step
        sent_bytes = sum(bucket.size_bytes for bucket in step.buckets)
        now = exchange_of(kept.module, len(step.passes), sent_bytes)
        waits = sum(self.recent_waits_s) / max(sum(self.recent_s), 1e-9)
        iterator, asked = self.newest_iterator, self.asked  # trials fetch batches, too
        Trials(
            kept=kept,
            team=team,
            record=self.record,
            now=now,
            step_s=self.usual_s(),
            waits=waits,
            loading=lambda: Loading.of(iterator, asked),
        ).run()

    # What is written ----------------------------------------------------------------------------

    def collect(self) -> None:
        """Takes the steps that have ended."""
        for step in self.loop.ended:
            self.unread.append(step)
        self.loop.ended = []

    def read(self, wait: bool) -> None:
        """Writes the steps whose marks the device has passed; all of them if ``wait``."""
        if wait and self.unread:
            self.loop.clock.wait()
        while self.unread and self.loop.clock.passed(self.unread[0].ended):
            self.write_step(self.unread.pop(0))

    def write_step(self, step: Any) -> None:
        """Writes a step's rows."""
        from ddplab_watch import rows

        if step.profiled:
            return
        number, clock = self.written, self.loop.clock
        self.written += 1
        # By the same clock as the step: a host that waits for its GPU does so within the step.
        before, self.last_ended = self.last_ended, step.ended
        between_ms = None if before is None else clock.elapsed_s(before, step.began) * 1e3
        self.recent_s = [*self.recent_s[1 - USUAL_OF :], clock.elapsed_s(step.began, step.ended)]
        waited_s = sum(clock.elapsed_s(p.fetched, p.forward) for p in step.passes)
        self.recent_waits_s = [*self.recent_waits_s[1 - USUAL_OF :], waited_s]
        if number == 0:
            self.record.add("facts", **rows.facts(self.roots, self.parameters, self.trained_on()))
        is_warmup = number < self.options.warmup
        self.record.add(
            "steps",
            step=number,
            warmup=is_warmup,
            between_time_ms=between_ms,
            **rows.of_step(step, clock),
        )
        for row in rows.of_buckets(step, clock):
            self.record.add("buckets", step=number, **row)
        if not is_warmup:
            for fetch in step.fetches:
                self.keep_identities(fetch)

    def keep_identities(self, fetch: Any) -> None:
        """Keeps which samples a batch was made of, of so many samples in all."""
        identities = (fetch.identities or [])[: self.identities_left]
        self.identities_left -= len(identities)
        self.identities.setdefault(fetch.epoch, []).extend(identities)
        if fetch.is_hashed:
            self.hashed.add(fetch.epoch)

    def trained_on(self) -> tuple[str, Any, bool | None]:
        """Returns what the model computed in, the iterator that fed it last, and what it gave."""
        return (
            str(self.facts.get("compute_dtype", "")),
            self.newest_iterator,
            self.facts.get("batches_on_host"),
        )

    def write_identities(self) -> None:
        """Writes which samples the steps were made of, by epoch."""
        for epoch, identities in sorted(self.identities.items()):
            if identities:
                self.record.add(
                    "identities", epoch=epoch, samples=identities, is_hashed=epoch in self.hashed
                )
