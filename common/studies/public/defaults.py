"""Settings that published rows leave open, as the scripts and notes of their sources have it."""

from __future__ import annotations

import re

import pandas as pd

TOKENS = {
    "BERT-Large SQuAD": 384,
    "bert_base_squad": 384,
    "bert_large_squad": 384,
    "GPT-2 124M": 1024,
    "GPT-2 XL": 1024,
    "GPT-2 XL 1.6B": 1024,
    "gnmt": 50,
    "Transformer big": 32,
}
"""Model → tokens of a sample, as its throughput counts them. SQuAD: NVIDIA/DeepLearningExamples,
scripts. Sentences are *assumed*: GNMT's have 50 tokens in one language at most, and half of it is
taken in each; those of the big Transformer are counted in the target language."""
TOKENS_OF_A_GPU = {
    ("Transformer big", "V100 16GB", "fp32"): 2560,
    ("Transformer big", "V100 16GB", "amp fp16"): 5120,
    ("Transformer big", "V100 32GB", "fp32"): 5120,
    ("Transformer big", "V100 32GB", "amp fp16"): 10_240,
    ("Transformer big", "A100 40GB", "tf32"): 10_240,
    ("Transformer big", "A100 40GB", "amp fp16"): 10_240,
}
"""Model, GPU and precision → tokens of a micro-batch, which the note of each row states."""
PRECISION_OF_SOURCE = {"pytorch/torchtitan": "bf16"}
"""Source → precision of its default configuration."""
ADAPTERS, EXPERT_PARALLEL = "(LoRA)", "DeepEP"
"""Parts of a note that say what the model's name and the strategy do not."""


def bare_name(model: str) -> str:
    """Returns a model's published name without what is in brackets, its nodes, and its training."""
    return re.sub(r" \(.*\)| \d-node|^(FSDP2 )?(LoRA|full fine-tuning) ", "", model)


def with_defaults(row: pd.Series) -> pd.Series:
    """Fills what a row of ``read_published`` leaves open, where its source says it elsewhere."""
    name, filled = bare_name(row["model"]), {}
    if pd.isna(row["seq_len"]) and name in TOKENS:
        filled["seq_len"] = TOKENS[name]
    key = (name, row["gpu"], row["precision"])
    if pd.isna(row["micro_batch_per_gpu"]) and key in TOKENS_OF_A_GPU:
        tokens = TOKENS[name] if pd.isna(row["seq_len"]) else row["seq_len"]
        filled["micro_batch_per_gpu"] = max(1, TOKENS_OF_A_GPU[key] // tokens)
    if not row["precision"]:
        filled["precision"] = PRECISION_OF_SOURCE.get(row["source_repo"], "")
    if ADAPTERS in row["note"]:
        filled["model"] = f"LoRA {row['model']}"
    if EXPERT_PARALLEL in row["note"]:
        filled["strategy"] = row["strategy"].replace("EP -", "EP of a degree not published")
    return pd.Series({**row, **filled})
