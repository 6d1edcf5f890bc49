"""A newcomer's checkout in an odd folder: it grades there, and hides itself from student code.

An environment cannot be moved. So ``uv sync`` makes one for each folder, from the packages that it
keeps, to which the new environment's files are hard links.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from common.course.outcomes import own_variables
from common.course.submission import HandedIn, pack
from common.runtime.paths import project_root

ATTACKS = "reads or looks or wherever"
RING = Path("common") / "exercises" / "ring_all_reduce.py"
PREFIX = 'it\'s my "schönes" Übungs $HOME '
"""Beginning of a name below /tmp, of which a sandbox has another one."""
NOT_COPIED = (
    ".git",
    ".venv",
    "outputs",
    "__pycache__",
    ".pytest_cache",
    ".ruff_cache",
    ".hypothesis",
)


@pytest.fixture
def checkout(tmp_path: Path) -> Iterator[Path]:
    """Yields a copy of the project with an environment of its own, behind a link."""
    uv = shutil.which("uv")
    if uv is None or not os.access("/tmp", os.W_OK):
        pytest.skip("needs uv, and rights to write to /tmp")
    with tempfile.TemporaryDirectory(dir="/tmp", prefix=PREFIX) as folder:
        (tmp_path / "link").symlink_to(folder)
        checkout = tmp_path / "link" / "ddplab"
        shutil.copytree(project_root(), checkout, ignore=shutil.ignore_patterns(*NOT_COPIED))
        made = subprocess.run(
            [uv, "sync", "--locked", "--offline", "--python", os.path.realpath(sys.executable)],
            cwd=checkout,
            env=variables(),
            capture_output=True,
            text=True,
        )
        if made.returncode:
            pytest.skip(f"uv does not have all packages: {made.stderr.strip().splitlines()[-1]}")
        copy_bytecode(checkout / ".venv")
        yield checkout


def copy_bytecode(environment: Path) -> None:
    """Copies the bytecode of this process's packages, of which the new environment has the same."""
    packages = Path(sysconfig.get_paths()["purelib"])
    for path in packages.rglob("__pycache__/*.pyc"):
        target = environment / path.relative_to(sys.prefix)
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(path, target)


def variables() -> dict[str, str]:
    """Returns this process's variables without those that name its environment."""
    own = ("PYTHONPATH", "VIRTUAL_ENV", "UV_PROJECT_ENVIRONMENT", "PWD")
    return {name: value for name, value in own_variables().items() if name not in own}


@pytest.fixture
def python(checkout: Path) -> Callable:
    """Returns ``python(*arguments)``, which runs the checkout's own."""

    def run(*arguments: object) -> subprocess.CompletedProcess:
        command = [checkout / ".venv" / "bin" / "python", *arguments]
        return subprocess.run(
            command, cwd=checkout, env=variables(), capture_output=True, text=True
        )

    return run


@pytest.fixture
def handed_in(checkout: Path, tmp_path: Path) -> Path:
    """Makes a folder with a submission of the first task of assignment 1, which runs on ranks."""
    of = HandedIn("doe-jane", 1, 1)
    folder = tmp_path / "handed-in"
    folder.mkdir()
    text = (checkout / RING).read_bytes()
    pack(folder / f"{of.stem}.tar.gz", of, {f"exercises/{RING.name}": text})
    return folder


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_checkout_in_an_odd_folder_grades_and_hides_itself(
    python: Callable, handed_in: Path, tmp_path: Path
) -> None:
    results = tmp_path / "results.json"
    done = python("-m", "common.course.autograder", handed_in, results, "1", "1", "7", "visible")
    assert done.returncode == 0, done.stderr[-3000:]
    tests = json.loads(results.read_text())["tests"]
    ring = [test["status"] for test in tests if test["name"].startswith("A1.1")]
    assert set(ring) == {"passed"}, tests
    attacks = ["tests/course/test_sandbox.py", "-k", ATTACKS, "-n", 0, "-p", "no:cacheprovider"]
    done = python("-m", "pytest", *map(str, attacks))
    assert done.returncode == 0, done.stdout[-3000:]
    assert " skipped" not in done.stdout.splitlines()[-1]
