"""A pass without DDP finds the heap in the state in which DDP leaves it."""

from __future__ import annotations

import os
import platform
import subprocess
import sys

import pytest

# Not forked from the server of ranks, whose heap has learned from all that it imported.
PAGE_FAULTS = """
import ctypes, os, resource
from common.benchmarks.steps import StepSettings, make_step
from common.runtime.group.process_group import process_group
from common.runtime.machine.kept_memory import MMAP_THRESHOLD

def page_faults(step):
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    step.zero_grad()
    step.forward().backward()
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

# A glibc that is told its threshold (128 KiB, the first one) learns nothing from what is freed.
for threshold in (None, 2**17):
    if not os.fork():
        if threshold:
            ctypes.CDLL(None).mallopt(MMAP_THRESHOLD, threshold)
        with process_group("cpu", None) as worker:
            step = make_step(StepSettings("gpt2-nano", 4, 64), worker)
            print(min([page_faults(step) for _ in range(8)][2:]), flush=True)
        os._exit(0)
    os.wait()
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="what glibc does is tested")
@pytest.mark.slow
def test_gradients_that_are_dropped_are_not_given_back_to_the_kernel() -> None:
    # A busy machine adds some faults to a pass; memory that was given back costs them in each.
    done = subprocess.run(
        [sys.executable, "-c", PAGE_FAULTS],
        capture_output=True,
        text=True,
        check=True,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    )
    learning, told = map(int, done.stdout.split())
    pages_of_gradients = 4 * 6_901_760 / 4096
    assert learning < 0.05 * pages_of_gradients
    assert told > 0.3 * pages_of_gradients
