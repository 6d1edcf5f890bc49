"""The performance model's step beside the measured one, for every arm of a sweep.

Everything was measured apart from the steps it predicts, on the most ranks there were and around
the largest batch: passes without an exchange, all-reduces by size, when gradients are ready. Fewer
ranks are assumed to form a smaller ring: an all-reduce of n ranks sends 2(n − 1)/n of the message
through each link, in 2(n − 1) turns.

A step is more than its pieces: ranks drift apart, a machine is slower later, all-reduces and
computation take time from each other. That is found from one arm, the one with the most ranks and
the largest batch (``measured_step``), and compared with the others.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import numpy as np
import pandas as pd

from common.analysis.runs import Run
from common.analysis.step_parts import flags
from common.diagnose.evidence.evidence import ARMS, PROBES, evidence_of
from common.diagnose.evidence.measured_step import model_from_evidence, times_longer
from common.errors import UserError
from common.perfmodel.collectives import AllReduceModel, MeasuredAllReduce, as_alpha_beta
from common.perfmodel.ddp.step import BUCKET_VIEW
from common.perfmodel.scaling.step_model import LinearTime, PassTimes, StepModel, predict
from common.samples import slowest_rank

SAME = ("world_size", "batch_per_rank", "accumulation")
"""Columns in which two arms agree whose steps are the same."""


def predicted_steps(opened: Run, tables: Mapping[str, pd.DataFrame]) -> pd.DataFrame:
    """Predicts the step of each arm without a change, in ms.

    ``tables`` are those of the run, with probes (``evidence.read_tables``).

    Returns a row per arm: arm; predicted_step_ms (nothing taken from any step); adjusted_step_ms
    (corrected by what an arm marked ``reference`` shows, whose own is then no prediction, nor is
    that of an arm with the same step in the other regime).

    Raises UserError where nothing was measured apart, or no arm has two ranks.
    """
    arms = tables[ARMS]
    plain = arms[arms["change"].fillna("none") == "none"]
    several = plain[plain["world_size"] > 1]
    if several.empty:
        raise UserError("no arm has two ranks or more: there is no exchange to predict")
    fitted = several.sort_values(["world_size", "batch_per_rank"]).iloc[-1]
    evidence = evidence_of(opened, tables, int(fitted["arm"]))
    reference = model_from_evidence(
        evidence, gradient_as_bucket_view=bool(opened.settings.get(BUCKET_VIEW))
    )
    apart = from_pieces(reference, evidence.tables[PROBES])
    rows = []
    for arm in plain.itertuples():
        ranks = int(arm.world_size)
        settings = replace(
            reference.settings,
            batch_per_rank=int(arm.batch_per_rank),
            accumulation=int(arm.accumulation),
        )
        row = {"arm": arm.arm}
        row["reference"] = ranks > 1 and all(getattr(arm, name) == fitted[name] for name in SAME)
        for name, model in (("predicted", apart), ("adjusted", reference)):
            if ranks == 1:
                step_s = predict(model, settings).step_1_s
            else:
                step_s = predict(on_fewer_ranks(model, ranks), settings).step_n_s
            row[f"{name}_step_ms"] = step_s * 1e3
        rows.append(row)
    return pd.DataFrame(rows)


def prediction_errors(parts: pd.DataFrame, predicted: pd.DataFrame) -> pd.DataFrame:
    """Compares ``predicted_steps`` with measured ones, for the arms on several ranks.

    Returns the rows of both with measured_ms (the plain step, or else the watched one), error and
    adjusted_error (predicted over measured, minus 1; NaN for the reference, which was fitted to).
    """
    table = parts.merge(predicted, on="arm")
    table = table[table["world_size"] > 1].copy()
    table["measured_ms"] = table["plain_step_ms"].astype(float).fillna(table["step_ms"])
    table["error"] = table["predicted_step_ms"] / table["measured_ms"] - 1
    adjusted_error = table["adjusted_step_ms"] / table["measured_ms"] - 1
    table["adjusted_error"] = adjusted_error.where(~table["reference"])
    return table


def from_pieces(model: StepModel, probes: pd.DataFrame) -> StepModel:
    """Returns the model with passes as probed and without what a step has shown.

    Together, a pass is as long as its slowest rank's; alone, as the fastest rank's, measured at one
    batch and taken to others in proportion.
    """
    together = flags(probes["together"])
    several, single = probes[together], probes[~together]

    def both_lines(column: str) -> tuple[LinearTime, LinearTime]:
        slowest = slowest_rank(several, column, by=["batch_per_rank", "repeat"])
        medians = slowest.groupby("batch_per_rank").median() / 1e3
        line = LinearTime.fit(medians.index.to_list(), medians.to_list())
        if single.empty:
            return line, line
        fastest_s = single.groupby("rank")[column].median().min() / 1e3
        factor = float(fastest_s) / line.time_s(single["batch_per_rank"].iloc[0])
        return line, times_longer(line, factor)

    forward, forward_alone = both_lines("forward_time_ms")
    backward, backward_alone = both_lines("backward_time_ms")
    return replace(
        model,
        together=PassTimes(forward=forward, backward=backward),
        alone=PassTimes(forward=forward_alone, backward=backward_alone),
        contention=0.0,
    )


def on_fewer_ranks(model: StepModel, ranks: int) -> StepModel:
    """Returns the model with the all-reduces of a smaller ring over the same links."""
    if ranks == model.ranks:
        return model
    networks: Mapping[str, AllReduceModel] = {
        wire: smaller_ring(network, model.ranks, ranks) for wire, network in model.networks.items()
    }
    return replace(model, ranks=ranks, networks=networks)


def smaller_ring(network: AllReduceModel, measured: int, ranks: int) -> MeasuredAllReduce:
    """Returns an all-reduce of ``ranks``, from one of ``measured`` ranks.

    A ring of n ranks takes 2(n − 1) turns, each of which costs a latency, and sends 2(n − 1)/n of
    the message: the latency of the measured curve (by an α–β fit, at most its least time) shrinks
    with the turns, the rest with the bytes. ``whatif.scale_ranks`` takes the least time itself for
    the latency, which a curve has to begin at small messages for; this one need not.

    Raises UserError for a network that has no sizes of its own.
    """
    if not isinstance(network, MeasuredAllReduce):
        raise UserError("only a measured all-reduce can be taken to fewer ranks")
    latency_s = min(as_alpha_beta(network).alpha_s, float(network.times_s.min()))
    turns = (ranks - 1) / (measured - 1)
    share = turns * measured / ranks
    times = np.maximum(network.times_s - latency_s, 0) * share + latency_s * turns
    return MeasuredAllReduce(network.sizes_bytes, np.maximum(times, 1e-9))
