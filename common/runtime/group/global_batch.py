"""The global batch where nobody set one that the ranks divide."""

from __future__ import annotations


def dividing_batch(wanted: int, at_once: int) -> int:
    """Returns the largest multiple of ``at_once`` up to ``wanted``; at least one of them.

    Args:
        wanted: samples of a step, over all ranks.
        at_once: samples that all ranks take in one forward pass: ranks × micro-batch.
    """
    return max(1, wanted // at_once) * at_once
