"""The wheel of the watcher, installed where nothing of this project is."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from common.diagnose.opened import open_diagnosis
from common.runtime.paths import project_root

UV = shutil.which("uv")
LOOP = Path(__file__).parent / "scripts" / "loop.py"


@pytest.fixture(scope="module")
def python(tmp_path_factory) -> Path:
    """The Python of an environment with torch and the wheel, and without this project."""
    folder = tmp_path_factory.mktemp("elsewhere")
    if UV is None:
        pytest.skip("uv is not installed")
    source = folder / "watch"
    shutil.copytree(project_root() / "common" / "diagnose" / "watch", source)
    build = [UV, "build", "--wheel", "--quiet", "--out-dir", str(folder / "dist"), str(source)]
    subprocess.run(build, check=True, timeout=120)
    [wheel] = (folder / "dist").glob("ddplab_watch-*.whl")
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", folder / "venv"], check=True)
    python = folder / "venv" / "bin" / "python"
    install = [UV, "pip", "install", "--quiet", "--python", str(python), "--no-deps", str(wheel)]
    subprocess.run(install, check=True, timeout=120)
    # torch from here; what is installed in editable mode, this project, does not come with it.
    [packages] = (folder / "venv" / "lib").glob("python*/site-packages")
    (packages / "torch_of_another.pth").write_text(f"{Path(torch.__file__).parents[1]}\n")
    return python


def run(python: Path, *words: str, cwd: Path, **variables: str) -> subprocess.CompletedProcess[str]:
    kept = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    command = [str(python), *words]
    environment = kept | variables
    return subprocess.run(
        command, cwd=cwd, env=environment, capture_output=True, text=True, timeout=120
    )


def test_nothing_of_this_project_is_there(python: Path, tmp_path: Path) -> None:
    where = run(python, "-c", "import ddplab_watch; print(ddplab_watch.__file__)", cwd=tmp_path)
    assert Path(where.stdout.strip()).is_relative_to(python.parents[1]), where.stderr
    assert "ModuleNotFoundError" in run(python, "-c", "import common", cwd=tmp_path).stderr


@pytest.mark.slow
def test_a_bundle_made_there_beside_a_package_common_is_diagnosed_here(
    python: Path, tmp_path: Path
) -> None:
    (tmp_path / "common").mkdir()
    (tmp_path / "common" / "__init__.py").write_text("answer = 42\n")
    # transformers and others look whether torch is there before they import it: the watch stays.
    own = (
        "import importlib.util, sys\nfrom common import answer\nassert answer == 42\n"
        "assert importlib.util.find_spec('torch') and 'torch' not in sys.modules\n"
    )
    own += LOOP.read_text()
    (tmp_path / "train.py").write_text(own)
    done = run(
        python,
        *("train.py", "out", "--steps", "14"),
        cwd=tmp_path,
        DDPLAB_WATCH=str(tmp_path / "bundle"),
        DDPLAB_WATCH_OPTIONS="warmup=2,window=4,bucket_steps=3",
        DDPLAB_WATCH_DEBUG="1",
    )
    assert done.returncode == 0, done.stderr
    opened = open_diagnosis(tmp_path / "bundle")
    assert opened.case.ranks == 1
    assert len(opened.case.run.measured) == 7
