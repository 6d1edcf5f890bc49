"""The progress of a run: lines in the terminal, and index.html, which is there from its beginning
and made again after each of its stages."""

from __future__ import annotations

import contextlib
import datetime
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from common.analysis.findings.collect import (
    QUESTIONS,
    findings_of,
    machine_line,
    machine_states,
)
from common.analysis.findings.figures import SmallFigure, figure_of
from common.analysis.findings.finding import Finding
from common.analysis.findings.invariants import violations
from common.report import first_page
from common.report.document import (
    SUMMARY,
    Document,
    Part,
    render,
    write_page,
    write_pdf,
)
from common.report.first_page import FirstPage
from common.report.timetable import COPIED, DONE, FAILED, LEFT_OUT, Timetable
from common.runtime.records.run_directory import read_environment
from common.runtime.stage_progress import StageProgress

NOTHING_YET = ("Nothing has been measured yet.",)


class RunPage:
    """Collects the findings of a run so far, and makes its pages.

    The page is put together from parts that are made once: an assignment's notebooks when they have
    been executed, a finding when its tables are there.
    """

    def __init__(self, timetable: Timetable | None = None, *, full: bool = False) -> None:
        """Begins a page; ``full`` says whether report.pdf has the notebooks whole."""
        self._timetable, self._full = timetable, full
        self._summary: list[Document] = []
        self.folders: dict[str, Path] = {}
        self._findings: dict[str, tuple[Finding, ...]] = {}
        self._figures: dict[str, SmallFigure | None] = {}
        self._violations: dict[str, tuple[str, ...]] = {}
        self._parts: dict[str, Part] = {}
        self._documents: dict[str, Document] = {}
        self.state, self.reason = first_page.RUNNING, ""

    def open(self, assignment: str, run_dir: Path) -> None:
        """Adds an assignment whose run directory has been made."""
        self.folders[assignment] = run_dir

    def look(self, assignment: str) -> None:
        """Looks for what the assignment's run has found since the last time."""
        folder = self.folders[assignment]
        earlier = self._findings.get(assignment, ())
        self._findings[assignment] = findings_of(assignment, folder, earlier)
        if self._figures.get(assignment) is None:
            self._figures[assignment] = figure_of(assignment, folder)
        self._violations[assignment] = violations(folder)

    def add(self, document: Document) -> None:
        """Adds the executed notebooks of an assignment, all of whose stages are over.

        Its findings are looked for once more: those found while it ran may have changed with its
        later stages.
        """
        assignment = document.assignment
        self._findings.pop(assignment, None)
        self._figures.pop(assignment, None)
        self.look(assignment)
        self._documents[assignment] = document
        self._parts[assignment] = render(document)

    def add_summary(self, notebook: Path) -> None:
        """Adds the executed notebook of a whole run, which comes first."""
        self._summary = [Document(SUMMARY, (notebook,))]

    def first(self, *, only: str | None = None) -> FirstPage:
        """Returns the first page as of now; of one assignment where ``only`` names it."""
        names = [name for name in self.folders if only in (None, name)]
        record = next(map(_environment, [self.folders[name] for name in reversed(names)]), None)
        machine = first_page.machine_lines(record) if record else NOTHING_YET
        states = {
            f"{name}/{stage}": state
            for name in names
            for stage, state in machine_states(
                self.folders[name], with_copies=only is not None
            ).items()
        }
        return FirstPage(
            machine=machine,
            findings=tuple(finding for name in names for finding in self._findings.get(name, ())),
            figures=tuple(figure for name in names if (figure := self._figures.get(name))),
            machine_state=machine_line(states),
            violations=tuple(
                sentence for name in names for sentence in self._violations.get(name, ())
            ),
            not_run=() if only else tuple(sorted(set(QUESTIONS) - self._planned())),
            state=first_page.COMPLETE if only else self.state,
            reason=self.reason,
            made=datetime.datetime.now().strftime("%H:%M:%S"),
            timetable=None if only else self._timetable,
        )

    def write(self, folder: Path) -> None:
        """Writes ``index.html`` of all that there is."""
        summary = [render(document) for document in self._summary]
        self._write_page(folder, self.first(), [*summary, *self._parts.values()])

    def write_assignment(self, folder: Path, assignment: str) -> None:
        """Writes ``index.html`` and ``report.pdf`` of one assignment."""
        page = self.first(only=assignment)
        self._write_page(folder, page, [self._parts[assignment]])
        self._write_pdf(folder, page, [self._documents[assignment]])

    def write_report(self, folder: Path) -> None:
        """Writes ``report.pdf`` and then ``index.html`` of a run that is over."""
        self._write_pdf(folder, self.first(), [*self._summary, *self._documents.values()])
        self.write(folder)

    def _planned(self) -> set[str]:
        entries = self._timetable.entries if self._timetable else []
        return {entry.assignment for entry in entries} | set(self.folders)

    def _write_page(self, folder: Path, page: FirstPage, parts: list[Part]) -> None:
        anchors = {heading.anchor for part in parts for heading in part.contents}
        front = first_page.as_html(page, anchors)
        write_page(folder, parts, front=front, style=first_page.STYLE.read_text())

    def _write_pdf(self, folder: Path, page: FirstPage, documents: list[Document]) -> None:
        has_pages = any(document in self._summary for document in documents)
        front, files = first_page.as_typst(page, with_figures=not has_pages)
        write_pdf(folder, documents, front=front, front_files=files, full=self._full)


class RunWatch:
    """Follows a run's stages, for the terminal and for the page in ``folder``."""

    def __init__(
        self, folder: Path, timetable: Timetable, progress: StageProgress, *, full: bool = False
    ) -> None:
        self.folder = folder
        self.timetable = timetable
        self.progress = progress
        self.page = RunPage(timetable, full=full)

    def announce(self) -> None:
        """Says how many stages there are and how long they will take, and makes the first page."""
        timetable = self.timetable
        expected = timetable.time_text()
        how_long = "; how long they take is not known yet"
        if expected:
            how_long = f": {expected}, {timetable.basis}"
        self.progress.say(f"{len(timetable.entries)} stages{how_long}")
        self._write()

    @contextmanager
    def stage(self, assignment: str, key: str) -> Iterator[Callable[[str], None]]:
        """Follows a stage; yields a function that takes its output, line by line.

        The page is made again when the stage is over. Ranks that go on with the next stage set
        themselves up meanwhile, for longer than this takes.
        """
        entry = self.timetable.begin(assignment, key)
        self._write()
        try:
            with self.progress.stage(entry.title, self._left) as update:
                yield update
        except BaseException:
            self.timetable.end(entry, FAILED)
            raise
        self.timetable.end(entry, DONE)
        self._note(assignment)

    def leave_out(self, assignment: str, key: str, reason: str, *, copied: bool = False) -> None:
        """Notes that a stage cannot run, or was measured for another assignment: ``copied``."""
        entry = self.timetable.entry(assignment, key)
        self.timetable.end(entry, COPIED if copied else LEFT_OUT)
        words = f"= {entry.title}: as in" if copied else f"- {entry.title}: left out, because"
        self.progress.say(f"{words} {reason}")
        self._note(assignment)

    @contextmanager
    def until_the_end(self) -> Iterator[None]:
        """Leaves a page that says how the run ended, whatever ends it."""
        try:
            yield
        except BaseException as error:
            interrupted = isinstance(error, KeyboardInterrupt | GeneratorExit)
            self.page.state = "interrupted" if interrupted else "failed"
            self.page.reason = str(error) or "interrupted by the user"
            with contextlib.suppress(OSError):  # such as the full disk that ended the run
                self._write()
            raise
        self.page.state = first_page.COMPLETE

    def _left(self) -> str:
        return ", ".join(filter(None, [self.timetable.place_text(), self.timetable.left_text()]))

    def _note(self, assignment: str) -> None:
        self.timetable.write(assignment, self.page.folders[assignment])
        self.page.look(assignment)
        self._write()

    def _write(self) -> None:
        self.page.write(self.folder)


def _environment(run_dir: Path) -> dict:
    """Returns the record of a run, or of one in it: the folder of cluster jobs has none itself."""
    record = run_dir / "environment.json"
    below = sorted(run_dir.glob("**/environment.json"))
    return read_environment(run_dir if record.is_file() or not below else below[0].parent)
