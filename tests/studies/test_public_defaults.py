"""What published rows leave open, filled from their sources, and what they publish, kept."""

from __future__ import annotations

from pathlib import Path

import pandas as pd
import pytest
from public_support import row, written

from common.studies.public.defaults import bare_name, with_defaults
from common.studies.public.jobs import read_published

BIG = {"model": "Transformer big (translation)", "seq_len": None, "micro_batch_per_gpu": None}


def filled(tmp_path: Path, **changes: object) -> pd.Series:
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
