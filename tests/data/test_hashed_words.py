"""Words to numbers: the same everywhere, and against a recomputation that shares no code."""

from __future__ import annotations

import binascii
import subprocess
import sys
from itertools import groupby
from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

from common.data.hashed_words import PAD_ID, hash_texts, hashed_words
from common.data.text_sources import LabelledTexts

ROOT = Path(__file__).resolve().parents[2]
SAMPLE = ["Hello, World 42!", "naïve_CAFÉ—東京", "  ", "it's x1 it's"]


def words_one_by_one(text: str) -> list[str]:
    """Finds the runs of characters that Python calls letters or digits."""
    return ["".join(run) for is_word, run in groupby(text.lower(), str.isalnum) if is_word]


@given(st.lists(st.text(max_size=40), max_size=5), st.integers(2, 50), st.integers(1, 8))
def test_numbers_are_those_of_each_words_checksum(texts, vocab_size, max_length):
    expected = []
    for text in texts:
        words = words_one_by_one(text)[:max_length] or [""]
        checksums = [binascii.crc32(word.encode("utf-8", "surrogatepass")) for word in words]
        expected.append([1 + checksum % (vocab_size - 1) for checksum in checksums])
    assert hashed_words(texts, vocab_size, max_length) == expected


def test_every_process_gives_the_same_numbers():
    # Python's own hash of a string is another in every process.
    code = f"from common.data.hashed_words import hashed_words as h; print(h({SAMPLE!r}, 20000, 9))"
    said = {
        subprocess.run(
            [sys.executable, "-c", code],
            cwd=ROOT,
            env={"PYTHONHASHSEED": seed, "PYTHONPATH": str(ROOT), "PYTHONIOENCODING": "utf-8"},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for seed in ("0", "1")
    }
    assert said == {f"{hashed_words(SAMPLE, 20_000, 9)}\n"}


def test_no_word_is_padding_and_case_and_punctuation_do_not_matter():
    texts = LabelledTexts(SAMPLE, [0, 1, 1, 0], 2, "made up", "here")
    found = hash_texts(texts, vocab_size=3, max_length=2)
    assert {number for ids in found.tokens for number in ids} <= {1, 2}
    assert (found.pad_id, found.vocab_size, found.num_labels) == (PAD_ID, 3, 2)
    assert found.lengths.tolist() == [2, 2, 1, 2]  # cut at two words; a text without one keeps one
    assert found.labels.tolist() == [0, 1, 1, 0]
    same = hashed_words(["Spam, SPAM; spam_spam"], 20_000, 9)
    assert len(set(same[0])) == 1
    assert len(same[0]) == 4
