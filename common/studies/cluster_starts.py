"""Starts and stops emulated clusters many times, kills some in mid-run, and counts what is left."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from pathlib import Path

import pandas as pd
import psutil

from common.errors import RunFailed
from common.report.progress import StageProgress
from common.runtime.process_identity import LAUNCHER
from common.runtime.run_directory import SampleStream

START_COLUMNS = (
    "start",
    "end",
    "exit_status",
    "seconds",
    "processes_left",
    "namespaces_left",
    "links_left",
)
RANK = """
import os, pathlib, sys, time
(pathlib.Path(sys.argv[1]) / os.environ["RANK"]).touch()
time.sleep(float(sys.argv[2]))
"""
START_WITHIN_S = 120.0


def survive(
    starts: int, kills: int, scratch: Path, stream: SampleStream, progress: StageProgress
) -> pd.DataFrame:
    """Starts clusters of two hosts one after another and kills some of them.

    ``kills`` of the ``starts``, spread evenly, get SIGKILL while their ranks run.

    Returns:
        One row per start: how it ended (``by itself`` or ``SIGKILL``), the launcher's status,
        seconds, and by how much the machine's processes, named namespaces and links exceed those
        before the first start. After a kill they are counted when the next cluster has been started
        and has ended, and after the last one when ``ddplab emulate --clean`` has been called.

    Raises:
        RunFailed: a cluster that was not killed did not end with status 0.
    """
    # Of as many equal parts of all starts as there are kills, the middle one of each.
    killed = {int((index + 0.5) * starts / kills) for index in range(kills)}
    script = scratch / "rank.py"
    script.write_text(RANK)
    before = _visible()
    rows: list[dict] = []
    pending: dict | None = None

    def add(row: dict) -> None:
        rows.append(row)
        stream.write([row])

    with progress.stage(f"{starts} starts, {len(killed)} killed") as update:
        for number in range(starts):
            row = _start(number, number in killed, scratch, script)
            update(f"{number + 1} of {starts}")
            left = _left(before)
            if pending:
                add(pending | left)
                pending = None
            if number in killed:
                pending = row
            else:
                add(row | left)
                if row["exit_status"]:
                    raise RunFailed(f"start {number} ended with status {row['exit_status']}")
        if pending:
            subprocess.run([*_ddplab(), "--clean"], check=True, capture_output=True)
            add(pending | _left(before))
    return pd.DataFrame(rows)


def _start(number: int, kill: bool, scratch: Path, script: Path) -> dict:
    folder = scratch / f"start-{number}"
    folder.mkdir()
    start = time.monotonic()
    process = subprocess.Popen(
        [*_ddplab(), "--rate", "500mbit", "--", str(script), str(folder), "60" if kill else "0.1"],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        while kill and len(list(folder.iterdir())) < 2:
            if process.poll() is not None or time.monotonic() - start > START_WITHIN_S:
                raise RunFailed(f"start {number} never ran")
            time.sleep(0.05)
        if kill:
            process.kill()
        status = process.wait(START_WITHIN_S)
    finally:
        process.kill()
    return {
        "start": number,
        "end": signal.Signals(-status).name if status < 0 else "by itself",
        "exit_status": status,
        "seconds": round(time.monotonic() - start, 2),
    }


def _ddplab() -> list[str]:
    return [sys.executable, "-P", "-m", "common.cli.main", "emulate"]


def _left(before: dict[str, int]) -> dict[str, int]:
    now = _visible()
    return {f"{name}_left": now[name] - count for name, count in before.items()}


def _visible() -> dict[str, int]:
    """Counts the processes of clusters, the named namespaces and the links on this machine."""
    processes = 0
    for process in psutil.process_iter():
        try:
            processes += LAUNCHER in process.environ()
        except (psutil.Error, OSError):
            continue
    counts = {"processes": processes}
    for name, what in (("namespaces", ["netns", "list"]), ("links", ["link", "show"])):
        listed = subprocess.run(["ip", "-o", *what], capture_output=True, text=True, check=True)
        counts[name] = len(listed.stdout.splitlines())
    return counts
