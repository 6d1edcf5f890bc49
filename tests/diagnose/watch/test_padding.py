"""Padding is counted where there is some, and nothing else is taken for it."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch
from ddplab_watch.batches import counts
from ddplab_watch.feed import Feed
from watch_support import MAIN, SCRIPTS, rows_of, short_watch


def texts_of(lengths: list[int], longest: int, pad: int = 0) -> torch.Tensor:
    numbers = torch.randint(1, 50, (len(lengths), longest), generator=torch.manual_seed(0))
    is_text = torch.arange(longest) < torch.tensor(lengths)[:, None]
    return torch.where(is_text, numbers, pad)


@pytest.mark.parametrize("pad", [0, -1, 50256])
@pytest.mark.parametrize(("lengths", "longest"), [([3, 9, 20, 8, 8], 20), ([3, 9, 8, 5], 30)])
def test_padding_without_a_mask_is_counted(lengths: list[int], longest: int, pad: int) -> None:
    # Padded to the longest of the batch, and to a length that no text has.
    texts = texts_of(lengths, longest, pad)
    for padded in (texts, texts.flip(1)):  # behind the texts, and before them
        counted = counts((padded, torch.zeros(len(lengths))))
        assert counted["tokens"] == sum(lengths)
        assert counted["padded_tokens"] == counted["elements"] == len(lengths) * longest


def test_batches_of_equally_long_texts_show_padding_by_other_batches() -> None:
    seen: dict[int, set[int]] = {}
    batches = [texts_of([length] * 6, 30) for length in (10, 10, 12, 10, 30)]
    assert [counts(b, seen)["tokens"] for b in batches] == [6 * n for n in (30, 30, 12, 10, 30)]


def test_words_of_sounds_are_not_what_a_pass_computes() -> None:
    words = texts_of([3, 9, 20, 8], 20)
    assert counts((torch.ones(4, 80, 50), words))["tokens"] == words.numel()
    labels = torch.tensor([1, 0, 0, 0, 0, 0, 0, 0])
    assert counts((torch.ones(8, 20), labels))["tokens"] == 8


@pytest.mark.parametrize("turned", [False, True], ids=["vectors in rows", "channels first"])
def test_vectors_of_zeros_at_the_ends_of_sounds_are_padding(turned: bool) -> None:
    lengths = [30, 50, 44, 18]
    is_sound = torch.arange(60) < torch.tensor(lengths)[:, None]
    sounds = torch.randn(4, 60, 80, generator=torch.manual_seed(0)) * is_sound[:, :, None]
    sounds[:, :, 20:30] = 0  # masked bands
    for padded in (sounds, sounds.flip(1)):
        batch = padded.transpose(1, 2) if turned else padded
        counted = counts((batch, torch.tensor(lengths)))
        assert counted["tokens"] == 80 * sum(lengths)
        assert counted["padded_tokens"] == counted["elements"] == 4 * 60 * 80


DIGITS = torch.zeros(6, 28, 28)
for number, digit in enumerate(DIGITS):
    digit[4 : 20 + number % 3, 6 : 18 + number % 4] = 1.0
NUMBERS = torch.manual_seed(1)
SEPARATED = torch.randint(1, 50, (8, 40), generator=NUMBERS)
SEPARATED[:, [10, 21, 39]] = 0
LAST_EQUAL = torch.randint(1, 50, (8, 40), generator=NUMBERS)
LAST_EQUAL[:6, 39] = 0
CLASS_MAPS = torch.zeros(8, 40, dtype=torch.long)
CLASS_MAPS[:, 12:25] = 3
UNUSED_COLUMNS = torch.randint(1, 50, (8, 40), generator=NUMBERS)
UNUSED_COLUMNS[:, 34:] = 0


@pytest.mark.parametrize(
    "batch",
    [
        torch.randint(0, 2, (16, 40), generator=NUMBERS),
        torch.randint(0, 256, (16, 784), generator=NUMBERS).clamp(min=128) - 128,
        torch.nn.functional.one_hot(torch.arange(16) % 10, 12),
        torch.zeros(16, 40, dtype=torch.long),
        SEPARATED,
        LAST_EQUAL,
        torch.arange(16 * 40).reshape(16, 40) % 7,
        texts_of([8, 30, 30, 30, 30, 30], 30),
        texts_of([4, 2, 5], 30),
        torch.randint(1, 50, (8, 40), generator=NUMBERS),
        CLASS_MAPS,
        UNUSED_COLUMNS,
        DIGITS,
        torch.zeros(6, 28, 28),
        torch.randn(6, 96, 7, generator=NUMBERS).relu(),
    ],
    ids=[
        "many labels",
        "pixels with black edges",
        "one-hot",
        "all zero",
        "packed texts",
        "a feature in the last column",
        "counting",
        "few of the texts",
        "too few texts",
        "texts of one length",
        "class maps",
        "unused columns",
        "images without channels",
        "no sound",
        "rectified series",
    ],
)
def test_nothing_else_is_taken_for_padding(batch: torch.Tensor) -> None:
    seen: dict[int, set[int]] = {}
    for rows in (batch, batch.flip(0)):
        counted = counts(rows, seen)
        assert counted["tokens"] == counted["padded_tokens"] == batch.numel()


def test_a_mask_is_believed() -> None:
    mask = torch.ones(8, 40, dtype=torch.long)
    mask[:3, 30:] = 0
    assert counts({"input_ids": SEPARATED, "attention_mask": mask})["tokens"] == 8 * 40 - 3 * 10


def test_a_batch_on_a_gpu_is_counted_as_it_was_loaded() -> None:
    class Loader:
        """Stands for a loader's iterator."""

    feed, texts = Feed(), texts_of([3, 9, 20, 8], 20)
    feed.counts_tokens = True
    iterator = Loader()
    feed._epoch_of[iterator] = 0
    feed.fetch(iterator, [0, 1, 2, 3], {"input_ids": texts})
    on_device = {"input_ids": texts.to("meta")}  # as a GPU's, whose numbers cannot be read here
    assert counts(on_device)["tokens"] == 80
    assert feed.tokens_of(counts(on_device)) == 40
    assert feed.tokens_of(counts({"input_ids": texts[:, :10].to("meta")})) == 40  # of no such shape


def test_a_pass_of_usual_size_stands_for_all(rank_server, tmp_path: Path) -> None:
    # Rank 0's last batch has texts of 8 tokens only, nearly all others have some of 40.
    words = (*short_watch(tmp_path), SCRIPTS / "padded.py", 411, 12)
    done = rank_server.run(MAIN, *words, ranks=2)
    assert done.exit_codes == [0, 0], "\n".join(done.stderr)
    numbers = random.Random(1)
    lengths = [40 if numbers.random() < 0.25 else 8 for _ in range(4096)]
    for rank in (0, 1):
        steps = [row for row in rows_of(tmp_path, rank, "steps") if not row["warmup"]]
        [identities] = rows_of(tmp_path, rank, "identities")
        for number, row in enumerate(steps):
            own = [lengths[sample] for sample in identities["samples"][number * 16 :][:16]]
            assert (row["tokens"], row["padded_tokens"]) == (sum(own), 16 * max(own))
        assert (steps[-1]["longest"] == 8) == (rank == 0)
        sizes = {row["size"]: row["elements"] for row in rows_of(tmp_path, rank, "probes")}
        assert sizes == {1.0: 16 * 40, 0.5: 8 * 40, 2.0: 32 * 40}
        # The output's gradient was that of another batch; passes with an exchange ran, too.
        assert len(rows_of(tmp_path, rank, "passes-exchanging")) == 5 * 3
