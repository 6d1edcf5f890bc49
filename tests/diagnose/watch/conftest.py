"""Runs of loop.py, each of which is made once and read by all tests that ask for it."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path

import pytest
from rank_support import RankServer
from watch_support import assert_same, run_loop


@pytest.hookimpl(tryfirst=True)  # before groups are ordered and read
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Gives tests that share runs the same worker."""
    for item in items:
        if "loop_run" in getattr(item, "fixturenames", ()):
            item.add_marker(pytest.mark.xdist_group("loop_runs"))


@pytest.fixture(scope="session")
def loop_run(rank_server: RankServer, tmp_path_factory: pytest.TempPathFactory) -> Callable:
    """Returns ``loop_run(*flags, count=2, watched=True, **settings)``, which runs loop.py.

    It returns the folder and what each rank computed; runs with equal arguments are one.
    """

    @functools.cache
    def run_once(flags: tuple, count: int, watch: frozenset | None) -> tuple[Path, list[dict]]:
        folder = tmp_path_factory.mktemp("loop")
        settings = None if watch is None else dict(watch)
        return folder, run_loop(rank_server.run, folder, *flags, count=count, watch=settings)

    def run(
        *flags: object, count: int = 2, watched: bool = True, **settings: int
    ) -> tuple[Path, list[dict]]:
        return run_once(flags, count, frozenset(settings.items()) if watched else None)

    return run


@pytest.fixture
def compared_run(loop_run: Callable) -> Callable:
    """Returns ``compared_run(*flags, only_watched=(), count=2, **settings)``.

    It runs the loop both ways, watched with further flags, and compares what they computed to the
    last bit. It returns the watched one's folder.
    """

    def run(*flags: object, only_watched: tuple = (), count: int = 2, **settings: int) -> Path:
        _, expected = loop_run(*flags, count=count, watched=False)
        folder, found = loop_run(*flags, *only_watched, count=count, **settings)
        assert_same(expected, found)
        return folder

    return run
