"""Runs the quick tests, and holds the processor time that they take to what is committed.

    uv run python tests/budget.py            # fails above the budget
    uv run python tests/budget.py --record   # writes tests/durations.csv anew

Processor seconds are those of all processes of the run. Machines differ, and a shared one is slower
at one time than at another, so the seconds are divided by those of a fixed computation beside the
tests: a process that imports torch, as most tests' processes do (a loop in Python alone stays in
the processor's cache, and did not follow them). The committed table names the slowest tests.
"""

from __future__ import annotations

import csv
import ctypes
import os
import resource
import statistics
import subprocess
import sys
import time
from pathlib import Path

HERE = Path(__file__).parent
COMMITTED = HERE / "durations.csv"
RECORDED = HERE.parent / "outputs" / "durations.csv"
HOUSES = {"diagnose": "diagnose", "course": "course", "exercises": "course"}
"""Folder of tests → house; all others are the lab's."""
ALL, WITNESS = "all tests", "fixed computation"
MOST_CPU_S = 8 * 60 * 2
"""What eight minutes on two cores hold; six are the aim."""
MARGIN = 1.5
"""The same tests took 648 to 900 s of processors in four runs on one kind of machine."""
EVERY_S = 40
FIXED = "import torch"
SHOWN, KEPT_CPU_S = 20, 1.0
PR_SET_CHILD_SUBREAPER = 36


def main() -> int:
    """Runs pytest and returns an exit status: pytest's own, or 1 above the budget."""
    # What a test leaves running becomes a child of this process, so that its time is counted.
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1)
    RECORDED.parent.mkdir(parents=True, exist_ok=True)
    environment = os.environ | {"TEST_DURATIONS": str(RECORDED)}
    began = time.monotonic()
    pytest = subprocess.Popen([sys.executable, "-m", "pytest"], env=environment)
    witnessed_s = [fixed_computation_s()]
    while pytest.returncode is None:
        witnessed_s.append(fixed_computation_s())
        reap(EVERY_S, pytest)
    reap(EVERY_S, pytest)
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    cpu_s = used.ru_utime + used.ru_stime - sum(witnessed_s)
    total = {
        ALL: (time.monotonic() - began, cpu_s),
        WITNESS: (0.0, statistics.median(witnessed_s)),
    }
    tests = read(RECORDED)
    write(RECORDED, total | tests)
    for name, (wall_s, cpu_s) in [*total.items(), *by_house(tests), *longest(tests)[:SHOWN]]:
        print(f"{cpu_s:8.2f} s of processors {wall_s:8.2f} s  {name}")
    if pytest.returncode:
        return pytest.returncode
    if "--record" in sys.argv:
        kept = {name: times for name, times in longest(tests) if times[1] >= KEPT_CPU_S}
        write(COMMITTED, total | kept)
        return over(total, total)
    return over(total, read(COMMITTED))


def reap(seconds: float, pytest: subprocess.Popen) -> None:
    """Waits for what has ended: pytest, and what it or its tests have left, as the server of ranks.

    Returns after so many seconds, as soon as pytest ends, or when nothing is left.
    """
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        try:
            process, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return
        if process == pytest.pid:
            pytest.returncode = os.waitstatus_to_exitcode(status)
            return
        if not process:
            time.sleep(0.05)


def over(now: dict[str, tuple[float, float]], committed: dict[str, tuple[float, float]]) -> int:
    """Returns 1, and says why, where the tests or the committed budget take too much."""
    if committed[ALL][1] > MOST_CPU_S:
        print(f"{COMMITTED.name} has {committed[ALL][1]:.0f} s; at most {MOST_CPU_S}")
        return 1
    ratio = now[ALL][1] / now[WITNESS][1] / (committed[ALL][1] / committed[WITNESS][1])
    print(f"{ratio:.2f} times the committed processor time (at most {MARGIN})")
    return int(ratio > MARGIN)


def fixed_computation_s() -> float:
    """Returns the processor seconds of a process that does what is always the same."""
    child = os.posix_spawn(sys.executable, [sys.executable, "-c", FIXED], os.environ)
    _, _, used = os.wait4(child, 0)
    return used.ru_utime + used.ru_stime


def by_house(tests: dict[str, tuple[float, float]]) -> list[tuple[str, tuple[float, float]]]:
    """Returns the sums of each house's tests; those of both workers are added up."""
    sums = dict.fromkeys(("lab", *dict.fromkeys(HOUSES.values())), (0.0, 0.0))
    for name, (wall_s, cpu_s) in tests.items():
        house = HOUSES.get(name.split("/")[1], "lab")
        sums[house] = (sums[house][0] + wall_s, sums[house][1] + cpu_s)
    return list(sums.items())


def longest(tests: dict[str, tuple[float, float]]) -> list[tuple[str, tuple[float, float]]]:
    """Returns tests by their processor time, most first."""
    return sorted(tests.items(), key=lambda test: test[1][1], reverse=True)


def read(path: Path) -> dict[str, tuple[float, float]]:
    """Returns seconds that went by and processor seconds, by test."""
    with path.open(newline="") as file:
        return {
            row["test"]: (float(row["wall_s"]), float(row["cpu_s"])) for row in csv.DictReader(file)
        }


def write(path: Path, times: dict[str, tuple[float, float]]) -> None:
    """Writes such a table."""
    with path.open("w", newline="") as file:
        rows = csv.writer(file, lineterminator="\n")
        rows.writerow(["test", "wall_s", "cpu_s"])
        rows.writerows((name, f"{wall:.2f}", f"{cpu:.3f}") for name, (wall, cpu) in times.items())


if __name__ == "__main__":
    sys.exit(main())
