"""Bytecode that processes share on systems where Python is told to write none.

Images of containers often set PYTHONDONTWRITEBYTECODE, and uv installs without compiling. Every
process that imports torch then compiles a thousand modules, which takes six seconds.
"""

from __future__ import annotations

import importlib.util
import os
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

OFF, FOLDER = "PYTHONDONTWRITEBYTECODE", "PYTHONPYCACHEPREFIX"


def compiled_anew() -> bool:
    """Returns True if each process compiles torch: no bytecode is there or will be written."""
    torch = importlib.util.find_spec("torch")
    if not sys.dont_write_bytecode or torch is None or torch.origin is None:
        return False
    return not Path(importlib.util.cache_from_source(torch.origin)).exists()


def keep_bytecode(folder: Path) -> None:
    """Makes this process and those that it starts keep their bytecode in ``folder``."""
    os.environ.pop(OFF, None)
    os.environ[FOLDER] = sys.pycache_prefix = str(folder)
    sys.dont_write_bytecode = False


@contextmanager
def shared_bytecode() -> Iterator[None]:
    """Makes processes started inside the block share bytecode, which is removed at the end.

    Each module is then compiled once. Where Python keeps bytecode anyway, nothing changes.
    """
    if not compiled_anew():
        yield
        return
    before = {name: os.environ.get(name) for name in (OFF, FOLDER)}
    prefix = sys.pycache_prefix
    # A process that has just been told to end may still write.
    with tempfile.TemporaryDirectory(prefix="ddplab-", ignore_cleanup_errors=True) as folder:
        keep_bytecode(Path(folder))
        try:
            yield
        finally:
            sys.dont_write_bytecode, sys.pycache_prefix = True, prefix
            for name, value in before.items():
                os.environ.pop(name, None)
                if value is not None:
                    os.environ[name] = value
