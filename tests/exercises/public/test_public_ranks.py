"""Assignments 1 and 2 on ranks: each check of ``ranks_worker.py`` in processes of its own."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

WORKER = Path(__file__).with_name("ranks_worker.py")
CHECKS = re.findall(r'^    "(A\d\.\d [^"]+)":', WORKER.read_text(), re.MULTILINE)


@pytest.mark.two_ranks
@pytest.mark.parametrize("check", CHECKS)
def test_on_ranks(rank_server, check: str) -> None:
    ranks = 3 if check.startswith("A1.1") else 2
    done = rank_server.run(WORKER, check, ranks=ranks)
    if any(done.exit_codes):
        # What one rank raised; the others may only say that it has gone.
        first = min(done.stderr, key=lambda text: ("AssertionError" not in text, not text))
        pytest.fail(first or f"{check}: the ranks ended with {done.exit_codes}")
