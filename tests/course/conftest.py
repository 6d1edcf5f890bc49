"""Reading of hand-ins without a process for each."""

from __future__ import annotations

import json
from collections.abc import Callable

import pytest

from common.course.grading import limited, plausibility


@pytest.fixture
def read_here(monkeypatch: pytest.MonkeyPatch) -> None:
    """Reads hand-ins in this process, which none of them is to harm.

    The process that reads them otherwise is tried in test_pool.py, test_grade.py, test_answers.py.
    """

    def read(function: Callable, cpu_s: int = 0, **arguments: object) -> object:
        return json.loads(json.dumps(function(**arguments)))

    monkeypatch.setattr(limited, "limited", read)
    monkeypatch.setattr(plausibility, "limited", read)
