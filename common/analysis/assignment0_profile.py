"""One profile of a training step, opened: its parts, its operators, and what bounds them."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import pandas as pd

from common.analysis.opened_run import open_tables, read_peak
from common.analysis.operator_categories import CATEGORIES, IDLE
from common.analysis.profile_work import BETWEEN, PHASES
from common.perfmodel.peaks import DevicePeak
from common.perfmodel.roofline import Roof, placed

TABLES = ("profile-operators.csv", "profile-steps.csv", "roofline.csv", "device-peak.csv")
IDLE_ON_HOST = "between operators (Python)"


@dataclass(frozen=True)
class ProfileRun:
    """What one run of profile_training.py measured.

    Attributes:
        caption: hardware, date and source, for every figure.
        settings: model, batch_size, seq_len, precision, device and the other settings.
        operators: time_us by step, phase, category, operator and shapes; idle time included.
        steps: time_ms of single steps, ``profiled`` or not.
        roofline: the operators of a step and what bounds them.
        peak: the device's, or None where it is unknown.
    """

    run_dir: Path
    recorded: bool
    caption: str
    settings: dict
    operators: pd.DataFrame
    steps: pd.DataFrame
    roofline: pd.DataFrame
    peak: DevicePeak | None

    @cached_property
    def step(self) -> pd.DataFrame:
        """The operators of the step of median length, which stands for all.

        One real step, because its parts add up to it; the medians of the parts would not.
        """
        lengths = self.operators.groupby("step")["time_us"].sum().sort_values()
        return self.operators[self.operators["step"] == lengths.index[(len(lengths) - 1) // 2]]

    @property
    def step_ms(self) -> float:
        """The length of the step of median length, under the profiler."""
        return self.step["time_us"].sum() / 1e3

    @cached_property
    def parts_ms(self) -> float:
        """The medians over the steps of all parts, added up: what shares of medians refer to."""
        keys = ["phase", "category", "operator", "shapes"]
        parts = self.operators.groupby(["step", *keys])["time_us"].sum().unstack("step")
        return parts.fillna(0.0).median(axis=1).sum() / 1e3

    @property
    def plain_ms(self) -> float:
        """The median of the steps that ran without the profiler."""
        return self.steps.loc[~self.steps["profiled"], "time_ms"].median()

    @property
    def profiled_ms(self) -> float:
        """The median of the steps under the profiler, by the same clock."""
        return self.steps.loc[self.steps["profiled"], "time_ms"].median()

    @property
    def profiler_overhead(self) -> float:
        """What the profiler adds to a step, as a share of it; below zero is noise."""
        return self.profiled_ms / self.plain_ms - 1

    @property
    def on_host(self) -> bool:
        """Whether the time is that of the host's operators, not of a device's kernels."""
        return self.settings["device"] == "cpu"

    def category_name(self, category: str) -> str:
        """A category in words; what no operator uses has its own name on a CPU."""
        return IDLE_ON_HOST if self.on_host and category == IDLE else category

    def phases(self) -> pd.DataFrame:
        """Index: the phases in order. Columns: ms, share."""
        ms = self.step.groupby("phase")["time_us"].sum() / 1e3
        ms = ms.reindex([*PHASES, BETWEEN]).fillna(0.0)
        return pd.DataFrame({"ms": ms, "share": ms / self.step_ms})

    def categories(self) -> pd.DataFrame:
        """Index: categories, the longest first. Columns: ms, share; low_ms, high_ms over steps."""
        by_step = self.operators.groupby(["step", "category"])["time_us"].sum().unstack() / 1e3
        by_step = by_step.fillna(0.0)
        ms = self.step.groupby("category")["time_us"].sum() / 1e3
        spread = {"low_ms": by_step.min(), "high_ms": by_step.max()}
        table = pd.DataFrame({"ms": ms, "share": ms / self.step_ms} | spread).fillna(0.0)
        return table.sort_values("ms", ascending=False)

    def by_phase(self) -> pd.DataFrame:
        """ms by phase (index) and category (columns), both in order, without absent ones."""
        table = self.step.pivot_table(
            index="phase", columns="category", values="time_us", aggfunc="sum", fill_value=0.0
        )
        rows = [phase for phase in (*PHASES, BETWEEN) if phase in table.index]
        return table.loc[rows, [name for name in CATEGORIES if name in table.columns]] / 1e3

    @property
    def roof(self) -> Roof | None:
        """The device's roof for this run's matrix products, or None where it is unknown."""
        return Roof.of(self.peak, self.settings["precision"], self.settings["tf32"])

    def main_operators(self) -> pd.DataFrame:
        """The roofline's operators, one row per phase and operator whatever the shapes.

        Columns: phase, operator, calls, flops, bytes, time_ms, share (of the step), the rates and
        what bounds it; the longest first.
        """
        keys = ["phase", "operator"]
        sums = self.roofline.groupby(keys)[["calls", "flops", "bytes", "time_ms"]].sum()
        sums = sums.assign(share=sums["time_ms"] / self.parts_ms).reset_index()
        places = [
            placed(row.flops, row.bytes, row.time_ms / 1e3, self.roof) for row in sums.itertuples()
        ]
        table = pd.concat([sums, pd.DataFrame(places, index=sums.index)], axis=1)
        return table.sort_values("time_ms", ascending=False, ignore_index=True)


def open_profile(run_dir: str | Path | None = None) -> ProfileRun:
    """Open a run directory; by default the newest complete run, or else recorded measurements.

    Raises UserError where a table is missing.
    """
    main, *others = TABLES
    opened = open_tables(run_dir, "assignment0", main, others)
    return ProfileRun(
        run_dir=opened.folder,
        recorded=opened.recorded,
        caption=opened.caption,
        settings=opened.settings,
        operators=_filled(opened.tables["profile-operators.csv"], "operator", "shapes"),
        steps=opened.tables["profile-steps.csv"],
        roofline=_filled(opened.tables["roofline.csv"], "shapes"),
        peak=read_peak(opened.tables["device-peak.csv"]),
    )


def _filled(table: pd.DataFrame, *texts: str) -> pd.DataFrame:
    """The table; its columns ``texts`` may be empty, which is no missing value."""
    return table.fillna(dict.fromkeys(texts, ""))
