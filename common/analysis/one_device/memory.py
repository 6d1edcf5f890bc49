"""A memory analysis, opened: its tables, the peak as predicted and as seen, and what would fit."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import pandas as pd

from common.analysis.one_device.origin import origin_of, step_text
from common.analysis.runs import (
    RECORDING_MACHINE,
    Run,
    complete_runs,
    gpu_folder,
    open_run_with,
)
from common.perfmodel.one_device.memory import predict_memory
from common.perfmodel.one_device.sharding import Sharding
from common.perfmodel.one_device.workload import Workload
from common.runtime.paths import project_root

MIB = 2**20
PEAKS = "memory-peak.csv"
TABLES = ("memory-moments.csv", "memory-components.csv", "memory-layers.csv")
STUDY = Path("data") / RECORDING_MACHINE / "study-memory"


@dataclass(frozen=True, eq=False)
class MemoryRun:
    """An analysis: its tables, and the workload that was analysed."""

    opened: Run
    workload: Workload
    peaks: pd.DataFrame

    @property
    def origin(self) -> str:
        """Returns the line that says whose data these are, as Markdown."""
        return origin_of(self.opened)

    @property
    def moments(self) -> pd.DataFrame:
        """Returns memory-moments.csv: predicted bytes by moment of the step and component."""
        return self.opened.table("memory-moments.csv")

    @property
    def layers(self) -> pd.DataFrame:
        """Returns what each kind of layer keeps for the backward pass; one row per kind."""
        return self.opened.table("memory-layers.csv").drop_duplicates(["predicted_bytes"])

    @property
    def peak_moment(self) -> str:
        """Returns the name of the moment at which the predicted memory is largest."""
        return self.moments.groupby("moment")["predicted_bytes"].sum().idxmax()

    def peak_bytes(self, source: str) -> int | None:
        """Returns the peak by ``source`` (predicted, tracked or allocator), None if not asked."""
        found = self.peaks.set_index("source")["peak_bytes"]
        return int(found[source]) if source in found else None

    @property
    def seen_bytes(self) -> int:
        """Returns the peak as the allocator saw it, or else the tracker."""
        return self.peak_bytes("allocator") or self.peak_bytes("tracked")

    @property
    def reserved_bytes(self) -> int | None:
        """Returns the most that a GPU's allocator held from the driver; None on a CPU."""
        reserved = self.peaks["reserved_bytes"].dropna()
        return int(reserved.iloc[0]) if len(reserved) else None


LAYERS = {
    "layer": "layer (the first of its kind)",
    "predicted_bytes": ("predicted (MiB)", "{:,.2f}"),
    "measured_bytes": ("seen (MiB)", "{:,.2f}"),
}


def open_memory_run(run_dir: str | Path | None = None) -> MemoryRun:
    """Opens a run of memory_analysis.py; by default the newest complete one, else the recorded."""
    opened = open_run_with(run_dir, "assignment0", PEAKS, TABLES)
    return MemoryRun(
        opened=opened,
        workload=Workload.of(opened.settings),
        peaks=opened.table(PEAKS),
    )


def open_study() -> tuple[pd.DataFrame, Run]:
    """Opens the recorded study of predictions: a row per case, with its relative ``error``."""
    opened = open_run_with(project_root() / STUDY, "study", "memory-tracked.csv")
    table = opened.table("memory-tracked.csv")
    return table.assign(error=table["predicted_bytes"] / table["measured_bytes"] - 1), opened


def states_table(workload: Workload) -> pd.DataFrame:
    """Returns the bytes that a parameter takes with its gradient and its optimizer states."""
    count = workload.config.num_parameters()
    rows = [("parameter", 4), ("gradient", 4)]
    if workload.optimizer == "adamw":
        rows += [("first moment (exp_avg)", 4), ("second moment (exp_avg_sq)", 4)]
    rows.append(("together", sum(size for _, size in rows)))
    columns = ["what", "bytes a parameter", "MiB"]
    return pd.DataFrame([(name, size, size * count / MIB) for name, size in rows], columns=columns)


def peak_table(run: MemoryRun) -> pd.DataFrame:
    """Returns what is in memory at the predicted peak, the largest component first."""
    rows = run.moments[run.moments["moment"] == run.peak_moment]
    rows = rows.sort_values("predicted_bytes", ascending=False)
    return pd.DataFrame(
        {
            f"component at “{run.peak_moment}”": rows["component"],
            "predicted (MiB)": rows["predicted_bytes"] / MIB,
            "share of the peak": rows["predicted_bytes"] / rows["predicted_bytes"].sum(),
        }
    )


def peak_facts(run: MemoryRun) -> dict[str, str]:
    """Returns the peak as predicted and as seen, and the share of the states in it."""
    predicted, seen = run.peak_bytes("predicted"), run.seen_bytes
    by_allocator = run.peak_bytes("allocator") is not None
    states = 16 if run.workload.optimizer == "adamw" else 8
    share = states * run.workload.config.num_parameters() / seen
    error = predicted / seen - 1
    return {
        "predicted peak": f"{predicted / MIB:,.1f} MiB",
        "peak seen": f"{seen / MIB:,.1f} MiB",
        "seen by": "PyTorch's allocator" if by_allocator else "the operator-level tracker",
        "error of the prediction": "less than 0.01%" if abs(error) < 1e-4 else f"{error:+.2%}",
        f"{states} bytes a parameter, over the peak seen": f"{share:.0%}",
    }


def reserved_facts(run: MemoryRun) -> dict[str, str]:
    """Returns what the allocator used and held; a CPU's has no such figures, which is said."""
    if run.reserved_bytes is None:
        return {"this device tells reserved from allocated": "no: it is a CPU"}
    kept = run.reserved_bytes - run.seen_bytes
    return {
        "this device tells reserved from allocated": "yes",
        "allocated at the peak": f"{run.seen_bytes / MIB:,.0f} MiB",
        "reserved": f"{run.reserved_bytes / MIB:,.0f} MiB",
        "difference": f"{kept / MIB:,.0f} MiB",
    }


def beside_gpu(run: MemoryRun) -> pd.DataFrame:
    """Returns the peak of the run, and of those recorded on a GPU, in MiB, a row each.

    Columns: device, step, predicted, seen (by the allocator, or on a CPU the tracker), the
    prediction over what was seen minus 1, and reserved (NaN on a CPU).
    """
    on_gpu = complete_runs(gpu_folder("assignment0"), PEAKS)
    rows = []
    for each in (run, *(open_memory_run(opened.folder) for opened in on_gpu)):
        predicted, reserved = each.peak_bytes("predicted"), each.reserved_bytes
        rows.append(
            {
                "device": each.opened.device,
                "step": step_text(each.opened.settings),
                "predicted (MiB)": predicted / MIB,
                "seen (MiB)": each.seen_bytes / MIB,
                "error": predicted / each.seen_bytes - 1,
                "reserved (MiB)": float("nan") if reserved is None else reserved / MIB,
            }
        )
    return pd.DataFrame(rows)


def ways_to_fit(workload: Workload, batches: Sequence[int]) -> dict[str, list[int]]:
    """Predicts the peak in bytes at each batch size, with options added one on top of the other."""
    mixed = replace(
        workload,
        precision="bfloat16",
        attention="sdpa",
        loss_chunks=1,
        activation_checkpointing=False,
    )
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


def largest_batch_table(table: pd.DataFrame) -> pd.DataFrame:
    """Returns the study's largest batches: a row per model and way, a column per memory size.

    Args:
        table: largest-batch.csv, with the columns model, way, memory_gb, largest_batch.
    """
    wide = table.pivot_table("largest_batch", ["model", "way"], "memory_gb", sort=False)
    wide.columns = [f"{size:g} GB" for size in wide.columns]
    return wide.astype(int).reset_index()


def study_facts(study: pd.DataFrame) -> dict[str, str]:
    """Returns the number of cases of the study, and their median and largest error."""
    error = study["error"].abs()
    worst = study.loc[error.idxmax()]
    return {
        "cases": f"{len(study)}",
        "median error": f"{error.median():.4%}",
        "largest error": f"{error.max():.2%}",
        "case of the largest error": (
            f"{worst['model']}, batch {worst['batch_size']}, sequence {worst['seq_len']}, "
            f"attention {worst['attention']}"
        ),
        "cases with an error above 0.2 %": f"{(error > 0.002).sum()}",
    }


def sharded_peaks(workload: Workload, ranks: Sequence[int]) -> pd.DataFrame:
    """Predicts peak and states of one rank, in bytes, for each strategy and number of ranks."""
    rows = []
    for strategy in ("DDP", "SHARD_GRAD_OP", "FULL_SHARD"):
        for count in ranks:
            prediction = predict_memory(workload, Sharding(strategy, count))
            rows.append(
                {
                    "strategy": strategy,
                    "ranks": count,
                    "peak_bytes": prediction.peak_bytes,
                    "state_bytes": prediction.at("update").state_bytes,
                }
            )
    return pd.DataFrame(rows)


def prediction_caption(workload: Workload) -> str:
    """Returns the caption of a figure that shows predictions only."""
    return f"predicted from sizes: {workload.model}, sequence {workload.seq_len}; no measurement"
