"""What one rank holds, against real DDP and ``fully_shard`` on two ranks and ZeRO's own figures."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from common.errors import UserError
from common.perfmodel.one_device.memory import predict_memory
from common.perfmodel.one_device.sharding import STRATEGIES, Sharding, whole_tensors
from common.perfmodel.one_device.workload import Workload

WORKLOAD = Workload("gpt2-nano", 2, 128, optimizer_implementation="fused")  # the worker's
QUICK = ("float32:DDP", "float32:FULL_SHARD")
OTHERS = (
    *("float32:ZERO1", "float32:SHARD_GRAD_OP"),
    # Half a minute on processors without instructions for bfloat16.
    *("bfloat16:SHARD_GRAD_OP", "bfloat16:FULL_SHARD"),
)


@pytest.fixture(scope="module")
def seen(rank_server, slow_chosen) -> dict[str, dict]:
    """Returns what rank 0 of 2 held, by precision and strategy."""
    worker = Path(__file__).with_name("sharding_worker.py")
    cases = (*QUICK, *OTHERS) if slow_chosen else QUICK
    done = rank_server.run(worker, *cases, ranks=2, timeout_s=100)
    assert done.exit_codes == [0, 0], "\n".join(done.stderr)
    lines = [json.loads(line) for line in done.stdout[0].splitlines() if line.startswith("{")]
    return {f"{line['precision']}:{line['strategy']}": line for line in lines}


@pytest.mark.two_ranks
@pytest.mark.parametrize(
    "case", [*QUICK, *(pytest.param(case, marks=pytest.mark.slow) for case in OTHERS)]
)
def test_a_rank_holds_what_is_predicted(seen, case):
    precision, strategy = case.split(":")
    prediction = predict_memory(replace(WORKLOAD, precision=precision), Sharding(strategy, 2))
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


@pytest.mark.parametrize("ranks", [1, 2, 3, 7, 50])
def test_each_tensor_goes_to_the_rank_that_has_least(ranks):
    sizes, held = [9, 1, 5, 5, 2, 7, 1], [0] * ranks
    for size in sizes:
        held[held.index(min(held))] += size
    shares = whole_tensors(sizes, ranks)
    assert shares + [0] * (ranks - len(shares)) == held


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
