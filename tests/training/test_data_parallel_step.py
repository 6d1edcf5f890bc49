"""The step of the scaling study: the training of a twin without DDP, and parts that add up."""

from __future__ import annotations

from pathlib import Path

import pytest
from data_parallel_worker import CASES
from refusals import problem

from common.training.scaling.data_parallel_step import StepOptions

ROUNDED = {"fp16": 2e-3, "bf16": 2e-2}
"""What gradients of 11 and 8 bits leave of the weights' difference after four steps."""


@pytest.fixture(scope="module")
def found(rank_server) -> dict[str, list[dict]]:
    """Returns what both ranks found, by case."""
    worker = Path(__file__).with_name("data_parallel_worker.py")
    done = rank_server.succeed(worker, ranks=2)
    return {one["case"]: [one, other] for one, other in zip(*map(done.lines, (0, 1)), strict=True)}


@pytest.mark.two_ranks
@pytest.mark.parametrize("kind", ["timed", "plain"])
@pytest.mark.parametrize("case", CASES)
def test_it_trains_as_one_process_with_both_ranks_samples(found, case, kind):
    for rank in found[f"{case}, {kind}"]:
        # float64: watching buckets, accumulating and clipping change nothing but rounding.
        assert rank["weights"] < ROUNDED.get(case, 1e-12)
        assert rank["loss"] < ROUNDED.get(case, 1e-12)
        if case in ROUNDED:
            assert rank["weights"] > 1e-9  # it was compressed indeed


@pytest.mark.two_ranks
@pytest.mark.parametrize("case", CASES)
def test_parts_add_up_and_bytes_are_counted(found, case):
    for rank in found[f"{case}, timed"]:
        # Every moment of a step belongs to a part, but for a few calls between them; the best of
        # the steps, as steps this short may be interrupted anywhere.
        assert 0.85 < rank["parts_shares"][-1] <= 1 + 1e-9
        assert rank["least_part"] >= 0
        assert rank["done_after_ready"]
        # Gradients go once per update, whatever the number of micro-batches; in 16 bits a quarter
        # of float64's bytes.
        narrow = 4 if case in ROUNDED else 1
        assert rank["exchanged_bytes"] == rank["gradient_bytes"] / narrow
        assert rank["bucket_bytes"] == [size / narrow for size in rank["expected_buckets"]]


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"accumulation": 0}, "at least 1"),
        ({"compression": "fp8"}, "fp16"),
        ({"precision": "half"}, "float16"),
        ({"bucket_cap_mb": 0}, "above 0"),
    ],
)
def test_options_that_cannot_be_are_refused(wrong, said):
    assert said in problem(StepOptions, **wrong)
