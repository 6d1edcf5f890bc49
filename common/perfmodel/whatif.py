"""How b* moves: with latency, bandwidth, gradient bytes, compute speed and number of ranks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import pandas as pd

from common.errors import UserError
from common.perfmodel.closed_form import closed_form
from common.perfmodel.collectives import AlphaBeta
from common.perfmodel.model import DdpModel
from common.perfmodel.profile import NO_COSTS, BackwardProfile, DdpCosts
from common.perfmodel.search import BestCap


def scale_ranks(measured: AlphaBeta, measured_ranks: int, ranks: int) -> AlphaBeta:
    """α–β of a ring all-reduce on another number of ranks, links being alike.

    A ring makes 2(n−1) steps and sends 2(n−1)/n of the message over each link (Patarasuk and
    Yuan 2009), so latency grows with n−1 and the bytes' share approaches a limit.
    Raises UserError for fewer than 2 ranks.
    """
    if min(measured_ranks, ranks) < 2:
        raise UserError(
            f"an all-reduce on {min(measured_ranks, ranks)} rank: at least 2 are needed"
        )
    steps = (ranks - 1) / (measured_ranks - 1)
    share = ((ranks - 1) / ranks) / ((measured_ranks - 1) / measured_ranks)
    return AlphaBeta(measured.alpha_s * steps, measured.bandwidth_bytes_per_s / share)


@dataclass(frozen=True)
class Case:
    """One "what if": a profile and a network, and what was changed by which factor."""

    quantity: str
    factor: float
    profile: BackwardProfile
    network: AlphaBeta


def cases(
    profile: BackwardProfile, network: AlphaBeta, ranks: int, factors: Sequence[float]
) -> list[Case]:
    """Change one quantity at a time by each factor."""
    found = []
    for factor in factors:
        alpha = replace(network, alpha_s=network.alpha_s * factor)
        beta = replace(network, bandwidth_bytes_per_s=network.bandwidth_bytes_per_s * factor)
        found += [
            Case("latency α", factor, profile, alpha),
            Case("bandwidth β", factor, profile, beta),
            Case("gradient bytes B", factor, profile.scaled(size=factor), network),
            Case("compute time g", factor, profile.scaled(compute=factor), network),
        ]
        if ranks * factor >= 2 and ranks * factor == int(ranks * factor):
            scaled = scale_ranks(network, ranks, int(ranks * factor))
            found.append(Case("ranks n (ring)", factor, profile, scaled))
    return found


def best_caps(found: Sequence[Case], costs: DdpCosts = NO_COSTS) -> pd.DataFrame:
    """b* of each case, by simulation and by the hand-derived equation, in MiB.

    Columns: quantity, factor, best_mib, low_mib and high_mib (the interval of caps around b*
    within 1 % of the best), closed_form_mib (without the limit B/L), total_ms.
    """
    rows = []
    for case in found:
        best = DdpModel(case.profile, case.network, costs).best_cap()
        low, high = near_interval(best)
        unlimited = replace(closed_form(case.profile, case.network), layers=10**9)
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
    """The interval of caps within the tolerance of the best that b* lies in, in MiB."""
    return next(
        (low, high)
        for low, high in best.near_mib
        if low <= best.cap_mib * 1.0000001 and best.cap_mib <= high * 1.0000001
    )
