"""Takes a training run apart: the memory of a rank, and the time of its traced steps.

Memory is predicted from the model's sizes, and measured. The trainer reads its traces when it ends
(``traces/step_overlap`` does) and keeps the result as tables: these are small enough to record, and
traces are not.
"""

from __future__ import annotations

import pandas as pd

from common.analysis.data_parallel.training_runs import Training, TrainingRun
from common.analysis.step_parts import middle_half
from common.errors import UserError
from common.judged import Judged
from common.perfmodel.one_device.memory import predict_memory
from common.perfmodel.one_device.moments import STATE, MemoryPrediction
from common.perfmodel.one_device.sharding import Sharding
from common.samples import mean_ratio, student
from common.traces.step_overlap import TIMES

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
OVERLAP, COLLECTIVES = "step-overlap.csv", "step-collectives.csv"
LEAST_BYTES = 1024
"""Smaller collectives are bookkeeping: the loss and the norm of the gradients."""


def predicted_memory(run: TrainingRun) -> MemoryPrediction | None:
    """Predicts the run's memory; None for a strategy, or a precision, that the model lacks."""
    if run.strategy not in SHARDINGS or run.settings["precision"] == "float64":
        return None
    views = bool(run.settings.get("gradient_as_bucket_view"))
    sharding = Sharding(SHARDINGS[run.strategy], run.ranks, views)
    return predict_memory(run.workload, sharding)


def peak_memory(training: Training) -> pd.DataFrame:
    """Returns a row per compared run: predicted and measured peak of the rank that needs most.

    Columns: strategy, ranks, name, a column per part of ``PARTS`` (of the predicted peak),
    predicted_bytes, least_bytes (of the rank that needs least) and measured_bytes (NaN where
    nothing was measured), error, over_single_bytes (measured, more than on one device) and
    share_of_ddp (measured, over DDP's on most ranks).
    """
    rows = []
    for name, run in training.named():
        row = {"strategy": run.strategy, "ranks": run.ranks, "name": name}
        prediction = predicted_memory(run)
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
    measured = table[table["strategy"] == strategy].dropna(subset="measured_bytes")
    if measured.empty:
        return float("nan")
    return float(measured.loc[measured["ranks"].idxmax(), "measured_bytes"])


def overlap_by_run(training: Training) -> pd.DataFrame:
    """Returns a row per compared run that was traced: means over its slowest rank's traced steps.

    Columns: name, strategy, ``TIMES`` (computation, exposed communication and idle time add up to
    the step, overlap and exposed communication to communication), hidden (overlap over
    communication, of all traced steps; NaN for ``single``), judged (the same with its interval;
    None for it), collectives (a step, without those of a few bytes), slowdown (a traced step over
    the median of the run's other steps; NaN where all were traced).
    """
    rows = []
    for name, run in training.named():
        if not run.opened.has(OVERLAP):
            continue
        traced = run.opened.table(OVERLAP)
        if not traced.empty:
            rows.append({"name": name, "strategy": run.strategy} | _mean_step(run, traced))
    columns = ["name", "strategy", *TIMES, "hidden", "judged", "collectives", "slowdown"]
    return pd.DataFrame(rows, columns=columns)


def training_overlap(training: Training) -> pd.DataFrame:
    """Returns ``overlap_by_run``. Raises UserError where no run was traced."""
    table = overlap_by_run(training)
    if table.empty:
        raise UserError(f"{training.folder.name}: no traces; train without --no-profile")
    return table


def collectives_per_step(collectives: pd.DataFrame) -> str:
    """Returns the collectives of a traced step, such as ``4 all_reduce``.

    Those of unknown size count, too.
    """
    sizes = collectives["size_bytes"]
    large = collectives[sizes.isna() | (sizes >= LEAST_BYTES)]
    by_step = large.pivot_table(
        index="step", columns="operation", values="count", aggfunc="sum", fill_value=0
    )
    # Rows are gathered after some of the steps: what most steps do not have is no part of a step.
    counts = by_step.reindex(collectives["step"].unique(), fill_value=0).median()
    named = [f"{count:g} {operation}" for operation, count in counts.items() if count]
    return ", ".join(named) or "none"


def _mean_step(run: TrainingRun, traced: pd.DataFrame) -> dict:
    """Returns the mean traced step of a run's slowest rank, with the columns of the table."""
    # The rank with the longest median step sets the pace. Its parts are means over the same steps,
    # since these add up and medians do not; the middle half of the steps, by their length, keeps
    # hiccups of the machine out.
    slowest = traced.groupby("rank")["step_ms"].median().idxmax()
    steps = traced[traced["rank"] == slowest]
    mean = steps.loc[middle_half(steps["step_ms"]), list(TIMES)].mean()
    shared = run.strategy != "single" and steps["communication_ms"].any()
    overlap_ms = steps["overlap_ms"]
    share = student(overlap_ms)  # nothing, where nothing overlaps
    if shared and overlap_ms.any():
        share = mean_ratio(overlap_ms, steps["communication_ms"])
    collectives = run.opened.table(COLLECTIVES)
    other_steps = run.step_times_ms()["step_time_ms"]
    return mean.to_dict() | {
        "hidden": share.estimate if shared else float("nan"),
        "judged": Judged(share, null=None) if shared else None,
        "collectives": collectives_per_step(collectives[collectives["rank"] == slowest]),
        "slowdown": mean["step_ms"] / other_steps.median(),
    }
