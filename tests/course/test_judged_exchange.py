"""What the exchange says of ranks that do not launch the same."""

from __future__ import annotations

import pytest
import torch

from common.course.sandbox import exchange as exchange_module
from common.course.sandbox.exchange import Exchange, Unmatched

ONES = [torch.ones(3)]


def test_ranks_that_launch_different_operations_hear_which() -> None:
    exchange = Exchange()
    tickets = [
        exchange.launch(0, "all", [0, 1], "all_reduce", ["SUM"], ONES),
        exchange.launch(1, "all", [0, 1], "all_reduce", ["SUM"], [torch.ones(4)]),
    ]
    for rank, ticket in enumerate(tickets):
        with pytest.raises(Unmatched, match=r"rank 0 launches .*\[3\].* where rank 1 .*\[4\]"):
            exchange.wait(rank, ticket)


def test_a_rank_that_does_not_come_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(exchange_module, "LONGEST_S", 0.01)
    exchange = Exchange()
    ticket = exchange.launch(1, "all", [0, 1, 2], "broadcast", [1], ONES)
    with pytest.raises(Unmatched, match="rank 1 waits in broadcast, which rank 0 does not launch"):
        exchange.wait(1, ticket)


def test_nobody_exchanges_with_himself_in_a_group_of_others() -> None:
    exchange = Exchange()
    exchange.launch(0, "all", [0, 1], "all_reduce", ["SUM"], ONES)
    with pytest.raises(Unmatched, match="rank 1 has other ranks in group all"):
        exchange.launch(1, "all", [1], "all_reduce", ["SUM"], ONES)


def test_what_is_not_offered_is_refused_and_not_passed_on() -> None:
    exchange = Exchange(["send", "recv"])
    with pytest.raises(PermissionError, match="all_reduce is not offered"):
        exchange.launch(0, "all", [0], "all_reduce", ["SUM"], ONES)
    assert exchange.log == []
