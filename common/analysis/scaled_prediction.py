"""The performance model's step beside the measured one, for every arm of a sweep.

Everything was measured apart from the steps it predicts, on the most ranks there were and around
the largest batch: passes without an exchange, all-reduces by size, when gradients are ready. Fewer
ranks are assumed to form a smaller ring: an all-reduce of n ranks sends 2(n − 1)/n of the message
through each link, in 2(n − 1) turns.

On ranks that share a machine, all-reduces and computation also take time from each other. That is
found from one arm, the one with the most ranks and the largest batch, and held against the others.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import numpy as np
import pandas as pd

from common.analysis.evidence import open_evidence
from common.analysis.measured_step import model_from_evidence
from common.errors import UserError
from common.perfmodel.collectives import AllReduceModel, MeasuredAllReduce
from common.perfmodel.scaled_step import StepModel, as_alpha_beta, predict

COLUMNS = (
    *("arm", "predicted_step_ms", "predicted_with_contention_ms", "predicted_exposed_ms"),
    *("reference", "predicted_communication_ms"),
)


def predicted_steps(folder: Path, arms: pd.DataFrame) -> pd.DataFrame:
    """A row per arm without a change: its step as predicted, in ms.

    Columns: arm; predicted_step_ms (nothing fitted); predicted_with_contention_ms (with what the
    arm marked ``reference`` shows, whose own prediction is then no prediction);
    predicted_exposed_ms and predicted_communication_ms (0 on one rank).

    Args:
        folder: of a run with probes.
        arms: its ``arms.csv``.

    Raises UserError where nothing was measured apart, or no arm has two ranks.
    """
    plain = arms[arms["change"].fillna("none") == "none"]
    several = plain[plain["world_size"] > 1]
    if several.empty:
        raise UserError("no arm has two ranks or more: there is no exchange to predict")
    place = several.sort_values(["world_size", "batch_per_rank"]).iloc[-1]
    reference = model_from_evidence(open_evidence(folder, int(place["arm"])))
    rows = []
    for arm in plain.itertuples():
        settings = replace(
            reference.settings,
            batch_per_rank=int(arm.batch_per_rank),
            accumulation=int(arm.accumulation),
        )
        if arm.world_size == 1:
            step_s = predict(reference, settings).step_1_s
            rows.append([arm.arm, step_s * 1e3, step_s * 1e3, 0.0, False, 0.0])
            continue
        fitted = on_fewer_ranks(reference, int(arm.world_size))
        bare = predict(replace(fitted, contention=0.0), settings)
        rows.append(
            [
                arm.arm,
                bare.step_n_s * 1e3,
                predict(fitted, settings).step_n_s * 1e3,
                bare.exchange.exposed_communication_s * 1e3,
                arm.arm == place["arm"],
                bare.exchange.communication_s * 1e3,
            ]
        )
    return pd.DataFrame(rows, columns=[*COLUMNS])


def on_fewer_ranks(model: StepModel, ranks: int) -> StepModel:
    """The model with the all-reduces of a smaller ring over the same links."""
    if ranks == model.ranks:
        return model
    networks: Mapping[str, AllReduceModel] = {
        wire: smaller_ring(network, model.ranks, ranks) for wire, network in model.networks.items()
    }
    return replace(model, ranks=ranks, networks=networks)


def smaller_ring(network: AllReduceModel, measured: int, ranks: int) -> MeasuredAllReduce:
    """An all-reduce of ``ranks``, from one of ``measured`` ranks: latency by turns, rest by bytes.

    Raises UserError for a network that has no sizes of its own.
    """
    if not isinstance(network, MeasuredAllReduce):
        raise UserError("only a measured all-reduce can be taken to fewer ranks")
    latency_s = min(as_alpha_beta(network).alpha_s, float(network.times_s.min()))
    turns = (ranks - 1) / (measured - 1)
    share = turns * measured / ranks
    times = np.maximum(network.times_s - latency_s, 0) * share + latency_s * turns
    return MeasuredAllReduce(network.sizes_bytes, np.maximum(times, 1e-9))
