"""What a script says to settings that it refuses, without a process of its own."""

from __future__ import annotations

import contextlib
import io
import os
import runpy
import sys
from collections.abc import Mapping
from pathlib import Path
from unittest import mock

import pytest


def refused_line(script: Path, *flags: object, variables: Mapping[str, str] | None = None) -> str:
    """Runs ``python script flags`` in this process, and returns the one line of its refusal.

    Fails unless it ends with exit status 2. ``variables`` are added to the environment. What a
    script changes in its process for as long as it lives, the end on SIGTERM, is left out.
    """
    said = io.StringIO()
    with (
        mock.patch.object(sys, "argv", [str(script), *map(str, flags)]),
        mock.patch.dict(os.environ, variables or {}),
        mock.patch("common.runtime.script.leave_when_terminated"),
        contextlib.redirect_stderr(said),
        pytest.raises(SystemExit) as stop,
    ):
        runpy.run_path(str(script), run_name="__main__")
    assert stop.value.code == 2, said.getvalue()
    [line] = said.getvalue().splitlines()
    assert line.startswith("error: ")
    return line
