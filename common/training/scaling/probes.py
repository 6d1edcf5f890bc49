"""The parts of a step, each measured by itself: the inputs of predictions and of a diagnosis.

- Passes without any exchange, at half, once and twice the batch, with all ranks computing at the
  same time; and one rank at a time, while the others wait. Ranks that share a core or a device are
  slower together than alone.
- The gradient-ready times of a backward pass.
- All-reduces by size, in float32 and in the formats that gradients may be compressed to.
- The cost of bringing a gradient into a bucket and back, as it is or through a 16-bit format.

Nothing that is trained changes: passes run on a copy of the model.
"""

from __future__ import annotations

import copy
import itertools
import statistics
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass

import torch
from ddplab_watch.marks import LAUNCH_S
from torch import Tensor, nn

from common.runtime.group.collective_timing import ALL_REDUCE_COLUMNS, TimedCalls, time_all_reduces
from common.runtime.group.gradient_marks import (
    READY_COLUMNS,
    ready_marks,
    ready_rows,
    ready_seconds,
)
from common.runtime.group.process_group import Worker
from common.runtime.records.recorder import Recorder
from common.runtime.seeding import kept_random_numbers
from common.runtime.timing import clock_for
from common.tables import COST_COLUMNS, PROBE_COLUMNS
from common.training.ddp import COMPRESSIONS
from common.training.precision import autocast
from common.training.scaling.data_parallel_step import Batch, StepOptions

SMALL_MESSAGE_BYTES = 2**16
"""Largest all-reduce that counts as small. Some small ones stall, so that their time, from which
the latency α is fitted, is a median."""
SMALL_MESSAGE_CALLS = 12
"""Number of calls in that median."""


@dataclass(frozen=True)
class ProbePlan:
    """The repeats and sizes of the probes.

    ``formats`` are those of COMPRESSIONS in which all-reduces are timed.
    """

    repeats: int = 5
    sizes: tuple[float, ...] = (0.5, 1, 2)
    """Batches that passes are timed at, as multiples of the run's."""
    all_reduce_rounds: int = 3
    all_reduce_calls: int = 3
    formats: tuple[str, ...] = ("none", "bf16")


@dataclass(frozen=True)
class Probed:
    """A model to probe, with the functions that make its batches, its loss and its optimizer.

    ``make_batch(size)`` makes a micro-batch of ``size`` samples; ``make_optimizer(parameters)`` an
    optimizer like the run's.
    """

    model: nn.Module
    make_optimizer: Callable[[object], torch.optim.Optimizer]
    loss_of: Callable[[Tensor, Batch], Tensor]
    make_batch: Callable[[int], Batch]
    batch_size: int
    options: StepOptions


def probe(probed: Probed, worker: Worker, recorder: Recorder, plan: ProbePlan) -> None:
    """Measures the parts of a step and writes a table of each; all ranks call it.

    The tables are probes.csv, costs.csv, gradient-ready-times.csv and, on several ranks,
    allreduce-samples.csv (and one for each format).
    """
    recorder.witness()  # of what ran before
    with kept_random_numbers(worker.device):  # dropout in here changes nothing there
        passes = _Passes(probed, worker)
        rows, ready = passes.measure(plan, recorder)
    recorder.stream("probes.csv", PROBE_COLUMNS).write(rows)
    recorder.stream("gradient-ready-times.csv", READY_COLUMNS).write(ready)
    gradient_bytes = sum(p.numel() * p.element_size() for p in probed.model.parameters())
    costs = time_copies(gradient_bytes, recorder, plan)
    recorder.stream("costs.csv", COST_COLUMNS).write(costs)
    if worker.world_size == 1:
        return
    for name in plan.formats:
        dtype = COMPRESSIONS[name] or torch.float32
        suffix = f"-{str(dtype).removeprefix('torch.')}" if name != "none" else ""
        samples = time_curve(gradient_bytes // 4, dtype, recorder, plan)
        recorder.stream(f"allreduce-samples{suffix}.csv", ALL_REDUCE_COLUMNS).write(samples)


class _Passes:
    """A copy of the model and an optimizer, whose passes and updates are timed."""

    def __init__(self, probed: Probed, worker: Worker) -> None:
        self.probed, self.worker = probed, worker
        self.model = copy.deepcopy(probed.model)
        self.optimizer = probed.make_optimizer(self.model.parameters())
        self.clock = clock_for(worker.device)

    def measure(self, plan: ProbePlan, recorder: Recorder) -> tuple[list[dict], list[dict]]:
        """Returns rows of PROBE_COLUMNS and of READY_COLUMNS, but for the rank."""
        # An arm is (batch size, True if all ranks compute at the same time). With several ranks one
        # more arm times the run's batch on one rank at a time, while the others wait at a barrier.
        sizes = sorted({max(1, round(self.probed.batch_size * share)) for share in plan.sizes})
        arms = [(size, True) for size in sizes]
        if self.worker.world_size > 1:
            arms.append((self.probed.batch_size, False))
        batches = {size: self.probed.make_batch(size) for size in sizes}
        self._pass(batches[sizes[-1]])  # warm-up, at the largest
        rows, ready = [], []
        for repeat, (size, together) in recorder.rounds(arms, plan.repeats, stage="passes"):
            self._pass(batches[size])  # the size before must not be felt
            turns = [None] if together else range(self.worker.world_size)
            for turn in turns:
                self.worker.barrier()
                if turn in (None, self.worker.rank):
                    watched = together and size == self.probed.batch_size
                    times, at = self._pass(batches[size], watched)
                    ready += ready_rows(self.model, at, repeat) if watched else []
                    keys = {"arm": 0, "batch_per_rank": size, "together": together}
                    rows.append(keys | {"repeat": repeat} | times)
            self.worker.barrier()
        return rows, ready

    def _pass(self, batch: Batch, watched: bool = False) -> tuple[dict, dict[str, float]]:
        """Times both passes and an update; measures gradient-ready times if ``watched``.

        Returns:
            the times in ms, by column of PROBE_COLUMNS; the seconds from the start of the backward
            pass at which each gradient was ready, by parameter, empty unless ``watched``.
        """
        clock, batch = self.clock, batch.to(self.worker.device)
        clock.wait()
        marks = [clock.mark()]
        with autocast(self.probed.options.precision, self.worker.device):
            outputs = self.model(*batch.inputs)
        if outputs.dtype in (torch.float16, torch.bfloat16):
            outputs = outputs.float()
        loss = self.probed.loss_of(outputs, batch)
        marks.append(clock.mark())
        with ready_marks(self.model, clock) if watched else nullcontext({}) as gradients:
            loss.backward()
            marks.append(clock.mark())
            if watched:
                clock.wait()
            at = ready_seconds(gradients, marks[1], clock)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        marks.append(clock.mark())
        clock.wait()
        names = ("forward_time_ms", "backward_time_ms", "optimizer_time_ms")
        spans = [clock.elapsed_s(a, b) * 1e3 for a, b in itertools.pairwise(marks)]
        return dict(zip(names, spans, strict=True)), at


def time_copies(gradient_bytes: int, recorder: Recorder, plan: ProbePlan) -> list[dict]:
    """Times the way of a float32 gradient into a bucket and back, in each format.

    The gradient has all the model's ``gradient_bytes``, at most 64 MiB. Returns rows of
    COST_COLUMNS, but for the rank.
    """
    numel = max(1, min(gradient_bytes, 2**26) // 4)
    device = recorder.worker.device
    clock, gradient = clock_for(device), torch.zeros(numel, device=device)
    bucket = torch.zeros_like(gradient)
    formats = (("copy", None), ("fp16", torch.float16), ("bf16", torch.bfloat16))
    rows = []
    rounds = recorder.rounds(formats, plan.repeats, stage="copies", first=-1)
    for repeat, (name, narrow) in rounds:
        clock.wait()
        clock.hold(4 * LAUNCH_S)  # a copy takes about as long as its launch
        start = clock.mark()
        if narrow is None:
            torch.mul(gradient, 0.5, out=bucket)
            gradient.copy_(bucket)
        else:
            gradient.copy_(gradient.to(narrow).div_(2))
        end = clock.mark()
        clock.wait()
        time_ms = clock.elapsed_s(start, end) * 1e3
        keys = {"cost": name, "size_bytes": numel * 4, "repeat": repeat}
        rows += [keys | {"time_ms": time_ms}] if repeat >= 0 else []
    return rows


def time_curve(numel: int, dtype: torch.dtype, recorder: Recorder, plan: ProbePlan) -> list[dict]:
    """Times all-reduces of 1 element up to ``numel``; returns rows of ALL_REDUCE_COLUMNS.

    They lack the rank, which the stream that writes them knows.
    """
    shares = (1, 1 / 4, 1 / 16, 1 / 64, 1 / 512, 0)  # the last stands for a single element
    sizes = sorted({max(1, int(numel * share)) for share in shares})
    rows = []
    for round_, size in recorder.rounds(sizes, plan.all_reduce_rounds, stage="curve"):
        small = size * dtype.itemsize <= SMALL_MESSAGE_BYTES
        calls = SMALL_MESSAGE_CALLS if small else plan.all_reduce_calls
        samples = time_all_reduces(size, dtype, recorder.worker, round_, TimedCalls(calls))
        # The median of many calls stands for each of the usual number of samples, so that a
        # stalled call has no weight and all sizes have as many rows.
        if small:
            median_ms = statistics.median(row["time_ms"] for row in samples)
            samples = [
                samples[0] | {"iteration": iteration, "time_ms": median_ms}
                for iteration in range(plan.all_reduce_calls)
            ]
        rows += samples
    return rows
