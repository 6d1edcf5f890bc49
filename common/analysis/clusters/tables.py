"""The tables of predictions for clusters, and of published sweeps beside them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import pandas as pd

from common.perfmodel.cluster.published_sweep import (
    SweepExplained,
    deviation_by_bandwidth,
    least_bandwidth_gb_per_s,
)
from common.perfmodel.cluster.scale_out import STRATEGIES, ScaleOut
from common.perfmodel.one_device.architecture import GPT2Config

SWEEP_CAPTION = (
    "2 × A100-80GB, NVLink, NCCL, float32, batch 16 per GPU, sequence 512; published by "
    "github.com/schemmy/exp-llm (2026), averages of 200 steps. Predicted: NCCL's model of two GPUs "
    "of an A100 node; one MFU per model is fitted."
)
PROFILED_SHARE = 0.0441
"""Communication in the profile of GPT-2 124M at batch 16 (data/bucket-sweeps-published)."""
COSTLY = 0.05
"""Share of a step above which DDP's default counts as costly."""
LOSSES = {
    "straggler_s": "waiting for the slowest GPU",
    "exposed_s": "exposed communication",
    "slowed_s": "computation slowed by communication",
    "copies_s": "copies",
}


WORKLOAD = {
    "job.architecture.name": "model",
    ("job.batch_size", "job.tokens_per_sample"): (
        "batch per GPU, weak scaling",
        "{} sequences of {} tokens",
    ),
    "global_batch_size": ("global batch, strong scaling", "{:,} sequences"),
    "job.precision": "precision",
}
"""Titles of ``ScaleOut``: what every GPU computes in a step."""
EFFICIENCY = {
    "batch_per_gpu": "batch per GPU",
    "mfu": ("MFU of one GPU", "{:.1%}"),
    "measured_efficiency": ("published", "{:.1%}"),
    "predicted_efficiency": ("predicted", "{:.1%}"),
    "without_stragglers": ("without stragglers", "{:.1%}"),
}
"""Titles of ``published_sweep.explain_efficiency``: two GPUs."""


def best_caps(predictions: Mapping[str, ScaleOut]) -> pd.DataFrame:
    """Returns b* on the fewest and the most GPUs under weak scaling, by cluster.

    Columns: cluster, GPUs and b* (MiB) at both ends, direction, default / best (on the most GPUs).
    """
    rows = []
    for name, predicted in predictions.items():
        by_gpus = predicted.rows("weak", "DDP").dropna(subset="bucket_cap_mib")
        first, last = by_gpus.iloc[0], by_gpus.iloc[-1]
        change = last.bucket_cap_mib - first.bucket_cap_mib
        rows.append(
            {
                "cluster": name,
                "fewest GPUs": first.gpus,
                "b* there (MiB)": first.bucket_cap_mib,
                "most GPUs": last.gpus,
                "b* on the most (MiB)": last.bucket_cap_mib,
                "b*": "stays" if change == 0 else "grows" if change > 0 else "falls",
                "default / best": last.default_step_s / last.step_s,
            }
        )
    return pd.DataFrame(rows)


def outgrown(predictions: Mapping[str, ScaleOut]) -> pd.DataFrame:
    """Returns the number of GPUs from which DDP's default is ``COSTLY``, by cluster.

    Under strong scaling. Columns: cluster, costly from (GPUs; missing where it never is), most
    GPUs, default / best (there).
    """
    rows = []
    for name, predicted in predictions.items():
        by_gpus = predicted.rows("strong", "DDP").dropna(subset="bucket_cap_mib")
        ratio = by_gpus["default_step_s"] / by_gpus["step_s"]
        rows.append(
            {
                "cluster": name,
                "costly from (GPUs)": by_gpus.loc[ratio - 1 > COSTLY, "gpus"].min(),
                "most GPUs": by_gpus["gpus"].iloc[-1],
                "default / best": ratio.iloc[-1],
            }
        )
    return pd.DataFrame(rows)


def efficiency(predicted: ScaleOut) -> pd.DataFrame:
    """Returns efficiency on the most GPUs under weak scaling and the largest loss, by strategy.

    The last column is the most GPUs on which strong scaling keeps an efficiency of one half;
    missing where none of the numbers of GPUs does."""
    rows = []
    for strategy in STRATEGIES:
        row = predicted.rows("weak", strategy).iloc[-1]
        strong = predicted.rows("strong", strategy)
        largest = max(LOSSES, key=lambda column: getattr(row, column))
        rows.append(
            {
                "strategy": strategy,
                "GPUs": row.gpus,
                "efficiency": row.efficiency,
                "lowest": row.efficiency_low,
                "highest": row.efficiency_high,
                "largest loss": LOSSES[largest],
                "its share of the step": getattr(row, largest) / row.step_s,
                "half efficiency up to (GPUs)": strong.loc[
                    strong["efficiency"] >= 0.5, "gpus"
                ].max(),
            }
        )
    return pd.DataFrame(rows)


def flatness(sweeps: Sequence[SweepExplained]) -> pd.DataFrame:
    """Returns why a published curve is flat: its spread, and what a cap could win at most."""
    return pd.DataFrame(
        [
            {
                "model": sweep.model,
                "slowest cap over fastest, measured": sweep.spread("measured_ms"),
                "predicted": sweep.spread("predicted_ms"),
                "worst deviation of a step": sweep.worst_deviation,
                "all-reduces (ms)": sweep.all_reduces_ms,
                "step (ms)": sweep.table["measured_ms"].mean(),
                "their share": sweep.communication_share,
            }
            for sweep in sweeps
        ]
    )


def link_facts(sweep: SweepExplained) -> dict[str, str]:
    """Returns what a flat curve says of the link, and of the published share of communication."""
    gradient_bytes = 4 * GPT2Config.named(sweep.model).num_parameters()
    step_s = sweep.table["measured_ms"].mean() / 1e3
    slow = gradient_bytes / (PROFILED_SHARE * step_s) / 1e9
    there = deviation_by_bandwidth(sweep.model, [slow]).iloc[0]
    least = least_bandwidth_gb_per_s(sweep.model)
    return {
        "communication in the author's profile": f"{PROFILED_SHARE:.1%}",
        "link, if that were the all-reduces alone": f"{slow:.0f} GB/s",
        "spread of the caps over such a link": f"{there['predicted_spread']:.1%}",
        "least bandwidth with every step within 1 %": f"{least:.0f} GB/s",
    }
