"""What one rank holds, against real DDP and ``fully_shard`` on two ranks and ZeRO's own figures."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from common.errors import UserError
from common.perfmodel.one_device.memory import predict_memory
from common.perfmodel.one_device.sharding import STRATEGIES, Sharding, whole_tensors
from common.perfmodel.one_device.workload import Workload

WORKLOAD = Workload("gpt2-nano", 2, 128, optimizer_implementation="fused")  # the worker's
QUICK = ("float32:DDP:gpt2-pico", "float32:FULL_SHARD:gpt2-pico")
OTHERS = (
    *("float32:ZERO1:gpt2-nano", "float32:SHARD_GRAD_OP:gpt2-nano"),
    "bfloat16:FULL_SHARD:gpt2-nano",
)


@pytest.fixture(scope="module")
def seen(rank_server, request) -> dict[str, dict]:
    """Returns what rank 0 of 2 held, by case, in those that were chosen."""
    worker = Path(__file__).with_name("sharding_worker.py")
    items = [item for item in request.session.items if item.path == request.path]
    tests = [item for item in items if "seen" in item.fixturenames]
    cases = [test.callspec.params["case"] for test in tests]
    done = rank_server.run(worker, *cases, ranks=2, timeout_s=300)
    assert done.exit_codes == [0, 0], "\n".join(done.stderr)
    return {line["case"]: line for line in done.lines()}


@pytest.mark.two_ranks
@pytest.mark.timeout(320)  # bfloat16 takes minutes on processors without instructions for it
@pytest.mark.parametrize(
    "case", [*QUICK, *(pytest.param(case, marks=pytest.mark.slow) for case in OTHERS)]
)
def test_a_rank_holds_what_is_predicted(seen, case):
    precision, strategy, model = case.split(":")
    workload = replace(WORKLOAD, precision=precision, model=model)
    prediction = predict_memory(workload, Sharding(strategy, 2))
    update, found = prediction.at("update").components, seen[case]
    assert update["parameters"] == found["parameters"]
    assert update["gradients"] == found["gradients"]
    assert update["optimizer states"] == found["states"]
    # The peak is that of the loss, where activations and gathered parameters are there at once.
    assert prediction.peak_bytes == pytest.approx(found["peak"], rel=0.02)


def test_states_are_divided_as_zero_says():
    # Rajbhandari et al. 2019, in float32: 16 bytes a parameter, of which stage 2 divides 12 and
    # (as fully_shard does) the rank's own parameters, and stage 3 all.
    config = Workload("gpt2-xl").config
    for ranks in (1, 8, 64):
        for strategy in ("SHARD_GRAD_OP", "FULL_SHARD"):
            update = predict_memory(Workload("gpt2-xl"), Sharding(strategy, ranks)).at("update")
            expected = 16 * config.num_parameters() / ranks
            assert update.state_bytes == pytest.approx(expected, rel=1e-6)


def test_sharding_saves_more_the_more_ranks_and_ddp_never_does():
    peaks = {
        strategy: [
            predict_memory(WORKLOAD, Sharding(strategy, ranks)).peak_bytes for ranks in (2, 4, 8)
        ]
        for strategy in STRATEGIES[1:]
    }
    assert len(set(peaks["DDP"])) == 1
    assert peaks["DDP"][0] > peaks["ZERO1"][0] > peaks["ZERO1"][1]
    for strategy in ("SHARD_GRAD_OP", "FULL_SHARD"):
        assert peaks[strategy] == sorted(peaks[strategy], reverse=True)
        assert peaks[strategy][0] < peaks["DDP"][0]
    assert all(a >= b for a, b in zip(peaks["SHARD_GRAD_OP"], peaks["FULL_SHARD"], strict=True))


@pytest.mark.parametrize(
    ("ranks", "shares"),
    [(1, [30]), (2, [18, 12]), (3, [9, 13, 8]), (7, [9, 1, 5, 5, 2, 7, 1])],
)
def test_each_tensor_goes_to_the_rank_that_has_least(ranks, shares):
    assert whole_tensors([9, 1, 5, 5, 2, 7, 1], ranks) == shares


def test_ranks_beyond_the_number_of_tensors_hold_nothing():
    assert sorted(whole_tensors([9, 1], 50))[-2:] == [1, 9]
    assert sum(whole_tensors([9, 1], 50)) == 10


def test_a_billion_ranks_take_no_longer_than_as_many_as_tensors():
    for ranks in (10**6, 10**9):
        update = predict_memory(WORKLOAD, Sharding("ZERO1", ranks)).at("update")
        assert update.components["optimizer states"] >= 8 * 8192 * 256  # the token embedding's


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("FSDP", 2), "sharding 'FSDP'"),
        (("DDP", 0), "at least 1"),
        (("none", 2), "without --sharding"),
    ],
)
def test_bad_input_gets_one_line(arguments, message):
    with pytest.raises(UserError, match=message):
        Sharding(*arguments)
