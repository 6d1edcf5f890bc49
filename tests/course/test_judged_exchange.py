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


def test_a_rank_that_waits_for_nothing_does_not_fill_the_checks_memory(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(exchange_module, "HELD_BYTES", 100 * 2**20)
    large = [torch.zeros(5 * 2**20)]  # of which the log keeps nothing
    exchange = Exchange()
    for _ in range(20):
        tickets = [
            exchange.launch(rank, "all", [0, 1], "broadcast", [0], large) for rank in range(2)
        ]
        for rank, ticket in enumerate(tickets):
            exchange.wait(rank, ticket)
    small = [torch.zeros(2**18)]  # of which it keeps all

    def launch_large() -> None:
        exchange.launch(0, "all", [0, 1], "broadcast", [0], large)

    def launch_small() -> None:
        exchange.wait(0, exchange.launch(0, "own", [0], "all_reduce", ["SUM"], small))

    for launch, most in ((launch_large, 4), (launch_small, 99)):
        exchange = Exchange()
        for _ in range(most):
            launch()
        with pytest.raises(Unmatched, match=r"rank 0's \w+ makes more than 100 MiB"):
            launch()


def test_what_is_not_offered_is_refused_and_not_passed_on() -> None:
    exchange = Exchange(["send", "recv"])
    with pytest.raises(PermissionError, match="all_reduce is not offered"):
        exchange.launch(0, "all", [0], "all_reduce", ["SUM"], ONES)
    assert exchange.log == []
