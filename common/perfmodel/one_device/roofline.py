"""The roofline: what bounds an operator, arithmetic or memory, and how near to that bound it runs.

An operator that does ``flops`` operations on ``bytes`` of memory traffic takes at least the longer
of ``flops / peak`` and ``bytes / bandwidth``. Which of the two is longer depends on its intensity,
the operations per byte; they are equal at the ridge, ``peak / bandwidth`` (Williams, Waterman and
Patterson: Roofline, Communications of the ACM 52(4), 2009).
"""

from __future__ import annotations

from dataclasses import dataclass

import pandas as pd

from common.perfmodel.one_device.peaks import DevicePeak

COMPUTE, MEMORY, OVERHEAD, UNKNOWN = "compute", "memory", "neither (overhead)", "unknown"

OVERHEAD_SHARE = 0.1
"""Share of the roof below which neither arithmetic nor memory explains the time: it goes into
starting the work, or the work is too small or too irregular to keep the device busy."""


@dataclass(frozen=True)
class Roof:
    """The highest rates of a device for one precision."""

    flops_per_s: float
    memory_bytes_per_s: float

    @classmethod
    def of(cls, peak: DevicePeak | None, precision: str, tf32: bool = False) -> Roof | None:
        """Returns a device's roof in ``precision``, or None where a figure of it is unknown."""
        flops_per_s = peak.flops(precision, tf32) if peak else None
        return cls(flops_per_s, peak.memory_bytes_per_s) if flops_per_s else None

    @property
    def ridge(self) -> float:
        """Returns the intensity, in FLOP/byte, from which on arithmetic is the bound."""
        return self.flops_per_s / self.memory_bytes_per_s

    def attainable_flops_per_s(self, intensity: float) -> float:
        """Computes the highest rate, in FLOP/s, at an intensity in FLOP/byte."""
        return min(self.flops_per_s, intensity * self.memory_bytes_per_s)

    def shortest_s(self, flops: float, moved_bytes: float) -> float:
        """Computes the lower bound on the time of the work, in seconds."""
        return max(flops / self.flops_per_s, moved_bytes / self.memory_bytes_per_s)


COLUMNS = (
    "phase",
    "operator",
    "shapes",
    "calls",
    "flops",
    "bytes",
    "time_ms",
    "achieved_flops_per_s",
    "achieved_bytes_per_s",
    "intensity",
    "ridge",
    "share_of_roof",
    "bound",
)


def roofline_table(operators: pd.DataFrame, costs: pd.DataFrame, roof: Roof | None) -> pd.DataFrame:
    """Tabulates every operator whose cost is known, placed below the roof; the longest first.

    It has a row per phase, operator and shapes, for one step: calls, flops and bytes as means over
    the steps, time_ms as their median. Without a roof the bound is ``unknown``.

    Args:
        operators: a profile's rows: step, phase, operator, shapes, calls, time_us.
        costs: totals by operator and shapes: operator, shapes, calls, flops, bytes.
    """
    steps = operators["step"].nunique()
    keys = ["phase", "operator", "shapes"]
    costed = operators[operators["operator"].isin(costs["operator"])]
    grouped = costed.fillna({"shapes": ""}).groupby(keys, sort=False)
    # A step without the operator has no row; it counts as 0, so that the median is over all steps.
    times_us = grouped["time_us"].apply(lambda t: pd.Series([*t, *[0] * (steps - len(t))]).median())
    per_step = (grouped["calls"].sum() / steps).to_frame("calls").assign(time_us=times_us)
    per_call = CostPerCall(costs)
    rows = []
    for (phase, operator, shapes), calls, time_us in per_step.itertuples(name=None):
        flops, moved_bytes = (calls * cost for cost in per_call.of(operator, shapes))
        if time_us <= 0 or flops + moved_bytes == 0:
            continue
        row = (phase, operator, shapes, calls, flops, moved_bytes, time_us / 1e3)
        named = dict(zip(COLUMNS, row, strict=False))
        rows.append(named | placed(flops, moved_bytes, time_us / 1e6, roof))
    table = pd.DataFrame(rows, columns=list(COLUMNS))
    return table.sort_values("time_ms", ascending=False, ignore_index=True)


class CostPerCall:
    """Operations and bytes of one call by operator and shapes."""

    def __init__(self, costs: pd.DataFrame) -> None:
        self._of = {
            (operator, shapes): (flops / calls, moved_bytes / calls)
            for operator, shapes, calls, flops, moved_bytes in costs.fillna({"shapes": ""})[
                ["operator", "shapes", "calls", "flops", "bytes"]
            ].itertuples(index=False, name=None)
        }
        # The cost of an operator with one list of shapes serves where its shapes are not known.
        counts = costs["operator"].value_counts()
        self._only = {key[0]: cost for key, cost in self._of.items() if counts[key[0]] == 1}

    def of(self, operator: str, shapes: str) -> tuple[float, float]:
        """Returns (operations, bytes) of a call, (0, 0) where they are not known.

        A compiled model calls operators with a last argument that takes the result, which the
        costs do not know; of operators over long lists the profiler may not know the shapes.
        """
        without_result = shapes.rpartition(" ")[0]
        for key in ((operator, shapes), (operator, without_result)):
            if key in self._of:
                return self._of[key]
        return self._only.get(operator, (0.0, 0.0))


def placed(flops: float, moved_bytes: float, time_s: float, roof: Roof | None) -> dict:
    """Places work of ``flops`` operations and ``moved_bytes`` of traffic that took ``time_s``.

    Returns a row's last columns. The share of the roof is the least possible time over the time
    taken; data that comes from a cache can put an operator above the roof of the device's memory.
    Ridge, share and bound are unknown without a roof.

    Raises ValueError for work without operations or traffic, and for a time that is not positive.
    """
    if time_s <= 0 or flops < 0 or moved_bytes < 0 or flops + moved_bytes == 0:
        raise ValueError(f"{flops} operations and {moved_bytes} bytes in {time_s} s")
    intensity = flops / moved_bytes if moved_bytes else float("inf")
    ridge = share = float("nan")
    bound = UNKNOWN
    if roof is not None:
        ridge, share = roof.ridge, roof.shortest_s(flops, moved_bytes) / time_s
        bound = COMPUTE if intensity >= ridge else MEMORY
        bound = bound if share >= OVERHEAD_SHARE else OVERHEAD
    return {
        "achieved_flops_per_s": flops / time_s,
        "achieved_bytes_per_s": moved_bytes / time_s,
        "intensity": intensity,
        "ridge": ridge,
        "share_of_roof": share,
        "bound": bound,
    }
