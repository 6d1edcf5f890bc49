"""Names of students, as people have them, and as files are called after them."""

from __future__ import annotations

import re
import unicodedata

from common.course.hand_ins.tarball import normal

NAME_BYTES = 200
"""Most bytes of a student's name: file names have it in them."""
UNSEEN = "'’ʼ\u200c\u200d"
"""Apostrophes, and the joiners of Persian and Hindi: words are the same without them."""
JOINS = f"{UNSEEN} -.·"
"""What stands between the letters of names: O'Brien, Jean-Luc, J. Doe."""


def is_name(text: str) -> bool:
    """Returns True for letters of any script, their marks, and what joins them."""
    kinds = {unicodedata.category(letter)[0] for letter in text if letter not in JOINS}
    if "L" not in kinds or not kinds <= {"L", "M"}:
        return False
    return max(len(text.encode()), len(slug(text).encode())) <= NAME_BYTES


def words_of(name: str) -> list[str]:
    """Returns the words of a name, however it is written: Doe-Jane, Doe, Jane and JANE DOE."""
    letters = re.sub(f"[{UNSEEN}]", "", normal(name.casefold()))
    return re.findall(r"[^\s\-.,·/\\\0]+", letters)


def slug(name: str) -> str:
    """Returns a name as files are called after it: o'Brien, Mary is obrien-mary."""
    return "-".join(words_of(name))
