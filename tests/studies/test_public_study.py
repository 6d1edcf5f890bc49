"""The study of published rows: tables, units, today's predictor, and the whole study."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from command_line import refused
from public_support import ROW, row, written
from rich.console import Console

from common.errors import UserError
from common.perfmodel.architectures.published_sizes import architecture_of
from common.perfmodel.cluster.clusters import load_cluster
from common.perfmodel.cluster.job import Job
from common.perfmodel.cluster.scale_out import predict_scale_out
from common.perfmodel.one_device.peaks import GPUS
from common.runtime.stage_progress import StageProgress
from common.studies.public import predictor
from common.studies.public.hardware import CLUSTERS, NODES, PEAK_NAMES, regime
from common.studies.public.jobs import (
    PublishedJob,
    bare_name,
    published_samples_per_s,
    read_published,
    with_defaults,
)
from common.studies.public.public import PublicStudy, closing_line, predict_rows, run_study
from common.studies.public.series import LOSS_PER_DOUBLING, LOSSY, with_series

PUBLIC = Path(__file__).parents[3] / "shared" / "measured" / "public-gpus"
GPT2_XL = {
    "gpu": "H100",
    "network": "NVLink",
    "model": "GPT-2 XL",
    "seq_len": 1024,
    "strategy": "DDP",
}
BIG = {"model": "Transformer big (translation)", "seq_len": None, "micro_batch_per_gpu": None}


def test_units_are_converted_by_what_a_sample_is() -> None:
    row = pd.Series(
        {"per_gpu_throughput": 1000.0, "seq_len": 500, "throughput_unit": "tokens/s"}
        | {"params_m": 8030.0, "layers": 32, "hidden": 4096}
    )
    assert published_samples_per_s(row) == 2
    row["throughput_unit"] = "images/s"
    assert published_samples_per_s(row) == 1000
    row["throughput_unit"] = "model TFLOP/s per GPU"
    per_sample = 6 * 8.03e9 * 500 + 6 * 500**2 * 4096 * 32
    assert published_samples_per_s(row) * per_sample == pytest.approx(1000e12)
    row["layers"] = np.nan
    with pytest.raises(UserError, match="without layers"):
        published_samples_per_s(row)


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"throughput_unit": "words/s"}, "unit 'words/s': legal are tokens/s, images/s"),
        ({"global_batch": 17}, "micro-batch × accumulation × replicas is 16, global batch 17"),
        ({"seq_len": "long"}, "seq_len 'long': not a whole number above 0"),
        ({"gpus": 7.5}, "gpus '7.5': not a whole number above 0"),
        ({"throughput": -1}, "throughput '-1.0': not a number above 0"),
        ({"throughput": None}, "no throughput"),
        ({"kind": "inference"}, "kind: legal are training, collective"),
    ],
)
def test_a_row_that_cannot_be_right_is_said_and_the_others_are_read(
    tmp_path: Path, changes: dict, problem: str
) -> None:
    table, lines = read_published(written(tmp_path / "t.csv", [row(8), row(8) | changes, row(4)]))
    assert table["problem"][1].startswith(problem)
    assert (table["problem"][[0, 2]] == "").all()
    assert table["line"][1] == 3
    assert len(lines) == 1
    assert "no column" in lines[0]


def test_a_table_that_cannot_be_read_is_said_in_a_line(tmp_path: Path) -> None:
    def without(column: str) -> Path:
        rows = pd.DataFrame([row(8)]).drop(columns=column)
        rows.to_csv(tmp_path / "t.csv", index=False)
        return tmp_path / "t.csv"

    assert "no column 'gpus'" in refused("study", "public", "--table", str(without("gpus")))
    assert "throughput_unit" in refused("study", "public", "--table", without("throughput_unit"))
    assert "--table FILE" in refused("study", "public")
    assert "no such file" in refused("study", "public", "--table", str(tmp_path / "none.csv"))
    (tmp_path / "empty").mkdir()
    assert "neither training.csv" in refused("study", "public", "--table", tmp_path / "empty")
    assert "reads no published rows" in refused("study", "memory", "--table", "t.csv")


def filled(tmp_path: Path, **changes: object) -> pd.Series:
    """Reads a made row, and fills what it leaves open from its source."""
    table, _ = read_published(written(tmp_path / "t.csv", [row(1, **changes)]))
    return with_defaults(table.iloc[0])


@pytest.mark.parametrize(
    ("gpu", "precision", "sentences"),
    [
        ("V100 16GB", "fp32", 80),
        ("V100 16GB", "amp fp16", 160),
        ("V100 32GB", "amp fp16", 320),
        ("A100 40GB", "tf32", 320),
    ],
)
def test_tokens_of_a_micro_batch_become_sentences(
    tmp_path: Path, gpu: str, precision: str, sentences: int
) -> None:
    changes = BIG | {"gpu": gpu, "precision": precision, "global_batch": None}
    assert filled(tmp_path, **changes)["micro_batch_per_gpu"] == sentences


def test_what_is_published_stays(tmp_path: Path) -> None:
    published = {"model": "bert_base_squad (NVIDIA DeepLearningExamples)", "precision": "tf32"}
    changed = filled(tmp_path, **published, seq_len=128, micro_batch_per_gpu=3, global_batch=3)
    assert (changed["seq_len"], changed["micro_batch_per_gpu"]) == (128, 3)
    assert changed["precision"] == "tf32"
    assert filled(tmp_path, **published, seq_len=None)["seq_len"] == 384
    unknown = filled(tmp_path, model="Gemini", seq_len=None, micro_batch_per_gpu=None)
    assert unknown[["seq_len", "micro_batch_per_gpu"]].isna().all()


def test_a_note_says_what_is_trained_and_how(tmp_path: Path) -> None:
    adapters = filled(tmp_path, note="Fine-Tuning (LoRA) Performance")
    assert adapters["model"] == "LoRA Llama 3.1 8B"
    experts = filled(tmp_path, strategy="FSDP2 8 EP -", note="TE + DeepEP")
    assert experts["strategy"] == "FSDP2 8 EP of a degree not published"
    titan = filled(tmp_path, source_repo="pytorch/torchtitan", precision="")
    assert titan["precision"] == "bf16"


def test_a_models_name_loses_brackets_nodes_and_its_training() -> None:
    names = ("gnmt (NVIDIA)", "Llama3 70B 2-node", "FSDP2 LoRA Llama-3.1-8B", "LoRA Llama3 8B")
    bare = ["gnmt", "Llama3 70B", "Llama-3.1-8B", "Llama3 8B"]
    assert [bare_name(name) for name in names] == bare


def test_the_predictor_is_predict_scale_out() -> None:
    job = PublishedJob(**GPT2_XL, gpus=8, gpus_per_node=8, micro_batch_per_gpu=4, precision="bf16")
    cluster = load_cluster("h100-ib")
    work = Job(architecture_of("gpt2-xl", 1024), batch_size=4)
    step = predict_scale_out(work, cluster, [8], strategies=["DDP"]).rows("weak", "DDP")
    forecast = predictor.predict(job)
    assert forecast.samples_per_s == pytest.approx(4 / step["default_step_s"][0])
    slower = step["default_step_s"][0] / step["step_s"][0]
    assert forecast.low == pytest.approx(4 / step["step_high_s"][0] / slower)
    assert forecast.low < forecast.samples_per_s < forecast.high
    assert forecast.fits
    small = replace(job, gpu="A10", network="PCIe", gpus=1, model="Llama 3.1 8B")
    assert not predictor.predict(small).fits


def test_adapters_and_float8_are_faster_than_a_model_that_is_trained_whole() -> None:
    job = PublishedJob("H100", 1, 8, "NVLink", "Llama 3.1 8B", micro_batch_per_gpu=1, seq_len=512)
    job = replace(job, strategy="DDP", precision="bf16")
    whole, adapters, float8 = (
        predictor.predict(replace(job, **changes))
        for changes in ({}, {"model": "LoRA Llama3 8B"}, {"precision": "float8"})
    )
    assert adapters.samples_per_s / whole.samples_per_s > 1
    assert 1 < float8.samples_per_s / whole.samples_per_s < 2
    assert adapters.fits is None  # frozen weights are not counted


@pytest.mark.slow  # in kind: test_published_models.py, and units above
@pytest.mark.xdist_group("followed")
def test_models_that_are_followed_are_predicted_in_the_rows_unit(tmp_path: Path) -> None:
    # A Transformer-XL's segment is a sample; so is the big Transformer's sentence of 32 tokens.
    shared = BIG | {"gpu": "A100 40GB", "network": "NVSwitch", "precision": "amp fp16"}
    shared |= {"strategy": "DDP", "throughput_unit": "tokens/s", "throughput": 64_000}
    rows = [row(gpus, **shared, global_batch=None) for gpus in (1, 4)]
    table, _ = read_published(written(tmp_path / "t.csv", rows))
    answered = predict_rows(table, predictor.predict, str)
    assert answered["published"].tolist() == [2000, 500]
    assert (answered["reason"] == "").all()
    # Sentences of unequal lengths make GPUs wait by more than they exchange.
    assert answered["predicted"][1] < 0.95 * answered["predicted"][0]


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"model": "Gemini"}, "model not known: Gemini"),
        ({"model": "DoRA Llama 3.1 8B"}, "DPO and distillation are not modelled"),
        (
            {"model": "LoRA Llama 3.1 8B", "strategy": "FSDP2"},
            "adapters whose frozen weights are sharded are not modelled",
        ),
        ({"act_ckpt": "mostly"}, "checkpointing not modelled: mostly"),
        ({"strategy": "DP"}, "strategy not modelled: DP"),
        ({"strategy": "FSDP2 8 EP 8"}, "expert parallelism is not modelled"),
        ({"tp": 2}, "parallelism is not modelled"),
        ({"micro_batch_per_gpu": None}, "micro-batch not published"),
    ],
)
def test_what_is_not_modelled_is_refused_with_the_reason(changes: dict, reason: str) -> None:
    job = GPT2_XL | {"gpus": 8, "gpus_per_node": 8, "precision": "bf16"}
    with pytest.raises(UserError, match=reason):
        predictor.predict(PublishedJob(**job | {"micro_batch_per_gpu": 4} | changes))


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        (
            {"precision": "float8", "gpu": "A100 80GB", "network": "NVSwitch"},
            "precision not modelled: float8 on A100 80GB",
        ),
        ({"cp": 2}, "parallelism is not modelled"),
        ({"gpu": "TITAN RTX 24GB"}, "no cluster of TITAN RTX 24GB over NVLink"),
        ({"gpu": "GTX 1080"}, "GPU not known: GTX 1080"),
        ({"gpus": 16}, "no cluster of H100 over NVLink"),
    ],
)
def test_memory_is_said_where_throughput_is_not(changes: dict, reason: str) -> None:
    job = GPT2_XL | {"gpus": 8, "gpus_per_node": 8, "precision": "bf16", "micro_batch_per_gpu": 4}
    forecast = predictor.predict(PublishedJob(**job | changes))
    assert reason in forecast.reason
    assert np.isnan(forecast.samples_per_s)
    assert forecast.memory_bytes > 12 * 1.5e9 / 16


def test_published_names_lead_to_gpus_and_clusters_that_exist() -> None:
    for (gpu, _), name in (CLUSTERS | NODES).items():
        assert gpu in PEAK_NAMES.values()
        assert GPUS[load_cluster(name).gpu].flops_per_s == GPUS[gpu].flops_per_s
    assert regime(PublishedJob("A10", 4, 4, "PCIe")) == "one node, PCIe"
    assert regime(PublishedJob("H100", 16, 8, "NVLink")) == "nodes"
    assert regime(PublishedJob("V100", 1, 8, "NVLink")) == "one GPU"
    assert regime(PublishedJob("V100", 8, 8, "")) == "not published"


def _run(tmp_path: Path, *tables: Path) -> tuple[Path, str]:
    with (tmp_path / "said").open("w") as file:
        progress = StageProgress(Console(file=file, width=200))
        study = PublicStudy(tuple(map(str, tables)))
        run_dir = run_study(study, str(tmp_path / "out"), progress)
    return run_dir, (tmp_path / "said").read_text()


def test_the_study_scores_the_rest_of_a_table_with_a_bad_row(tmp_path: Path) -> None:
    gpt2 = GPT2_XL | {"throughput_unit": "tokens/s", "gpus_per_node": 8}
    rows = [row(2, **gpt2), row(8, **gpt2), row(8, **gpt2) | {"throughput_unit": "words/s"}]
    run_dir, lines = _run(tmp_path, written(tmp_path / "t.csv", rows))
    assert "t.csv line 4: unit 'words/s'" in lines
    assert closing_line(run_dir).endswith("answered 2 of 3")
    assert " to " not in closing_line(run_dir)  # of one series there is no interval
    assert len(pd.read_csv(run_dir / "series.csv")) == 1
    assert pd.read_csv(run_dir / "refusals.csv")["rows"].tolist() == [1]


def test_a_table_of_collectives_alone_is_legal(tmp_path: Path) -> None:
    collective = {"kind": "collective", "size_bytes": 1024, "time_us": 20.0, "model": "all_reduce"}
    made = {"gpu": ROW["gpu"], "gpus": 8, "network": "NVLink"} | collective
    run_dir, _ = _run(tmp_path, written(tmp_path / "t.csv", [made]))
    assert closing_line(run_dir).endswith("answered 0 of 0")
    assert len(pd.read_csv(run_dir / "collectives.csv")) == 1


@pytest.mark.slow
@pytest.mark.skipif(not PUBLIC.is_dir(), reason="no ../shared/measured/public-gpus")
def test_the_published_rows_are_read_whole_and_no_constant_loss_is_a_stronger_rival() -> None:
    def unasked(job: PublishedJob) -> predictor.Forecast:
        raise UserError("the published rows alone tell it")

    table, _ = read_published(PUBLIC)
    rows = predict_rows(table[table["kind"] == "training"], unasked, str)
    assert len(rows) == 694
    assert (rows["problem"] == "").all()
    rows = with_series(rows)
    lossy = rows.groupby("series")["lost"].first() >= LOSSY
    rows = rows[rows["series"].map(lossy) & ~rows["is_anchor"].astype(bool)]
    rows = rows[(rows["series"] >= 0) & ~rows["model_parallel"]]

    def median_error(loss: float) -> float:
        errors = ((1 - loss) ** rows["doublings"] / rows["efficiency"] - 1).abs()
        return errors.groupby(rows["series"]).median().median()

    assert pytest.approx(min(np.arange(0, 0.2, 0.001), key=median_error)) == LOSS_PER_DOUBLING
