"""Gradient-ready times by CUDA events against the kernels that torch.profiler sees."""

from __future__ import annotations

import functools
from pathlib import Path

import numpy as np
import pytest
import torch
from ddplab_watch.marks import CudaClock
from torch import Tensor
from torch.profiler import ProfilerActivity, profile, record_function

from common.perfmodel.one_device.workload import Workload
from common.runtime.group.gradient_marks import ready_marks, ready_seconds
from common.traces.profiler_trace import read_trace
from common.training.step import build_model

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


def test_a_gradient_is_ready_when_its_last_kernel_ends(tmp_path: Path) -> None:
    device = torch.device("cuda", 0)
    clock = CudaClock(device)
    model = build_model(Workload(), device)
    tokens = torch.randint(50257, (8, 1024), device=device)
    ready_s: dict[str, float] = {}

    def note(name: str, _: Tensor) -> None:
        with record_function(f"ready {name}"):
            pass

    def backward() -> None:
        model.zero_grad()
        loss = model(tokens, tokens)
        clock.wait()
        clock.hold(0.05)  # the profiler slows the host down; the device has to wait for nothing
        start = clock.mark()
        loss.backward()
        clock.wait()
        ready_s.update(ready_seconds(marks, start, clock))

    with ready_marks(model, clock) as marks:
        for name, parameter in model.named_parameters():  # called after the marks' own hooks
            parameter.register_post_accumulate_grad_hook(functools.partial(note, name))
        backward()
        with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiler:
            backward()
    profiler.export_chrome_trace(str(tmp_path / "trace.json"))
    events = read_trace(tmp_path / "trace.json")

    launched = {event.correlation: event.start_us for event in events if event.kind == "launch"}
    kernels = [
        (launched[event.correlation], event.end_us)
        for event in events
        if event.kind == "kernel" and event.correlation in launched
    ]
    hooks = {
        event.name.removeprefix("ready "): event.start_us
        for event in events
        if event.kind == "range" and event.name.startswith("ready ")
    }
    assert set(hooks) == set(ready_s)
    names = sorted(ready_s, key=ready_s.get)
    by_profiler = np.array(
        [max(end for launch, end in kernels if launch < hooks[name]) for name in names]
    )
    by_events = np.array([ready_s[name] * 1e6 for name in names])
    apart = (by_events - by_events[0]) - (by_profiler - by_profiler[0])
    print(f"largest difference {abs(apart).max():.1f} µs of {by_events[-1]:.0f}")
    assert abs(apart).max() < 0.01 * by_events[-1]
