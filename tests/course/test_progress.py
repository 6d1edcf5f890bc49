"""A student's progress: which test is of which task, what is said, and a run of real tests."""

from __future__ import annotations

import shutil
import time
from pathlib import Path

import psutil
import pytest

from common.course import progress as progress_module
from common.course.markers import student_source
from common.course.outcomes import Outcome, run_tests
from common.course.progress import PUBLIC, WORDS, by_task, lines_of, progress, reason_of
from common.course.tasks import COURSE, EXERCISES, read_tasks
from common.errors import RunFailed, UserError
from common.runtime.paths import project_root

TASKS = read_tasks()


def test_tests_belong_to_the_tasks_that_they_name() -> None:
    outcomes = [
        Outcome("test_public_assignment2", "test_a2_1_a_bucket_closes", "passed"),
        Outcome("test_public_ranks", "test_on_ranks[A1.2 flat]", "failed", "E   Error: x"),
        Outcome("test_public_ranks", "test_on_ranks[A1.2 naive]", "passed"),
        Outcome("test_public_ranks", "test_on_ranks[A1.3]", "failed", UNWRITTEN),
    ]
    rows = by_task(TASKS, outcomes)
    assert [(row.task.name, row.passed, len(row.outcomes)) for row in rows] == [
        ("A1.2", 1, 2),
        ("A1.3", 0, 1),
        ("A2.1", 1, 1),
    ]
    assert [row.unwritten for row in rows] == ["", "A1.3", ""]
    text = "\n".join(lines_of(rows))
    assert "to be written" in text
    assert "common/exercises/naive_ddp.py\n  test_on_ranks[A1.2 flat]: Error: x" in text


def test_public_tests_that_pass_earn_no_points() -> None:
    task = TASKS["A1.2"]
    [row] = by_task(TASKS, [Outcome("test_public_ranks", "test_on_ranks[A1.2 naive]", "passed")])
    *table, _, last = lines_of([row])
    assert table[1].split()[-6:] == ["1", "of", "1", "up", "to", str(task.points)]
    checks = 1 + len(task.checks)
    assert last.startswith(f"passed 1 public check; 1 of {checks} checks are here, the others are")
    assert f"{task.points} of {task.points}" not in "\n".join([*table, last])


def copy_course(folder: Path) -> None:
    (folder / COURSE).parent.mkdir()
    shutil.copy(project_root() / COURSE, folder / COURSE)


@pytest.fixture(scope="module")
def tree(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Makes what of a student's tree progress looks at, with every task open."""
    folder = tmp_path_factory.mktemp("tree")
    copy_course(folder)
    shutil.copytree(project_root() / PUBLIC, folder / PUBLIC)
    (folder / EXERCISES).mkdir(parents=True)
    for path in (project_root() / EXERCISES).glob("*.py"):
        text = student_source(path.read_text(), path.name, [])
        (folder / EXERCISES / path.name).write_text(text)
    return folder


def test_what_is_to_be_written_is_known_without_a_test(
    tree: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(progress_module, "run_tests", lambda *_: pytest.fail("pytest is started"))
    rows = progress(tree)
    assert [row.task.name for row in rows] == list(TASKS)
    assert [row.unwritten for row in rows] == list(TASKS)
    assert not any(row.passed or row.first_failure for row in rows)
    [row] = progress(tree, "A1.3")
    assert "A1.3" in row.unwritten
    assert lines_of([row])[-3] == "Next: A1.3, in common/exercises/overlapped_ddp.py"


def test_what_is_written_is_tested_and_the_rest_is_not(
    tree: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    half = shutil.copytree(tree, tmp_path / "half")
    path = half / EXERCISES / "naive_ddp.py"
    text = path.read_text()
    first = text.index("        raise NotYetWritten")
    path.write_text(text[:first] + "        pass\n" + text[text.index("\n", first) + 1 :])
    started = []
    monkeypatch.setattr(
        progress_module, "run_tests", lambda _, words, __: started.append(words) or []
    )
    progress(half, "A1.2")
    [words] = started
    assert f"{PUBLIC}/test_public_ranks.py" in words
    deselected = [word.partition("[")[2] for word in words if word.startswith("--deselect")]
    assert deselected
    assert "A1.2 flat trains]" in deselected
    assert "A1.2 naive trains]" not in deselected


UNWRITTEN = "common.errors.NotYetWritten: task A1.3 is not written yet"


def test_a_file_that_cannot_be_imported_is_told_in_one_line(tmp_path: Path) -> None:
    public = tmp_path / "tests" / "exercises" / "public"
    public.mkdir(parents=True)
    copy_course(tmp_path)
    (public / "test_public_assignment2.py").write_text("from broken import nothing\n")
    (public / "test_public_assignment4.py").write_text("def test_a4_1_runs(): pass\n")
    with pytest.raises(UserError, match=r"test_public_assignment2 cannot be loaded: .*broken"):
        progress(tmp_path)
    [found] = progress(tmp_path, "A4.1")
    assert found.passed == 1


def test_a_failure_is_told_in_a_line() -> None:
    assert reason_of("E   assert 1 == 2\nE   AssertionError: wrong\n") == "AssertionError: wrong"
    assert reason_of("assert 1 == 2\nmore") == "assert 1 == 2"
    assert len(reason_of("ValueError: " + 300 * "x")) == WORDS
    heard = "E   common.course.sandbox.wire.Raised: ValueError: shapes differ"
    assert reason_of(heard) == "ValueError: shapes differ"
    several = "E   ExceptionGroup: 2 distinct failures\nE   | ValueError: of a kind\nE   | more"
    assert reason_of(several) == "ValueError: of a kind"
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
    while sleeps(started):  # until it has died of its signal
        assert time.monotonic() - began < 60
        time.sleep(0.1)


def sleeps(pid: int) -> bool:
    """Returns True while the process is the sleep that a test started; a number may be reused."""
    try:
        return psutil.Process(pid).cmdline() == ["sleep", "60"]
    except psutil.NoSuchProcess:
        return False


def test_a_task_that_is_none_and_a_tree_without_tests_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"unknown task 'A2\.9'"):
        progress(project_root(), "A2.9")
    copy_course(tmp_path)
    with pytest.raises(UserError, match="there is no tests/exercises/public"):
        progress(tmp_path)
