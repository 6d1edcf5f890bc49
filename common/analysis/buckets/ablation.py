"""Finds what each term of the model is worth: predictions from the hand-derived equation up.

Two questions are asked of every term: what adding it to the simpler model changes, and what the
full model loses without it. They have different answers where terms make up for each other.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import pandas as pd

from common.analysis.buckets.measurements import Assignment2Run, path_of
from common.analysis.buckets.networks import NetworkRun
from common.analysis.buckets.sweep import Accuracy, BucketSweep
from common.analysis.show import judged_format
from common.judged import Judged
from common.perfmodel.buckets import DdpOptions
from common.perfmodel.collectives import as_alpha_beta
from common.perfmodel.ddp.step import StepOptions
from common.perfmodel.model import CURVE, FULL, SEVERAL, SLOWEST, DdpModel, Predictor
from common.perfmodel.samples import ReadySamples
from common.perfmodel.tables import read_ready_samples, read_step_parts
from common.samples import paired_difference, student

OWN_SPEED = "full model, sweep's own speed"
AT_OWN_SPEED = "at the sweep's own speed"
REMOVED = "of the error above, gone"
COST_TERMS = {
    "copies in": "copy_in",
    "copies out": "copy_out",
    "computation slowed": "compute_slowdown",
    "all-reduces slowed": "communication_slowdown",
}
"""Term left out of the full model → its name in ``DdpCosts.without``."""
ADDED, LEFT_OUT = "added", "left out"
EXPOSED = {
    "bucket_cap_mib": "cap (MiB)",
    "predicted_ms": "exposed, predicted (ms)",
    "recorded_ms": "exposed, DDP's record (ms)",
    "judged": ("record over prediction, by rounds (ms)", judged_format("{:+.1f}")),
}
"""Titles of ``exposed_communication``."""
WHOLE_STEPS = {
    "bucket_cap_mib": "cap (MiB)",
    "num_buckets": "buckets",
    "predicted_ms": "step, predicted (ms)",
    "measured_ms": "step, measured (ms)",
    "error": "error",
}
"""Titles of ``whole_steps``."""
TERM_COLUMNS = ("network", "group", "term", "median_error", "worst_error", "noise_floor", "cases")


def own_speed_model(run: Assignment2Run) -> DdpModel:
    """Returns the full model with the speed at which the sweep's own rounds computed."""
    in_sweep = run.profile.scaled(compute=run.local_s / run.profile.backward_s)
    return replace(run.model, profile=in_sweep)


def compare(run: Assignment2Run) -> dict[str, Accuracy]:
    """Evaluates every rung of the ladder on the run's own sweep.

    One more is no prediction: it takes the speed of computation from the sweep's own rounds, and so
    shows what the terms of communication alone are worth.
    """
    at_own_speed = run.sweep.accuracy_of(own_speed_model(run).backward_s)
    return of_ladder(run.model, run.sweep) | {OWN_SPEED: at_own_speed}


def compare_at_own_speed(run: Assignment2Run) -> dict[str, Accuracy]:
    """Evaluates each rung when told how fast the sweep computed: what its terms are worth then.

    Where the speed changed between two benchmarks, a model that lacks a term may be closer than
    one that has it, as two errors make up for each other. Here they cannot.
    """
    return of_ladder(own_speed_model(run), run.sweep)


def of_ladder(model: DdpModel, sweep: BucketSweep) -> dict[str, Accuracy]:
    """Evaluates every rung of a model's ladder on a sweep."""
    return {name: sweep.accuracy_of(predict) for name, predict in model.ladder().items()}


def errors(accuracies: dict[str, Accuracy]) -> pd.DataFrame:
    """Tabulates the errors by cap (rows, MiB) and model (columns)."""
    return pd.DataFrame(
        {
            name: accuracy.table.set_index("bucket_cap_mib")["error"]
            for name, accuracy in accuracies.items()
        }
    )


def summary(accuracies: Mapping[str, Accuracy], own_speed: Mapping[str, Accuracy]) -> pd.DataFrame:
    """Tabulates one row per model of the ladder.

    Columns: median error, how much of the error of the model before it goes (over rounds), median
    error at the sweep's own speed, worst error, the measured cap it would choose, the regret of
    that, and whether the regret is told from noise.

    Args:
        accuracies: Result of ``compare``.
        own_speed: Result of ``compare_at_own_speed``.
    """
    removed = removed_errors(accuracies)
    claims = len(removed.columns)
    judged = {
        name: Judged(student(rounds, claims=claims), null=0.0, **accuracies[name].conditions)
        for name, rounds in removed.items()
    }
    return pd.DataFrame(
        [
            {
                "model": name,
                "median error": accuracy.median_error,
                REMOVED: judged_format("{:.1%}")(judged[name]) if name in judged else "–",
                AT_OWN_SPEED: own_speed[name].median_error,
                "worst error": accuracy.worst_error,
                "chosen cap (MiB)": accuracy.predicted_best_mib,
                "regret": accuracy.regret.estimate,
                "told from noise": accuracy.regret.said,
            }
            for name, accuracy in accuracies.items()
            if name in own_speed
        ]
    )


def removed_errors(accuracies: Mapping[str, Accuracy]) -> pd.DataFrame:
    """Returns how much of the median error goes with each model's term, the models in the order
    of their terms: a row per round, a column per model but the first."""
    ladder = {name: accuracies[name].errors_by_round for name in accuracies if name != OWN_SPEED}
    return -pd.DataFrame(ladder).diff(axis=1).iloc[:, 1:]


def simpler_models(
    models: Mapping[str, Accuracy], own_speed: Mapping[str, Accuracy]
) -> dict[str, str]:
    """Returns the median errors without copies and contention, and at the sweep's own speed.

    Args:
        models: result of ``compare``.
        own_speed: result of ``compare_at_own_speed``.
    """
    more = judged_format("{:+.1%}")(error_without(models, CURVE))
    return {
        "median error without copies and contention": f"{models[CURVE].median_error:.1%}",
        "more than with both, by rounds": more,
        "median error at the sweep's own speed": f"{own_speed[FULL].median_error:.1%}",
        "median error without both, at that speed": f"{own_speed[CURVE].median_error:.1%}",
    }


def error_without(models: Mapping[str, Accuracy], simpler: str) -> Judged:
    """Judges by how much a simpler model's median error is larger than the full one's."""
    rounds = models[simpler].errors_by_round, models[FULL].errors_by_round
    return Judged(paired_difference(*rounds), null=0.0, **models[FULL].conditions)


def ready_samples(run: Assignment2Run) -> ReadySamples:
    """Reads all gradient-ready times of a run, of each rank and pass."""
    return read_ready_samples(path_of(run.run_dir, "gradient-ready-times.csv"))


def term_errors(networks: Sequence[NetworkRun], ready: ReadySamples | None = None) -> pd.DataFrame:
    """Computes the model's errors on every network, with ever more terms and without each.

    Args:
        networks: Measured sweeps with what predicts them.
        ready: Samples behind their profile; with them the slowest rank is a term too.

    Returns:
        TERM_COLUMNS: ``group`` is ``added`` (each with all before it) or ``left out`` (of the full
        model).
    """
    rows = []
    for run in networks:
        for (group, term), predict in _models(run, ready).items():
            accuracy = run.sweep.accuracy_of(predict)
            errors_ = (accuracy.median_error, accuracy.worst_error, accuracy.noise_floor)
            rows.append((run.link, group, term, *errors_, len(accuracy.table)))
    return pd.DataFrame(rows, columns=list(TERM_COLUMNS))


def _models(run: NetworkRun, ready: ReadySamples | None) -> Mapping[tuple[str, str], Predictor]:
    """Returns every rung of the ladder, and the full model without each of its terms."""
    full, costs = run.model, run.model.costs
    changed = {(LEFT_OUT, "measured a(x)"): replace(full, network=as_alpha_beta(full.network))}
    one_rank = ready.profile(rank=0) if ready else None
    if one_rank:
        changed[LEFT_OUT, SLOWEST] = replace(full, profile=one_rank)
    for name, term in COST_TERMS.items():
        changed[LEFT_OUT, name] = replace(full, costs=costs.without(term))
    if full.in_flight > 1:
        changed[LEFT_OUT, SEVERAL] = replace(full, in_flight=1, crowded_network=None)
    ladder = {(ADDED, name): predict for name, predict in full.ladder(one_rank).items()}
    return ladder | {key: model.backward_s for key, model in changed.items()}


def exposed_communication(run: Assignment2Run) -> pd.DataFrame:
    """Tabulates exposed communication as the model predicts and DDP recorded it, by explicit cap.

    Both begin when the last bucket has been launched, after the copy of the last gradient into it,
    and end when the last bucket is copied back. In PyTorch's reducer.cpp that is from the callback
    that ``Reducer::mark_variable_ready`` queues, where the end of computation is noted, to the end
    of ``finalize_backward``.

    Columns: bucket_cap_mib, predicted_ms, recorded_ms (of the rank that waits for nobody), judged
    (recorded − predicted in ms, over rounds; the intervals of all caps hold at once).
    """
    recorded_ms = run.exposed_ms.groupby("bucket_cap_mib").median()
    rounds_ms = run.exposed_ms.groupby(["round", "bucket_cap_mib"]).median().unstack()
    caps, rows = [cap for cap in recorded_ms.index if cap in run.sweep.measured_s()], []
    for cap in caps:
        predicted_ms = run.model.at_cap(cap).exposed_communication_s * 1e3
        more_ms = student(rounds_ms[cap] - predicted_ms, claims=len(caps))
        judged = Judged(more_ms, null=0.0, **run.conditions)
        rows.append((cap, predicted_ms, recorded_ms[cap], judged))
    return pd.DataFrame(rows, columns=list(EXPOSED))


def whole_steps(run: Assignment2Run) -> pd.DataFrame:
    """Tabulates whole steps of DDP, predicted and measured, by distinct bucketing.

    Forward pass and update are those of the steps without DDP among the rounds of the sweep.
    Columns: bucket_cap_mib, num_buckets, predicted_ms, measured_ms, error.
    """
    parts = read_step_parts(path_of(run.run_dir, "local-times.csv"))
    table = (
        run.sweep.distinct().summary("step_time_ms").rename(columns={"median_ms": "measured_ms"})
    )
    table = table[["bucket_cap_mib", "num_buckets", "measured_ms"]]
    table["predicted_ms"] = [
        run.model.step(parts, StepOptions(DdpOptions(cap))).total_s * 1e3
        for cap in table["bucket_cap_mib"]
    ]
    return table.assign(error=table["predicted_ms"] / table["measured_ms"] - 1)
