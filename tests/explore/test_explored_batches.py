"""What the explorer computes of micro-batches, against brute force."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from common.data.text_lengths import LengthDistribution, read_text_lengths
from common.errors import NotYetWritten
from common.explore import micro_batches
from common.explore.micro_batches import OPTIMUM, PLANS, STATIC, BatchSettings, divide, rectangles

SHORT = LengthDistribution.of([3, 5, 8, 13, 21, 34, 55], "few")


def best_of_all(lengths: list[int], ranks: int) -> int:
    """Returns the smallest bottleneck of every way to give each text a rank."""
    found = []
    for given in itertools.product(range(ranks), repeat=len(lengths)):
        if len(set(given)) < ranks:
            continue
        own = [[n for n, rank in zip(lengths, given, strict=True) if rank == r] for r in set(given)]
        found.append(max(len(texts) * max(texts) for texts in own))
    return min(found)


@pytest.mark.parametrize("seed", range(4))
def test_the_optimum_is_that_of_all_partitions(seed: int) -> None:
    view = divide(SHORT, BatchSettings(ranks=3, texts=2, seed=seed, plan=OPTIMUM))
    assert view.bottlenecks[OPTIMUM] == best_of_all(view.lengths.tolist(), 3)
    assert view.lower_bound <= view.bottlenecks[OPTIMUM] == max(view.padded)


@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("name", ["sst2", "ag_news", "imdb"])
def test_every_text_has_one_rank_and_no_plan_is_below_the_bound(name: str, plan: str) -> None:
    settings = BatchSettings(ranks=8, texts=4, max_length=256, seed=1, plan=plan)
    view = divide(read_text_lengths(name), settings)
    assert sorted(itertools.chain(*view.groups)) == list(range(32))
    assert view.lengths.max() <= 256
    assert view.unpadded.sum() == view.lengths.sum()
    assert (view.padded >= view.unpadded).all()
    assert view.lower_bound <= min(view.bottlenecks.values())
    assert view.bottlenecks[OPTIMUM] == min(view.bottlenecks.values())
    edges, own, padded = rectangles(view)
    assert np.trapezoid(own, edges) == pytest.approx(view.unpadded.sum())
    assert np.trapezoid(padded, edges) == pytest.approx(view.padded.sum())


def test_the_same_draw_is_the_same_batch() -> None:
    one, again, other = (divide(SHORT, BatchSettings(4, 8, seed=seed)) for seed in (3, 3, 4))
    assert one.lengths.tolist() == again.lengths.tolist() != other.lengths.tolist()


def test_a_plan_that_is_not_written_leaves_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    def not_there(*_: object) -> None:
        raise NotYetWritten("A3.1")

    monkeypatch.setattr(micro_batches, "min_max_contiguous", not_there)
    view = divide(SHORT, BatchSettings(2, 4, plan=OPTIMUM))
    assert view.unwritten == ("A3.1",)
    assert view.groups is None
    assert set(view.bottlenecks) == set(PLANS) - {OPTIMUM}
    assert view.bottlenecks[STATIC] > 0
