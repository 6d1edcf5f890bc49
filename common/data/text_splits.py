"""The two splits that a classifier is trained and validated on, loaded or drawn, as tokens."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np

from common.data.text_lengths import read_text_lengths
from common.data.text_sources import LabelledTexts, load_texts
from common.data.text_tokens import SPECIAL_TOKENS, TokenizedTexts, check_max_length
from common.errors import UserError
from common.settings import Settings, is_changed

SYNTHETIC_SAMPLES = {"train": 10_000, "validation": 1_000}
"""Number of synthetic texts of each split where none is given."""
OWN_SHARE = 0.4
"""Share of a synthetic text's tokens that come from its label's words only."""


@dataclass(frozen=True)
class TextOptions:
    """Settings of the texts that a run learns from and is validated on."""

    dataset: str
    """Name of the data set, or ``synthetic``."""
    dataset_dir: str
    """Folder of the local files of a data set."""
    synthetic_like: str
    """The data set whose lengths synthetic texts have."""
    vocab_size: int
    max_length: int
    """Tokens that a text is cut at."""
    train_samples: int
    """Texts of the training split; 0 for all, or SYNTHETIC_SAMPLES."""
    eval_samples: int
    """Texts of the validation split; 0 for all, or SYNTHETIC_SAMPLES."""
    seed: int
    """Seed of the choice of texts; the second split of synthetic texts has the next seed."""


def open_splits(
    options: TextOptions,
    tokenize: Callable[[LabelledTexts, LabelledTexts], list[TokenizedTexts]],
    synthetic_labels: int = 2,
) -> tuple[TokenizedTexts, TokenizedTexts]:
    """Loads or draws the training and the validation split; both know the same classes.

    Args:
        tokenize: turns the texts of both splits into tokens.
        synthetic_labels: number of classes of synthetic texts.

    Raises:
        UserError: the data set is not there, or cannot be read.
    """
    counts = {"train": options.train_samples, "validation": options.eval_samples}
    if options.dataset == "synthetic":
        train, validation = (
            synthetic_texts(
                options.synthetic_like,
                count or SYNTHETIC_SAMPLES[split],
                vocab_size=options.vocab_size,
                num_labels=synthetic_labels,
                max_length=options.max_length,
                seed=seed,
            )
            for seed, (split, count) in enumerate(counts.items(), start=options.seed)
        )
        return train, validation
    loaded = [
        load_texts(
            options.dataset,
            split,
            max_samples=count,
            dataset_dir=options.dataset_dir,
            seed=options.seed,
        )
        for split, count in counts.items()
    ]
    train, validation = tokenize(*loaded)
    classes = max(train.num_labels, validation.num_labels)
    return replace(train, num_labels=classes), replace(validation, num_labels=classes)


def synthetic_texts(
    like: str = "sst2",
    samples: int = 10_000,
    *,
    vocab_size: int = 8192,
    num_labels: int = 2,
    max_length: int = 0,
    seed: int = 42,
) -> TokenizedTexts:
    """Draws random texts with lengths from those recorded of the data set ``like``.

    The vocabulary (without special tokens) is divided evenly among the labels. A token of a text
    comes from its label's part with probability 0.4, and else from any part; within a part it is
    drawn by Zipf's law (probability ∝ 1 / rank), as in real text, so that frequent words tell the
    label after few steps. A classifier that counts words is right in most texts, a guess in
    1 / ``num_labels``. Texts begin with [CLS] and end with [SEP], as the tokens of ``small`` do.

    Raises:
        UserError: nothing recorded of ``like``, no sample, or too small a vocabulary.
    """
    words = (vocab_size - len(SPECIAL_TOKENS)) // num_labels
    if words < 1:
        least = num_labels + len(SPECIAL_TOKENS)
        raise UserError(f"vocabulary of {vocab_size} tokens: at least {least} are needed")
    if samples < 1:
        raise UserError(f"{samples} samples of synthetic text: at least 1")
    if max_length:
        check_max_length(max_length, None, "synthetic")
    rng = np.random.default_rng(seed)
    lengths = read_text_lengths(like).draw(samples, rng, max_length)
    labels = rng.integers(num_labels, size=samples)
    # The tokens of all texts are drawn in one flat array, which is divided into texts at the end.
    inner = lengths - 2  # without [CLS] and [SEP]
    total = int(inner.sum())
    of_label = rng.random(total) < OWN_SHARE
    part = np.where(of_label, np.repeat(labels, inner), rng.integers(num_labels, size=total))
    # Zipf's law with exponent 1, continuous and cut off: the logarithm of the rank is uniform.
    rank = np.minimum((words + 1) ** rng.random(total) - 1, words - 1).astype(np.int64)
    ids = (len(SPECIAL_TOKENS) + part * words + rank).tolist()
    begin, end = SPECIAL_TOKENS.index("[CLS]"), SPECIAL_TOKENS.index("[SEP]")
    edges = np.concatenate([[0], np.cumsum(inner)]).tolist()
    tokens = [[begin, *ids[first:last], end] for first, last in pairwise(edges)]
    return TokenizedTexts(
        lengths=lengths,
        tokens=tokens,
        labels=labels.astype(np.int64),
        vocab_size=vocab_size,
        pad_id=SPECIAL_TOKENS.index("[PAD]"),
        num_labels=num_labels,
        name="synthetic",
        source=f"synthetic: lengths of {like}, seed {seed}",
    )


def ignored_data_settings(settings: Settings) -> Iterator[str]:
    """Yields the settings of texts that their data set does not have, with the reason."""
    is_synthetic = settings.dataset == "synthetic"
    if is_synthetic and is_changed(settings, "dataset_dir"):
        yield "dataset_dir: synthetic texts are made up"
    if not is_synthetic and is_changed(settings, "synthetic_like"):
        yield f"synthetic_like: the data set is {settings.dataset}"
