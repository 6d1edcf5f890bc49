"""Passes that send their gradients as DDP does, and what a diagnosis takes from them."""

from __future__ import annotations

import pytest
from watch_support import SCRIPTS, run_ranks


@pytest.fixture(scope="module")
def exchanged(rank_server, tmp_path_factory) -> list[list[dict]]:
    """Runs exchange.py on two ranks; returns what each of them wrote of each case."""
    folder = tmp_path_factory.mktemp("exchange")
    return run_ranks(rank_server.run, folder, SCRIPTS / "exchange.py", folder)


def test_gradients_are_those_of_ddp_in_its_own_buckets(exchanged) -> None:
    for *told, _ in exchanged:
        assert [len(each["sizes"]) for each in told] == [4, 2, 1]
        for each in told:
            assert each["sent"] == each["sizes"]
            assert each["difference"] < 1e-6
            assert not each["failed"]


def test_a_pass_that_fails_on_one_rank_leaves_no_rank_waiting(exchanged) -> None:
    first, second = (told[-1] for told in exchanged)
    assert (first["failed"], second["failed"]) == (False, True)


@pytest.mark.parametrize("level", ["DETAIL", "OFF"])
def test_exchanges_are_timed_without_the_checks_that_a_debug_level_adds(
    rank_server, tmp_path, level: str
) -> None:
    for told in run_ranks(rank_server.run, tmp_path, SCRIPTS / "unchecked.py", tmp_path, level):
        for sums in told["sums"]:  # with the checks and without, gradients are the ranks' mean
            assert sums == pytest.approx(told["mean"], rel=1e-5)
        rows = told["rows"]
        assert {row["without"] for row in rows} == (
            {"checks of each exchange"} if level == "DETAIL" else set()
        )
        assert [row["lean"] for row in rows].count(True) == len(rows) / 2
