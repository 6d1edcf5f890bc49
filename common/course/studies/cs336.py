"""``ddplab study cs336``: the exercises' reference solutions under another course's tests.

The tests are those of Stanford CS336's assignment 2 (Systems), from a folder of the user's: a clone
of their repository. They run in a temporary copy, with ``cs336_adapters`` in the place of their
adapters. What is recorded is their commit and, for each test, whether it passed.

One of them, ``test_fsdp_correctness[fp32]``, wants equal bits of a batch of 20 and the mean of its
halves; in one process, without any FSDP, these already differ. That ours is the mean of the halves
to the bit is checked by tests/exercises/hidden/test_fsdp.py.
"""

from __future__ import annotations

import importlib.util
import shutil
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

import pandas as pd

from common.course.outcomes import run_tests
from common.errors import RunFailed, UserError
from common.runtime.machine.environment import describe_environment
from common.runtime.paths import git, project_root
from common.runtime.records.study import study_run
from common.runtime.stage_progress import StageProgress

ADAPTERS = Path(__file__).with_name("cs336_adapters.py")
BASICS = Path("cs336-basics") / "cs336_basics"
NEEDED = ("einops", "einx", "jaxtyping")
"""Packages of theirs that are not ours."""


@dataclass(frozen=True)
class Cs336Study:
    """Settings of the study."""

    tests: str = ""
    """Folder of the other course's repository, with ``tests`` and ``cs336-basics``."""


SETTINGS = Cs336Study


def run_study(study: Cs336Study, output_dir: str, progress: StageProgress) -> Path:
    """Runs their tests; returns the run directory (``results.csv``: the outcome of each)."""
    source = check_source(study.tests)
    environment = describe_environment("gloo", "cpu", 2)
    with study_run("cs336", study, output_dir, progress, environment) as run:
        with TemporaryDirectory() as scratch, progress.stage("their tests") as update:
            copy = Path(scratch) / "theirs"
            copy_tests(source, copy)
            try:
                outcomes = run_tests(
                    project_root(),
                    [str(copy / "tests"), f"--rootdir={copy}"],
                    log=run.path / "log",
                    on_output=update,
                )
            except RunFailed as error:
                raise RunFailed(f"their tests did not run: {error}") from None
            table = pd.DataFrame(
                [(outcome.file, outcome.name, outcome.outcome) for outcome in outcomes],
                columns=["file", "test", "outcome"],
            )
        if table.empty:
            raise RunFailed("their tests: none was found")
        run.write_table("results.csv", table.assign(commit=commit_of(source)))
    progress.say(table.to_string(index=False))
    counts = table["outcome"].value_counts()
    progress.say(", ".join(f"{count} {outcome}" for outcome, count in counts.items()))
    return run.path


def check_source(tests: str) -> Path:
    """Returns the folder of their repository.

    Raises:
        UserError: it was not given, has not their layout, or a package of theirs is missing.
    """
    if not tests:
        raise UserError("--tests: give the folder of a clone of CS336's assignment 2")
    source = Path(tests)
    for needed in (Path("tests") / "adapters.py", BASICS):
        if not (source / needed).exists():
            raise UserError(f"--tests {tests}: there is no {needed} in it")
    missing = [name for name in NEEDED if importlib.util.find_spec(name) is None]
    if missing:
        options = " ".join(f"--with {name}" for name in missing)
        raise UserError(
            f"their package needs {', '.join(missing)}: uv run {options} ddplab study cs336 …"
        )
    return source


def copy_tests(source: Path, copy: Path) -> None:
    """Copies their tests and package, with our adapters."""
    shutil.copytree(source / "tests", copy / "tests")
    shutil.copytree(source / BASICS, copy / BASICS.name)
    shutil.copyfile(ADAPTERS, copy / "tests" / "adapters.py")
    if (settings := source / "pyproject.toml").is_file():
        shutil.copyfile(settings, copy / settings.name)


def commit_of(source: Path) -> str:
    """Returns the commit of their clone, or ``unknown``."""
    process = git(source, "rev-parse", "HEAD")
    return process.stdout.strip() if process.returncode == 0 else "unknown"
