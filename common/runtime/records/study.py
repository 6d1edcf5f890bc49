"""Makes a study's run directory, says where it is, and holds what was found to promises."""

from __future__ import annotations

import io
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

import pandas as pd
import yaml

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
    name: str, study: DataclassInstance, output_dir: str, progress: StageProgress, environment: dict
) -> Iterator[RunDirectory]:
    """Opens a study's run directory; it is complete if the block ends without an error.

    Processes that are started inside share bytecode: a study starts hundreds.

    A study that ``continues`` another keeps that one's time, commit and command in its record.

    Args:
        study: the study's settings.

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
        name: name of the table.
        columns: columns that the table must have.

    Returns:
        The table, with text where a cell is empty; without rows for a study that begins.

    Raises UserError: there is no such table, or it lacks a column.
    """
    if not continues:
        return pd.DataFrame(columns=list(columns))
    lines = whole_lines(Path(continues) / name)
    if not lines:
        raise UserError(f"--continues {continues}: there is no {name} in it")
    table = pd.read_csv(io.StringIO(lines), keep_default_na=False)
    if missing := set(columns) - set(table):
        raise UserError(f"--continues {continues}: its {name} has no column {min(missing)}")
    return table


def earlier_tables(
    continues: str, tables: Mapping[str, Collection[str]], key: Sequence[str]
) -> dict[str, pd.DataFrame]:
    """Reads several tables of the study that another one continues, by name.

    Args:
        continues: as for ``earlier_table``.
        tables: columns that each table must have.
        key: columns that name a case. A case that a table lacks is in none that is returned.

    Raises UserError as ``earlier_table`` does.
    """
    read = {name: earlier_table(continues, name, columns) for name, columns in tables.items()}
    cases = {
        name: list(table[list(key)].itertuples(index=False, name=None))
        for name, table in read.items()
    }
    complete = set.intersection(*map(set, cases.values()))
    return {
        name: table.loc[[case in complete for case in cases[name]]] for name, table in read.items()
    }


def require_same_settings(what: str, study: DataclassInstance, free: Collection[str]) -> None:
    """Raises UserError where a study ``continues`` one of other settings, or what is none.

    Args:
        what: name of the study.
        study: settings of the one that goes on.
        free: settings in which the two may differ.
    """
    if not study.continues:
        return
    folder = Path(study.continues)
    try:
        settings = yaml.safe_load((folder / "config.yaml").read_text())
    except (OSError, ValueError, yaml.YAMLError) as error:
        raise UserError(f"--continues {folder}: not an {what} study ({error})") from None
    if not isinstance(settings, dict):
        raise UserError(f"--continues {folder}: its config.yaml has no settings")
    wanted = yaml.safe_load(yaml.safe_dump(asdict(study)))  # with lists, as they were written
    for name, value in wanted.items():
        if name not in free and settings.get(name) != value:
            raise UserError(
                f"--continues {folder}: its {name} was {settings.get(name)}, now it is {value}"
            )


def whole_lines(path: Path) -> str:
    """Returns the lines of a table, or those that its run had written when it was cut.

    A last line without an end is left out, as a kill may leave half of one. Empty for no table.
    """
    for file in (path, path.with_name(f"{path.name}.partial")):
        if file.is_file():
            return file.read_text().rpartition("\n")[0]
    return ""


PROMISED = ("promise", "at_least", "at_most", "found")


def with_verdicts(rows: Sequence[tuple], columns: Sequence[str] = PROMISED) -> pd.DataFrame:
    """Returns promises as a table with ``held``: empty where nothing was promised.

    Args:
        rows: a tuple per promise, by ``columns``; a bound is None where there is none.
        columns: ``promise``, ``found`` and one or both of ``at_least`` and ``at_most``.
    """
    table = pd.DataFrame(rows, columns=list(columns))
    held, promised = pd.Series(True, table.index), pd.Series(False, table.index)
    for column, within in (("at_least", pd.Series.ge), ("at_most", pd.Series.le)):
        if column in table:
            bound = table[column].astype(float)
            held &= within(table["found"].astype(float), bound) | bound.isna()
            promised |= bound.notna()
    return table.assign(held=held.astype(object).where(promised, ""))


def say_tables(
    progress: StageProgress,
    *tables: pd.DataFrame,
    float_format: str | None = "%.3g",
    na_rep: str = "NaN",
) -> None:
    """Prints tables of a study's results."""
    # As a function: pandas fails on a text where a column has numbers and other things.
    written = float_format.__mod__ if float_format else None
    for table in tables:
        progress.say(table.to_string(index=False, float_format=written, na_rep=na_rep))
