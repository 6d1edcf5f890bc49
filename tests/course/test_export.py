"""A small project with a course, exported: what is in the tree, and what is refused."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import pytest

from common.course.export import export
from common.errors import UserError

ONE = "def one():\n    # BEGIN SOLUTION A0.1\n    return 1\n    # END SOLUTION\n"
FILES = {
    "README.md": "A project, [tested](tests/hidden/test_one.py#one) [in\npublic](tests/public/).\n",
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
    "tests/hidden/test_one.py": "assert True\n",
    "tests/public/test_one.py": "assert 1\n",
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
    "assignments/course.yaml": """
left_out: [tests/*]
kept: [tests/public/*]
tasks:
  A0.1: {title: one, file: one.py, points: 1, hours: 1, checks: {a: 1}}
  A1.1: {title: two, file: two.py, points: 1, hours: 1, checks: {a: 1}}
  A1.2: {title: three, file: three.py, points: 1, hours: 1, checks: {a: 1}, needs: [A1.1]}
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
    assert sorted(found) == sorted(set(FILES) - {"tests/hidden/test_one.py"})
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


def test_the_same_commit_gives_the_same_bytes(project: Path, tmp_path: Path) -> None:
    for name in ("a", "b"):
        export(project, tmp_path / name, 0, ["A1.1"])
    assert files_of(tmp_path / "a") == files_of(tmp_path / "b")
    assert b"return 1" in files_of(tmp_path / "a")["common/exercises/two.py"]


def test_bad_input_gets_one_line_and_leaves_nothing(project: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"

    def refused(*arguments: object) -> str:
        with pytest.raises(UserError) as error:
            export(project, out, *arguments)
        assert not [path for path in tmp_path.iterdir() if "out" in path.name]
        return str(error.value)

    assert refused(7) == "there is no assignment 7; known: 0, 1"
    assert "unknown task 'A9.1'" in refused(0, ["A9.1"])
    assert refused(1, ["A1.2"]) == "task A1.2 needs A1.1, which would not be solved"
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
