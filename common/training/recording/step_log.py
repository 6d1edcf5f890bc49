"""The record of each training step: rows for a table, lines for the terminal, a trace."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import TracebackType

import torch
from torch import nn

from common.runtime.group.process_group import Worker
from common.runtime.group.socket_bytes import sent_bytes
from common.runtime.records.recorder import Recorder
from common.runtime.timing import clock_for
from common.training.config import TrainingConfig
from common.training.recording.memory_watch import AllocationWatch, PeakMemory
from common.training.recording.tracing import TRACE, traced_steps

STEP_COLUMNS = (
    "step",
    "rank",
    "loss",
    "gradient_norm",
    "learning_rate",
    "step_time_ms",
    "throughput_tokens_per_s",
    "peak_memory_bytes",
    "sent_bytes",
    "profiled",
    "wall_time_ms",
)
MEMORY_COLUMNS = ("rank", "peak_bytes")
WATCHED_STEP = 2
"""Steps before the one whose memory is measured: by then optimizer states and buckets exist."""


class StepLog:
    """The times and memory of a run's steps, on every rank: a context around all of them.

    A step's time ends before ranks exchange what they measured, so that each has its own; bytes
    sent are those of the step, too. Its wall time goes from the end of the step before to its own
    end: with the exchange, the tables and the terminal, without checkpoints and profilers.

    Args:
        first: number of the first step; above 0 in a resumed run.
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
        """Trace of this rank, if steps are traced."""
        self.traced_from = first
        """The training step that the trace counts as its first, traced or not."""
        if config.profile:
            folder = recorder.folder / "traces" / config.folder
            self.trace = folder / TRACE.format(rank=worker.rank)
        self._tracing = traced_steps(
            self.trace,
            worker.device,
            wait=config.profile_wait,
            warmup=config.profile_warmup,
            active=config.profile_active,
        )

        self._step_traced: Callable[[], bool] | None = None
        self._since = 0.0
        self._counted, self._steps_s, self._wall_s, self._checkpoints_s = 0, 0.0, 0.0, 0.0

    def __enter__(self) -> StepLog:
        self._since = time.perf_counter()
        return self

    def __exit__(
        self, kind: type | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._exits.__exit__(kind, error, traceback)

    def begin_step(self, index: int) -> None:
        """Starts to measure step ``index``."""
        with self._outside():
            self._start_profilers(index)
        self._peak.start()
        self._sent = sent_bytes()
        self._clock.wait()
        self._began = time.perf_counter()

    def _start_profilers(self, index: int) -> None:
        looks_at_memory = self.config.measure_memory and self.worker.device.type == "cpu"
        if looks_at_memory and index == self._first + WATCHED_STEP:
            self._watch = AllocationWatch(self._model, self._optimizer)
        # There can be one profiler at a time.
        before = looks_at_memory and index <= self._first + WATCHED_STEP
        if not before and not self._step_traced:
            self.traced_from = index
            self._step_traced = self._exits.enter_context(self._tracing)

    def end_step(self, index: int) -> None:
        """Ends the measurement of step ``index``, which this rank has computed; adds its row."""
        self._clock.wait()
        now = time.perf_counter()
        step_s, wall_s, self._since = now - self._began, now - self._since, now
        config = self.config
        tokens = config.global_batch_size * config.seq_len
        sent = sent_bytes()
        with self._outside():
            profiled = self._step_traced() if self._step_traced else bool(self._watch)
        self._rows.append(
            {
                "step": index,
                "step_time_ms": step_s * 1e3,
                "throughput_tokens_per_s": tokens / step_s,
                "peak_memory_bytes": self._peak.peak_bytes(),
                "sent_bytes": None if sent is None or self._sent is None else sent - self._sent,
                "profiled": profiled,
                "wall_time_ms": wall_s * 1e3,
            }
        )
        if index > self._first and not profiled:  # the first allocates, and may compile
            self._counted += 1
            self._steps_s += step_s
            self._wall_s += wall_s

    def add(self, loss: float, gradient_norm: float, lr: float, next_lr: float) -> None:
        """Adds what the ranks agree on to the ended step's row; prints it each ``log_every`` steps.

        All ranks call it, with the same values.
        """
        row = self._rows[-1]
        row |= {"loss": loss, "gradient_norm": gradient_norm, "learning_rate": lr}
        if row["step"] == self._first + WATCHED_STEP:
            with self._outside():
                self._look_at_memory(row)
        if row["step"] % self.config.log_every == 0:
            self.flush()
            if self.worker.is_main:
                took = _short(row["step_time_ms"] / 1e3)
                print(
                    f"step={row['step']} | loss={loss:.4f} | lr={next_lr:.2e} | time={took}",
                    flush=True,
                )

    @contextmanager
    def checkpoint(self) -> Iterator[None]:
        """Counts the time of the block as a checkpoint's, not as a step's wall time."""
        before = self._since
        with self._outside():
            yield
        self._checkpoints_s += self._since - before

    @contextmanager
    def _outside(self) -> Iterator[None]:
        """Leaves the time of the block out of the wall time of the step that ends next."""
        began = time.perf_counter()
        yield
        self._since += time.perf_counter() - began

    @property
    def throughput(self) -> str:
        """Returns a line: tokens per second of wall time, its share between steps, checkpoints.

        All steps but the first and profiled ones count; the line is empty if there are none.
        """
        if not self._counted:
            return ""
        tokens = self._counted * self.config.global_batch_size * self.config.seq_len
        between = 1 - self._steps_s / self._wall_s
        return (
            f"Throughput: {tokens / self._wall_s:,.0f} tokens/s by wall time; {between:.1%} of it "
            f"between steps; checkpoints {self._checkpoints_s:.1f}s more"
        )

    def flush(self) -> None:
        """Writes the rows of all ranks since the last call; all ranks call it."""
        rows, self._rows = self._rows, []
        self._table.write(rows)

    def _look_at_memory(self, row: dict) -> None:
        peak_bytes = row["peak_memory_bytes"] if self.worker.device.type == "cuda" else None
        if self._watch:
            peak_bytes, self._watch = self._watch.finish(), None
        self._memory.write([{"peak_bytes": peak_bytes}] if peak_bytes else [])


def _short(seconds: float) -> str:
    """Formats seconds with enough digits to tell two steps apart."""
    return f"{seconds:.1f}s" if seconds >= 1 else f"{seconds:.3f}s"
