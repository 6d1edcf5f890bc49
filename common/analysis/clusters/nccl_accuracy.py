"""Reads how well models of NCCL's all-reduce predict three published tables, parts held out.

Two tables of nccl-tests were fitted on every second size, once the even and once the odd ones, and
predict the others. The noisy one of 2 × 4 A100s leaves out one size at a time. Beside the fit, a
line in each range of sizes or NCCL's own protocols, stand a curve through the points, α–β fitted
and α–β by the course's recipe, and what needs no table at all: NCCL's own tuner, and the same with
the ramp. Errors are relative, over sizes above 1 MiB. All are recorded (``data/nccl-models``).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import pandas as pd
import yaml
from numpy.typing import NDArray

from common.csv_tables import numbers, read_table
from common.perfmodel.collectives import MeasuredAllReduce
from common.perfmodel.published import DATA, UMD_A100, load_recorded

MIB = 2**20
FITTED, INTERPOLATED = "fitted", "interpolated"
ALPHA_BETA, ENDPOINTS = "α–β fitted", "α–β from the ends"
TUNER, ANALYTIC = "NCCL's tuner alone", "analytic"

NCCL_TESTS, MODELS = "nccl-tests-published", DATA / "nccl-models"


@dataclass(frozen=True)
class PublishedAllReduce:
    """A published table of all-reduces."""

    name: str
    title: str
    caption: str
    curve: MeasuredAllReduce
    std_s: NDArray | None
    note: str = ""


@cache
def published_all_reduces() -> tuple[PublishedAllReduce, ...]:
    """Reads the three tables under ``data/``."""
    folder = DATA / NCCL_TESTS
    source = yaml.safe_load((folder / "source.yaml").read_text(encoding="utf-8"))
    caption = f"{source['hardware']}; date {source['date']}; recorded: {source['source']}"
    a100, h100 = (
        PublishedAllReduce(name, title, caption, _curve(name), std_s=None, note=note)
        for name, title, note in (
            ("a100-8", "8 × A100, one node", "the analytic model's ramp was fitted to this table"),
            (
                "h100-2x8",
                "2 × 8 H100, TCPXO",
                "the analytic model has the network's latency from this table's smallest message",
            ),
        )
    )
    recorded = load_recorded(UMD_A100)
    umd = PublishedAllReduce(
        name=UMD_A100,
        title="2 × 4 A100, NCCL_ALGO=TREE",
        caption=recorded.caption,
        curve=recorded.all_reduce,
        std_s=recorded.all_reduce_std_s,
        note="network not stated, 24 GB/s assumed; 2.9 ms are the harness's",
    )
    return a100, h100, umd


def _curve(name: str) -> MeasuredAllReduce:
    path = DATA / NCCL_TESTS / f"{name}.csv"
    table = read_table(path, ["size_bytes", "time_ms"])
    sizes = numbers(table, "size_bytes", path, above=0)
    return MeasuredAllReduce(sizes, numbers(table, "time_ms", path, above=0) / 1e3)


def predictions() -> pd.DataFrame:
    """Reads every held-out size by every model: table, model, fitted_on, size_bytes,
    measured_s, predicted_s, std_s (NaN where not stated)."""
    return read_table(MODELS / "predictions.csv", ["table", "model", "fitted_on", "predicted_s"])


def curves() -> pd.DataFrame:
    """Reads the models of all of a table's points: table, model, size_bytes, time_s."""
    return read_table(MODELS / "curves.csv", ["table", "model", "size_bytes", "time_s"])


def accuracy_by_model() -> pd.DataFrame:
    """Tabulates the accuracy: a row per table, model and what it was fitted on.

    Columns: table, model, fitted_on, sizes (above 1 MiB), mean_error, median_error, worst_error
    (relative, above 1 MiB) and within_std (share of all sizes within one standard deviation, NaN
    where that is not stated), note.
    """
    notes = {table.name: table.note for table in published_all_reduces()}
    keys, rows = ["table", "model", "fitted_on"], []
    for names, group in predictions().groupby(keys, sort=False):
        off_s = (group["predicted_s"] - group["measured_s"]).abs()
        large = (off_s / group["measured_s"])[group["size_bytes"] > MIB]
        is_within = (off_s <= group["std_s"]).where(group["std_s"].notna())
        row = dict(zip(keys, names, strict=True)) | {
            "sizes": len(large),
            "mean_error": large.mean(),
            "median_error": large.median(),
            "worst_error": large.max(),
            "within_std": is_within.mean(),
        }
        note = notes[row["table"]] if row["model"] == ANALYTIC else ""
        rows.append(row | {"note": note})
    return pd.DataFrame(rows)
