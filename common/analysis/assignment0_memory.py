"""Assignment 0's memory analysis, opened for its notebook, and what follows from its settings."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path

import pandas as pd

from common.analysis.opened_run import RECORDING_MACHINE, OpenedRun, open_tables
from common.perfmodel.memory import predict_memory
from common.perfmodel.sharding import Sharding
from common.perfmodel.workload import Workload
from common.runtime.paths import project_root

MIB = 2**20
TABLES = ("memory-moments.csv", "memory-components.csv", "memory-layers.csv")
STUDY = Path("data") / RECORDING_MACHINE / "study-memory"


@dataclass(frozen=True, eq=False)
class MemoryRun:
    """An analysis: its tables, and the workload that was analysed."""

    opened: OpenedRun
    workload: Workload
    peaks: pd.DataFrame

    def peak_bytes(self, source: str) -> int | None:
        """The peak that ``source`` (predicted, tracked or allocator) gave, if it was asked."""
        found = self.peaks.set_index("source")["peak_bytes"]
        return int(found[source]) if source in found else None

    @property
    def seen_bytes(self) -> int:
        """The peak as the allocator saw it, or else the tracker."""
        return self.peak_bytes("allocator") or self.peak_bytes("tracked")

    @property
    def reserved_bytes(self) -> int | None:
        """What a GPU's allocator held from the driver at most."""
        reserved = self.peaks["reserved_bytes"].dropna()
        return int(reserved.iloc[0]) if len(reserved) else None


def open_memory_run(run_dir: str | Path | None = None) -> MemoryRun:
    """A run of memory_analysis.py; by default the newest complete one, else the recorded one."""
    opened = open_tables(run_dir, "assignment0", "memory-peak.csv", TABLES)
    names = {field.name for field in fields(Workload)}
    settings = {key: value for key, value in opened.settings.items() if key in names}
    return MemoryRun(opened, Workload(**settings), opened.tables["memory-peak.csv"])


def open_study() -> tuple[pd.DataFrame, OpenedRun]:
    """The recorded study of predictions: a row per case, with its relative ``error``."""
    opened = open_tables(project_root() / STUDY, "study", "memory-tracked.csv")
    table = opened.tables["memory-tracked.csv"]
    return table.assign(error=table["predicted_bytes"] / table["measured_bytes"] - 1), opened


def states_table(workload: Workload) -> pd.DataFrame:
    """Bytes a parameter takes with its gradient and its optimizer states."""
    count = workload.config.num_parameters()
    rows = [("parameter", 4), ("gradient", 4)]
    if workload.optimizer == "adamw":
        rows += [("first moment (exp_avg)", 4), ("second moment (exp_avg_sq)", 4)]
    rows.append(("together", sum(size for _, size in rows)))
    columns = ["what", "bytes a parameter", "MiB"]
    return pd.DataFrame([(name, size, size * count / MIB) for name, size in rows], columns=columns)


def ways_to_fit(workload: Workload, batches: Sequence[int]) -> dict[str, list[int]]:
    """Predicted peak in bytes at each batch size, for options added one on top of the other."""
    mixed = replace(workload, precision="bfloat16", attention="sdpa", loss_chunks=1)
    mixed = replace(mixed, activation_checkpointing=False)
    ways = {
        "float32, attention written out": replace(mixed, precision="float32", attention="eager"),
        "float32": replace(mixed, precision="float32"),
        "bfloat16": mixed,
        "bfloat16, loss in 8 pieces": replace(mixed, loss_chunks=8),
        "and checkpointing": replace(mixed, loss_chunks=8, activation_checkpointing=True),
    }
    return {
        name: [predict_memory(replace(way, batch_size=size)).peak_bytes for size in batches]
        for name, way in ways.items()
    }


def sharded_peaks(workload: Workload, ranks: Sequence[int]) -> pd.DataFrame:
    """Peak and states of one rank, in bytes, for each strategy and number of ranks."""
    rows = []
    for strategy in ("DDP", "SHARD_GRAD_OP", "FULL_SHARD"):
        for count in ranks:
            prediction = predict_memory(workload, Sharding(strategy, count))
            update = prediction.at("update")
            rows.append(
                {
                    **{"strategy": strategy, "ranks": count},
                    **{"peak_bytes": prediction.peak_bytes, "state_bytes": update.state_bytes},
                }
            )
    return pd.DataFrame(rows)


def peak_text(run: MemoryRun) -> str:
    """A sentence on the predicted peak and the one that was seen."""
    predicted, seen = run.peak_bytes("predicted"), run.seen_bytes
    by = "PyTorch's allocator" if run.peak_bytes("allocator") else "the operator-level tracker"
    table = run.opened.tables["memory-moments.csv"]
    totals = table.groupby("moment")["predicted_bytes"].sum()
    text = (
        f"Predicted: {predicted / MIB:,.1f} MiB at the moment “{totals.idxmax()}”. Seen by {by}: "
        f"{seen / MIB:,.1f} MiB. The prediction is {_error_text(predicted / seen - 1)}."
    )
    states = 16 if run.workload.optimizer == "adamw" else 8
    share = states * run.workload.config.num_parameters() / seen
    if share < 1:
        return f"{text} The {states} bytes a parameter are {share:.0%} of it."
    return f"{text} The {states} bytes a parameter are all of it: they never live all at once."


def reserved_text(run: MemoryRun) -> str:
    """A sentence on what the allocator reserved; on a CPU, on why there is no such figure."""
    if run.reserved_bytes is None:
        return (
            "This run was on a CPU, whose allocator hands freed memory back to the C library: "
            "there is no “reserved” to show. On a GPU this cell prints both figures."
        )
    held = run.reserved_bytes - run.seen_bytes
    return (
        f"Allocated at the peak: {run.seen_bytes / MIB:,.0f} MiB; reserved: "
        f"{run.reserved_bytes / MIB:,.0f} MiB. The {held / MIB:,.0f} MiB between them are blocks "
        "that were freed and kept."
    )


def study_text(study: pd.DataFrame) -> str:
    """A sentence on the errors of the recorded study."""
    error = study["error"].abs()
    return (
        f"{len(study)} cases: the median error is {error.median():.3%}, the largest "
        f"{error.max():.2%} ({study.loc[error.idxmax(), 'model']}, batch "
        f"{study.loc[error.idxmax(), 'batch_size']})."
    )


def largest_batch_table(path: Path) -> pd.DataFrame:
    """The study's largest batches, a row per model and way to run, a column per memory size."""
    table = pd.read_csv(path)
    wide = table.pivot_table("largest_batch", ["model", "way"], "memory_gb", sort=False)
    wide.columns = [f"{size:g} GB" for size in wide.columns]
    return wide.astype(int).reset_index()


def workload_text(workload: Workload) -> str:
    """What a predicted figure is about, as its caption."""
    return f"predicted from sizes: {workload.model}, sequence {workload.seq_len}; no measurement"


def _error_text(error: float) -> str:
    return "off by less than 0.01 %" if abs(error) < 1e-4 else f"off by {100 * error:+.2f} %"
