"""Text classification for the scaling study: what it learns, what it writes, what it refuses."""

from __future__ import annotations

import json
import re
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch
import yaml
from refusals import problem
from text_scaling_worker import MODEL, TRAINING
from torch.utils.data._utils.pin_memory import pin_memory

from common.data.text_sources import load_texts
from common.data.text_splits import synthetic_texts
from common.data.text_tokens import hash_texts
from common.models.text_classifier import TextClassifier, TextClassifierConfig
from common.runtime.group.process_group import Worker
from common.runtime.processes.ranks import Ranks
from common.training.texts.config import TextScalingConfig
from common.training.texts.data import Collate, IndexedTexts, open_loader
from common.training.texts.files import FOLDER, known_experiments, parse_experiment

CPU = torch.device("cpu")
STEPS = 35 // 8
"""Of an epoch of 35 texts in global batches of 8; three texts are left out."""


@pytest.fixture(scope="module")
def runs(rank_server, tmp_path_factory) -> tuple[Path, dict[str, str]]:
    """Returns the folder of all runs, and what was said of each refusal."""
    folder, draw = tmp_path_factory.mktemp("runs"), np.random.default_rng(0)
    (folder / "texts").mkdir()
    for split in ("train", "test"):
        words = [draw.integers(300, size=1 + number % 40).astype(str) for number in range(90)]
        texts = {"class": draw.integers(1, 5, 90), "title": "a title", "text": words}
        table = pd.DataFrame(texts).assign(text=lambda table: table["text"].map(" ".join))
        table.to_csv(folder / "texts" / f"{split}.csv", header=False, index=False)
    script = Path(__file__).with_name("text_scaling_worker.py")
    rank_server.succeed(script, folder, ranks=1)
    done = rank_server.succeed(script, folder, ranks=2, timeout_s=110)
    refused = [{one["refused"]: one["error"] for one in done.lines(rank)} for rank in range(2)]
    assert refused[0] == refused[1]  # no rank goes on alone
    return folder, refused[0]


def losses(folder: Path) -> np.ndarray:
    return pd.read_csv(folder / "losses.csv")["loss"].to_numpy()


@pytest.mark.two_ranks
@pytest.mark.parametrize("name", ["two-ranks", "accumulated"])
def test_without_dropout_ranks_learn_what_one_process_learns(runs, name):
    one, several = losses(runs[0] / "one-rank"), losses(runs[0] / name)
    assert len(one) == len(several) == 2 * STEPS
    assert np.abs(one - several).max() <= 1e-5
    accuracies = [
        pd.read_csv(runs[0] / run / "metrics.csv")["val_acc"].tolist() for run in ("one-rank", name)
    ]
    assert accuracies[0] == accuracies[1]
    # Each text of the validation split counts once, on whichever rank.
    assert np.allclose(np.array(accuracies[1]) * 21 % 1, 0)
    # What is left in float32 is rounding: nothing else tells the ranks from one process.
    exact = [losses(runs[0] / f"{run}-fp64") for run in ("one-rank", "two-ranks")]
    assert np.abs(exact[0] - exact[1]).max() <= 1e-12


@pytest.mark.two_ranks
def test_one_process_learns_what_a_plain_loop_learns(runs):
    # No loader, no step, no schedule of ours: PyTorch's sampler has this order without ranks.
    split = TRAINING["max_train_samples"]
    texts = load_texts("ag_news", dataset_dir=runs[0] / "texts", max_samples=split, seed=42)
    texts = hash_texts(texts, MODEL["vocab_size"], MODEL["max_length"])
    torch.manual_seed(TRAINING["seed"])
    shape = {name: MODEL[name] for name in ("d_model", "n_head", "n_layer", "d_ff")}
    model = TextClassifier(
        TextClassifierConfig(MODEL["vocab_size"], 4, MODEL["max_length"], **shape)
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.01)
    expected = []
    for epoch in range(2):
        order = torch.randperm(split, generator=torch.Generator().manual_seed(7 + epoch)).tolist()
        for step in range(STEPS):
            chosen = order[8 * step : 8 * step + 8]
            ids = [torch.tensor(texts.tokens[index]) for index in chosen]
            padded = torch.nn.utils.rnn.pad_sequence(ids, batch_first=True)
            # Zero is padding, and no word's number.
            mask = torch.nn.utils.rnn.pad_sequence([torch.ones_like(i) for i in ids], True)
            loss = torch.nn.functional.cross_entropy(
                model(padded, mask), torch.tensor(texts.labels[chosen])
            )
            done = epoch * STEPS + step
            rate = (done + 1) / 4 if done < 3 else (2 * STEPS - done) / (2 * STEPS - 3)
            optimizer.param_groups[0]["lr"] = 1e-3 * rate
            optimizer.zero_grad()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            expected.append(loss.item())
    assert np.abs(losses(runs[0] / "one-rank") - expected).max() <= 1e-5


@pytest.mark.two_ranks
@pytest.mark.parametrize("name", ["one-rank", "two-ranks", "accumulated", "everything"])
def test_every_sample_reaches_the_model_once_an_epoch(runs, name):
    config = yaml.safe_load((runs[0] / name / "config.yaml").read_text())
    table = pd.read_csv(runs[0] / name / "samples.csv")
    expected = config["steps_per_epoch"] * config["global_batch"]
    assert (table.groupby("epoch")["processed"].sum() == expected).all()
    assert (table["distinct_all_ranks"] == expected).all()
    assert (table["shared"] == 0).all()
    assert (table["data_samples"] == config["train_texts"]).all()
    assert table["order"].nunique() == len(table)  # other texts on each rank, and in each epoch


@pytest.mark.two_ranks
def test_a_missing_sampler_shows_in_what_was_counted(runs):
    table = pd.read_csv(runs[0] / "no-sampler" / "samples.csv")
    assert (table["processed"] == 35 // 4 * 4).all()
    assert (table["shared"] == table["distinct"]).all()
    assert (table["distinct_all_ranks"] == 35 // 4 * 4).all()


@pytest.mark.two_ranks
def test_a_run_writes_the_originals_metrics_and_where_its_time_went(runs):
    folder = runs[0] / "two-ranks"
    header = "epoch,train_loss,train_time,val_loss,val_acc\n1,"
    assert (folder / "metrics.csv").read_text().startswith(header)
    metrics = pd.read_csv(folder / "metrics.csv").set_index("epoch")
    by_epoch = pd.read_csv(folder / "losses.csv").groupby("epoch")["loss"].mean()
    assert metrics["train_loss"].tolist() == pytest.approx(by_epoch.tolist())
    epochs = pd.read_csv(folder / "epochs.csv")
    assert epochs[["epoch", "rank"]].to_numpy().tolist() == [[1, 0], [1, 1], [2, 0], [2, 1]]
    assert (epochs["samples"] == STEPS * 4).all()
    parts = epochs["train_time_s"] + epochs["evaluation_time_s"]
    assert epochs["epoch_time_s"].tolist() == pytest.approx(parts.tolist())
    steps = pd.read_csv(folder / "steps.csv")
    assert len(steps) == 2 * 2 * STEPS
    spent = steps.groupby(["rank", "epoch"])["step_time_ms"].sum() / 1e3
    whole = epochs.set_index(["rank", "epoch"])["train_time_s"]
    assert (spent <= whole.loc[spent.index]).all()
    record = json.loads((folder / "environment.json").read_text())
    assert (record["label"], record["status"]) == ("assignment4-text", "complete")


@pytest.mark.two_ranks
def test_every_option_at_once(runs):
    folder = runs[0] / "everything"
    steps = pd.read_csv(folder / "steps.csv")
    config = yaml.safe_load((folder / "config.yaml").read_text())
    assert (steps["micro_batches"] == 2).all()
    assert (steps["padded_tokens"] == 2 * 4 * MODEL["max_length"]).all()
    # Two bytes per parameter, once a step although there are two micro-batches.
    assert (steps["exchanged_bytes"] == 2 * config["parameters"]).all()
    assert (folder / "probes.csv").is_file()
    assert (folder / "allreduce-samples-bfloat16.csv").is_file()
    facts = pd.read_csv(folder / "facts.csv")
    assert facts["compute_dtype"].tolist() == ["bfloat16"] * 2
    assert not facts["gradient_as_bucket_view"].any()  # its options turn them off


@pytest.mark.two_ranks
def test_what_cannot_be_trained_is_one_line_on_every_rank(runs):
    words = {
        "fewer texts than a step": "35 texts, a step takes 36 (2 ranks × accumulation 1 × batch_",
        "another total": "total_batch_size 32: 2 ranks × accumulation 1 × 4 texts per rank are 8",
        "no such folder": "nowhere does not exist",
        "no number": "the loss is nan since step ",
    }
    assert runs[1].keys() == words.keys()
    for name, said in runs[1].items():
        assert words[name] in said
        assert "\n" not in said


SMALL = {"d_model": 128, "n_head": 4, "n_layer": 2, "d_ff": 256, "max_length": 128, "workers": 2}
SMALL |= {"batch_size": 32, "accumulation": 1}
LARGE = {"d_model": 256, "n_head": 8, "n_layer": 4, "d_ff": 1024, "max_length": 256, "workers": 4}
LARGE |= {"batch_size": 128, "lr": 1e-3, "weight_decay": 0.01, "warmup_steps": 500}
LARGE |= {"max_gradient_norm": 1.0, "persistent_workers": True}
EVERYWHERE = {"dropout": 0.1, "vocab_size": 20_000, "epochs": 20, "seed": 42}
PUBLISHED = {
    "ag_news_single_gpu_20ep": {"dataset": "ag_news"} | SMALL,
    "ag_news_ddp_4gpu_20ep": {"dataset": "ag_news"} | SMALL,
    "imdb_single_gpu_20ep": {"dataset": "imdb"} | SMALL,
    "imdb_ddp_single_node_20ep": {"dataset": "imdb"} | SMALL,
    "ag_news_single_gpu_optimized": {"dataset": "ag_news"} | LARGE,
    "ag_news_ddp_4gpu_20ep_optimized": {"dataset": "ag_news"}
    | LARGE
    | {"accumulation": 4, "precision": "fp16", "static_graph": True, "cudnn_benchmark": True}
    | {"gradient_as_bucket_view": True},
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_the_six_experiments_are_the_originals(name):
    config = parse_experiment(["--config", str(FOLDER / f"{name}.yaml")])
    assert config.experiment_name == name
    found = {setting: getattr(config, setting) for setting in PUBLISHED[name] | EVERYWHERE}
    assert found == PUBLISHED[name] | EVERYWHERE
    assert set(known_experiments()) == set(PUBLISHED)


def test_flags_win_over_a_preset_and_a_preset_over_the_experiment_it_names(tmp_path):
    preset = tmp_path / "preset.yaml"
    preset.write_text(
        "stages: []\n"
        "train_text: {experiment: ag_news_ddp_4gpu_20ep, epochs: 3, batch_size: 8, workers: 0}\n"
    )
    config = parse_experiment(["--config", str(preset), "--epochs", "1", "--batch-size", "4"])
    assert (config.epochs, config.batch_size, config.workers, config.d_model) == (1, 4, 0, 128)
    assert config.experiment == config.experiment_name == "ag_news_ddp_4gpu_20ep"
    # A flag may take back what a file switches on.
    config = parse_experiment(
        ["--experiment", "ag_news_single_gpu_optimized", "--no-persistent-workers"]
    )
    assert not config.persistent_workers
    preset.write_text("epochs: 5\nmodel: {d_model: 64}\n")
    assert parse_experiment([f"--config={preset}"]).d_model == 64


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("training: {epoch: 3}", "training: unknown setting 'epoch'; did you mean 'epochs'"),
        ("model: {lr: 0.1}", "model: lr belongs in section training"),
        ("modle: {d_model: 3}", "unknown setting 'modle'; did you mean 'model'"),
        ("d_modle: 3", "did you mean 'd_model'"),
        ("training: {epochs: 0}", "epochs is 0; it must be above 0"),
        ("training: {epochs: many}", "many"),
        ("training: {epochs: [1, 2]}", "expected a single value"),
        ("training: {epochs: }", "epochs has no value"),
        ("training: {cudnn_benchmark: 3}", "expected true or false"),
        ("training: {epochs: true}", "not true or false"),
        ("training: 3", "section 'training' holds no"),
        ("train_text: 3", "section 'train_text' holds no"),
        ("stages: []", "no section 'train_text'"),
        ("experiment: ag_news_ddp", "did you mean 'ag_news_ddp_4gpu_20ep'"),
        ("experiment: nowhere.yaml", "nowhere.yaml: No such file"),
        ("model: {d_model: 130}", "130 is not a multiple of n_head 4"),
        ("model: {dropout: 1.0}", "below 1"),
        ("model: {vocab_size: 1}", "vocab_size 1: at least 2"),
        ("model: {max_length: 0}", "max_length 0: at least 1"),
        ("distributed: {compression: fp8}", "unknown compression"),
        ("distributed: {bucket_cap_mb: 0}", "bucket_cap_mb is 0"),
        ("data: {dataset: agnews}", "did you mean 'ag_news'"),
        ("data: {pad: long}", "did you mean 'longest'"),
        ("training: {precision: fp8}", "unknown precision"),
    ],
)
def test_a_wrong_file_is_one_line(tmp_path, content, message):
    path = tmp_path / "own.yaml"
    path.write_text(content)
    assert message in problem(parse_experiment, ["--config", str(path)])


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--config"], "--config: expected one argument"),
        (["--config", "nowhere.yaml"], "nowhere.yaml: No such file"),
        (["--experiment", "imdb_20ep"], "unknown experiment 'imdb_20ep'; did you mean 'imdb_"),
        (["--epoch", "3"], "--epochs"),
    ],
)
def test_a_wrong_command_line_is_one_line(argv, message):
    assert message in problem(parse_experiment, argv)


def test_what_has_no_effect_is_said():
    def said(**settings: object) -> str:
        return " | ".join(TextScalingConfig(**settings).without_effect(1, "cpu", 1_000))

    assert said() == ""
    assert "persistent_workers" in said(persistent_workers=True, workers=0)
    assert "cudnn_benchmark" in said(cudnn_benchmark=True)
    for setting in ({"compression": "fp16"}, {"bucket_cap_mb": 4.0}, {"static_graph": True}):
        assert re.match(f"{next(iter(setting))}.*: one rank sends nothing", said(**setting))
    assert "the run has 1000 steps" in said(warmup_steps=1_000)
    two_ranks = TextScalingConfig(compression="fp16", bucket_cap_mb=4.0, static_graph=True)
    assert not list(two_ranks.without_effect(2, "cuda", 1_000))


def test_a_total_that_is_what_the_parts_come_to_is_taken():
    worker = Worker(Ranks(0, 4, 0, 4, "torchrun"), CPU, "gloo")
    config = TextScalingConfig(batch_size=32, accumulation=2, total_batch_size=256)
    assert config.resolved(worker).precision == "float32"
    assert config.resolved(worker).experiment_name == "ag_news_4_ranks"


@pytest.mark.parametrize(("device", "pinned"), [(CPU, False), (torch.device("cuda", 0), True)])
def test_a_gpu_gets_batches_from_pinned_memory(monkeypatch, device, pinned):
    data = IndexedTexts(synthetic_texts("ag_news", 8, max_length=20))
    worker = Worker(Ranks(0, 1, 0, 1, "torchrun"), device, "gloo")
    loader = open_loader(data, Collate(0), TextScalingConfig(batch_size=2, workers=0), worker)
    assert loader.pin_memory == pinned
    # Without a GPU no memory can be pinned. DataLoader asks what a batch is made of for it.
    asked = []
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda one: asked.append(one.shape) or one)
    batch = pin_memory(loader.collate_fn([data[0], data[1]]))
    assert asked == [one.shape for one in (*batch.inputs, batch.targets)]


def test_a_batch_is_padded_to_its_longest_text_or_to_a_given_width():
    texts = synthetic_texts("ag_news", 5, max_length=20)
    data = IndexedTexts(texts)
    for width in (0, 30):
        batch = Collate(texts.pad_id, width)([data[index] for index in (3, 1)])
        ids, mask = batch.inputs
        expected = [texts.tokens[index] for index in (3, 1)]
        longest = max(map(len, expected))
        assert ids.shape == mask.shape == (2, width or longest)
        assert [row[kept].tolist() for row, kept in zip(ids, mask, strict=True)] == expected
        assert (ids[~mask] == texts.pad_id).all()
        assert batch.identities.tolist() == [3, 1]
        assert batch.targets.tolist() == texts.labels[[3, 1]].tolist()
        found = (batch.tokens, batch.padded_tokens, batch.longest)
        assert found == (sum(map(len, expected)), 2 * (width or longest), longest)
