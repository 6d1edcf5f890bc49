"""What each option of a training step buys, from raw times: ratios within rounds, and their spread.

Arms are compared within a round, where the machine was the same, and only the ratios are summarised
over rounds. The baseline is measured twice, as two arms: what differs there is noise.
"""

from __future__ import annotations

import pandas as pd

BASELINE, AGAIN, ALL = "baseline", "baseline-again", "all"
WITHOUT = "all-but-"


def rates(times: pd.DataFrame) -> pd.DataFrame:
    """Median tokens per second by round (index) and arm (columns), from options-times.csv."""
    tokens_per_s = times["tokens"] / times["step_time_ms"] * 1e3
    return tokens_per_s.groupby([times["round"], times["arm"]]).median().unstack()


def option_ratios(times: pd.DataFrame, arms: pd.DataFrame) -> pd.DataFrame:
    """A row per arm, in the order of options-arms.csv, whose columns are kept.

    Adds tokens_per_s (median over rounds) and, against the baseline of the same round, ratio
    (median), ratio_low and ratio_high (least and greatest); empty where an arm was not measured.
    """
    by_round = rates(times).reindex(columns=arms["arm"])
    ratios = by_round.div(by_round[BASELINE], axis=0)
    return arms.set_index("arm").join(_summary(ratios, by_round)).reset_index()


def in_company(times: pd.DataFrame) -> pd.DataFrame:
    """What an option adds to all the others: ``all`` over ``all-but-it``, within rounds.

    Index: options; columns as in ``option_ratios``. Empty without such arms.
    """
    by_round = rates(times)
    without = [name for name in by_round.columns if name.startswith(WITHOUT)]
    if ALL not in by_round or not without:
        return pd.DataFrame(columns=["tokens_per_s", "ratio", "ratio_low", "ratio_high"])
    ratios = 1 / by_round[without].div(by_round[ALL], axis=0)
    table = _summary(ratios, by_round[without])
    return table.rename(index=lambda name: name.removeprefix(WITHOUT))


def noise_floor(times: pd.DataFrame) -> float:
    """Median over rounds of |again/baseline − 1|: what two measurements of one arm differ by."""
    by_round = rates(times)
    return float((by_round[AGAIN] / by_round[BASELINE] - 1).abs().median())


def clear(table: pd.DataFrame, floor: float) -> pd.Series:
    """Which rows say something: on one side of 1 in every round, and beyond the noise floor."""
    one_side = (table["ratio_low"] > 1) | (table["ratio_high"] < 1)
    return one_side & ((table["ratio"] - 1).abs() > floor)


def ratios_text(table: pd.DataFrame, floor: float) -> str:
    """The table as options.py prints it."""
    on_gpu = table["peak_allocated_mib"].notna().any()
    width = max(len(name) for name in table["arm"])
    head = (
        f"{'Arm':<{width}}  {'Tokens/sec':>11}  {'Ratio':>6}  {'min–max':>13}  {'First step':>10}"
    )
    lines = [head + ("     Memory" if on_gpu else "")]
    for row in table.itertuples():
        if not row.measured:
            lines.append(f"{row.arm:<{width}}  {row.reason}")
            continue
        spread = f"{row.ratio_low:.3f}–{row.ratio_high:.3f}"
        line = f"{row.arm:<{width}}  {row.tokens_per_s:>11,.0f}  {row.ratio:>6.3f}  {spread:>13}"
        line += f"  {row.first_step_s:>8.1f} s"
        lines.append(line + (f"  {row.peak_allocated_mib:>5,.0f} MiB" if on_gpu else ""))
    return "\n".join(
        [
            "--- What Each Option Buys ---",
            *lines,
            "Ratio: tokens/s over the baseline's in the same round; median, least and greatest.",
            f"Noise floor: measured twice, the baseline differs by {floor:.1%} (median of rounds).",
        ]
    )


def _summary(ratios: pd.DataFrame, by_round: pd.DataFrame) -> pd.DataFrame:
    return pd.DataFrame(
        {
            "tokens_per_s": by_round.median(),
            "ratio": ratios.median(),
            "ratio_low": ratios.min(),
            "ratio_high": ratios.max(),
        }
    )
