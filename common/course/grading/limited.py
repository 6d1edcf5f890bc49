"""Reads what a student handed in, in a process whose memory and time are limited.

``python -m common.course.grading.limited REQUEST ANSWER`` is that process: REQUEST is a JSON file
that names a function and its arguments, and ANSWER becomes one with what it returned.
"""

from __future__ import annotations

import errno
import importlib
import json
import os
import resource
import shutil
import signal
import sys
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from datetime import datetime
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from common.course.answers import read_answers, read_questions
from common.course.hand_ins.tarball import ANSWERS, EXERCISES, REPORT, RUN
from common.course.submission import HandedIn, Submission, read_submission
from common.errors import RunFailed, UserError
from common.runtime.processes.child import run_child

MODULE = "common.course.grading.limited"
CPU_S, TIME_S, MEMORY_BYTES, FILE_BYTES = 60, 300.0, 2 * 2**30, 2**28
"""Most computing time, time by the clock, memory, and bytes of a file that it writes."""
UNPACKING_S = 20
FREE_BYTES = 2**16
"""Space in the folder of temporary files below which that is what is wrong."""
LIMITS = {
    resource.RLIMIT_DATA: MEMORY_BYTES,
    resource.RLIMIT_FSIZE: FILE_BYTES,
    resource.RLIMIT_CORE: 0,
}
BROKEN = 3
"""Exit status where the function broke at what it read."""


@dataclass(frozen=True)
class ReadBack:
    """What was read of a submission.

    Attributes:
        answers: question → a number, a letter or a text; None where there is no answer.
        numbers: question → the number that the run's tables give, or why they give none.
        why: reason why the answers cannot be read; empty where they can.
    """

    answers: Mapping[str, float | str | None] = field(default_factory=dict)
    numbers: Mapping[str, float | str] = field(default_factory=dict)
    why: str = ""


def limited_submission(path: Path) -> Submission:
    """Reads a tarball, as ``read_submission`` does and with its errors.

    Python's tarfile takes memory and time for some headers that grow with the square of their
    length, or without end.
    """
    with TemporaryDirectory(prefix="ddplab-unpacking-") as scratch:
        read = limited(unpack, UNPACKING_S, path=str(path.absolute()), folder=scratch)
        files = {name: (Path(scratch) / number).read_bytes() for name, number in read["files"]}
    packed_at = read["packed_at"] and datetime.fromisoformat(read["packed_at"])
    return Submission(HandedIn(**read["of"]), files, packed_at)


def unpack(path: str, folder: str) -> dict[str, Any]:
    """Writes the files of a tarball to ``folder``, by number; runs in the limited process."""
    submission = read_submission(Path(path))
    names = []
    for number, (name, content) in enumerate(submission.files.items()):
        (Path(folder) / str(number)).write_bytes(content)
        names.append((name, str(number)))
    packed_at = submission.packed_at and submission.packed_at.isoformat()
    return {"of": asdict(submission.of), "files": names, "packed_at": packed_at}


def limited_answers(
    submission: Submission, root: Path, functions: Mapping[str, str] | None = None
) -> ReadBack:
    """Reads a submission's answers, and the numbers that its tables give.

    Tables that cannot be read within the limits cost nothing but the numbers.

    Args:
        root: the project, which has the questions.
        functions: question → name of the function that computes its number.
    """
    if ANSWERS not in submission.files:
        return ReadBack()
    with TemporaryDirectory(prefix="ddplab-reading-") as scratch:
        folder = Path(scratch)
        wanted = {"folder": scratch, "root": str(root), "assignment": submission.of.assignment}
        try:
            lay_out(submission, folder)
            return ReadBack(**limited(read_hand_in, **wanted, functions=dict(functions or {})))
        except UserError as error:
            why = str(error)
        if not functions:
            return ReadBack(why=why)
        try:
            answers = limited(read_hand_in, **wanted, functions={})
        except UserError as error:
            return ReadBack(why=str(error))
        return ReadBack(**answers | {"numbers": dict.fromkeys(functions, why)})


def lay_out(submission: Submission, folder: Path) -> None:
    """Writes a submission's files to a folder. Raises UserError where one cannot be written."""
    for name in (EXERCISES, RUN):
        (folder / name).mkdir()
    for name, text in submission.exercises().items():
        (folder / EXERCISES / name).write_text(text, encoding="utf-8")
    for name in (ANSWERS, REPORT):
        if name in submission.files:
            (folder / name).write_bytes(submission.files[name])
    submission.write_run(folder / RUN)


def read_hand_in(
    folder: str, root: str, assignment: int, functions: Mapping[str, str]
) -> dict[str, Any]:
    """Returns the attributes of ``ReadBack``; runs in the limited process."""
    questions = read_questions(Path(root), assignment)
    answers = read_answers((Path(folder) / ANSWERS).read_bytes(), questions)
    wanted = {name: f for name, f in functions.items() if answers[name] is not None}
    if not wanted:
        return {"answers": answers}
    from common.course.numbers.tables import numbers_of  # takes long

    return {
        "answers": answers,
        "numbers": numbers_of(Path(folder) / RUN, assignment, wanted),
    }


def limited(function: Callable[..., Any], cpu_s: int = CPU_S, **arguments: Any) -> Any:
    """Calls a module's function in a process of its own; arguments and result are plain data.

    Args:
        cpu_s: most seconds that it computes.

    Raises:
        UserError: of the function, or because what it reads takes too much memory or time.
        RunFailed: the process does not start.
    """
    with TemporaryDirectory(prefix="ddplab-limited-") as scratch:
        request, answer, log = (Path(scratch) / name for name in ("request", "answer", "log"))
        name = f"{function.__module__}:{function.__qualname__}"
        wanted = {"function": name, "arguments": arguments, "cpu_s": cpu_s}
        request.write_text(json.dumps(wanted))
        variables = os.environ | {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
        command = [str(request), str(answer)]
        ended = run_child(MODULE, command, log, environment=variables, timeout_s=TIME_S)
        if ended.status == 0:
            result = json.loads(answer.read_bytes())
            if "error" in result:
                raise UserError(result["error"])
            return result["value"]
        if shutil.disk_usage(scratch).free < FREE_BYTES:  # which is no fault of what it reads
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(Path(scratch).parent))
        if ended.status == -signal.SIGXCPU or ended.timeout_s is not None:
            raise UserError(f"reading it takes more than {cpu_s} s")
        if ended.status < 0 or ended.status == BROKEN:
            raise UserError(f"it cannot be read: {ended.reason}")
        raise RunFailed(f"{MODULE}: {ended.reason}")


def main() -> None:
    """Calls a function with limits, and writes what it returned."""
    request, answer = (Path(argument) for argument in sys.argv[1:])
    wanted = json.loads(request.read_text())
    module, _, name = wanted["function"].partition(":")
    function = getattr(importlib.import_module(module), name)
    for limit, most in {**LIMITS, resource.RLIMIT_CPU: wanted["cpu_s"]}.items():
        hard = resource.getrlimit(limit)[1]
        # Of time the soft limit ends it by a signal that says so.
        most = most if hard == resource.RLIM_INFINITY else min(most, hard)
        resource.setrlimit(limit, (most, hard))
    try:
        try:
            result = {"value": function(**wanted["arguments"])}
        except UserError as error:
            result = {"error": str(error)}
        except MemoryError:
            result = {"error": f"reading it takes more than {MEMORY_BYTES // 2**30} GiB of memory"}
        answer.write_text(json.dumps(result))
    except Exception as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        sys.exit(BROKEN)


if __name__ == "__main__":
    main()
