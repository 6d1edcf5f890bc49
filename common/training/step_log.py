"""What a training run says of each step: rows for its table, lines for the terminal, a trace."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType

import torch
from torch import nn

from common.runtime.process_group import Worker
from common.runtime.recorder import Recorder
from common.runtime.socket_bytes import sent_bytes
from common.runtime.timing import clock_for
from common.training.config import TrainingConfig
from common.training.memory_watch import AllocationWatch, PeakMemory
from common.training.tracing import TRACE, traced_steps

STEP_COLUMNS = (
    *("step", "rank", "loss", "gradient_norm", "learning_rate", "step_time_ms"),
    *("throughput_tokens_per_s", "peak_memory_bytes", "sent_bytes", "profiled"),
)
MEMORY_COLUMNS = ("rank", "peak_bytes")
WATCHED_STEP = 2
"""The step whose memory is looked at: the third, when optimizer states and buckets are there."""


class StepLog:
    """Measures steps one after another, on every rank. Use as a context around all of them.

    A step's time ends before ranks exchange what they measured, so that each has its own; bytes
    sent are those of the step, too. ``model`` and ``optimizer`` are whose memory is looked at.
    """

    def __init__(
        self,
        config: TrainingConfig,
        worker: Worker,
        recorder: Recorder,
        first: int,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
    ) -> None:
        self.config, self.worker = config, worker
        self._first, self._model, self._optimizer = first, model, optimizer
        self._watch: AllocationWatch | None = None
        self._table = recorder.stream("training-steps.csv", STEP_COLUMNS)
        self._memory = recorder.stream("memory.csv", MEMORY_COLUMNS)
        self._clock, self._peak = clock_for(worker.device), PeakMemory(worker.device)
        self._rows: list[dict] = []
        self._exits = ExitStack()
        self.trace: Path | None = None
        """This rank's trace, if steps are traced."""
        self.traced_from = first
        """The training step that the trace counts as its first, traced or not."""
        if config.profile:
            folder = recorder.folder / "traces" / config.folder
            self.trace = folder / TRACE.format(rank=worker.rank)
        self._tracing = traced_steps(
            *(self.trace, worker.device),
            *(config.profile_wait, config.profile_warmup, config.profile_active),
        )

        self._step_traced: Callable[[], bool] | None = None

    def __enter__(self) -> StepLog:
        return self

    def __exit__(
        self, kind: type | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._exits.__exit__(kind, error, traceback)

    def begin_step(self, index: int) -> None:
        """Step ``index`` begins."""
        looks_at_memory = self.config.measure_memory and self.worker.device.type == "cpu"
        if looks_at_memory and index == self._first + WATCHED_STEP:
            self._watch = AllocationWatch(self._model, self._optimizer)
        # There can be one profiler at a time.
        before = looks_at_memory and index <= self._first + WATCHED_STEP
        if not before and not self._step_traced:
            self.traced_from = index
            self._step_traced = self._exits.enter_context(self._tracing)
        self._peak.start()
        self._sent = sent_bytes()
        self._clock.wait()
        self._began = time.perf_counter()

    def end_step(self, index: int) -> None:
        """It has been computed, on this rank."""
        self._clock.wait()
        step_s = time.perf_counter() - self._began
        config = self.config
        tokens = config.global_batch_size * config.seq_len
        sent = sent_bytes()
        self._rows.append(
            {
                "step": index,
                "step_time_ms": step_s * 1e3,
                "throughput_tokens_per_s": tokens / step_s,
                "peak_memory_bytes": self._peak.peak_bytes(),
                "sent_bytes": None if sent is None or self._sent is None else sent - self._sent,
                "profiled": self._step_traced() if self._step_traced else bool(self._watch),
            }
        )

    def add(self, loss: float, gradient_norm: float, lr: float, next_lr: float) -> None:
        """What the ranks agree on of the step that has ended; printed each ``log_every`` steps."""
        row = self._rows[-1]
        row |= {"loss": loss, "gradient_norm": gradient_norm, "learning_rate": lr}
        if row["step"] == self._first + WATCHED_STEP:
            self._look_at_memory(row)
        if row["step"] % self.config.log_every == 0:
            self.flush()
            if self.worker.is_main:
                took = _short(row["step_time_ms"] / 1e3)
                print(
                    f"step={row['step']} | loss={loss:.4f} | lr={next_lr:.2e} | time={took}",
                    flush=True,
                )

    def flush(self) -> None:
        """Write the rows there are, of all ranks."""
        rows, self._rows = self._rows, []
        self._table.write(rows)

    def _look_at_memory(self, row: dict) -> None:
        peak_bytes = row["peak_memory_bytes"] if self.worker.device.type == "cuda" else None
        if self._watch:
            peak_bytes, self._watch = self._watch.finish(), None
        self._memory.write([{"peak_bytes": peak_bytes}] if peak_bytes else [])


def _short(seconds: float) -> str:
    """Seconds with enough digits to tell two steps apart."""
    return f"{seconds:.1f}s" if seconds >= 1 else f"{seconds:.3f}s"
