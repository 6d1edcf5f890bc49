"""Solutions that were pasted somewhere, with other names and another indentation."""

from __future__ import annotations

import json
import textwrap
from pathlib import Path

import pytest

from common.course.check import Solutions, find_leaks

SOLUTION = """
    end = ready = 0.0
    ends = []
    for moment, duration in zip(ready_s, alone_s, strict=True):
        ready = max(ready, moment)  # the latest so far
        end = max(end, ready) + duration
        ends.append(end)
    return ends
"""
COPY = """
finished = available = 0.0
result = []
for when, long in zip(moments, durations, strict=True):
    # each waits for those before it
    available = max(available, when)
    finished = max(finished, available) + long
    result.append(finished)
return result
"""

CELL = {"cell_type": "markdown", "source": COPY.splitlines(keepends=True), "metadata": {}}
PASTED = {
    "docstring.py": f'"""Does something.\n{textwrap.indent(COPY, " " * 8)}"""\n',
    "comment.py": "x = 1\n" + textwrap.indent(COPY, "# ", lambda line: True),
    "notebook.ipynb": json.dumps({"cells": [CELL]}, indent=1),
    "test.py": f"def expected(moments, durations):{textwrap.indent(COPY, ' ' * 12)}",
    "data.csv": "name,text\na," + json.dumps(COPY) + "\n",
}
"""File → its text, with a copy of the solution in it."""


@pytest.mark.parametrize("name", PASTED)
def test_a_pasted_solution_is_found(tmp_path: Path, name: str) -> None:
    (tmp_path / "there").mkdir()
    (tmp_path / "there" / name).write_text(PASTED[name])
    (tmp_path / "other.py").write_text("def f(x):\n    return max(x)\n")
    leaks = find_leaks(tmp_path, Solutions([("A2.2", SOLUTION)]))
    assert [(leak.path, leak.what) for leak in leaks] == [(f"there/{name}", "a piece of A2.2")]


def test_a_piece_in_the_middle_is_found_with_its_line(tmp_path: Path) -> None:
    middle = "\n".join(COPY.splitlines()[2:7])
    (tmp_path / "a.txt").write_text(f"one\ntwo\n{middle}\n")
    [leak] = find_leaks(tmp_path, Solutions([("A2.2", SOLUTION)]))
    assert str(leak) in ("a.txt:3: a piece of A2.2", "a.txt:4: a piece of A2.2")


def test_other_code_of_the_same_shape_is_no_leak(tmp_path: Path) -> None:
    # Other variables are equal to each other than in the solution.
    (tmp_path / "a.py").write_text(COPY.replace("max(available, when)", "max(when, available)"))
    leaks = find_leaks(tmp_path, Solutions([("A2.2", "\n".join(SOLUTION.splitlines()[3:6]))]))
    assert leaks == []


def test_short_solutions_count_as_a_whole_and_tiny_ones_not(tmp_path: Path) -> None:
    (tmp_path / "a.py").write_text("y = cat([each.flatten() for each in those]).sum()\n")
    short = '"""Says it."""\nreturn cat([part.flatten() for part in parts]).sum()  # said'
    solutions = Solutions([("A1.1", short), ("A1.2", "return a / b")])
    # ``return`` and ``y =`` differ, so it is not the whole.
    assert find_leaks(tmp_path, solutions) == []
    (tmp_path / "b.py").write_text("return cat([x.flatten() for x in xs]).sum()\nreturn a / b\n")
    [leak] = find_leaks(tmp_path, solutions)
    assert str(leak) == "b.py:1: a piece of A1.1"


def test_markers_and_compiled_code_are_found(tmp_path: Path) -> None:
    (tmp_path / "a.md").write_text("one\n<!-- BEGIN SOLUTION A1.1 -->\n")
    (tmp_path / "b.pyc").write_bytes(b"\x00")
    found = [str(leak) for leak in find_leaks(tmp_path, Solutions([]))]
    assert found == ["a.md:2: a marker", "b.pyc:1: compiled code"]
