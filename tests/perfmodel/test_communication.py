"""What strategies send and when, against what two and more real ranks did, and known ratios."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from itertools import chain
from pathlib import Path

import numpy as np
import pytest

from common.errors import UserError
from common.perfmodel.fsdp.communication import (
    Collective,
    control_bytes,
    step_collectives,
    step_control_bytes,
    step_wire_bytes,
    strategy_table,
    wire_bytes,
)
from common.perfmodel.one_device.architecture import GPT2Config
from common.traces.step_overlap import collectives_of, read_step_overlap
from common.traces.trace_stream import records_of

WORKER = Path(__file__).with_name("communication_worker.py")
CONFIG = GPT2Config.named(  # the worker's
    "gpt2-nano", n_layer=2, vocab_size=1001, n_embd=64, n_positions=32, n_head=4
)
QUICK = {
    2: ["DDP:1", "FULL_SHARD:1", "SHARD_GRAD_OP:2", "MY_FSDP:2", "MY_ZERO1:1"],
    3: [],
    4: [],
}
OTHERS = {
    2: ["DDP:2", "SHARD_GRAD_OP:1", "MY_FSDP:1", "MY_DDP:1", "MY_BUCKETS:2"],
    3: ["DDP:1", "FULL_SHARD:2", "MY_FSDP:1", "MY_ZERO1:1"],
    4: ["HYBRID_SHARD:2"],
}
EVERY_CASE = [(ranks, case) for ranks, cases in QUICK.items() for case in cases]
EVERY_CASE += [
    pytest.param(ranks, case, marks=pytest.mark.slow)
    for ranks, cases in OTHERS.items()
    for case in cases
]


@pytest.fixture(scope="module")
def seen(rank_server, slow_chosen, tmp_path_factory) -> dict[tuple[int, str], list[dict]]:
    """Returns what each rank sent in a step, by number of ranks and case."""
    found: dict[tuple[int, str], list[dict]] = {}
    for ranks, cases in QUICK.items():
        cases = [*cases, *(OTHERS[ranks] if slow_chosen else ())]
        if not cases:
            continue
        folder = tmp_path_factory.mktemp("traces")
        done = rank_server.run(WORKER, folder, *cases, ranks=ranks, timeout_s=100)
        assert done.exit_codes == [0] * ranks, "\n".join(done.stderr)
        for line in chain.from_iterable(map(done.lines, range(ranks))):
            found.setdefault((ranks, line["case"]), []).append(line)
    return found


def predicted(ranks: int, case: str) -> list[Collective]:
    strategy, accumulation = case.split(":")
    return step_collectives(
        CONFIG,
        strategy,
        ranks,
        accumulation=int(accumulation),
        shard_size=2 if strategy == "HYBRID_SHARD" else None,
        bucket_cap_mb=0.2,
    )


@pytest.mark.two_ranks
@pytest.mark.parametrize(("ranks", "case"), EVERY_CASE)
def test_a_rank_sends_the_predicted_bytes(seen, ranks, case):
    payload = step_wire_bytes(predicted(ranks, case), "gloo")
    control = step_control_bytes(predicted(ranks, case), "gloo")
    everybody = [rank["sent_bytes"] for rank in seen[ranks, case]]
    assert len(everybody) == ranks
    if "ZERO1" in case:  # updated parameters go from the rank that owns them
        everybody = [sum(everybody) / ranks] * ranks
    for sent in everybody:
        assert sent == pytest.approx(payload, rel=0.01, abs=control)
        # With gloo's headers only the rounding of its pieces is left, and none for two ranks.
        rounding = 0 if ranks == 2 else 16 * sum(c.count for c in predicted(ranks, case))
        assert sent == pytest.approx(payload + control, abs=rounding)
    # Nothing went anywhere else.
    received = sum(rank["received_bytes"] for rank in seen[ranks, case])
    assert received == sum(rank["sent_bytes"] for rank in seen[ranks, case])


@pytest.mark.two_ranks
@pytest.mark.parametrize(("ranks", "case"), EVERY_CASE)
def test_a_step_makes_the_predicted_collectives(seen, ranks, case):
    # The profiler's own record of a step: operation and size, padding included, exactly.
    expected = Counter()
    for collective in predicted(ranks, case):
        expected[collective.operation, collective.size_bytes] += collective.count
    recorded = collectives_of(Path(seen[ranks, case][0]["trace"]))
    assert recorded["step"].nunique() == 2
    for _, of_step in recorded.groupby("step"):
        found = {(row.operation, row.size_bytes): row.count for row in of_step.itertuples(name="R")}
        assert found == expected


# Operators of ATen and FSDP, and DDP's copies.
COMPUTING = ("aten::", "fsdp::", "torch::distributed::", "torch.distributed.")


def records_of_steps(trace: Path) -> list[tuple[dict, list[dict]]]:
    """Returns each step of a trace with all records, in order of time."""
    records = sorted((r for r in records_of(trace) if "dur" in r), key=lambda r: r["ts"])
    return [(step, records) for step in records if step["name"].startswith("ProfilerStep#")]


def shown(step: dict, records: list[dict], chosen: Callable[[dict], bool]) -> np.ndarray:
    """Marks which tenths of a microsecond of the step are in a chosen record: the slow way."""
    active = np.zeros(int(step["dur"] * 10), dtype=bool)
    for record in filter(chosen, records):
        start, end = (10 * (at - step["ts"]) for at in (record["ts"], record["ts"] + record["dur"]))
        if end > 0:
            active[round(max(start, 0)) : round(end)] = True
    return active


@pytest.mark.two_ranks
@pytest.mark.parametrize("case", ["DDP:1", "FULL_SHARD:1"])
def test_parts_of_a_real_step_add_up_and_are_what_a_timeline_shows(seen, case):
    trace = Path(seen[2, case][0]["trace"])
    table = read_step_overlap(trace)
    parts = table["computation_ms"] + table["exposed_communication_ms"] + table["idle_ms"]
    assert parts.to_numpy() == pytest.approx(table["step_ms"].to_numpy())
    assert len(table) == 2
    for row, (step, records) in zip(table.itertuples(), records_of_steps(trace), strict=True):
        gloo_threads = {r["tid"] for r in records if r["name"].startswith("gloo:")}
        communicate = shown(step, records, lambda r: r["name"].startswith("gloo:"))
        compute = shown(
            *(step, records),
            lambda r, gloo=gloo_threads: r["name"].startswith(COMPUTING) and r["tid"] not in gloo,
        )
        # copies of a reduce-scatter
        compute &= ~shown(step, records, lambda r: r["name"].startswith("c10d::"))
        for name, slow in {
            "computation_ms": compute,
            "communication_ms": communicate,
            "overlap_ms": compute & communicate,
        }.items():
            assert getattr(row, name) == pytest.approx(slow.sum() / 1e4, abs=0.1), name


@pytest.mark.two_ranks
def test_ddp_reduces_before_the_last_gradient_and_fully_shard_waits_for_each_collective(seen):
    # When a bucket is handed over is DDP's choice; when gloo's thread gets a core, the machine's.
    for step, records in records_of_steps(Path(seen[2, "DDP:1"][0]["trace"])):
        inside = [r for r in records if 0 <= r["ts"] - step["ts"] < step["dur"]]
        handed_over = [r["ts"] for r in inside if r["name"] == "c10d::allreduce_"]
        products = [r["ts"] for r in inside if r["name"] == "aten::mm"]
        assert min(handed_over) < max(products)
    sharded = read_step_overlap(Path(seen[2, "FULL_SHARD:1"][0]["trace"])).sum()
    assert sharded["overlap_ms"] < 0.1 * sharded["communication_ms"]
    assert sharded["exposed_communication_ms"] > 0


def test_large_models_have_the_known_ratios_to_ddp():
    # Rajbhandari et al. 2019, section 7: stage 2 sends what data parallelism does, stage 3 half as
    # much more; here a little less, as the embeddings are gathered once.
    table = strategy_table(GPT2Config.named("gpt2-xl"), 2).query("accumulation == 1")
    ratio = table.set_index(["backend", "strategy"])["ratio_to_ddp"]
    assert ratio["nccl", "SHARD_GRAD_OP"] == pytest.approx(1, rel=1e-4)
    assert 1.47 < ratio["nccl", "FULL_SHARD"] < 1.5
    # gloo's reduce-scatter is an all-reduce.
    assert ratio["gloo", "SHARD_GRAD_OP"] == pytest.approx(1.5, rel=1e-4)
    assert 1.97 < ratio["gloo", "FULL_SHARD"] < 2


def test_accumulation_costs_full_shard_two_gathers_a_block_and_others_nothing():
    def counts(strategy: str, accumulation: int) -> dict[tuple[str, str], int]:
        found = step_collectives(CONFIG, strategy, 4, accumulation=accumulation)
        return {(c.operation, c.unit): c.count for c in found}

    for accumulation in (1, 2, 5):
        full = counts("FULL_SHARD", accumulation)
        assert full["all_gather", "block"] == 2 * accumulation * CONFIG.n_layer
        assert full["all_gather", "root"] == 1
        assert full["reduce_scatter", "block"] == CONFIG.n_layer
        for strategy in ("DDP", "SHARD_GRAD_OP"):
            assert counts(strategy, accumulation) == counts(strategy, 1)


def test_hybrid_sharding_sends_less_between_the_groups():
    # Two nodes of four: a rank's quarter of the gradients crosses, in place of all of DDP's.
    config = GPT2Config.named("gpt2-nano")
    hybrid = step_collectives(config, "HYBRID_SHARD", 8, shard_size=4)
    between = [c for c in hybrid if c.group_size == 2]
    assert {c.operation for c in between} == {"all_reduce"}
    gradients = 4 * config.num_parameters()
    assert sum(c.count * c.size_bytes for c in between) == pytest.approx(gradients / 4, rel=1e-6)
    # One group is FULL_SHARD; its all-reduces have nobody to talk to.
    alone = step_collectives(config, "HYBRID_SHARD", 4, shard_size=4)
    full = step_wire_bytes(step_collectives(config, "FULL_SHARD", 4), "nccl")
    assert step_wire_bytes(alone, "nccl") == full


def test_half_precision_halves_the_blocks_that_are_gathered():
    full = step_collectives(CONFIG, "FULL_SHARD", 2)
    half = step_collectives(CONFIG, "FULL_SHARD", 2, parameter_bytes=2)
    for a, b in zip(full, half, strict=True):
        is_halved = (b.operation, b.unit) == ("all_gather", "block")
        assert b.size_bytes * (2 if is_halved else 1) == a.size_bytes


def test_one_rank_sends_nothing():
    assert step_collectives(CONFIG, "single", 1) == []
    for strategy in ("DDP", "FULL_SHARD"):
        alone = step_collectives(CONFIG, strategy, 1)
        assert step_wire_bytes(alone, "gloo") == step_control_bytes(alone, "gloo") == 0
    assert strategy_table(CONFIG, 1)["ratio_to_ddp"].isna().all()


def test_a_ring_sends_what_its_formula_says():
    sizes = {"all_reduce": 1800, "all_gather": 900, "reduce_scatter": 900}
    for operation, expected in sizes.items():
        assert wire_bytes(Collective(operation, "x", 1200, 1, 4), "nccl") == expected
    assert wire_bytes(Collective("reduce_scatter", "x", 1200, 1, 4), "gloo") == 1800
    assert control_bytes(Collective("all_gather", "x", 1200, 1, 4), "nccl") == 0


def test_the_table_shows_each_strategy_on_each_backend():
    table = strategy_table(CONFIG, 8)
    assert len(table) == 2 * 2 * 3
    assert (table.loc[table["strategy"] == "DDP", "ratio_to_ddp"] == 1).all()


@pytest.mark.parametrize(
    ("arguments", "settings", "message"),
    [
        (("FSDP", 2), {}, "unknown strategy 'FSDP'|strategy 'FSDP'"),
        (("DDP", 0), {}, "ranks is 0"),
        (("DDP", 2), {"accumulation": 0}, "accumulation is 0"),
        (("single", 2), {}, "one rank, not 2"),
        (("FULL_SHARD", 4), {"shard_size": 2}, "no effect on FULL_SHARD"),
        (("HYBRID_SHARD", 4), {}, "must divide 4 ranks"),
        (("HYBRID_SHARD", 4), {"shard_size": 3}, "must divide 4 ranks"),
    ],
)
def test_bad_input_to_step_collectives_gets_one_line(arguments, settings, message):
    with pytest.raises(UserError, match=message) as caught:
        step_collectives(CONFIG, *arguments, **settings)
    assert "\n" not in str(caught.value)


def test_an_unknown_backend_or_operation_is_refused():
    with pytest.raises(UserError, match="backend 'mpi'"):
        wire_bytes(Collective("all_reduce", "x", 4, 1, 2), "mpi")
    with pytest.raises(UserError, match="operation 'gossip'"):
        wire_bytes(Collective("gossip", "x", 4, 1, 2), "gloo")
