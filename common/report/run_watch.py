"""Shows the progress of a run: lines in the terminal, and index.html."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from common.report import first_page
from common.report.run_page import RunPage
from common.report.timetable import COPIED, DONE, FAILED, LEFT_OUT, Timetable
from common.runtime.stage_progress import StageProgress


class RunWatch:
    """Follows a run's stages, for the terminal and for the page in ``folder``."""

    def __init__(self, folder: Path, timetable: Timetable, progress: StageProgress) -> None:
        self.folder = folder
        self.timetable = timetable
        self.progress = progress
        self.page = RunPage(timetable)
        self._run_dirs: dict[str, Path] = {}

    def announce(self) -> None:
        """Says how many stages there are and how long they will take, and makes the first page."""
        timetable = self.timetable
        took = timetable.time_text()
        how_long = (
            f": {took}, {timetable.basis}" if took else "; how long they take is not known yet"
        )
        self.progress.say(f"{len(timetable.entries)} stages{how_long}")
        self._write()

    def open(self, assignment: str, run_dir: Path) -> None:
        """Notes where an assignment is measured."""
        self._run_dirs[assignment] = run_dir
        self.page.open(assignment, run_dir)

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

    def copied(self, assignment: str, key: str, source: str) -> None:
        """Notes that a stage was measured for another assignment."""
        entry = self.timetable.entry(assignment, key)
        self.timetable.end(entry, COPIED)
        self.progress.say(f"= {entry.title}: as in {source}")
        self._note(assignment)

    def leave_out(self, assignment: str, key: str, reason: str) -> None:
        """Notes that a stage cannot run."""
        entry = self.timetable.entry(assignment, key)
        self.timetable.end(entry, LEFT_OUT)
        self.progress.say(f"- {entry.title}: left out, because {reason}")
        self._note(assignment)

    @contextmanager
    def until_the_end(self) -> Iterator[None]:
        """Leaves a page that says how the run ended, whatever ends it."""
        try:
            yield
        except BaseException as error:
            interrupted = isinstance(error, KeyboardInterrupt | GeneratorExit)
            self.page.state = "interrupted" if interrupted else "failed"
            self.page.reason = "interrupted by the user" if interrupted else str(error)
            with contextlib.suppress(OSError):  # such as the full disk that ended the run
                self._write()
            raise
        self.page.state = first_page.COMPLETE

    def _left(self) -> str:
        return ", ".join(filter(None, [self.timetable.place_text(), self.timetable.left_text()]))

    def _note(self, assignment: str) -> None:
        self.timetable.write(assignment, self._run_dirs[assignment])
        self.page.look(assignment)
        self._write()

    def _write(self) -> None:
        self.page.write(self.folder)
