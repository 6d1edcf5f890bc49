"""Runs of train_ddp.py and compare_modes.py on two ranks: what they write, and what they refuse."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path

import pandas as pd
import pytest
import torch
import yaml
from refusals import problem

from common.benchmarks.micro_batches.compare_modes import ARMS, CONTROL, ModeComparison
from common.runtime.group.process_group import Worker
from common.runtime.processes.ranks import Ranks
from common.scheduling.modes import MODES, SAME_BATCH
from common.training.micro_batches.config import MicroBatchConfig
from common.training.texts.task import open_task

pytestmark = [pytest.mark.two_ranks]
WORKER = Path(__file__).with_name("micro_batch_runs_worker.py")
DATASETS = Path(__file__).resolve().parents[3] / "shared" / "datasets"
ORIGINAL = (
    "step,rank,local_batch,max_seq_len_in_batch,padded_tokens,step_time_ms,peak_mem_mb,"
    "throughput_samples_per_s,throughput_tokens_per_s"
)


@pytest.fixture(scope="module")
def runs(rank_server, tmp_path_factory) -> tuple[Path, dict[str, str], list[str]]:
    """Returns the folder of all runs, what was said of each refusal, and the log of each rank."""
    folder = tmp_path_factory.mktemp("runs")
    done = rank_server.succeed(WORKER, folder, ranks=2, timeout_s=110)
    refused = [{one["refused"]: one["error"] for one in done.lines(rank)} for rank in range(2)]
    assert refused[0] == refused[1]  # no rank goes on alone
    return folder, refused[0], done.stderr


def metrics(folder: Path) -> pd.DataFrame:
    return pd.concat(pd.read_csv(path) for path in sorted(folder.glob("metrics/rank*.csv")))


def losses(folder: Path) -> pd.Series:
    return pd.read_csv(folder / "losses.csv").set_index("step")["loss"]


@pytest.mark.parametrize("mode", MODES)
def test_a_run_has_a_row_for_each_rank_and_step(runs, mode):
    folder = runs[0] / mode
    assert sorted(path.name for path in folder.glob("metrics/*")) == ["rank0.csv", "rank1.csv"]
    # Those who read the original's files find their columns, in their order.
    assert (folder / "metrics" / "rank0.csv").read_text().startswith(ORIGINAL)
    table = metrics(folder)
    assert table.groupby("rank")["step"].apply(list).tolist() == [list(range(4))] * 2
    assert (table["padded_tokens"] == table["local_batch"] * table["max_seq_len_in_batch"]).all()
    assert (table["tokens"] <= table["padded_tokens"]).all()
    if mode != "token_budget":
        assert (table.groupby("step")["local_batch"].sum() == 8).all()
    parts = table.filter(regex="^(compute|waiting|communication|planning)_time_ms$")
    assert (parts >= 0).all(axis=None)
    # What is left is the update.
    assert (parts.sum(axis=1) <= table["step_time_ms"] * (1 + 1e-9)).all()
    # One of the ranks waits for nobody.
    assert (table.groupby("step")["waiting_time_ms"].min() == 0).all()
    assert (runs[0] / f"last_run_{mode}.txt").is_file()


@pytest.mark.parametrize("mode", SAME_BATCH[1:])
def test_modes_of_the_same_batches_learn_the_same(runs, mode):
    static, other = losses(runs[0] / "static"), losses(runs[0] / mode)
    assert ((other / static - 1).abs() < 1e-5).all()
    accuracy = [
        pd.read_csv(runs[0] / name / "evaluations.csv")["accuracy"].tolist()
        for name in ("static", mode)
    ]
    assert accuracy[0] == accuracy[1]
    assert len(accuracy[0]) == 2


def test_a_run_is_evaluated_after_every_so_many_steps_and_at_its_end(runs):
    # The calibrated run has 5 steps, and evaluates after every second.
    table = pd.read_csv(runs[0] / "calibrated" / "evaluations.csv")
    assert table["step"].tolist() == [2, 4, 5]
    assert (table["samples"] == 33).all()


def test_the_same_holds_for_a_mean_over_tokens_and_for_a_slowed_rank(runs):
    tokens, dynamic = (losses(runs[0] / f"tokens-{mode}") for mode in ("static", "dynamic"))
    assert ((dynamic / tokens - 1).abs() < 1e-12).all()  # in float64
    assert abs(tokens.iloc[0] / losses(runs[0] / "static").iloc[0] - 1) > 1e-6  # another mean
    static = losses(runs[0] / "static")
    slowed = losses(runs[0] / "calibrated").loc[static.index]  # it has a step more
    assert ((slowed / static - 1).abs() < 1e-5).all()


def test_other_modes_change_the_batches(runs):
    static = losses(runs[0] / "static")
    for mode in ("length_grouped", "token_budget"):
        assert ((losses(runs[0] / mode) / static - 1).abs() > 1e-4).any()


@pytest.mark.slow
@pytest.mark.skipif(not DATASETS.is_dir(), reason="needs ../shared/datasets")
def test_on_real_texts_too_the_losses_are_the_same(rank_server, tmp_path):
    rank_server.succeed(WORKER, tmp_path, DATASETS, ranks=2)
    static, dynamic = (losses(tmp_path / f"sst2-{mode}") for mode in ("static", "dynamic"))
    assert ((dynamic / static - 1).abs() < 1e-5).all()
    config = yaml.safe_load((tmp_path / "sst2-static" / "config.yaml").read_text())
    assert config["data_source"] == "sst2/train.tsv"


def test_a_rank_slowed_from_the_start_gets_fewer_tokens(runs):
    share = metrics(runs[0] / "calibrated").groupby("rank")["padded_tokens"].sum()
    assert share[1] < share[0]


def test_the_comparison_visits_every_mode_on_the_same_batches(runs):
    table = pd.read_csv(runs[0] / "compared" / "mode-times.csv")
    assert set(table["mode"]) == {*ARMS, CONTROL}
    assert (table.groupby(["mode", "step"])["rank"].apply(list).map(len) == 2).all()
    same = table[table["same_batch"]].groupby(["step", "mode"])["loss"].first().unstack()
    # The weights stand still, so the same texts have the same loss whoever computes them.
    assert ((same.div(same["static"], axis=0) - 1).abs() < 1e-5).all(axis=None)
    assert (table[table["mode"] == CONTROL]["padded_tokens"].nunique()) == 1
    # Each mode has each place in the order in turn.
    assert (table.groupby(["step", "mode"])["order"].nunique() == 1).all()
    first = table[table["order"] == 0].groupby("step")["mode"].first()
    assert first.nunique() == 2


def test_the_slowed_rank_is_found_out_without_being_told(runs):
    table = pd.read_csv(runs[0] / "compared" / "slow-rank.csv")
    slowed = table[table["slow_factor"] > 1]
    assert slowed["rank"].unique().tolist() == [1]
    shares = table.groupby(["mode", "rank"])["padded_tokens"].mean()
    assert shares["told", 1] < shares["told", 0]
    found = slowed[slowed["mode"] == "dynamic_calibrated"].set_index("step")
    # A factor of four shows above any noise, and the plan moves tokens off the slow rank.
    assert found["estimated_factor"].iloc[-1] > 1.5 * found["estimated_factor"].iloc[0]
    late = table[(table["mode"] == "dynamic_calibrated") & (table["step"] >= 4)]
    tokens = late.groupby("rank")["padded_tokens"].sum()
    assert tokens[1] < tokens[0]
    # Who plans without knowing goes on as before.
    assert slowed[slowed["mode"] == "not_told"]["estimated_factor"].nunique() == 1


def test_refusals_are_one_line_and_leave_nothing(runs):
    folder, refused, _ = runs
    words = {
        "too few texts for the ranks": "global_batch 1 on 2 ranks: each rank needs at least one",
        "limits below the batch": "global_batch 8: 2 ranks take at most 3 + 3 texts",
        "fewer texts than a batch": "global_batch 8: synthetic has 6 texts",
        "no such rank to slow down": "slow_rank 2: there are 2 ranks",
        "budget below the longest text": "max_tokens 5; the longest",
        "no plan for two ranks": "batches of up to 10000000 tokens: 1 for the whole data set",
        "no such folder": "--dataset_dir nowhere does not exist",
        "a model of one host": "model folder ./bert: does not exist",
        "no number": "the loss is nan since step ",
    }
    assert refused.keys() == words.keys()
    for name, start in words.items():
        assert refused[name].startswith(start), refused[name]
        assert "\n" not in refused[name]
    assert not (folder / "refused").exists()


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"mode": "dynamc"}, "did you mean 'dynamic'"),
        ({"cost_type": "token"}, "did you mean 'tokens'"),
        ({"dataset": "sst"}, "did you mean 'sst2'"),
        ({"precision": "fp8"}, "unknown precision"),
        ({"loss_mean": "words"}, "unknown loss_mean"),
        ({"global_batch": 0}, "global_batch is 0"),
        ({"max_length": 2}, "max_length is 2; it must be at least 3"),
        ({"slow_factor": 0.5}, "at least 1"),
        ({"slow_factor": float("nan")}, "slow_factor is nan"),
        ({"slow_rank": -7}, "slow_rank is -7"),
        ({"seed": -1}, "seed is -1"),
        ({"bucket_cap_mb": 0.0}, "bucket_cap_mb is 0"),
        ({"dropout": 1.0}, "below 1"),
    ],
)
def test_settings_that_cannot_be_are_refused_before_anything_starts(settings, message):
    assert message in problem(MicroBatchConfig, **settings)


def test_a_larger_batch_has_a_larger_buffer():
    # The defaults of the original hold for its global batch only.
    assert MicroBatchConfig(global_batch=48).buffer_size == 48
    assert MicroBatchConfig(global_batch=48, buffer_size=96).buffer_size == 96


CALIBRATED = {"mode": "dynamic", "cost_type": "calibrated"}


@pytest.mark.parametrize(
    ("settings", "word"),
    [
        ({"cost_type": "calibrated"}, "cost_type"),
        ({"mode": "dynamic", "max_tokens": 99}, "max_tokens"),
        ({"refine_every": 3}, "refine_every"),
        ({"mode": "dynamic", "refine_every": 3}, "refine_every"),
        ({"mode": "dynamic", "cost_type": "tokens_sq", "speed_tolerance": 0.0}, "speed_tolerance"),
        ({"synthetic_like": "imdb"}, "synthetic_like"),
        ({"dataset": "synthetic", "dataset_dir": "elsewhere"}, "dataset_dir"),
        ({"vocab_size": 999}, "vocab_size"),
        ({"max_local_batch_cap": 8, "probe_max_batch": 9}, "probe_max_batch"),
        ({"slow_factor": 3.0}, "slow_factor"),
    ],
)
def test_what_has_no_effect_is_said(settings, word):
    [said] = MicroBatchConfig(**settings).without_effect()
    assert said.startswith(word)


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {**CALIBRATED, "refine_every": 3, "speed_tolerance": 0.0},
        {"dataset": "synthetic", "synthetic_like": "imdb", "vocab_size": 999},
        {"dataset": "imdb", "dataset_dir": "elsewhere", "model_name": "small", "vocab_size": 999},
        {"probe_max_batch": 9},
        {"slow_rank": 1, "slow_factor": 3.0},
    ],
)
def test_nothing_is_said_of_what_has_an_effect(settings):
    assert MicroBatchConfig(**settings).without_effect() == []


def test_what_a_run_ignores_is_said_by_rank_0(runs):
    said, nothing = (
        [line for line in log.splitlines() if line.startswith("without effect: ")]
        for log in runs[2]
    )
    assert said == ["without effect: slow_factor: no slow_rank is given"] * 2  # in two runs
    assert nothing == []


def test_bfloat16_is_refused_on_a_gpu_that_has_none(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda **_: False)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "Pretend GPU")
    monkeypatch.setattr(torch.cuda, "device", lambda device: nullcontext())
    worker = Worker(Ranks(), torch.device("cuda", 0), "gloo")
    config = MicroBatchConfig(dataset="synthetic", model_name="small", precision="bf16")
    assert "precision bfloat16: Pretend GPU has no bfloat16" in problem(open_task, config, worker)


def test_a_comparison_slows_a_rank_down_or_leaves_it_out():
    assert "slow_factor is 1" in problem(ModeComparison, slow_factor=1.0)
