"""One of two ranks for test_micro_batch_runs.py: ``micro_batch_runs_worker.py FOLDER [DATASETS]``.

Trains in every mode and compares all of them, in one process group; then tries what must be
refused, and prints a JSON line for each refusal. With DATASETS it trains on real texts, and no
more.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from unittest import mock

from transformers import BertConfig

from common.benchmarks.micro_batches import compare_modes
from common.errors import RunFailed, UserError
from common.models import text_classifier
from common.models.text_classifier import TextClassifierConfig
from common.runtime.group.process_group import process_group
from common.scheduling.modes import MODES
from common.training.micro_batches.config import MicroBatchConfig
from common.training.texts.text_trainer import train_text

TEXTS = {
    **{"dataset": "synthetic", "model_name": "small", "vocab_size": 200, "max_length": 16},
    **{"max_train_samples": 200, "global_batch": 8, "max_local_batch_cap": 7, "device": "cpu"},
}
TRAINING = {"steps": 4, "lr": 1e-3, "warmup_steps": 2, "eval_samples": 33, "eval_every": 2}
BUDGET = {"mode": "token_budget"}
REFUSED = {
    "too few texts for the ranks": {"global_batch": 1},
    "limits below the batch": {"max_local_batch_cap": 3},
    "fewer texts than a batch": {"max_train_samples": 6},
    "no such rank to slow down": {"slow_rank": 2},
    "budget below the longest text": BUDGET | {"max_tokens": 5},
    "no plan for two ranks": BUDGET | {"max_tokens": 10**7, "max_local_batch_cap": 200},
    "no such folder": {"dataset": "imdb", "dataset_dir": "nowhere"},
}


def train_on_real_texts(common: dict, datasets: str) -> None:
    """Trains on the same batches in two modes."""
    for mode in ("static", "dynamic"):
        real = {"dataset": "sst2", "dataset_dir": datasets, "mode": mode}
        train_text(MicroBatchConfig(**common | TRAINING | real, run_id=f"sst2-{mode}"))


def run_everything(common: dict) -> None:
    """Runs every mode, and what must be refused."""
    for mode in MODES:
        train_text(MicroBatchConfig(**common, **TRAINING, mode=mode, run_id=mode))
    by_cost = {"mode": "dynamic", "cost_type": "calibrated", "refine_every": 2}
    slowed = {"slow_rank": 1, "slow_factor": 8.0, "steps": 5}
    train_text(MicroBatchConfig(**common | TRAINING | by_cost | slowed, run_id="calibrated"))
    for mode in ("dynamic", "static"):
        tokens = {"mode": mode, "loss_mean": "tokens", "precision": "fp64"}
        tokens["slow_factor"] = 3.0  # of no rank, which is said
        train_text(MicroBatchConfig(**common, **TRAINING, **tokens, run_id=f"tokens-{mode}"))
    for name, settings in REFUSED.items():
        with told(name, UserError):
            train_text(MicroBatchConfig(**common | settings, run_id="refused"))
    apart = {"lr": 1e38, "warmup_steps": 0, "log_every": 2, "mode": "dynamic"}
    with told("no number", RunFailed):
        train_text(MicroBatchConfig(**common | TRAINING | apart, run_id="apart"))
    train_with_a_model_of_one_host(common)


@contextmanager
def told(name: str, kind: type[Exception]) -> Iterator[None]:
    """Prints the error of the block as a JSON line."""
    try:
        yield
    except kind as error:
        print(json.dumps({"refused": name, "error": str(error)}), flush=True)


def compare(common: dict) -> None:
    """Compares all modes, then those that a slowed rank makes plan otherwise."""
    few = {"steps": 2, "warmup": 1, "slow_steps": 6, "refine_every": 1, "slow_factor": 4.0}
    compare_modes.main(compare_modes.ModeComparison(**common, **few, run_id="compared"))


def train_with_a_model_of_one_host(common: dict) -> None:
    """Trains with a model that is in rank 0's folder only, as on hosts that share none."""
    here = Path(common["output_dir"]).absolute() / f"host{os.environ['RANK']}"
    here.mkdir()
    os.chdir(here)
    if os.environ["RANK"] == "0":
        sizes = {"hidden_size": 16, "num_attention_heads": 2, "num_hidden_layers": 1}
        BertConfig(vocab_size=200, intermediate_size=32, **sizes).save_pretrained("bert")
    with told("a model of one host", UserError):
        train_text(MicroBatchConfig(**common | {"model_name": "./bert", "run_id": "refused"}))


folder, *datasets = sys.argv[1:]
with process_group("cpu"):
    common = TEXTS | {"output_dir": folder}
    if datasets:
        train_on_real_texts(common, datasets[0])
    else:
        compare(common)  # whose times are looked at, of the model as it is
        smaller = partial(TextClassifierConfig, d_model=128, n_layer=2, d_ff=512)
        with mock.patch.object(text_classifier, "TextClassifierConfig", smaller):
            run_everything(common)
