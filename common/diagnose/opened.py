"""A diagnosis of whatever a user names: a bundle, a run of assignment 4, or what a job left behind.

For the last, nothing of this project need have run. Each kind of file is evidence for some causes;
without it they are not judged, and the message says which files would be needed.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import mkdtemp

import pandas as pd

from common.diagnose.causes.job_traces import CAUSES, profiled_step
from common.diagnose.diagnosis import Diagnosis, case_of, examine_case, in_order, judged, lines_of
from common.diagnose.evidence.bundle import is_bundle, read_bundle
from common.diagnose.evidence.bundle_tables import TABLES_FOLDER, write_run
from common.diagnose.evidence.case import Case
from common.diagnose.evidence.evidence import NotJudged
from common.diagnose.evidence.left_behind import RESULT, LeftBehind, read_left_behind
from common.diagnose.pages.page import diagnosis_page
from common.errors import UserError
from common.runtime.records.run_directory import write_atomically
from common.runtime.wording import counted

PAGE, JSON = "diagnosis.html", "diagnosis.json"
FEW = 3
"""With so many of the five causes not judged, it means little that none was found."""


@dataclass(frozen=True, eq=False)
class Opened:
    """A diagnosis and what it was made from.

    Attributes:
        name: name of the bundle or run, for titles.
        folder: folder that results may be written to.
        notes: sentences on what could not be seen.
    """

    name: str
    folder: Path
    case: Case
    diagnosis: Diagnosis
    notes: tuple[str, ...] = ()

    def lines(self) -> list[str]:
        """Returns the diagnosis as text, with what could not be seen at its end."""
        notes = [f"   - {note}" for note in self.notes]
        return [*lines_of(self.diagnosis), *(["", "Not seen:", *notes] if notes else [])]

    def as_json(self) -> dict[str, object]:
        """Returns the diagnosis as JSON can hold it."""
        return {"name": self.name} | self.diagnosis.as_json() | {"notes": list(self.notes)}

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
    name, folder, tables = path.name, path, path
    if is_bundle(path):
        bundle = read_bundle(path)
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
    return Opened(name, folder, case, examine_case(case), notes)


def compared(before: Opened, after: Opened) -> pd.DataFrame:
    """Returns what changed between two runs: a row per part of the step, in ms.

    Columns: part, before, after, ratio. Rows of the whole step and of samples per second come
    first; parts that one of the two has not are left out.
    """
    rows = [
        ("step", before.case.run.step_ms, after.case.run.step_ms),
        ("samples/s", before.case.run.throughput, after.case.run.throughput),
    ]
    try:
        parts = [opened.case.run.parts.parts_ms for opened in (before, after)]
    except NotJudged:
        parts = [{}, {}]
    rows += [(name, value, parts[1][name]) for name, value in parts[0].items() if name in parts[1]]
    table = pd.DataFrame(rows, columns=["part", "before", "after"])
    return table.assign(ratio=table["after"] / table["before"].where(table["before"] > 0))


def causes_changed(before: Opened, after: Opened) -> Sequence[str]:
    """Returns a sentence for each cause that has come or gone."""
    first, then = ({v.cause: v.title for v in o.diagnosis.verdicts} for o in (before, after))
    gone = [f"Gone: {title}." for cause, title in first.items() if cause not in then]
    come = [f"New: {title}." for cause, title in then.items() if cause not in first]
    return [*gone, *come] or ["The same causes were found in both."]


@dataclass(frozen=True, eq=False)
class PostMortem:
    """A diagnosis, and what it was made from."""

    job: LeftBehind
    diagnosis: Diagnosis

    def lines(self) -> list[str]:
        """Returns the diagnosis as text."""
        notes = [f"   - {note}" for note in self.job.notes]
        return [*lines_of(self.diagnosis, FEW), *(["", "Not read:", *notes] if notes else [])]

    def write(self) -> Path:
        """Writes ``diagnosis.json`` into the folder; returns its path.

        Raises:
            UserError: the folder cannot be written.
        """
        notes = {"notes": list(self.job.notes)}
        content = {"name": self.job.folder.name} | self.diagnosis.as_json() | notes
        path = self.job.folder / RESULT
        try:
            write_atomically(path, json.dumps(content, indent=1))
        except OSError as error:
            raise UserError(f"{path}: {error.strerror}") from None
        return path


def open_postmortem(folder: Path | str) -> PostMortem:
    """Diagnoses all that a folder, and those below it, hold of a job.

    Raises:
        UserError: there is no such folder, or nothing in it that can be read.
    """
    job = read_left_behind(folder)
    verdicts, not_judged = judged(CAUSES, job)
    diagnosis = Diagnosis(tuple(in_order(verdicts)), tuple(not_judged), _summary(job))
    return PostMortem(job, diagnosis)


def _summary(job: LeftBehind) -> str:
    """Returns what was read, and where a step's time goes in the traces."""
    read = []
    if len(job.steps):
        ranks, steps = job.steps["rank"].nunique(), job.common_steps
        read.append(f"profiler traces of {counted(ranks, 'rank')}, {steps} steps")
    if job.log is not None:
        read.append(f"NCCL's log of {len(job.log.hosts)} ranks")
    if job.dumps:
        read.append(f"flight recorders' dumps of {len(job.dumps)} ranks")
    sentence = f"Read: {'; '.join(read)}."
    return f"{sentence} {profiled_step(job)}." if job.common_steps else sentence
