"""Passes without what they need not do, beside passes as they are: what it costs is measured.

What a script may have left on (anomaly detection, deterministic algorithms, a profiler, hooks on
modules and gradients), activations that are computed twice, layers that are called again with the
same input, more threads than cores, gradients that no optimizer uses, those of a table of which few
rows are touched, many small buckets, checks of each exchange (TORCH_DISTRIBUTED_DEBUG=DETAIL), and
FSDP's scatters of gradients.
"""

from __future__ import annotations

import socket
from collections.abc import Callable, Collection, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn

from ddplab_watch import torch_internals
from ddplab_watch.exchanging import Exchange
from ddplab_watch.kept import Kept, free_bytes, with_threads
from ddplab_watch.machine_cores import own_cores
from ddplab_watch.record import Record
from ddplab_watch.repeated_calls import RepeatedCalls
from ddplab_watch.team import Team, telling

ANOMALY, DETERMINISTIC = "anomaly detection", "deterministic algorithms"
PROFILER, HOOKS = "a profiler", "hooks"
RECOMPUTED, THREADS = "activation checkpointing", "too many threads"
UNUSED, SPARSE, SMALL = "unused gradients", "untouched embeddings", "small buckets"
CHECKED, REPEATED = "checks of each exchange", "repeated calls"
SCATTERED = "scattered gradients"
LEFT_ON = (ANOMALY, DETERMINISTIC, PROFILER, HOOKS)
COMPARED = (*LEFT_ON, RECOMPUTED, REPEATED, THREADS, CHECKED, SMALL, UNUSED, SPARSE, SCATTERED)
NOT_TOGETHER = (RECOMPUTED, PROFILER)
"""What a rank alone may fail at, for lack of memory, or does in a thread of its own: others would
wait for it in a pass in which ranks exchange something."""
REPEATS = 5
LEAN_TRIED = 2 * (REPEATS + 1)
"""Passes of a comparison."""
LARGE, FEW_ROWS = 0.05, 0.1
"""A table that holds a twentieth of the gradients, and of which less than a tenth of the rows are
touched, is worth other gradients."""
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
def _without_hooks(model: nn.Module) -> Iterator[None]:
    """Takes a script's hooks off a model and its parameters, and puts them back in their order."""
    kept = [(table, dict(table)) for table in torch_internals.hook_tables(model)]
    try:
        for table, hooks in kept:
            for key, hook in hooks.items():
                if torch_internals.is_of_script(hook):
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
    if torch_internals.is_profiling():
        leans[PROFILER] = Lean(in_thread=True)
    hooks = [hook for table in torch_internals.hook_tables(model) for hook in table.values()]
    if of_script := sum(map(torch_internals.is_of_script, hooks)):
        leans[HOOKS] = Lean(partial(_without_hooks, model), noted={"hooks": of_script})
    return leans


class LeanPasses:
    """Times passes with and without, in turns, with all ranks computing at once.

    Args:
        one_pass: runs a pass, for the gradients of the parameters ``only``, with an ``exchange``,
            and returns its times and the rows of its gradients.
        exchange: exchange in the script's own buckets; None where there is none.
        may_go_on: says whether there is time for so many more passes.
        leave_out: names of what is not compared.
    """

    def __init__(
        self,
        team: Team,
        record: Record,
        one_pass: Callable[..., tuple[dict, list[dict[str, Any]]]],
        kept: Kept,
        exchange: Exchange | None,
        may_go_on: Callable[[int], bool],
        leave_out: Collection[str] = (),
    ) -> None:
        self.team, self.record, self.one_pass, self.kept = team, record, one_pass, kept
        self.exchange, self.may_go_on = exchange, may_go_on
        self.leave_out = leave_out
        self.computing: list[tuple[str, list[int], int]] = []
        """Host, cores and threads of each rank."""

    def run(self, further: Mapping[str, Lean] = MappingProxyType({})) -> None:
        """Times what any of this holds for on all ranks.

        Args:
            further: other lean passes, by the name of what they are without.
        """
        leans = left_on(self.kept.inner) | {**further}
        mine = (socket.gethostname(), sorted(own_cores()), torch.get_num_threads())
        self.computing = self.team.gather(mine)
        for name, find in (
            (RECOMPUTED, self.recomputed),
            (REPEATED, self.repeated),
            (THREADS, self.threads),
            (CHECKED, self.unchecked),
            (SMALL, self.small_buckets),
            (UNUSED, self.unused_gradients),
            (SPARSE, self.untouched_embeddings),
        ):
            if name in self.leave_out:
                continue
            with telling(self.record, f"passes without {name}"):
                if (lean := self.team.on_all(find)) is not None:
                    leans[name] = lean
        for name in COMPARED:
            is_tried = name in leans and name not in self.leave_out
            if self.team.all_agree(is_tried and self.may_go_on(LEAN_TRIED)):
                self.compare(name, leans[name])

    def recomputed(self) -> Lean | None:
        """Returns passes that keep the activations of ``torch.utils.checkpoint``."""
        calls: list[None] = []
        with torch_internals.no_recomputation(calls), _saved_bytes() as without:
            self.one_pass()
        if not calls:
            return None
        with _saved_bytes() as now:
            self.one_pass()
        needed = sum(without.values()) - sum(now.values())
        noted = {"needed_bytes": needed, "free_bytes": free_bytes(self.team.device)}
        return Lean(partial(torch_internals.no_recomputation, calls), noted=noted)

    def repeated(self) -> Lean | None:
        """Returns passes that compute a layer once for all calls with the same input."""
        repeats = RepeatedCalls(self.kept.inner)
        if self.kept.is_compiled:  # a layer that is changed would be compiled anew
            return None
        with repeats.looked_for():
            self.one_pass()
        noted = {"repeated_calls": repeats.repeated, "calls": repeats.calls}
        return Lean(repeats.once, noted=noted) if repeats.repeated else None

    def threads(self) -> Lean | None:
        """Returns passes with no more threads on this machine than it has cores."""
        threads = torch.get_num_threads()
        on_host = [rank for rank in self.computing if rank[0] == socket.gethostname()]
        all_cores = set().union(*(rank[1] for rank in on_host))
        fair = max(1, len(all_cores) // len(on_host))
        crowded = sum(rank[2] for rank in on_host) > max(len(all_cores), len(on_host))
        if self.team.device.type != "cpu" or not crowded or threads <= fair:
            return None
        noted = {"threads": threads, "fair_threads": fair, "cores": len(all_cores)}
        return Lean(partial(with_threads, fair), noted=noted)

    def unchecked(self) -> Lean | None:
        """Returns passes whose exchange no rank compares with that of the others before it."""
        send = torch_internals.send_unchecked(self.team.group, self.team.device)
        if self.exchange is None or send is None:
            return None
        return Lean(exchanges=(self.exchange, self.like(self.exchange.sizes_bytes, send)))

    def like(self, sizes_bytes: list[int], send: Callable | None = None) -> Exchange:
        """Returns an exchange of the same gradients in other buckets, or sent in another way."""
        parameters = [p for p in self.kept.inner.parameters() if p.requires_grad]
        return Exchange(sizes_bytes, parameters, self.team.group, send)

    def small_buckets(self) -> Lean | None:
        """Returns passes with the exchange in buckets as DDP makes them by itself."""
        if self.exchange is None:
            return None
        ends, width = self.exchange.ends, self.exchange.sent.element_size()
        sizes, limit, start = [], FIRST_BYTES, 0
        for end in ends:
            if (end - start) * width >= limit or end == ends[-1]:
                sizes.append((end - start) * width)
                start, limit = end, BUCKET_BYTES
        if len(ends) < MANY_BUCKETS * len(sizes):
            return None
        noted = {"buckets": len(ends), "usual_buckets": len(sizes)}
        return Lean(exchanges=(self.exchange, self.like(sizes)), noted=noted)

    def unused_gradients(self) -> Lean | None:
        """Returns passes for those gradients alone that an optimizer uses."""
        sizes = self.kept.unused
        if not sizes:
            return None
        names = {row["parameter"] for row in self.one_pass(watched=True)[1]}
        unused = names & set(sizes)
        if unused in (set(), names):
            return None
        noted = {"unused_bytes": sum(sizes[name] for name in unused)}
        return Lean(only=names - unused, noted=noted)

    def untouched_embeddings(self) -> Lean | None:
        """Returns passes without gradients of large tables of which few rows are touched.

        Embeddings are such tables, and any parameter that a model takes rows of.
        """
        parameters = self.kept.inner.named_parameters()
        trained = {name: p for name, p in parameters if p.requires_grad}
        least_bytes = LARGE * self.kept.gradient_bytes
        tables = {n: p for n, p in trained.items() if p.dim() > 1 and p.nbytes > least_bytes}
        if not tables:
            return None
        touched: dict[str, int] = {}

        def count(gradient: Tensor, name: str) -> None:
            if gradient.layout == torch.strided:  # else it has no more rows than are touched
                touched[name] = int((gradient != 0).flatten(0, -2).any(dim=1).sum())

        handles = [p.register_hook(partial(count, name=name)) for name, p in tables.items()]
        try:
            self.one_pass()
        finally:
            for handle in handles:
                handle.remove()
        rows = {name: p.numel() // p.shape[-1] for name, p in tables.items()}
        few = {name for name in touched if 0 < touched[name] < FEW_ROWS * rows[name]}
        names = set(trained)
        if few in (set(), names):
            return None
        noted = {
            "unused_bytes": sum(tables[name].nbytes for name in few),
            "touched_rows": sum(touched[name] for name in few),
            "rows": sum(rows[name] for name in few),
        }
        return Lean(only=names - few, noted=noted)

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

        with ThreadPoolExecutor(1) as thread, telling(self.record, f"passes without {without}"):
            for repeat in range(-1, REPEATS):
                for is_lean in (False, True) if repeat % 2 else (True, False):
                    self.team.on_all(partial(timed, repeat, is_lean))

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
