"""Gradescope's grader: the bundle that is uploaded, and the program that grades in it.

The bundle has ``setup.sh``, ``run_autograder`` and the project's files that grade. Gradescope
unpacks it, runs setup.sh once as root, and run_autograder for each submission
(https://gradescope-autograders.readthedocs.io/en/latest/specs/).

``python -m common.course.autograder SUBMISSION RESULTS ASSIGNMENT PART VARIANT VISIBILITY`` grades.
SUBMISSION is the folder of what a student uploaded, which is one tarball of that assignment, and
RESULTS the file that Gradescope reads. Whatever happens meanwhile, that file is there afterwards;
of a fault of the grader it says so, and the traceback is printed.

An assignment on Gradescope has a fixed number of points. So the score is that of the checks,
numbers and choices, scaled to all of their points where some could not be judged; texts are graded
by hand.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import zipfile
from collections.abc import Collection, Mapping
from dataclasses import replace
from pathlib import Path

from common.course.answers import TEXT, Question, questions_path, read_questions
from common.course.export import tracked_files
from common.course.grading.grade import Grader
from common.course.grading.marks import NO_ANSWER, Grade
from common.course.grading.matrix import parts_of
from common.course.grading.people.identify import files_of
from common.course.hand_ins.tarball import printable
from common.course.overlay import staff_files, with_overlay
from common.course.submission import check_part
from common.course.tasks import Task, read_tasks
from common.errors import RunFailed, UserError
from common.runtime.paths import project_root
from common.runtime.records.run_directory import written_beside

PACKED = ("common/", "tests/exercises/", "assignments/", "pyproject.toml", "data/")
SUPPORT = ("tests/conftest.py", "tests/company.py", "tests/rank_support.py")
AFTER_PUBLISHED = "after_published"
UV, PYTHON = "0.13.9", "3.11"
CONSTRAINTS = "constraints.txt"
SETUP = """#!/usr/bin/env bash
# Installs what grading needs: a Python of its own, and PyTorch for CPUs and the other packages in
# the versions of uv.lock. The image's Python, of whatever version, fetches uv and nothing else.
set -euo pipefail
if command -v apt-get >/dev/null; then
    apt-get update -qq
    DEBIAN_FRONTEND=noninteractive apt-get install -y -qq \\
        python3 python3-venv python3-pip util-linux iproute2
fi
here=$(cd "$(dirname "$0")" && pwd)
project="$here/source/project"
[ -d "$project" ] || project="$here/project"
if ! { python3 -m venv "$here/uv" && "$here/uv/bin/pip" install --quiet uv=={uv}; }; then
    echo "setup.sh: uv {uv} needs a python3 with venv and pip, and PyPI; take an Ubuntu image" >&2
    exit 1
fi
export UV_PYTHON_INSTALL_DIR="$here/python"  # another user may not enter root's home
"$here/uv/bin/uv" venv --quiet --managed-python --python {python} "$here/venv"
"$here/uv/bin/uv" pip install --quiet --python "$here/venv/bin/python" --torch-backend=cpu \\
    --constraints "$project/{constraints}" \\
    torch numpy pandas pyyaml scipy psutil pytest pytest-timeout pytest-xdist hypothesis
# Another user may run Python here, and may not read what grades.
chmod 755 "$here" "$here/venv"
chmod -R go-rwx "$project"
"""
RUN = """#!/usr/bin/env bash
# Grades the tarball in submission/ and writes results/results.json.
set -uo pipefail
here=$(cd "$(dirname "$0")" && pwd)
project="$here/source/project"
[ -d "$project" ] || project="$here/project"
venv="$here/venv"
[ -d "$venv" ] || venv="$here/source/venv"
cd "$project"
exec env PYTHONPATH="$project" PYTHONDONTWRITEBYTECODE=1 "$venv/bin/python" \\
    -m common.course.autograder "$here/submission" "$here/results/results.json" \\
    {of} {variant} {visibility}
"""
PACKED_NAME = re.compile(r"\.(tar(\.gz)?|tgz)$", re.IGNORECASE)
"""End of a tarball's name, as browsers save it."""


def bundle(
    root: Path,
    out: Path,
    of: tuple[int, int],
    variant: int,
    overlay: Path | None = None,
    *,
    without: Collection[str] = (),
    visibility: str = AFTER_PUBLISHED,
) -> int:
    """Writes the bundle, whole or not at all; returns the number of its files.

    Args:
        root: the project.
        out: file of the bundle, which must not exist.
        of: assignment and part that it grades, and no other; part 0 where there are none.
        variant: seed of the numbers in checks.
        overlay: folder of the staff's, with files that take the place of the project's.
        without: names of tasks that are left out, besides those of ``course.yaml``.
        visibility: Gradescope's word for when students see checks and what they say.

    Raises:
        UserError: there is no such assignment or part, the file is there already, something is not
            committed, a solution is not there, or it cannot be written.
    """
    check_part(*of)
    assignments = sorted({task.assignment for task in read_tasks(root).values()})
    if of[0] not in assignments:
        raise UserError(f"--assignment {of[0]}: one of {', '.join(map(str, assignments))}")
    if out.exists():
        raise UserError(f"{out} is there already; give a file that is not")
    names = {*tracked_files(root), *(staff_files(root, overlay) if overlay else ())}
    values = {"uv": UV, "python": PYTHON, "constraints": CONSTRAINTS, "visibility": visibility}
    values |= {"variant": str(variant), "of": " ".join(map(str, of))}
    with (
        written_beside(out) as beside,
        with_overlay(root, overlay, without) as merged,
        zipfile.ZipFile(beside, "w") as archive,
    ):
        names = sorted(name for name in names if is_packed(name))
        for name, text in (("setup.sh", SETUP), ("run_autograder", RUN)):
            for word, value in values.items():
                text = text.replace(f"{{{word}}}", value)
            write(archive, name, text.encode(), 0o755)
        write(archive, f"project/{CONSTRAINTS}", locked_versions(root), 0o644)
        for name in names:
            write(archive, f"project/{name}", (merged / name).read_bytes(), 0o644)
    return len(names) + 3


def locked_versions(root: Path) -> bytes:
    """Returns the versions of ``uv.lock``, as pip's constraints. Raises UserError without uv."""
    command = ["uv", "export", "--quiet", "--frozen", "--no-emit-workspace", "--no-hashes"]
    command += ["--no-annotate", "--no-header", "--project", str(root)]
    try:
        process = subprocess.run(command, cwd=root, capture_output=True, text=True)
    except FileNotFoundError:
        raise UserError("uv: not found; it says which versions uv.lock has") from None
    if process.returncode:
        raise UserError(f"uv export in {root}: {(process.stderr.splitlines() or ['failed'])[-1]}")
    return process.stdout.encode()


def is_packed(name: str) -> bool:
    """Returns True for files that grade."""
    return (name.startswith(PACKED) and not name.endswith(".md")) or name in SUPPORT


def write(archive: zipfile.ZipFile, name: str, content: bytes, mode: int) -> None:
    """Adds a file with its rights; the date says nothing, so that bundles are the same."""
    info = zipfile.ZipInfo(name)
    info.external_attr = (0o100000 | mode) << 16
    info.compress_type = zipfile.ZIP_DEFLATED
    archive.writestr(info, content)


def main() -> None:
    """Grades, or says why not; a fault of the grader is raised afterwards."""
    folder, results = Path(sys.argv[1]), Path(sys.argv[2])
    try:
        assignment, part, variant = map(int, sys.argv[3:6])
        visibility = sys.argv[6]
        grader = Grader(project_root(), variant)
        grade = grader.grade(uploaded(folder), (assignment, part))
        write_results(results, results_of(grade, project_root(), visibility))
    except (UserError, RunFailed) as error:
        write_results(results, refusal(str(error)))
        print(error)
    except Exception as error:
        reason = f"not graded: {type(error).__name__} in the grader; tell the staff"
        write_results(results, refusal(reason))
        raise


def uploaded(folder: Path) -> Path:
    """Returns the tarball that a student uploaded, whatever it is called and wherever it lies.

    Raises:
        UserError: there is none, or are several.
    """
    files = files_of([folder]) if folder.is_dir() else []
    tarballs = [path for path in files if PACKED_NAME.search(path.name)] or files
    if len(tarballs) != 1:
        names = ", ".join(printable(path.name) for path in tarballs[:5]) or "no file"
        raise UserError(f"uploaded: {names}; expected one tarball, of `ddplab handin`")
    return tarballs[0]


def refusal(reason: str) -> dict:
    """Returns results without points that say why there are none."""
    return {"score": 0.0, "output": reason, "tests": []}


def write_results(path: Path, results: dict) -> None:
    """Writes Gradescope's file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(results, indent=1) + "\n")


def results_of(grade: Grade, root: Path, visibility: str) -> dict:
    """Returns Gradescope's results: the score of a fixed number of points, and who sees what.

    ``score`` is that of what a program judges, without texts. Where checks could not be judged on
    this machine it is scaled, so that they neither cost nor give points; a bonus comes on top.

    Args:
        grade: grade of the submission.
        root: the project.
        visibility: visibility of the checks; what was handed in is always visible.
    """
    tasks = read_tasks(root)
    texts = {name for name, question in all_questions(root).items() if question.kind == TEXT}
    bonus = {name for name, task in tasks.items() if task.bonus}
    by_hand = "graded by hand"
    marks = [replace(m, score=None, why=by_hand) if m.of in texts else m for m in grade.marks]
    fixed = [mark for mark in marks if mark.of not in texts | bonus]
    possible = sum(mark.points for mark in fixed)
    judged = sum(mark.points for mark in fixed if mark.score is not None)
    score = sum(mark.score or 0.0 for mark in fixed) * (possible / judged if judged else 0.0)
    score += sum(mark.score or 0.0 for mark in marks if mark.of in bonus)
    results = replace(grade, marks=marks).results()
    for test in results["tests"]:
        test["visibility"] = visibility
    if grade.isolation:  # its checks were run
        results["tests"].insert(0, summary(grade, tasks))
    results["score"] = round(score, 2)
    results["extra_data"]["maximum"] = possible
    if judged < possible:
        results["output"] += (
            f" {possible - judged:g} of {possible:g} points could not be judged on this machine: "
            f"the score is that of the others, scaled to {possible:g}."
        )
    return results


def summary(grade: Grade, tasks: Mapping[str, Task]) -> dict:
    """Returns a test without points that students see at once: what was handed in, and is it run.

    It says of a check neither whether it passes nor why it fails.
    """
    by_name: dict[str, set[str]] = {}
    for mark in grade.marks:
        by_name.setdefault(mark.of if mark.of in tasks else "answers", set()).add(mark.why)
    lines = [f"{name}: {stage(whys, tasks.get(name))}" for name, whys in by_name.items()]
    blank = [mark.of for mark in grade.marks if mark.why == NO_ANSWER]
    return {
        "number": "0",
        "name": "What was handed in",
        "score": 0.0,
        "max_score": 0.0,
        "status": "passed",
        "output": "\n".join([*lines, f"without an answer: {', '.join(blank) or 'none'}"]),
        "visibility": "visible",
    }


def stage(whys: Collection[str], task: Task | None) -> str:
    """Returns how far a task's file, or the answers, came, by the reasons of its marks."""
    [why, *more] = whys
    if task is None:
        return "read" if more or why in ("", NO_ANSWER) else why
    refusals = (
        f"task {task.name} is not written yet",
        f"{task.file} was not",
        f"{task.file}, line",
    )
    return "its checks were run" if more or not why.startswith(refusals) else why


def points_by_hand_in(root: Path) -> dict[tuple[int, int], tuple[int, int]]:
    """Returns (assignment, part) → the points of the autograder, and those of texts."""
    rows = {}
    tasks, questions = read_tasks(root), all_questions(root).values()
    for number in sorted({task.assignment for task in tasks.values()}):
        for of in parts_of(number, "any-name"):
            points = sum(task.points for task in of.tasks(tasks).values() if not task.bonus)
            its = [q for q in questions if of.has_answers and q.name.startswith(f"Q{number}.")]
            by_hand = sum(question.points for question in its if question.kind == TEXT)
            points += sum(question.points for question in its) - by_hand
            rows[number, of.part] = points, by_hand
    return rows


def all_questions(root: Path) -> dict[str, Question]:
    """Returns the questions of all assignments by their names."""
    numbers = {task.assignment for task in read_tasks(root).values()}
    paths = (number for number in sorted(numbers) if questions_path(root, number).is_file())
    return {name: q for number in paths for name, q in read_questions(root, number).items()}


if __name__ == "__main__":
    main()
