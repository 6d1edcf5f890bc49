"""``ddplab course faults``: runs with faults that nobody has seen, for grading A4.4.

They are the cases of ``ddplab study diagnosis`` with delays of other sizes.
"""

from __future__ import annotations

import random
import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory

from common.cluster.emulated import why_no_hosts
from common.course.faults import set_of_files
from common.diagnose.studies.planted import Case, DiagnosisStudy, run_cases
from common.errors import UserError
from common.runtime.records.run_directory import written_beside
from common.runtime.stage_progress import StageProgress

FACTORS = (0.8, 1.3)
"""Least and largest factor of a delay."""


def plant(out: Path, seed: int, progress: StageProgress, only: Sequence[str] = ()) -> None:
    """Plants faults, runs them on this machine, and writes the set to ``out``, whole or not at all.

    Args:
        out: folder of the set, which must not exist.
        seed: seed of delays, and of the names that the set gives its runs.
        progress: shows the stages.
        only: causes, or names of cases; by default all.

    Raises:
        UserError: the folder is there already, or a cause is unknown.
    """
    if out.exists():
        raise UserError(f"{out} is there already; give a folder that is not")
    cases = fresh_cases(DiagnosisStudy(tuple(only)).cases(), seed)
    if any(case.rate for case in cases) and (reason := why_no_hosts()):
        progress.say(f"without the cases on emulated hosts: {reason}")
        cases = [case for case in cases if not case.rate]
    if not cases:
        raise UserError(f"--only {' '.join(only)}: a set can have none of these faults here")
    with written_beside(out) as beside, TemporaryDirectory() as scratch:
        beside.mkdir(parents=True)
        folder = Path(scratch)
        (folder / "logs").mkdir()
        run_cases(cases, folder, progress)
        runs = [(case.name, case.cause, case.baseline) for case in cases if case.ranks > 1]
        for name, content in set_of_files(folder, runs, seed).items():
            (beside / name).parent.mkdir(parents=True, exist_ok=True)
            (beside / name).write_bytes(content)


def fresh_cases(cases: Sequence[Case], seed: int) -> list[Case]:
    """Returns the cases with other delays, which are the numbers at the end of their faults."""
    drawn = random.Random(seed)

    def other(match: re.Match) -> str:
        return f"{float(match[0]) * drawn.uniform(*FACTORS):.3g}"

    return [replace(c, fault=re.sub(r"(?<==)\d+(\.\d+)?$", other, c.fault)) for c in cases]
