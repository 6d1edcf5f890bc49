"""The stages of a run: which are done, and how long the rest will take.

A run keeps the time of each of its stages (``stages.csv``). The next run of the same preset in the
same output folder expects the median of the newest of them; the first one expects what was recorded
(``data/*/stage-times.csv``), on another machine.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import pandas as pd

from common.analysis.runs import RECORDING_MACHINE
from common.report.presets import Preset, stages_that_run
from common.runtime.paths import project_root
from common.runtime.run_directory import read_environment, write_atomically

STAGES, RECORDED = "stages.csv", "stage-times.csv"
COLUMNS = ("stage", "title", "state", "seconds")
NOTEBOOKS, REPORT = "notebooks", "report"
"""Keys of the entries that follow an assignment's stages."""
WAITING, RUNNING, DONE = "waiting", "running", "done"
FAILED, LEFT_OUT, COPIED = "failed", "left out", "copied"
NEWEST = 5
"""Earlier runs whose times are looked at."""


@dataclass
class Entry:
    """One stage of a run.

    Attributes:
        key: its folder below the assignment's run directory, or NOTEBOOKS or REPORT.
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

    def entry(self, assignment: str, key: str) -> Entry:
        """Returns a stage; one that was not planned is added at the end of its assignment."""
        for entry in self.entries:
            if (entry.assignment, entry.key) == (assignment, key):
                return entry
        added = Entry(assignment, key, key)
        places = [i for i, one in enumerate(self.entries) if one.assignment == assignment]
        self.entries.insert(places[-1] + 1 if places else len(self.entries), added)
        return added

    def begin(self, assignment: str, key: str) -> Entry:
        """Notes that a stage has begun."""
        entry = self.entry(assignment, key)
        entry.state, entry.began = RUNNING, time.monotonic()
        return entry

    def end(self, entry: Entry, state: str) -> None:
        """Notes how a stage has ended."""
        if entry.state == RUNNING:
            entry.took_s = time.monotonic() - entry.began
        entry.state = state

    def left_s(self) -> float | None:
        """Returns the seconds that the run will still take; None where nothing is known of them."""
        left = [entry for entry in self.entries if not entry.is_over]
        known = [entry for entry in left if entry.expected_s is not None]
        if left and not known:
            return None
        return sum(
            max(0.0, entry.expected_s - (time.monotonic() - entry.began))
            if entry.state == RUNNING
            else entry.expected_s
            for entry in known
        )

    @property
    def has_unknown(self) -> bool:
        """Returns True if a stage is still to come that never ran before."""
        return any(entry.expected_s is None for entry in self.entries if not entry.is_over)

    def left_text(self) -> str:
        """Returns the time that is left in words; empty where nothing is known of it."""
        left_s = self.left_s()
        if left_s is None:
            return ""
        return f"{'at least' if self.has_unknown else 'about'} {duration_text(left_s)} left"

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
        presets: of its assignments, in order.
        label: the preset's name.
        output: the folder with earlier runs.
        titles: by assignment, the title of each stage and of what follows them, by its key.
        with_hosts: this machine can emulate hosts; without, their stages take no time.
    """
    entries, own = [], True
    run = stages_that_run(presets, with_hosts=with_hosts)
    passed_over = {(p.assignment, stage.key) for p in presets for stage in p.stages} - run
    for preset in presets:
        expected, from_here = _earlier_times(preset.assignment, label, output)
        own = own and from_here
        for key, title in titles[preset.assignment].items():
            is_passed_over = (preset.assignment, key) in passed_over
            expected_s = 0.0 if is_passed_over else expected.get(key)
            entries.append(Entry(preset.assignment, key, title, expected_s))
    known = any(entry.expected_s is not None for entry in entries)
    here, elsewhere = "as it did here before", "as on the machine of the recorded runs"
    return Timetable(entries, (here if own else elsewhere) if known else "")


def _earlier_times(assignment: str, label: str, output: Path) -> tuple[dict[str, float], bool]:
    """Returns seconds by stage of the newest runs, and whether they ran in this output folder."""
    found: list[tuple[str, Path]] = []
    for path in (output / assignment).glob(f"*/{STAGES}"):
        environment = read_environment(path.parent)
        if environment.get("label") == label:
            found.append((environment.get("start_time", ""), path))
    here = [path for _, path in sorted(found, reverse=True)[:NEWEST]]
    if not here:
        return _recorded_times(assignment, label), False
    times: dict[str, list[float]] = {}
    for path in here:
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
    own = table[(table["preset"] == label) & (table["assignment"] == assignment)]
    return dict(zip(own["stage"], own["seconds"], strict=True))
