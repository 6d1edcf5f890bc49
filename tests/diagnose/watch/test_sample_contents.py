"""Ranks with data of their own are told from ranks that go through the same samples."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch
from bundle_support import add_rows, change_rows, opened, write_bundle
from ddplab_watch import hooks
from ddplab_watch.batches import CHECKED_TENSORS, checksums
from ddplab_watch.feed import Feed
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import (
    DataLoader,
    Dataset,
    RandomSampler,
    TensorDataset,
    WeightedRandomSampler,
    default_collate,
)

from common.diagnose.causes.validity import wrong_sampler
from common.diagnose.evidence.case import Verdict
from common.diagnose.evidence.evidence import NotJudged

NUMBERS = torch.manual_seed(1)
IMAGES = [*torch.randn(240, 3, 40, 40, generator=NUMBERS)]
LABELED = list(zip(IMAGES, torch.randint(0, 10, (240,), generator=NUMBERS), strict=True))
TEXTS = [
    torch.randint(1, 900, (length,), generator=NUMBERS)
    for length in torch.randint(4, 30, (240,), generator=NUMBERS).tolist()
]


class Shifted(Dataset):
    """Samples whose images are changed at random each time."""

    def __init__(self, samples: Sequence) -> None:
        self.samples = samples

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, index: int) -> object:
        sample = self.samples[index]
        noise = torch.randn(3, 1, 1)
        return sample + noise if torch.is_tensor(sample) else (sample[0] + noise, *sample[1:])


def pad(texts: list[torch.Tensor]) -> torch.Tensor:
    """Pads texts to the longest of their batch."""
    return pad_sequence(texts, batch_first=True)


def noted(loader: DataLoader, epochs: int) -> list[dict]:
    """Returns what a watch notes of the samples of a loader."""
    feed, kept = Feed(), hooks.Hooks()

    def ended(_: None, iterator: object, ids: object, batch: object) -> None:
        feed.count_epochs(iterator)
        feed.keep(feed.fetch(iterator, ids, batch))

    hooks.watch_fetches(kept, lambda: None, ended, lambda: None)
    try:
        for _ in range(epochs):
            assert list(loader)
    finally:
        kept.remove()
    return [{"table": "identities"} | row for row in feed.rows()]


def bundle_of(folder: Path, of_ranks: Sequence, epochs: int = 1, **settings: object) -> Path:
    """Writes the bundle of ranks that go through data of theirs, each in an order of its own."""
    bundle = write_bundle(folder / "b")
    for rank, data in enumerate(of_ranks):
        torch.manual_seed(rank)
        rows = noted(DataLoader(data, 12, **{"shuffle": True} | settings), epochs)
        add_rows(bundle, *rows, ranks=(rank,))
    return bundle


def judged(folder: Path, of_ranks: Sequence, **settings: object) -> Verdict | None:
    return wrong_sampler(opened(bundle_of(folder, of_ranks, **settings)))


def test_a_data_set_that_is_made_anew_for_each_epoch_is_in_its_next_one() -> None:
    feed, epochs = Feed(), []
    for _ in range(3):
        iterator = iter(DataLoader(TensorDataset(torch.ones(8, 2)), 4))
        feed.count_epochs(iterator)
        epochs.append(feed.fetch(iterator, [0], torch.ones(1, 2)).epoch)
    assert epochs == [0, 1, 2]


def halves(samples: list, change: Callable = list) -> list:
    """Returns a partition for each of two ranks."""
    return [change(samples[rank::2]) for rank in (0, 1)]


@pytest.mark.parametrize(
    ("of_ranks", "settings"),
    [
        (halves(IMAGES), {}),
        (halves(LABELED), {"epochs": 2}),
        (halves(LABELED, Shifted), {}),
        (halves(TEXTS), {"collate_fn": pad}),
    ],
    ids=["images", "images with labels", "images that change", "texts"],
)
def test_partitions_of_ranks_are_no_wrong_sampler(
    tmp_path: Path, of_ranks: list, settings: dict
) -> None:
    assert judged(tmp_path, of_ranks, **settings) is None


@pytest.mark.parametrize(
    ("data", "settings"),
    [
        (IMAGES, {}),
        (Shifted(LABELED), {}),
        (Shifted(IMAGES), {"epochs": 2}),
        (TEXTS, {"collate_fn": pad}),
        (list(map(str, range(240))), {}),
        ([torch.eye(3).to_sparse()] * 240, {"collate_fn": torch.stack}),
    ],
    ids=["images", "changing, labels", "changing, met twice", "texts", "words", "sparse"],
)
def test_ranks_without_a_distributed_sampler_are_named(
    tmp_path: Path, data: Sequence, settings: dict
) -> None:
    verdict = judged(tmp_path, [data, data], **settings)
    assert verdict.title.startswith("no distributed sampler")
    assert verdict.confidence == "high"


BUCKETS = [LABELED[at : at + 12] for at in range(0, 240, 12)]


@pytest.mark.parametrize("divides", [True, False], ids=["a part each", "the same"])
@pytest.mark.parametrize(
    ("data", "batch"), [(LABELED, 12), (BUCKETS, None)], ids=["samples", "buckets"]
)
def test_ranks_may_fetch_the_same_and_collate_a_part_each(
    tmp_path: Path, data: Sequence, batch: int | None, divides: bool
) -> None:
    bundle = write_bundle(tmp_path / "b")
    for rank in (0, 1):
        torch.manual_seed(1)
        part = slice(rank, None, 2) if divides else slice(1, None, 2)
        loader = DataLoader(
            data, batch, shuffle=True, collate_fn=lambda got, part=part: default_collate(got[part])
        )
        add_rows(bundle, *noted(loader, 2), ranks=(rank,))
    verdict = wrong_sampler(opened(bundle))
    assert (verdict is None) == divides
    assert divides or verdict.title.startswith("no distributed sampler")


def test_a_partition_that_is_drawn_from_with_replacement_is_named(tmp_path: Path) -> None:
    parts = halves(IMAGES)
    bundle = write_bundle(tmp_path / "b")
    for rank, data in enumerate(parts):
        sampler = RandomSampler(data, replacement=True)
        add_rows(bundle, *noted(DataLoader(data, 12, sampler=sampler), 1), ranks=(rank,))
    verdict = wrong_sampler(opened(bundle))
    assert "more than once" in verdict.title
    assert "The data set has 200 samples" in " ".join(verdict.evidence)  # 100 of each rank


@pytest.mark.parametrize("seeds", [(1, 2), (1, 1)], ids=["of each rank", "the same"])
def test_a_sampler_that_draws_by_weights_is_wrong_if_all_ranks_draw_the_same(
    tmp_path: Path, seeds: tuple[int, int]
) -> None:
    bundle = write_bundle(tmp_path / "b")
    for rank, seed in enumerate(seeds):
        weights = torch.arange(1.0, 241.0)
        drawn = WeightedRandomSampler(weights, 120, generator=torch.manual_seed(seed))
        loader = DataLoader(IMAGES, 12, sampler=drawn)
        add_rows(bundle, *noted(loader, 2), ranks=(rank,))
    if seeds[0] == seeds[1]:
        verdict = wrong_sampler(opened(bundle))
        assert verdict.title.startswith("no distributed sampler")
        assert "generator" in verdict.change
        return
    with pytest.raises(NotJudged, match="draws by weights"):
        wrong_sampler(opened(bundle))


def test_a_bundle_of_an_earlier_watch_is_judged_by_indices(tmp_path: Path) -> None:
    bundle = bundle_of(tmp_path, halves(IMAGES))
    change_rows(bundle, lambda row: {k: v for k, v in row.items() if k != "checksums"})
    assert wrong_sampler(opened(bundle)).title.startswith("no distributed sampler")


def test_ranks_pick_the_same_samples_of_batches_in_another_order() -> None:
    images, indices = torch.stack(IMAGES[:30]), torch.arange(30)
    order = torch.randperm(30, generator=torch.manual_seed(2))
    first, second = (checksums([images[o]], indices[o].tolist()) for o in (indices, order))
    assert first == second
    assert len(first) == 8
    # A list with an item for each sample, here three images of three channels, has no rows.
    ((number, *sums),) = checksums({"images": IMAGES[:3]}, [0, 1, 2])
    assert number < 0
    assert len(sums) == 3
    # As many fields as samples have: two images, and their two labels.
    labels = torch.arange(2)
    assert [len(row) for row in checksums([torch.stack(IMAGES[:2]), labels], [0, 1])] == [3, 3]


def test_how_a_batch_lies_in_memory_changes_no_checksum() -> None:
    images, indices = torch.stack(IMAGES[:30]), list(range(30))
    turned = images.to(memory_format=torch.channels_last)
    assert checksums(turned, indices) == checksums(images, indices)


def test_of_a_batch_with_a_tensor_for_each_word_the_first_ones_are_looked_at() -> None:
    by_word = [torch.arange(30)] * 512
    assert {len(row) for row in checksums(by_word, list(range(30)))} == {1 + CHECKED_TENSORS}


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_tensors_that_have_no_rows_leave_the_training_alone() -> None:
    class Loader:
        """Stands for a loader's iterator."""

    feed, iterator = Feed(), Loader()
    feed.count_epochs(iterator)
    ragged = torch.nested.nested_tensor([torch.ones(3), torch.ones(2)])
    unread = torch.empty(2, device="meta")
    fetch = feed.fetch(iterator, [4, 5], {"ragged": ragged, "unread": unread})
    assert (fetch.identities, fetch.checksums) == ([4, 5], [])
