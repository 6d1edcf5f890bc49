"""A newcomer's checkout in any folder: the sandbox's tests pass there, in an environment made anew.

An environment cannot be moved. So ``uv sync`` makes one for each folder, from the packages that it
keeps, to which the new environment's files are hard links.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from common.course.outcomes import own_variables
from common.runtime.paths import project_root

TESTS = "reads or looks or calls or imports or left_for or bytecode or wherever"
PLACES = {
    "below /tmp": ("/tmp", "ddplab-"),
    "below /mnt": ("/mnt", "ddplab-"),
    "below /run": ("/run", "ddplab-"),
    "below /home, with spaces, quotes and umlauts": ("/home", 'it\'s my "schönes" Übungs $HOME '),
    "behind a link": ("/var/tmp", "ddplab-"),
}
NOT_COPIED = (
    ".git",
    ".venv",
    "outputs",
    "__pycache__",
    ".pytest_cache",
    ".ruff_cache",
    ".hypothesis",
)


@pytest.fixture(params=PLACES)
def checkout(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Path]:
    """Yields a copy of the project with an environment of its own."""
    place, prefix = PLACES[request.param]
    uv = shutil.which("uv")
    if uv is None or not os.access(place, os.W_OK):
        pytest.skip(f"needs uv, and rights to write to {place}")
    with tempfile.TemporaryDirectory(dir=place, prefix=prefix) as folder:
        checkout = Path(folder) / "ddplab"
        shutil.copytree(project_root(), checkout, ignore=shutil.ignore_patterns(*NOT_COPIED))
        if request.param == "behind a link":
            (tmp_path / "link").symlink_to(folder)
            checkout = tmp_path / "link" / "ddplab"
        made = subprocess.run(
            [uv, "sync", "--locked", "--offline", "--python", os.path.realpath(sys.executable)],
            cwd=checkout,
            env=variables(),
            capture_output=True,
            text=True,
        )
        if made.returncode:
            pytest.skip(f"uv does not have all packages: {made.stderr.strip().splitlines()[-1]}")
        yield checkout


def variables() -> dict[str, str]:
    """Returns this process's variables without those that name its environment."""
    own = ("PYTHONPATH", "VIRTUAL_ENV", "UV_PROJECT_ENVIRONMENT", "PWD")
    return {name: value for name, value in own_variables().items() if name not in own}


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_tests_of_the_sandbox_pass_in_any_folder(checkout: Path) -> None:
    python = checkout / ".venv" / "bin" / "python"
    tests = ["tests/course/test_sandbox.py", "-k", TESTS, "-n", "0", "-p", "no:cacheprovider"]
    done = subprocess.run(
        [python, "-m", "pytest", *tests],
        cwd=checkout,
        env=variables(),
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout[-3000:]
    assert " skipped" not in done.stdout.splitlines()[-1]
