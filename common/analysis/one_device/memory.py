"""A memory analysis, opened: its tables, the peak as predicted and as seen, and what would fit."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import pandas as pd

from common.analysis.one_device.origin import OneDeviceRun, step_text
from common.analysis.runs import Run, complete_runs, gpu_folder, open_run_with
from common.analysis.show import mib
from common.perfmodel.one_device.memory import predict_memory
from common.perfmodel.one_device.sharding import Sharding
from common.perfmodel.one_device.workload import Workload
from common.runtime.paths import project_root

MIB = 2**20
PEAKS = "memory-peak.csv"
TABLES = ("memory-moments.csv", "memory-components.csv", "memory-layers.csv")


@dataclass(frozen=True, eq=False)
class MemoryRun(OneDeviceRun):
    """An analysis: its tables, and the workload that was analysed."""

    workload: Workload
    peaks: pd.DataFrame

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

    @property
    def at_predicted_peak(self) -> pd.DataFrame:
        """Returns the rows of ``moments`` at the peak, the largest first, with their ``share``."""
        rows = self.moments[self.moments["moment"] == self.peak_moment]
        rows = rows.assign(share=rows["predicted_bytes"] / rows["predicted_bytes"].sum())
        return rows.sort_values("predicted_bytes", ascending=False)

    def peak_bytes(self, source: str) -> int | None:
        """Returns the peak by ``source`` (predicted, tracked or allocator), None if not asked."""
        peaks = self.peaks.set_index("source")["peak_bytes"]
        return int(peaks[source]) if source in peaks else None

    @property
    def predicted_bytes(self) -> int:
        """Returns the predicted peak."""
        return self.peak_bytes("predicted")

    @property
    def seen_bytes(self) -> int:
        """Returns the peak as the allocator saw it, or else the tracker."""
        return self.peak_bytes("allocator") or self.peak_bytes("tracked")

    @property
    def seen_by(self) -> str:
        """Returns whose peak ``seen_bytes`` is, in words."""
        is_allocator = self.peak_bytes("allocator") is not None
        return "PyTorch's allocator" if is_allocator else "the operator-level tracker"

    @property
    def error(self) -> float:
        """Returns the predicted peak over the one that was seen, minus 1."""
        return self.predicted_bytes / self.seen_bytes - 1

    @property
    def states(self) -> pd.DataFrame:
        """Returns bytes of a parameter, its gradient and its optimizer states, and their sum.

        Columns: what, bytes_per_parameter, total_bytes.
        """
        sizes = {"parameter": 4, "gradient": 4}
        if self.workload.optimizer == "adamw":
            sizes |= {"first moment (exp_avg)": 4, "second moment (exp_avg_sq)": 4}
        sizes["together"] = sum(sizes.values())
        table = pd.DataFrame({"what": sizes.keys(), "bytes_per_parameter": sizes.values()})
        count = self.workload.config.num_parameters()
        return table.assign(total_bytes=table["bytes_per_parameter"] * count)

    @property
    def bytes_per_parameter(self) -> int:
        """Returns the bytes that a parameter takes with its gradient and its optimizer states."""
        return int(self.states["bytes_per_parameter"].iloc[-1])

    @property
    def states_share(self) -> float:
        """Returns the bytes of parameters, gradients and states over the peak that was seen."""
        return float(self.states["total_bytes"].iloc[-1] / self.seen_bytes)

    @property
    def reserved_bytes(self) -> int | None:
        """Returns the most that a GPU's allocator held from the driver; None on a CPU."""
        reserved = self.peaks["reserved_bytes"].dropna()
        return int(reserved.iloc[0]) if len(reserved) else None

    @property
    def tells_reserved(self) -> bool:
        """Returns True if the device tells what its allocator holds; a CPU does not."""
        return self.reserved_bytes is not None


STATES = {"what": "what", "bytes_per_parameter": "bytes a parameter", "total_bytes": ("MiB", mib)}
"""Titles of ``MemoryRun.states``."""
AT_PEAK = {
    "component": "component",
    "predicted_bytes": "predicted (MiB)",
    "share": ("share of the peak", "{:.0%}"),
}
"""Titles of ``MemoryRun.at_predicted_peak``."""
PEAK = {
    "predicted_bytes": ("predicted peak", lambda size: f"{mib(size)} MiB"),
    "seen_bytes": ("peak seen", lambda size: f"{mib(size)} MiB"),
    "seen_by": "seen by",
    "error": (
        "error of the prediction",
        lambda error: "less than 0.01%" if abs(error) < 1e-4 else f"{error:+.2%}",
    ),
    "states_share": ("{0.bytes_per_parameter} bytes a parameter, over the peak seen", "{:.0%}"),
}
"""Titles of ``MemoryRun``: the peak as predicted and as seen, and the states' share of it."""
RESERVED = {
    "tells_reserved": (
        "this device tells reserved from allocated",
        {True: "yes", False: "no: it is a CPU"},
    ),
    ("tells_reserved", "seen_bytes"): (
        "allocated at the peak",
        lambda tells, peak: f"{peak / MIB:,.0f} MiB" if tells else None,
    ),
    "reserved_bytes": ("reserved", lambda size: f"{size / MIB:,.0f} MiB"),
    ("reserved_bytes", "seen_bytes"): (
        "difference",
        lambda reserved, peak: reserved and f"{(reserved - peak) / MIB:,.0f} MiB",
    ),
}
"""Titles of ``MemoryRun``: what a GPU's allocator used and held."""
LAYERS = {
    "layer": "layer (the first of its kind)",
    "predicted_bytes": ("predicted (MiB)", "{:,.2f}"),
    "measured_bytes": ("seen (MiB)", "{:,.2f}"),
}
"""Titles of ``MemoryRun.layers``."""


def open_memory_run(run_dir: str | Path | None = None) -> MemoryRun:
    """Opens a run of memory_analysis.py; by default the newest complete one, else the recorded."""
    opened = open_run_with(run_dir, "assignment0", PEAKS, TABLES)
    return MemoryRun(
        opened=opened, workload=Workload.of(opened.settings), peaks=opened.table(PEAKS)
    )


def open_study() -> tuple[pd.DataFrame, Run]:
    """Opens the recorded study of predictions: a row per case, with its relative ``error``."""
    folder = project_root() / "data" / "xeon-2-cores" / "study-memory"
    opened = open_run_with(folder, "study", "memory-tracked.csv")
    table = opened.table("memory-tracked.csv")
    return table.assign(error=table["predicted_bytes"] / table["measured_bytes"] - 1), opened


def beside_gpu(run: MemoryRun) -> pd.DataFrame:
    """Returns the peak of the run, and of those recorded on a GPU, in MiB, a row each.

    Columns: device, step, predicted, seen (by the allocator, or on a CPU the tracker), the
    prediction over what was seen minus 1, and reserved (NaN on a CPU).
    """
    opened = complete_runs(gpu_folder("assignment0"), PEAKS)
    return pd.DataFrame(
        {
            "device": side.opened.device,
            "step": step_text(side.settings),
            "predicted (MiB)": side.predicted_bytes / MIB,
            "seen (MiB)": side.seen_bytes / MIB,
            "error": side.error,
            "reserved (MiB)": (side.reserved_bytes or float("nan")) / MIB,
        }
        for side in (run, *(open_memory_run(on_gpu.folder) for on_gpu in opened))
    )


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


def largest_batches(study: Run) -> pd.DataFrame:
    """Returns the study's largest batches: a row per model and way, a column per memory size."""
    table = study.table("largest-batch.csv")
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
