"""What each term of the model is worth: predictions from the hand-derived equation up."""

from __future__ import annotations

from dataclasses import replace

import pandas as pd

from common.analysis.assignment2 import Assignment2Run
from common.analysis.sweep import Accuracy, evaluate
from common.perfmodel.collectives import AlphaBeta
from common.perfmodel.profile import NO_COSTS
from common.perfmodel.simulator import simulate_backward
from common.perfmodel.whatif import closed_form

FULL = "full model"


def predictions(run: Assignment2Run) -> dict[str, dict[float, float]]:
    """Predicted backward time in seconds by measured cap, for each model, simplest first.

    The last one is no prediction: it takes the speed of computation from the sweep's own rounds,
    and so shows what the terms of communication alone are worth.
    """
    caps = list(run.sweep.distinct().measured_s())
    curve = run.all_reduce.curve
    line = AlphaBeta.fit(curve.sizes_bytes, curve.times_s)
    by_hand = closed_form(run.profile, line)
    in_sweep = run.profile.scaled(compute=run.local_s / run.profile.backward_s)
    copies = replace(run.costs, communication_slowdown=1.0, lost_compute=None)

    def simulated(network, costs) -> dict[float, float]:
        return {
            cap: simulate_backward(run.profile, network, cap, costs=costs).total_s for cap in caps
        }

    return {
        "by hand": {cap: by_hand.total_s(cap * 2**20) for cap in caps},
        "real buckets, α–β": simulated(line, NO_COSTS),
        "measured a(x)": simulated(curve, NO_COSTS),
        "with DDP's copies": simulated(curve, copies),
        FULL: simulated(curve, run.costs),
        "full model, sweep's own speed": {
            cap: simulate_backward(in_sweep, curve, cap, costs=run.costs).total_s for cap in caps
        },
    }


def compare(run: Assignment2Run) -> dict[str, Accuracy]:
    """The accuracy of each model on the run's own sweep."""
    return {name: evaluate(run.sweep, times) for name, times in predictions(run).items()}


def errors(accuracies: dict[str, Accuracy]) -> pd.DataFrame:
    """Error by cap (rows, MiB) and model (columns)."""
    return pd.DataFrame(
        {
            name: found.table.set_index("bucket_cap_mib")["error"]
            for name, found in accuracies.items()
        }
    )


def summary(accuracies: dict[str, Accuracy]) -> pd.DataFrame:
    """One row per model: median and worst error, the b* it would choose, and its regret."""
    return pd.DataFrame(
        [
            {
                "model": name,
                "median error": found.median_error,
                "worst error": found.worst_error,
                "b* (MiB)": found.predicted_best_mib,
                "regret": found.regret,
            }
            for name, found in accuracies.items()
        ]
    )
