"""Cores that a process may use where a container has a quota."""

from __future__ import annotations

import pytest

from common.runtime.machine import environment


@pytest.mark.parametrize(("quota", "cores"), [(None, 8), (2.0, 2), (1.5, 1), (0.5, 1), (64.0, 8)])
def test_a_quota_counts_as_whole_cores(
    monkeypatch: pytest.MonkeyPatch, quota: float | None, cores: int
) -> None:
    monkeypatch.setattr(environment, "own_cores", lambda: range(8))
    monkeypatch.setattr(environment, "cpu_quota", lambda: quota)
    assert environment.usable_cores() == cores
