"""DDP's default in a sweep over bucket caps: a first bucket of 1 MiB, and others of 25.

It has no cap to be drawn at, and its buckets are those of no single cap. So it is no case of an
evaluation, and stands beside the caps.
"""

from __future__ import annotations

import numpy as np

from common.analysis.buckets.sweep import Accuracy, BucketSweep
from common.perfmodel.model import DdpModel
from common.samples import per_round

NAME = "DDP's default (1, 25 MiB)"
"""Its name in tables and figures."""


def gains_over_default(sweep: BucketSweep, cap_mib: float) -> list[float]:
    """Returns, by round, 1 − T(cap) / T(default) of the rounds' median backward passes.

    Empty where the default was not measured.
    """
    by_round = per_round(sweep.steps, "backward_time_ms", "bucket_cap_mib")
    chosen, default = by_round.reindex(columns=[cap_mib, np.nan]).to_numpy().T
    gains = 1 - chosen / default
    return gains[~np.isnan(gains)].tolist()


def gain_text(sweep: BucketSweep, cap_mib: float) -> str:
    """Returns median, least and largest of ``gains_over_default``, or that there are none."""
    gains = gains_over_default(sweep, cap_mib)
    if not gains:
        return "not measured"
    return f"{np.median(gains):.1%} ({min(gains):.1%} to {max(gains):.1%})"


def default_facts(model: DdpModel, sweep: BucketSweep, accuracy: Accuracy) -> dict[str, str]:
    """Returns the default's time, and what the predicted best measured cap gains over it."""
    measured = sweep.default()
    if measured is None:
        return {NAME: "not measured in this run"}
    predicted_ms = model.backward_s(None) * 1e3
    chosen = accuracy.predicted_best_mib
    return {
        f"{NAME}, measured": f"{measured['median_ms']:.1f} ms",
        "its buckets": f"{measured['num_buckets']:.0f}",
        "its T(b), predicted": f"{predicted_ms:.1f} ms",
        "predicted against measured": f"{predicted_ms / measured['median_ms'] - 1:+.1%}",
        f"gain of {chosen:g} MiB over it, by rounds": gain_text(sweep, chosen),
    }
