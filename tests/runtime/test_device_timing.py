"""The order of operations by which work on a GPU is timed, with torch.cuda's functions recorded."""

from __future__ import annotations

from contextlib import nullcontext

import pytest
import torch
import torch.distributed as dist
from ddplab_watch.host_waits import HostWaits
from ddplab_watch.marks import CudaClock, HostClock
from torch import nn

from common.runtime.group import collective_timing
from common.runtime.group.collective_timing import (
    ALL_REDUCE_COLUMNS,
    TimedCalls,
    time_all_reduces,
    time_in_flight,
    time_sequence,
)
from common.runtime.group.gradient_marks import hold_for_marks, ready_marks
from common.runtime.group.process_group import Worker
from common.runtime.processes.ranks import current_ranks

GPU = torch.device("cuda", 0)
FASTEST_GPU_HZ = 2.6e9  # the boost clock of a GeForce RTX 4080 Super is 2.55 GHz


class RecordedCuda:
    """Stands in for torch.cuda and torch.distributed: notes what is called, in order."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.calls: list[str] = []
        self.slept: list[int] = []
        self.events = 0
        recorder = self

        class Event:
            def __init__(self, enable_timing: bool) -> None:
                assert enable_timing
                recorder.events += 1

            def record(self, stream: object) -> None:
                assert stream == GPU
                recorder.calls.append("mark")
                self.at_ms = len(recorder.calls)

            def elapsed_time(self, end: Event) -> float:
                return end.at_ms - self.at_ms

        class Work:
            def wait(self) -> None:
                recorder.calls.append("wait for work")

        def sleep(cycles: int) -> None:
            self.calls.append("hold")
            self.slept.append(cycles)

        def all_reduce(tensor: torch.Tensor, group=None, async_op: bool = False):
            self.calls.append(f"all-reduce {tensor.numel()}")
            return Work() if async_op else None

        patch.setattr(torch.cuda, "Event", Event)
        patch.setattr(torch.cuda, "_sleep", sleep)
        patch.setattr(torch.cuda, "device", nullcontext)
        patch.setattr(torch.cuda, "current_stream", lambda device: device)
        patch.setattr(torch.cuda, "synchronize", lambda *_: self.calls.append("synchronize"))
        patch.setattr(dist, "all_reduce", all_reduce)
        patch.setattr(dist, "barrier", lambda *_, **__: self.calls.append("barrier"))
        patch.setattr(collective_timing, "clock_for", lambda _: CudaClock(GPU))


@pytest.fixture
def cuda(monkeypatch):
    return RecordedCuda(monkeypatch)


def gpu_rank(backend: str = "nccl") -> Worker:
    """Makes a rank whose tensors are on the CPU, as there is no GPU; its clock is the GPU's."""
    return Worker(current_ranks({}), torch.device("cpu", 0), backend)


def test_the_device_is_held_back_before_the_first_mark_until_all_is_launched(cuda):
    times_s = time_sequence([torch.zeros(7)] * 3, gpu_rank())
    assert cuda.calls == [
        *("synchronize", "barrier"),
        *("hold", "all-reduce 1"),  # in which ranks whose clocks differ find together
        *("mark", "all-reduce 7", "mark", "all-reduce 7", "mark", "all-reduce 7", "mark"),
        "synchronize",
    ]
    assert len(times_s) == 3


def test_messages_in_flight_are_all_launched_while_the_device_is_held_back(cuda):
    time_in_flight([torch.zeros(7)] * 2, gpu_rank())
    assert cuda.calls == [
        *("synchronize", "barrier", "hold", "all-reduce 1"),
        *("mark", "all-reduce 7", "all-reduce 7", "wait for work", "wait for work", "mark"),
        "synchronize",
    ]


@pytest.mark.parametrize("timing", [time_sequence, time_in_flight])
@pytest.mark.parametrize(
    ("backend", "flags"),
    [("nccl", {"launch_included": True}), ("gloo", {})],  # gloo makes the host wait: never ahead
)
def test_an_idle_device_is_marked_at_once(cuda, timing, backend, flags):
    timing([torch.zeros(7)] * 2, gpu_rank(backend), **flags)
    before = cuda.calls[: cuda.calls.index("mark")]
    assert "hold" not in before
    assert "all-reduce 1" not in before
    assert "barrier" in before


def test_samples_of_a_size_leave_warm_up_out_and_divide_a_batch_by_its_calls(cuda):
    rows = time_all_reduces(
        7, torch.float16, gpu_rank("gloo"), 4, TimedCalls(alone=2, warmup=3, in_flight=5, batches=1)
    )
    assert cuda.calls.count("all-reduce 7") == (3 + 2) + 5 * (1 + 1)
    assert all(set(row) == set(ALL_REDUCE_COLUMNS) - {"rank"} for row in rows)
    assert {(row["total_bytes"], row["round"]) for row in rows} == {(14, 4)}
    # Each recorded call takes 1 ms: two between marks one by one; five and their waits in a batch.
    assert [(row["mode"], row["in_flight"], row["iteration"]) for row in rows] == [
        *(("sequential", 1, 0), ("sequential", 1, 1), ("in_flight", 5, 0))
    ]
    assert [row["time_ms"] for row in rows] == pytest.approx([2, 2, 11 / 5])


def test_nothing_is_put_in_flight_unless_batches_are_asked_for(cuda):
    rows = time_all_reduces(7, torch.float32, gpu_rank(), 0, TimedCalls(3, in_flight=4))
    assert cuda.calls.count("all-reduce 7") == 1 + 3
    assert "wait for work" not in cuda.calls
    assert [row["mode"] for row in rows] == ["sequential"] * 3


@pytest.mark.parametrize("duration_s", [1e-4, 5e-3])
def test_the_stream_is_held_for_as_long_as_was_asked_on_the_fastest_gpu(cuda, duration_s):
    CudaClock(GPU).hold(duration_s)
    assert cuda.slept[0] >= duration_s * FASTEST_GPU_HZ


def test_a_stream_is_never_held_for_long(cuda):
    CudaClock(GPU).hold(3600)
    assert cuda.slept[0] / 1e9 < 0.5  # seconds of a GPU of 1 GHz


def test_a_wait_is_that_of_whoever_uses_the_clock(cuda, monkeypatch):
    # The watch counts where a script waits; its clock is also that of this project's benchmarks.
    monkeypatch.setattr(torch.cuda, "get_sync_debug_mode", lambda: 0)
    monkeypatch.setattr(torch.cuda, "set_sync_debug_mode", lambda mode: None)
    waits = HostWaits(lambda: "backward", lambda frame: (frame.f_code.co_name, ""))
    waits.install()
    CudaClock(GPU).wait()
    waits.remove()
    here = test_a_wait_is_that_of_whoever_uses_the_clock.__name__
    assert list(waits.places) == [("backward", here, "torch.cuda.synchronize")]


def test_more_launches_hold_the_device_longer(cuda):
    for count in (1, 10, 100):
        time_sequence([torch.zeros(7)] * count, gpu_rank())
    assert cuda.slept == sorted(set(cuda.slept))


def test_there_is_nothing_to_hold_on_the_cpu(cuda):
    HostClock().hold(3600)
    assert cuda.calls == []


def test_events_of_gradients_are_made_in_the_first_pass_and_used_again(cuda):
    model = nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 1))
    clock = CudaClock(GPU)
    with ready_marks(model, clock) as marks:
        for passes in range(1, 4):
            marks.clear()
            model(torch.ones(1, 2)).sum().backward()
            assert set(marks) == {name for name, _ in model.named_parameters()}
            assert cuda.calls.count("mark") == 4 * passes
            assert cuda.events == 4
        marked_ms = [mark.at_ms for mark in marks.values()]
    assert marked_ms == [9, 10, 11, 12]  # the last pass's, in the order in which they came


def test_marking_more_gradients_gives_the_host_more_of_a_lead(cuda):
    for layers in (1, 8):
        hold_for_marks(nn.Sequential(*[nn.Linear(2, 2) for _ in range(layers)]), CudaClock(GPU))
    assert cuda.slept[1] == pytest.approx(8 * cuda.slept[0], rel=1e-3)
