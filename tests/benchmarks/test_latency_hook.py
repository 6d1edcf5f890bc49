"""The comm hook that adds a latency to every bucket averages as plain DDP does, one bucket after
another, and a failure in its thread ends the backward pass (latency_worker.py, real gloo ranks)."""

from __future__ import annotations

import json
from itertools import chain
from pathlib import Path

import latency_worker
import numpy as np
import pytest
import torch
from latency_worker import ARMS, LATENCY_MS, STEPS

from common.benchmarks.buckets.latency_hook import LatencyHook, added_latency, latency_note
from common.errors import UserError

CPU = torch.device("cpu")


def results(rank_server, folder, mode: str, ranks: int) -> list[dict]:
    """Runs the worker in this mode; reads what ranks wrote, of those that did."""
    done = rank_server.run(Path(latency_worker.__file__), mode, folder, ranks=ranks)
    assert done.exit_codes == [0] * ranks, "\n".join(done.stderr)
    return [json.loads(path.read_text()) for path in sorted(folder.glob("rank*.json"))]


@pytest.fixture(scope="module")
def compared(rank_server, tmp_path_factory) -> list[dict]:
    """Compares plain DDP with DDP under the hook, on each rank and in each arm."""
    return results(rank_server, tmp_path_factory.mktemp("compare"), "compare", ranks=2)


@pytest.mark.two_ranks
@pytest.mark.parametrize("arm", ARMS)
def test_gradients_are_those_of_plain_ddp_in_every_step(compared, arm):
    for rank in compared:
        plain, delayed = (run["gradients"] for run in rank[arm])
        assert len(plain) == len(delayed) == STEPS
        for left, right in zip(chain(*plain), chain(*delayed), strict=True):
            np.testing.assert_allclose(left, right, rtol=1e-6)


@pytest.mark.two_ranks
@pytest.mark.parametrize("arm", ARMS)
def test_both_ranks_end_with_the_same_gradients(compared, arm):
    first, second = (rank[arm][1]["gradients"] for rank in compared)
    assert first == second


@pytest.mark.two_ranks
@pytest.mark.parametrize("arm", ARMS)
def test_every_bucket_costs_at_least_the_latency_as_they_are_served_one_after_another(
    compared, arm
):
    """Only a lower bound: a sleep is never shorter, and a shared machine may be slow."""
    for rank in compared:
        delayed = rank[arm][1]
        assert delayed["buckets"][-1] > 3  # several could run at once, were there no order
        assert delayed["backward_s"][-1] >= delayed["buckets"][-1] * LATENCY_MS / 1e3


@pytest.mark.two_ranks
def test_a_rank_that_is_gone_ends_the_backward_pass_of_the_other(rank_server, tmp_path):
    (survivor,) = results(rank_server, tmp_path, "peer_dies", ranks=2)
    assert survivor["step"] == 2
    assert "closed by peer" in survivor["error"] or "reset by peer" in survivor["error"]


def test_an_error_in_the_thread_ends_the_backward_pass(rank_server, tmp_path):
    (result,) = results(rank_server, tmp_path, "breaks", ranks=1)
    assert result["step"] == 0
    assert "ZeroDivisionError: division by zero" in result["error"]


def test_without_a_latency_there_is_no_hook_at_all():
    with added_latency(0.0, CPU) as hook:  # there is no process group to make one in
        assert hook is None
    assert latency_note(0.0) == ""


@pytest.mark.parametrize(("added_ms", "said"), [(5.0, "5 ms"), (0.25, "0.25 ms")])
def test_captions_say_how_much_was_added_and_how(added_ms, said):
    assert latency_note(added_ms) == f"{said} added to each bucket by a comm hook"


def test_a_latency_on_a_gpu_is_refused():
    with pytest.raises(UserError, match="added_latency_ms on cuda"):
        LatencyHook(5.0, torch.device("cuda"))
