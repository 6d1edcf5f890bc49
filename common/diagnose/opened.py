"""A diagnosis of whatever a user names: a bundle, a run of assignment 4, or what a job left behind.

For the last, nothing of this project need have run, and files of any kind are read. Each kind is
evidence for some causes; without it they are not judged, and the message says which files would be
needed.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from tempfile import mkdtemp

from ddplab_watch.change_points import Change

from common.diagnose.all_causes import JOB_CAUSES
from common.diagnose.causes.job.collectives import judged_tables, list_rows, rows_as_json
from common.diagnose.causes.job.traces import profiled_step
from common.diagnose.diagnosis import (
    Diagnosis,
    case_of,
    examine_case,
    in_order,
    judged_causes,
    lines_of,
    lines_of_causes,
    new_causes,
    wrapped,
)
from common.diagnose.evidence.bundle import is_bundle, read_bundle
from common.diagnose.evidence.bundle_tables import TABLES_FOLDER, write_run
from common.diagnose.evidence.case import Case
from common.diagnose.evidence.left_behind import RESULT, LeftBehind, read_left_behind
from common.diagnose.long_runs import Part, parts_of
from common.diagnose.pages.page import diagnosis_page
from common.errors import UserError, naming_os_errors
from common.perfmodel.cluster.clusters import load_cluster
from common.runtime.records.run_directory import write_atomically

PAGE, JSON = "diagnosis.html", "diagnosis.json"


@dataclass(frozen=True, eq=False)
class Opened:
    """A diagnosis and what it was made from.

    Attributes:
        name: name of the bundle or run, for titles.
        folder: folder that results may be written to.
        notes: sentences on what could not be seen.
        later: changes while the script ran, each with the diagnosis of the steps after it.
    """

    name: str
    folder: Path
    case: Case
    diagnosis: Diagnosis
    notes: tuple[str, ...]
    later: tuple[tuple[Change, Diagnosis | None], ...]

    def lines(self) -> list[str]:
        """Returns the diagnosis as text, with what could not be seen at its end."""
        lines = [*lines_of(self.diagnosis), *lines_of_notes("Not seen", self.notes)]
        for change, diagnosis in self.later:
            sentence = change.said()
            lines += ["", *wrapped(f"{sentence[0].upper()}{sentence[1:]}.")]
            if diagnosis is not None:
                lines += lines_of_causes(new_causes(self.diagnosis, diagnosis))
        return lines

    def as_json(self) -> dict[str, object]:
        """Returns the diagnosis as JSON can hold it."""
        content = {"name": self.name} | self.diagnosis.as_json() | {"notes": list(self.notes)}
        if self.later:
            content["changes"] = [
                asdict(change)
                | {"said": change.said(), "diagnosis": diagnosis and diagnosis.as_json()}
                for change, diagnosis in self.later
            ]
        return content

    def write(self) -> list[Path]:
        """Writes ``diagnosis.json`` and ``diagnosis.html``; returns their paths.

        Raises:
            UserError: the folder cannot be written.
        """
        page = diagnosis_page(self.diagnosis, self.case, self.name, self.notes)
        text = json.dumps(self.as_json(), indent=1, default=str)
        try:
            write_atomically(self.folder / JSON, text)
            write_atomically(self.folder / PAGE, page)
        except OSError as error:
            raise UserError(f"{self.folder}: {error.strerror}; results go there") from None
        return [self.folder / JSON, self.folder / PAGE]


def lines_of_notes(heading: str, notes: Sequence[str]) -> list[str]:
    """Returns notes as text below a heading; nothing where there are none."""
    return ["", f"{heading}:", *(f"   - {note}" for note in notes)] if notes else []


def open_diagnosis(path: Path | str, baseline: Path | str | None = None) -> Opened:
    """Diagnoses a bundle (a folder or a ``.tar.gz``) or a run directory of assignment 4.

    The tables of a bundle are written into a folder in it (of a packed one, beside it), or, where
    that cannot be written, into a temporary one.

    Raises:
        UserError: it is neither, or nothing can be read from it.
    """
    path = Path(path)
    if not path.exists():
        raise UserError(f"{path}: no such folder")
    notes: tuple[str, ...] = ()
    parts: list[Part] = []
    name, folder, tables = path.name, path, path
    if is_bundle(path):
        full = read_bundle(path)
        bundle, parts = parts_of(full)
        name, folder, notes = f"{bundle.script} ({path.name})", path, bundle.notes
        if path.is_file():  # what is found lies beside what was packed
            folder = path.with_name(path.name.removesuffix(".tar.gz") + "-diagnosis")
        try:
            tables = write_run(bundle, folder / TABLES_FOLDER)
        except UserError:
            folder = Path(mkdtemp(prefix="ddplab-diagnosis-"))
            tables = write_run(bundle, folder / TABLES_FOLDER)
    elif path.is_file():
        raise UserError(f"{path}: neither a bundle nor a run directory")
    case = case_of(tables, baseline)
    later = tuple((part.change, _diagnosis_after(part, tables, baseline)) for part in parts)
    return Opened(name, folder, case, examine_case(case), notes, later)


def _diagnosis_after(part: Part, tables: Path, baseline: Path | str | None) -> Diagnosis | None:
    """Diagnoses the steps after a change; None where not enough was recorded of them."""
    if part.bundle is None:
        return None
    try:
        folder = tables.with_name(f"{tables.name}-step-{part.change.step}")
        return examine_case(case_of(write_run(part.bundle, folder), baseline))
    except UserError:  # the script ended right after it
        return None


@dataclass(frozen=True, eq=False)
class PostMortem:
    """A diagnosis of what a job left behind.

    Attributes:
        name: what was read, for titles.
        folder: folder that the result is written to; None where no single folder was named.
        job: what was read.
    """

    name: str
    folder: Path | None
    job: LeftBehind
    diagnosis: Diagnosis

    @property
    def judged(self) -> int:
        """Returns the number of causes for which there was evidence."""
        return len(JOB_CAUSES) - len(self.diagnosis.not_judged)

    def lines(self) -> list[str]:
        """Returns the diagnosis as text."""
        lines = lines_of(self.diagnosis, len(JOB_CAUSES) // 2)
        for table in judged_tables(self.job):
            lines += list_rows(table)
        return [*lines, *lines_of_notes("Not read", self.job.notes)]

    def write(self) -> Path | None:
        """Writes ``diagnosis.json`` into the folder, if one was named; returns its path.

        Raises:
            UserError: the folder cannot be written.
        """
        if self.folder is None:
            return None
        content = {"name": self.name} | self.diagnosis.as_json()
        content |= {"judged": self.judged, "notes": list(self.job.notes)}
        content["healthy"] = self.diagnosis.healthy and self.judged > len(JOB_CAUSES) // 2
        if tables := judged_tables(self.job):
            content["collectives"] = [rows_as_json(table) for table in tables]
        path = self.folder / RESULT
        with naming_os_errors(path):
            write_atomically(path, json.dumps(content, indent=1))
        return path


def open_postmortem(*paths: Path | str, hardware: str = "") -> PostMortem:
    """Diagnoses all that files and folders hold of a job; ``-`` is the standard input.

    Args:
        paths: files, folders and ``-``.
        hardware: cluster that the job ran on: a name of data/clusters, or a YAML file.

    Raises:
        UserError: a path does not exist or is a device, or nothing in any of them can be read.
    """
    named = [Path(path) for path in paths]
    job = read_left_behind(named, load_cluster(hardware) if hardware else None)
    verdicts, not_judged = judged_causes(JOB_CAUSES, job)
    diagnosis = Diagnosis(tuple(in_order(verdicts)), tuple(not_judged), _summary(job))
    folder = named[0] if len(named) == 1 and named[0].is_dir() else None
    return PostMortem(", ".join(path.name for path in named), folder, job, diagnosis)


def _summary(job: LeftBehind) -> str:
    """Returns what was read, and where a step's time goes in the traces."""
    sentence = f"Read: {'; '.join(job.kinds())}."
    return f"{sentence} {profiled_step(job)}." if job.common_steps else sentence
