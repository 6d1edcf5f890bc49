"""The measurements of one run of assignment 2, or recorded ones, ready for its notebooks."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import pandas as pd
import yaml

from common.analysis.sweep import BucketSweep, local_backward_s, read_sweep
from common.errors import UserError
from common.perfmodel.profile import BackwardProfile, DdpCosts
from common.perfmodel.simulator import BackwardTimeline, simulate_backward
from common.perfmodel.tables import AllReduceTable, read_all_reduce, read_costs, read_ready_times
from common.runtime.paths import project_root, relative_to_project
from common.runtime.run_directory import find_table, newest_complete_run, read_environment

TABLES = (
    *("gradient-ready-times.csv", "allreduce-samples.csv", "allreduce-chunk-samples.csv"),
    *("overlap-times.csv", "ddp-times.csv"),
)
COMPARED = ("model", "batch_size", "max_seq_len", "dtype")
RECORDED = "data/epyc-2-cores/assignment2"


@dataclass(frozen=True)
class Assignment2Run:
    """What one run measured.

    Attributes:
        caption: hardware, date and source, for every figure.
        settings: model, batch_size, max_seq_len and dtype.
        profile: gradients of the backward pass, without communication.
        all_reduce: the measured curve, calls one after another.
        costs: DDP's bookkeeping and contention.
        sweep: DDP over bucket caps.
        local_s: the backward pass without DDP, measured among the rounds of the sweep.
        all_reduce_samples, chunk_samples: raw tables.
    """

    run_dir: Path
    recorded: bool
    caption: str
    settings: dict
    profile: BackwardProfile
    all_reduce: AllReduceTable
    costs: DdpCosts
    sweep: BucketSweep
    local_s: float
    all_reduce_samples: pd.DataFrame
    chunk_samples: pd.DataFrame

    def simulate(self, cap_mib: float, costs: DdpCosts | None = None) -> BackwardTimeline:
        """The predicted backward pass at one cap, with this run's costs unless others are given."""
        return simulate_backward(
            self.profile, self.all_reduce.curve, cap_mib, costs=costs or self.costs
        )

    @property
    def gradient_mib(self) -> float:
        """B in MiB."""
        return self.profile.total_bytes / 2**20


def open_run(run_dir: str | Path | None = None) -> Assignment2Run:
    """Open a run directory; by default the newest complete run, or else recorded measurements.

    Raises UserError where a table is missing, or where the benchmarks of the run measured
    different models, batches, precisions or numbers of ranks, which must not be compared.
    """
    folder = _choose(run_dir)
    paths = {name: _table(folder, name) for name in TABLES}
    settings = _common_settings(paths["gradient-ready-times.csv"], paths["ddp-times.csv"])
    all_reduce = read_all_reduce(paths["allreduce-samples.csv"])
    sweep = read_sweep(paths["ddp-times.csv"])
    if all_reduce.world_size != sweep.world_size:
        raise UserError(
            f"{relative_to_project(folder)}: all-reduces were measured on {all_reduce.world_size} "
            f"ranks, DDP on {sweep.world_size}; they cannot be compared"
        )
    recorded = folder.resolve().is_relative_to(project_root() / "data")
    environment = read_environment(paths["ddp-times.csv"].parent)
    below = folder.resolve().is_relative_to(project_root())
    source = relative_to_project(folder) if below else folder.name
    return Assignment2Run(
        run_dir=folder,
        recorded=recorded,
        caption=f"{environment['hardware']}; {environment['start_time'][:10]}; "
        f"{'recorded' if recorded else 'run'} {source}",
        settings=settings,
        profile=read_ready_times(paths["gradient-ready-times.csv"]),
        all_reduce=all_reduce,
        costs=read_costs(paths["overlap-times.csv"]),
        sweep=sweep,
        local_s=local_backward_s(_table(folder, "local-times.csv")),
        all_reduce_samples=pd.read_csv(paths["allreduce-samples.csv"]),
        chunk_samples=pd.read_csv(paths["allreduce-chunk-samples.csv"]),
    )


def _choose(run_dir: str | Path | None) -> Path:
    if run_dir:
        folder = Path(run_dir)
        if not folder.is_absolute() and not folder.is_dir():
            folder = project_root() / folder
        if not folder.is_dir():
            raise UserError(f"{run_dir}: no such run directory")
        return folder
    newest = newest_complete_run(project_root() / "outputs" / "assignment2", TABLES)
    return newest or project_root() / RECORDED


def _table(folder: Path, name: str) -> Path:
    path = find_table(folder, name)
    if path is None:
        raise UserError(f"{relative_to_project(folder)}: no complete run with {name}")
    return path


def _common_settings(*tables: Path) -> dict:
    """The settings that all tables' runs share; UserError names one that differs."""
    configs = [yaml.safe_load((path.parent / "config.yaml").read_text()) for path in tables]
    for key in COMPARED:
        values = [config.get(key) for config in configs]
        if len(set(values)) > 1:
            raise UserError(
                f"{key} differs between {tables[0].name} ({values[0]}) and {tables[1].name} "
                f"({values[1]}): they cannot be compared"
            )
    return {key: configs[0][key] for key in COMPARED}
