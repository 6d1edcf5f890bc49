"""A pass without DDP finds the heap in the state in which DDP leaves it."""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys

import pytest

PAGE_FAULTS = """
import json, resource
from common.benchmarks.steps import StepSettings, make_step
from common.runtime.group.process_group import process_group

with process_group("cpu", None) as worker:
    step = make_step(StepSettings("gpt2-nano", 4, 64), worker)
    counted = []
    for _ in range(12):
        before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        step.zero_grad()
        step.forward().backward()
        counted.append(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
print(json.dumps(min(counted[2:])))
"""


def page_faults(**variables: str) -> int:
    """Returns a pass's page faults in a process of its own, the fewest of ten.

    A busy machine adds some to a pass; memory that was given back costs them in every pass.
    """
    done = subprocess.run(
        [sys.executable, "-c", PAGE_FAULTS],
        capture_output=True,
        text=True,
        check=True,
        env=os.environ | {"OMP_NUM_THREADS": "1"} | variables,
    )
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="what glibc does is tested")
def test_gradients_that_are_dropped_are_not_given_back_to_the_kernel() -> None:
    pages_of_gradients = 4 * 6_901_760 / 4096
    assert page_faults() < 0.05 * pages_of_gradients
    # A glibc that is told its threshold (128 KiB, the first one) learns nothing from what is freed.
    assert page_faults(MALLOC_MMAP_THRESHOLD_="131072") > 0.3 * pages_of_gradients
