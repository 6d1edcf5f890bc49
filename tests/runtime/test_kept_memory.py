"""Memory that is freed stays with the process while it is kept."""

from __future__ import annotations

import platform
import subprocess
import sys

import pytest

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


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="mallopt is glibc's")
def test_kept_memory_is_mapped_when_it_is_used_again():
    # In a process of its own: the heap of this one has gaps that other tests have left.
    done = subprocess.run([sys.executable, "-c", FAULTS], capture_output=True, text=True)
    before, kept, after = map(int, done.stdout.split())
    assert before > 10  # 16 if pages are huge ones, else 8,192
    assert kept <= 5
    assert after == pytest.approx(before, rel=0.1)
