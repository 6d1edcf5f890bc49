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
