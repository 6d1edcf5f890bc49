"""A minute before class: does everything work here, on every rank, with the devices at hand?

Recipe: ``ddplab doctor --selftest``, or on a cluster ``sbatch sbatch/selftest.sbatch``. All checks
run in one process group; each is agreed on by all ranks, and after one that breaks the group the
rest is left out.
"""

from __future__ import annotations

import contextlib
import dataclasses
import io
import json
import logging
import shutil
import socket
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from common.benchmarks.selftest_checks import CHECKS, Check
from common.errors import RunFailed
from common.runtime.process_group import Worker, process_group
from common.runtime.run_directory import new_run_id
from common.runtime.script import run_script

TIMEOUT_S = 60
LOST = "a rank was lost"


@dataclass(frozen=True)
class Selftest:
    """Run every script at its smallest and check devices, network and output folder.

    Prints a table of what passed and what failed, with a remedy; exit status 1 if any failed.
    """

    output_dir: str = "outputs"
    """Where results will go; the self-test writes below selftest/ in it."""
    device: str | None = None
    """cpu or cuda; by default CUDA where it is."""
    backend: str | None = None
    """nccl or gloo; by default NCCL on CUDA and gloo on the CPU."""
    results: str = ""
    """Write each result to this file too, as it comes, one JSON object a line."""


@dataclass(frozen=True)
class Result:
    """How a check ended: ``passed``, ``failed`` or ``not run``."""

    name: str
    outcome: str
    detail: str
    remedy: str = ""


def main(settings: Selftest) -> None:
    """Run all checks. Raises RunFailed when one failed."""
    logging.getLogger().setLevel(logging.WARNING)
    with process_group(settings.device, settings.backend, TIMEOUT_S) as worker:
        folder = Path(settings.output_dir) / "selftest"
        folder = folder / str(worker.broadcast(new_run_id("selftest")))
        results = []
        for check in CHECKS:
            announce(settings, worker, check)
            results.append(attempt(check, worker, folder, results))
            report(settings, worker, results[-1])
        if worker.is_main:
            shutil.rmtree(folder, ignore_errors=True)
            print_results(results)
        failed = [result.name for result in results if result.outcome != "passed"]
        if failed:
            raise RunFailed(f"self-test: {', '.join(failed)}")


def attempt(check: Check, worker: Worker, folder: Path, before: Sequence[Result]) -> Result:
    """Run one check on all ranks; it passes when it passed on each."""
    if any(result.detail.startswith(LOST) or result.outcome == "not run" for result in before):
        return Result(check.name, "not run", "the ranks no longer reach each other", check.remedy)
    start = time.monotonic()
    detail, error = "", None
    try:
        with contextlib.redirect_stdout(io.StringIO()):
            detail = check.run(worker, folder)
    except Exception as raised:  # whatever it is belongs in the table
        said = str(raised).splitlines() or [type(raised).__name__]
        error = f"{socket.gethostname()}: {said[0]}"
    try:
        errors = [found for found in worker.gather(error) if found]
    except Exception:  # the group is broken, or in the middle of another collective
        errors = [f"{LOST}; {error}" if error else LOST]
    took = f"{time.monotonic() - start:.1f} s"
    if errors:
        return Result(check.name, "failed", errors[0], check.remedy)
    return Result(check.name, "passed", f"{detail}, {took}" if detail else took)


def announce(settings: Selftest, worker: Worker, check: Check) -> None:
    """Leave word of what is being tried, for the case that it takes this process with it."""
    report(settings, worker, Result(check.name, "failed", "ended the process", check.remedy))


def report(settings: Selftest, worker: Worker, result: Result) -> None:
    if settings.results and worker.is_main:
        with Path(settings.results).open("a") as file:
            file.write(json.dumps(dataclasses.asdict(result)) + "\n")


def read_results(path: Path) -> list[Result]:
    """The last word on each check, in order."""
    lines = path.read_text().splitlines() if path.is_file() else []
    found = [Result(**json.loads(line)) for line in lines]
    return list({result.name: result for result in found}.values())


def print_results(results: Sequence[Result]) -> None:
    """The table of passed and failed."""
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    table = Table("check", "", "detail", "remedy", title="Self-test", title_justify="left")
    colours = {"passed": "green", "failed": "red"}
    for result in results:
        colour = colours.get(result.outcome, "yellow")
        outcome = f"[{colour}]{result.outcome}[/{colour}]"
        table.add_row(result.name, outcome, escape(result.detail), escape(result.remedy))
    console = Console()
    console = console if console.is_terminal else Console(width=110)
    console.print(table)


if __name__ == "__main__":
    sys.argv[0] = "selftest"
    run_script(main, Selftest)
