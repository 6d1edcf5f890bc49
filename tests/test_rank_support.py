"""The server of ranks: all that run tests share it, and it ends with the last of them."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
import rank_support
from interruptible import start_interruptible, wait_until
from rank_support import RankServer

SHARES = f"""
import sys
from pathlib import Path
sys.path.append({str(Path(__file__).parent)!r})
import rank_support
rank_support.PRELOADED = ()
shared, own = Path(sys.argv[1]), Path(sys.argv[2])
rank_support.RankServer(lambda name: own, shared).run(own / "waits.py", own / "ready", ranks=2)
"""
WAITS = """
import os, pathlib, sys, time
pathlib.Path(sys.argv[1] + os.environ["RANK"]).write_text(str(os.getpid()))
time.sleep(60)
"""


@pytest.fixture
def start(tmp_path: Path):
    """Returns ``start(name)``: a process that shares the server, and the ranks that it runs."""
    started: list[subprocess.Popen] = []

    def start(name: str) -> tuple[subprocess.Popen, list[psutil.Process]]:
        own = tmp_path / name
        own.mkdir()
        (own / "waits.py").write_text(WAITS)
        started.append(start_interruptible([sys.executable, "-c", SHARES, str(tmp_path), str(own)]))
        paths = [own / f"ready{rank}" for rank in range(2)]
        wait_until(lambda: all(path.exists() and path.read_text() for path in paths))
        return started[-1], [psutil.Process(int(path.read_text())) for path in paths]

    yield start
    for process in started:
        process.kill()
        process.wait()


def test_two_processes_share_a_server_which_ends_with_the_last_however_that_ends(start):
    first, its_ranks = start("first")
    second, other_ranks = start("second")
    server = its_ranks[0].parent().parent()
    assert {rank.parent().parent() for rank in its_ranks + other_ranks} == {server}
    assert server.parent().pid == first.pid
    first.kill()
    wait_until(lambda: not any(rank.is_running() for rank in its_ranks))
    assert all(rank.is_running() for rank in other_ranks)
    assert server.is_running()
    second.send_signal(signal.SIGINT)
    wait_until(lambda: not any(process.is_running() for process in [server, *other_ranks]))


def test_a_rank_that_takes_too_long_is_killed_and_a_failure_has_its_traceback(
    tmp_path, monkeypatch
):
    monkeypatch.setattr(rank_support, "PRELOADED", ())
    server = RankServer(lambda name: tmp_path, tmp_path)
    (tmp_path / "waits.py").write_text(WAITS)
    killed = server.run(tmp_path / "waits.py", tmp_path / "ready", ranks=2, timeout_s=0.5)
    assert killed.exit_codes == [-signal.SIGKILL] * 2
    (tmp_path / "fails.py").write_text("print('begins', flush=True); 1 / 0")
    failed = server.run(tmp_path / "fails.py")
    assert (failed.exit_codes, failed.stdout) == ([1], ["begins\n"])
    assert "ZeroDivisionError" in failed.stderr[0]
    assert server.cpu_s > 0


def test_the_servers_modules_are_there():
    # One that has moved would be imported by each rank instead, and nobody would say so.
    own = [name for name in rank_support.PRELOADED if name.startswith("common.")]
    root = Path(__file__).resolve().parents[1]
    assert own
    assert all((root / f"{name.replace('.', '/')}.py").is_file() for name in own)
