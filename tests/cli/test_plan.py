"""``ddplab plan`` as a user types it: refusals that need no rank, and plans for a cluster."""

from __future__ import annotations

import json
from pathlib import Path
from unittest import mock

import pytest
from command_line import answered, refused

FIELDS = {
    *("strategy", "micro_batch", "accumulation", "checkpointing", "precision", "bucket_cap_mib"),
    *("step_s", "step_low_s", "step_high_s", "peak_bytes", "budget_bytes", "verified", "rejected"),
}
CLUSTER = ("--model", "gpt2", "--cluster", "h100-ib", "--global-batch", 16, "--seq-len", 256)
CPU = ("--device", "cpu")


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ((), "name MODULE:FUNCTION, or --model"),
        (("a:b", "--model", "gpt2"), "name MODULE:FUNCTION, or --model"),
        (("a:b", *CPU), "a CPU has no memory of its own: say --memory"),
        (("a:b", "--gpus", 2, "--memory", "1GB"), "--gpus has an effect with --cluster only; here"),
        (("a:b", "--tf32", "--memory", "1GB"), "--tf32 has an effect with --cluster only"),
        (("a:b", "--cluster", "h100-ib", "--fused-loss"), "--fused-loss has an effect"),
        (("a:b", "--seq-len", 8, "--memory", "1GB"), "--seq-len has an effect with --model only"),
        (("a", *CPU, "--memory", "1GB"), "is not MODULE:FUNCTION"),
        (("nowhere_to_be_found:b", *CPU, "--memory", "1GB"), "no module 'nowhere_to_be_found'"),
        (("json:b", *CPU, "--memory", "1GB", "--ranks", 0), "--ranks 0: at least 1"),
        (("json:b", *CPU, "--memory", "1GB", "--precision", "float99"), "float99"),
        (("json:b", *CPU, "--memory", "1GB", "--strategies", "DPP"), "DPP"),
        (("json:b", *CPU, "--memory", "much"), "--memory much: expected a size like 80GB"),
        (("json:b", *CPU, "--memory", "0GB"), "--memory 0GB: above 0 and finite"),
        (("json:b", *CPU, "--memory", "1e999GB"), "--memory 1e999GB: above 0 and finite"),
        (("json:b", *CPU, "--memory", "1GB", "--changes-training", "a"), "a: no or yes"),
        (("json:b", *CPU, "--memory", "1GB", "--tune-seconds", "-1"), "tune_seconds is -1"),
        ((*CLUSTER, "--cluster", "nowhere"), "nowhere"),
        ((*CLUSTER, "--allreduce", "nowhere.txt"), "nowhere.txt"),
        (
            ("a:b", "--allreduce", "x", "--memory", "1GB"),
            "--allreduce has an effect with --cluster",
        ),
        ((*CLUSTER, "--ranks", 2), "--ranks has no effect with --cluster, whose GPUs are --gpus"),
        ((*CLUSTER, "--tune-seconds", 9), "no effect with --cluster, where nothing is run"),
        ((*CLUSTER, "--mine", "DDP"), "--mine has no effect with --cluster"),
        ((*CLUSTER, "--no-verify"), "--no-verify has no effect with --cluster"),
        (("json:b", *CPU, "--memory", "1GB", "--mine", "DPP"), "unknown strategy 'DPP'"),
        (("json:b", *CPU, "--memory", "1GB", "--mine", "DDP", "--no-verify"), "--mine has no"),
        ((*CLUSTER, "--gpus", 12), "12"),
        ((*CLUSTER, "--precision", "float99"), "float99"),
        ((*CLUSTER, "--strategies", "DPP"), "DPP"),
        ((*CLUSTER, "--memory", "-1GB"), "--memory"),
        ((*CLUSTER, "--global-batch", 17), "17 samples: 8 ranks cannot split it evenly; 16"),
        ((*CLUSTER, "--global-batch", -8), "global_batch is -8; at least 1"),
        (("--model", "gpt-9", "--cluster", "h100-ib"), "gpt-9"),
    ],
)
def test_mistakes_are_one_line_and_nothing_is_started_or_written(
    arguments, said, tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    with mock.patch("common.tuning.launched.launch", side_effect=AssertionError("started")):
        line = refused("plan", *arguments, "--json", "answer.json", progress=True)
    assert said in line
    assert list(tmp_path.iterdir()) == []


def test_strategies_of_which_none_is_possible_are_refused():
    hybrid = refused("plan", *CLUSTER, "--strategies", "HYBRID_SHARD")
    assert "none is possible; HYBRID_SHARD needs several nodes" in hybrid
    alone = ("--cluster", "h100-ib", "--gpus", "1", "--strategies", "DDP")
    assert "one rank has single alone" in refused("plan", "--model", "gpt2", *alone)


def test_files_that_cannot_be_are_refused(tmp_path):
    assert "--json" in refused("plan", *CLUSTER, "--json", tmp_path / "no" / "a.json")
    assert "--json" in refused("plan", *CLUSTER, "--json", tmp_path)
    assert "--page" in refused("plan", *CLUSTER, "--page", tmp_path)
    config = tmp_path / "config.json"
    config.write_text('{"model_type": "abacus"}')
    assert "abacus" in refused("plan", "--model", config, "--cluster", "h100-ib")
    assert list(tmp_path.iterdir()) == [config]


@pytest.mark.parametrize("memory", ["80GB", pytest.param("1.2GB", marks=pytest.mark.slow), "1MB"])
def test_the_answer_is_strict_json_with_the_same_keys_whether_anything_fits(memory, tmp_path):
    path, page = tmp_path / "answer.json", tmp_path / "answer.html"
    printed = answered("plan", *CLUSTER, "--memory", memory, "--json", path, "--page", page)
    assert ("<svg" in page.read_text()) == (memory == "80GB")
    answer = json.loads(path.read_text(), parse_constant=pytest.fail)
    assert set(answer) >= FIELDS
    assert answer["verified"] is None
    budget = {"80GB": 80e9, "1.2GB": 1.2e9, "1MB": 1e6}[memory]
    assert answer["budget_bytes"] == budget
    if memory != "80GB":
        assert answer["strategy"] is None
        assert answer["step_s"] is None
        assert "Nothing fits" in printed
        return
    assert answer["strategy"] in printed
    assert answer["step_low_s"] <= answer["step_s"] <= answer["step_high_s"]
    # 124M parameters in float32, their gradients and two moments, or the shards of those.
    assert 16 * 124e6 / 8 < answer["peak_bytes"] < budget
    assert (
        answer["micro_batch"]
        * answer["accumulation"]
        * (1 if answer["strategy"] == "single" else 8)
        == 16
    )
    assert all(plan["reason"] for plan in answer["rejected"])


def test_micro_batches_that_a_function_cannot_take_are_left_out_on_a_cluster(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(Path(__file__).parents[1] / "planning")
    path = tmp_path / "answer.json"
    on = ("--cluster", "h100-ib", "--global-batch", 16, "--memory", "2GB", "--json", path)
    printed = answered("plan", "plan_models:pooled", *on)
    answer = json.loads(path.read_text())
    assert {plan["micro_batch"] for plan in (answer, *answer["rejected"])} <= {2, 4, 8, 16}
    (line,) = answer["left_out"]
    assert line.startswith("micro-batches of size 1 were left out")
    assert line in printed
