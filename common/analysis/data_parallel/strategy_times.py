"""Compares steps of strategies: DDP's with those without its exchange, all with the fastest."""

from __future__ import annotations

import pandas as pd

from common.analysis.data_parallel.strategies import EXCHANGING, StrategyTimes
from common.analysis.data_parallel.strategies import open_strategies as open_strategies


def exchange_cost(strategies: StrategyTimes) -> pd.DataFrame:
    """Compares DDP's step with the same computation without communication.

    A row per accumulation at which both were measured. Columns: accumulation, above_noise (the
    verdict on added_share), step_ms and local_ms (medians), added_share (of the step without
    communication, paired by round), added_ms (that share of local_ms), judged (DDP's step over the
    other), second_gap, share_falls and ms_fall (``StrategyTimes.second_gap``, ``exchange_falls``).
    """
    step_ms = strategies.summary().set_index(["accumulation", "strategy"])["step_ms"]
    rows = []
    for accumulation, judged in strategies.exchange.items():
        local_ms, added_share = step_ms[accumulation, "local"], judged.estimate - 1
        falls = strategies.exchange_falls.get(accumulation, (None, None))
        rows.append(
            {
                "accumulation": accumulation,
                "above_noise": judged.said,
                "step_ms": step_ms[accumulation, "DDP"],
                "local_ms": local_ms,
                "added_ms": added_share * local_ms,
                "added_share": added_share,
                "judged": judged,
                "second_gap": strategies.second_gap.get(accumulation),
                "share_falls": falls[0],
                "ms_fall": falls[1],
            }
        )
    columns = ["accumulation", "above_noise", "step_ms", "local_ms", "added_ms", "added_share"]
    columns += ["judged", "second_gap", "share_falls", "ms_fall"]
    return pd.DataFrame(rows, columns=columns)


def over_fastest(strategies: StrategyTimes) -> pd.DataFrame:
    """Compares each exchanging strategy with the fastest one of the same accumulation.

    Columns: accumulation, strategy, fastest (``yes`` for a strategy that is told from all others,
    ``tied`` for those that are not told from the one that looks fastest, else ``no``), above_noise
    (the verdict on over_fastest; None for the fastest itself), step_ms (median), over_fastest (by
    which share a step is longer, paired by round), judged (the step over the fastest's; None for
    the fastest itself).
    """
    step_ms = strategies.summary(EXCHANGING).set_index(["accumulation", "strategy"])["step_ms"]
    rows = []
    for accumulation, times in strategies.exchanging.items():
        best = strategies.fastest(accumulation)
        over = strategies.step_time_ratios_to(accumulation, best.arm) if best else {}
        standing = dict.fromkeys(best.tied, "tied" if len(best.tied) > 1 else "yes") if best else {}
        for name in times:
            judged = over.get(name)
            rows.append(
                {
                    "accumulation": accumulation,
                    "strategy": name,
                    "fastest": standing.get(name, "no" if best else None),
                    "above_noise": judged.said if judged else None,
                    "step_ms": step_ms[accumulation, name],
                    "over_fastest": judged.estimate - 1 if judged else 0.0,
                    "judged": judged,
                }
            )
    columns = ["accumulation", "strategy", "fastest", "above_noise", "step_ms"]
    return pd.DataFrame(rows, columns=[*columns, "over_fastest", "judged"])
