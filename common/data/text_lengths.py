"""Distributions of text lengths, recorded under data/text-lengths: the cause of uneven ranks.

Lengths are in tokens of bert-base-uncased's WordPiece with [CLS] and [SEP], before any cut.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import ArrayLike, NDArray

from common.errors import UserError, unknown_name
from common.runtime.paths import project_root
from common.runtime.records.run_directory import write_atomically
from common.runtime.wording import counted

FOLDER = project_root() / "data" / "text-lengths"
COLUMNS = "length_tokens,texts"
SHORTEST = 3
"""Fewest tokens of a text: [CLS], a token, [SEP]."""


@dataclass(frozen=True)
class LengthDistribution:
    """The number of texts of each length."""

    lengths: NDArray[np.int64]
    """Tokens, ascending, each once: int64 [k]."""
    texts: NDArray[np.int64]
    """Texts of each length, at least one: int64 [k]."""
    name: str

    @classmethod
    def of(cls, lengths: ArrayLike, name: str) -> LengthDistribution:
        """Makes the distribution of the lengths of n texts, [n] in any order, in tokens."""
        values, counts = np.unique(np.asarray(lengths, np.int64), return_counts=True)
        return cls(values, counts.astype(np.int64), name)

    @property
    def num_texts(self) -> int:
        """Returns the number of texts that were measured."""
        return int(self.texts.sum())

    @property
    def mean(self) -> float:
        """Returns the mean number of tokens of a text."""
        return float(self.lengths @ self.texts) / self.num_texts

    def cut_at(self, max_length: int) -> LengthDistribution:
        """Returns the distribution after every text is cut at ``max_length`` tokens."""
        return LengthDistribution.of(
            np.repeat(np.minimum(self.lengths, max_length), self.texts), self.name
        )

    def quantile(self, share: float | ArrayLike) -> NDArray[np.int64]:
        """Returns the shortest length that at least a share of the texts (0 to 1) do not exceed."""
        return self._length_of_text(np.ceil(np.asarray(share) * self.num_texts) - 1)

    def draw(self, count: int, rng: np.random.Generator, max_length: int = 0) -> NDArray[np.int64]:
        """Draws the lengths of ``count`` texts with replacement, in tokens, int64 [count].

        Each is cut at ``max_length`` tokens; 0 leaves them as they are.
        """
        drawn = self._length_of_text(rng.integers(self.num_texts, size=count))
        return np.minimum(drawn, max_length) if max_length else drawn

    def _length_of_text(self, rank: NDArray) -> NDArray[np.int64]:
        """Returns the length of the text with this rank, from 0, among the texts by length."""
        # The texts of length i have the ranks from the count of all shorter texts on, so a rank's
        # length is the first whose cumulative count exceeds the rank.
        return self.lengths[np.searchsorted(np.cumsum(self.texts), np.maximum(rank, 0), "right")]


def recorded_lengths(folder: Path = FOLDER) -> list[str]:
    """Returns the names of the data sets whose lengths are recorded."""
    return sorted(path.stem for path in folder.glob("*.csv"))


def read_text_lengths(name: str, folder: Path = FOLDER) -> LengthDistribution:
    """Reads the recorded lengths of ``sst2``, ``ag_news`` or ``imdb``.

    Raises:
        UserError: there is no such recording, or its table is malformed.
    """
    path = folder / f"{name}.csv"
    if not path.is_file():
        raise UserError(unknown_name("data set", name, recorded_lengths(folder)))
    header, *rows = path.read_text().splitlines() or [""]
    try:
        table = np.array([[int(field) for field in row.split(",")] for row in rows], np.int64)
        lengths, texts = table.T
    except ValueError:
        lengths = texts = np.zeros(0, np.int64)
    well_formed = header == COLUMNS and len(texts) and min(texts) > 0 and lengths[0] >= SHORTEST
    if not well_formed or np.any(np.diff(lengths) <= 0):
        raise UserError(
            f"{path}: columns {COLUMNS} with ascending lengths of at least {SHORTEST} and at least "
            "one text of each are needed"
        )
    return LengthDistribution(lengths.copy(), texts.copy(), name)


def write_text_lengths(distribution: LengthDistribution, folder: Path) -> Path:
    """Writes ``<folder>/<name>.csv`` and returns its path.

    Raises UserError where a text is too short to be one between [CLS] and [SEP].
    """
    if distribution.lengths[0] < SHORTEST:
        raise UserError(
            f"{distribution.name}: a text of {counted(int(distribution.lengths[0]), 'token')}; "
            f"at least {SHORTEST} ([CLS], a token, [SEP]), as BERT's tokenizer makes them"
        )
    counts = zip(distribution.lengths, distribution.texts, strict=True)
    rows = [f"{length},{texts}" for length, texts in counts]
    path = folder / f"{distribution.name}.csv"
    folder.mkdir(parents=True, exist_ok=True)
    write_atomically(path, "\n".join([COLUMNS, *rows, ""]))
    return path
