"""The ranks of a job that measure something together after the window."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from ddplab_watch.marks import Clock
from ddplab_watch.record import Record

HERE = timedelta(seconds=20)
"""Rank 0 waits so long for the other ranks' watches, which come after the same update."""
GO_ON, LEAVE_OUT = "go on", "leave out"
FOLDER = "ddplab-watch/folder"
"""Where rank 0 names the bundle in the job's store, for each start of the ranks."""


class Failed(Exception):
    """Something has failed on a rank, and all ranks know."""


@contextmanager
def telling(record: Record, what: str) -> Iterator[None]:
    """Ends the block where something fails on a rank, and records that ``what`` is not seen."""
    try:
        yield
    except Failed as failed:
        record.unseen(what, str(failed))


class Team:
    """The ranks of a group, or a process by itself, and the device of this rank's model."""

    def __init__(self, group: dist.ProcessGroup | None, device: torch.device, clock: Clock) -> None:
        self.group, self.device, self.clock = group, device, clock
        self.ranks = dist.get_world_size(group) if group is not None else 1
        self.rank = dist.get_rank(group) if group is not None else 0

    def meet(self) -> None:
        """Waits until all ranks have come here."""
        if self.ranks > 1:
            self.clock.wait()
            dist.all_reduce(torch.zeros(1, device=self.device), group=self.group)
            self.clock.wait()

    def on_all(self, attempt: Callable[[], Any]) -> Any:
        """Tries something on all ranks; returns what it gives here.

        Raises Failed: on all ranks, with the reason here, where it has failed on any.
        """
        value, why = None, ""
        try:
            value = attempt()
        except Exception as error:  # whatever a script's model raises
            why = f"{type(error).__name__}: {error}"
        if not self.all_agree(not why):
            raise Failed(why or "it failed on another rank")
        return value

    def all_agree(self, vote: bool) -> bool:
        """Returns True if every rank votes so: a rank by itself would wait for the others."""
        against = torch.tensor([float(not vote)], device=self.device)
        if self.ranks > 1:
            dist.all_reduce(against, group=self.group)
        return not against.item()

    def gather(self, value: Any) -> list[Any]:
        """Returns what each rank gives, by rank."""
        if self.ranks == 1:
            return [value]
        values: list[Any] = [None] * self.ranks
        # NCCL's objects go through the current device, which a script need not have set.
        on_gpu = self.device.type == "cuda"
        with torch.cuda.device(self.device) if on_gpu else nullcontext():
            dist.all_gather_object(values, value, group=self.group)
        return values


def all_are_here(store: dist.Store | None, job: str, rank: int, ranks: int, sees: str = "") -> bool:
    """Returns True on all ranks if the watch of every rank has come here; False on all others.

    A rank whose watch has ended trains on, and a collective of the probes would meet one of its
    training; ranks that see different things would launch different ones. So the ranks agree
    through the store, where nobody waits for ever. Rank 0 waits for all of them, and the others for
    its decision. Whoever has waited for too long decides to leave the probes out, and the first
    decision holds for all.

    Args:
        store: store of the job.
        job: text that no other watch of this job uses.
        sees: what the collectives depend on: all ranks go on only if it is the same on all.
    """
    if store is None:
        return False
    decided = f"{job}/decided"
    store.set(f"{job}/{rank}", f"sees {sees}")
    try:
        if rank == 0:
            keys = [f"{job}/{other}" for other in range(ranks)]
            store.wait(keys, HERE)
            choice = GO_ON if len({store.get(key) for key in keys}) == 1 else LEAVE_OUT
            return store.compare_set(decided, "", choice) == GO_ON.encode()
        store.wait([decided], 2 * HERE)
    except RuntimeError:  # of a store: it took too long
        return store.compare_set(decided, "", LEAVE_OUT) == GO_ON.encode()
    return store.get(decided) == GO_ON.encode()


def same_folder(
    folder: Path, store: dist.Store | None, rank: int, record: str, again: str = "0"
) -> Path:
    """Returns the folder that rank 0 chooses for the bundle of all ranks.

    Ranks on several hosts have launchers of their own, and name a folder after them.

    Args:
        folder: folder that this rank would choose; rank 0 takes another one where it has been used.
        store: store of the job; None leaves each rank its own.
        record: name of this rank's file in it.
        again: how often the launcher has started the ranks anew; torchrun's store outlives them.
    """
    if (folder / record).exists():
        folder = folder.with_name(f"{folder.name}-{time.strftime('%Y%m%d-%H%M%S')}")
    if store is None:
        return folder
    key = f"{FOLDER}/{again}"
    if rank == 0:
        store.set(key, str(folder))
        return folder
    try:
        store.wait([key], HERE)
    except RuntimeError:  # rank 0 is not watched
        return folder
    return Path(store.get(key).decode())
