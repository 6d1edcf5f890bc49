"""``ddplab study memory``: is the predicted peak of a training step the one that is seen?

Two oracles that know nothing of the formulas: an operator-level tracker on fake tensors, for the
published sizes of GPT-2 (``memory-tracked.csv``), and PyTorch's CPU allocator under a real step,
for small ones and every option (``memory-allocator.csv``) and for other models
(``memory-models.csv``). ``largest-batch.csv`` is what follows.
"""

from __future__ import annotations

import itertools
import multiprocessing
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated

import pandas as pd

from common.perfmodel.one_device.memory import predict_memory
from common.perfmodel.one_device.memory_fit import largest_batch
from common.perfmodel.one_device.training_memory import LIBRARIES_BYTES
from common.perfmodel.one_device.workload import Workload
from common.runtime.machine.environment import describe_environment
from common.runtime.records.study import study_run, with_verdicts
from common.runtime.stage_progress import StageProgress
from common.settings import AtLeast, Settings
from common.studies import model_memory
from common.studies.model_steps import ModelCase

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
            allocated = _compared(_each(_allocated, small, study.processes), small, update)
        run.write_table("memory-allocator.csv", allocated)
        cases = model_memory.CASES
        with progress.stage(f"allocator, {len(cases)} real steps of other models") as update:
            measured = _each(model_memory.allocated, cases, study.processes)
            models = model_memory.compared(measured, update)
        run.write_table("memory-models.csv", models)
        workloads = study.workloads()
        with progress.stage(f"tracker, {len(workloads)} steps on fake tensors") as update:
            tracked = _compared(_each(_tracked, workloads, study.processes), workloads, update)
        run.write_table("memory-tracked.csv", tracked)
        run.write_table("largest-batch.csv", largest_batches(study))
        verdicts = judge(tracked, allocated, models)
        run.write_table("verdicts.csv", verdicts)
    progress.say(verdicts.to_string(index=False, float_format="%.4f"))
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
    return with_verdicts(pd.DataFrame(rows, columns=["promise", "at_most", "found"]))


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


def _each(
    measure: Callable[[Case], int], workloads: Sequence[Case], processes: int
) -> Iterator[int]:
    """Yields ``measure`` of every workload, in order, from fresh processes that each do a few."""
    spawn = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(processes, mp_context=spawn) as pool:
        yield from pool.map(measure, workloads)


def _tracked(workload: Workload) -> int:
    from common.benchmarks.one_device.memory_tracker import track_step

    return track_step(workload).total_bytes


def _allocated(workload: Workload) -> int:
    import torch

    from common.benchmarks.one_device.memory_tracker import measure_peak

    torch.set_num_threads(1)
    return measure_peak(workload, torch.device("cpu")).allocated_bytes


def _compared(
    measured: Iterator[int], workloads: list[Workload], update: Callable[[str], None]
) -> pd.DataFrame:
    rows = []
    for workload, measured_bytes in zip(workloads, measured, strict=True):
        prediction = predict_memory(workload)
        case = {key: getattr(workload, key) for key in KEYS}
        moment = {"moment": prediction.peak.name}
        sizes = {"predicted_bytes": prediction.peak_bytes, "measured_bytes": measured_bytes}
        rows.append(case | moment | sizes)
        update(f"{workload.model}, batch {workload.batch_size}: {len(rows)} of {len(workloads)}")
    return pd.DataFrame(rows)
