"""Labelled texts to tokens without a vocabulary: a word's number is a hash of it.

Nothing is trained or downloaded, and every rank numbers the words alike. The model cannot tell
words that share a number apart; with 20,000 numbers that hardly matters to a classifier.
"""

from __future__ import annotations

import re
import zlib
from collections.abc import Sequence
from typing import TYPE_CHECKING

from common.data.text_tokens import TokenizedTexts
from common.errors import UserError

if TYPE_CHECKING:
    from common.data.text_sources import LabelledTexts

PAD_ID = 0
WORD = re.compile(r"[^\W_]+")
"""Letters and digits of any script; everything else divides words."""


def hash_texts(texts: LabelledTexts, vocab_size: int, max_length: int) -> TokenizedTexts:
    """Returns a split with its words as numbers, each text cut at ``max_length`` words.

    Args:
        vocab_size: count of numbers; 0 is padding, words have 1 to ``vocab_size`` − 1.
    """
    tokens = hashed_words(texts.texts, vocab_size, max_length)
    return TokenizedTexts.of(texts, tokens, vocab_size=vocab_size, pad_id=PAD_ID)


def hashed_words(texts: Sequence[str], vocab_size: int, max_length: int) -> list[list[int]]:
    """Returns the lower-cased words of each text as numbers.

    A word's number is 1 + (CRC-32 of its UTF-8) mod (``vocab_size`` − 1). Python's own ``hash``
    differs from process to process. A text without words keeps one token, that of the empty word,
    so that a mean over its tokens exists.
    """
    numbers: dict[str, int] = {}

    def number(word: str) -> int:
        if word not in numbers:
            numbers[word] = 1 + zlib.crc32(word.encode()) % (vocab_size - 1)
        return numbers[word]

    words = ((WORD.findall(text.lower()) or [""])[:max_length] for text in texts)
    return [[number(word) for word in of_text] for of_text in words]


def check_sizes(vocab_size: int, max_length: int) -> None:
    """Raises UserError for a vocabulary without words, or texts without tokens."""
    if vocab_size < 2:
        raise UserError(f"vocab_size {vocab_size}: at least 2 (padding, and a word)")
    if max_length < 1:
        raise UserError(f"max_length {max_length}: at least 1 token")
