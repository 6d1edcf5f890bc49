"""A profile of a training step, opened: its parts, its operators, and what bounds them."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

import pandas as pd

from common.analysis.one_device.origin import OneDeviceRun, origin_of, product_type, step_text
from common.analysis.runs import open_run_with, read_peak
from common.errors import UserError
from common.judged import FIRST_PAGE_ROUNDS, Fastest, Judged, fastest
from common.perfmodel.one_device.peaks import DevicePeak
from common.perfmodel.one_device.roofline import COMPUTE, MEMORY, Roof, placed
from common.samples import paired_ratio, student
from common.traces.operator_categories import (
    BOOKKEEPING,
    COPIES,
    ELEMENTWISE,
    FUSED,
    IDLE,
    LOSS,
    NORMALISATION,
    operator_category,
)
from common.traces.trace_work import BETWEEN, PHASES, in_phase

TABLES = ("profile-operators.csv", "profile-steps.csv", "roofline.csv", "device-peak.csv")
COMMAND = "uv run python assignments/assignment0/profile_training.py"
IDLE_ON_HOST = "between operators (Python)"
BETWEEN_PRODUCTS = (ELEMENTWISE, FUSED, NORMALISATION, LOSS, COPIES)
"""Kinds of work that fusing can merge: all but matrix products and attention."""
BUSY = 0.1
"""Idle share up to which the host keeps a GPU busy."""
ABOVE_ROOF = 1.05
"""Share of the roof from which on an operator counts as above it."""


@dataclass(frozen=True, eq=False)
class ProfileRun(OneDeviceRun):
    """One run of profile_training.py.

    Attributes:
        operators: Times (time_us) by step, phase, category, operator and shapes; idle time, too.
        steps: Times (time_ms) of single steps, ``profiled`` or not.
        roofline: Operators of a step and what bounds them.
        peak: Peaks of the device, or None where they are unknown.
    """

    operators: pd.DataFrame
    steps: pd.DataFrame
    roofline: pd.DataFrame
    peak: DevicePeak | None

    @property
    def origin(self) -> str:
        """Returns the line that says whose data these are, as Markdown."""
        return origin_of(self.opened, self.workload, COMMAND)

    @property
    def workload(self) -> str:
        """Returns model, batch, sequence, precision, optimizer, and what is not the default."""
        return step_text(self.settings)

    @property
    def trace(self) -> Path | None:
        """Returns the path of the trace; None where the run did not keep it."""
        path = self.opened.folder / "trace.json.gz"
        return path if path.is_file() else None

    @cached_property
    def step(self) -> pd.DataFrame:
        """Returns the operators of the step of median length, which stands for all.

        One real step, because its parts add up to it; the medians of the parts would not.
        """
        lengths = self.operators.groupby("step")["time_us"].sum().sort_values()
        return self.operators[self.operators["step"] == lengths.index[(len(lengths) - 1) // 2]]

    @property
    def step_ms(self) -> float:
        """Returns the length of the step of median length, under the profiler."""
        return self.step["time_us"].sum() / 1e3

    @cached_property
    def parts_ms(self) -> float:
        """Returns the sum of all parts' medians over the steps: the whole of shares of medians."""
        keys = ["phase", "category", "operator", "shapes"]
        parts = self.operators.groupby(["step", *keys])["time_us"].sum().unstack("step")
        return parts.fillna(0.0).median(axis=1).sum() / 1e3

    def _steps_ms(self, *, profiled: bool) -> pd.Series:
        """Returns the times of steps, by the same clock under the profiler and without it."""
        return self.steps.loc[self.steps["profiled"] == profiled, "time_ms"]

    @property
    def plain_ms(self) -> float:
        """Returns the median of the steps that ran without the profiler."""
        return self._steps_ms(profiled=False).median()

    @property
    def profiled_ms(self) -> float:
        """Returns the median of the steps under the profiler."""
        return self._steps_ms(profiled=True).median()

    @property
    def repeats(self) -> int:
        """Returns the number of steps with the profiler, and as many without."""
        return len(self.steps) // 2

    @cached_property
    def overhead(self) -> Judged:
        """Returns a step under the profiler over one without it, paired in the order of time."""
        plain, profiled = self._steps_ms(profiled=False), self._steps_ms(profiled=True)
        pairs = min(len(plain), len(profiled))
        return Judged(paired_ratio(profiled[:pairs], plain[:pairs]), **self.conditions)

    @property
    def conditions(self) -> dict[str, str]:
        """Returns scope and state of the machine, as ``Judged`` takes them."""
        return {"scope": self.workload, "machine": self.opened.machine_state}

    @cached_property
    def category_ms(self) -> pd.DataFrame:
        """Returns the time of each kind of work: a row per profiled step, a column per category."""
        by_step = self.operators.groupby(["step", "category"])["time_us"].sum().unstack() / 1e3
        return by_step.fillna(0.0)

    @cached_property
    def most(self) -> Fastest | None:
        """Returns the kind of work that takes most, ``lead`` being over its closest rival."""
        always = self.category_ms.loc[:, (self.category_ms > 0).all()]
        return fastest(1 / always, least_rounds=FIRST_PAGE_ROUNDS, **self.conditions)

    @property
    def on_host(self) -> bool:
        """Returns True if the time is that of the host's operators, not of a device's kernels."""
        return self.settings["device"] == "cpu"

    def category_name(self, category: str) -> str:
        """Returns a category in words; time of no operator has its own name on a CPU."""
        return IDLE_ON_HOST if self.on_host and category == IDLE else category

    @property
    def idle_name(self) -> str:
        """Returns what the time of no operator is called."""
        return self.category_name(IDLE)

    @property
    def idle_share(self) -> Judged:
        """Returns the share of a step in which nothing computes."""
        return self.share_of(IDLE)

    @property
    def bookkeeping_share(self) -> Judged | None:
        """Returns the share of a step that the host spends on bookkeeping; None on a GPU."""
        return self.share_of(BOOKKEEPING) if self.on_host else None

    @property
    def keeps_busy(self) -> str | None:
        """Returns whether the host keeps the GPU busy, by ``BUSY``, in words; None on a CPU."""
        idle = replace(self.idle_share, null=BUSY)
        is_busy = "yes" if idle.estimate < BUSY else "no"
        return None if self.on_host else is_busy if idle.is_settled else idle.said

    def phase_costs(self) -> pd.DataFrame:
        """Returns time and operations of each phase, also as multiples of the forward pass's.

        Index: the phases in order. Columns: ms, share, flops, ms_over_forward, flops_over_forward;
        judged (the time over forward's in all profiled steps; None but for the backward pass).
        """
        order = [*PHASES, BETWEEN]
        ms = self.step.groupby("phase")["time_us"].sum().reindex(order).fillna(0.0) / 1e3
        flops = self.roofline.groupby("phase")["flops"].sum().reindex(order).fillna(0.0)
        judged = {"backward": self.backward_over_forward}
        return pd.DataFrame(
            {
                "ms": ms,
                "share": ms / self.step_ms,
                "flops": flops,
                "ms_over_forward": ms / (ms["forward"] or float("nan")),
                "flops_over_forward": flops / (flops["forward"] or float("nan")),
                "judged": [judged.get(phase) for phase in order],
            }
        )

    @property
    def backward_over_forward(self) -> Judged:
        """Returns the time of the backward pass over that of the forward pass."""
        forward, backward = (
            self.times_ms(self.operators["phase"] == phase) for phase in ("forward", "backward")
        )
        return Judged(student(backward / forward), **self.conditions)

    def categories(self) -> pd.DataFrame:
        """Returns the time of each kind of work.

        Index: categories, the longest first. Columns: ms, share; low_ms, high_ms over steps; kind,
        the category's name; flops_share; judged (the share over all profiled steps); most (the
        verdict on the lead of the one that takes most; None for the others).
        """
        by_step, most = self.category_ms, self.most
        ms = self.step.groupby("category")["time_us"].sum() / 1e3
        spread = {"low_ms": by_step.min(), "high_ms": by_step.max()}
        table = pd.DataFrame({"ms": ms, "share": ms / self.step_ms} | spread).fillna(0.0)
        table["kind"] = [self.category_name(name) for name in table.index]
        table["flops_share"] = self.flops_shares().reindex(table.index).fillna(0.0)
        table["judged"] = [self.share_of(name) for name in table.index]
        leads = {most.arm: most.lead.said} if most else {}
        table["most"] = [leads.get(name) for name in table.index]
        return table.sort_values("ms", ascending=False)

    def flops_shares(self) -> pd.Series:
        """Returns the share of each kind of work in the step's counted operations, by category."""
        rows = self.roofline
        kinds = [in_phase(operator_category(row.operator), row.phase) for row in rows.itertuples()]
        flops = rows.assign(category=kinds).groupby("category")["flops"].sum()
        return flops / rows["flops"].sum()

    @property
    def between_products(self) -> pd.DataFrame:
        """Returns the operators of the step that fusing can merge, forward and backward."""
        return self.step[_is_between(self.step)]

    @property
    def between_calls(self) -> int:
        """Returns the calls of ``between_products``."""
        return int(self.between_products["calls"].sum())

    @property
    def between_share(self) -> float:
        """Returns the share of the step that ``between_products`` take."""
        return self.between_products["time_us"].sum() / 1e3 / self.step_ms

    def times_ms(self, which: pd.Series) -> pd.Series:
        """Returns the time that some rows of ``operators`` take in each profiled step."""
        times_us = self.operators["time_us"].where(which, 0.0)
        return times_us.groupby(self.operators["step"]).sum() / 1e3

    def shares_of(self, which: pd.Series) -> pd.Series:
        """Returns the share that some rows of ``operators`` have of each profiled step."""
        return self.times_ms(which) / self.times_ms(self.operators["step"].notna())

    def share_of(self, category: str) -> Judged:
        """Returns the share of a kind of work in a step, over all profiled steps."""
        shares = self.shares_of(self.operators["category"] == category)
        return Judged(student(shares), null=None, **self.conditions)

    @property
    def most_fusing_gains(self) -> Judged:
        """Returns how many times as fast a step without ``between_products`` would be."""
        shares = student(self.shares_of(_is_between(self.operators)))
        return Judged(shares.map(lambda share: 1 / (1 - share)), **self.conditions)

    @property
    def calls_name(self) -> str:
        """Returns what the calls of a step are: operators, or what the compiler made of them."""
        return "generated kernels and operators" if self.settings["compile"] else "operators"

    @property
    def product_type(self) -> str:
        """Returns what matrix products are computed in, such as bfloat16 or TF32."""
        return product_type(self.settings)

    @property
    def roof(self) -> Roof | None:
        """Returns the device's roof for this run's matrix products, None where it is unknown."""
        return Roof.of(self.peak, self.settings["precision"], self.settings["tf32"])

    @property
    def knows_roof(self) -> bool:
        """Returns True if the device's peaks are known for this run's matrix products."""
        return self.roof is not None

    def main_operators(self) -> pd.DataFrame:
        """Returns the roofline's operators, one row per phase and operator whatever the shapes.

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

    @cached_property
    def operators_ms(self) -> pd.DataFrame:
        """Returns the time of ``main_operators``: a row per profiled step, a column per row."""
        keys = ["phase", "operator"]
        by_step = self.operators.groupby([*keys, "step"])["time_us"].sum().unstack(keys) / 1e3
        rows = [*self.main_operators()[keys].itertuples(index=False, name=None)]
        return by_step.reindex(columns=rows).fillna(0.0).set_axis(range(len(rows)), axis=1)

    @property
    def more_arithmetic_ms(self) -> Judged | None:
        """Returns how much longer operators bound by arithmetic take than those bound by memory, in
        ms; None where the roof is unknown."""
        if self.roof is None:
            return None
        bound = self.main_operators()["bound"]
        compute_ms, traffic_ms = (
            self.operators_ms[bound.index[bound == of]].sum(axis=1) for of in (COMPUTE, MEMORY)
        )
        return Judged(student(compute_ms - traffic_ms), null=0.0, **self.conditions)

    @property
    def shares_of_roof(self) -> dict[int, Judged]:
        """Returns what operators reach of the roof, against ``ABOVE_ROOF``, by row of
        ``main_operators``: of those that are in every step, with intervals that hold at once.

        Empty where the roof is unknown.
        """
        if self.roof is None:
            return {}
        table, times_ms = self.main_operators(), self.operators_ms
        # The place in the table is that of the median time: a step that takes less is nearer to it.
        roofs = times_ms.rdiv(table["share_of_roof"] * table["time_ms"], axis=1)
        roofs = roofs.loc[:, (times_ms > 0).all()]
        return {
            at: Judged(
                student(roofs[at], claims=roofs.shape[1]), null=ABOVE_ROOF, **self.conditions
            )
            for at in roofs
        }


def _is_between(operators: pd.DataFrame) -> pd.Series:
    is_pass = operators["phase"].isin(["forward", "backward"])
    return is_pass & operators["category"].isin(BETWEEN_PRODUCTS)


def open_profile(run_dir: str | Path | None = None) -> ProfileRun:
    """Opens a run directory; by default the newest complete run, or else recorded measurements.

    Raises UserError where a table is missing, or has no operators.
    """
    opened = open_run_with(run_dir, "assignment0", TABLES[0], TABLES[1:])
    if opened.table(TABLES[0]).empty:
        raise UserError(f"{opened.folder / TABLES[0]}: no rows")
    return ProfileRun(
        opened=opened,
        # Texts may be empty, which is no missing value.
        operators=opened.table("profile-operators.csv").fillna({"operator": "", "shapes": ""}),
        steps=opened.table("profile-steps.csv"),
        roofline=opened.table("roofline.csv").fillna({"shapes": ""}),
        peak=read_peak(opened.table("device-peak.csv")),
    )
