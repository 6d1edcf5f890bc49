"""Divides a global batch of texts among ranks, for the tab of micro-batches.

Lengths are drawn from recorded data sets. A rank pads its texts to the longest of them, and a step
takes as long as the rank with the most padded tokens: the bottleneck.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from common.analysis.micro_batches.lengths import equal_counts, padded_tokens
from common.data.text_lengths import LengthDistribution
from common.errors import NotYetWritten
from common.scheduling.cost import TokensCost
from common.scheduling.packing import karmarkar_karp
from common.scheduling.partition import min_max_contiguous

STATIC, SORTED, PACKED, OPTIMUM = "static", "sorted", "karmarkar-karp", "optimum"
PLANS = {
    STATIC: "static: in order of arrival",
    SORTED: "sorted by length",
    PACKED: "Karmarkar–Karp",
    OPTIMUM: "optimum (task A3.1)",
}
"""The plans, as they are shown. All but the optimum give each rank as many texts."""


@dataclass(frozen=True)
class BatchSettings:
    """Settings of the sliders.

    Attributes:
        ranks: number of ranks.
        texts: texts of a rank, where all have as many.
        max_length: longer texts are cut, in tokens; 0 leaves them as they are.
        seed: seed of the draw.
        plan: one of ``PLANS``.
    """

    ranks: int
    texts: int
    max_length: int = 0
    seed: int = 0
    plan: str = STATIC


@dataclass(frozen=True, eq=False)
class BatchView:
    """Contents of the plots.

    Attributes:
        lengths: [B] tokens of each text, in the order of arrival.
        groups: texts of each rank; None where the plan's task is not written yet.
        padded, unpadded: [G] tokens of each rank, with padding and without.
        bottlenecks: padded tokens of the slowest rank, by plan.
        lower_bound: no plan has a smaller bottleneck.
        unwritten: tasks that are needed and not written yet.
    """

    lengths: NDArray
    groups: list[list[int]] | None
    padded: NDArray
    unpadded: NDArray
    bottlenecks: dict[str, int]
    lower_bound: int
    unwritten: tuple[str, ...]


def divide(distribution: LengthDistribution, settings: BatchSettings) -> BatchView:
    """Draws a global batch and divides it by every plan."""
    generator = np.random.default_rng(settings.seed)
    count = settings.ranks * settings.texts
    lengths = distribution.draw(count, generator, settings.max_length)
    plans: dict[str, list[list[int]]] = {}
    unwritten: dict[str, None] = {}
    for name in PLANS:
        try:
            plans[name] = groups_of(name, lengths, settings.ranks)
        except NotYetWritten as error:
            unwritten[error.task] = None
    groups = plans.get(settings.plan)
    nothing = np.zeros(settings.ranks, dtype=int)
    # No padding, and tokens shared out evenly; but some rank has the longest text.
    bound = max(int(lengths.max()), -(-int(lengths.sum()) // settings.ranks))
    return BatchView(
        lengths=lengths,
        groups=groups,
        padded=np.array(padded_tokens(lengths, groups)) if groups else nothing,
        unpadded=np.array([lengths[group].sum() for group in groups]) if groups else nothing,
        bottlenecks={name: max(padded_tokens(lengths, plan)) for name, plan in plans.items()},
        lower_bound=bound,
        unwritten=tuple(unwritten),
    )


def groups_of(plan: str, lengths: NDArray, ranks: int) -> list[list[int]]:
    """Returns the texts of each rank under a plan of ``PLANS``."""
    if plan == STATIC:
        return equal_counts(len(lengths), ranks)
    if plan == SORTED:
        order = np.argsort(-lengths, kind="stable")
        return [order[part].tolist() for part in equal_counts(len(lengths), ranks)]
    if plan == PACKED:
        return karmarkar_karp(lengths, ranks, equal_size=True)
    return min_max_contiguous(lengths, ranks, TokensCost())


def rectangles(view: BatchView) -> tuple[NDArray, NDArray, NDArray]:
    """Returns the batch as a drawing with steps: text by text in the order of ranks.

    Each text is as wide as 1. Edges on the x axis, heights of the texts, and of the rectangle of
    the rank that they are padded to, both in tokens; ranks have a gap of height 0 between them.
    """
    gap = max(1.0, 0.01 * len(view.lengths))
    edges, heights, padded, at = [0.0], [0.0], [0.0], 0.0
    for group in view.groups or []:
        tallest_first = np.sort(view.lengths[group])[::-1]
        for length in tallest_first.tolist():
            edges += [at, at + 1]
            heights += [length, length]
            padded += [tallest_first[0]] * 2
            at += 1
        edges += [at, at + gap]
        heights += [0.0, 0.0]
        padded += [0.0, 0.0]
        at += gap
    return np.array(edges), np.array(heights), np.array(padded)
