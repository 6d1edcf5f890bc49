"""The reading of strategies, on one machine and on emulated hosts: answers are known by hand."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch
from assignment1_support import BENCHMARK, ENVIRONMENT, SETTINGS, steps, strategy_rows, write_run
from scipy import stats
from students_interval import students_interval

from common.analysis import runs
from common.analysis.data_parallel.emulated_strategies import open_emulated, prediction_accuracy
from common.analysis.data_parallel.strategies import open_strategies
from common.analysis.data_parallel.strategy_times import exchange_cost, over_fastest
from common.benchmarks.strategies import StrategyBenchmark, sharded_messages
from common.errors import UserError
from common.judged import Judged
from common.models.gpt2 import GPT2
from common.perfmodel.ddp.profile import DdpCosts
from common.perfmodel.fsdp.communication import (
    step_collectives,
    step_control_bytes,
    step_wire_bytes,
)
from common.perfmodel.one_device.architecture import GPT2Config


def made_up_strategies(folder: Path) -> None:
    """Writes one device of 100 and 110 ms and DDP of 50 and 60, in two rounds of three steps."""
    exchange = step_collectives(GPT2Config.named("gpt2-nano"), "DDP", 2, bucket_cap_mb=4.0)
    sent = step_wire_bytes(exchange, "gloo") + step_control_bytes(exchange, "gloo")
    write_run(
        folder / "compare",
        BENCHMARK,
        {"world_size": 2},
        strategy_times=strategy_rows(
            {
                "single": [[(99.0,), (100.0,), (300.0,)], [(110.0,), (110.0,), (110.0,)]],
                "DDP": [[(50.0, 1.0), (1.0, 50.0), (40.0, 50.0)], [(60.0, 1.0)] * 3],
                "FULL_SHARD": [[(80.0, 80.0)] * 3] * 2,
            },
            {"DDP": sent, "FULL_SHARD": 3 * sent},
        ),
    )


def ends_of(judged: Judged) -> list[float]:
    """Returns an estimate and the ends of its interval."""
    return [judged.estimate, judged.interval.low, judged.interval.high]


def test_medians_and_speedups_of_strategies(tmp_path: Path) -> None:
    made_up_strategies(tmp_path)
    strategies = open_strategies(tmp_path)
    table = strategies.summary().set_index("strategy")
    assert list(table.index) == ["single", "DDP", "FULL_SHARD"]
    # steps of one device: 99, 100, 300, 110, 110, 110; of DDP three of 50 and three of 60
    assert table["step_ms"].tolist() == [110.0, 55.0, 80.0]
    # by round 100 / 50 and 110 / 60; two strategies are compared with one device
    expected = students_interval(np.array([2, 110 / 60]), claims=2)
    assert ends_of(table.loc["DDP", "judged"]) == pytest.approx(expected)
    assert table.loc[["single", "DDP"], "speedup"].tolist() == pytest.approx([1, expected[0]])
    assert table["verdict"].isna().tolist() == [True, False, False]
    assert set(table["verdict"].dropna()) == {"not settled: 4 more rounds"}
    assert strategies.speedups[1, "DDP"].reason == "4 more rounds"
    assert "26 MiB of gradients, 2 ranks, TCP over loopback" in strategies.speedups[1, "DDP"].scope
    # two ranks of a micro-batch of 4 sequences of 64 tokens, whoever computes them
    assert table.loc["single", "tokens_per_s"] == pytest.approx(2 * 4 * 64 / 0.110)


def test_bytes_sent_are_compared_with_those_of_the_collectives(tmp_path: Path) -> None:
    made_up_strategies(tmp_path)
    table = open_strategies(tmp_path).sent().set_index("strategy")
    assert list(table.index) == ["DDP", "FULL_SHARD"]
    assert table.loc["DDP", "error"] == 0
    # measured counts where it is known
    assert table.loc["FULL_SHARD", "ratio_to_ddp"] == 3
    # DDP over two ranks sends its gradients once, and a header of 144 bytes for each piece
    payload = 4 * 6_901_760
    assert 0 < table.loc["DDP", "predicted_bytes"] - payload < 1e5


def test_what_sockets_tell_of_nccl_is_not_taken_for_its_bytes(tmp_path: Path) -> None:
    made_up_strategies(tmp_path)
    record = tmp_path / "compare" / "environment.json"
    record.write_text(json.dumps(ENVIRONMENT | {"world_size": 2, "backend": "nccl"}))
    strategies = open_strategies(tmp_path)
    table = strategies.sent().set_index("strategy")
    assert table["measured_bytes"].isna().all()
    # (blocks twice, all once) over NCCL; by less than a half more, as the root comes once only
    assert 1 < table.loc["FULL_SHARD", "ratio_to_ddp"] < 1.5


def test_without_a_comparison_in_turns_the_training_runs_steps_are_taken(tmp_path: Path) -> None:
    for name, ranks, times in (("single", 1, [[50.0]] * 4), ("DDP", 2, [[20.0, 25.0]] * 4)):
        settings = SETTINGS | {"strategy": name}
        environment = {"world_size": ranks}
        write_run(tmp_path / name, settings, environment, training_steps=steps(times))
    strategies = open_strategies(tmp_path)
    table = strategies.summary().set_index("strategy")
    assert table.loc["DDP", "speedup"] == 2.0
    # 16 sequences a step, which 2 ranks take in 2 micro-batches of 4 each
    assert table.loc["DDP", "accumulation"] == 2
    assert np.isnan(table.loc["DDP", "judged"].interval.low)
    assert table.loc["DDP", "verdict"] == "not settled: 5 more rounds"
    assert "one run after another" in strategies.origin


def test_the_exchange_costs_what_a_step_takes_longer_than_without_communication(
    tmp_path: Path,
) -> None:
    # the slower rank's steps by round; the machine is slower in every other round
    local_ms, ddp_ms = [40, 80, 42, 80, 40, 82], [50, 98, 51, 104, 49, 101]
    few_ms, same_ms = [80, 90, 80, 90, 80, 90], [84, 86, 85, 88, 83, 88]
    rows = []
    for accumulation, times in ((1, (local_ms, ddp_ms)), (2, (few_ms, same_ms))):
        arms = dict(zip(("local", "DDP"), times, strict=True))
        rounds = {name: [[(ms, 30.0)] * 3 for ms in by_round] for name, by_round in arms.items()}
        rows += strategy_rows(rounds, {}, accumulation=accumulation)
    write_run(tmp_path / "compare", BENCHMARK, {"world_size": 2}, strategy_times=rows)
    table = exchange_cost(open_strategies(tmp_path)).set_index("accumulation")
    for accumulation, (local, ddp) in enumerate(((local_ms, ddp_ms), (few_ms, same_ms)), 1):
        expected = students_interval(np.divide(ddp, local), claims=2)
        assert ends_of(table.loc[accumulation, "judged"]) == pytest.approx(expected)
        assert table.loc[accumulation, "added_share"] == pytest.approx(expected[0] - 1)
    assert table["above_noise"].tolist() == ["settled", "hidden by noise"]
    assert table.loc[1, "local_ms"] == 61  # of 18 steps, six of 40, three of 42, 80 and so on
    assert table.loc[1, "added_ms"] == pytest.approx(61 * table.loc[1, "added_share"])
    fewer = {
        "share_falls": np.divide(ddp_ms, local_ms) - np.divide(same_ms, few_ms),
        "ms_fall": np.subtract(ddp_ms, local_ms) - np.subtract(same_ms, few_ms),
    }
    for column, expected in fewer.items():
        assert table.loc[1, column] is None
        interval = table.loc[2, column].interval
        ends = stats.ttest_1samp(expected, 0).confidence_interval()
        assert [interval.low, interval.high] == pytest.approx([ends.low, ends.high])
    assert not any(table["second_gap"])  # no step of one device


def test_a_speedup_is_lost_to_slower_passes_and_to_the_exchange(tmp_path: Path) -> None:
    single, local, ddp = [100, 104, 98, 101], [60, 62, 59, 61], [90, 95, 89, 93]
    write_rounds(tmp_path / "run", {"single": single, "local": local, "DDP": ddp})
    [row] = exchange_cost(open_strategies(tmp_path / "run")).itertuples()
    kept, left = np.divide(single, local), np.divide(single, ddp)
    ends = stats.ttest_1samp((kept - left) - (2 - kept), 0).confidence_interval()
    gap = row.second_gap.interval
    assert [gap.low, gap.high] == pytest.approx([ends.low, ends.high])


def test_without_steps_that_do_not_communicate_the_exchange_has_no_row(tmp_path: Path) -> None:
    made_up_strategies(tmp_path)
    assert exchange_cost(open_strategies(tmp_path)).empty


def write_rounds(folder: Path, times_ms: dict[str, list[float]]) -> None:
    """Writes strategies of two equal ranks, a time for each round."""
    rounds = {name: [[(ms, ms)] * 3 for ms in by_round] for name, by_round in times_ms.items()}
    rows = strategy_rows(rounds, {})
    write_run(folder / "compare", BENCHMARK, {"world_size": 2}, strategy_times=rows)


def test_strategies_are_compared_with_the_fastest_one(tmp_path: Path) -> None:
    ddp_ms, shard_ms = [50, 51, 52, 50, 51, 50], [60, 61, 62, 60.5, 61, 60]
    full_ms = [80, 79, 81, 80, 80, 79]
    times = {"single": [50] * 6, "DDP": ddp_ms, "SHARD_GRAD_OP": shard_ms, "FULL_SHARD": full_ms}
    write_rounds(tmp_path, times)
    table = over_fastest(open_strategies(tmp_path)).set_index("strategy")
    # one device exchanges nothing
    assert list(table.index) == ["DDP", "FULL_SHARD", "SHARD_GRAD_OP"]
    # any of three pairs could have been a row
    expected = students_interval(np.divide(full_ms, ddp_ms), claims=3)
    assert ends_of(table.loc["FULL_SHARD", "judged"]) == pytest.approx(expected)
    assert table.loc["FULL_SHARD", "over_fastest"] == pytest.approx(expected[0] - 1)
    assert table["fastest"].tolist() == ["yes", "no", "no"]
    assert table["above_noise"].fillna("").tolist() == ["", "settled", "settled"]


def test_strategies_that_are_not_told_from_the_fastest_are_tied_with_it(tmp_path: Path) -> None:
    times = {"DDP": [50, 51, 52, 50, 51, 50], "SHARD_GRAD_OP": [51, 50, 54, 49, 50, 52]}
    times |= {"FULL_SHARD": [80, 79, 81, 80, 80, 79]}
    write_rounds(tmp_path / "six", times)
    table = over_fastest(open_strategies(tmp_path / "six")).set_index("strategy")
    assert table["fastest"].to_dict() == {
        "DDP": "tied",
        "FULL_SHARD": "no",
        "SHARD_GRAD_OP": "tied",
    }
    # Two rounds tell nothing apart, however far apart they are.
    write_rounds(tmp_path / "two", {name: by_round[:2] for name, by_round in times.items()})
    table = over_fastest(open_strategies(tmp_path / "two"))
    assert set(table["fastest"]) == {"tied"}
    assert set(table["above_noise"].dropna()) == {"not settled: 4 more rounds"}
    write_rounds(tmp_path / "alone", {"DDP": [50.0] * 4})
    [row] = over_fastest(open_strategies(tmp_path / "alone")).itertuples()
    assert (row.fastest, row.above_noise, row.over_fastest) == (None, None, 0)


def of_ranks(rounds: int = 2, **columns: object) -> list[dict]:
    """Returns a row per round, iteration and rank; a tuple has a value for each of two ranks."""
    rows = []
    for round_, iteration, rank in np.ndindex(rounds, 3, 2):
        row = {"round": round_, "iteration": iteration, "rank": rank}
        for name, value in columns.items():
            row[name] = value[rank] if isinstance(value, tuple) else value
        rows.append(row)
    return rows


def write_emulated(folder: Path, network: str = "2 emulated hosts at 1 Gbit/s") -> None:
    """Writes the measurements of one rank on each of two hosts.

    Without communication a step is 20 ms, its backward pass 10 ms, in which all 6,901,760
    parameters are ready at the end, and the update 4 ms. An all-reduce takes 1 ms and 10 ms more
    for each MB. On a mesh of one rank FULL_SHARD takes 30 ms and SHARD_GRAD_OP 26. An all-gather
    takes 2 ms of a block and 5 of the root, a reduce-scatter 3 and 7.
    """
    environment = {
        "world_size": 2,
        "network": network,
        "interconnect": {"emulated": {"rates_bit_per_s": [1e9, 1e9]}},
    }
    # of either part of a step another rank is the slower one
    local = of_ranks(
        accumulation=1,
        before_time_ms=(6.0, 5.0),
        update_time_ms=(3.0, 4.0),
        backward_time_ms=10.0,
    )
    ready = of_ranks(
        rounds=1,
        parameter="all",
        registration_index=0,
        dtype="float32",
        size_bytes=4 * 6_901_760,
        ready_time_ms=10.0,
    )
    alone = [
        row
        for strategy, times_ms in (("FULL_SHARD", (29.0, 30.0)), ("SHARD_GRAD_OP", (25.0, 26.0)))
        for row in of_ranks(strategy=strategy, accumulation=1, step_time_ms=times_ms)
    ]
    config = GPT2Config.named("gpt2-nano")
    block = 4 * config.parameters_per_layer()
    root = 4 * config.num_parameters() - 6 * block
    by_itself = {
        ("all_gather", block): 2.0,
        ("all_gather", root): 5.0,
        ("reduce_scatter", block): 3.0,
        ("reduce_scatter", root): 7.0,
    }
    collectives = [
        row
        for (operation, size), slower_ms in by_itself.items()
        for row in of_ranks(
            operation=operation, size_bytes=size, time_ms=(slower_ms, slower_ms - 1)
        )
    ]
    times = {name: [[(100.0, 100.0)] * 3] * 2 for name in ("DDP", "FULL_SHARD", "SHARD_GRAD_OP")}
    write_run(
        folder / "compare",
        BENCHMARK,
        environment,
        strategy_times=strategy_rows(times, {}),
        local_times=local,
        gradient_ready_times=ready,
        alone_times=alone,
        collective_times=collectives,
    )
    samples = [
        row
        for size in (4, 10**6, 10**8)
        for row in of_ranks(rounds=1, mode="sequential", total_bytes=size, time_ms=1 + size / 1e5)
    ]
    write_run(folder / "allreduce", {}, environment, allreduce_samples=samples)


def test_steps_on_emulated_hosts_are_predicted_as_by_hand(tmp_path: Path) -> None:
    write_emulated(tmp_path / "emulated-2x1gbit")
    run = open_emulated(tmp_path)
    table = run.table().set_index("strategy")
    local_ms = 6 + 10 + 4
    # DDP: one tensor, ready when the backward pass ends, is one bucket of 27.6 MB
    bucket_ms = 1 + 4 * 6_901_760 / 1e5
    assert table.loc["DDP", "predicted_ms"] == pytest.approx(local_ms + bucket_ms, rel=1e-6)
    assert table.loc["DDP", "error"] == pytest.approx((local_ms + bucket_ms) / 100 - 1, rel=1e-6)
    # FSDP over gloo: one collective after another, and half of the update. gpt2-nano has 6 blocks
    # and the root; FULL_SHARD gathers the blocks twice.
    once_ms = 6 * (2 + 3) + 5 + 7
    assert table.loc["SHARD_GRAD_OP", "predicted_ms"] == pytest.approx(26 - 4 / 2 + once_ms)
    assert table.loc["FULL_SHARD", "predicted_ms"] == pytest.approx(30 - 4 / 2 + once_ms + 6 * 2)
    assert table.loc["FULL_SHARD", "computation_ms"] == pytest.approx(30 - 4 / 2)
    # every step was measured as 100 ms
    found = prediction_accuracy(run)
    assert found["worst_strategy"] == "DDP"
    assert found["worst_error"] == pytest.approx((local_ms + bucket_ms) / 100 - 1, rel=1e-6)
    assert found["median_error"] == pytest.approx(1 - (26 - 4 / 2 + once_ms) / 100)
    assert found["predicted_fastest"] == "SHARD_GRAD_OP"
    # in two rounds alone
    assert found["clear"] == ()
    assert found["measured_fastest"] == "DDP or FULL_SHARD or SHARD_GRAD_OP"
    assert set(table["above_noise"]) == {"not settled: 4 more rounds"}


def test_an_error_is_told_from_noise_by_the_rounds_that_were_measured(tmp_path: Path) -> None:
    write_emulated(tmp_path / "emulated-2x1gbit")
    path = tmp_path / "emulated-2x1gbit" / "compare" / "strategy-times.csv"
    times = pd.read_csv(path)
    rounds_ms = [98.0, 103.0, 99.0, 101.0, 100.0, 102.0]
    # DDP's rounds lie about what is predicted for it, the others are told apart from it
    factor = {"DDP": 2.96, "FULL_SHARD": 1.0, "SHARD_GRAD_OP": 1.5}
    rounds = [
        times[times["round"] == 0].assign(round=round_, step_time_ms=time_ms)
        for round_, time_ms in enumerate(rounds_ms)
    ]
    times = pd.concat(rounds)
    times["step_time_ms"] *= times["strategy"].map(factor)
    times.to_csv(path, index=False)
    run = open_emulated(tmp_path)
    table = run.table().set_index("strategy")
    predicted_ms = 6 + 10 + 4 + 1 + 4 * 6_901_760 / 1e5
    over = students_interval(predicted_ms / np.multiply(rounds_ms, 2.96), claims=3)
    assert ends_of(table.loc["DDP", "judged"]) == pytest.approx(over)
    assert table.loc["DDP", "error"] == pytest.approx(over[0] - 1)
    assert table["above_noise"].to_dict() == {
        "DDP": "hidden by noise",
        "FULL_SHARD": "settled",
        "SHARD_GRAD_OP": "settled",
    }
    assert prediction_accuracy(run)["clear"] == ("FULL_SHARD", "SHARD_GRAD_OP")
    assert prediction_accuracy(run)["measured_fastest"] == "FULL_SHARD"


def test_bucket_views_are_not_copied_back_where_the_run_says_so(tmp_path: Path) -> None:
    write_emulated(tmp_path / "emulated-2x1gbit")
    # A byte takes 1 ns to copy back; all 27.6 MB are in one bucket, the last.
    slow = replace(open_emulated(tmp_path), costs=DdpCosts(copy_out_s_per_byte=1e-9))
    predicted = {}
    for views in (None, False, True):
        said = {} if views is None else {"gradient_as_bucket_view": views}
        measured = replace(slow.measured, settings=slow.measured.settings | said)
        predicted[views] = replace(slow, measured=measured).predict("DDP", 1).total_s
    assert predicted[None] == predicted[False]  # older runs do not say
    assert predicted[False] - predicted[True] == pytest.approx(4 * 6_901_760 * 1e-9)


@pytest.mark.parametrize(("precision", "item_bytes"), [("float32", 4), ("bfloat16", 2)])
def test_the_collectives_that_are_timed_are_those_of_the_step(precision, item_bytes) -> None:
    settings = StrategyBenchmark(
        strategies=("FULL_SHARD", "SHARD_GRAD_OP"),
        model="gpt2-nano",
        seq_len=64,
        precision=precision,
    )
    model = GPT2(settings.workload(1).config)
    block = sum(p.numel() for p in model.blocks[0].parameters())
    root = sum(p.numel() for p in model.parameters()) - len(model.blocks) * block
    narrow = torch.bfloat16 if item_bytes == 2 else torch.float32
    # Blocks are gathered as autocast computes, the root and gradients are float32.
    assert sharded_messages(settings, 2) == {
        ("all_gather", item_bytes * block): narrow,
        ("all_gather", 4 * root): torch.float32,
        ("reduce_scatter", 4 * block): torch.float32,
        ("reduce_scatter", 4 * root): torch.float32,
    }


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"precision": "float16"}, "not supported under FSDP"),
        ({"accumulations": (1, 1)}, "accumulations 1, 1: give each once"),
        ({"strategies": ("DDP", "local", "DDP")}, "strategies DDP, local, DDP: give each once"),
    ],
)
def test_what_a_comparison_cannot_be_of_is_told_before_it_begins(settings, said) -> None:
    with pytest.raises(UserError, match=said):
        StrategyBenchmark(model="gpt2-nano", seq_len=16, **settings)


def test_slow_calls_among_collectives_count_in_their_sum_and_a_slow_round_does_not(
    tmp_path: Path,
) -> None:
    write_emulated(tmp_path / "emulated-2x1gbit")
    table = tmp_path / "emulated-2x1gbit" / "compare" / "collective-times.csv"
    calls = pd.read_csv(table)
    calls = pd.concat([calls[calls["round"] == 0].assign(round=round_) for round_ in range(3)])
    per_round = calls["iteration"].nunique()
    calls.loc[calls["iteration"] == 0, "time_ms"] += 6.0  # one call of each round is held up
    calls["time_ms"] *= np.where(calls["round"] == 2, 50.0, 1.0)  # and one round altogether
    calls.to_csv(table, index=False)
    predicted_ms = open_emulated(tmp_path).table().set_index("strategy")["predicted_ms"]
    # 14 and 20 collectives in turn: on average each is held up by 6 ms over the calls of a round.
    late_ms = 6.0 / per_round
    once_ms = 6 * (2 + 3) + 5 + 7
    assert predicted_ms["SHARD_GRAD_OP"] == pytest.approx(24 + once_ms + 14 * late_ms)
    assert predicted_ms["FULL_SHARD"] == pytest.approx(28 + once_ms + 6 * 2 + 20 * late_ms)


def test_an_all_reduce_over_another_network_does_not_predict_these_steps(tmp_path: Path) -> None:
    write_emulated(tmp_path / "emulated-2x1gbit")
    record = tmp_path / "emulated-2x1gbit" / "allreduce" / "environment.json"
    other = record.read_text().replace("1 Gbit", "2 Gbit")
    record.write_text(other)
    with pytest.raises(UserError, match="network differs between allreduce-samples"):
        open_emulated(tmp_path)


def test_where_hosts_cannot_be_emulated_recorded_ones_are_shown_with_the_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_emulated(tmp_path / "recorded" / "emulated-2x1gbit")
    monkeypatch.setattr(runs, "recorded_assignment", lambda assignment: tmp_path / "recorded")
    mine = tmp_path / "mine"
    mine.mkdir()
    assert "measured none" in open_emulated(mine).left_out
    (mine / "environment.json").write_text(json.dumps({"emulated_hosts_left_out": "no tc here"}))
    run = open_emulated(mine)
    assert run.left_out == "no tc here"
    assert "Recorded data, not yours" in run.origin
    assert "no tc here" in run.origin
    assert "ddplab run" not in run.origin  # which made the run that has none
