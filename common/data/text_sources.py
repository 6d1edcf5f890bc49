"""Labelled texts of SST-2, AG News and IMDB: from local files, else from the hub or its cache.

If a data set is in neither place, that is an error: data is never replaced by other data.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from common.data.text_files import SPLIT_FILES, check_label, check_text, read_split, split_files
from common.errors import UserError, require_known
from common.runtime.hugging_face_hub import check_hub

if TYPE_CHECKING:
    import datasets

DATASETS = ("sst2", "ag_news", "imdb", "synthetic")
DEFAULT_FOLDER = "datasets"
WITHOUT_HUB = "--dataset_dir FOLDER takes local files, --dataset synthetic needs none"


@dataclass(frozen=True)
class LabelledTexts:
    """One split of a data set."""

    texts: list[str]
    labels: list[int]
    """Class of each text, 0 to ``num_labels`` − 1."""
    num_labels: int
    name: str
    source: str
    """Origin of the texts: a file below the data folder, or a name on the hub."""


@dataclass(frozen=True)
class Published:
    """A data set on the hub; ``num_labels`` is that of the whole, as a subset may hold fewer."""

    hub_name: str
    text_column: str
    validation_split: str
    num_labels: int


PUBLISHED = {
    "sst2": Published("stanfordnlp/sst2", "sentence", "validation", 2),
    "ag_news": Published("fancyzhx/ag_news", "text", "test", 4),
    "imdb": Published("stanfordnlp/imdb", "text", "test", 2),
}


def load_texts(
    dataset: str,
    split: str = "train",
    *,
    dataset_dir: Path | str = DEFAULT_FOLDER,
    max_samples: int = 0,
    seed: int = 42,
) -> LabelledTexts:
    """Loads a split (``train`` or ``validation``) of a real data set.

    Local files come first: those in ``<dataset_dir>/<dataset>``, else those in ``dataset_dir``.
    ``max_samples`` above 0 takes that many at random, the same on every rank; the first rows
    would be no random sample, as some files are sorted by label.

    Raises:
        UserError: an unknown data set, nothing there, or a malformed row.
    """
    require_known("data set", dataset, PUBLISHED)
    require_known("split", split, SPLIT_FILES)
    if max_samples < 0:
        raise UserError(f"{max_samples} samples: at least 1, or 0 for all")
    folder = _local_folder(Path(dataset_dir).expanduser(), dataset)
    if folder is None:
        loaded = _load_from_hub(dataset, split)
    else:
        num_labels = PUBLISHED[dataset].num_labels
        texts, labels, path = read_split(folder, split, dataset, num_labels)
        source = path.relative_to(Path(dataset_dir).expanduser())
        loaded = LabelledTexts(texts, labels, num_labels, dataset, str(source))
    return _random_subset(loaded, max_samples, seed)


def _random_subset(loaded: LabelledTexts, max_samples: int, seed: int) -> LabelledTexts:
    total = len(loaded.texts)
    if not 0 < max_samples < total:
        return loaded
    chosen = np.sort(np.random.default_rng(seed).choice(total, max_samples, replace=False))
    texts = [loaded.texts[index] for index in chosen]
    return replace(loaded, texts=texts, labels=[loaded.labels[index] for index in chosen])


def _local_folder(base: Path, dataset: str) -> Path | None:
    """Returns the folder with the data set's files; None if the default folder has none."""
    asked_for = base != Path(DEFAULT_FOLDER)
    if asked_for and not base.is_dir():
        problem = "is a file" if base.is_file() else "does not exist"
        raise UserError(f"--dataset_dir {base} {problem}; a folder is needed")
    if (base / dataset).is_dir():
        return base / dataset
    if any(next(split_files(base, split), None) for split in SPLIT_FILES):
        if base.resolve().name in set(PUBLISHED) - {dataset}:
            raise UserError(f"--dataset_dir {base}: its files are not those of {dataset}")
        return base
    if asked_for:
        raise UserError(
            f"--dataset_dir {base}: no files of {dataset}; looked for train and dev (or test) as "
            f".tsv, .csv or .parquet in {base / dataset} and {base}"
        )
    return None


def _load_from_hub(dataset: str, split: str) -> LabelledTexts:
    published = PUBLISHED[dataset]
    name = published.hub_name
    split = published.validation_split if split == "validation" else split
    rows = _hub_rows(dataset, name, split)
    texts, labels = list(rows[published.text_column]), list(rows["label"])
    for number, (text, label) in enumerate(zip(texts, labels, strict=True), 1):
        where = f"{name}, split {split}, row {number}"
        check_text(text, where)
        check_label(label, 0, published.num_labels, where)
    return LabelledTexts(texts, labels, published.num_labels, dataset, f"hub: {name}")


def _hub_rows(dataset: str, name: str, split: str) -> datasets.Dataset:
    # The hub is checked first: the library retries for half a minute before it uses its cache.
    unreachable = None
    try:
        check_hub(f"data set {dataset}", WITHOUT_HUB)
    except UserError as error:
        unreachable = error
    import datasets

    try:
        with _only_the_cache() if unreachable else nullcontext():
            return datasets.load_dataset(name, split=split)
    except (OSError, ValueError, datasets.exceptions.DatasetsError) as error:
        if unreachable:
            raise unreachable from None
        problem = (str(error).strip().splitlines() or [type(error).__name__])[0].rstrip(".")
        raise UserError(f"data set {dataset} ({name}): {problem}; {WITHOUT_HUB}") from None


@contextmanager
def _only_the_cache() -> Iterator[None]:
    """Keeps the library to what it downloaded before, while the block runs."""
    # Set in the module, as the library reads its environment variable only at import.
    import datasets

    before = datasets.config.HF_HUB_OFFLINE
    datasets.config.HF_HUB_OFFLINE = True
    try:
        yield
    finally:
        datasets.config.HF_HUB_OFFLINE = before
