"""``ddplab study models``: steps of models of several families on one device, time and memory.

Models of transformers are made from configurations with random weights, and make whole steps:
forward and backward pass, fused AdamW. Every visit builds a model anew, and visits take turns, so
that a slow minute of the device meets all cases (``model_cases``).
"""

from __future__ import annotations

import gc
import json
import math
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated

import pandas as pd
import torch
from torch import Tensor

from common.benchmarks.one_device.memory_tracker import peak_of_step
from common.csv_tables import read_table
from common.errors import require_known
from common.models.from_config import LossOf, random_samples, transformers_model
from common.models.traced import ModelBatchLoss, traced_architecture
from common.perfmodel.architectures.architecture import Architecture
from common.perfmodel.architectures.hugging_face import FAMILIES, model_of
from common.perfmodel.cluster.job import Job
from common.perfmodel.cluster.pass_time import step_s
from common.perfmodel.one_device.peaks import DevicePeak, known_peak
from common.perfmodel.one_device.training_memory import predict_training_memory
from common.runtime.machine.device import choose_device
from common.runtime.machine.environment import describe_environment
from common.runtime.machine.memory_limit import is_out_of_memory
from common.runtime.records.run_directory import read_environment
from common.runtime.records.study import say_tables, study_run
from common.runtime.seeding import seed_everything
from common.runtime.stage_progress import StageProgress
from common.samples import rotated
from common.settings import AtLeast, OneOf, Positive, Settings
from common.studies.model_cases import CASES, ModelCase
from common.training.step import TrainingStep, time_steps
from common.tuning.plans.planned_step import checkpointing_switch

MEASURED, OUT_OF_MEMORY = "measured", "out of memory"
TIME_COLUMNS = ("case", "round", "iteration", "step_time_ms")
PEAK_COLUMNS = ("case", "round", "status", "allocated_bytes", "reserved_bytes")
"""Peak of a step, and what a GPU's allocator had reserved by then."""


@dataclass(frozen=True)
class ModelsStudy(Settings):
    """Settings of the study."""

    device: Annotated[str, OneOf(("cpu", "cuda"))] = "cpu"
    """cpu or cuda."""
    only: tuple[str, ...] = ()
    """Cases to run; by default all of the device."""
    rounds: Annotated[int, Positive] = 4
    """Visits to each case."""
    warmup_steps: int = 2
    """Untimed steps of each visit."""
    num_steps: Annotated[int, AtLeast(2)] = 4
    """Timed steps of each visit."""
    budget_s: Annotated[float, Positive] = 3600.0
    """Time after which no further round begins."""

    def cases(self) -> tuple[ModelCase, ...]:
        """Returns the cases to run. Raises UserError for an unknown one."""
        cases = {case.name: case for case in CASES[self.device]}
        for name in self.only:
            require_known("case", name, cases)
        return tuple(case for name, case in cases.items() if not self.only or name in self.only)

    def __post_init__(self) -> None:
        super().__post_init__()
        self.cases()


def study_of_device() -> ModelsStudy:
    """Returns the study of this machine's device."""
    return ModelsStudy(choose_device(None))


SETTINGS = study_of_device


def run_study(study: ModelsStudy, output_dir: str, progress: StageProgress) -> Path:
    """Measures all cases in turns; returns the run directory."""
    device = torch.device(study.device)
    torch.set_num_threads(1)
    environment = describe_environment(None, study.device, 1)
    began = time.monotonic()
    with study_run("models", study, output_dir, progress, environment) as run:
        run.write_table("cases.csv", pd.DataFrame(map(described, study.cases())))
        times = run.stream("step-times.csv", TIME_COLUMNS)
        peaks = run.stream("peaks.csv", PEAK_COLUMNS)
        for round_ in range(study.rounds):
            if round_ and time.monotonic() - began > study.budget_s:
                break
            with progress.stage(f"round {round_ + 1} of {study.rounds}") as update:
                for case in rotated(study.cases(), round_):
                    update(case.name)
                    steps_s, peak = visit(case, study, device)
                    keys = {"case": case.name, "round": round_}
                    peaks.write([keys | peak])
                    times.write(
                        keys | {"iteration": index, "step_time_ms": seconds * 1e3}
                        for index, seconds in enumerate(steps_s)
                    )
    judged = by_case(run.path)
    run.write_table("by-case.csv", judged)
    say_tables(progress, judged)
    return run.path


def by_case(run_dir: Path) -> pd.DataFrame:
    """Tabulates each case of a study's run: measured and predicted, from hardware alone.

    Columns: case, held_out, rounds, step_ms (median over rounds of a round's median) with the range
    of rounds, predicted_step_ms and step_error; peak_bytes, predicted_peak_bytes and peak_error.
    What is not known of the device is NaN.
    """
    gpus = read_environment(run_dir).get("gpus") or [{"name": ""}]
    peak = known_peak(gpus[0]["name"])
    times = read_table(run_dir / "step-times.csv", TIME_COLUMNS)
    peaks = read_table(run_dir / "peaks.csv", PEAK_COLUMNS).groupby("case")["allocated_bytes"].max()
    by_round = times.groupby(["case", "round"])["step_time_ms"].median()
    rows = []
    for described_case in read_table(run_dir / "cases.csv", ["name", "config"]).to_dict("records"):
        case = ModelCase(**described_case | {"config": json.loads(described_case["config"])})
        rounds = by_round.get(case.name, pd.Series(dtype=float))  # none where memory ran out
        row = {"case": case.name, "held_out": case.held_out, "rounds": len(rounds)}
        row |= {"step_ms": rounds.median(), "low_ms": rounds.min(), "high_ms": rounds.max()}
        step_ms, peak_bytes = predicted(case, peak)
        row |= {"predicted_step_ms": step_ms, "step_error": step_ms / row["step_ms"] - 1}
        row |= {"peak_bytes": peaks[case.name], "predicted_peak_bytes": peak_bytes}
        rows.append(row | {"peak_error": peak_bytes / peaks[case.name] - 1})
    return pd.DataFrame(rows)


def predicted(case: ModelCase, peak: DevicePeak | None) -> tuple[float, float]:
    """Returns the predicted ms of a case's step, NaN without a peak, and its memory's in bytes."""
    job = Job(
        architecture=architecture_of_case(case),
        batch_size=case.batch_size,
        precision=case.precision,
        tf32=case.tf32,
        checkpointing="block" if case.checkpointing else "none",
        compile=case.compile,
    )
    step_ms = step_s(job, peak) * 1e3 if peak else math.nan
    return step_ms, predict_training_memory(job.passes).peak_bytes


def architecture_of_case(case: ModelCase) -> Architecture:
    """Returns a case's model: by its configuration, or followed where no reader knows it."""
    from transformers import AutoConfig

    config = AutoConfig.for_model(**case.config)
    if config.model_type in FAMILIES:
        values = config.to_dict() | {"model_type": config.model_type}
        if config.model_type == "bert":  # which is trained in many ways, here as ``build`` does
            values["architectures"] = ["BertForMaskedLM"]
        return model_of(values, case.name).architecture(case.seq_len or None)

    def make() -> ModelBatchLoss:
        step, batch = build(case, torch.device("cpu"))
        return step.model, batch, lambda module, batch: module(*batch)

    return traced_architecture(make, case.name)


def described(case: ModelCase) -> dict:
    """Returns a case as a row, its configuration as JSON."""
    return asdict(case) | {"config": json.dumps(case.config)}


def visit(case: ModelCase, study: ModelsStudy, device: torch.device) -> tuple[list[float], dict]:
    """Builds a case's model and makes its steps.

    Returns:
        the seconds of each timed step, none where memory ran out, and a row of PEAK_COLUMNS.
    """
    try:
        step, batch = build(case, device)
        batches = iter(lambda: batch, None)
        time_steps(step, batches, study.warmup_steps)
        peak = asdict(peak_of_step(step, batches))
        return time_steps(step, batches, study.num_steps), {"status": MEASURED, **peak}
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
        return [], {"status": OUT_OF_MEMORY, "allocated_bytes": None, "reserved_bytes": None}
    finally:
        step = batch = batches = None
        torch.compiler.reset()
        gc.collect()
        if device.type == "cuda":
            torch.cuda.empty_cache()


def build(case: ModelCase, device: torch.device) -> tuple[TrainingStep, tuple[Tensor, Tensor]]:
    """Returns the step of a case, with random weights, and a random batch."""
    seed_everything(42)
    with device:
        model = transformers_model(case.config)
        inputs, labels = random_samples(model, case.batch_size, case.seq_len)
    if case.checkpointing:
        getattr(model, checkpointing_switch(model))()
    model.train()
    return TrainingStep(case.workload(), device, model=LossOf(model)), (inputs, labels)
