"""The two splits that a classifier is trained and validated on, loaded or drawn, as tokens."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from common.data.text import TokenizedTexts, load_texts, synthetic_texts
from common.data.text_sources import LabelledTexts

SYNTHETIC_SAMPLES = {"train": 10_000, "validation": 1_000}
"""Number of synthetic texts of each split where none is given."""


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
    tokenize: Callable[[LabelledTexts, LabelledTexts], tuple[TokenizedTexts, TokenizedTexts]],
    synthetic_labels: int = 2,
) -> tuple[TokenizedTexts, TokenizedTexts]:
    """Loads or draws the training and the validation split; both know the same classes.

    Args:
        options: which texts, and how many.
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
