"""Measures, after the window, what a step is made of: passes by themselves, and all-reduces.

The training goes on as if nothing had been: gradients are taken by ``torch.autograd.grad``, which
leaves ``.grad`` and DDP's hooks alone; what the model holds and random numbers are put back; no
optimizer updates. What can fail on one rank alone is tried on all before any goes on: a rank that
left by itself would leave the others waiting in a collective.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Collection, Sequence
from contextlib import ExitStack, suppress
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from ddplab_watch import torch_internals
from ddplab_watch.exchanging import Exchange
from ddplab_watch.kept import Kept, free_bytes, has_room, left_as_it_was
from ddplab_watch.lean import NOT_TOGETHER, LeanPasses
from ddplab_watch.marks import LAUNCH_S
from ddplab_watch.record import Record
from ddplab_watch.team import Failed, Team, telling

REPEATS = 5
ALONE = 3
"""Ranks that compute alone, one after another: the others wait for each."""
EXCHANGED = 3
"""Passes with an exchange in a repeat: these differ more than others."""
LONGEST_S = 240.0
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
PROFILED = "RuntimeError: the script profiles itself"
NORMS = "RuntimeError: SyncBatchNorm exchanges inside of a pass"
INSIDE = "RuntimeError: the model exchanges inside of a pass"
"""Reasons for which passes are not probed, as ``Team.on_all`` tells them."""
COPY_BYTES = 2**26
TOGETHER, IN_TURN, EXCHANGING = "together", "in turn", "exchanging"
"""Ways in which ranks run a pass: all at once, some of them one after another, or all at once with
an exchange of their gradients."""
PARTS = ("forward_time_ms", "backward_time_ms", "exchange_time_ms")
"""Columns of a pass; only one with an exchange has the last."""


class Probes:
    """The probes of one rank; all ranks of the team run them together.

    Args:
        step_s: usual time of a step, which says how much may be repeated.
        buckets_bytes: bytes of the buckets that a step was seen to send; empty where none were.
    """

    def __init__(
        self,
        kept: Kept,
        team: Team,
        record: Record,
        step_s: float,
        buckets_bytes: Sequence[int] = (),
    ) -> None:
        self.kept, self.team, self.record, self.step_s = kept, team, record, step_s
        self.buckets_bytes = buckets_bytes
        self.clock, self.device = team.clock, team.device
        self.parameters = {name: p for name, p in kept.inner.named_parameters() if p.requires_grad}
        self.exchange: Exchange | None = None

    def run(self) -> None:
        """Measures all that can be; says what could not be."""
        began = time.monotonic()
        with ExitStack() as stack:
            stack.enter_context(torch_internals.no_reentrance())
            putting_back = left_as_it_was(self.kept.inner, self.device)
            try:
                self.team.on_all(lambda: stack.enter_context(putting_back))
                self.team.on_all(self.try_out)
                self.find_sizes()
                self.make_exchange()
                self.passes()
                self.lean_passes(began).run()
            except Failed as failed:
                if self.team.all_agree(str(failed) == PROFILED):
                    self.lean_passes(began).without_profiler()
                elif self.team.all_agree(str(failed) in (NORMS, INSIDE)):
                    self.lean_passes(began, NOT_TOGETHER).run()
                self.record.unseen("passes without exchange", str(failed))
        gradient_bytes = self.kept.gradient_bytes
        with telling(self.record, "copies of gradients"):
            self.team.on_all(partial(self.copies, gradient_bytes))
        for table, dtype in WIRES.items():
            if self.team.ranks == 1:
                break
            if self.team.all_agree(time.monotonic() - began < LONGEST_S):
                self.all_reduces(gradient_bytes // 4, dtype, table)
            else:
                self.record.unseen(f"all-reduces of {dtype}", "what came before took too long")
        self.record.add("probed", seconds=time.monotonic() - began)

    @property
    def most_passes(self) -> int:
        """Returns how long all passes take, as a multiple of one of the script's own.

        In each repeat every size runs twice (½, 1 and 2 batches); passes with their exchange, and
        that of each rank that is alone in turn, have one more before them.
        """
        turns = len(self.in_turn) if self.team.ranks > 1 else 0
        tried = 5  # 1, ½ and 2 batches, and with the exchange, before
        return tried + REPEATS * (7 + (2 + EXCHANGED + turns if turns else 0))

    def try_out(self) -> None:
        """Runs a pass; raises where there can be none."""
        if self.step_s * self.most_passes > LONGEST_S:
            raise RuntimeError(f"steps of {self.step_s:.0f} s: it would take too long")
        if not self.kept.gradients:
            raise RuntimeError("no output of the model has a gradient")
        if why := self.kept.why_once():
            raise RuntimeError(why)
        # A rank alone would wait in such a pass for the others, who wait for it elsewhere.
        if any(isinstance(m, nn.SyncBatchNorm) and m.training for m in self.kept.inner.modules()):
            raise RuntimeError(NORMS.partition(": ")[2])
        if self.team.ranks == 1:
            self.one_pass(1.0)
        elif torch_internals.is_profiling():
            raise RuntimeError(PROFILED.partition(": ")[2])
        elif torch_internals.collectives_in(lambda: self.one_pass(1.0)):
            raise RuntimeError(INSIDE.partition(": ")[2])

    def lean_passes(self, began: float, leave_out: Collection[str] = ()) -> LeanPasses:
        """Returns the passes without what need not be, as long as there is time for them."""

        def may_go_on(passes: int) -> bool:
            return time.monotonic() - began + passes * self.step_s < LONGEST_S

        one_pass = partial(self.one_pass, 1.0)
        about = (self.kept, self.exchange, may_go_on, leave_out)
        return LeanPasses(self.team, self.record, one_pass, *about)

    def find_sizes(self) -> None:
        """Finds the sizes of batches that can be run, the same on all ranks.

        A model may take one size only. A compiled one would be compiled again for another size, and
        the script's own batches might run the code of that from then on.
        """
        self.sizes = [1.0]
        for size in () if self.kept.is_compiled else (0.5, 2.0):
            with suppress(Failed):
                self.team.on_all(partial(self.try_size, size))
                self.sizes.append(size)

    def try_size(self, size: float) -> None:
        """Runs a pass of another size; raises where there can be none, or memory is short."""
        if round(self.kept.samples * size) < 1 or (size > 1 and not has_room(self.device)):
            raise RuntimeError("no such batch")
        self.one_pass(size)

    def make_exchange(self) -> None:
        """Makes the exchange of passes that send their gradients, where the ranks can."""
        if self.team.ranks == 1:
            return
        sizes = self.team.gather(list(self.buckets_bytes))[0]

        def make() -> Exchange:
            free = free_bytes(self.device)
            if free is None or free < 3 * self.kept.gradient_bytes:
                raise RuntimeError("memory is short")
            return Exchange(sizes, list(self.parameters.values()), self.team.group)

        with telling(self.record, "passes with their exchange"):
            exchange = self.team.on_all(make)
            self.team.on_all(partial(self.one_pass, 1.0, exchange=exchange))
            self.exchange = exchange

    def passes(self) -> None:
        """Times passes in rotated order: all ranks at once, also with an exchange, and some alone.

        Raises Failed where one of them fails on a rank.
        """
        arms: list[tuple[float, str]] = [(size, TOGETHER) for size in self.sizes]
        if self.team.ranks > 1:
            arms.append((1.0, IN_TURN))
        if self.exchange is not None:
            arms.append((1.0, EXCHANGING))
        for repeat in range(REPEATS):
            shift = repeat % len(arms)
            for size, how in arms[shift:] + arms[:shift]:
                # Once before it is timed: the size before must not be felt.
                attempts = [partial(self.one_pass, size)]
                for iteration in range(EXCHANGED if how == EXCHANGING else 0):
                    attempts.append(partial(self.exchanging_pass, repeat, iteration))
                for turn in {TOGETHER: [None], IN_TURN: self.in_turn}.get(how, []):
                    is_turn = turn in (None, self.team.rank)
                    together = how == TOGETHER
                    attempts.append(partial(self.timed_pass, size, together, repeat, is_turn))
                for attempt in attempts:
                    self.team.on_all(attempt)

    @property
    def in_turn(self) -> list[int]:
        """Returns the ranks that compute alone, one after another."""
        return sorted({0, self.team.ranks - 1, *range(min(ALONE - 1, self.team.ranks))})

    def timed_pass(self, size: float, together: bool, repeat: int, is_turn: bool) -> None:
        """Times a pass, if it is this rank's turn, and writes its rows."""
        if not is_turn:
            return
        times, ready = self.one_pass(size, watched=together and size == 1.0)
        batch = max(1, round(self.kept.samples * size))
        self.record.add(
            "probes",
            batch_per_rank=batch,
            size=size,
            elements=self.kept.elements * batch / max(1, self.kept.samples),
            together=together,
            repeat=repeat,
            **times,
        )
        for row in ready:
            self.record.add("gradient-ready-times", iteration=repeat, **row)

    def exchanging_pass(self, repeat: int, iteration: int) -> None:
        """Times a pass that sends its gradients while they are computed, and writes its row."""
        times, _ = self.one_pass(1.0, exchange=self.exchange)
        row = {"repeat": repeat, "iteration": iteration, "elements": self.kept.elements}
        self.record.add("passes-exchanging", **row, **times)

    def one_pass(
        self,
        size: float,
        watched: bool = False,
        exchange: Exchange | None = None,
        only: Collection[str] | None = None,
    ) -> tuple[dict, list[dict]]:
        """Runs a forward and a backward pass without DDP.

        Args:
            size: size of the batch, as a multiple of the script's own.
            watched: note when each gradient is ready.
            exchange: exchange that sends the gradients; None leaves them here.
            only: names of the parameters whose gradients are computed; None for all.

        Returns:
            forward_time_ms, backward_time_ms, and exchange_time_ms if there is one: what it takes
            beyond the backward pass; rows of gradients' ready times if ``watched``.
        """
        kept, clock, names = self.kept.sized(size), self.clock, list(self.parameters)
        ready: dict[str, Any] = {}
        handles = []
        if watched:
            handles = [
                parameter.register_hook(lambda _, name=name: ready.__setitem__(name, clock.mark()))
                for name, parameter in self.parameters.items()
            ]
        if exchange is not None:
            exchange.begin()
            handles = [p.register_hook(exchange.ready) for p in self.parameters.values()]
        clock.wait()
        marks = [clock.mark()]
        try:
            with torch.enable_grad():
                outputs, starts = kept.forward(kept.inner)
                marks.append(clock.mark())
                wanted = names if only is None else only
                parameters = [self.parameters[name] for name in names if name in wanted]
                torch.autograd.grad(outputs, parameters, starts, allow_unused=True)
            marks.append(clock.mark())
        finally:
            for handle in handles:
                handle.remove()
            if exchange is not None:
                exchange.finish()
                marks.append(clock.mark())
        clock.wait()
        parts = [clock.elapsed_s(a, b) * 1e3 for a, b in itertools.pairwise(marks)]
        times = dict(zip(PARTS, parts, strict=False))
        order = list(ready)
        rows = [
            {
                "parameter": name,
                "registration_index": names.index(name),
                "ready_index": order.index(name),
                "dtype": str(self.parameters[name].dtype).removeprefix("torch."),
                "size_bytes": self.parameters[name].nbytes,
                "ready_time_ms": clock.elapsed_s(marks[1], mark) * 1e3,
            }
            for name, mark in ready.items()
        ]
        return times, rows

    def copies(self, gradient_bytes: int) -> None:
        """Times the way of a gradient into a bucket and back, as it is or through 16 bits."""
        numel = max(1, min(gradient_bytes, COPY_BYTES) // 4)
        gradient = torch.zeros(numel, device=self.device)
        bucket = torch.zeros_like(gradient)
        for repeat in range(-1, REPEATS):
            for name, narrow in (("copy", None), ("fp16", torch.float16), ("bf16", torch.bfloat16)):
                self.clock.wait()
                self.clock.hold(4 * LAUNCH_S)  # a copy takes about as long as its launch
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
        what = f"all-reduces of {dtype}"
        make = partial(torch.zeros, sizes[-1], device=self.device, dtype=dtype)
        with telling(self.record, what):
            buffer = self.team.on_all(make)
            try:
                self.time_all_reduces(buffer, sizes, table)
            except (RuntimeError, TypeError) as error:  # a backend that adds these on no rank
                self.record.unseen(what, str(error).splitlines()[0])

    def time_all_reduces(self, buffer: torch.Tensor, sizes: list[int], table: str) -> None:
        """Writes the times of all-reduces of the first elements of ``buffer``, by size.

        GPUs are not held equally long, as their clocks differ; an all-reduce of one element, in the
        stream itself, lets them go on together.
        """
        together = torch.zeros(1, device=self.device)
        for round_ in range(ROUNDS):
            for numel in sizes if round_ % 2 == 0 else sizes[::-1]:
                size_bytes = numel * buffer.element_size()
                calls = SMALL_CALLS if size_bytes <= SMALL_BYTES else CALLS
                tensor = buffer[:numel]
                self.team.meet()
                if self.device.type == "cuda":
                    self.clock.hold((calls + 1) * LAUNCH_S)
                    dist.all_reduce(together, group=self.team.group)
                marks = [self.clock.mark()]
                for _ in range(calls):
                    dist.all_reduce(tensor, group=self.team.group)
                    marks.append(self.clock.mark())
                self.clock.wait()
                times = [self.clock.elapsed_s(a, b) * 1e3 for a, b in itertools.pairwise(marks)]
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
