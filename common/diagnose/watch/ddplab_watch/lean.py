"""Passes without what they need not do, beside passes as they are: what it costs is measured.

What a script may have left on (anomaly detection, deterministic algorithms, a profiler, hooks on
modules and gradients), activations that are computed twice, more threads than cores, gradients that
no optimizer uses, those of an embedding of which few rows are touched, many small buckets, and
checks of each exchange (TORCH_DISTRIBUTED_DEBUG=DETAIL).
"""

from __future__ import annotations

import socket
from collections.abc import Callable, Collection, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from ddplab_watch import private
from ddplab_watch.exchanging import Exchange
from ddplab_watch.kept import Kept, free_bytes
from ddplab_watch.machine_cores import own_cores
from ddplab_watch.record import Record
from ddplab_watch.team import Team

ANOMALY, DETERMINISTIC = "anomaly detection", "deterministic algorithms"
PROFILER, HOOKS = "a profiler", "hooks"
RECOMPUTED, THREADS = "activation checkpointing", "too many threads"
UNUSED, SPARSE, SMALL = "unused gradients", "untouched embeddings", "small buckets"
CHECKED = "checks of each exchange"
LEFT_ON = (ANOMALY, DETERMINISTIC, PROFILER, HOOKS)
COMPARED = (*LEFT_ON, RECOMPUTED, THREADS, CHECKED, SMALL, UNUSED, SPARSE)
REPEATS = 5
LEAN_TRIED = 2 * (REPEATS + 1)
"""Passes of a comparison."""
LARGE, FEW_ROWS = 0.05, 0.05
"""An embedding that holds a twentieth of the gradients and touches less than a twentieth of its
rows is worth other gradients."""
FIRST_BYTES, BUCKET_BYTES = 2**20, 25 * 2**20
"""DDP's own limits of its first bucket and of the others."""
MANY_BUCKETS = 3
"""Times as many buckets as DDP would make by itself from which they are compared with those."""


@dataclass(frozen=True)
class Lean:
    """Passes without something, and the further columns of their rows."""

    off: Callable[[], AbstractContextManager] = nullcontext
    only: Collection[str] | None = None
    """Parameters whose gradients are computed; None for all."""
    exchanges: tuple[Exchange | None, Exchange | None] = (None, None)
    """Exchange of the passes as they are, and of the lean ones."""
    in_thread: bool = False
    """Lean passes run in a thread of their own: profilers look at the thread that started them."""
    noted: dict[str, Any] = field(default_factory=dict)


@contextmanager
def _any_algorithms() -> Iterator[None]:
    """Lets PyTorch choose its algorithms, and puts the script's choice back."""
    warns = torch.is_deterministic_algorithms_warn_only_enabled()
    torch.use_deterministic_algorithms(False)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(True, warn_only=warns)


@contextmanager
def _threads(count: int) -> Iterator[None]:
    """Computes with so many threads."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@contextmanager
def _without_hooks(model: nn.Module) -> Iterator[None]:
    """Takes a script's hooks off a model and its parameters, and puts them back in their order."""
    kept = [(table, dict(table)) for table in private.hook_tables(model)]
    try:
        for table, hooks in kept:
            for key, hook in hooks.items():
                if private.is_of_script(hook):
                    del table[key]
        yield
    finally:
        for table, hooks in kept:
            table.clear()
            table.update(hooks)


def left_on(model: nn.Module) -> dict[str, Lean]:
    """Returns what is on and makes passes longer, with passes in which it is off."""
    leans: dict[str, Lean] = {}
    if torch.is_anomaly_enabled():
        leans[ANOMALY] = Lean(partial(torch.autograd.set_detect_anomaly, False))
    if torch.are_deterministic_algorithms_enabled():
        leans[DETERMINISTIC] = Lean(_any_algorithms)
    if private.is_profiling():
        leans[PROFILER] = Lean(in_thread=True)
    hooks = [hook for table in private.hook_tables(model) for hook in table.values()]
    if of_script := sum(map(private.is_of_script, hooks)):
        leans[HOOKS] = Lean(partial(_without_hooks, model), noted={"hooks": of_script})
    return leans


class LeanPasses:
    """Times passes with and without, in turns, with all ranks computing at once.

    Args:
        team: the ranks.
        record: record of the rows.
        one_pass: runs a pass, for the gradients of the parameters ``only``, with an ``exchange``,
            and returns its times and the rows of its gradients.
        kept: the pass.
        unused: parameters that no optimizer has updated, by name, with their gradients' bytes.
        exchange: exchange in the script's own buckets; None where there is none.
        may_go_on: says whether there is time for so many more passes.
    """

    def __init__(
        self,
        team: Team,
        record: Record,
        one_pass: Callable[..., tuple[dict, list[dict[str, Any]]]],
        kept: Kept,
        unused: dict[str, int],
        exchange: Exchange | None,
        may_go_on: Callable[[int], bool],
    ) -> None:
        self.team, self.record, self.one_pass, self.kept = team, record, one_pass, kept
        self.unused, self.exchange, self.may_go_on = unused, exchange, may_go_on
        self.computing: list[tuple[str, list[int], int]] = []
        """Host, cores and threads of each rank."""

    def run(self) -> None:
        """Times what any of this holds for on all ranks."""
        leans: dict[str, Lean] = left_on(self.kept.inner)
        mine = (socket.gethostname(), sorted(own_cores()), torch.get_num_threads())
        self.computing = self.team.gather(mine)
        for name, find in (
            (RECOMPUTED, self.recomputed),
            (THREADS, self.threads),
            (CHECKED, self.unchecked),
            (SMALL, self.small_buckets),
            (UNUSED, self.unused_gradients),
            (SPARSE, self.untouched_embeddings),
        ):
            yielded: list[Lean] = []
            worked, why = self.team.agreed(lambda find=find, into=yielded: into.extend(find()))
            if not worked:
                self.record.unseen(f"passes without {name}", why)
            elif yielded:
                leans[name] = yielded[0]
        for name in COMPARED:
            if self.team.all_agree(name in leans and self.may_go_on(LEAN_TRIED)):
                self.compare(name, leans[name])

    def recomputed(self) -> Iterator[Lean]:
        """Yields passes that keep the activations of ``torch.utils.checkpoint``."""
        calls: list[None] = []
        with private.no_recomputation(calls), _saved_bytes() as without:
            self.one_pass()
        if calls:
            with _saved_bytes() as now:
                self.one_pass()
            needed = sum(without.values()) - sum(now.values())
            noted = {"needed_bytes": needed, "free_bytes": free_bytes(self.team.device)}
            yield Lean(partial(private.no_recomputation, calls), noted=noted)

    def threads(self) -> Iterator[Lean]:
        """Yields passes with no more threads on this machine than it has cores."""
        threads = torch.get_num_threads()
        on_host = [rank for rank in self.computing if rank[0] == socket.gethostname()]
        all_cores = set().union(*(rank[1] for rank in on_host))
        fair = max(1, len(all_cores) // len(on_host))
        crowded = sum(rank[2] for rank in on_host) > max(len(all_cores), len(on_host))
        if self.team.device.type == "cpu" and crowded and threads > fair:
            noted = {"threads": threads, "fair_threads": fair, "cores": len(all_cores)}
            yield Lean(partial(_threads, fair), noted=noted)

    def unchecked(self) -> Iterator[Lean]:
        """Yields passes whose exchange no rank compares with that of the others before it."""
        send = private.send_unchecked(self.team.group, self.team.device)
        if self.exchange is not None and send is not None:
            yield Lean(exchanges=(self.exchange, self.like(self.exchange.sizes_bytes, send)))

    def like(self, sizes_bytes: list[int], send: Callable | None = None) -> Exchange:
        """Returns an exchange of the same gradients in other buckets, or sent in another way."""
        parameters = [p for p in self.kept.inner.parameters() if p.requires_grad]
        return Exchange(sizes_bytes, parameters, self.team.group, send)

    def small_buckets(self) -> Iterator[Lean]:
        """Yields passes with the exchange in buckets as DDP makes them by itself."""
        if self.exchange is None:
            return
        ends, width = self.exchange.ends, self.exchange.sent.element_size()
        sizes, limit, start = [], FIRST_BYTES, 0
        for end in ends:
            if (end - start) * width >= limit or end == ends[-1]:
                sizes.append((end - start) * width)
                start, limit = end, BUCKET_BYTES
        if len(ends) >= MANY_BUCKETS * len(sizes):
            noted = {"buckets": len(ends), "usual_buckets": len(sizes)}
            yield Lean(exchanges=(self.exchange, self.like(sizes)), noted=noted)

    def unused_gradients(self) -> Iterator[Lean]:
        """Yields passes for those gradients alone that an optimizer uses."""
        if self.unused:
            names = {row["parameter"] for row in self.one_pass(watched=True)[1]}
            unused = names & set(self.unused)
            if unused and unused != names:
                noted = {"unused_bytes": sum(self.unused[name] for name in unused)}
                yield Lean(only=names - unused, noted=noted)

    def untouched_embeddings(self) -> Iterator[Lean]:
        """Yields passes without the gradients of large embeddings of which few rows are touched."""
        tables = {
            f"{name}.weight" if name else "weight": module.weight
            for name, module in self.kept.inner.named_modules()
            if isinstance(module, nn.Embedding) and not module.sparse
        }
        tables = {
            name: weight
            for name, weight in tables.items()
            if weight.requires_grad
            and weight.numel() * weight.element_size() > LARGE * self.kept.gradient_bytes
        }
        touched: dict[str, int] = {}

        def count(gradient: Tensor, name: str) -> None:
            touched[name] = int((gradient != 0).any(dim=1).sum())

        if not tables:
            return
        handles = [w.register_hook(partial(count, name=name)) for name, w in tables.items()]
        try:
            self.one_pass()
        finally:
            for handle in handles:
                handle.remove()
        few = {n for n in touched if touched[n] < FEW_ROWS * len(tables[n])}
        names = {n for n, p in self.kept.inner.named_parameters() if p.requires_grad}
        if few and few != names:
            bytes_ = sum(tables[n].numel() * tables[n].element_size() for n in few)
            noted = {"unused_bytes": bytes_, "touched_rows": sum(touched[n] for n in few)}
            yield Lean(only=names - few, noted=noted | {"rows": sum(len(tables[n]) for n in few)})

    def compare(self, without: str, lean: Lean) -> None:
        """Writes the times of passes as they are and of lean ones, in turns."""

        def one_pass(is_lean: bool) -> dict:
            with lean.off() if is_lean else nullcontext():
                only = lean.only if is_lean else None
                return self.one_pass(only=only, exchange=lean.exchanges[is_lean])[0]

        def timed(repeat: int, is_lean: bool) -> None:
            in_thread = is_lean and lean.in_thread
            times = thread.submit(one_pass, True).result() if in_thread else one_pass(is_lean)
            if repeat >= 0:
                row = {"without": without, "unused_bytes": 0, "lean": is_lean, "repeat": repeat}
                self.record.add("lean-passes", **row | lean.noted, **times)

        with ThreadPoolExecutor(1) as thread:
            for repeat in range(-1, REPEATS):
                for is_lean in (False, True) if repeat % 2 else (True, False):
                    worked, why = self.team.agreed(partial(timed, repeat, is_lean))
                    if not worked:
                        self.record.unseen(f"passes without {without}", why)
                        return

    def without_profiler(self) -> None:
        """Compares passes under the script's own profiler with such as it does not see.

        Whether the model exchanges inside of a pass is not known then. So nothing else is timed.
        """
        self.compare(PROFILER, Lean(in_thread=True))


@contextmanager
def _saved_bytes() -> Iterator[dict[int, int]]:
    """Yields the bytes that autograd keeps for the backward pass, by their address in memory."""
    sizes: dict[int, int] = {}

    def pack(tensor: Tensor) -> Tensor:
        try:
            storage = tensor.untyped_storage()
            sizes[storage.data_ptr()] = storage.nbytes()
        except (NotImplementedError, RuntimeError):  # of a tensor without a storage
            pass
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        yield sizes
