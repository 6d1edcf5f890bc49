"""Passes that send their gradients as DDP does, and what a diagnosis takes from them."""

from __future__ import annotations

import json

import pytest
from watch_support import SCRIPTS


@pytest.fixture(scope="module")
def exchanged(rank_server, tmp_path_factory) -> list[list[dict]]:
    """Runs exchange.py on two ranks; returns what each of them wrote of each case."""
    folder = tmp_path_factory.mktemp("exchange")
    done = rank_server.run(SCRIPTS / "exchange.py", folder, ranks=2)
    assert done.exit_codes == [0, 0], "\n".join(done.stderr)
    return [json.loads((folder / f"out-{rank}.json").read_text()) for rank in (0, 1)]


@pytest.mark.xdist_group("exchange")
def test_gradients_are_those_of_ddp_in_its_own_buckets(exchanged) -> None:
    for *told, _ in exchanged:
        assert [len(each["sizes"]) for each in told] == [4, 2, 1]
        for each in told:
            assert each["sent"] == each["sizes"]
            assert each["difference"] < 1e-6
            assert not each["failed"]


@pytest.mark.xdist_group("exchange")
def test_a_pass_that_fails_on_one_rank_leaves_no_rank_waiting(exchanged) -> None:
    first, second = (told[-1] for told in exchanged)
    assert (first["failed"], second["failed"]) == (False, True)


@pytest.mark.parametrize("level", ["DETAIL", "OFF"])
def test_exchanges_are_timed_without_the_checks_that_a_debug_level_adds(
    rank_server, tmp_path, level: str
) -> None:
    done = rank_server.run(SCRIPTS / "unchecked.py", tmp_path, level, ranks=2)
    assert done.exit_codes == [0, 0], "\n".join(done.stderr)
    for rank in (0, 1):
        told = json.loads((tmp_path / f"out-{rank}.json").read_text())
        for sums in told["sums"]:  # with the checks and without, gradients are the ranks' mean
            assert sums == pytest.approx(told["mean"], rel=1e-5)
        rows = told["rows"]
        assert {row["without"] for row in rows} == (
            {"checks of each exchange"} if level == "DETAIL" else set()
        )
        assert [row["lean"] for row in rows].count(True) == len(rows) / 2
