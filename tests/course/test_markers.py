"""Solutions taken out: what stays, what stands in their place, and markers that are refused."""

from __future__ import annotations

import ast
import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest

from common.course.markers import blocks_of, solution_pieces, student_source
from common.course.tasks import EXERCISES, read_tasks
from common.errors import NotYetWritten, UserError
from common.runtime.paths import project_root

FILES = sorted(path.name for path in (project_root() / EXERCISES).glob("*.py"))
MODULE = '''"""Says what to write."""

from math import prod

LIMIT = 3


# BEGIN SOLUTION A9.1
def helper(x):
    return prod([x, 2])


# END SOLUTION
class Machine:
    """Has methods."""

    def __init__(self):
        self.count = 0
        # BEGIN SOLUTION A9.2
        self.count = helper(1)
        # END SOLUTION
        self.done = True

    # BEGIN SOLUTION A9.2
    def own(self):
        return self.count

    # END SOLUTION
    def run(self):
        """Runs."""
        # BEGIN SOLUTION A9.1
        return helper(LIMIT)
        # ELSE
        # if LIMIT:
        #     return 0
        # END SOLUTION
'''
STUDENTS = '''"""Says what to write."""

from math import prod

from common.errors import NotYetWritten

LIMIT = 3


class Machine:
    """Has methods."""

    def __init__(self):
        self.count = 0
        raise NotYetWritten("A9.2")
        self.done = True

    def run(self):
        """Runs."""
        if LIMIT:
            return 0
'''


def test_a_student_gets_what_is_around_the_solutions() -> None:
    assert student_source(MODULE, "machine.py", solved=()) == STUDENTS


def test_a_task_that_is_solved_stays_without_markers() -> None:
    found = student_source(MODULE, "machine.py", solved=("A9.1",))
    assert "return prod([x, 2])" in found
    assert "return helper(LIMIT)" in found
    assert 'raise NotYetWritten("A9.2")' in found
    assert "SOLUTION" not in found
    assert "ELSE" not in found
    whole = student_source(MODULE, "machine.py", solved=("A9.1", "A9.2"))
    assert ast.dump(ast.parse(whole)) == ast.dump(ast.parse(MODULE))


def test_solutions_are_found_by_task() -> None:
    assert solution_pieces(MODULE, "machine.py") == [
        ("A9.1", "def helper(x):\n    return prod([x, 2])\n\n"),
        ("A9.2", "        self.count = helper(1)"),
        ("A9.2", "    def own(self):\n        return self.count\n"),
        ("A9.1", "        return helper(LIMIT)"),
    ]


@pytest.mark.parametrize(
    ("source", "words"),
    [
        ("# BEGIN SOLUTION A1.1\n# BEGIN SOLUTION A1.2\n", "m.py:2: a solution begins inside"),
        ("x = 1\n# END SOLUTION\n", "m.py:2: a solution ends that has not begun"),
        ("x = 1\n# BEGIN SOLUTION A1.1\n", "m.py:2: the solution of A1.1 does not end"),
        ("# BEGIN SOLUTION\n# END SOLUTION\n", "m.py:1: no marker of a solution"),
        ("# begin solution A1.1\n", "m.py:1: no marker of a solution"),
        ("# BEGIN SOLUTION A1.1\n# END SOLUTION A1.1\n", "m.py:2: no marker of a solution"),
        ("def f(:\n", "m.py:1: invalid syntax"),
    ],
)
def test_markers_that_do_not_pair_are_refused(source: str, words: str) -> None:
    with pytest.raises(UserError) as error:
        blocks_of(source, "m.py")
    assert str(error.value).startswith(words)


def test_an_alternative_must_be_comments() -> None:
    source = "# BEGIN SOLUTION A1.1\nx = 1\n# ELSE\nx = 2\n# END SOLUTION\n"
    with pytest.raises(UserError, match="a line that is no comment: x = 2"):
        student_source(source, "m.py", ())


def load(name: str, source: str, folder: Path) -> ModuleType:
    path = folder / name
    path.write_text(source)
    spec = importlib.util.spec_from_file_location(f"students_{path.stem}", path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    try:
        spec.loader.exec_module(module)
    finally:
        del sys.modules[spec.name]
    return module


@pytest.mark.parametrize("name", FILES)
def test_every_exercise_can_be_imported_without_its_solution(name: str, tmp_path: Path) -> None:
    source = (project_root() / EXERCISES / name).read_text()
    stripped = student_source(source, name, solved=())
    assert "SOLUTION" not in stripped
    load(name, stripped, tmp_path)
    whole = student_source(source, name, solved=tuple(read_tasks()))
    assert ast.dump(ast.parse(whole)) == ast.dump(ast.parse(source))


def test_an_unwritten_task_says_so(tmp_path: Path) -> None:
    source = (project_root() / EXERCISES / "loss_scale.py").read_text()
    module = load("loss_scale.py", student_source(source, "loss_scale.py", ()), tmp_path)
    with pytest.raises(NotYetWritten, match=r"task A3\.2 is not written yet"):
        module.loss_scale("samples", 2, 1, 4)
