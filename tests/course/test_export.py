"""Projects with a course, exported and split: what is in the trees, and what is refused."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from common.course.check import check
from common.course.export import export
from common.course.grading.checks import Exercises
from common.course.outcomes import own_variables
from common.course.overlay import with_overlay
from common.course.split import split
from common.course.submission import HandedIn, pack
from common.course.tasks import EXERCISES, read_tasks
from common.errors import UserError
from common.runtime.paths import project_root

ROOT = project_root()

ONE = "def one():\n    # BEGIN SOLUTION A0.1\n    return 1\n    # END SOLUTION\n"
FILES = {
    "README.md": (
        "A project, [tested](tests/exercises/hidden/test_one.py#one) [in\npublic](tests/public/).\n"
    ),
    "assignments/README.md": "See [one](../tests/public/test_one.py), [none](../none.py).\n",
    "common/exercises/one.py": ONE,
    "common/exercises/two.py": ONE.replace("one", "two").replace("A0.1", "A1.1"),
    "common/exercises/three.py": ONE.replace("one", "three").replace("A0.1", "A1.2"),
    "common/also.py": (
        "from __future__ import annotations\n\n\n"
        "def also():\n    # BEGIN SOLUTION A1.1\n    return 1\n    # ELSE\n"
        "    # from common.exercises.two import two\n    #\n    # return two()\n"
        "    # END SOLUTION\n"
    ),
    "tests/exercises/hidden/test_one.py": "assert True\n",
    "tests/public/test_one.py": "assert 1\n",
    "staff/tool.py": "# BEGIN SOLUTION A0.1\n# END SOLUTION\n",
    "run.sh": "echo\n",
    "notebook.ipynb": json.dumps(
        {
            "cells": [
                {"cell_type": "markdown", "metadata": {}, "source": ["ask"]},
                {"cell_type": "markdown", "metadata": {"tags": ["staff"]}, "source": ["tell"]},
            ]
        },
        indent=1,
    ),
    "assignments/AI-TOOLS.md": "Explain.\n",
    "assignments/assignment1/README.md": (
        "# One\n\n### A1.1 two (9 points, 9 h)\n\nWrite two.\n\n"
        "### A1.2 three (9 points, 9 h)\n\nWrite three.\n\n## Points\n\n"
        "| A1.1 two | 9 |\n| A1.2 three | 2 | 9 |\n| **sum** | | **9** |\n"
    ),
    "assignments/course.yaml": """without: []
left_out: [staff/*]
private: [tests/*, data/*]
kept: [tests/public/*]
tasks:
  A0.1: {title: one, file: one.py, points: 1, hours: 1, checks: {test_one.py::a: 1}}
  A1.1: {title: two, file: two.py, points: 1, hours: 1, checks: {test_one.py::a: 1}}
  A1.2:
    {title: three, file: three.py, points: 1, hours: 1, checks: {test_one.py::a: 1}, needs: [A1.1]}
""",
}


def git(folder: Path, *arguments: str) -> None:
    identity = ["-c", "user.name=a", "-c", "user.email=a@b"]
    subprocess.run(["git", "-C", str(folder), *identity, *arguments], check=True)


@pytest.fixture
def project(tmp_path: Path) -> Path:
    root = tmp_path / "project"
    for name, content in FILES.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(content)
    (root / "run.sh").chmod(0o755)
    git(root.parent, "init", "-q", "project")
    git(root, "add", ".")
    git(root, "commit", "-q", "-m", "all")
    return root


def files_of(folder: Path) -> dict[str, bytes]:
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file()
    }


def test_a_tree_has_earlier_solutions_and_no_later_ones(project: Path, tmp_path: Path) -> None:
    (project / "not-tracked").write_text("secret")
    assert export(project, tmp_path / "out", 1) == ["A0.1"]
    found = files_of(tmp_path / "out")
    added = {"AGENTS.md", "CLAUDE.md"}
    assert (
        set(found) == set(FILES) - {"tests/exercises/hidden/test_one.py", "staff/tool.py"} | added
    )
    assert {found[name] for name in added} == {found["assignments/AI-TOOLS.md"]}
    assert found["common/exercises/one.py"] == b"def one():\n    return 1\n"
    assert b'raise NotYetWritten("A1.1")' in found["common/exercises/two.py"]
    assert found["common/also.py"].endswith(
        b"def also():\n    from common.exercises.two import two\n\n    return two()\n"
    )
    assert os.access(tmp_path / "out" / "run.sh", os.X_OK)
    assert b"ask" in found["notebook.ipynb"]
    assert b"tell" not in found["notebook.ipynb"]


def test_links_to_what_students_do_not_get_are_plain_text(project: Path, tmp_path: Path) -> None:
    export(project, tmp_path / "out", 1)
    found = files_of(tmp_path / "out")
    assert found["README.md"] == b"A project, tested [in\npublic](tests/public/).\n"
    assert found["assignments/README.md"] == FILES["assignments/README.md"].encode()


HANDOUT = "assignments/assignment1/README.md"


def test_a_handout_has_the_points_of_the_list(project: Path, tmp_path: Path) -> None:
    export(project, tmp_path / "out", 1)
    page = (tmp_path / "out" / HANDOUT).read_text()
    assert page == (
        "# One\n\n### A1.1 two (1 points, 1 h)\n\nWrite two.\n\n"
        "### A1.2 three (1 points, 1 h)\n\nWrite three.\n\n## Points\n\n"
        "| A1.1 two | 1 |\n| A1.2 three | 2 | 1 |\n| **sum** | | **2** |\n"
    )


def test_a_task_that_is_left_out_is_solved_and_in_no_handout(project: Path, tmp_path: Path) -> None:
    assert export(project, tmp_path / "out", 1, without=["A1.1"]) == ["A0.1", "A1.1"]
    found = files_of(tmp_path / "out")
    assert found["common/exercises/two.py"] == b"def two():\n    return 1\n"
    assert b'raise NotYetWritten("A1.2")' in found["common/exercises/three.py"]
    page = found[HANDOUT].decode()
    assert "A1.1" not in page
    assert "Write two." not in page
    assert "| **sum** | | **1** |" in page
    # The tree knows it, too: its commands leave the task out.
    assert HandedIn("a-b", 1).tasks(read_tasks(tmp_path / "out")).keys() == {"A1.2"}


def test_the_same_commit_gives_the_same_bytes(project: Path, tmp_path: Path) -> None:
    for name in ("a", "b"):
        export(project, tmp_path / name, 0, ["A1.1"])
    assert files_of(tmp_path / "a") == files_of(tmp_path / "b")
    assert b"return 1" in files_of(tmp_path / "a")["common/exercises/two.py"]


def test_bad_input_gets_one_line_and_leaves_nothing(project: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"

    def refused(*arguments: object, **keywords: object) -> str:
        with pytest.raises(UserError) as error:
            export(project, out, *arguments, **keywords)
        assert not [path for path in tmp_path.iterdir() if "out" in path.name]
        return str(error.value)

    assert refused(7) == "there is no assignment 7; known: 0, 1"
    assert "unknown task 'A9.1'" in refused(0, ["A9.1"])
    assert refused(1, ["A1.2"]) == "task A1.2 needs A1.1, which would not be solved"
    assert "--without: unknown task 'A9.1'" in refused(0, without=["A9.1"])
    (project / "README.md").write_text("other")
    assert refused(0) == "not committed: README.md"
    git(project, "commit", "-q", "-a", "-m", "more")
    (project / "common" / "also.py").write_text("# BEGIN SOLUTION A1.1\n")
    git(project, "commit", "-q", "-a", "-m", "broken")
    assert refused(0) == "common/also.py:1: the solution of A1.1 does not end"
    out.mkdir()
    with pytest.raises(UserError, match="is there already"):
        export(project, out, 0)


def test_a_folder_without_history_is_refused(tmp_path: Path, project: Path) -> None:
    copy = tmp_path / "copy"
    (copy / "assignments").mkdir(parents=True)
    (copy / "assignments" / "course.yaml").write_text(FILES["assignments/course.yaml"])
    with pytest.raises(UserError, match="git status"):
        export(copy, tmp_path / "out", 0)


@pytest.fixture
def halves(project: Path, tmp_path: Path) -> tuple[Path, Path]:
    """Splits the small project; returns the public half, committed, and the overlay."""
    public, overlay = tmp_path / "public", tmp_path / "overlay"
    split(project, public, overlay)
    commit(public)
    return public, overlay


def commit(folder: Path) -> None:
    git(folder.parent, "init", "-q", folder.name)
    git(folder, "add", ".")
    git(folder, "commit", "-q", "-m", "all")


def test_a_public_half_shows_no_solution_and_the_overlay_has_them(
    project: Path, halves: tuple[Path, Path]
) -> None:
    public, overlay = (files_of(half) for half in halves)
    public = {name: content for name, content in public.items() if not name.startswith(".git/")}
    hidden = {"tests/exercises/hidden/test_one.py", "notebook.ipynb", "common/also.py"}
    hidden |= {f"common/exercises/{name}.py" for name in ("one", "two", "three")}
    assert set(overlay) == hidden
    assert {overlay[name] for name in hidden} == {FILES[name].encode() for name in hidden}
    assert set(public) == set(FILES) - {"tests/exercises/hidden/test_one.py"}
    assert b"return 1" not in b"".join(public.values())
    assert public["README.md"].startswith(b"A project, tested ")
    assert public["staff/tool.py"] == FILES["staff/tool.py"].encode()


@pytest.mark.parametrize("assignment", [0, 1])
def test_an_export_with_the_overlay_is_that_of_the_whole_project(
    project: Path, halves: tuple[Path, Path], tmp_path: Path, assignment: int
) -> None:
    public, overlay = halves
    (overlay / "README.md").write_text("Of the overlay itself.")
    for folder in (project, public):
        (folder / ".gitignore").write_text("outputs\n")
        git(folder, "add", ".gitignore")
        git(folder, "commit", "-q", "-m", "more")
    export(project, tmp_path / "one", assignment, ["A1.1"])
    export(public, tmp_path / "two", assignment, ["A1.1"], overlay=overlay)
    assert files_of(tmp_path / "one") == files_of(tmp_path / "two")


def test_halves_that_cannot_be(project: Path, halves: tuple[Path, Path], tmp_path: Path) -> None:
    public, overlay = halves
    with pytest.raises(UserError, match="overlay is there already"):
        split(project, tmp_path / "new", overlay)
    with pytest.raises(UserError, match="none inside of the other"):
        split(project, tmp_path / "new", tmp_path / "new" / "private")
    assert not (tmp_path / "new").exists()
    with pytest.raises(UserError, match=r"solution of A0\.1 is not in this project; an --over"):
        export(public, tmp_path / "out", 1)
    (overlay / "common" / "exercises" / "too.py").write_text(ONE)
    with pytest.raises(UserError, match=r"common/exercises/too\.py takes no place"):
        export(public, tmp_path / "out", 1, overlay=overlay)
    (overlay / "common" / "exercises" / "too.py").rename(overlay / "common/exercises/one.py")
    (overlay / "common" / "exercises" / "two.py").unlink()
    message = r"common/exercises/two\.py: the solution of A1\.1 is not in --overlay"
    with pytest.raises(UserError, match=message), with_overlay(public, overlay):
        pass
    (overlay / "common" / "exercises" / "two.py").write_text(FILES["common/exercises/two.py"])
    (overlay / "tests" / "exercises" / "hidden" / "test_one.py").unlink()
    with pytest.raises(UserError, match="hidden tests are not in --over"), with_overlay(*halves):
        pass
    with pytest.raises(UserError, match="expected a folder with"):
        export(public, tmp_path / "out", 1, overlay=tmp_path / "no")
    assert not (tmp_path / "out").exists()


def test_what_needs_a_task_that_is_left_out_gets_its_solution() -> None:
    with with_overlay(ROOT, None, ["A2.1", "A2.3"]) as merged:
        tasks = HandedIn("a-b", 2).tasks(read_tasks(merged))
        text_of = Exercises(merged, tasks, {}, 0, "none").text()
        texts = {task.name: text_of(ROOT / task.path) for task in read_tasks().values()}
    assert list(tasks) == ["A2.2", "A2.4"]
    written = [name for name, text in texts.items() if "raise NotYetWritten" not in text]
    earlier = [name for name in texts if name < "A2"]
    assert written == [*earlier, "A2.1", "A2.3"]


@pytest.fixture(scope="module")
def repository(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Makes a repository of this project's files as they are now."""
    root = tmp_path_factory.mktemp("repository") / "project"
    listed = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    done = subprocess.run(listed, cwd=ROOT, capture_output=True, text=True)
    if done.returncode:
        pytest.skip("git does not say here which files are the project's")
    for name in filter(None, done.stdout.split("\0")):
        if (ROOT / name).is_file():
            (root / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, root / name)
    commit(root)
    return root


def ddplab(folder: Path, *arguments: object) -> str:
    """Runs the program of a project, which keeps its bytecode; returns what it prints."""
    command = [sys.executable, "-m", "common.cli.main", *map(str, arguments)]
    variables = own_variables() | {"PYTHONPATH": str(folder)}
    done = subprocess.run(command, cwd=folder, env=variables, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


def hand_in(folder: Path, root: Path, changed: dict[str, str]) -> Path:
    """Packs the references of assignment 3, some of them changed, without answers."""
    of = HandedIn("doe-jane", 3)
    texts = {
        task.file: (root / task.path).read_text() for task in of.tasks(read_tasks(root)).values()
    }
    path = folder / f"{of.stem}.tar.gz"
    pack(path, of, {f"exercises/{name}": text.encode() for name, text in (texts | changed).items()})
    return path


def graded(folder: Path, submission: Path, *flags: object) -> dict:
    """Grades with the program of a project; returns the results without the time."""
    path = submission.parent / "results.json"
    output = submission.parent / "grades"
    ddplab(folder, "course", "grade", submission, "--json", path, "--output-dir", output, *flags)
    shutil.rmtree(output)
    results = json.loads(path.read_text())
    return {name: value for name, value in results.items() if name != "execution_time"}


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_this_project_split_is_a_public_one_that_does_all(repository: Path, tmp_path: Path) -> None:
    public, overlay = tmp_path / "public", tmp_path / "overlay"
    print(ddplab(repository, "course", "split", public, overlay))
    commit(public)
    assert check(repository, public).problems == ()
    assert not [*public.rglob("key.yaml"), *public.glob("tests/exercises/hidden/*")]
    assert "to be written" in ddplab(public, "course", "test", "A3.2")
    for name, root, flags in (("one", repository, []), ("two", public, ["--overlay", overlay])):
        ddplab(root, "course", "autograder", tmp_path / f"{name}.zip", "--assignment", 3, *flags)
    assert (tmp_path / "one.zip").read_bytes() == (tmp_path / "two.zip").read_bytes()
    submission = hand_in(tmp_path, repository, {})
    without = ("--without", "A3.1", "A3.3")  # they take long; an open task is graded below
    results = graded(public, submission, "--overlay", overlay, *without)
    assert results["score"] == read_tasks(repository)["A3.2"].points
    assert "A3.3" not in json.dumps(results)


EXERCISE = '''"""A3.4: the mean length."""

from __future__ import annotations


def mean_length(lengths: list[int]) -> float:
    """Returns the mean."""
    # BEGIN SOLUTION A3.4
    total = sum(lengths)
    return total / len(lengths)
    # END SOLUTION
'''
ADDED = {
    "common/exercises/mean_length.py": EXERCISE,
    "tests/exercises/hidden/test_mean_length.py": (
        "def test_the_mean_is_that_of_numpy(student) -> None:\n"
        "    assert student.exercise('mean_length').mean_length([1, 2, 6]) == 3\n"
    ),
    "tests/exercises/public/test_public_mean_length.py": (
        "from common.exercises.mean_length import mean_length\n\n\n"
        "def test_a3_4_two_lengths() -> None:\n    assert mean_length([1, 3]) == 2\n"
    ),
    "assignments/course.yaml": (
        "  A3.4:\n    title: The mean length\n    file: mean_length.py\n    points: 7\n"
        "    hours: 1\n    checks: {test_mean_length.py::test_the_mean_is_that_of_numpy: 7}\n"
    ),
}
"""What a task needs to be exported, tested and graded."""


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_task_is_added_in_four_files(repository: Path, tmp_path: Path) -> None:
    root = tmp_path / "project"
    shutil.copytree(repository, root, ignore=shutil.ignore_patterns(".git"))
    for name, text in ADDED.items():
        with (root / name).open("a") as file:
            file.write(text)
    commit(root)
    ddplab(root, "course", "export", tmp_path / "tree", "--assignment", 3)
    begun = (tmp_path / "tree" / EXERCISES / "mean_length.py").read_text()
    assert 'raise NotYetWritten("A3.4")' in begun
    assert "up to 7  to be written" in ddplab(tmp_path / "tree", "course", "test", "A3.4")
    (tmp_path / "tree" / EXERCISES / "mean_length.py").write_text(EXERCISE)
    assert "passed 1 public check" in ddplab(tmp_path / "tree", "course", "test", "A3.4")
    submission = hand_in(tmp_path, root, {"mean_length.py": EXERCISE})
    results = graded(root, submission, "--without", "A3.1", "A3.2", "A3.3")
    assert [test["score"] for test in results["tests"] if test["tags"] == ["A3.4"]] == [7]
    assert results["score"] == 7
