"""The wall time of steps: what passed between them counts, checkpoints and profilers do not."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from common.training.config import BaselineConfig
from common.training.recording import step_log
from common.training.recording.step_log import STEP_COLUMNS, StepLog

MODEL = torch.nn.Linear(2, 2)


class Clock:
    """Stands still unless it is told how many seconds pass."""

    now = 100.0

    def perf_counter(self) -> float:
        return self.now


@pytest.fixture
def log(monkeypatch):
    """Makes a StepLog with its rows in ``log.rows`` and its time that of ``log.clock``."""
    clock = Clock()
    monkeypatch.setattr(step_log, "time", clock)
    rows: list[dict] = []
    recorder = SimpleNamespace(stream=lambda name, columns: SimpleNamespace(write=rows.extend))
    settings = {"device": "cpu", "profile": False, "global_batch_size": 2, "seq_len": 50}
    config = BaselineConfig(**settings)
    worker = SimpleNamespace(device=torch.device("cpu"), rank=0, is_main=False)
    optimizer = torch.optim.SGD(MODEL.parameters())
    log = StepLog(config, worker, recorder, 0, MODEL, optimizer)
    log.rows, log.clock = rows, clock
    return log


def take(log: StepLog, index: int, step_s: float, between_s: float = 0) -> None:
    """Takes a step, and what passes until the next."""
    log.begin_step(index)
    log.clock.now += step_s
    log.end_step(index)
    log.clock.now += between_s
    log.add(1.0, 1.0, 0.1, 0.1)


def test_wall_times_and_checkpoints_are_all_the_time_there_is(log):
    with log:
        take(log, 0, step_s=8, between_s=1)
        take(log, 1, step_s=3, between_s=1)
        with log.checkpoint():
            log.clock.now += 40
        take(log, 2, step_s=3)
        log.flush()
    assert [row["step_time_ms"] for row in log.rows] == [8000, 3000, 3000]
    assert [row["wall_time_ms"] for row in log.rows] == [8000, 4000, 4000]
    assert {"rank", *log.rows[0]} == set(STEP_COLUMNS)
    # Two steps of 100 tokens in 8 s; the first is not among them.
    line = "Throughput: 25 tokens/s by wall time; 25.0% of it between steps; checkpoints 40.0s more"
    assert log.throughput == line


def test_profiled_steps_and_the_profiler_are_not_in_the_throughput(log, monkeypatch):
    monkeypatch.setattr(log, "_start_profilers", lambda index: None)

    profiled = iter((False, True, False))

    def write_trace() -> bool:
        log.clock.now += 60
        return next(profiled)

    log._step_traced = write_trace
    with log:
        for index in range(3):
            take(log, index, step_s=2)
        log.flush()
    assert [row["wall_time_ms"] for row in log.rows] == [2000, 2000, 2000]
    assert log.throughput.startswith("Throughput: 50 tokens/s by wall time; 0.0% of it")


def test_a_single_step_has_no_throughput(log):
    with log:
        take(log, 0, step_s=2)
    assert log.throughput == ""
