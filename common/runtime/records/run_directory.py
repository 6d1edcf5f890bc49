"""Run directories: one folder per measurement, which says whether it is complete.

A run directory holds ``config.yaml``, ``environment.json`` (with ``status``: running, complete,
failed or interrupted) and tables as CSV. Files are written under another name and renamed. A run
directory may hold others: ``ddplab run`` puts each benchmark of one assignment below one run.
"""

from __future__ import annotations

import csv
import datetime
import json
import os
import secrets
import shutil
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING

import yaml

from common.errors import Preempted, UserError, naming_os_errors
from common.runtime.machine.environment import now
from common.runtime.processes.process_identity import has_ended

if TYPE_CHECKING:
    import pandas as pd


def new_run_id(label: str) -> str:
    """Makes an id that sorts by time and is unique, also among hosts within one second."""
    stamp = datetime.datetime.now(datetime.UTC).strftime("%Y%m%d-%H%M%S")
    return f"{stamp}-{label}-{secrets.token_hex(4)}"


def write_atomically(path: Path, text: str) -> None:
    """Writes beside ``path``, flushes to disk and renames: readers see all of it or none."""
    beside = path.with_name(f".{path.name}.{secrets.token_hex(4)}.partial")
    try:
        with beside.open("w") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        beside.replace(path)
    except BaseException:
        beside.unlink(missing_ok=True)
        raise


@contextmanager
def written_beside(path: Path) -> Iterator[Path]:
    """Yields a name beside ``path`` for a file or a new folder, which becomes ``path`` in the end.

    Nothing is left of it where the block fails. Raises UserError where it cannot be written.
    """
    beside = path.with_name(f".{path.name}.partial")
    shutil.rmtree(beside, ignore_errors=True)
    try:
        yield beside
        beside.replace(path)
    except OSError as error:
        raise UserError(f"{path}: {error.strerror}") from None
    finally:
        shutil.rmtree(beside, ignore_errors=True)
        with suppress(OSError):  # of a folder that is none
            beside.unlink()


class RunDirectory:
    """A run being written: a context manager whose block's end decides the run's status."""

    def __init__(self, path: Path, environment: dict) -> None:
        self.path = path
        self.environment = environment
        self._streams: list[SampleStream] = []

    @classmethod
    def create(
        cls,
        output_dir: Path | str,
        label: str,
        config: Mapping,
        environment: dict,
        run_id: str | None = None,
    ) -> RunDirectory:
        """Makes ``output_dir/<run_id>`` with its configuration and environment.

        Raises:
            UserError: the folder cannot be written, or a run of this id exists.
        """
        path = Path(output_dir) / (run_id or new_run_id(label))
        with naming_os_errors(f"output folder {path}"):
            try:
                path.mkdir(parents=True)
            except FileExistsError:
                raise UserError(f"{path} exists; choose another --run-id") from None
            run = cls(path, {"label": label, **environment})
            write_atomically(path / "config.yaml", yaml.safe_dump(dict(config), sort_keys=False))
            run._write_environment()
        return run

    def write_table(self, name: str, table: pd.DataFrame, index: bool = False) -> Path:
        """Writes a table as CSV, whole or not at all, and returns its path."""
        path = self.path / name
        write_atomically(path, table.to_csv(index=index))
        return path

    def stream(self, name: str, columns: Sequence[str]) -> SampleStream:
        """Opens a CSV that grows during the run, named ``.partial`` until the run is complete."""
        stream = SampleStream(self.path / name, columns)
        self._streams.append(stream)
        return stream

    def finish(self, status: str, reason: str | None = None) -> None:
        """Records the end of the run; only a complete run's streams get their final name."""
        for stream in self._streams:
            stream.close(complete=status == "complete")
        self.environment.update(status=status, end_time=now(), reason=reason)
        self._write_environment()

    def __enter__(self) -> RunDirectory:
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, _: object) -> None:
        if kind is None:
            self.finish("complete")
        elif issubclass(kind, KeyboardInterrupt | GeneratorExit):
            # A second signal, while the first one's exception propagates, closes the generators
            # around this block.
            self.finish("interrupted", str(error) or "interrupted by the user")
        elif issubclass(kind, Preempted):
            self.finish("interrupted", str(error))
        else:
            self.finish("failed", f"{kind.__name__}: {error}")

    def _write_environment(self) -> None:
        write_atomically(self.path / "environment.json", json.dumps(self.environment, indent=1))


class SampleStream:
    """A CSV of raw samples, flushed with each write, so that a run that breaks off keeps them."""

    def __init__(self, path: Path, columns: Sequence[str]) -> None:
        self.path = path
        self.columns = list(columns)
        path.parent.mkdir(exist_ok=True)  # a table may lie in a folder of the run
        self._partial = path.with_name(f"{path.name}.partial")
        self._file = self._partial.open("w", newline="")
        self._writer = csv.writer(self._file)
        self._writer.writerow(self.columns)

    def write(self, rows: Iterable[Mapping]) -> None:
        """Appends rows, each of which has exactly the stream's columns."""
        for row in rows:
            if row.keys() != set(self.columns):
                raise ValueError(f"{self.path.name}: columns {sorted(row)} are not {self.columns}")
            self._writer.writerow([row[column] for column in self.columns])
        self._file.flush()

    def close(self, complete: bool) -> None:
        """Closes the file; gives it its final name only if the run is complete."""
        self._file.close()
        if complete:
            self._partial.replace(self.path)


def read_environment(path: Path) -> dict:
    """Reads the environment record of a run directory, and corrects its status.

    A run marked as running has failed if its process has ended, or the one that launched it: of an
    emulated host's process only the latter can be seen from here. Without a status it is unknown.
    """
    try:
        record = {"status": "unknown"} | json.loads((path / "environment.json").read_text())
        names = ("process", "launched_by") if record["status"] == "running" else ()
        if any(has_ended(record[name]) for name in names if record.get(name)):
            record.update(status="failed", reason="its process was killed")
    except (OSError, ValueError, TypeError, AttributeError):
        return {"status": "failed", "reason": "its environment.json cannot be read"}
    return record


def why_broken_off(run_dir: Path) -> str | None:
    """Returns why a run broke off, in a line; None of a run that did not, and of another folder."""
    if not (run_dir / "environment.json").is_file():
        return None
    record = read_environment(run_dir)
    if record["status"] not in ("failed", "interrupted"):
        return None
    return " ".join(str(record.get("reason") or record["status"]).split())


def find_table(run_dir: Path, name: str, label: str | None = None) -> Path | None:
    """Returns the path of a run's table: in the folder itself, or in its newest complete run below.

    With a ``label`` only runs below that carry it count: another script may write a table of this
    name, too. None if there is no such table. One of a run that broke off is none.
    """
    if (run_dir / name).is_file() and why_broken_off(run_dir) is None:
        return run_dir / name
    below = [
        path
        for path in run_dir.glob(f"*/{name}")
        if (path.parent / "environment.json").is_file()
        and (environment := read_environment(path.parent))["status"] == "complete"
        and label in (None, environment.get("label"))
    ]
    return max(below, key=lambda p: read_environment(p.parent).get("start_time", ""), default=None)


def newest_complete_run(folder: Path, tables: Sequence[str]) -> Path | None:
    """Returns the newest run below ``folder`` that is complete and has all ``tables``, or None."""
    runs = []
    for record in folder.glob("*/environment.json"):
        environment = read_environment(record.parent)
        if environment["status"] == "complete" and all(
            find_table(record.parent, table) for table in tables
        ):
            written = record.stat().st_mtime_ns  # tells apart runs started in one second
            runs.append((environment.get("start_time", ""), written, record.parent))
    return max(runs, default=(None,))[-1]
