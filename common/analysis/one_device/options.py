"""Computes each option's gain in a step from raw times: ratios within rounds, and their spread.

Arms are compared within a round, where the machine was the same, and only the ratios are summarised
over rounds. The baseline is measured twice, as two arms: the difference between these is noise.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import pandas as pd

from common.analysis.one_device.origin import OneDeviceRun
from common.analysis.runs import open_run_with
from common.csv_tables import numbers

TIMES, ARMS = "options-times.csv", "options-arms.csv"
BASELINE, AGAIN, ALL = "baseline", "baseline-again", "all"
WITHOUT = "all-but-"
OPTIONS = {
    "arm": "arm",
    "above_noise": "told from noise",
    "tokens_per_s": "tokens/s",
    "ratio": "ratio",
    "ratio_low": "least",
    "ratio_high": "greatest",
    "first_step_s": ("first step (s)", "{:.1f}"),
    "peak_allocated_mib": ("peak (MiB)", "{:,.0f}"),
}
"""Titles of ``OptionsRun.measured``."""


@dataclass(frozen=True, eq=False)
class OptionsRun(OneDeviceRun):
    """One run of options.py.

    Attributes:
        table: A row per arm with its ratio to the baseline (``option_ratios``).
        company: Gains of each option on top of all the others (``in_company``).
        noise_floor: Difference between two measurements of the baseline.
    """

    table: pd.DataFrame
    company: pd.DataFrame
    noise_floor: float

    @property
    def measured(self) -> pd.DataFrame:
        """Returns the rows of the arms that were measured, by arm.

        Adds above_noise: whether the ratio can be told from noise; None for the baselines.
        """
        table = self.table[self.table["measured"]].set_index("arm")
        above_noise = clear(table, self.noise_floor).astype(object)
        return table.assign(above_noise=above_noise.where(~table.index.isin([BASELINE, AGAIN])))

    @property
    def alone(self) -> pd.DataFrame:
        """Returns the rows of single options against the baseline, by arm."""
        table = self.measured
        single = ~table.index.isin([BASELINE, AGAIN, ALL]) & ~table.index.str.startswith(WITHOUT)
        return table[single]

    @property
    def clear(self) -> pd.Series:
        """Returns the ratios of single options that can be told from noise, by arm."""
        return self.alone.loc[self.alone["above_noise"].astype(bool), "ratio"]

    @property
    def largest(self) -> str | None:
        """Returns the largest ratio of a single option above noise, and its name."""
        return f"{self.clear.max():.2f} ({self.clear.idxmax()})" if len(self.clear) else None

    @property
    def unclear(self) -> list[str]:
        """Returns the single options that cannot be told from noise."""
        return [name for name in self.alone.index if name not in self.clear.index]

    @property
    def together(self) -> float | None:
        """Returns the ratio of all the fast options together; None where it was not measured."""
        measured = self.measured
        return measured.at[ALL, "ratio"] if ALL in measured.index else None


GAINS = {
    "noise_floor": ("noise floor (the baseline measured twice)", "{:.1%}"),
    "clear": ("can be told from noise", lambda ratios: ", ".join(ratios.index) or "none"),
    "unclear": ("cannot be told from noise", lambda names: ", ".join(names) or "none"),
    "largest": "largest ratio of one option",
    "together": ("ratio of all the fast ones together", "{:.2f}"),
}
"""Titles of ``OptionsRun``: the noise floor, options beyond and within it, the largest gains."""


def open_options(run_dir: str | Path | None = None) -> OptionsRun:
    """Opens the options of a run; by default the newest complete one, or else a recorded one.

    Raises UserError where a table is missing or cannot be right.
    """
    opened = open_run_with(run_dir, "assignment0", TIMES, [ARMS])
    times, arms = opened.table(TIMES), opened.table(ARMS)
    for column in ("tokens", "step_time_ms"):
        numbers(times, column, opened.folder / TIMES, above=0)
    return OptionsRun(
        opened=opened,
        table=option_ratios(times, arms),
        company=in_company(times),
        noise_floor=noise_floor(times),
    )


def rates(times: pd.DataFrame) -> pd.DataFrame:
    """Returns median tokens per second by round (index) and arm (columns)."""
    tokens_per_s = times["tokens"] / times["step_time_ms"] * 1e3
    return tokens_per_s.groupby([times["round"], times["arm"]]).median().unstack()


def option_ratios(times: pd.DataFrame, arms: pd.DataFrame) -> pd.DataFrame:
    """Returns a row per arm, in the order of options-arms.csv, whose columns are kept.

    Adds tokens_per_s (median over rounds) and, against the baseline of the same round, ratio
    (median), ratio_low and ratio_high (least and greatest); empty where an arm was not measured.
    """
    by_round = rates(times).reindex(columns=arms["arm"])
    ratios = by_round.div(by_round[BASELINE], axis=0)
    return arms.set_index("arm").join(_summary(ratios, by_round)).reset_index()


def in_company(times: pd.DataFrame) -> pd.DataFrame:
    """Returns what an option adds to all the others: ``all`` over ``all-but-it``, within rounds.

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
    """Returns the median over rounds of |again/baseline − 1|: how far noise carries a ratio."""
    by_round = rates(times)
    return float((by_round[AGAIN] / by_round[BASELINE] - 1).abs().median())


def clear(table: pd.DataFrame, floor: float) -> pd.Series:
    """Returns True where a ratio can be told from noise.

    It can where it is on one side of 1 in every round, and further from 1 than the noise floor.
    """
    one_side = (table["ratio_low"] > 1) | (table["ratio_high"] < 1)
    return one_side & ((table["ratio"] - 1).abs() > floor)


def not_measured(run: OptionsRun) -> dict[str, str]:
    """Maps each arm that was not measured to the reason."""
    table = run.table[~run.table["measured"]]
    return dict(zip(table["arm"], table["reason"].fillna(""), strict=True))


def ratios_text(table: pd.DataFrame, floor: float) -> str:
    """Returns the table as options.py prints it."""
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
    """Returns the median rate, and the median, least and greatest ratio over rounds, by arm."""
    return pd.DataFrame(
        {
            "tokens_per_s": by_round.median(),
            "ratio": ratios.median(),
            "ratio_low": ratios.min(),
            "ratio_high": ratios.max(),
        }
    )
