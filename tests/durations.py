"""Records how long each test takes, and how much computation: its own and its processes'."""

from __future__ import annotations

import csv
import os
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from rank_support import RankServer

TICKS = os.sysconf("SC_CLK_TCK")
SHORT_S = 0.05


class TestDurations:
    """Notes of each test the seconds that went by and those that processors were busy for it.

    ``ranks`` returns what runs ranks for the tests of this process, once there is one.
    """

    __test__ = False

    def __init__(self, path: Path, ranks: Callable[[], RankServer | None]) -> None:
        self._path = path
        self._ranks = ranks
        self._wall_s: dict[str, float] = defaultdict(float)
        self._cpu_s: dict[str, float] = defaultdict(float)
        self._last = self._own = 0.0

    def pytest_collection_finish(self) -> None:
        self._last, self._own = busy_s(self._ranks()), own_s(self._ranks())

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(self, item: pytest.Item) -> Iterator[pytest.TestReport]:
        report = yield
        own = own_s(self._ranks())
        # Looking at all processes takes milliseconds: after a short phase this one alone is read.
        now = busy_s(self._ranks()) if report.duration > SHORT_S else self._last + own - self._own
        # What is below another process now, and was below this one, does not count.
        report.cpu_s, self._last, self._own = max(0.0, now - self._last), now, own
        return report

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self._wall_s[report.nodeid] += report.duration
        self._cpu_s[report.nodeid] += getattr(report, "cpu_s", 0.0)

    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        if "PYTEST_XDIST_WORKER" in os.environ:
            return
        with self._path.open("w", newline="") as file:
            rows = csv.writer(file, lineterminator="\n")
            rows.writerow(["test", "wall_s", "cpu_s"])
            for test in sorted(self._cpu_s, key=self._cpu_s.__getitem__, reverse=True):
                rows.writerow([test, f"{self._wall_s[test]:.2f}", f"{self._cpu_s[test]:.2f}"])


def own_s(ranks: RankServer | None) -> float:
    """Returns the processor seconds of this process and of its ranks that have ended."""
    return time.process_time() + (ranks.cpu_s if ranks else 0.0)


def busy_s(ranks: RankServer | None) -> float:
    """Returns the processor seconds of this process and of all below it, ended ones included.

    Of the ranks that all workers' tests have forked by one server, only this process's count.
    """
    children: dict[int, list[int]] = defaultdict(list)
    used: dict[int, float] = {}
    for entry in os.scandir("/proc"):
        if not entry.name.isdigit():
            continue
        try:
            fields = Path(entry.path, "stat").read_text().rpartition(")")[2].split()
        except OSError:
            continue
        children[int(fields[1])].append(int(entry.name))
        used[int(entry.name)] = sum(map(int, fields[11:15])) / TICKS
    if ranks and ranks.process:
        used.pop(ranks.process.pid, None)
        children.pop(ranks.process.pid, None)
    total, open_ = ranks.cpu_s if ranks else 0.0, [os.getpid()]
    while open_:
        process = open_.pop()
        total += used.get(process, 0.0)
        open_ += children[process]
    return total
