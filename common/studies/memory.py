"""``ddplab study memory``: is the predicted peak of a training step the one that is seen?

Two oracles that know nothing of the formulas: an operator-level tracker on fake tensors, for the
published sizes of GPT-2 (``memory-tracked.csv``), and PyTorch's CPU allocator under a real step,
for small ones and every option (``memory-allocator.csv``) and for other models
(``memory-models.csv``). ``largest-batch.csv`` is what follows.
"""

from __future__ import annotations

import itertools
import multiprocessing
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated

import pandas as pd
import torch

from common.benchmarks.one_device.memory_tracker import measure_peak, track_step
from common.perfmodel.one_device.memory import predict_memory
from common.perfmodel.one_device.memory_fit import largest_batch
from common.perfmodel.one_device.training_memory import LIBRARIES_BYTES
from common.perfmodel.one_device.workload import Workload
from common.runtime.machine.environment import describe_environment
from common.runtime.records.study import say_tables, study_run, with_verdicts
from common.runtime.stage_progress import StageProgress
from common.settings import AtLeast, Settings
from common.studies import model_memory
from common.studies.model_cases import ModelCase

Case = Workload | ModelCase
GB = 10**9
KEYS = (
    "model",
    "batch_size",
    "seq_len",
    "precision",
    "attention",
    "activation_checkpointing",
    "loss_chunks",
    "gradient_accumulation",
    "optimizer",
    "optimizer_implementation",
)
SMALL = {"model": "gpt2-nano", "batch_size": 8, "seq_len": 256}
OPTIONS = (
    {},
    {"attention": "eager"},
    {"activation_checkpointing": True},
    {"activation_checkpointing": True, "attention": "eager"},
    {"precision": "bfloat16"},
    {"precision": "bfloat16", "attention": "eager"},
    {"precision": "bfloat16", "activation_checkpointing": True},
    {"loss_chunks": 8},
    {"loss_chunks": 8, "precision": "bfloat16"},
    {"loss_chunks": 8, "activation_checkpointing": True},
    {"loss_chunks": 8, "activation_checkpointing": True, "precision": "bfloat16"},
    {"loss_chunks": 8, "activation_checkpointing": True, "attention": "eager"},
    {"optimizer_implementation": "for-loop", "batch_size": 1, "seq_len": 64},
    {"optimizer_implementation": "foreach", "batch_size": 1, "seq_len": 64},
    {"optimizer": "sgd"},
    {"optimizer": "sgd", "batch_size": 1, "seq_len": 64},
    {"gradient_accumulation": 2},
    {"gradient_accumulation": 2, "batch_size": 1, "seq_len": 64},
    {"vocab_multiple": 100, "seq_len": 100},
)
"""Options of the steps that the allocator measures, on top of ``SMALL`` and a fused optimizer."""


@dataclass(frozen=True)
class MemoryStudy(Settings):
    """Settings of the study: every combination of these is predicted and tracked."""

    models: tuple[str, ...] = ("gpt2", "gpt2-medium", "gpt2-large", "gpt2-xl")
    """Names of GPT-2 configurations."""
    batch_sizes: tuple[int, ...] = (1, 4, 16)
    """Sequences of a batch, one case each."""
    seq_lens: tuple[int, ...] = (512, 1024)
    """Tokens of a sequence, one case each."""
    attentions: tuple[str, ...] = ("sdpa", "eager")
    """Implementations of attention: sdpa, eager."""
    checkpointing: tuple[bool, ...] = (False, True)
    """Whether activations are checkpointed, one case each."""
    capacities_gb: tuple[float, ...] = (24, 40, 80, 141)
    """Memories whose largest batch is computed, in GB."""
    processes: Annotated[int, AtLeast(1)] = 2
    """Processes that measure at the same time."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.workloads()

    def workloads(self) -> list[Workload]:
        """Returns a workload for each combination, by model in the order given."""
        combinations = itertools.product(
            self.models, self.batch_sizes, self.seq_lens, self.attentions, self.checkpointing
        )
        return [
            Workload(
                model=model,
                batch_size=batch_size,
                seq_len=seq_len,
                attention=attention,
                activation_checkpointing=checkpointing,
                optimizer_implementation="fused",
            )
            for model, batch_size, seq_len, attention, checkpointing in combinations
        ]


SETTINGS = MemoryStudy


def run_study(study: MemoryStudy, output_dir: str, progress: StageProgress) -> Path:
    """Measures with both oracles and judges the predictions; returns the run directory."""
    small = [
        replace(Workload(**SMALL, optimizer_implementation="fused"), **option) for option in OPTIONS
    ]
    environment = describe_environment(None, "cpu", 1, "tensors without data")
    with study_run("memory", study, output_dir, progress, environment) as run:
        with progress.stage(f"allocator, {len(small)} real steps of gpt2-nano") as update:
            allocated = compared(study, _allocated, small, _described, update)
        run.write_table("memory-allocator.csv", allocated)
        cases = model_memory.CASES
        with progress.stage(f"allocator, {len(cases)} real steps of other models") as update:
            models = compared(study, model_memory.allocated, cases, model_memory.described, update)
        run.write_table("memory-models.csv", models)
        workloads = study.workloads()
        with progress.stage(f"tracker, {len(workloads)} steps on fake tensors") as update:
            tracked = compared(study, _tracked, workloads, _described, update)
        run.write_table("memory-tracked.csv", tracked)
        run.write_table("largest-batch.csv", largest_batches(study))
        verdicts = judge(tracked, allocated, models)
        run.write_table("verdicts.csv", verdicts)
    say_tables(progress, verdicts, float_format="%.4f")
    return run.path


def judge(tracked: pd.DataFrame, allocated: pd.DataFrame, models: pd.DataFrame) -> pd.DataFrame:
    """Compares the prediction errors with what was promised; returns a row per promise.

    Columns: promise, at_most, found and held.
    """
    rows = []
    for oracle, table in (("tracker", tracked), ("allocator", allocated)):
        error = (table["predicted_bytes"] / table["measured_bytes"] - 1).abs()
        rows.append((f"median error against the {oracle}", 0.03, error.median()))
        rows.append((f"largest error against the {oracle}", 0.08, error.max()))
    held_out = models[models["held_out"]]
    error = (held_out["predicted_bytes"] / held_out["measured_bytes"] - 1).abs()
    rows.append(("largest error of other models, held out", 0.03, error.max()))
    return with_verdicts(rows, ["promise", "at_most", "found"])


def largest_batches(study: MemoryStudy) -> pd.DataFrame:
    """Predicts the largest batch, in sequences of 1,024 tokens, that fits each memory size.

    Returns a row per model, way to run it and memory size.
    """
    ways = {
        "float32": {},
        "bfloat16": {"precision": "bfloat16"},
        "bfloat16, loss in 8": {"precision": "bfloat16", "loss_chunks": 8},
        "bfloat16, loss in 8, checkpointing": {
            "precision": "bfloat16",
            "loss_chunks": 8,
            "activation_checkpointing": True,
        },
    }
    rows = []
    for model, (way, options) in itertools.product(study.models, ways.items()):
        workload = Workload(model, 1, 1024, optimizer_implementation="fused", **options)
        for size in study.capacities_gb:
            batch = largest_batch(workload, size * GB - LIBRARIES_BYTES)
            rows.append({"model": model, "way": way, "memory_gb": size, "largest_batch": batch})
    return pd.DataFrame(rows)


def compared(
    study: MemoryStudy,
    measure: Callable[[Case], int],
    cases: Sequence[Case],
    described: Callable[[Case], dict],
    update: Callable[[str], None],
) -> pd.DataFrame:
    """Measures each case, in fresh processes that do a few each.

    Returns:
        a row per case: what ``described`` says and predicts of it, and measured_bytes.
    """
    rows: list[dict] = []
    spawn = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(study.processes, mp_context=spawn) as pool:
        for case, measured_bytes in zip(cases, pool.map(measure, cases), strict=True):
            rows.append(described(case) | {"measured_bytes": measured_bytes})
            update(f"{rows[-1]['model']}, batch {case.batch_size}: {len(rows)} of {len(cases)}")
    return pd.DataFrame(rows)


def _tracked(workload: Workload) -> int:
    return track_step(workload).total_bytes


def _allocated(workload: Workload) -> int:
    torch.set_num_threads(1)
    return measure_peak(workload, torch.device("cpu")).allocated_bytes


def _described(workload: Workload) -> dict:
    prediction = predict_memory(workload)
    case = {key: getattr(workload, key) for key in KEYS}
    return case | {"moment": prediction.peak.name, "predicted_bytes": prediction.peak_bytes}
