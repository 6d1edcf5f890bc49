"""Reads what was measured for plans: lines of passes, FSDP's own work, curves and noise."""

from __future__ import annotations

import numpy as np
import pandas as pd

from common.perfmodel.collectives import MeasuredAllReduce
from common.perfmodel.scaling.step_model import LinearTime, PassTimes
from common.samples import per_round


class ReadInputs:
    """Reads the two tables: a step's part is the slowest rank's, and of rounds the median."""

    def __init__(self, parts: pd.DataFrame, collectives: pd.DataFrame, few: int, many: int) -> None:
        arms = parts["arm"] + " " + parts["samples"].astype(str) + " " + parts["part"]
        self.parts = per_round(parts.assign(arm=arms), "time_ms", "arm") / 1e3
        self.collectives = collectives
        self.few, self.many = few, many

    def _s(self, arm: str) -> float:
        return float(self.parts[arm].median())

    def part_s(self, arm: str, part: str) -> float:
        """Returns the seconds of a part at the smaller size."""
        return self._s(f"{arm} {self.few} {part}")

    def lines(self, checkpointing: str, casts: str, base: str) -> PassTimes:
        """Returns the passes of a kind; their shape by size is that of what recomputes nothing."""
        lines = []
        for part in ("forward", "backward"):
            at_many = self._s(f"passes {checkpointing} {casts} {self.many} {part}")
            plain = self._s(f"passes none {base} {self.many} {part}")
            few = self.part_s(f"passes none {base}", part)
            line = LinearTime.through((self.few, few), (self.many, plain))
            fixed_s = line.fixed_s * at_many / plain
            lines.append(LinearTime(fixed_s, line.per_sample_s * at_many / plain))
        return PassTimes(*lines)

    def one_rank(self, base: str) -> float:
        """Returns the passes of a rank that computes by itself, relative to those of all at once.

        1 where they were not measured.
        """
        alone = f"one rank {base} {self.many} step"
        if alone not in self.parts:
            return 1.0
        together = [f"passes none {base} {self.many} {part}" for part in ("forward", "backward")]
        return float((self.parts[alone] / self.parts[together].sum(axis=1)).median())

    def overheads(self, casts: str, with_update: bool) -> dict[str, float]:
        """Returns what FSDP adds to a micro-batch over one rank in its types, by strategy.

        ``with_update`` tells whether its steps over one rank updated the parameters.
        """
        plain = sum(self.part_s(f"passes none {casts}", part) for part in ("forward", "backward"))
        plain += self.part_s("updates", "update") if with_update else 0.0
        alone = {
            arm.split()[1]: self._s(arm) - plain
            for arm in self.parts.columns
            if arm.startswith("alone ")
        }
        if "FULL_SHARD" in alone:
            alone["HYBRID_SHARD"] = alone["FULL_SHARD"]
        return {strategy: max(0.0, seconds) for strategy, seconds in alone.items()}

    def curves(self) -> dict[tuple[str, int], MeasuredAllReduce]:
        """Returns the time of collectives by size, for each operation and group."""
        curves = {}
        if self.collectives.empty:
            return curves
        for key, rows in self.collectives.groupby(["operation", "group_size"]):
            times = per_round(rows, "time_ms", "size_bytes").median() / 1e3
            curves[key] = MeasuredAllReduce(times.index.to_numpy(), times.to_numpy())
        return curves

    def noise(self) -> tuple[float, float]:
        """Returns the relative standard deviation of a round's passes and of its collectives."""
        passes = self.parts[[arm for arm in self.parts if arm.startswith("passes")]]
        if self.collectives.empty:
            return _spread(passes), 0.0
        names = self.collectives["operation"] + self.collectives["size_bytes"].astype(str)
        calls = per_round(self.collectives.assign(arm=names), "time_ms", "arm")
        return _spread(passes), _spread(calls)


def _spread(times: pd.DataFrame) -> float:
    """Returns the standard deviation over rounds of all arms' sum, relative to it."""
    total = times.sum(axis=1)
    return float(np.std(total, ddof=1) / total.mean())
