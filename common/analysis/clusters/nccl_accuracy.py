"""Evaluates predictions of NCCL's all-reduce on three published tables, parts of each held out.

Two tables of nccl-tests are fitted on every second size, once the even and once the odd ones, and
predict the others. The noisy one of 2 × 4 A100s leaves out one size at a time. Beside the fit stand
a curve through the points, α–β fitted and α–β by the course's recipe, and what needs no table at
all: NCCL's own tuner, and the same with the ramp. Errors are relative, over sizes above 1 MiB.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass, replace
from functools import cache

import numpy as np
import pandas as pd
import yaml
from numpy.typing import NDArray

from common.csv_tables import numbers, read_table
from common.perfmodel.cluster.clusters import Cluster, load_cluster
from common.perfmodel.cluster.nccl import NO_RAMP, NcclAllReduce
from common.perfmodel.cluster.nccl_fit import FittedAllReduce, fit_nccl
from common.perfmodel.collectives import AllReduceModel, AlphaBeta, MeasuredAllReduce
from common.perfmodel.published import DATA, UMD_A100, load_recorded

MIB = 2**20
FITTED, INTERPOLATED = "fitted", "interpolated"
ALPHA_BETA, ENDPOINTS = "α–β fitted", "α–β from the ends"
TUNER, ANALYTIC = "NCCL's tuner alone", "analytic"
EVEN, ODD, ALL, ONE_OUT = "even sizes", "odd sizes", "none", "all but one"

NCCL_TESTS = "nccl-tests-published"
UMD_NETWORK_GB_PER_S = 24.0
"""Assumed, since the network is not stated: one InfiniBand card of 200 Gb/s a node."""


@dataclass(frozen=True)
class PublishedAllReduce:
    """A published table of all-reduces and the cluster it was measured on."""

    name: str
    title: str
    caption: str
    curve: MeasuredAllReduce
    std_s: NDArray | None
    cluster: Cluster
    gpus: int
    algorithms: Collection[str] | None = None
    note: str = ""

    def fit(self, chosen: NDArray | slice = slice(None), check: bool = False) -> FittedAllReduce:
        """Fits the model to some of the table's points, all by default."""
        return fit_nccl(
            self.cluster,
            self.gpus,
            self.curve.sizes_bytes[chosen],
            self.curve.times_s[chosen],
            None if self.std_s is None else self.std_s[chosen],
            algorithms=self.algorithms,
            check=check,
        )

    def analytic(self) -> NcclAllReduce:
        """Makes the model that is predicted from the cluster alone."""
        return NcclAllReduce(self.cluster, self.gpus, algorithms=self.algorithms)

    def tuner(self) -> NcclAllReduce:
        """Makes the model of NCCL's constants and nothing else."""
        plain = replace(self.cluster, network_latency_us=0.0)
        return NcclAllReduce(plain, self.gpus, algorithms=self.algorithms, ramp=NO_RAMP)


@cache
def published_all_reduces() -> tuple[PublishedAllReduce, ...]:
    """Reads the three tables under ``data/``."""
    folder = DATA / NCCL_TESTS
    source = yaml.safe_load((folder / "source.yaml").read_text(encoding="utf-8"))
    caption = f"{source['hardware']}; date {source['date']}; recorded: {source['source']}"
    a100 = PublishedAllReduce(
        name="a100-8",
        title="8 × A100, one node",
        caption=caption,
        curve=_curve("a100-8"),
        std_s=None,
        cluster=load_cluster("a100-ib"),
        gpus=8,
        note="the analytic model's ramp was fitted to this table",
    )
    h100 = PublishedAllReduce(
        name="h100-2x8",
        title="2 × 8 H100, TCPXO",
        caption=caption,
        curve=_curve("h100-2x8"),
        std_s=None,
        cluster=load_cluster("h100-a3mega"),
        gpus=16,
        note="the analytic model has the network's latency from this table's smallest message",
    )
    recorded = load_recorded(UMD_A100)
    umd = PublishedAllReduce(
        name=UMD_A100,
        title="2 × 4 A100, NCCL_ALGO=TREE",
        caption=recorded.caption,
        curve=recorded.all_reduce,
        std_s=recorded.all_reduce_std_s,
        cluster=replace(
            load_cluster("a100-ib"),
            name=UMD_A100,
            gpus_per_node=4,
            network_gb_per_s=UMD_NETWORK_GB_PER_S,
        ),
        gpus=recorded.world_size,
        algorithms=("Tree",),
        note=f"network not stated, {UMD_NETWORK_GB_PER_S:g} GB/s assumed; 2.9 ms are the harness's",
    )
    return a100, h100, umd


def _curve(name: str) -> MeasuredAllReduce:
    path = DATA / NCCL_TESTS / f"{name}.csv"
    table = read_table(path, ["size_bytes", "time_ms"])
    sizes = numbers(table, "size_bytes", path, above=0)
    return MeasuredAllReduce(sizes, numbers(table, "time_ms", path, above=0) / 1e3)


@cache
def noisy_fit() -> FittedAllReduce:
    """Fits the table with standard deviations; the fit's notes say how it stands to them."""
    (noisy,) = [table for table in published_all_reduces() if table.std_s is not None]
    return noisy.fit(check=True)


@cache
def _predictions() -> pd.DataFrame:
    rows = [frame for table in published_all_reduces() for frame in _of_table(table)]
    return pd.concat(rows, ignore_index=True)


def predictions() -> pd.DataFrame:
    """Predicts every held-out size by every model: table, model, fitted_on, size_bytes,
    measured_s, predicted_s, std_s (NaN where not stated)."""
    return _predictions().copy()


def accuracy_table() -> pd.DataFrame:
    """Tabulates the accuracy: a row per table, model and what it was fitted on.

    Columns: table, model, fitted_on, sizes (above 1 MiB), mean_error, median_error, worst_error
    (relative, above 1 MiB) and within_std (share of all sizes within one standard deviation, NaN
    where that is not stated), note.
    """
    notes = {table.name: table.note for table in published_all_reduces()}
    rows = []
    for (table, model, fitted_on), group in predictions().groupby(
        ["table", "model", "fitted_on"], sort=False
    ):
        error = (group["predicted_s"] / group["measured_s"] - 1).abs()
        large = error[group["size_bytes"] > MIB]
        off = (group["predicted_s"] - group["measured_s"]).abs()
        rows.append(
            {
                "table": table,
                "model": model,
                "fitted_on": fitted_on,
                "sizes": len(large),
                "mean_error": large.mean(),
                "median_error": large.median(),
                "worst_error": large.max(),
                "within_std": np.nan
                if group["std_s"].isna().any()
                else (off <= group["std_s"]).mean(),
                "note": notes[table] if model == ANALYTIC else "",
            }
        )
    return pd.DataFrame(rows)


def _of_table(table: PublishedAllReduce) -> list[pd.DataFrame]:
    count = len(table.curve.sizes_bytes)
    place = np.arange(count)
    if table.std_s is None:
        splits = [(EVEN, place % 2 == 0), (ODD, place % 2 == 1)]
    else:
        splits = [(ONE_OUT, place != out) for out in range(count)]
    sizes = table.curve.sizes_bytes
    frames = []
    for model, make in FITS.items():
        if model == FITTED and table.std_s is not None:
            left_out = np.array(noisy_fit().left_out_s)
            frames.append(_frame(table, model, ONE_OUT, sizes > 0, left_out))
            continue
        for fitted_on, chosen in splits:
            predicted = make(table, chosen).time_s(sizes[~chosen])
            frames.append(_frame(table, model, fitted_on, ~chosen, predicted))
    for model, made in ((TUNER, table.tuner()), (ANALYTIC, table.analytic())):
        frames.append(_frame(table, model, ALL, sizes > 0, made.time_s(sizes)))
    return frames


def _frame(
    table: PublishedAllReduce, model: str, fitted_on: str, asked: NDArray, predicted_s: NDArray
) -> pd.DataFrame:
    return pd.DataFrame(
        {
            "table": table.name,
            "model": model,
            "fitted_on": fitted_on,
            "size_bytes": table.curve.sizes_bytes[asked],
            "measured_s": table.curve.times_s[asked],
            "predicted_s": predicted_s,
            "std_s": np.nan if table.std_s is None else table.std_s[asked],
        }
    )


def _points(
    make: Callable[[NDArray, NDArray], AllReduceModel],
) -> Callable[[PublishedAllReduce, NDArray], AllReduceModel]:
    return lambda table, chosen: make(table.curve.sizes_bytes[chosen], table.curve.times_s[chosen])


FITS: dict[str, Callable[[PublishedAllReduce, NDArray], AllReduceModel]] = {
    FITTED: PublishedAllReduce.fit,
    INTERPOLATED: _points(MeasuredAllReduce),
    ALPHA_BETA: _points(AlphaBeta.fit),
    ENDPOINTS: _points(AlphaBeta.from_endpoints),
}
