"""The lowest torch that the project allows, on the newest Python.

Names of torch that are not public move from version to version. Here every module is imported, and
the CPU tests of what uses such names run, in an environment that uv makes of its cache. The first
time it downloads 3 GB. All other tests run with the lock's torch, the newest.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

from common.course.outcomes import own_variables
from common.runtime.torch_internals import WORKING

ROOT = Path(__file__).resolve().parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
LOCKED = next(
    package["version"].partition("+")[0]
    for package in tomllib.loads((ROOT / "uv.lock").read_text())["package"]
    if package["name"] == "torch"
)
[LOWEST] = re.findall(r"^torch>=(\S+)$", "\n".join(PROJECT["dependencies"]), re.MULTILINE)
[ABOVE] = re.findall(r",<3\.(\d+)$", PROJECT["requires-python"])
NOT_THERE = ("Failed to fetch", "Failed to download", "network was disabled", "No interpreter")
"""Parts of what uv says where an environment cannot be had."""
USERS = (
    "runtime/test_torch_internals.py",
    "training/test_checkpoint_parts.py",
    "perfmodel/test_memory_of_passes.py",
    "training/test_data_parallel_step.py",
    "benchmarks/test_bucket_timeline.py",
    "benchmarks/test_lasting_messages.py",
    "benchmarks/test_memory_analysis.py",
    "diagnose/watch/test_watched_loop.py",
    "exercises/hidden/test_ring_all_reduce.py",
)
IMPORTS = """
import importlib, pkgutil, torch
import common, ddplab_watch
print("torch", torch.__version__)
for package in (common, ddplab_watch):
    for module in pkgutil.walk_packages(package.__path__, package.__name__ + "."):
        importlib.import_module(module.name)
"""


def test_the_versions_that_are_said_to_work_are_the_lowest_and_the_newest_that_are_tried():
    assert f"{LOWEST} to {LOCKED.rpartition('.')[0]}" == WORKING


@pytest.fixture
def environment(tmp_path: Path) -> Iterator[dict[str, str]]:
    """Yields the variables of an environment in ``tmp_path``, which is deleted in the end."""
    if shutil.which("uv") is None:
        pytest.skip("uv is not installed")
    # Pythons that pyenv has and does not show.
    pyenv = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv")) / "versions"
    found = [str(tmp_path / "venv" / "bin"), *map(str, pyenv.glob("3.*/bin")), os.environ["PATH"]]
    kept = own_variables()  # or ranks would be those of the pytest that this runs in
    kept.pop("PYTHONDONTWRITEBYTECODE", None)
    yield kept | {
        "PYTHONPYCACHEPREFIX": str(tmp_path / "bytecode"),  # compiled once, for all its processes
        "PATH": os.pathsep.join(found),
        "VIRTUAL_ENV": str(tmp_path / "venv"),
        "PYTHONPATH": os.pathsep.join(map(str, (ROOT, ROOT / "common" / "diagnose" / "watch"))),
    }
    for folder in ("venv", "bytecode"):  # 3 GB
        shutil.rmtree(tmp_path / folder, ignore_errors=True)


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_everything_is_imported_and_what_uses_private_names_works(
    tmp_path: Path, environment: dict[str, str]
) -> None:
    def run(*words: object) -> subprocess.CompletedProcess:
        return subprocess.run(
            list(map(str, words)), cwd=ROOT, env=environment, capture_output=True, text=True
        )

    def uv(*words: object) -> None:
        done = run("uv", *words)
        for line in done.stderr.splitlines():
            if any(reason in line for reason in NOT_THERE):
                pytest.skip(f"cannot be had here: {line.strip()}")
        assert done.returncode == 0, done.stderr

    others = tmp_path / "requirements.txt"
    options = ("--locked", "--no-emit-workspace", "--no-hashes", "--prune", "torch")
    uv("export", "--quiet", *options, "--output-file", others)
    uv("venv", "--quiet", "--python", f"3.{int(ABOVE) - 1}", tmp_path / "venv")
    uv("pip", "install", "--quiet", "--requirements", others, f"torch=={LOWEST}.*")
    imported = run("python", "-c", IMPORTS)
    assert imported.returncode == 0, imported.stderr
    assert f"torch {LOWEST}." in imported.stdout
    files = [ROOT / "tests" / name for name in USERS]
    plain = ("-n", 0, "--timeout", 300, "-p", "no:cacheprovider")
    tested = run("python", "-m", "pytest", *files, *plain)
    assert tested.returncode == 0, tested.stdout[-6000:]
