"""Bytecode is shared where Python keeps none, in a folder that goes, and never beside sources."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from common.runtime.processes import bytecode

# Where bytecode was kept it is replaced by that of another word, which a child says that reads it.
PROGRAM = """
import json, os, runpy, subprocess, sys
from pathlib import Path
shared_bytecode = runpy.run_path(sys.argv[1])["shared_bytecode"]

def ask():
    child = [sys.executable, "-c", "import torch; print(torch.WORD, torch.__cached__)"]
    return subprocess.run(child, capture_output=True, text=True, check=True).stdout.split()

def how():
    return dict(os.environ), sys.dont_write_bytecode, sys.pycache_prefix

before = how()
with shared_bytecode():
    cached = Path(ask()[1])
    if cached.exists():
        cached.write_bytes(cached.read_bytes().replace(b"compiled", b"replaced"))
    word, _ = ask()
print(json.dumps([word, str(cached), cached.exists(), how() == before]))
"""


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """Writes something small that is called torch."""
    path = tmp_path / "torch" / "__init__.py"
    path.parent.mkdir()
    path.write_text('WORD = "compiled"\n')
    return path


def run(source: Path, **variables: str) -> list:
    """Returns the second child's word, its bytecode, if that is left, and if all is restored."""
    environment = {k: v for k, v in os.environ.items() if not k.startswith("PYTHON")}
    environment["PYTHONPATH"] = str(source.parents[1])
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, bytecode.__file__],
        env=environment | variables,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_where_python_keeps_none_children_share_a_folder_that_goes(source, tmp_path):
    word, cached, left, restored = run(source, PYTHONDONTWRITEBYTECODE="1")
    assert word == "replaced"  # the second child read what the first had compiled
    assert not cached.startswith(str(tmp_path))
    assert (left, restored) == (False, True)
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == [source]


@pytest.mark.parametrize("variables", [{}, {"PYTHONPYCACHEPREFIX": "elsewhere"}])
def test_where_python_keeps_it_nothing_changes(source, tmp_path, variables):
    variables = {name: str(tmp_path / value) for name, value in variables.items()}
    word, cached, left, restored = run(source, **variables)
    assert (word, left, restored) == ("replaced", True, True)
    assert cached.startswith(str(tmp_path))


def test_bytecode_that_was_made_at_installation_is_used(source):
    subprocess.run([sys.executable, "-m", "compileall", "-q", source.parent], check=True, env={})
    word, cached, left, restored = run(source, PYTHONDONTWRITEBYTECODE="1")
    assert (word, left, restored) == ("replaced", True, True)
    assert cached.startswith(str(source.parent))
