"""The parts of a watch from the first update on: what a rank is, what it trains, where rows go."""

from __future__ import annotations

import os
import socket
import threading
import time
import weakref
from collections.abc import Callable
from pathlib import Path

import torch.distributed as dist
from torch import nn
from torch.nn.parallel.distributed import DistributedDataParallel
from torch.optim import Optimizer

from ddplab_watch import hooks, rows, torch_internals
from ddplab_watch.calls import Calls
from ddplab_watch.feed import Feed
from ddplab_watch.hooks import Hooks
from ddplab_watch.machine_cores import CpuTimes
from ddplab_watch.marks import clock_of
from ddplab_watch.options import Options, requeued_folder
from ddplab_watch.pauses import Memory, Pauses
from ddplab_watch.placement import placement
from ddplab_watch.record import Record, say
from ddplab_watch.rows import EndedSteps
from ddplab_watch.stacks import Stacks, norm_lines
from ddplab_watch.steps import Loop
from ddplab_watch.surroundings import surroundings
from ddplab_watch.team import same_folder


class Session:
    """A watch that has begun, with an optimizer's first update.

    Args:
        optimizer: optimizer whose parameters are trained.
        feed: batches, which were counted from the start on.

    Raises FileExistsError: an earlier run has used the bundle.
    """

    def __init__(self, optimizer: Optimizer, options: Options, feed: Feed) -> None:
        in_group = dist.is_available() and dist.is_initialized()
        self.options, self.feed = options, feed
        self.thread_id = threading.get_ident()
        """Thread that trains."""
        self.rank = dist.get_rank() if in_group else int(os.environ.get("RANK", 0))
        self.ranks = dist.get_world_size() if in_group else int(os.environ.get("WORLD_SIZE", 1))
        self.parameters: list[nn.Parameter] = [
            parameter for group in optimizer.param_groups for parameter in group["params"]
        ]
        self._first_parameters = frozenset(map(id, self.parameters))
        """Identities of the parameters of the first optimizer."""
        self.device = device = self.parameters[0].device
        self.update_facts = rows.how_updated(optimizer)
        self._roots: list[weakref.ref[nn.Module]] = []
        """Outermost modules that hold the parameters; ``begin`` finds them."""
        self.began_window = 0
        """Steps that had been updated when the present window's warm-up began, or would have: only
        the first window has one."""
        self.updated = 0
        """Steps that have been updated; the newest may not be written yet."""
        self.updated_parameters: set[int] = set()
        """Identities of the parameters of all optimizers that have updated."""
        self.profiled_steps = 0
        """Steps that go on under the profiler: one to warm up, and those that it records."""
        self.record = record = Record(self.path(in_group), options.anonymise)
        self.loop = loop = Loop(clock_of(device), time.perf_counter, time.process_time)
        self.calls = Calls(loop, device, feed, self.is_near_end, self.is_last)
        self.steps = steps = EndedSteps(loop, record, feed, options.warmup, self.facts)
        self.memory, self.pauses = Memory(device), Pauses(device)
        self.stacks = Stacks(record, self.phase_of_looks, lambda: (self.updated, steps.usual_s()))
        feed.counts_tokens = device.type != "cpu"

    def path(self, in_group: bool) -> Path:
        """Returns the path of this rank's record, in the folder that all ranks share.

        Raises FileExistsError: an earlier run, or another job, has used it.
        """
        first, name = Path(self.options.folder).absolute(), f"rank{self.rank}.jsonl"
        folder = requeued_folder(first, name)
        again = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
        if again != "0":  # the launcher has started all ranks anew: no rank looks who had written
            folder = folder / f"restart-{again}"
        is_resumed = folder != first
        if not self.options.named:
            store = torch_internals.job_store() if in_group and self.ranks > 1 else None
            folder = same_folder(folder, store, self.rank, name, again)
        if is_resumed and self.rank == 0:
            say(f"the job was resumed; its record: {folder}")
        if (folder / name).exists():
            raise FileExistsError(f"{folder / name} exists; give each run a folder of its own")
        return folder / name

    def is_near_end(self) -> bool:
        """Returns True in the steps after the window, a pass of which the probes repeat."""
        options = self.options
        after_window = self.updated >= options.warmup + options.window
        return options.probe and not self.began_window and after_window

    def is_last(self) -> bool:
        """Returns True in the last step that is watched, whose gradients the probes start from."""
        last = self.options.last_step + self.profiled_steps
        return self.options.probe and not self.began_window and self.updated == last - 1

    def look_less(self, brief: bool) -> None:
        """Notes only what a watch of hours needs, or, in a window, all there is."""
        self.calls.brief = self.feed.brief = brief

    @property
    def next_step(self) -> int:
        """Returns the number of the next step between windows; profiled ones have none."""
        return self.updated - self.profiled_steps

    def facts(self) -> dict[str, object]:
        """Returns the row on what is trained, in which type, and from which data; once."""
        trained_on = (self.calls.compute_dtype, self.feed.iterator, self.feed.on_host)
        parameters, self.parameters = self.parameters, []  # a script may let go of them
        modules = [module for root in self.roots for module in root.modules()]
        return {
            **rows.facts(self.roots, parameters, trained_on),
            "norm_lines": norm_lines(modules, self.record.name_or_hash),
            **self.update_facts,
        }

    @property
    def roots(self) -> list[nn.Module]:
        """Returns the outermost modules that are trained, those that the script still has."""
        return [root for ref in self._roots if (root := ref()) is not None]

    def introduce(self) -> None:
        """Records who this rank is and where it runs."""
        about = rows.about(self.record, self.options, self.rank, self.ranks, self.device)
        self.record.add("about", **about)
        row = placement(self.device)
        row["host"] = self.record.name_or_hash(row["host"])
        self.record.add("placement", **row)
        self.look_around(None)

    def begin(self, kept: Hooks, guarded: Callable[[Callable], Callable]) -> None:
        """Finds the model, and begins to listen to its calls and to what interrupts the training.

        Args:
            kept: keeps the hooks on the model.
            guarded: makes a function end the watch where it would raise.
        """
        for what, why in torch_internals.missing().items():
            self.record.unseen(what, why)
        self._roots = list(map(weakref.ref, hooks.roots_of(self.parameters)))
        began, ended = guarded(self.calls.began), guarded(self.calls.ended)
        inner = [root.module for root in self.roots if isinstance(root, DistributedDataParallel)]
        for root in [*self.roots, *inner]:  # an evaluation may call the model inside of DDP
            if torch_internals.is_compiled_in_place(root):
                self.record.unseen("forward passes", "the model is compiled in place")
            else:
                hooks.watch_forward(kept, root, began, ended)
                self.loop.sees_calls = True
        if self.options.profile_steps and any(map(torch_internals.hides_its_passes, self.roots)):
            self.profiled_steps = 1 + self.options.profile_steps
        if not self.roots:
            self.record.unseen("forward passes", "no module holds the optimizer's parameters")
        self.pauses.install()
        self.stacks.start()

    def look_around(self, earlier: CpuTimes | None) -> None:
        """Records this rank's surroundings, and the processors' time since an earlier reading."""
        index = (self.device.index or 0) if self.device.type == "cuda" else None
        row = surroundings(index, socket.gethostname(), earlier)
        self.record.add("surroundings", host=self.record.name_or_hash(socket.gethostname()), **row)

    def is_sharded(self) -> bool:
        """Returns True for a model under FSDP."""
        return any(torch_internals.is_fsdp(part) for root in self.roots for part in root.modules())

    def trains_others(self) -> bool:
        """Returns True where another optimizer updates another model, as a GAN's does."""
        held = {id(parameter) for root in self.roots for parameter in root.parameters()}
        return not self.updated_parameters <= held | self._first_parameters

    def phase(self) -> str:
        """Returns the loop's phase; ``copy`` from a fetch of the training to its forward pass."""
        segment = self.loop.segment
        waiting = len(segment.fetches) - segment.first_fetch - len(segment.passes)
        return "copy" if self.loop.phase == "between" and waiting > 0 else self.loop.phase

    def phase_of_looks(self) -> str:
        """Returns the loop's phase; ``loss`` from the end of the model's call to backward()."""
        phase = self.phase()
        is_after = phase == "forward" and self.loop.sees_calls and not self.calls.is_under_way
        return "loss" if is_after else phase

    def end(self, status: str) -> None:
        """Writes what is left, and lets go of the model and its data."""
        self.pauses.remove()
        self.memory.close()
        try:
            self.steps.finish(wait=status != "failed")
        except Exception as error:  # such as that of a GPU that has failed
            self.record.unseen("the last steps", f"{type(error).__name__}: {error}".splitlines()[0])
        for row in self.feed.rows():
            self.record.add("identities", **row)
        self.stacks.flush()
        steps = self.steps.written + self.loop.untimed
        self.record.add("end", status=status, steps=steps, unix_s=time.time())
        self.stacks.stop()
        self.parameters = []  # nothing is kept alive
        self.calls.forget()
        self.feed.forget()
