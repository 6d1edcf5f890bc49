"""Computes each option's gain in a step from raw times: ratios within rounds, with intervals.

The baseline is measured twice, as two arms. This is a control: the two should not be told apart.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import pandas as pd

from common.analysis.one_device.origin import OneDeviceRun
from common.analysis.runs import open_run_with
from common.analysis.show import RATIO, interval_format, ratio_table
from common.csv_tables import numbers
from common.errors import UserError
from common.judged import Judged, compared, fastest
from common.samples import paired_ratio

TIMES, ARMS = "options-times.csv", "options-arms.csv"
BASELINE, AGAIN, ALL = "baseline", "baseline-again", "all"
WITHOUT = "all-but-"
FAST = (
    *("sdpa", "bfloat16", "float16", "tf32", "compile", "fused", "vocab_multiple", "async_batches"),
)
"""Options that the arm ``all`` turns on, of which a device has some."""
OPTIONS = {
    "arm": "arm",
    "above_noise": "told from noise",
    "tokens_per_s": "tokens/s",
    "ratio": "ratio",
    "judged": ("95 % interval", interval_format()),
    "first_step_s": ("first step (s)", "{:.1f}"),
    "peak_allocated_mib": ("peak (MiB)", "{:,.0f}"),
}
"""Titles of ``OptionsRun.measured``."""


@dataclass(frozen=True, eq=False)
class OptionsRun(OneDeviceRun):
    """One run of options.py.

    Attributes:
        times: Rows of options-times.csv.
        arms: Rows of options-arms.csv.
    """

    times: pd.DataFrame
    arms: pd.DataFrame

    @cached_property
    def ratios(self) -> dict[str, Judged]:
        """Returns each arm's rate over the baseline's, paired by round; intervals hold at once."""
        return compared(rates(self.times), BASELINE, **self.conditions)

    @cached_property
    def table(self) -> pd.DataFrame:
        """Returns a row per arm, in the order of options-arms.csv, whose columns are kept.

        Adds tokens_per_s (median over rounds) and, of ``ratios``, ratio, ratio_low, ratio_high,
        above_noise (the verdict) and judged (both None for the baseline); empty where an arm was
        not measured.
        """
        table = _summary(self.ratios, rates(self.times).median())
        table.loc[BASELINE, RATIO] = 1.0
        return self.arms.set_index("arm").join(table).reset_index()

    @cached_property
    def company(self) -> pd.DataFrame:
        """Returns what an option adds to all the others: ``all`` over ``all-but-it``, in rounds.

        Index: options; columns as in ``table``. Empty without such arms.
        """
        by_round = rates(self.times)
        without = [name for name in by_round.columns if name.startswith(WITHOUT)]
        if ALL not in by_round or not without:
            return _summary({}, pd.Series(dtype=float))
        steps = 1 / by_round[[ALL, *without]]  # the ratio of rates is that of times upside down
        table = _summary(compared(steps, ALL, **self.conditions), by_round[without].median())
        return table.rename(index=lambda name: name.removeprefix(WITHOUT))

    @property
    def control(self) -> Judged:
        """Returns the baseline over itself, measured again: it should not be settled."""
        return self.ratios[AGAIN]

    @property
    def measured(self) -> pd.DataFrame:
        """Returns the rows of the arms that were measured, by arm."""
        return self.table[self.table["measured"]].set_index("arm")

    @property
    def alone(self) -> pd.DataFrame:
        """Returns the rows of single options against the baseline, by arm."""
        table = self.measured
        single = ~table.index.isin([BASELINE, AGAIN, ALL]) & ~table.index.str.startswith(WITHOUT)
        return table[single]

    @property
    def clear(self) -> list[str]:
        """Returns the single options whose ratio is settled."""
        return [name for name in self.alone.index if self.ratios[name].is_settled]

    @property
    def unclear(self) -> list[str]:
        """Returns the single options that cannot be told from noise."""
        return [name for name in self.alone.index if name not in self.clear]

    @property
    def largest(self) -> str | None:
        """Returns the single option that gains most, with its ratio, or those that are tied.

        None where none is told from the baseline to be faster.
        """
        best = fastest(1 / rates(self.times)[[BASELINE, *self.alone.index]], **self.conditions)
        if best is None or best.arm not in self.clear or self.ratios[best.arm].estimate < 1:
            return None
        return " or ".join(f"{self.ratios[name].estimate:.2f} ({name})" for name in best.tied)

    @property
    def together(self) -> Judged | None:
        """Returns the ratio of all the fast options together; None where it was not measured."""
        return self.ratios.get(ALL)

    @property
    def over_product(self) -> Judged | None:
        """Returns their ratio together over the product of their single ones; None likewise."""
        by_round = rates(self.times)
        if ALL not in by_round:
            return None
        gains = by_round.div(by_round[BASELINE], axis=0)
        product = gains[[name for name in FAST if name in gains]].prod(axis=1, skipna=False)
        return Judged(paired_ratio(gains[ALL], product), **self.conditions)


def with_interval(judged: Judged) -> str:
    """Returns a ratio, its interval and its verdict, as text."""
    return f"{judged.estimate:.3f} ({judged.interval.text('{:.3f}')}), {judged.said}"


GAINS = {
    "control": ("control: the baseline measured twice", with_interval),
    "clear": ("can be told from the baseline", lambda names: ", ".join(names) or "none"),
    "unclear": ("cannot be told from the baseline", lambda names: ", ".join(names) or "none"),
    "largest": "largest ratio of one option",
    "together": ("ratio of all the fast ones together", with_interval),
    "over_product": ("the same over the product of their single ratios", with_interval),
}
"""Titles of ``OptionsRun``: the control, settled options and others, the largest gains."""


def open_options(run_dir: str | Path | None = None) -> OptionsRun:
    """Opens the options of a run; by default the newest complete one, or else a recorded one.

    Raises UserError where a table is missing or cannot be right.
    """
    opened = open_run_with(run_dir, "assignment0", TIMES, [ARMS])
    times, arms = opened.table(TIMES), opened.table(ARMS)
    for column in ("tokens", "step_time_ms"):
        numbers(times, column, opened.folder / TIMES, above=0)
    for name in {BASELINE, AGAIN} - set(times["arm"]):
        raise UserError(f"{opened.folder / TIMES}: no steps of {name}")
    return OptionsRun(opened=opened, times=times, arms=arms)


def rates(times: pd.DataFrame) -> pd.DataFrame:
    """Returns median tokens per second by round (index) and arm (columns)."""
    tokens_per_s = times["tokens"] / times["step_time_ms"] * 1e3
    return tokens_per_s.groupby([times["round"], times["arm"]]).median().unstack()


def not_measured(run: OptionsRun) -> dict[str, str]:
    """Maps each arm that was not measured to the reason."""
    table = run.table[~run.table["measured"]]
    return dict(zip(table["arm"], table["reason"].fillna(""), strict=True))


def ratios_text(run: OptionsRun) -> str:
    """Returns the table as options.py prints it."""
    table, ratios = run.table, run.ratios
    on_gpu = table["peak_allocated_mib"].notna().any()
    width = max(len(name) for name in table["arm"])
    head = (
        f"{'Arm':<{width}}  {'Tokens/sec':>11}  {'Ratio':>6}  {'95 % interval':>13}  "
        f"{'First step':>10}"
    )
    lines = [head + ("      Memory" if on_gpu else "") + "  Verdict"]
    for row in table.itertuples():
        if not row.measured:
            lines.append(f"{row.arm:<{width}}  {row.reason}")
            continue
        is_told = row.arm in ratios and ratios[row.arm].interval.is_told
        ends = f"{row.ratio_low:.3f}–{row.ratio_high:.3f}" if is_told else "–"
        line = f"{row.arm:<{width}}  {row.tokens_per_s:>11,.0f}  {row.ratio:>6.3f}  {ends:>13}"
        line += f"  {row.first_step_s:>8.1f} s"
        line += f"  {row.peak_allocated_mib:>6,.0f} MiB" if on_gpu else ""
        lines.append(line if pd.isna(row.above_noise) else f"{line}  {row.above_noise}")
    return "\n".join(
        [
            "--- What Each Option Buys ---",
            *lines,
            "Ratio: tokens/s over the baseline's in the same round; intervals hold all at once.",
            f"Control: the baseline over itself, measured again: {with_interval(run.control)}.",
        ]
    )


def _summary(ratios: Mapping[str, Judged], tokens_per_s: pd.Series) -> pd.DataFrame:
    """Returns the median rate, and the ratio with its interval and verdict, by arm."""
    table = ratio_table(ratios, verdict="above_noise")
    return tokens_per_s.rename("tokens_per_s").to_frame().join(table)
