"""Memory that is freed stays with the process while it is kept, or once the heap is settled."""

from __future__ import annotations

import os
import platform
import subprocess
import sys

import pytest

pytestmark = pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="mallopt is glibc's")
FAULTS = """
import resource, sys, numpy
sys.modules["torch"] = sys  # torch takes seconds, and has no part in it
from common.runtime.machine.kept_memory import kept_memory

def page_faults():  # of filling 32 MiB that was filled and freed before
    for _ in range(2):
        before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        numpy.full(32 * 2**20, 1, numpy.uint8)
        faults = resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before
    return faults

print(page_faults())
with kept_memory() as kept:
    print(page_faults() if kept else "cannot")
print(page_faults())
"""
# Not forked from the server of ranks, whose heap has learned from all that it imported.
FAULTS_OF_A_PASS = """
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
            step = make_step(StepSettings("gpt2-nano", 1, 16), worker)
            print(min([page_faults(step) for _ in range(8)][2:]), flush=True)
        os._exit(0)
    os.wait()
"""


def numbers(script: str, **variables: str) -> list[int]:
    """Returns what a process of its own prints: this one's heap has gaps of other tests."""
    done = subprocess.run(
        [sys.executable, "-c", script],
        capture_output=True,
        text=True,
        check=True,
        env=os.environ | variables,
    )
    return list(map(int, done.stdout.split()))


def test_kept_memory_is_mapped_when_it_is_used_again():
    before, kept, after = numbers(FAULTS)
    assert before > 10  # 16 if pages are huge ones, else 8,192
    assert kept <= 5
    assert after == pytest.approx(before, rel=0.1)


@pytest.mark.slow
def test_gradients_that_are_dropped_are_not_given_back_to_the_kernel() -> None:
    # A pass without DDP finds the heap as DDP leaves it. A busy machine adds some faults to a pass;
    # memory that was given back costs them in each.
    learning, told = numbers(FAULTS_OF_A_PASS, OMP_NUM_THREADS="1")
    pages_of_gradients = 4 * 6_901_760 / 4096
    assert learning < 0.05 * pages_of_gradients
    assert told > 0.3 * pages_of_gradients
