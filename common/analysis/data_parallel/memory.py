"""The memory of a rank under each strategy: predicted from the model's sizes, and measured."""

from __future__ import annotations

import pandas as pd

from common.analysis.data_parallel.training_runs import Training, TrainingRun
from common.perfmodel.one_device.memory import STATE, MemoryPrediction, predict_memory
from common.perfmodel.one_device.sharding import Sharding

PARTS = (*STATE, "communication", "activations and the rest")
"""The parts of a peak, coarsely."""
SHARDINGS = {
    "single": "none",
    "DDP": "DDP",
    "MY_ZERO1": "ZERO1",
    "FULL_SHARD": "FULL_SHARD",
    "SHARD_GRAD_OP": "SHARD_GRAD_OP",
}
"""The name of each strategy in the model of memory."""


def predict(run: TrainingRun) -> MemoryPrediction | None:
    """Predicts the run's memory; None for a strategy, or a precision, that the model lacks."""
    if run.strategy not in SHARDINGS or run.settings["precision"] == "float64":
        return None
    views = bool(run.settings.get("gradient_as_bucket_view"))
    sharding = Sharding(SHARDINGS[run.strategy], run.ranks, views)
    return predict_memory(run.workload, sharding)


def memory_table(training: Training) -> pd.DataFrame:
    """Returns a row per compared run: predicted and measured peak of the rank that needs most.

    Columns: strategy, ranks, name, a column per part of ``PARTS`` (of the predicted peak),
    predicted_bytes, least_bytes (of the rank that needs least) and measured_bytes (NaN where
    nothing was measured), error, over_single_bytes (measured, more than on one device) and
    share_of_ddp (measured, over DDP's on most ranks).
    """
    rows = []
    for name, run in zip(training.names(), training.compared, strict=True):
        row = {"strategy": run.strategy, "ranks": run.ranks, "name": name}
        prediction = predict(run)
        if prediction:
            of_peak = dict(prediction.peak.components)
            row |= {part: of_peak.pop(part, 0) for part in PARTS[:-1]}
            row |= {PARTS[-1]: sum(of_peak.values()), "predicted_bytes": prediction.peak_bytes}
        if "peak_bytes" in run.memory:
            of_ranks = run.memory["peak_bytes"]
            row |= {"least_bytes": of_ranks.min(), "measured_bytes": of_ranks.max()}
        rows.append(row)
    sizes = [*PARTS, "predicted_bytes", "least_bytes", "measured_bytes"]
    table = pd.DataFrame(rows, columns=["strategy", "ranks", "name", *sizes])
    table[sizes] = table[sizes].astype(float)
    measured = table["measured_bytes"]
    return table.assign(
        error=table["predicted_bytes"] / measured - 1,
        over_single_bytes=measured - _measured_on_most_ranks(table, "single"),
        share_of_ddp=measured / _measured_on_most_ranks(table, "DDP"),
    )


def _measured_on_most_ranks(table: pd.DataFrame, strategy: str) -> float:
    """Returns the measured bytes of a strategy's run on most ranks; NaN where there is none."""
    found = table[table["strategy"] == strategy].dropna(subset="measured_bytes")
    if found.empty:
        return float("nan")
    return float(found.loc[found["ranks"].idxmax(), "measured_bytes"])
