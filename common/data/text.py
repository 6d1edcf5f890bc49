"""Texts of different lengths to train a classifier on: labelled, tokenized or synthetic."""

from __future__ import annotations

from common.data.text_lengths import LengthDistribution, read_text_lengths
from common.data.text_sources import DATASETS, LabelledTexts, load_texts
from common.data.text_synthetic import synthetic_texts
from common.data.text_tokens import (
    TextTokenizer,
    TokenizedTexts,
    check_max_length,
    open_tokenizer,
    tokenize_texts,
)

__all__ = [
    "DATASETS",
    "LabelledTexts",
    "LengthDistribution",
    "TextTokenizer",
    "TokenizedTexts",
    "check_max_length",
    "load_texts",
    "open_tokenizer",
    "read_text_lengths",
    "synthetic_texts",
    "tokenize_texts",
]
