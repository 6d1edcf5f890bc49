"""A diagnosis of what a job left behind: profiler traces, NCCL's log, flight recorders' dumps.

Nothing of this project need have run. Each kind of file is evidence for some causes; without it
they are not judged, and the message says which files would be needed.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from common.diagnose.diagnosis import Diagnosis, in_order, judged, lines_of
from common.diagnose.evidence.left_behind import RESULT, LeftBehind, read_left_behind
from common.diagnose.job_traces.causes import CAUSES, profiled_step
from common.errors import UserError
from common.runtime.records.run_directory import write_atomically
from common.runtime.wording import counted

FEW = 3
"""With so many of the five causes not judged, it means little that none was found."""


@dataclass(frozen=True, eq=False)
class PostMortem:
    """A diagnosis, and what it was made from."""

    left: LeftBehind
    found: Diagnosis

    def lines(self) -> list[str]:
        """Returns the diagnosis as text."""
        notes = [f"   - {note}" for note in self.left.notes]
        return [*lines_of(self.found, FEW), *(["", "Not read:", *notes] if notes else [])]

    def write(self) -> Path:
        """Writes ``diagnosis.json`` into the folder; returns its path.

        Raises:
            UserError: the folder cannot be written.
        """
        notes = {"notes": list(self.left.notes)}
        content = {"name": self.left.folder.name} | self.found.as_json() | notes
        path = self.left.folder / RESULT
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
    left = read_left_behind(folder)
    verdicts, not_judged = judged(CAUSES, left)
    found = Diagnosis(tuple(in_order(verdicts)), tuple(not_judged), _summary(left))
    return PostMortem(left, found)


def _summary(left: LeftBehind) -> str:
    """Returns what was read, and where a step's time goes in the traces."""
    read = []
    if len(left.steps):
        ranks, steps = left.steps["rank"].nunique(), left.common_steps
        read.append(f"profiler traces of {counted(ranks, 'rank')}, {steps} steps")
    if left.log is not None:
        read.append(f"NCCL's log of {len(left.log.hosts)} ranks")
    if left.dumps:
        read.append(f"flight recorders' dumps of {len(left.dumps)} ranks")
    said = f"Read: {'; '.join(read)}."
    return f"{said} {profiled_step(left)}." if left.common_steps else said
