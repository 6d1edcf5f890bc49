"""Dependence of b* on latency, bandwidth, gradient bytes, compute speed and number of ranks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

import pandas as pd

from common.errors import UserError
from common.perfmodel.collectives import AllReduceModel, scaled
from common.perfmodel.ddp.best_cap import BestCap
from common.perfmodel.ddp.closed_form import closed_form
from common.perfmodel.model import DdpModel


def scale_ranks(measured: AllReduceModel, measured_ranks: int, ranks: int) -> AllReduceModel:
    """Returns a ring's all-reduces on another number of ranks, links being alike.

    A ring makes 2(n−1) steps and sends 2(n−1)/n of the message over each link (Patarasuk and
    Yuan 2009). Raises UserError for fewer than 2 ranks.
    """
    if min(measured_ranks, ranks) < 2:
        raise UserError(
            f"an all-reduce on {min(measured_ranks, ranks)} rank: at least 2 are needed"
        )
    steps = (ranks - 1) / (measured_ranks - 1)
    share = ((ranks - 1) / ranks) / ((measured_ranks - 1) / measured_ranks)
    return scaled(measured, latency=steps, transfer=share)


@dataclass(frozen=True)
class Case:
    """One "what if": a system in which one quantity was changed by a factor."""

    quantity: str
    factor: float
    model: DdpModel


def cases(model: DdpModel, ranks: int, factors: Sequence[float]) -> list[Case]:
    """Changes one quantity of a system of so many ranks at a time, by each factor.

    Latency that is added to every bucket is a part of α, which does not grow with the ranks.
    """
    changes = []
    for factor in factors:
        smaller, slower = model.profile.scaled(size=factor), model.profile.scaled(compute=factor)
        later = _with_network(model, partial(scaled, latency=factor))
        later = replace(later, added_latency_s=model.added_latency_s * factor)
        changes += [
            Case("latency α", factor, later),
            Case("bandwidth β", factor, _with_network(model, partial(scaled, transfer=1 / factor))),
            Case("gradient bytes B", factor, replace(model, profile=smaller)),
            Case("compute time g", factor, replace(model, profile=slower)),
        ]
        changed_ranks = int(ranks * factor)
        if changed_ranks >= 2 and changed_ranks == ranks * factor:
            more = partial(scale_ranks, measured_ranks=ranks, ranks=changed_ranks)
            changed = _with_network(model, more)
            changes.append(Case("ranks n (ring)", factor, changed))
    return changes


def _with_network(model: DdpModel, change: Callable[[AllReduceModel], AllReduceModel]) -> DdpModel:
    crowded = change(model.crowded_network) if model.crowded_network else None
    return replace(model, network=change(model.network), crowded_network=crowded)


def best_caps(changes: Sequence[Case]) -> pd.DataFrame:
    """Finds b* of each case, by simulation and by the hand-derived equation, in MiB.

    Columns: quantity, factor, best_mib, low_mib and high_mib (the interval of caps around b*
    within 1 % of the best), closed_form_mib (of ``DdpModel.line``, without the limit B/L),
    total_ms.
    """
    rows = []
    for case in changes:
        best = case.model.best_cap()
        low, high = near_interval(best)
        by_hand = closed_form(case.model.profile, case.model.line)
        unlimited = replace(by_hand, layers=10**9)
        rows.append(
            {
                "quantity": case.quantity,
                "factor": case.factor,
                "best_mib": best.cap_mib,
                "low_mib": low,
                "high_mib": high,
                "closed_form_mib": unlimited.best_bucket_bytes() / 2**20,
                "total_ms": best.total_s * 1e3,
            }
        )
    return pd.DataFrame(rows)


def near_interval(best: BestCap) -> tuple[float, float]:
    """Returns the interval of caps near the best that b* lies in, in MiB."""
    # b* may lie outside of its own interval by a rounding error.
    return next(
        (low, high)
        for low, high in best.near_mib
        if low <= best.cap_mib * 1.0000001 and best.cap_mib <= high * 1.0000001
    )
