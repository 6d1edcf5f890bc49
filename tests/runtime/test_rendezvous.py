"""Attempts of ranks over one store: those of one attempt agree, dead ranks are not heard."""

import random
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch.distributed as dist

from common.errors import RunFailed
from common.runtime.group.rendezvous import agree_on_attempt


def attempt(store: dist.Store, ranks: int, delays_s: list[float]) -> set[str]:
    """Returns the names that ranks end up with, each coming after its delay."""

    def come(rank: int) -> str:
        time.sleep(delays_s[rank])
        return agree_on_attempt(store, rank, ranks, limit_s=10)

    with ThreadPoolExecutor(ranks) as threads:
        return set(threads.map(come, range(ranks)))


@pytest.mark.parametrize("ranks", [1, 2, 5])
def test_every_attempt_has_a_name_of_its_own_that_all_ranks_share(ranks: int) -> None:
    store, names = dist.HashStore(), set()
    delays = random.Random(ranks)
    for number in range(1, 6):
        found = attempt(store, ranks, [delays.random() * 0.05 for _ in range(ranks)])
        assert len(found) == 1
        names |= found
        assert len(names) == number


@pytest.mark.parametrize("late", [0, 2])
def test_an_attempt_that_broke_off_before_all_came_does_not_mislead_the_next(late: int) -> None:
    store = dist.HashStore()
    # All but one say their word and die; so do all of another attempt, in the middle of it.
    with ThreadPoolExecutor(3) as threads:
        early = [rank for rank in range(3) if rank != late]
        broken = [threads.submit(agree_on_attempt, store, rank, 3, 0.1) for rank in early]
        for one in broken:
            with pytest.raises(RunFailed, match="not all 3 ranks were there"):
                one.result()
    # The rank that comes last decides nothing alone: the others have to be heard anew.
    delays = [0.0, 0.0, 0.0]
    delays[late] = 0.2
    assert len(attempt(store, 3, delays)) == 1
