"""Shows what one GPU can of DDP's backward pass, beside a run: passes, launches and bookkeeping.

One rank over NCCL exchanges nothing, so nothing here is of a network.
"""

from __future__ import annotations

import pandas as pd

from common.analysis.buckets.measurements import Assignment2Run, local_backward_s, path_of
from common.analysis.buckets.sweep import read_sweep
from common.analysis.runs import Run, gpu_folder
from common.perfmodel.ddp.profile import BackwardProfile
from common.perfmodel.tables import read_all_reduce, read_ready_times

PASSES = ("assignment2/train_benchmark", "assignment2-gpt2-bfloat16/train_benchmark")
LAUNCHES = {
    "hidden": "assignment2/allreduce_benchmark",
    "included": "assignment2-launch-included/allreduce_benchmark",
}
"""The launch's time in that of an all-reduce, and the run that measured it so."""
BOOKKEEPING = "assignment2/ddp_benchmark"


def passes(run: Assignment2Run) -> pd.DataFrame:
    """Returns the backward pass without communication: of the run, and of two models on a GPU.

    Columns: device, model, precision, B (MiB), gradients, pass (ms), g (ns per byte), and the last
    gradient's share of the bytes.
    """
    rows = [_pass_row(_device(run), run.settings, run.profile)]
    for below in PASSES:
        opened = _opened(below)
        profile = read_ready_times(opened.folder / "gradient-ready-times.csv")
        rows.append(_pass_row(opened.device, opened.settings, profile))
    return pd.DataFrame(rows)


def launches(run: Assignment2Run) -> pd.DataFrame:
    """Returns the smallest all-reduce: of the run, and on a GPU with and without its launch.

    Columns: device, ranks, launch, bytes, time (µs).
    """
    tables = {"": (_device(run), run.all_reduce)}
    for launch, below in LAUNCHES.items():
        opened = _opened(below)
        table = read_all_reduce(opened.folder / "allreduce-samples.csv")
        tables[launch] = (opened.device, table)
    return pd.DataFrame(
        [
            {
                "device": device,
                "ranks": table.world_size,
                "launch": launch or "part of the call",
                "bytes": table.curve.sizes_bytes[0],
                "time (µs)": table.curve.times_s[0] * 1e6,
            }
            for launch, (device, table) in tables.items()
        ]
    )


def bookkeeping(run: Assignment2Run) -> pd.DataFrame:
    """Returns what DDP over one rank adds to the pass: of the run, and on a GPU by bucket cap.

    The run's own has all gradients in one bucket (``overlap_lab``). Columns: device, model, cap
    (MiB), pass without DDP (ms), with DDP (ms), added (a share).
    """
    overlap = run.calibration.overlap
    local_ms = float(pd.Series(overlap.local_s).median()) * 1e3
    added_ms = float(pd.Series(overlap.bookkeeping_s).median()) * 1e3
    rows = [(_device(run), run.settings["model"], "one bucket", local_ms, local_ms + added_ms)]
    opened = _opened(BOOKKEEPING)
    local_ms = local_backward_s(opened.folder / "local-times.csv") * 1e3
    for cap in read_sweep(opened.folder / "ddp-times.csv").summary().itertuples():
        label = f"{cap.bucket_cap_mib:g}"
        rows.append((opened.device, opened.settings["model"], label, local_ms, cap.median_ms))
    columns = ["device", "model", "cap (MiB)", "pass without DDP (ms)", "with DDP (ms)"]
    table = pd.DataFrame(rows, columns=columns)
    return table.assign(added=table["with DDP (ms)"] / table["pass without DDP (ms)"] - 1)


def _device(run: Assignment2Run) -> str:
    return Run(path_of(run.run_dir, "gradient-ready-times.csv").parent, run.run_dir).device


def _opened(below: str) -> Run:
    folder = gpu_folder(below)
    return Run(folder, folder)


def _pass_row(device: str, settings: dict, profile: BackwardProfile) -> dict:
    return {
        "device": device,
        "model": settings["model"],
        "precision": settings["dtype"],
        "B (MiB)": profile.total_bytes / 2**20,
        "gradients": len(profile.names),
        "pass (ms)": profile.backward_s * 1e3,
        "g (ns per byte)": profile.backward_s / profile.total_bytes * 1e9,
        "last gradient's share": profile.sizes_bytes[-1] / profile.total_bytes,
    }
