"""Runs real steps under settings, in fresh DDP instances, to verify predictions.

Most of the noise of a step is that of its DDP instance, so there are many instances with few steps
each, visited in rounds whose order rotates. A step is forward and backward pass, as training runs
them: ranks start it together and wait for each other nowhere else.
"""

from __future__ import annotations

import gc
import inspect
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import pandas as pd
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from common.benchmarks.buckets.ddp_record import bucket_sizes
from common.benchmarks.steps import FixedBatchStep
from common.errors import UserError
from common.runtime import torch_internals
from common.runtime.progress import Progress
from common.runtime.records.recorder import Recorder, gather_rows
from common.runtime.timing import clock_for
from common.training.ddp import compress_gradients, exchanging, make_ddp
from common.tuning.ddp_setting import DEFAULT, DdpSetting
from common.tuning.same_graph import together
from common.tuning.user_model import UserModel, checked_loss, said

WARMUP_STEPS, STEPS = 2, 4
"""Steps of a visit. DDP makes its final buckets before the second step, which is warm-up, too."""
VISIT_COLUMNS = (
    "stage",
    "setting",
    "num_buckets",
    "round",
    "order",
    "iteration",
    "rank",
    "forward_time_ms",
    "step_time_ms",
)


@contextmanager
def left_as_it_was(module: nn.Module) -> Iterator[None]:
    """Undoes what real steps inside the block do to the module and to this process.

    Buffers are put back: running means move with every forward pass. Objects that exist already
    are hidden from Python's collector, so that collecting a DDP instance, with its hooks and
    buckets, takes a millisecond and not half a second of looking at all that PyTorch imports.
    """
    before = [(buffer, buffer.clone()) for buffer in module.buffers()]
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()
        with torch.no_grad():
            for buffer, value in before:
                buffer.copy_(value)


def takes_cap_list() -> bool:
    """Returns True if this PyTorch's DDP takes caps one by one (``bucket_cap_mb_list``)."""
    return "bucket_cap_mb_list" in inspect.signature(DistributedDataParallel).parameters


def check_under_ddp(user: UserModel, step: FixedBatchStep) -> None:
    """Runs a step under DDP's default. Raises UserError where the model does not work there.

    It also makes PyTorch import what DDP needs, which takes seconds.
    """
    together(step.worker, lambda: _first_step(user, step))
    step.zero_grad()
    gc.collect()
    gc.freeze()  # with all that DDP imported


def _first_step(user: UserModel, step: FixedBatchStep) -> None:
    calls: list[None] = []
    try:
        ddp = wrap(step, DEFAULT)
        ddp.register_forward_pre_hook(lambda *_: calls.append(None))
        loss = checked_loss(user, ddp)
        if calls:
            loss.backward()
    except (RuntimeError, ValueError) as error:
        raise UserError(f"{user.name}: DDP does not take it: {said(error)}") from None
    if not calls:
        raise UserError(
            f"{user.name}: loss(module, batch) does not call the module it is given, so DDP "
            "would exchange nothing; compute the loss from module(...)"
        )


def wrap(step: FixedBatchStep, setting: DdpSetting) -> DistributedDataParallel:
    """Wraps the user's module in DDP under a setting."""
    ddp = make_ddp(step.forward_model, step.device, **setting.ddp_arguments())
    compress_gradients(ddp, setting.compression)
    return ddp


class Visits:
    """Visits of settings, all ranks together; every rank keeps the samples of all.

    Args:
        step: the step that is run under each setting.
        table: name of the table, with VISIT_COLUMNS, that grows with every visit.
        progress: counts the visits.
    """

    def __init__(
        self, step: FixedBatchStep, recorder: Recorder, table: str, progress: Progress | None = None
    ) -> None:
        self.step, self.recorder, self.progress = step, recorder, progress
        self.worker = recorder.worker
        self.sink = recorder.run.stream(table, VISIT_COLUMNS) if recorder.run else None
        self.count = 0
        self._rows: list[dict] = []

    @property
    def samples(self) -> pd.DataFrame:
        """Returns the samples of all visits so far, with VISIT_COLUMNS."""
        return pd.DataFrame(self._rows, columns=list(VISIT_COLUMNS))

    def rounds(
        self, stage: str, settings: Sequence[DdpSetting], rounds: int, first: int = 0
    ) -> pd.DataFrame:
        """Visits each setting once in each rotated round; returns the samples of these rounds.

        ``first`` is the number of the first round, where a stage goes on.
        """
        before = len(self._rows)
        visits = self.recorder.rounds(settings, first + rounds, stage=stage, first=first)
        for visited, (round_, setting) in enumerate(visits):
            keys = {"stage": stage, "setting": setting.label, "round": round_}
            keys |= {"order": visited % len(settings)}
            measured = gather_rows(self.worker, visit(self.step, setting))
            rows = [keys | row for row in measured]
            self._rows += rows
            self.count += setting.accumulation  # each of its steps has as many passes
            if self.sink:
                self.sink.write(rows)
            if self.progress:
                self.progress.step(f"{stage}, round {round_ + 1}, {setting.label}")
        return self.samples.iloc[before:]


def visit(step: FixedBatchStep, setting: DdpSetting) -> list[dict]:
    """Runs the steps of one fresh DDP instance; returns this rank's rows of the measured ones."""
    ddp = wrap(step, setting)
    rows = [
        timed_step(step, ddp, setting.accumulation) | {"iteration": iteration}
        for iteration in range(-WARMUP_STEPS, STEPS)
    ]
    num_buckets = len(bucket_sizes(torch_internals.ddp_record(ddp)))
    step.zero_grad()
    del ddp
    gc.collect()  # its hooks and buckets
    return [row | {"num_buckets": num_buckets} for row in rows if row["iteration"] >= 0]


def timed_step(step: FixedBatchStep, model: nn.Module, accumulation: int = 1) -> dict[str, float]:
    """Runs a step; returns the ms of its forward passes and of all of it, per micro-batch."""
    clock = clock_for(step.device)
    step.zero_grad()
    step.worker.barrier()
    clock.wait()
    start, forward_s = clock.mark(), []
    for index in range(accumulation):
        with exchanging(model, index == accumulation - 1):
            began = clock.mark()
            loss = step.forward(model)
            forward_s.append((began, clock.mark()))
            loss.backward()
    end = clock.mark()
    clock.wait()
    forward_ms = sum(clock.elapsed_s(*marks) for marks in forward_s) * 1e3
    step_ms = clock.elapsed_s(start, end) * 1e3
    return {"forward_time_ms": forward_ms / accumulation, "step_time_ms": step_ms / accumulation}
