"""A pytest plugin that writes down what bad input is answered with, for the guard.

``conftest.py`` registers it where GUARD_MESSAGES names a folder. Noted are the messages of errors
raised in this process, and lines such as ``error: …`` that processes and ranks have printed.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
from collections.abc import Iterable
from pathlib import Path
from unittest import mock

import pytest
from rank_support import FinishedRanks, RankServer

from common.errors import RunFailed, UserError

SAID = re.compile(r"^(?:error|failed|stopped|interrupted)\b.*$", re.MULTILINE)
CHANCE = "lost another rank"
"""In the message of a rank that sees another one's end, or not, as it happens to run."""
GROUP = re.compile(r"@\w+$")
"""What pytest-xdist adds to a test's name."""


class MessageNotes:
    """Notes each message with the test that it was said to."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._path = folder / f"{os.environ.get('PYTEST_XDIST_WORKER', 'main')}.jsonl"
        self._path.unlink(missing_ok=True)
        self._test = ""

    def note(self, message: str) -> None:
        """Appends a message with the test that it was said to."""
        if self._test and CHANCE not in message:
            with self._path.open("a") as file:
                file.write(json.dumps([self._test, message]) + "\n")

    def note_said(self, outputs: Iterable[str | bytes | None]) -> None:
        """Notes the lines of standard outputs and errors that are messages."""
        for output in outputs:
            text = output.decode(errors="replace") if isinstance(output, bytes) else output
            for line in SAID.findall(text or ""):
                self.note(line)

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_call(self, item: pytest.Item) -> object:
        """Notes what is said while a test runs."""
        if not getattr(getattr(item, "obj", None), "is_hypothesis_test", False):  # random input
            self._test = GROUP.sub("", item.nodeid.removeprefix("tests/"))
        plain = {kind: kind.__init__ for kind in (UserError, RunFailed)}
        communicate, run_ranks = subprocess.Popen.communicate, RankServer.run

        def initialise(error: Exception, *words: object, **options: object) -> None:
            plain[type(error) if type(error) in plain else UserError](error, *words, **options)
            self.note(f"{type(error).__name__}: {error}")

        def listen(process: subprocess.Popen, *words: object, **options: object) -> tuple:
            outputs = communicate(process, *words, **options)
            self.note_said(outputs)
            return outputs

        def listen_to_ranks(server: RankServer, *words: object, **options: object) -> FinishedRanks:
            done = run_ranks(server, *words, **options)
            self.note_said(done.stderr)
            return done

        with (
            mock.patch.object(UserError, "__init__", initialise),
            mock.patch.object(RunFailed, "__init__", initialise),
            mock.patch.object(subprocess.Popen, "communicate", listen),
            mock.patch.object(RankServer, "run", listen_to_ranks),
        ):
            try:
                return (yield)
            finally:
                self._test = ""
