"""Makes the changes that a diagnosis proposes, to see whether they bring what was predicted.

A sweep says what a step is made of; the performance model proposes changes and predicts each; here
they are run, every one on one rank and on all, in one job and in rotated rounds, beside the
configuration as it was.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated

import pandas as pd
import yaml

from common.analysis.sweep_speedups import baseline_of, sweep_speedups
from common.benchmarks.scaling.scaling import ScalingBenchmark
from common.benchmarks.scaling.sweep import Arm, visit_arms
from common.diagnose.evidence.evidence import open_evidence
from common.diagnose.evidence.measured_step import model_from_evidence
from common.errors import UserError
from common.perfmodel.scaling.scaled_step import Proposal, StepModel, StepSettings, predict, propose
from common.runtime.group.process_group import process_group
from common.runtime.machine.kept_memory import kept_memory
from common.runtime.paths import project_root, relative_to_project
from common.runtime.records.recorder import record_run
from common.runtime.records.run_directory import find_table
from common.settings import Positive, RankOptions, RoundOptions, SomeOf
from common.training.scaling.data_parallel_step import StepOptions

SWEEP = "assignment4-sweep"
NEWEST = "newest"
KINDS = ("accumulation", "batch_per_rank", "compression", "bucket_cap_mb")
"""Kinds of proposals that can be run here: all but another network, for which there is no flag."""
FACTORS = (2, 4, 8, 16, 32)
"""Factors by which accumulation and batch may be multiplied."""


@dataclass(frozen=True)
class VerifyChanges(RoundOptions, RankOptions):
    """Run the changes proposed for a sweep's configuration, on one rank and on all of them.

    Recipe: uv run torchrun --nproc_per_node=2 assignments/assignment4/benchmark.py --sweep, then
    uv run torchrun --nproc_per_node=2 assignments/assignment4/verify_changes.py. Writes
    proposals.csv (what was predicted) and the tables of a sweep (what was achieved).
    Settings may also come from --config FILE (a YAML file; flags win).
    """

    run_dir: str = NEWEST
    """Run directory of the sweep; newest takes the newest complete sweep below output_dir."""
    regime: str = "strong"
    """Regime of the sweep's run that is changed: strong or weak."""
    batch_per_rank: int = 0
    """Batch per rank of the run that is changed, where the sweep has several; by default the
    first."""
    kinds: Annotated[tuple[str, ...], SomeOf(KINDS, "kind")] = KINDS
    """Kinds of changes to try; the best predicted change of each kind is run."""
    rounds: Annotated[int, Positive] = 4
    """Rounds, at least; each visits the run as it was and every change once."""
    steps_per_visit: Annotated[int, Positive] = 4
    """Timed steps of each visit."""
    output_dir: str = "outputs/assignment4"


def main(settings: VerifyChanges) -> None:
    """Predicts the changes, prints what they should bring, and runs them."""
    with process_group(settings.device, settings.backend) as worker, kept_memory():
        folder = find_sweep(settings)
        base = read_settings(folder)
        index, arm = find_arm(folder, settings, worker.world_size)
        model = model_from_evidence(
            open_evidence(folder, index), gradient_as_bucket_view=base.gradient_as_bucket_view
        )
        changes = chosen_changes(model, settings.kinds)
        arms = [made for change in changes for made in change_arms(change, arm, base.options())]
        workload = base.open_workload(worker.device)
        facts = {"sweep": relative_to_project(folder), "world_size": worker.world_size}
        facts |= {"model": workload.model, "data": workload.data, "workload": base.workload}
        with record_run(
            settings, "assignment4-changes", worker, recorded_settings=facts, notes=(workload.note,)
        ) as recorder:
            if recorder.run:
                table = predictions(model, changes, arm, one_rank_step_s(folder, arm))
                recorder.run.write_table("proposals.csv", table)
                print(table.to_string(index=False, float_format="%.4g"), flush=True)
            visit_arms(
                arms,
                workload,
                recorder,
                rounds=settings,
                steps=settings.steps_per_visit,
                kinds=("plain",),
            )
            if recorder.run:
                print(f"Written to {relative_to_project(recorder.run.path)}")


def find_sweep(settings: VerifyChanges) -> Path:
    """Returns the sweep's run directory. Raises UserError where there is none."""
    if settings.run_dir != NEWEST:
        folder = Path(settings.run_dir)
        folder = folder if folder.is_dir() else project_root() / folder
        if not (folder / "arms.csv").is_file():
            raise UserError(f"--run_dir {settings.run_dir}: no complete sweep there (no arms.csv)")
        return folder
    base = Path(settings.output_dir)
    newest = find_table(base, "arms.csv", label=SWEEP)
    if newest is None:
        raise UserError(
            f"no complete sweep below {relative_to_project(base)}; run benchmark.py --sweep first, "
            "or give --run_dir"
        )
    return newest.parent


def read_settings(folder: Path) -> ScalingBenchmark:
    """Reads the settings that a sweep was run with."""
    names = {field.name for field in dataclasses.fields(ScalingBenchmark)}
    content = yaml.safe_load((folder / "config.yaml").read_text())
    values = {
        name: tuple(value) if isinstance(value, list) else value
        for name, value in content.items()
        if name in names
    }
    return ScalingBenchmark(**values)


def find_arm(folder: Path, settings: VerifyChanges, ranks: int) -> tuple[int, pd.Series]:
    """Returns the number and the row of the sweep's arm that changes start from.

    Raises UserError where it has none such.
    """
    arms = pd.read_csv(folder / "arms.csv")
    fits = (arms["regime"] == settings.regime) & (arms["world_size"] == ranks)
    if settings.batch_per_rank:
        fits &= arms["batch_per_rank"] == settings.batch_per_rank
    if not fits.any():
        has = arms[["regime", "world_size", "batch_per_rank"]].drop_duplicates()
        listed = "; ".join(" ".join(map(str, row)) for row in has.itertuples(index=False))
        raise UserError(
            f"{relative_to_project(folder)}: no {settings.regime} arm on {ranks} ranks"
            f"{f' with batch {settings.batch_per_rank}' if settings.batch_per_rank else ''}; "
            f"has regime, ranks, batch: {listed}"
        )
    arm = arms[fits].iloc[0]
    return int(arm["arm"]), arm


def one_rank_step_s(folder: Path, arm: pd.Series) -> float | None:
    """Returns the step (s) of the one-rank arm that ``arm`` is compared with, or None."""
    arms, steps = pd.read_csv(folder / "arms.csv"), pd.read_csv(folder / "steps.csv")
    base = baseline_of(arm, arms)
    if base is None:
        return None
    speedups = sweep_speedups(arms, steps).set_index("arm")
    return float(speedups.loc[base["arm"], "step_ms"]) / 1e3


def chosen_changes(model: StepModel, kinds: tuple[str, ...]) -> list[tuple[str, StepSettings]]:
    """Returns names and settings of no change and of the best proposal of each kind."""
    chosen: dict[str, Proposal] = {}
    for proposal in propose(model, batch_factors=FACTORS):
        if proposal.kind in kinds:
            chosen.setdefault(proposal.kind, proposal)
    return [
        ("none", model.settings),
        *((proposal.change, proposal.settings) for proposal in chosen.values()),
    ]


def change_arms(
    change: tuple[str, StepSettings], arm: pd.Series, options: StepOptions
) -> list[Arm]:
    """Makes the arms of a change, on one rank and on all ranks.

    With strong scaling the one rank has everybody's samples.
    """
    name, changed = change
    ranks, regime = int(arm["world_size"]), str(arm["regime"])
    made = replace(
        options,
        accumulation=changed.accumulation,
        compression=changed.compression,
        bucket_cap_mb=changed.bucket_cap_mb,
    )
    alone = changed.batch_per_rank * (ranks if regime == "strong" else 1)
    return [
        Arm(regime, 1, alone, made, name),
        Arm(regime, ranks, changed.batch_per_rank, made, name),
    ]


def predictions(
    model: StepModel,
    changes: list[tuple[str, StepSettings]],
    arm: pd.Series,
    one_rank_s: float | None = None,
) -> pd.DataFrame:
    """Returns ``proposals.csv``: the steps and the speedup predicted, one row per change.

    ``one_rank_s`` is the step on one rank without a change, where the sweep measured it: then one
    rank's passes are as fast as they were there, not as they were when probed.
    """
    ranks, strong = model.ranks, arm["regime"] == "strong"
    unchanged = replace(
        model.settings, batch_per_rank=model.settings.batch_per_rank * (ranks if strong else 1)
    )
    drift = one_rank_s / predict(model, unchanged).step_1_s if one_rank_s else 1.0
    rows = []
    for name, changed in changes:
        alone = replace(changed, batch_per_rank=changed.batch_per_rank * (ranks if strong else 1))
        step_1_s = predict(model, alone).step_1_s * drift
        step_n_s = predict(model, changed).step_n_s
        samples = alone.samples, changed.samples * ranks
        # In samples per second, as a step on all ranks may take others than a step on one.
        speedup = (samples[1] / step_n_s) / (samples[0] / step_1_s)
        rows.append(
            {
                "change": name,
                "regime": arm["regime"],
                "world_size": ranks,
                "batch_per_rank": changed.batch_per_rank,
                "accumulation": changed.accumulation,
                "compression": changed.compression,
                "bucket_cap_mb": changed.bucket_cap_mb,
                "global_batch": samples[1],
                "global_batch_changed": samples[1] != int(arm["global_batch"]),
                "predicted_step_ms_1": step_1_s * 1e3,
                "predicted_step_ms_n": step_n_s * 1e3,
                "predicted_speedup": speedup,
                "predicted_efficiency": speedup / ranks,
            }
        )
    return pd.DataFrame(rows)
