"""Conclusions of assignment 2, part 4: larger clusters."""

from __future__ import annotations

from functools import cache

import numpy as np

from common.analysis.clusters import nccl_accuracy, tables
from common.analysis.conclusions.conclusion import TABLES, Seen, by_prediction, published
from common.perfmodel.cluster import published_sweep
from common.perfmodel.cluster.clusters import load_cluster
from common.perfmodel.cluster.job import Job
from common.perfmodel.cluster.scale_out import (
    ScaleOut,
    one_at_a_time,
    parse_gpus,
    predict_scale_out,
)
from common.perfmodel.one_device.workload import Workload

CLUSTERS = ("a100-ib", "a100-roce", "h100-ib", "h100-roce", "h200-ib")


def _predicted(strategies: list[str] | None = None, name: str = "h100-ib") -> ScaleOut:
    work = Workload(model="gpt2-large", precision="bfloat16")
    more = {"strategies": strategies} if strategies else {}
    return predict_scale_out(Job.of(work), load_cluster(name), parse_gpus("8..16384"), **more)


@cache
def _clusters() -> dict[str, ScaleOut]:
    return {name: _predicted(["DDP"], name) for name in CLUSTERS}


def _analytic_error(_: str) -> Seen:
    table = nccl_accuracy.accuracy_by_model()
    errors = table[table["model"] == nccl_accuracy.ANALYTIC].set_index("table")["mean_error"]
    number = ", ".join(f"{error:.0%}" for error in errors)
    return published(errors["a100-8"] < 0.1 < errors.drop("a100-8").min(), number)


def _nothing_to_win(_: str) -> Seen:
    sweeps = [published_sweep.explain_sweep(name) for name in ("gpt2", "gpt2-large")]
    shares = tables.flatness(sweeps)["their share"]
    return published(shares.max() < 0.01, ", ".join(f"{share:.1%}" for share in shares))


def _falls_mostly(_: str) -> Seen:
    table = tables.best_caps(_clusters())
    falls = (table["b*"] == "falls").sum()
    return by_prediction(falls == len(table) - 1, f"on {falls} of {len(table)}")


def _default_cheap(_: str) -> Seen:
    longer = tables.best_caps(_clusters())["default / best"] - 1
    return by_prediction(longer.max() < 0.06, f"{longer.min():.0%} to {longer.max():.0%}")


def _default_costly(_: str) -> Seen:
    table = tables.outgrown(_clusters())
    counts, ratios = table["costly from (GPUs)"], table["default / best"]
    number = f"from {counts.min():,.0f} GPUs; {ratios.min():.1f} to {ratios.max():.1f} times"
    return by_prediction(counts.min() >= 1024, number)


def _sharding_falls_behind(_: str) -> Seen:
    shares = tables.efficiency(_predicted()).set_index("strategy")["efficiency"]
    number = ", ".join(f"{name} {share:.0%}" for name, share in shares.items())
    return by_prediction(shares["DDP"] > 2 * shares["FULL_SHARD"], number)


def _speeds_most(_: str) -> Seen:
    table = one_at_a_time(_predicted(), "weak", "DDP", 1024)
    named = table["assumption"].str.rpartition(" ")[0]
    ranges = table.groupby(named)["efficiency"].agg(np.ptp).drop("as")
    number = ", ".join(f"{name} {range_:.0%}" for name, range_ in ranges.items())
    return by_prediction(set(ranges.nlargest(2).index) == {"pass rate", "network speed"}, number)


CONCLUSIONS = {
    "assignment2_part4_scale": [
        (
            1,
            "within 10 % on the node it was fitted to, beyond on others",
            _analytic_error,
            TABLES,
        ),
        (2, "all-reduces take less than 1 % of a step", _nothing_to_win, TABLES),
        (3, "b* falls on all clusters but one", _falls_mostly, TABLES),
        (3, "the default costs less than 6 % on the most GPUs", _default_cheap, TABLES),
        (
            4,
            "under strong scaling it is costly, from 1,024 GPUs at least",
            _default_costly,
            TABLES,
        ),
        (5, "FULL_SHARD has less than half of DDP's efficiency", _sharding_falls_behind, TABLES),
        (6, "the speeds of passes and network move efficiency most", _speeds_most, TABLES),
    ],
}
