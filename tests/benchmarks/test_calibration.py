"""Watched passes without DDP: in which order a pass is run, and what is told of it."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import nn

from common.benchmarks.buckets import calibration
from common.benchmarks.buckets.calibration import PASS_COLUMNS, forward_passes, passes_without_ddp
from common.benchmarks.steps import FixedBatchStep, module_step
from common.runtime.group.process_group import Worker
from common.runtime.processes.ranks import Ranks

ALONE = Worker(Ranks(), torch.device("cpu"), "gloo")


class NotedClock:
    """A clock whose marks count up by a second; notes what is asked of it."""

    def __init__(self, calls: list[str]) -> None:
        self.calls, self.now_s = calls, 0

    def mark(self, again: float | None = None) -> float:
        self.calls.append("mark")
        self.now_s += 1
        return self.now_s

    def hold(self, duration_s: float) -> None:
        self.calls.append("hold")

    def wait(self) -> None:
        self.calls.append("wait")

    def elapsed_s(self, start: float, end: float) -> float:
        return end - start


@pytest.fixture
def calls(monkeypatch) -> list[str]:
    calls: list[str] = []
    monkeypatch.setattr(calibration, "clock_for", lambda _: NotedClock(calls))
    monkeypatch.setattr(dist, "barrier", lambda *_: calls.append("barrier"))
    return calls


@pytest.fixture
def step(calls) -> FixedBatchStep:
    def loss_of(model: nn.Module) -> torch.Tensor:
        calls.append("forward")
        return model(torch.ones(1, 2)).sum()

    return module_step(nn.Linear(2, 1), loss_of, ALONE)


GRADIENTS = ["mark", "mark"]  # of a weight and a bias


@pytest.mark.parametrize(
    ("before", "order"),
    [
        (
            "forward",
            [
                *("barrier", "wait", "mark", "forward", "mark", "hold"),
                *("mark", *GRADIENTS, "mark", "wait"),
            ],
        ),
        (
            "backward",
            [
                *("mark", "forward", "mark", "wait", "barrier", "hold"),
                *("mark", *GRADIENTS, "mark", "wait"),
            ],
        ),
    ],
)
def test_ranks_begin_together_the_pass_that_was_asked_for(calls, step, before, order):
    watched = passes_without_ddp(step, warmup=1, passes=2, barrier_before=before)
    found = list(watched)
    assert calls == order * 3
    assert [iteration for iteration, _ in found] == [-1, 0, 1]


def test_a_watched_pass_tells_its_two_times_and_when_each_gradient_was_ready(step):
    watched = passes_without_ddp(step, warmup=0, passes=1, barrier_before="backward")
    ((_, one),) = watched
    assert (one.forward_s, one.backward_s) == (1, 3)
    assert sorted(one.ready_s) == ["bias", "weight"]
    assert sorted(one.ready_s.values()) == [1, 2]
    row = one.row(7, optimizer_s=0.5)
    assert set(row) == set(PASS_COLUMNS) - {"rank"}
    assert (row["iteration"], row["backward_time_ms"], row["optimizer_time_ms"]) == (7, 3e3, 500)


def test_no_hook_is_left_on_a_model_whose_passes_were_watched(calls, step):
    list(passes_without_ddp(step, warmup=0, passes=1, barrier_before="forward"))
    calls.clear()
    step.forward().backward()
    assert calls == ["forward"]


def test_forward_passes_under_ddp_leave_warm_up_out(calls, step):
    found = list(forward_passes(step.model, step, warmup=2, passes=3))
    assert calls == ["barrier", "mark", "forward", "mark", "wait"] * 5
    assert found == [(0, 1), (1, 1), (2, 1)]
