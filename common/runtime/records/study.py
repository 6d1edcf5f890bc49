"""Makes a study's run directory, says where it is, and holds what was found to promises."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

import pandas as pd

from common.errors import UserError
from common.runtime.processes.bytecode import shared_bytecode
from common.runtime.records.run_directory import RunDirectory, read_environment
from common.runtime.stage_progress import StageProgress

if TYPE_CHECKING:
    from _typeshed import DataclassInstance


OF_EARLIER = ("start_time", "end_time", "git", "command", "continues")
"""What the record of a study has of the one that it continues."""


@contextmanager
def study_run(
    name: str,
    study: DataclassInstance,
    output_dir: str,
    progress: StageProgress,
    environment: dict,
) -> Iterator[RunDirectory]:
    """Opens a study's run directory; it is complete if the block ends without an error.

    Processes that are started inside share bytecode: a study starts hundreds.

    A study that ``continues`` another keeps that one's time, commit and command in its record.

    Args:
        name: name of the study, which the run directory is labelled with.
        study: the study's settings.
        environment: the record of its environment, as ``describe_environment`` makes it.

    Raises UserError if the study that is continued ran on other hardware.
    """
    if continues := getattr(study, "continues", ""):
        earlier, now = read_environment(Path(continues)), environment["hardware"]
        if (before := earlier.get("hardware", now)) != now:
            raise UserError(f"--continues {continues}: it ran on {before}, and this is {now}")
        environment |= {"continues": {key: earlier[key] for key in OF_EARLIER if key in earlier}}
    run = RunDirectory.create(output_dir, name, asdict(study), environment)
    progress.say(f"{name} study: {run.path}")
    with shared_bytecode(), run:
        yield run


def earlier_table(continues: str, name: str, columns: Collection[str]) -> pd.DataFrame:
    """Reads a table of the study that another one continues: what need not be done again.

    Args:
        continues: run directory of the earlier study; empty for a study that begins.
        name: name of the table, which is written anew after each of its cases.
        columns: columns that the table must have.

    Returns:
        The table, with text where a cell is empty; without rows for a study that begins.

    Raises:
        UserError: there is no such table, or it lacks a column.
    """
    if not continues:
        return pd.DataFrame(columns=list(columns))
    path = Path(continues) / name
    if not path.is_file():
        raise UserError(f"--continues {continues}: there is no {name} in it")
    table = pd.read_csv(path, keep_default_na=False)
    if missing := set(columns) - set(table):
        raise UserError(f"--continues {continues}: its {name} has no column {min(missing)}")
    return table


def with_verdicts(table: pd.DataFrame) -> pd.DataFrame:
    """Adds ``held``: whether ``found`` is within the bounds; empty where nothing was promised.

    Args:
        table: a row per promise, with ``found`` and one or both of ``at_least`` and ``at_most``,
            which are missing where there is no such bound.
    """
    held, promised = pd.Series(True, table.index), pd.Series(False, table.index)
    for column, within in (("at_least", pd.Series.ge), ("at_most", pd.Series.le)):
        if column in table:
            bound = table[column].astype(float)
            held &= within(table["found"].astype(float), bound) | bound.isna()
            promised |= bound.notna()
    return table.assign(held=held.astype(object).where(promised, ""))
