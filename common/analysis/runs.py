"""Opening a run: which folder, its settings, environment and tables, and whose they are.

What an analysis writes is written whole or not at all (``written_whole``).

Every notebook opens its run here. A run that the reader names is taken; else the newest complete
one of the assignment; else recorded measurements, which say so."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

import pandas as pd
import yaml

from common.errors import UserError, naming_os_errors
from common.judged import NOT_WITNESSED
from common.machine_state import WITNESS, MachineState, judge_machine
from common.perfmodel.one_device.peaks import DevicePeak
from common.runtime.paths import project_root, relative_to_project
from common.runtime.records.run_directory import find_table, newest_complete_run, read_environment

RECORDING_MACHINE = "epyc-2-cores"
"""Machine whose recorded runs are looked for first."""
GPU_RUNS = "h100-1/one-gpu"
"""Recorded runs on one GPU, whose figures notebooks show beside those of the run."""
DEPTHS = ("", "*/", "*/*/")
"""Folders of stages below a run directory; emulated hosts have theirs one folder deeper."""
AGAIN = "-again"
"""Ends the name of a stage's folder while it is measured once more."""
DOCTOR = "`uv run ddplab doctor` says whether this machine can emulate hosts"


@dataclass(frozen=True, eq=False)
class Run:
    """Reads what one program has written to one folder, each file when it is first asked for.

    Attributes:
        folder: Folder of the tables.
        source: Folder that captions name: the one that the reader named or that was chosen,
            ``folder`` or one above it.
    """

    folder: Path
    source: Path
    _tables: dict[str, pd.DataFrame] = field(default_factory=dict, init=False, repr=False)

    @cached_property
    def settings(self) -> dict:
        """Returns ``config.yaml``; empty where there is none."""
        config = self.folder / "config.yaml"
        return (yaml.safe_load(config.read_text()) or {}) if config.is_file() else {}

    @cached_property
    def environment(self) -> dict:
        """Returns the environment record, with the status as it really is."""
        return read_environment(self.folder)

    @cached_property
    def machine(self) -> MachineState:
        """Returns the state of the machine meanwhile, judged by the run's witness."""
        if not self.has(WITNESS):
            return MachineState(NOT_WITNESSED)
        return judge_machine(self.table(WITNESS))

    @property
    def machine_state(self) -> str:
        """Returns the state of the machine meanwhile, as ``judged.Judged`` takes it."""
        return self.machine.state

    @property
    def recorded(self) -> bool:
        """Returns True if these measurements came with the project."""
        return is_recorded(self.source)

    @property
    def caption(self) -> str:
        """Returns hardware, date and source, for figures."""
        return caption_of(self.environment, self.source)

    @property
    def device(self) -> str:
        """Returns the name of the GPU or processor."""
        gpus = self.environment["gpus"]
        return gpus[0]["name"] if gpus else self.environment["cpu"]["model"]

    def has(self, name: str) -> bool:
        """Returns True if the table is there."""
        return (self.folder / name).is_file()

    def require(self, table: str, needed: Iterable[str] = ("config.yaml",)) -> None:
        """Raises UserError naming the first of ``needed`` that does not lie beside ``table``."""
        for name in needed:
            if not self.has(name):
                raise UserError(f"{relative_to_project(self.folder)}: has {table} but no {name}")

    def table(self, name: str) -> pd.DataFrame:
        """Reads a table, once. Raises UserError where it is missing."""
        if not self.has(name):
            raise UserError(f"{relative_to_project(self.folder)}: has no {name}")
        if name not in self._tables:
            self._tables[name] = pd.read_csv(self.folder / name)
        return self._tables[name]


@dataclass(frozen=True, eq=False)
class OfRun:
    """Base of what was read from one run, ``opened``."""

    opened: Run

    @property
    def folder(self) -> Path:
        """Returns the folder of its tables."""
        return self.opened.folder

    @property
    def settings(self) -> dict:
        """Returns its config.yaml."""
        return self.opened.settings

    @property
    def environment(self) -> dict:
        """Returns its environment record."""
        return self.opened.environment

    @property
    def ranks(self) -> int:
        """Returns the world size."""
        return int(self.environment["world_size"])

    @property
    def caption(self) -> str:
        """Returns hardware, date and source, for figures."""
        return self.opened.caption


def choose_folder(
    run_dir: str | Path | None, assignment: str, tables: Sequence[str], *, must_exist: bool = True
) -> Path:
    """Returns the folder that is named, else the newest complete run's, else the recorded one.

    Args:
        run_dir: Run directory, or a folder of run directories; empty for none.
        assignment: Name such as ``assignment0``.
        tables: Files that the newest run must have, in itself or in its stages.
        must_exist: Whether to raise where nothing is recorded either.

    Raises UserError where there is no such folder.
    """
    if run_dir:
        return given_folder(run_dir)
    newest = newest_complete_run(project_root() / "outputs" / assignment, tuple(tables))
    recorded = recorded_assignment(assignment)
    return newest or (given_folder(recorded) if must_exist else recorded)


def open_run_with(
    run_dir: str | Path | None, assignment: str, table: str, needed: Sequence[str] = ()
) -> Run:
    """Opens the run that has ``table``, and ``needed`` beside it.

    Raises UserError where there is no such directory, or no complete run with these tables in it.
    """
    folder = choose_folder(run_dir, assignment, (table,), must_exist=False)
    path = find_table(folder, table)
    if path is None:
        raise UserError(f"{relative_to_project(folder)}: no complete run with {table}")
    run = Run(path.parent, folder)
    run.require(table, needed)
    return run


def complete_runs(folder: Path, table: str, places: Iterable[str] = ("", "*/")) -> list[Run]:
    """Returns all complete runs with a table, the oldest first.

    Args:
        folder: Run directory, or a folder of run directories.
        table: Path within a run, such as ``metrics/rank0.csv``.
        places: Patterns of the folders below ``folder`` to look in.
    """
    depth = len(Path(table).parts) - 1
    folders = [path.parents[depth] for below in places for path in folder.glob(below + table)]
    runs = [Run(path, folder) for path in dict.fromkeys(folders)]
    return sorted((run for run in runs if run.environment["status"] == "complete"), key=age)


def age(run: Run) -> tuple[str, str]:
    """Returns a key by which older runs come first."""
    return run.environment.get("start_time", ""), str(run.folder)


def recorded_assignment(assignment: str) -> Path:
    """Returns where the recorded runs of an assignment are, whichever machine made them."""
    machines = [RECORDING_MACHINE, *sorted(p.parent.name for p in _data().glob(f"*/{assignment}"))]
    folders = [_data() / machine / assignment for machine in machines]
    return next((folder for folder in folders if folder.is_dir()), folders[0])


def gpu_folder(below: str) -> Path:
    """Returns the folder of a run that was recorded on a GPU, by its path below ``GPU_RUNS``."""
    return given_folder(_data() / GPU_RUNS / below)


def given_folder(run_dir: str | Path) -> Path:
    """Returns the folder a user named, from here or from the project's root.

    Raises UserError where there is none.
    """
    folder = Path(run_dir)
    if not folder.is_absolute() and not folder.is_dir():
        folder = project_root() / folder
    if not folder.is_dir():
        raise UserError(f"{run_dir}: no such run directory")
    return folder


def is_recorded(folder: Path) -> bool:
    """Returns True if measurements in ``folder`` came with the project."""
    return folder.resolve().is_relative_to(_data())


def caption_of(environment: Mapping, folder: Path) -> str:
    """Returns hardware, date and source of what lies in ``folder``, for figures."""
    below = folder.resolve().is_relative_to(project_root())
    source = relative_to_project(folder) if below else folder.name
    kind = "recorded" if is_recorded(folder) else "run"
    return f"{environment['hardware']}; {environment['start_time'][:10]}; {kind} {source}"


def origin(what: str, recorded: bool, command: str = "", left_out: str = "") -> str:
    """Returns the line that says whose data a notebook shows, as Markdown.

    Args:
        what: Caption and settings, without a full stop.
        recorded: Whether the data came with the project.
        command: Command that measures on the reader's machine, if any does.
        left_out: Reason why recorded data are shown beside the reader's own run, and what would
            measure them: ``command`` made that run.
    """
    if left_out:
        return f"> **Recorded data, not yours.** {what}: {left_out}."
    if recorded:
        how = f" `{command}` measures here." if command else ""
        return f"> **Recorded data, not yours.** {what}.{how}"
    return f"> Measured in this run: {what}."


@contextmanager
def written_whole(target: Path) -> Iterator[Path]:
    """Yields an empty folder whose files are moved into ``target`` in the end: all or nothing.

    Files in a folder below it get the same folder below ``target``.

    Raises UserError where ``target`` cannot be written to.
    """
    with naming_os_errors(relative_to_project(target)):
        target.mkdir(parents=True, exist_ok=True)
        beside = Path(tempfile.mkdtemp(prefix=".analysis-", dir=target))
        try:
            yield beside
            for path in sorted(path for path in beside.rglob("*") if path.is_file()):
                moved = target / path.relative_to(beside)
                moved.parent.mkdir(exist_ok=True)
                path.replace(moved)
        finally:
            shutil.rmtree(beside, ignore_errors=True)


def read_peak(table: pd.DataFrame) -> DevicePeak | None:
    """Returns a device's peaks from device-peak.csv; None where it has no rows."""
    if table.empty:
        return None
    first = table.iloc[0]
    rates = dict(zip(table["precision"], table["flops_per_s"], strict=True))
    return DevicePeak(
        device=first["device"],
        flops_per_s=rates,
        memory_bytes_per_s=first["memory_bytes_per_s"],
        source=first["source"],
    )


def _data() -> Path:
    return project_root() / "data"
