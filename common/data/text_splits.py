"""The two splits that a classifier is trained and validated on, loaded or drawn, as tokens."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace

from common.data.text import TokenizedTexts, load_texts
from common.data.text_sources import LabelledTexts

SYNTHETIC_SAMPLES = {"train": 10_000, "validation": 1_000}
"""Number of synthetic texts of each split where none is given."""


def open_splits(
    dataset: str,
    counts: Mapping[str, int],
    *,
    dataset_dir: str,
    seed: int,
    synthetic: Callable[[int, int], TokenizedTexts],
    tokenize: Callable[[LabelledTexts, LabelledTexts], tuple[TokenizedTexts, TokenizedTexts]],
) -> tuple[TokenizedTexts, TokenizedTexts]:
    """Loads or draws the training and the validation split; both know the same classes.

    Args:
        dataset: its name, or ``synthetic``.
        counts: texts of ``train`` and of ``validation``; 0 for all, or SYNTHETIC_SAMPLES.
        dataset_dir: folder of local files.
        seed: of the choice of texts; of synthetic ones the second split has the next seed.
        synthetic: makes a number of texts from a seed.
        tokenize: turns the texts of both splits into tokens.

    Raises:
        UserError: the data set is not there, or cannot be read.
    """
    if dataset == "synthetic":
        train, validation = (
            synthetic(count or SYNTHETIC_SAMPLES[split], split_seed)
            for split_seed, (split, count) in enumerate(counts.items(), start=seed)
        )
        return train, validation
    loaded = [
        load_texts(dataset, split, max_samples=count, dataset_dir=dataset_dir, seed=seed)
        for split, count in counts.items()
    ]
    train, validation = tokenize(*loaded)
    classes = max(train.num_labels, validation.num_labels)
    return replace(train, num_labels=classes), replace(validation, num_labels=classes)
