"""Commands that end with their parent: started without a copy of it, and not after its end."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from common.runtime.processes.orphans import ending_with_parent

linux = pytest.mark.skipif(sys.platform != "linux", reason="only Linux ends a child so")


def test_the_command_is_the_process_that_was_started() -> None:
    # A signal sent to it, or its exit status, must be the command's own.
    code = "import os, sys; print(os.getpid(), sys.argv[1:], flush=True); sys.exit(7)"
    command = ending_with_parent([sys.executable, "-c", code, "--flag", "two words"])
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        said = process.stdout.read().strip()
    assert said == f"{process.pid} ['--flag', 'two words']"
    assert process.returncode == 7


@linux
def test_it_does_not_start_when_its_parent_has_gone_already(tmp_path: Path) -> None:
    started = tmp_path / "started"
    # The command is made for a parent that is not the one that starts it.
    code = (
        "import os; from common.runtime.processes.orphans import ending_with_parent as ending\n"
        f"print('\\n'.join(ending(['touch', {str(started)!r}])))"
    )
    root = Path(__file__).resolve().parents[2]
    told = subprocess.run(
        [sys.executable, "-c", code], cwd=root, capture_output=True, text=True, check=True
    )
    assert subprocess.run(told.stdout.splitlines(), check=False).returncode == 1
    assert not started.exists()
    subprocess.run(ending_with_parent(["touch", str(started)]), check=True)
    assert started.exists()


@linux
def test_it_ends_when_its_parent_is_killed() -> None:
    code = (
        "import subprocess, sys; from common.runtime.processes.orphans import ending_with_parent\n"
        "child = subprocess.Popen(ending_with_parent(['sleep', '60']))\n"
        "print(child.pid, flush=True); child.wait()"
    )
    root = Path(__file__).resolve().parents[2]
    with subprocess.Popen(
        [sys.executable, "-c", code], cwd=root, stdout=subprocess.PIPE, text=True
    ) as parent:
        child = psutil.Process(int(parent.stdout.readline()))
        while child.name() != "sleep":
            child.wait(0.01) if not child.is_running() else os.sched_yield()
        parent.kill()
    _, alive = psutil.wait_procs([child], timeout=10)
    assert not alive


def test_a_command_that_does_not_exist_is_one_line() -> None:
    done = subprocess.run(
        ending_with_parent(["no-such-command"]), capture_output=True, text=True, check=False
    )
    assert done.returncode == 1
    assert done.stderr == "no-such-command: No such file or directory\n"


def test_a_child_is_started_without_running_python_in_a_fork(tmp_path: Path) -> None:
    # Python calls these hooks for ``preexec_fn`` only: its threads, CUDA's among them, are not in
    # the copy, and locks that they hold would be held there for ever.
    code = (
        "import os, sys; from pathlib import Path\n"
        "from common.runtime.processes.child import run_child\n"
        "os.register_at_fork(before=lambda: print('forked'))\n"
        "ended = run_child('timeit', ['-n', '1', '-r', '1'], Path(sys.argv[1]))\n"
        "print('status', ended.status)"
    )
    root = Path(__file__).resolve().parents[2]
    done = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path / "log")],
        cwd=root,
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout == "status 0\n"
