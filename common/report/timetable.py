"""The stages of a run: which are done, and how long the rest will take.

A run keeps the time of each of its stages (``stages.csv``). The next run of the same preset in the
same output folder expects the median of the newest of them; the first one expects what was recorded
(``data/*/stage-times.csv``), on another machine. What stages then take corrects what is expected of
the others. A stage is timed from the end of the one before, so that all of a run is counted.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import pandas as pd

from common.analysis.runs import AGAIN, RECORDING_MACHINE
from common.report.presets import Preset, stages_that_run
from common.runtime.paths import project_root
from common.runtime.records.run_directory import read_environment, write_atomically

STAGES, RECORDED = "stages.csv", "stage-times.csv"
COLUMNS = ("stage", "title", "state", "seconds")
NOTEBOOKS, REPORT = "notebooks", "report"
"""Keys of the entries that follow an assignment's stages."""
FIRST_PAGE, REPORT_OF_ALL = "first page", "report of all assignments"
"""Keys of the entry that ends a run of one assignment, and of several."""
WAITING, RUNNING, DONE = "waiting", "running", "done"
FAILED, LEFT_OUT, COPIED = "failed", "left out", "copied"
NEWEST = 5
"""Earlier runs whose times are looked at."""


@dataclass
class Entry:
    """One stage of a run.

    Attributes:
        key: the stage's folder below the assignment's run directory, or NOTEBOOKS or REPORT.
        expected_s: seconds that it took before; None where it never ran.
        took_s: seconds, once it has ended.
    """

    assignment: str
    key: str
    title: str
    expected_s: float | None = None
    state: str = WAITING
    took_s: float = 0.0
    began: float = 0.0

    @property
    def is_over(self) -> bool:
        """Returns True if nothing of it is still to come."""
        return self.state not in (WAITING, RUNNING)


class Timetable:
    """All stages of a run in order."""

    def __init__(self, entries: Iterable[Entry], source: str = "") -> None:
        self.entries = list(entries)
        self.source = source
        self._ended = time.monotonic()

    def entry(self, assignment: str, key: str) -> Entry:
        """Returns a stage; one that was not planned is added behind the one that it repeats."""
        for entry in self.entries:
            if (entry.assignment, entry.key) == (assignment, key):
                return entry
        added = Entry(assignment, key, key)
        keys = [(entry.assignment, entry.key) for entry in self.entries]
        repeated = (assignment, key.removesuffix(AGAIN))
        beside = [place for place, (name, _) in enumerate(keys) if name == assignment]
        last = keys.index(repeated) if repeated in keys else beside[-1] if beside else len(keys) - 1
        self.entries.insert(last + 1, added)
        return added

    def begin(self, assignment: str, key: str) -> Entry:
        """Notes that a stage has begun."""
        entry = self.entry(assignment, key)
        entry.state, entry.began = RUNNING, self._ended
        return entry

    def end(self, entry: Entry, state: str) -> None:
        """Notes how a stage has ended."""
        if entry.state == RUNNING:
            self._ended = time.monotonic()
            entry.took_s = self._ended - entry.began
        entry.state = state

    def left_s(self) -> tuple[float, float] | None:
        """Returns the least and the most seconds that the run is expected to still take.

        Both are what the stages to come took before, times a pace: that of the stages which are
        over, and that of the whole run if the others take as long as before. The two meet as the
        run goes on. None where nothing is known of the stages to come.
        """
        ahead = [entry for entry in self.entries if not entry.is_over]
        timed = [entry for entry in ahead if entry.expected_s is not None]
        if ahead and not timed:
            return None
        took_s = sum(entry.took_s for entry in self._measured)
        over_s = sum(entry.expected_s for entry in self._measured)
        ahead_s = sum(entry.expected_s for entry in timed)
        paces = (took_s / over_s, (took_s + ahead_s) / (over_s + ahead_s)) if over_s else (1.0, 1.0)
        low, high = (sum(_left_of(entry, pace) for entry in timed) for pace in sorted(paces))
        return low, high

    @property
    def _measured(self) -> list[Entry]:
        """Returns the stages that were run to their end and of which a time was expected."""
        return [entry for entry in self.entries if entry.state == DONE and entry.expected_s]

    def time_text(self) -> str:
        """Returns the time that is left in words; empty where nothing is, or is known of it."""
        left_s = self.left_s()
        if left_s is None or left_s[1] < 0.5:
            return ""
        low, high = map(duration_text, left_s)
        if any(entry.expected_s is None for entry in self.entries if not entry.is_over):
            return f"at least {low}"
        if low == high:
            return f"about {low}"
        number, _, unit = low.partition(" ")
        return f"{number if high.endswith(f' {unit}') else low} to {high}"

    def left_text(self) -> str:
        """Returns ``time_text`` as what is left; empty where that is."""
        expected = self.time_text()
        return f"{expected} left" if expected else ""

    @property
    def basis(self) -> str:
        """Returns what the time that is left is judged by, in words; empty where by nothing."""
        if not self.source:
            return ""
        return "by the stages so far" if self._measured else f"if it goes {self.source}"

    def place_text(self) -> str:
        """Returns how many of the stages are over: ``3 of 24``."""
        return f"{sum(entry.is_over for entry in self.entries)} of {len(self.entries)}"

    def write(self, assignment: str, folder: Path) -> None:
        """Writes ``stages.csv`` of an assignment into its run directory."""
        rows = [
            (entry.key, entry.title, entry.state, round(entry.took_s, 1))
            for entry in self.entries
            if entry.assignment == assignment
        ]
        write_atomically(folder / STAGES, pd.DataFrame(rows, columns=COLUMNS).to_csv(index=False))


def _left_of(entry: Entry, pace: float) -> float:
    """Returns the seconds of a stage that are still to come."""
    spent_s = time.monotonic() - entry.began if entry.state == RUNNING else 0.0
    return max(0.0, pace * entry.expected_s - spent_s)


def duration_text(seconds: float) -> str:
    """Returns a duration as a reader says it.

    >>> duration_text(42), duration_text(600)
    ('42 s', '10 minutes')
    """
    if seconds < 90:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} minutes"


def plan(
    presets: Sequence[Preset],
    label: str,
    output: Path,
    titles: dict[str, dict[str, str]],
    *,
    with_hosts: bool,
) -> Timetable:
    """Plans a run.

    Args:
        presets: Presets of the run's assignments, in order.
        label: Name of the presets.
        output: Folder with earlier runs.
        titles: Titles of stages and of what follows them, by assignment and key.
        with_hosts: Whether this machine can emulate hosts; without, their stages take no time.
    """
    entries, was_here = [], True
    run = stages_that_run(presets, with_hosts=with_hosts)
    passed_over = {
        (preset.assignment, stage.key) for preset in presets for stage in preset.stages
    } - run
    for preset in presets:
        expected, is_here = _earlier_times(preset.assignment, label, output)
        was_here = was_here and is_here
        for key, title in titles[preset.assignment].items():
            is_passed_over = (preset.assignment, key) in passed_over
            expected_s = 0.0 if is_passed_over else expected.get(key)
            entries.append(Entry(preset.assignment, key, title, expected_s))
    reports = [entry.expected_s for entry in entries if entry.key == REPORT]
    if entries[-1].key in (FIRST_PAGE, REPORT_OF_ALL) and None not in reports:
        # It sets what the reports of the assignments have set, once more.
        entries[-1].expected_s = entries[-1].expected_s or sum(reports)
    if all(entry.expected_s is None for entry in entries):
        return Timetable(entries)
    elsewhere = "as on the machine of the recorded runs; the first stages will tell"
    return Timetable(entries, "as it did here before" if was_here else elsewhere)


def _earlier_times(assignment: str, label: str, output: Path) -> tuple[dict[str, float], bool]:
    """Returns seconds by stage of the newest runs, and whether they ran in this output folder."""
    runs: list[tuple[str, Path]] = []
    for path in (output / assignment).glob(f"*/{STAGES}"):
        environment = read_environment(path.parent)
        if environment.get("label") == label:
            runs.append((environment.get("start_time", ""), path))
    newest = [path for _, path in sorted(runs, reverse=True)[:NEWEST]]
    if not newest:
        return _recorded_times(assignment, label), False
    times: dict[str, list[float]] = {}
    for path in newest:
        with suppress(ValueError, AttributeError):  # of another version, or edited since
            for row in pd.read_csv(path).itertuples():
                if row.state == DONE:
                    times.setdefault(row.stage, []).append(row.seconds)
    return {key: statistics.median(seconds) for key, seconds in times.items()}, True


def _recorded_times(assignment: str, label: str) -> dict[str, float]:
    """Returns seconds by stage of a run whose times came with the project; empty without one."""
    path = project_root() / "data" / RECORDING_MACHINE / RECORDED
    if not path.is_file():
        return {}
    table = pd.read_csv(path)
    rows = table[(table["preset"] == label) & (table["assignment"] == assignment)]
    return dict(zip(rows["stage"], rows["seconds"], strict=True))
