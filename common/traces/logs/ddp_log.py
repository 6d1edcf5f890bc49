"""Reads what DDP logs about itself: its settings, and what its passes and exchanges take.

It stands in lines of ``TORCH_DISTRIBUTED_DEBUG=DETAIL`` with ``TORCH_CPP_LOG_LEVEL=INFO``, or where
a script prints ``model._get_ddp_logging_data()``. Times are nanoseconds (``logger.cpp``).
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field

from common.traces.logs.text_lines import Line

RUNTIME = re.compile(
    r"\[Rank (\d+) / (\d+)\] \[before iteration (\d+)\] Training (\S+) unused_parameter_size=(\d+)"
)
TIME = re.compile(
    r"^\s*Avg (forward compute|backward compute|backward comm\.|backward comm/comp overlap) "
    r"time: (\d+)"
)
BEGUN = re.compile(r"\[Rank (\d+)\]: DDP Initialized with:")
SETTING = re.compile(r"^([a-z_]+): (.*)$")
ITEM = re.compile(r"""['"]([a-z_]+)['"]: (?:['"]([^'"]*)['"]|(-?\d+))""")
OF_A_RECORD = ("'bucket_cap_bytes'", '"bucket_cap_bytes"', "avg_backward_comm_time")
COLUMNS = {
    "forward compute": "avg_forward_compute_time",
    "backward compute": "avg_backward_compute_time",
    "backward comm.": "avg_backward_comm_time",
    "backward comm/comp overlap": "avg_backward_compute_comm_overlap_time",
}


@dataclass(frozen=True)
class DdpRecord:
    """What one rank's DDP says of itself; ``values`` holds text, by PyTorch's own names."""

    rank: int
    values: dict[str, str]
    where: str

    def number(self, name: str) -> float | None:
        """Returns a value as a number; None where it is not there."""
        try:
            return float(self.values[name])
        except (KeyError, ValueError):
            return None

    @property
    def times_ms(self) -> tuple[float, float, float] | None:
        """Returns forward pass, backward pass and exposed exchange; None where they are not said.

        The exchange counts from its first launch to its end; what DDP calls overlap is its part
        until the backward pass ends.
        """
        forward, backward, exchange, overlap = (self.number(name) for name in COLUMNS.values())
        if None in (forward, backward, exchange, overlap) or not backward:
            return None
        return forward / 1e6, backward / 1e6, max(0.0, exchange - overlap) / 1e6


@dataclass
class DdpLog:
    """A reader of lines: rank → its last record."""

    records: dict[int, DdpRecord] = field(default_factory=dict)
    _rank: int | None = None
    _is_block: bool = False

    def take(self, line: Line) -> bool:
        """Takes a line; returns True if it is one of these."""
        if line.number == 1:
            self._rank = None
        text = line.text
        is_record = any(name in text for name in OF_A_RECORD)
        if self._rank is None and not ("[Rank " in text or is_record):
            return False
        if match := RUNTIME.search(text):
            rank, world, iteration, module, unused = match.groups()
            self._rank, self._is_block = int(rank), False
            values = {"world_size": world, "iteration": iteration, "module_name": module}
            self._add(int(rank), values | {"unused_parameter_size": unused}, line)
            return True
        if match := BEGUN.search(line.text):
            self._rank, self._is_block = int(match[1]), True
            self._add(self._rank, {}, line)
            return True
        if is_record and (items := ITEM.findall(line.text)):
            values = {name: text or number for name, text, number in items}
            rank = values.get("rank", "" if line.rank is None else str(line.rank))
            self._add(int(rank) if rank.isdigit() else 0, values, line)
            return True
        if self._rank is None:
            return False
        if match := TIME.match(line.text):
            self._add(self._rank, {COLUMNS[match[1]]: match[2]}, line)
            return True
        if self._is_block and (match := SETTING.match(line.text)):
            self._add(self._rank, {match[1]: match[2]}, line)
            return True
        self._is_block = False
        return False

    def _add(self, rank: int, values: dict[str, str], line: Line) -> None:
        before = self.records.get(rank, DdpRecord(rank, {}, line.where))
        goes_on = self._rank is not None and len(values) < 2
        where = before.where if goes_on else line.where
        self.records[rank] = DdpRecord(rank, before.values | values, where)
