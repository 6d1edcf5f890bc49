"""A run's tables, opened for a notebook: from where, of when, and whose they are."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import pandas as pd
import yaml

from common.errors import UserError
from common.perfmodel.peaks import DevicePeak
from common.runtime.paths import project_root, relative_to_project
from common.runtime.run_directory import find_table, newest_complete_run, read_environment

RECORDING_MACHINE = "epyc-2-cores"
"""Where recorded runs are looked for first."""


@dataclass(frozen=True, eq=False)
class OpenedRun:
    """Tables that lie beside each other, with the settings and the environment they came from.

    ``caption`` names hardware, date and source, for figures.
    """

    folder: Path
    recorded: bool
    caption: str
    settings: dict
    environment: dict
    tables: dict[str, pd.DataFrame]

    def where_from(self, command: str) -> str:
        """Whose data these are, as Markdown; ``command`` is what measures on the spot."""
        what = "{model}, batch {batch_size}, sequence {seq_len}, {precision}".format(
            **self.settings
        )
        if self.recorded:
            return (
                f"> **Recorded data, not yours.** {self.caption}. {what}. "
                f"`{command}` measures here."
            )
        return f"> Measured in this run: {self.caption}. {what}."


def open_tables(
    run_dir: str | Path | None, assignment: str, main: str, others: Sequence[str] = ()
) -> OpenedRun:
    """The table ``main`` and those of ``others`` that lie beside it.

    Args:
        run_dir: a run directory, or one that holds such; empty takes the newest complete run of
            the assignment with ``main`` in it, or else recorded measurements.
        assignment: such as ``assignment0``.
        main: the table that must be there.
        others: tables of the same run.

    Raises:
        UserError: no such directory, or no complete run with these tables in it.
    """
    folder = _choose(run_dir, assignment, main)
    path = find_table(folder, main)
    if path is None:
        raise UserError(f"{relative_to_project(folder)}: no complete run with {main}")
    recorded = folder.resolve().is_relative_to(project_root() / "data")
    environment = read_environment(path.parent)
    below = folder.resolve().is_relative_to(project_root())
    source = relative_to_project(folder) if below else folder.name
    config = path.parent / "config.yaml"
    beside = {name: path.parent / name for name in (main, *others)}
    for name, table in beside.items():
        if not table.is_file():
            raise UserError(f"{relative_to_project(path.parent)}: has {main} but no {name}")
    return OpenedRun(
        folder=path.parent,
        recorded=recorded,
        caption=f"{environment['hardware']}; {environment['start_time'][:10]}; "
        f"{'recorded' if recorded else 'run'} {source}",
        settings=yaml.safe_load(config.read_text()) if config.is_file() else {},
        environment=environment,
        tables={name: pd.read_csv(table) for name, table in beside.items()},
    )


def _choose(run_dir: str | Path | None, assignment: str, main: str) -> Path:
    if not run_dir:
        newest = newest_complete_run(project_root() / "outputs" / assignment, (main,))
        return newest or recorded_assignment(assignment)
    return given_folder(run_dir)


def recorded_assignment(assignment: str) -> Path:
    """Where the recorded runs of an assignment are, whichever machine made them."""
    machines = [RECORDING_MACHINE, *sorted(p.parent.name for p in _data().glob(f"*/{assignment}"))]
    folders = [_data() / machine / assignment for machine in machines]
    return next((folder for folder in folders if folder.is_dir()), folders[0])


def _data() -> Path:
    return project_root() / "data"


def given_folder(run_dir: str | Path) -> Path:
    """The folder a user named, from here or from the project's root.

    Raises UserError where there is none.
    """
    folder = Path(run_dir)
    if not folder.is_absolute() and not folder.is_dir():
        folder = project_root() / folder
    if not folder.is_dir():
        raise UserError(f"{run_dir}: no such run directory")
    return folder


def read_peak(table: pd.DataFrame) -> DevicePeak | None:
    """A device's peaks from device-peak.csv; None where it has no rows."""
    if table.empty:
        return None
    first = table.iloc[0]
    rates = dict(zip(table["precision"], table["flops_per_s"], strict=True))
    return DevicePeak(first["device"], rates, first["memory_bytes_per_s"], first["source"])
