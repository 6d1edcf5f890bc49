"""The performance model's step beside the measured one, for every arm of a sweep.

Everything was measured apart from the steps it predicts, on the most ranks there were and around
the largest batch: passes without an exchange, all-reduces by size, when gradients are ready. Fewer
ranks are assumed to form a smaller ring: an all-reduce of n ranks sends 2(n − 1)/n of the message
through each link, in 2(n − 1) turns.

A step is more than its pieces: ranks drift apart, a machine is slower later, all-reduces and
computation take time from each other. That is found from one arm, the one with the most ranks and
the largest batch (``measured_step``), and held against the others.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import numpy as np
import pandas as pd

from common.analysis.evidence import PROBES, open_evidence
from common.analysis.measured_step import model_from_evidence
from common.analysis.step_parts import flags
from common.errors import UserError
from common.perfmodel.collectives import AllReduceModel, MeasuredAllReduce, as_alpha_beta
from common.perfmodel.pass_times import LinearTime, PassTimes
from common.perfmodel.step_model import StepModel, predict

COLUMNS = (
    *("arm", "predicted_step_ms", "adjusted_step_ms", "predicted_exposed_ms"),
    *("reference", "predicted_communication_ms"),
)


def predicted_steps(folder: Path, arms: pd.DataFrame) -> pd.DataFrame:
    """A row per arm without a change: its step as predicted, in ms.

    Columns: arm; predicted_step_ms (nothing taken from any step); adjusted_step_ms (with what the
    arm marked ``reference`` shows, whose own is then no prediction); predicted_exposed_ms and
    predicted_communication_ms (0 on one rank).

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
    evidence = open_evidence(folder, int(place["arm"]))
    reference = model_from_evidence(evidence)
    apart = from_pieces(reference, evidence.tables[PROBES])
    rows = []
    for arm in plain.itertuples():
        settings = replace(
            reference.settings,
            batch_per_rank=int(arm.batch_per_rank),
            accumulation=int(arm.accumulation),
        )
        if arm.world_size == 1:
            steps = [predict(model, settings).step_1_s * 1e3 for model in (apart, reference)]
            rows.append([arm.arm, *steps, 0.0, False, 0.0])
            continue
        bare, adjusted = (
            predict(on_fewer_ranks(model, int(arm.world_size)), settings)
            for model in (apart, reference)
        )
        rows.append(
            [
                arm.arm,
                bare.step_n_s * 1e3,
                adjusted.step_n_s * 1e3,
                bare.exchange.exposed_communication_s * 1e3,
                arm.arm == place["arm"],
                bare.exchange.communication_s * 1e3,
            ]
        )
    return pd.DataFrame(rows, columns=[*COLUMNS])


def from_pieces(model: StepModel, probes: pd.DataFrame) -> StepModel:
    """The model with passes as probed and without what a step has shown.

    Together, a pass is as long as its slowest rank's; alone, as the fastest rank's, measured at one
    batch and taken to others in proportion.
    """
    together = flags(probes["together"])
    several, single = probes[together], probes[~together]
    lines = []
    for column in ("forward_time_ms", "backward_time_ms"):
        slowest = several.groupby(["batch_per_rank", "repeat"])[column].max()
        medians = slowest.groupby("batch_per_rank").median() / 1e3
        line = LinearTime.fit(medians.index.to_list(), medians.to_list())
        factor = 1.0
        if len(single):
            fastest_s = single.groupby("rank")[column].median().min() / 1e3
            factor = float(fastest_s) / line.time_s(single["batch_per_rank"].iloc[0])
        lines.append((line, LinearTime(line.fixed_s * factor, line.per_sample_s * factor)))
    shared, alone = (PassTimes(*pair) for pair in zip(*lines, strict=True))
    return replace(model, together=shared, alone=alone, contention=0.0)


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
