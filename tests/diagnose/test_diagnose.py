"""``ddplab diagnose``: bundles, run directories, scripts, and what is refused."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import tarfile
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest
from bundle_support import write_bundle
from command_line import answered, ddplab, refused
from interruptible import start_interruptible

from common.cli.diagnose import split_script
from common.runtime.paths import project_root

ROOT = project_root()
RECORDED = ROOT / "data" / "xeon-2-cores" / "study-diagnosis" / "slow-rank-seen"


def test_what_is_found_lies_in_a_bundle_and_beside_a_packed_one(tmp_path: Path) -> None:
    bundle = write_bundle(tmp_path / "b")
    with tarfile.open(tmp_path / "job.tar.gz", "w:gz") as archive:
        archive.add(bundle, "b")
    packed = answered("diagnose", tmp_path / "job.tar.gz")
    assert (tmp_path / "job-diagnosis" / "diagnosis.html").is_file()
    assert not (bundle / "diagnosis.html").exists()
    for stdout in (packed, answered("diagnose", bundle)):
        assert "2 ranks, 1,103 samples/s" in stdout  # 16 samples in the median step of 14.5 ms
    assert json.loads((bundle / "diagnosis.json").read_text())["name"] == "train.py (b)"
    assert "<title>" in (bundle / "diagnosis.html").read_text()


def test_a_run_of_assignment_4_is_diagnosed_too(tmp_path: Path) -> None:
    run = tmp_path / "run"
    shutil.copytree(RECORDED, run)
    done = ddplab("diagnose", run)
    assert "pass is slow (slow-rank" in done.stdout
    verdicts = json.loads((run / "diagnosis.json").read_text())["verdicts"]
    assert verdicts[0]["cause"] == "slow-rank"
    assert verdicts[0]["speedup_low"] < verdicts[0]["predicted_speedup"]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ([], "name a script, -m MODULE or a folder"),
        (["none.py"], "script none.py: no such file"),
        (["--nproc", "0", "train.py"], "--nproc 0: at least 1"),
        (["--window", "0", "train.py"], "window is 0"),
        (["--compare", "."], "--compare takes two folders, not 1"),
        (["--compare", "bundle", "bundle", "--fail-above", "-1"], "a percentage from 0 on"),
        (["--compare", "bundle", "bundle", "--track"], "none of wandb, mlflow"),
        (["--json", "x.json", "bundle"], "go with --compare"),
        (["empty"], "no arms.csv"),
        (["bundle", "--verify"], "bundle is a folder; nothing follows it"),
        (["--bundle", "taken", "train.py"], "give each run a folder of its own"),
        (["--baseline", "none", "bundle"], "none: no such folder"),
    ],
)
def test_a_mistake_is_said_in_a_line(
    tmp_path: Path, monkeypatch, words: list[str], said: str
) -> None:
    (tmp_path / "train.py").write_text("print('it ran')")
    (tmp_path / "empty").mkdir()
    (tmp_path / "taken").mkdir()
    (tmp_path / "taken" / "file").write_text("of somebody's")
    write_bundle(tmp_path / "bundle")
    monkeypatch.chdir(tmp_path)
    assert said in refused("diagnose", *words)


def started(*words: object, cwd: Path, timeout: float = 60) -> subprocess.CompletedProcess:
    """Runs ``ddplab diagnose`` as a process, whose output the script's is part of."""
    return subprocess.run(
        [sys.executable, "-m", "common.cli.main", "diagnose", *map(str, words)],
        cwd=cwd,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=timeout,
    )


def test_a_script_that_never_updates_keeps_its_status(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("import sys\nprint(sys.argv[1:])\nsys.exit(3)")
    done = started("train.py", "--nproc", "7", cwd=tmp_path)
    assert done.returncode == 3
    assert "['--nproc', '7']" in done.stdout
    assert "no diagnosis: no update of a torch optimizer was seen" in done.stderr


@pytest.mark.parametrize(
    ("words", "own"),
    [
        (["--nproc", "2", "t.py", "--nproc", "3"], 2),
        (["--to_end", "--window", "9", "t.py"], 3),
        (["--no-probe", "-m", "a.b", "--x"], 1),
        (["--window=9", "t.py"], 1),
        (["folder"], 0),
        (["--help"], 1),
    ],
)
def test_flags_of_ours_end_where_the_script_begins(words: list[str], own: int) -> None:
    assert split_script(words) == (words[:own], words[own:])


def interruptible(folder: Path, *words: object) -> subprocess.Popen:
    """Starts ``ddplab diagnose`` on two ranks of a script that does not end by itself."""
    command = [sys.executable, "-m", "common.cli.main", "diagnose", "--nproc", "2", *words]
    return start_interruptible(
        [str(word) for word in command],
        cwd=folder,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def children_after(process: subprocess.Popen, begun: Callable[[], bool]) -> list[psutil.Process]:
    """Waits until something has begun; returns the processes that were started for it."""
    deadline = time.monotonic() + 100
    while not begun():
        if time.monotonic() > deadline or process.poll() is not None:
            process.kill()
            pytest.fail(f"it has not begun: {process.communicate()}")
        time.sleep(0.2)
    children = psutil.Process(process.pid).children(recursive=True)
    assert len(children) >= 3
    return children


@pytest.mark.slow  # in kind: test_planted_faults.py, and the launcher that is killed below
@pytest.mark.two_ranks
@pytest.mark.timeout(240)
def test_a_planted_fault_is_named_while_the_script_goes_on_and_ctrl_c_leaves_no_process(
    tmp_path: Path,
) -> None:
    planted = ROOT / "common" / "diagnose" / "studies" / "planted_faults.py"
    script = ROOT / "assignments" / "assignment4" / "scripts" / "plain.py"
    words = ["--window", "12", "--bundle", tmp_path / "bundle", planted, "slow-data=60", script]
    words += ["--steps", "100000", "--width", "128", "--batch_size", "128"]
    process = interruptible(tmp_path, *words)
    try:
        children = children_after(process, (tmp_path / "bundle" / "diagnosis.html").is_file)
        process.send_signal(signal.SIGINT)
        stdout, stderr = process.communicate(timeout=100)
    finally:
        process.kill()
    assert process.returncode == 130, stderr
    assert not [each for each in children if each.is_running()]
    assert stdout.count("Written: ") == 1
    found = json.loads((tmp_path / "bundle" / "diagnosis.json").read_text())
    first = found["verdicts"][0]
    assert first["cause"] == "data-loading"
    disturbed = "what was timed is a hint" in found["summary"]
    assert first["confidence"] == ("low" if disturbed else "high")
    assert "num_workers=" in first["change"]
    assert first["predicted_speedup"] > 1.5 * first["speedup_now"]


def test_ctrl_c_within_the_window_leaves_what_was_seen(tmp_path: Path, monkeypatch) -> None:
    def interrupted(program, ranks, variables, meanwhile) -> int:
        (tmp_path / "bundle").rmdir()
        write_bundle(tmp_path / "bundle")
        raise KeyboardInterrupt

    monkeypatch.setattr("common.cluster.watched.run_watched", interrupted)
    (tmp_path / "train.py").touch()
    done = ddplab("diagnose", "--bundle", tmp_path / "bundle", tmp_path / "train.py")
    assert done.status == 130
    assert "2 ranks, 1,103 samples/s" in done.stdout
    assert (tmp_path / "bundle" / "diagnosis.html").is_file()


@pytest.mark.two_ranks
@pytest.mark.timeout(240)
def test_ranks_end_with_a_diagnosis_that_was_killed(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(
        "import os, pathlib, time\npathlib.Path(f'rank{os.environ[\"RANK\"]}').touch()\n"
        "time.sleep(600)\n"
    )
    process = interruptible(tmp_path, script)
    children = children_after(process, lambda: len(list(tmp_path.glob("rank?"))) == 2)
    process.kill()
    process.communicate(timeout=60)
    _, left = psutil.wait_procs(children, timeout=30)
    assert not left
