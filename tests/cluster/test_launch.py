"""The launcher: runs a script on local ranks through torchrun and leaves nothing behind."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest
from interruptible import living, start_interruptible, wait_until
from quick_torchrun import REFUSE, write_quick_torchrun
from refusals import problem

from common.cluster.launch import (
    MARK,
    end_orphaned_clusters,
    launch,
    launch_series,
    started,
    threads_per_rank,
)
from common.errors import RunFailed, UserError
from common.runtime.machine.environment import usable_cores

pytestmark = pytest.mark.two_ranks

# The ranks do not import torch: that would take seconds, and torchrun does not ask for it.
REPORT = """
import json, os, pathlib, sys
names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_PORT", "OMP_NUM_THREADS")
said = {name: os.environ[name] for name in names}
path = pathlib.Path(sys.argv[1]) / (said["RANK"] + ".json")
path.write_text(json.dumps(said | {"arguments": sys.argv[2:]}))
os.write(1, f"rank {said['RANK']} was here\\n".encode())  # in one piece, so that lines stay whole
"""
MEET = """
import os, pathlib, time
here = pathlib.Path(__file__).parent
(here / ("met-" + os.environ["RANK"])).touch()
while not all((here / f"met-{rank}").exists() for rank in "01"):
    time.sleep(0.01)
"""
"""Ranks meet, as in every real script: what one prints then comes after the script before."""
DIE = """
import os, signal, time
if os.environ["RANK"] == "1":
    os.kill(os.getpid(), signal.SIGKILL)
time.sleep(60)
"""
WAIT = """
import os, subprocess, sys, time
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
os.write(1, b"waiting\\n")  # in one piece: print would write the end of the line apart
time.sleep(60)
"""
WHO = """
import json, os, pathlib, sys, time
folder = pathlib.Path(sys.argv[1])
folder.mkdir(exist_ok=True)
(folder / os.environ["RANK"]).touch()
while len(list(folder.iterdir())) < 2:  # ranks meet, as in every script
    time.sleep(0.01)
who = {"pid": os.getpid(), "parent": os.getppid(), "rank": os.environ["RANK"]}
who |= {"arguments": sys.argv[1:], "seen": "seen" in vars(json), "path": sys.path[0]}
json.seen = True  # what one script leaves in its process, the next does not find
os.write(1, (json.dumps(who) + "\\n").encode())
"""
LAUNCH_AND_WAIT = """
import pathlib, sys
from common.cluster.launch import launch
launch(pathlib.Path(sys.argv[1]), [], 2, pathlib.Path(sys.argv[2]),
       on_output=lambda line: print(line, flush=True))
"""


@pytest.fixture
def quick_torchrun(tmp_path, monkeypatch):
    """Starts ranks at once, where only the launcher and what a rank does matter."""
    for name, value in write_quick_torchrun(tmp_path / "quick").items():
        monkeypatch.setenv(name, value)


@pytest.fixture
def write(tmp_path):
    """Returns ``write(code)``: the path of a script that holds it."""

    def write(code: str) -> Path:
        script = tmp_path / "script.py"
        script.write_text(code)
        return script

    return write


@pytest.fixture
def alive(tmp_path, monkeypatch) -> Callable[[], int]:
    """Returns ``alive()``: counts the living processes that this test's launches started.

    They are found in the system's process table by a variable that all of them inherit.
    """
    started_here = ("STARTED_BY_TEST", str(tmp_path))
    monkeypatch.setenv(*started_here)
    return lambda: len(living(lambda own: MARK in own and started_here in own.items()))


def reports(folder: Path) -> list[dict]:
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(2)]


@pytest.mark.parametrize(
    ("ranks", "cores", "threads"), [(1, 8, 8), (2, 8, 4), (3, 8, 2), (2, 2, 1), (4, 2, 1)]
)
def test_ranks_share_the_cores_and_each_has_at_least_one_thread(ranks, cores, threads):
    assert threads_per_rank(ranks, cores) == threads


@pytest.mark.slow
def test_two_launches_at_once_each_run_their_script_on_every_rank(tmp_path, write, alive):
    script = write(REPORT)
    folders = [tmp_path / "a", tmp_path / "b"]
    lines: dict[Path, list[str]] = {folder: [] for folder in folders}
    threads = []
    for folder in folders:
        folder.mkdir()
        work = (script, [str(folder), "--flag"], 2, folder / "log")
        options = {"on_output": lines[folder].append}
        threads.append(threading.Thread(target=launch, args=work, kwargs=options))
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for folder in folders:
        said = reports(folder)
        assert [own["RANK"] for own in said] == ["0", "1"]
        assert [own["LOCAL_RANK"] for own in said] == ["0", "1"]
        for own in said:
            assert own["WORLD_SIZE"] == "2"
            assert own["arguments"] == ["--flag"]
            assert int(own["OMP_NUM_THREADS"]) == max(1, usable_cores() // 2)
        # What the ranks print arrives line by line and is in the log.
        assert {"rank 0 was here", "rank 1 was here"} <= set(lines[folder])
        assert {"rank 0 was here", "rank 1 was here"} <= set(
            (folder / "log").read_text().split("\n")
        )
    # The ranks of one launch meet at one port, those of the other elsewhere.
    ports = [{own["MASTER_PORT"] for own in reports(folder)} for folder in folders]
    assert [len(port) for port in ports] == [1, 1]
    assert ports[0] != ports[1]
    assert alive() == 0


def test_a_launch_is_no_orphan_after_a_step_of_the_systems_clock(tmp_path, monkeypatch, alive):
    identity = {"PATH": os.environ["PATH"]}
    with started(["sleep", "60"], "a mark of this test", identity, grace_s=0) as process:
        shifted = psutil.Process.create_time
        monkeypatch.setattr(psutil.Process, "create_time", lambda self: shifted(self) + 1.0)
        wait_until(lambda: alive() == 1)  # a process has its own variables once it has begun
        assert end_orphaned_clusters() == 0
        assert process.poll() is None
        process.kill()


def test_a_ranks_refusal_arrives_with_its_own_message(tmp_path, write, quick_torchrun):
    said = problem(launch, write(REFUSE), ["--rounds", "0"], 2, tmp_path / "log")
    assert said == "rounds is 0; it must be above 0"


def test_a_killed_rank_ends_the_launch_with_the_signals_name_and_nothing_is_left(
    tmp_path, write, alive
):
    with pytest.raises(RunFailed, match="SIGKILL") as raised:
        launch(write(DIE), [], 2, tmp_path / "log")
    assert len(str(raised.value).splitlines()) == 1
    assert "log" in str(raised.value)  # where to read more
    assert alive() == 0


@pytest.mark.parametrize("is_quick", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_ctrl_c_during_a_launch_leaves_no_process_not_even_a_ranks_child(
    tmp_path, write, alive, request, is_quick
):
    if is_quick:
        request.getfixturevalue("quick_torchrun")
    command = [sys.executable, "-c", LAUNCH_AND_WAIT, str(write(WAIT)), str(tmp_path / "log")]
    with start_interruptible(
        command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    ) as parent:
        said = [parent.stdout.readline() for _ in range(2)]
        assert said == ["waiting\n"] * 2
        # torchrun, two ranks and a child of each, which has no environment before it runs
        deadline = time.monotonic() + 10
        while alive() < 5 and time.monotonic() < deadline:
            time.sleep(0.05)
        assert alive() == 5
        parent.send_signal(signal.SIGINT)
        status = parent.wait(30)
    assert status in (-signal.SIGINT, 130)
    assert alive() == 0


def test_output_that_is_no_text_does_not_end_the_launch(tmp_path, write, quick_torchrun):
    script = write("import os; os.write(1, bytes([0xff, 0xfe, 10]) + b'done' + bytes([10]))")
    launch(script, [], 1, tmp_path / "log")
    assert b"done" in (tmp_path / "log").read_bytes()


def test_a_log_that_cannot_be_written_is_the_users_error(tmp_path, write, alive):
    script = write("")
    assert "Not a directory" in problem(launch, script, [], 1, script / "log")
    assert alive() == 0


def test_scripts_of_a_series_share_the_ranks_and_have_a_process_each(
    tmp_path, write, alive, quick_torchrun
):
    script = write(WHO)
    logs = [tmp_path / "first", tmp_path / "second"]
    said = []
    scripts = [[script, tmp_path / "a"], [script, tmp_path / "b", "--c"]]
    with launch_series(ranks=2) as series:
        series.add(*scripts[0])
        for log in logs:
            lines: list[str] = []
            series.wait(log, lines.append)
            assert log.read_text().splitlines() == lines
            if log is logs[0]:
                series.add(*scripts[1])  # the ranks have nothing left to do
            found = [json.loads(line) for line in lines if line.startswith("{")]
            said.append(sorted(found, key=lambda one: one["rank"]))
    first, second = said
    for one, other in zip(first, second, strict=True):
        assert one["rank"] == other["rank"]
        assert one["parent"] == other["parent"]
        assert one["pid"] != other["pid"]
    assert [one["rank"] for one in first] == ["0", "1"]
    given = [one["arguments"] for one in first + second]
    assert given == [[str(word) for word in words[1:]] for words in scripts for _ in range(2)]
    assert not any(one["seen"] for one in first + second)
    assert {one["path"] for one in first + second} == {str(script.parent)}
    assert alive() == 0


@pytest.mark.parametrize(
    ("code", "error", "words"),
    [
        (REFUSE, UserError, "rounds is 1; it must be above 0"),
        (f"{MEET}\nraise ValueError('seven')", RunFailed, "ValueError: seven"),
    ],
)
def test_a_script_that_fails_ends_the_series_and_the_one_before_stays(
    tmp_path, write, alive, quick_torchrun, code, error, words
):
    good = tmp_path / "good.py"
    good.write_text("")
    said = pytest.raises(error, match=words)
    with said, launch_series(ranks=2) as series:
        for one in (good, write(code), good):
            series.add(one)
        for log in ("first", "second", "third"):
            series.wait(tmp_path / log)
    assert (tmp_path / "first").exists()
    assert not (tmp_path / "third").exists()
    assert alive() == 0
