"""The memory of a rank under each strategy: as predicted from sizes, and as it was measured."""

from __future__ import annotations

import pandas as pd

from common.analysis.assignment1 import Training, TrainingRun
from common.perfmodel.memory import STATE, MemoryPrediction, predict_memory
from common.perfmodel.sharding import Sharding

PARTS = (*STATE, "communication", "activations and the rest")
"""What the bytes of a peak are for, coarsely."""
SHARDINGS = {"single": "none"} | {name: name for name in ("DDP", "FULL_SHARD", "SHARD_GRAD_OP")}


def predict(run: TrainingRun) -> MemoryPrediction | None:
    """The run's memory, from its sizes; None for a strategy that the model does not know."""
    if run.strategy not in SHARDINGS:
        return None
    views = bool(run.settings.get("gradient_as_bucket_view"))
    sharding = Sharding(SHARDINGS[run.strategy], run.ranks, views)
    return predict_memory(run.workload, sharding)


def memory_table(training: Training) -> pd.DataFrame:
    """A row per compared run: predicted and measured peak of the rank that needs most.

    Columns: strategy, ranks, name, a column per part of ``PARTS`` (of the predicted peak),
    predicted_bytes, least_bytes (of the rank that needs least) and measured_bytes (NaN where
    nothing was measured), error.
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
    return table.assign(error=table["predicted_bytes"] / table["measured_bytes"] - 1)
