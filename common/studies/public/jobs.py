"""Rows of a published table as jobs, and what a predictor answers to one.

Settings that rows leave open are filled in as the scripts and notes of their sources have them.

A predictor is a function ``PublishedJob → Forecast`` that raises UserError where it cannot answer;
the error's text is the reason that is counted. The study knows nothing else of a predictor.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, fields
from pathlib import Path

import numpy as np
import pandas as pd

from common.csv_tables import read_table
from common.errors import UserError

KINDS = {"training": "training.csv", "collective": "collectives.csv"}
REQUIRED = ("kind", "gpu", "gpus")
REQUIRED_OF_KIND = {
    "training": ("model", "throughput_unit"),
    "collective": ("size_bytes", "time_us"),
}
TEXTS = ("source_repo", "source_path", "network", "model", "precision", "strategy")
MORE_TEXTS = ("act_ckpt", "compile", "throughput_unit", "note")
SIZES = ("gpus_per_node", "params_m", "layers", "hidden", "seq_len", "micro_batch_per_gpu")
MORE_SIZES = ("grad_accum", "global_batch", "tp", "pp", "cp", "throughput", "per_gpu_throughput")
MEASURED = ("memory_gib", "size_bytes", "time_us")
NUMBERS = ("gpus", *SIZES, *MORE_SIZES, *MEASURED)
OPTIONAL = {
    "training": (*TEXTS, *MORE_TEXTS, *SIZES, *MORE_SIZES, "memory_gib"),
    "collective": ("source_repo", "source_path", "network", "model", "strategy", "note"),
}
WHOLE = ("gpus", "gpus_per_node", "seq_len", "micro_batch_per_gpu", "grad_accum", "tp", "pp", "cp")
SAMPLE_UNITS = ("images/s", "sequences/s")
TFLOPS = "model TFLOP/s"
UNITS = ("tokens/s", *SAMPLE_UNITS, TFLOPS)
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


@dataclass(frozen=True)
class PublishedJob:
    """A published training job, as a predictor sees it. None and "" are what was not published.

    Attributes:
        gpu: name of the GPU, as published.
        gpus, gpus_per_node: GPUs of the job and of a node.
        network: links inside of a node and between nodes, in words.
        model: name of the model.
        params_m: parameters of the model in millions.
        seq_len: tokens of a sample.
        micro_batch_per_gpu: samples of a GPU's forward pass.
        grad_accum: forward passes per update.
        global_batch: samples per update on all GPUs.
        precision, strategy: words of the source.
        tp, pp, cp: degrees of tensor, pipeline and context parallelism.
        act_ckpt: activation checkpointing: none, full, selective.
        compile: yes or no.
        source_repo, source_path: where it was published.
    """

    gpu: str
    gpus: int
    gpus_per_node: int | None = None
    network: str = ""
    model: str = ""
    params_m: float | None = None
    seq_len: int | None = None
    micro_batch_per_gpu: int | None = None
    grad_accum: int | None = None
    global_batch: float | None = None
    precision: str = ""
    strategy: str = ""
    tp: int = 1
    pp: int = 1
    cp: int = 1
    act_ckpt: str = ""
    compile: str = ""
    source_repo: str = ""
    source_path: str = ""

    @property
    def is_model_parallel(self) -> bool:
        """Returns whether tensor, pipeline or context parallelism divides the model."""
        return self.tp * self.pp * self.cp > 1 or "TP" in self.strategy.split()


@dataclass(frozen=True)
class Forecast:
    """A prediction for a job.

    Attributes:
        samples_per_s: sequences or images per second and GPU; NaN where ``reason`` says why not.
        low, high: ends of the 90 % interval of ``samples_per_s``.
        memory_bytes: a GPU's peak, allocated or reserved as the source publishes it; None where it
            is not predicted.
        fits: whether the job fits in the GPU's memory; None where that is not predicted.
        largest_micro_batch: most samples of a micro-batch that fit; None where not predicted.
        reason: why the throughput is not predicted, where the memory still is.
    """

    samples_per_s: float
    low: float
    high: float
    memory_bytes: float | None = None
    fits: bool | None = None
    largest_micro_batch: int | None = None
    reason: str = ""


Predictor = Callable[[PublishedJob], Forecast]


def read_published(path: Path | str) -> tuple[pd.DataFrame, list[str]]:
    """Reads a table of published rows, or a folder that holds training.csv or collectives.csv.

    Returns:
        The rows with ``file`` and ``line`` added, text where a name was published and "" where not,
        and ``problem``, which says why a row cannot be used (else ""); and a line about each column
        that is missing and may be.

    Raises UserError: there is no such file, it is no table, or a column is missing that has to be.
    """
    path = Path(path)
    files = [path]
    if path.is_dir():
        files = [path / name for name in KINDS.values() if (path / name).is_file()]
        if not files:
            raise UserError(f"--table {path}: neither {' nor '.join(KINDS.values())} is in it")
    tables, lines = [], []
    for file in files:
        table, missing = _read(file)
        tables.append(table)
        if missing:
            lines.append(f"{file.name}: no column {', '.join(missing)}: taken as not published")
    return pd.concat(tables, ignore_index=True), lines


def _read(file: Path) -> tuple[pd.DataFrame, list[str]]:
    table = read_table(file, REQUIRED)
    kinds = [kind for kind in KINDS if (table["kind"] == kind).any()]
    needed = {column: None for kind in kinds for column in REQUIRED_OF_KIND[kind]}
    if absent := [column for column in needed if column not in table]:
        raise UserError(f"{file}: no column {', '.join(absent)}, which rows of {kinds[0]} need")
    optional = dict.fromkeys(column for kind in kinds for column in OPTIONAL[kind])
    missing = [column for column in optional if column not in table]
    texts = ("gpu", *TEXTS, *MORE_TEXTS)
    table = table.reindex(columns=dict.fromkeys([*table, *texts, *NUMBERS]))
    table = table.assign(file=file.name, line=np.arange(len(table)) + 2, problem="")
    for column in texts:
        table[column] = table[column].astype(object).fillna("").astype(str)
    for column in NUMBERS:
        _check_numbers(table, column)
    _note(table, ~table["kind"].isin(list(KINDS)), "kind: legal are " + ", ".join(KINDS))
    _check_training(table)
    collective = table["kind"] == "collective"
    unusable = ~((table["size_bytes"] > 0) & (table["time_us"] > 0))
    _note(table, collective & unusable, "size_bytes and time_us: both have to be above 0")
    return table, missing


def _check_numbers(table: pd.DataFrame, column: str) -> None:
    values = pd.to_numeric(table[column], errors="coerce")
    bad = table[column].notna() & ~(np.isfinite(values) & (values > 0))
    if column in WHOLE:
        bad |= table[column].notna() & (values % 1 != 0)
    kind = "a whole number" if column in WHOLE else "a number"
    for row in table.index[bad]:
        _note(table, table.index == row, f"{column} '{table[column][row]}': not {kind} above 0")
    table[column] = values.where(~bad)


def _check_training(table: pd.DataFrame) -> None:
    training = table["kind"] == "training"
    unit = table["throughput_unit"]
    for name in unit[training & ~unit.map(lambda text: text.startswith(UNITS))].unique():
        _note(table, training & (unit == name), f"unit '{name}': legal are {', '.join(UNITS)}")
    per_gpu = table["per_gpu_throughput"].fillna(table["throughput"] / table["gpus"])
    table["per_gpu_throughput"] = per_gpu
    _note(table, training & per_gpu.isna(), "no throughput")
    _note(table, table["gpus"].isna(), "no number of GPUs")
    parts = table[["tp", "pp", "cp"]].fillna(1).prod(axis=1)
    replicas = table["gpus"] / parts
    product = table["micro_batch_per_gpu"] * table["grad_accum"] * replicas
    wrong = product.notna() & table["global_batch"].notna()
    wrong &= ~np.isclose(product, table["global_batch"], rtol=1e-6)
    for row in table.index[training & wrong]:
        text = f"micro-batch × accumulation × replicas is {product[row]:g}"
        text += f", global batch {table['global_batch'][row]:g}"
        _note(table, table.index == row, text)


def _note(table: pd.DataFrame, where: pd.Series, problem: str) -> None:
    """Writes a problem of these rows down; the first of a row stays."""
    table.loc[where & (table["problem"] == ""), "problem"] = problem


def job_of(row: pd.Series) -> PublishedJob:
    """Returns the job of a row that ``read_published`` gave and found no problem in."""
    values = {}
    for field in fields(PublishedJob):
        value = row[field.name]
        if not isinstance(value, str):
            if pd.isna(value):
                continue
            value = int(value) if field.name in WHOLE else float(value)
        values[field.name] = value
    return PublishedJob(**values)


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


def published_samples_per_s(row: pd.Series) -> float:
    """Converts a row's throughput per GPU to samples (sequences or images) per second.

    A sequence costs ``6 N s + 6 s² h L`` model FLOPs with N parameters, s tokens, width h, L layers
    and causal attention, and without recomputation (Narayanan et al., arXiv 2104.04473, equation 3,
    half of its attention), which is how the source of that unit counts.

    Raises UserError, which says what is missing, where the unit needs what was not published.
    """
    throughput, unit = row["per_gpu_throughput"], row["throughput_unit"]
    if unit.startswith(SAMPLE_UNITS):
        return throughput
    needed = ["seq_len"] if unit.startswith("tokens/s") else ["seq_len", "params_m", "layers"]
    needed += ["hidden"] if unit.startswith(TFLOPS) else []
    if missing := [name for name in needed if pd.isna(row[name])]:
        raise UserError(f"{unit} without {', '.join(missing)}: no samples/s")
    if unit.startswith("tokens/s"):
        return throughput / row["seq_len"]
    tokens = row["seq_len"]
    linear = 6 * row["params_m"] * 1e6 * tokens
    attention = 6 * tokens**2 * row["hidden"] * row["layers"]
    return throughput * 1e12 / (linear + attention)
