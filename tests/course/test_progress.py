"""A student's progress: which test is of which task, what is said, and a run of real tests."""

from __future__ import annotations

import time
from pathlib import Path

import psutil
import pytest

from common.course.outcomes import Outcome, run_tests
from common.course.progress import by_task, lines_of, progress, reason_of
from common.course.tasks import read_tasks
from common.errors import RunFailed, UserError
from common.runtime.paths import project_root

TASKS = read_tasks()


def test_tests_belong_to_the_tasks_that_they_name() -> None:
    outcomes = [
        Outcome("test_public_assignment2", "test_a2_1_a_bucket_closes", "passed"),
        Outcome(
            "test_public_assignment1", "test_on_two_ranks[A1.2 flat]", "failed", "E   Error: x"
        ),
        Outcome("test_public_assignment1", "test_on_two_ranks[A1.2 naive]", "passed"),
        Outcome("test_public_assignment1", "test_on_two_ranks[A1.3]", "failed", UNWRITTEN),
    ]
    found = by_task(TASKS, outcomes)
    assert [(one.task.name, one.passed, len(one.outcomes)) for one in found] == [
        ("A1.2", 1, 2),
        ("A1.3", 0, 1),
        ("A2.1", 1, 1),
    ]
    assert [one.points for one in found] == [TASKS["A1.2"].points / 2, 0, TASKS["A2.1"].points]
    assert [one.unwritten for one in found] == ["", "A1.3", ""]
    text = "\n".join(lines_of(found))
    assert "to be written" in text
    assert "common/exercises/naive_ddp.py\n  test_on_two_ranks[A1.2 flat]: Error: x" in text


UNWRITTEN = "common.errors.NotYetWritten: task A1.3 is not written yet"


def test_a_file_that_cannot_be_imported_is_told_in_one_line(tmp_path: Path) -> None:
    public = tmp_path / "tests" / "exercises" / "public"
    public.mkdir(parents=True)
    (tmp_path / "assignments").mkdir()
    text = (project_root() / "assignments" / "course.yaml").read_text()
    (tmp_path / "assignments" / "course.yaml").write_text(text)
    (public / "test_public_assignment2.py").write_text("from broken import nothing\n")
    (public / "test_public_assignment4.py").write_text("def test_a4_1_runs(): pass\n")
    for wanted in ("", "A2.1"):
        with pytest.raises(UserError, match=r"test_public_assignment2 cannot be loaded: .*broken"):
            progress(tmp_path, wanted)
    [found] = progress(tmp_path, "A4.1")
    assert found.passed == 1


def test_a_failure_is_told_in_a_line() -> None:
    assert reason_of("E   assert 1 == 2\nE   AssertionError: wrong\n") == "AssertionError: wrong"
    assert reason_of("assert 1 == 2\nmore") == "assert 1 == 2"
    assert len(reason_of("ValueError: " + 300 * "x")) == 100
    assert reason_of("") == "no reason"


def test_real_tests_are_run_and_read(tmp_path: Path) -> None:
    (tmp_path / "test_some.py").write_text(
        "import pytest\n\n"
        "def test_good():\n    pass\n\n"
        "def test_bad():\n    assert 1 == 2\n\n"
        "@pytest.mark.skip\ndef test_not():\n    pass\n"
    )
    found = run_tests(tmp_path, ["test_some.py"])
    assert [(one.name, one.outcome) for one in found] == [
        ("test_good", "passed"),
        ("test_bad", "failed"),
        ("test_not", "skipped"),
    ]
    assert "1 == 2" in found[1].message
    with pytest.raises(RunFailed, match="pytest in"):
        run_tests(tmp_path, ["--no-such-option"])


def test_pytest_is_ended_after_its_time_with_what_it_started(tmp_path: Path) -> None:
    (tmp_path / "test_some.py").write_text(
        "import subprocess, time\n\ndef test_endless():\n"
        "    started = subprocess.Popen(['sleep', '60'])\n"
        f"    open({str(tmp_path / 'pid')!r}, 'w').write(str(started.pid))\n"
        "    while True:\n        try:\n            time.sleep(60)\n"
        "        except BaseException:\n            pass\n"
    )
    began = time.monotonic()
    with pytest.raises(RunFailed, match="no end after 6 s"):
        run_tests(tmp_path, ["test_some.py"], timeout_s=6)
    assert time.monotonic() - began < 30
    started = int((tmp_path / "pid").read_text())
    assert not psutil.pid_exists(started) or psutil.Process(started).status() == "zombie"


def test_a_task_that_is_none_and_a_tree_without_tests_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"unknown task 'A2\.9'"):
        progress(project_root(), "A2.9")
    (tmp_path / "assignments").mkdir()
    text = (project_root() / "assignments" / "course.yaml").read_text()
    (tmp_path / "assignments" / "course.yaml").write_text(text)
    with pytest.raises(UserError, match="there is no tests/exercises/public"):
        progress(tmp_path)
