"""Runs the hidden tests of a submission's exercises in a sandbox, and keeps their outcomes.

Student code never shares a process with a check. The hidden tests run here, beside the expected
values, and call the student's functions in a sandbox, which has neither.

Outcomes are kept by what decides them: the exercises' texts, the variant, the sandbox's kind, and
all code of the course. What did not change is not run again.
"""

from __future__ import annotations

import functools
import hashlib
import json
import platform
import re
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path

from common.course.markers import student_source
from common.course.outcomes import FAILED, Outcome, run_tests
from common.course.progress import reason_of
from common.course.sandbox.imports import violations
from common.course.sandbox.sandbox import NOT_STARTED
from common.course.sandbox.student import lay_out, lay_out_student
from common.course.tasks import COURSE, HIDDEN, Task, read_tasks
from common.errors import RunFailed, unwritten_task
from common.runtime.records.run_directory import write_atomically

TIME_S = 330
"""For the checks of a submission; what has not begun by then fails."""
LAST_S = 180
"""For pytest besides: the last check may take its 120 s, and what is left has to be ended."""
FAULT = re.compile(rf'(failed on setup with ")?common\.errors\.RunFailed: {NOT_STARTED}')
"""Beginning of a failure's message that is the grader's fault. What a student's code raises begins
otherwise, whatever it says."""
NO_TIME = 'failed on setup with "Failed: no time is left'
"""Beginning of the message of a check that had not begun after ``TIME_S``; the next grading runs it
again."""
PART = "own"
TIMED = (
    "test_ddp_wrappers.py::test_steps_are_at_most_half_as_long_again_as_the_references",
    "test_ddp_wrappers.py::test_steps_are_as_fast_as_the_references",
    "test_min_max_partition.py::test_large_batches_take_at_most_twenty_times_the_references_time",
)
"""Checks that time a student's code: nothing else is graded meanwhile."""
DECIDING = (
    "common/**/*.py",
    "tests/*.py",
    "tests/exercises/*.py",
    f"{HIDDEN}/**/*.py",
    f"{COURSE}",
    "data/*/study-diagnosis/**/*.csv",
    "data/fault-runs*/**/*",
)
"""Files of the project by which the outcome of a check is decided."""


@dataclass(frozen=True)
class Exercises:
    """Exercises that were handed in and may be run, and all that decides how their checks end.

    Attributes:
        root: the project, with references and hidden tests.
        tasks: tasks of what was handed in.
        texts: text by the exercise's file.
        variant: seed of the numbers in checks.
        isolation: kind of the sandbox.
        cache: folder of outcomes that were seen before; None for none.
    """

    root: Path
    tasks: Mapping[str, Task]
    texts: Mapping[str, str]
    variant: int
    isolation: str
    cache: Path | None = None

    def outcomes(self, time_s: float = TIME_S, *, timed: bool = True) -> list[Outcome]:
        """Returns the outcomes of all checks; runs those that are not kept.

        Args:
            time_s: after which no check begins.
            timed: False beside other gradings: checks that time a student's code are left out, and
                one that fails is run again by the next call. It may have waited for a processor.

        Raises:
            RunFailed: the sandbox does not start, or pytest comes to no end, or not to a check.
        """
        kept = self.read()
        missing = [
            check
            for task in self.tasks.values()
            if task.file in self.texts
            for check in task.checks
            if check not in kept and (timed or check not in TIMED)
        ]
        if missing:
            ran = by_check(self.run(missing, time_s))
            kept |= {check: ran[check] for check in missing if timed or is_sure(ran[check])}
            self.keep(kept)
        return [outcome for outcomes in kept.values() for outcome in outcomes]

    def run(self, checks: Sequence[str], time_s: float) -> list[Outcome]:
        """Runs checks in a sandbox of their own."""
        with tempfile.TemporaryDirectory(prefix="ddplab-grading-") as scratch:
            folder = Path(scratch)
            folder.chmod(0o755)
            lay_out(folder, self.root)
            lay_out_student(folder, self.root, PART, self.root / HIDDEN / "probes", self.text())
            graded = {
                "folder": str(folder),
                "isolation": self.isolation,
                "variant": self.variant,
                "until": time.time() + time_s,
            }
            arguments = [f"{HIDDEN}/{check}" for check in checks]
            arguments += [f"--hypothesis-seed={self.variant}", "-p", "no:randomly", "-q"]
            arguments += ["-m", "not slow"]  # those marked ``grading``, too
            variables = {"DDPLAB_GRADED": json.dumps(graded), "OMP_NUM_THREADS": "1"}
            outcomes = run_tests(self.root, arguments, variables, timeout_s=time_s + LAST_S)
        for outcome in outcomes:  # the grader's fault is no student's
            if FAULT.match(outcome.message):
                raise RunFailed(reason_of(outcome.message))
        ran = by_check(outcomes)
        if lost := [check for check in checks if check not in ran]:
            faults = (o.message for o in outcomes if o.outcome == FAILED and not o.file)
            why = next(map(reason_of, faults), "pytest did not reach it")
            raise RunFailed(f"{HIDDEN}/{lost[0]}: {why}")
        return outcomes

    def text(self) -> Callable[[Path], str]:
        """Returns the function that gives each exercise's text: theirs, solved, or stripped."""
        first = min(self.tasks)
        tasks = read_tasks(self.root)
        solved = [name for name, task in tasks.items() if name < first or task.omitted]

        def text(path: Path) -> str:
            if path.name in self.texts:
                return self.texts[path.name]
            return student_source(path.read_text(), path.name, solved)

        return text

    def file(self) -> Path | None:
        """Returns the file of the outcomes; None without a cache."""
        if self.cache is None:
            return None
        packages = [platform.python_version(), version("torch"), version("hypothesis")]
        deciding = [
            deciding_files(self.root),
            packages,
            self.variant,
            self.isolation,
            sorted(self.tasks),
            sorted(self.texts.items()),
        ]
        return self.cache / f"{hashlib.sha256(json.dumps(deciding).encode()).hexdigest()}.json"

    def read(self) -> dict[str, list[Outcome]]:
        """Reads what is kept: the outcomes of each check; a damaged file is none."""
        path = self.file()
        try:
            kept = json.loads(path.read_text()) if path else {}
            return {check: [Outcome(**o) for o in outcomes] for check, outcomes in kept.items()}
        except (FileNotFoundError, ValueError, TypeError, AttributeError):
            return {}

    def keep(self, outcomes: Mapping[str, Sequence[Outcome]]) -> None:
        """Writes the outcomes, whole or not at all; of checks that were not begun there is none."""
        if path := self.file():
            path.parent.mkdir(parents=True, exist_ok=True)
            kept = {
                check: [asdict(o) for o in listed]
                for check, listed in outcomes.items()
                if not any(o.message.startswith(NO_TIME) for o in listed)
            }
            write_atomically(path, json.dumps(kept))


def is_sure(outcomes: Sequence[Outcome]) -> bool:
    """Returns True for outcomes that a busy machine does not explain."""
    return all(o.outcome != FAILED or unwritten_task(o.message) for o in outcomes)


def by_check(outcomes: Sequence[Outcome]) -> dict[str, list[Outcome]]:
    """Returns the outcomes of each check's cases, by the check's name in ``course.yaml``."""
    checks: dict[str, list[Outcome]] = {}
    for outcome in outcomes:
        check = f"{outcome.file}.py::{outcome.name.partition('[')[0]}"
        checks.setdefault(check, []).append(outcome)
    return checks


@functools.lru_cache(maxsize=8)
def deciding_files(root: Path) -> str:
    """Returns the SHA-256 of all files that decide the outcomes of checks; read once."""
    return sha256_of(root, [path for pattern in DECIDING for path in root.glob(pattern)])


def sha256_of(root: Path, paths: Sequence[Path], more: str = "") -> str:
    """Returns the SHA-256 of files, with their paths below ``root``, and of more text."""
    digest = hashlib.sha256(more.encode())
    for path in sorted({path for path in paths if path.is_file()}):
        digest.update(f"{path.relative_to(root).as_posix()}\0".encode())
        digest.update(hashlib.sha256(path.read_bytes()).digest())
    return digest.hexdigest()


def why_refused(
    root: Path, tasks: Mapping[str, Task], exercises: Mapping[str, str]
) -> dict[str, str]:
    """Returns why tasks get nothing whose file is missing, or uses what it may not."""
    all_tasks = read_tasks(root)
    support = [path.stem for path in (root / "common" / "exercises").glob("*.py")]
    support = [name for name in support if f"{name}.py" not in {t.file for t in all_tasks.values()}]
    reasons = {}
    for name, task in tasks.items():
        if task.file not in exercises:
            reasons[name] = f"{task.file} was not handed in"
            continue
        allowed = support + [all_tasks[needed].file.removesuffix(".py") for needed in task.needs]
        reference = (root / task.path).read_text()
        if wrong := violations(exercises[task.file], reference, allowed):
            reasons[name] = f"{task.file}, {wrong[0]}"
    return reasons
