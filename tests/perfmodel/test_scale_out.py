"""A step on thousands of GPUs: each number against the step of one GPU, or of one case, by hand."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pandas as pd
import pytest
from perfmodel_support import refused

from common.perfmodel.architectures.architecture import Architecture, Layer, Tensor
from common.perfmodel.architectures.published_sizes import architecture_of
from common.perfmodel.cluster import steps
from common.perfmodel.cluster.assumptions import NETWORK_SPEED, Assumptions, Range
from common.perfmodel.cluster.clusters import load_cluster
from common.perfmodel.cluster.computed_profile import computed_profile
from common.perfmodel.cluster.job import Job
from common.perfmodel.cluster.nccl import NcclAllReduce, NcclRing, with_measured
from common.perfmodel.cluster.scale_out import (
    SCALINGS,
    STRATEGIES,
    ScaleOut,
    one_at_a_time,
    parse_gpus,
    predict_scale_out,
    stated_assumptions,
)
from common.perfmodel.collectives import AlphaBeta, MeasuredAllReduce
from common.perfmodel.ddp.profile import DdpCosts
from common.perfmodel.model import DdpModel
from common.perfmodel.one_device.architecture import GPT2Config
from common.perfmodel.one_device.flops import training_flops_per_token
from common.perfmodel.one_device.workload import Workload
from common.perfmodel.tables import AllReduceTable

H100 = load_cluster("h100-ib")
WORK = Workload(model="gpt2", precision="bfloat16")
JOB = Job.of(WORK)
GPUS = [1, 8, 64, 1024]
PEAK, MEMORY = 989.5e12, 3.35e12  # H100 SXM, dense bfloat16 and HBM3
CERTAIN = Assumptions(
    mfu=Range(0.4, 0.4, 0.4),
    network_speed=Range(1, 1, 1),
    straggler_spread=Range(0, 0, 0),
    overlap_slowdown=Range(1, 1, 1),
)


def row_of(
    strategy: str = "DDP", scaling: str = "weak", job: Job = JOB, gpus: int = 64, **options
) -> pd.Series:
    """Returns the row of a job, with assumptions that are certain unless others are given."""
    options = {"assumptions": CERTAIN, "strategies": [strategy]} | options
    return predict_scale_out(job, H100, [gpus], **options).rows(scaling, strategy).iloc[0]


@pytest.fixture(scope="module")
def predicted() -> ScaleOut:
    return predict_scale_out(JOB, H100, GPUS, global_batch_size=1000)


def test_there_is_a_row_for_each_scaling_strategy_and_number(predicted):
    for strategy in STRATEGIES:
        assert predicted.rows("weak", strategy)["gpus"].tolist() == GPUS
        # 1,000 sequences are too few for 1,024 GPUs
        assert predicted.rows("strong", strategy)["gpus"].tolist() == GPUS[:-1]
    assert predicted.rows("weak", "DDP")["nodes"].tolist() == [1, 1, 8, 128]


def test_the_parts_of_a_step_add_up_to_it(predicted):
    table = predicted.table
    parts = ["computation_s", "straggler_s", "copies_s", "slowed_s", "exposed_s"]
    assert (table[parts] >= 0).all().all()
    assert table[parts].sum(axis=1).to_numpy() == pytest.approx(table["step_s"].to_numpy())


def test_one_gpu_computes_and_nothing_else():
    flops = 8 * 1024 * training_flops_per_token(WORK.config, 1024)
    update_s = 28 * WORK.config.num_parameters() / MEMORY
    for strategy in STRATEGIES:
        row = row_of(strategy, gpus=1)
        assert row["step_s"] == pytest.approx(flops / (0.4 * PEAK) + update_s)
        assert row["efficiency"] == pytest.approx(1)
        assert row["tokens_per_s"] == pytest.approx(8 * 1024 / row["step_s"])


def test_bands_hold_the_prediction_and_grow_out_of_the_ranges(predicted):
    table = predicted.table
    for name in ("step{}_s", "efficiency{}", "tokens_per_s{}", "exposed{}_s"):
        value, low, high = (table[name.format(end)] for end in ("", "_low", "_high"))
        assert (low <= value + 1e-12).all()
        assert (value <= high + 1e-12).all()
    certain = predict_scale_out(JOB, H100, [64], assumptions=CERTAIN).table
    assert certain["step_low_s"].to_numpy() == pytest.approx(certain["step_s"].to_numpy())
    assert certain["step_high_s"].to_numpy() == pytest.approx(certain["step_s"].to_numpy())


def test_weak_and_strong_are_one_step_where_their_batches_are():
    # 64 GPUs with 8 sequences each are a global batch of 512
    both = predict_scale_out(JOB, H100, [64], global_batch_size=512).table
    for strategy in STRATEGIES:
        weak, strong = (both[(both.scaling == s) & (both.strategy == strategy)] for s in SCALINGS)
        # One GPU's step has an update every 8 sequences under weak scaling, every 512 under strong.
        numbers = [c for c in both.select_dtypes("number") if not c.startswith("efficiency")]
        assert weak[numbers].to_numpy() == pytest.approx(strong[numbers].to_numpy(), nan_ok=True)


def test_accumulation_hides_communication_behind_the_same_exchange():
    # Four micro-batches instead of one: three more passes, and nothing more is sent by DDP.
    found = [row_of(scaling="strong", global_batch_size=batch) for batch in (512, 2048)]
    passes = 8 * 1024 * training_flops_per_token(WORK.config, 1024) / (0.4 * PEAK)
    assert [row["micro_batches"] for row in found] == [1, 4]
    assert found[1]["step_s"] - found[0]["step_s"] == pytest.approx(3 * passes)
    assert found[1]["exposed_s"] == pytest.approx(found[0]["exposed_s"])


def test_the_busiest_gpu_decides_under_strong_scaling():
    # 65 sequences on 64 GPUs: one of them has two.
    row = row_of(scaling="strong", global_batch_size=65, assumptions=Assumptions())
    assert row["sequences_per_gpu"] == 2
    assert row["efficiency"] < 0.6
    assert row["tokens_per_s"] == pytest.approx(65 * 1024 / row["step_s"])


@pytest.mark.parametrize("gpus", [8, 1024])
def test_ddp_is_the_simulators_backward_pass_and_the_searchs_cap(gpus):
    assumptions = replace(CERTAIN, overlap_slowdown=Range(1.19, 1.19, 1.19))
    caps = np.geomspace(1, 400, 30)
    row = row_of(gpus=gpus, assumptions=assumptions, caps_mib=caps)
    network = NcclAllReduce(H100, gpus)
    profile = computed_profile(JOB.architecture, 8, 0.4 * PEAK)
    costs = DdpCosts(2 / MEMORY, 2 / MEMORY, compute_slowdown=1.19)
    best = DdpModel(profile, network, costs=costs).best_cap(caps)
    others = 1.5 * profile.backward_s - profile.backward_s  # the forward pass
    others += 28 * WORK.config.num_parameters() / MEMORY
    assert row["bucket_cap_mib"] == pytest.approx(best.cap_mib)
    assert row["step_s"] == pytest.approx(others + best.total_s)
    default = DdpModel(profile, network, costs=costs).at_cap(None)
    assert row["default_step_s"] == pytest.approx(others + default.total_s)
    assert row["algorithm"] == network.choice(best.cap_mib * 2**20)


def test_a_network_of_no_cost_leaves_computation_and_copies(monkeypatch):
    free = AlphaBeta(0.0, float("inf"))
    monkeypatch.setattr(steps, "NcclRing", lambda *_: free)
    found = predict_scale_out(
        JOB, H100, [64], assumptions=CERTAIN, strategies=["SHARD_GRAD_OP", "FULL_SHARD"]
    ).table
    found = found[found["scaling"] == "weak"]
    assert found["exposed_s"].to_numpy() == pytest.approx(0, abs=1e-9)
    # a rank updates its 64th, and copies each gathered and each reduced byte once
    compute = 8 * 1024 * training_flops_per_token(WORK.config, 1024) / (0.4 * PEAK)
    assert (found["computation_s"] > compute).all()
    assert (found["computation_s"] < compute + 28 / 32 * 125e6 / MEMORY).all()
    assert (found["copies_s"] > 2 * (2 + 4) * 85e6 / MEMORY).all()


def test_slower_networks_and_stragglers_never_help():
    slow = replace(H100, network_gb_per_s=H100.network_gb_per_s / 8)
    fast, slower = (
        predict_scale_out(JOB, one, [64, 1024], assumptions=CERTAIN).table for one in (H100, slow)
    )
    assert (slower["step_s"] > fast["step_s"]).all()
    spread = replace(CERTAIN, straggler_spread=Range(0.05, 0.05, 0.05))
    uneven = predict_scale_out(JOB, H100, [64, 1024], assumptions=spread).table
    assert (uneven["step_s"] > fast["step_s"]).all()
    # of 1,024 normal-like GPUs the slowest is about 3.2 standard deviations off
    share = uneven["straggler_s"] / uneven["computation_s"]
    assert share[uneven["gpus"] == 1024].to_numpy() == pytest.approx(0.17, abs=0.02)


def test_each_assumption_is_worth_something(predicted):
    worth = one_at_a_time(predicted, "weak", "DDP", 1024).set_index("assumption")
    row = predicted.rows("weak", "DDP").set_index("gpus").loc[1024]
    assert worth.loc["as assumed", "step_s"] == pytest.approx(row["step_s"])
    assert worth.loc["pass rate 0.6", "step_s"] > worth.loc["pass rate 1.55", "step_s"]
    assert worth.loc["network speed 0.5", "step_s"] > worth.loc["network speed 1.1", "step_s"]
    spread = worth.loc[["straggler spread 0.005", "straggler spread 0.009"], "efficiency"]
    assert spread.is_monotonic_decreasing


def test_everything_assumed_is_stated(predicted):
    text = " ".join(stated_assumptions(predicted))
    for word in (
        "1 (0.6 to 1.55)",
        "17.1 times",
        "70% of",
        "H100",
        "1.19 (1 to 1.4)",
        "0.6% (0.5% to 0.9%)",
        "lognormal",
    ):
        assert word in text
    for word in ("no congestion", "64 draws", "seed 0", "1000 sequences", *H100.assumptions):
        assert word in text


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("8", [8]),
        ("64,8,16,8", [8, 16, 64]),
        ("8..64", [8, 16, 32, 64]),
        ("24..100", [24, 48, 96]),
        ("8..8", [8]),
    ],
)
def test_numbers_of_gpus(text, expected):
    assert parse_gpus(text) == expected


@pytest.mark.parametrize("text", ["0", "-8", "8,0", "0..64", "64..8", "", "eight", "8..", "1.5"])
def test_numbers_of_gpus_that_cannot_be_are_refused(text):
    with refused("--gpus"):
        parse_gpus(text)


@pytest.mark.parametrize(
    ("changes", "gpus", "words"),
    [
        ({}, [12], ["12 GPUs", "multiples of 8"]),
        ({}, [2**20], ["at most"]),
        ({"global_batch_size": 0}, [8], ["global batch"]),
        ({"strategies": ["ZERO4"]}, [8], ["ZERO4", "ZERO1"]),
        ({"cluster": replace(H100, gpu="T4")}, [8], ["T4", "bfloat16"]),
    ],
)
def test_questions_without_an_answer_are_refused(changes, gpus, words):
    with refused(*words):
        predict_scale_out(**{"job": JOB, "cluster": H100, "gpus": gpus} | changes)


@pytest.mark.parametrize("strategy", ["DDP", "FULL_SHARD"])
@pytest.mark.parametrize(("checkpointing", "share"), [("block", 1.0), ("selective", 0.5)])
def test_checkpointing_computes_the_blocks_again(strategy, checkpointing, share):
    plain = row_of(strategy)
    again = row_of(strategy, job=replace(JOB, checkpointing=checkpointing))
    blocks = 12 * 1024 * (24 * 768**2 + 4 * 768 * 1024)
    added = share * JOB.batch_size * blocks / (0.4 * PEAK)
    assert again["computation_s"] - plain["computation_s"] == pytest.approx(added)
    assert again["exposed_s"] <= plain["exposed_s"] * (1 + 1e-9)


@pytest.mark.parametrize("strategy", ["DDP", "FULL_SHARD", "SHARD_GRAD_OP"])
def test_accumulation_under_weak_scaling_is_that_of_a_larger_batch_under_strong(strategy):
    four = row_of(strategy, job=replace(JOB, accumulation=4))
    strong = row_of(strategy, "strong", global_batch_size=64 * 32)
    assert four["micro_batches"] == strong["micro_batches"] == 4
    assert four["step_s"] == pytest.approx(strong["step_s"])
    assert four["tokens_per_s"] == pytest.approx(strong["tokens_per_s"])


def test_gradients_of_every_micro_batch_are_reduced_where_nobody_says_which_is_the_last():
    four = replace(JOB, accumulation=4, batch_size=1)
    each = row_of("FULL_SHARD", job=replace(four, reduces_each=True))
    assert each["step_s"] > row_of("FULL_SHARD", job=four)["step_s"]
    # Four steps of one micro-batch, but for the update, which is done once.
    alone = row_of("FULL_SHARD", job=replace(JOB, batch_size=1))
    passes = alone["step_s"] - 28 * JOB.architecture.num_parameters / 64 / MEMORY
    update = each["step_s"] - 4 * passes
    assert update == pytest.approx(28 * JOB.architecture.num_parameters / 64 / MEMORY, rel=1e-3)


def test_zero1_updates_whole_tensors_and_gathers_the_rest():
    ddp, zero1 = row_of("DDP"), row_of("ZERO1")
    parameters = JOB.architecture.num_parameters
    update_s = 28 * parameters / MEMORY
    gather_s = NcclRing(H100, 64, "all_gather").time_s(4 * parameters)
    # One of the 64 has the token embedding, which is larger than all that any other one has.
    saved_s = update_s * (1 - 50257 * 768 / parameters)
    assert zero1["step_s"] - ddp["step_s"] == pytest.approx(gather_s - saved_s)


def test_only_the_gpus_that_were_measured_have_a_certain_network():
    sizes = np.array([2.0**10, 2.0**30])
    curve = MeasuredAllReduce(sizes, 3 * NcclAllReduce(H100, 16).time_s(sizes))
    cluster = with_measured(H100, AllReduceTable(curve, None, 16, "table.csv"))
    assumptions = replace(CERTAIN, network_speed=NETWORK_SPEED)
    rows = predict_scale_out(JOB, cluster, [16, 32], assumptions=assumptions).rows("weak", "DDP")
    assert rows["step_low_s"][0] == pytest.approx(rows["step_high_s"][0], rel=1e-12)
    assert rows["step_low_s"][1] < 0.99 * rows["step_high_s"][1]


def test_hybrid_sharding_is_full_sharding_on_one_node_and_sends_less_between_many():
    one_node = [row_of(strategy, gpus=8)["step_s"] for strategy in ("FULL_SHARD", "HYBRID_SHARD")]
    assert one_node[0] == pytest.approx(one_node[1], rel=1e-3)  # an all-reduce of one rank: none
    large = replace(JOB, architecture=GPT2Config.named("gpt2-xl").architecture(1024), batch_size=1)
    full, hybrid = (row_of(name, job=large, gpus=512) for name in ("FULL_SHARD", "HYBRID_SHARD"))
    assert hybrid["exposed_s"] < full["exposed_s"]


def test_gradients_of_16_bits_are_half_the_bytes():
    halved = row_of(job=replace(JOB, gradient_bytes=2))
    assert halved["copies_s"] == pytest.approx(row_of()["copies_s"] / 2, rel=1e-6)
    assert halved["exposed_s"] < row_of()["exposed_s"]


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"checkpointing": "all"}, ["all", "block"]),
        ({"batch_size": 0}, ["batch_size is 0"]),
        ({"accumulation": 0}, ["accumulation is 0"]),
        ({"tf32": True}, ["tf32", "bfloat16"]),
    ],
)
def test_jobs_that_cannot_be_are_refused(changes, words):
    with refused(*words):
        replace(JOB, **changes)


@pytest.mark.parametrize("name", ["t5-base", "deepseek-v3"])
def test_blocks_of_several_kinds_are_units_of_their_own(name):
    job = Job(architecture_of(name, 512), batch_size=1)
    strategies = ["FULL_SHARD"]
    both = predict_scale_out(job, H100, [8, 16], assumptions=CERTAIN, strategies=strategies)
    one = predict_scale_out(job, H100, [16], assumptions=CERTAIN, strategies=strategies)
    assert both.rows("weak", "FULL_SHARD")["step_s"][1] == pytest.approx(
        one.rows("weak", "FULL_SHARD")["step_s"][0]
    )


def test_unequal_blocks_need_names_of_their_own():
    block = Layer("block", (Tensor("weight", (2, 2)),), is_block=True)
    Architecture("alike", (block, replace(block, count=3)))
    with pytest.raises(ValueError, match="block"):
        Architecture("unlike", (block, replace(block, forward_flops=1)))
