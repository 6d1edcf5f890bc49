"""MY_FSDP under activation checkpointing gathers nothing that the blocks do not need again."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

WORKER = Path(__file__).with_name("recomputation_worker.py")


@pytest.mark.two_ranks
def test_a_pass_that_computes_activations_again_sends_as_much_as_one_that_keeps_them(rank_server):
    done = rank_server.succeed(WORKER, ranks=2)
    for said in done.stdout:
        counts = json.loads(said.splitlines()[-1])
        if counts["True"] is None:
            pytest.skip("the kernel does not count the bytes of a socket")
        # One block of the six, gathered once more, would be 5 % of all.
        assert counts["True"] == pytest.approx(counts["False"], rel=0.02)
