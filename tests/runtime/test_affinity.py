"""A rank kept to a core: the kernel's word for where threads may run."""

from __future__ import annotations

import os
import threading

import pytest

from common.runtime.affinity import own_core

pytestmark = pytest.mark.skipif(
    not hasattr(os, "sched_getaffinity"), reason="this system has no affinity"
)


def test_ranks_take_turns_over_the_cores_and_threads_stay_with_their_rank():
    cores = sorted(os.sched_getaffinity(0))
    for rank in range(2 * len(cores) + 1):
        found = []
        with own_core(rank):
            found.append(os.sched_getaffinity(0))
            thread = threading.Thread(target=lambda: found.append(os.sched_getaffinity(0)))
            thread.start()
            thread.join()
        assert found == [{cores[rank % len(cores)]}] * 2
        assert os.sched_getaffinity(0) == set(cores)


def test_all_cores_are_back_after_an_error():
    before = os.sched_getaffinity(0)
    with pytest.raises(ZeroDivisionError), own_core(0):
        1 / 0  # noqa: B018
    assert os.sched_getaffinity(0) == before
