"""A step of unequal micro-batches is the step of the whole batch, out of memory or not."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.two_ranks
PLANS = ("equal", "unequal", "sorted")
only_linux = pytest.mark.skipif(
    sys.platform != "linux", reason="only Linux can limit a process's memory"
)


@pytest.fixture(scope="module")
def found(rank_server) -> dict[str, list[dict]]:
    """Returns what both ranks found, by case."""
    worker = Path(__file__).with_name("micro_batch_worker.py")
    done = rank_server.succeed(worker, ranks=2)
    return {one["case"]: [one, other] for one, other in zip(*map(done.lines, (0, 1)), strict=True)}


@pytest.mark.parametrize("mean", ["samples", "tokens"])
@pytest.mark.parametrize("plan", PLANS)
def test_loss_and_gradient_are_those_of_the_whole_batch(found, plan, mean):
    for rank in found[f"{plan} {mean}"]:
        # In float64, against one model that sees all texts: the scaling is right for this mean.
        assert rank["loss"] < 1e-12
        assert rank["gradient"] < 1e-10
        assert rank["halvings"] == 0


def test_gradients_that_are_nan_by_themselves_are_no_lack_of_memory(found):
    for rank in found["nan"]:
        # The step is not repeated, and what was computed is what the optimizer gets.
        assert rank["halvings"] == 0
        assert rank["is_nan"]


@only_linux
def test_a_rank_without_memory_makes_all_repeat_the_step_in_parts(found):
    one, other = found["out of memory"]
    assert one["halvings"] == other["halvings"] >= 1
    # Nothing of the attempts that failed is left in the gradient.
    assert max(one["gradient"], other["gradient"]) < 1e-4
    # And the ranks are still in step, with a DDP that exchanges what it should.
    assert len(found["step after it"]) == 2


@only_linux
def test_a_single_text_that_does_not_fit_ends_all_ranks_with_one_line(found):
    for rank in found["hopeless"]:
        assert rank["error"].startswith("rank 1 has no memory for a single text of 512 tokens")
