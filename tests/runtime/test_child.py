"""A measurement's child process: what it inherits, what is said of its end, that it never stays.

The children are ``python -m timeit``, which runs a line of Python without importing torch, and
forks that call the same.
"""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest
from interruptible import start_interruptible

from common.errors import UserError
from common.runtime.processes.child import ChildExit, run_child, run_forked

ONCE = ("-n", "1", "-r", "1")
Start = Callable[..., ChildExit]


@pytest.fixture(params=[run_child, run_forked])
def start(request: pytest.FixtureRequest) -> Start:
    """Returns each function that starts a child."""
    return request.param


def run(start: Start, code: str, tmp_path: Path) -> tuple[str, list[str]]:
    """Returns the reason for which a child failed, and what it printed."""
    lines: list[str] = []
    ended = start("timeit", [*ONCE, code], tmp_path / "log", lines.append)
    return ended.reason, lines


def test_a_child_is_no_rank(start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "TORCHELASTIC_RUN_ID", "DDPLAB_ERROR_FILE"):
        monkeypatch.setenv(name, "7")
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    reason, lines = run(start, "import os; print('7' in os.environ.values(), os.environ)", tmp_path)
    assert reason == ""
    assert lines[0].startswith("False")
    assert "'OMP_NUM_THREADS': '3'" in lines[0]


def test_the_reason_of_an_exception_is_its_last_line(start: Start, tmp_path: Path) -> None:
    reason, _ = run(start, "raise ValueError('too\\nlong')", tmp_path)
    assert reason == "ValueError: too"
    assert "Traceback" in (tmp_path / "log").read_text()


def test_a_signal_is_named(start: Start, tmp_path: Path) -> None:
    reason, _ = run(start, "import os; os.kill(os.getpid(), 9)", tmp_path)
    assert reason == "killed by SIGKILL: the kernel ran out of memory?"
    reason, _ = run(start, "import os; os.abort()", tmp_path)
    assert reason == "killed by SIGABRT"


def test_a_log_that_cannot_be_written_is_a_mistake(start: Start, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"log .*missing.*: No such file"):
        start("timeit", ONCE, tmp_path / "missing" / "log")


PARENT = """
import sys
from pathlib import Path
from common.runtime.processes.child import {start}
from common.runtime.script import exit_status, leave_when_terminated
leave_when_terminated()
with exit_status():
    code = "import time; print('asleep', flush=True); time.sleep(60)"
    once = ["-n", "1", "-r", "1", code]
    {start}("timeit", once, Path(sys.argv[1]), lambda line: print(line, flush=True))
"""


@pytest.mark.parametrize(
    ("sent", "status"),
    [
        (signal.SIGINT, 130),
        pytest.param(signal.SIGTERM, 1, marks=pytest.mark.slow),
        pytest.param(
            signal.SIGKILL,
            -signal.SIGKILL,
            marks=pytest.mark.skipif(sys.platform != "linux", reason="only Linux ends it then"),
        ),
    ],
)
def test_no_child_outlives_its_parent(sent: int, status: int, start: Start, tmp_path: Path) -> None:
    code = PARENT.replace("{start}", start.__name__)
    command = [sys.executable, "-c", code, str(tmp_path / "log")]
    with start_interruptible(
        command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    ) as parent:
        assert parent.stdout.readline().strip() == "asleep"
        children = psutil.Process(parent.pid).children(recursive=True)
        assert children
        parent.send_signal(sent)
        assert parent.wait(timeout=20) == status
    _, alive = psutil.wait_procs(children, timeout=10)
    assert not alive


def test_what_a_child_prints_comes_as_it_is_printed(start: Start, tmp_path: Path) -> None:
    # It waits for an answer to its first line, and would wait for ever if that came at the end.
    answer = tmp_path / "answer"
    code = (
        f"import os, time; print('asks')\nwhile not os.path.exists({str(answer)!r}): time.sleep(0)"
    )
    start("timeit", [*ONCE, code], tmp_path / "log", lambda _: answer.touch())
