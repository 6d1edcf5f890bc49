"""The figures of lengths: a data set's, what ranks get of them, a step drawn as rectangles."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle
from matplotlib.ticker import MaxNLocator

from common.analysis.data_parallel.training_figures import DASHES
from common.analysis.micro_batches.lengths import TEXTS, expected_longest, padded_tokens
from common.analysis.micro_batches.mode_comparison import STATIC, ModeComparison
from common.analysis.style import (
    BLACK,
    BLUE,
    CYCLE,
    GREY,
    ORANGE,
    RED,
    SKY,
    figure,
    legend_above,
    rank_look,
)

SHOWN_STEPS = 30
"""Static steps of which each rank's padded tokens are drawn."""


def length_histogram(lengths: Mapping[str, np.ndarray], caption: str) -> Figure:
    """Draws the lengths of texts by data set, with the mean and the longest of ``TEXTS``."""
    with figure(caption, figsize=(7.2, 3.1), ncols=len(lengths), squeeze=False) as (fig, grid):
        for axes, (name, values) in zip(grid[0], lengths.items(), strict=True):
            edges = np.linspace(0, values.max() + 1, min(int(values.max()) + 2, 48))
            share = np.full(len(values), 100 / len(values))
            axes.hist(values, bins=edges, weights=share, color=SKY)
            mean, longest = values.mean(), expected_longest(values, TEXTS)
            axes.axvline(mean, color=BLUE, linewidth=1.6, label="mean")
            axes.axvline(
                longest, color=RED, linewidth=1.6, linestyle="--", label=f"longest of {TEXTS} texts"
            )
            axes.set_title(
                f"{name}: mean {mean:.0f},\nlongest {longest:.0f}", loc="left", fontsize=9
            )
            axes.set_xlabel("tokens of a text")
        grid[0, 0].set_ylabel("texts (%)")
        legend_above(fig, 2)
    return fig


def padded_by_rank(comparison: ModeComparison) -> Figure:
    """Draws padded tokens of the ranks in static steps, from the emptiest to the fullest."""
    rows = comparison.times[comparison.times["mode"] == STATIC]
    wide = rows.pivot(index="step", columns="rank", values="padded_tokens")
    wide = wide.iloc[:SHOWN_STEPS].reset_index(drop=True)
    with figure(comparison.caption, figsize=(7.2, 3.3)) as (fig, axes):
        axes.vlines(wide.index, wide.min(axis=1), wide.max(axis=1), color=ORANGE, linewidth=2.5)
        for index, rank in enumerate(wide):
            look = rank_look(index)
            axes.plot(wide.index, wide[rank], linestyle="none", markersize=5, **look)
            axes.plot([], [], linestyle="none", label=f"rank {rank:.0f}", **look)
        axes.plot([], [], color=ORANGE, linewidth=2.5, label="from the emptiest to the fullest")
        axes.set_xlabel("measured step of static")
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        axes.set_ylabel("padded tokens of a rank")
        axes.set_ylim(bottom=0)
        fig.legend(loc="outside upper center", ncols=4, fontsize=8)
    return fig


def groups_as_rectangles(
    lengths: Sequence[int], partitions: Mapping[str, Sequence[Sequence[int]]], caption: str
) -> Figure:
    """Draws one global batch cut into ranks, in several ways: a text is a bar, a rank a rectangle.

    Args:
        lengths: Tokens of each text.
        partitions: Texts of each rank (their indices), by the partition's name.
        caption: Source of the lengths.
    """
    values = np.asarray(lengths)
    with figure(caption, figsize=(7.2, 3.4), ncols=len(partitions), sharey=True, squeeze=False) as (
        fig,
        grid,
    ):
        for axes, (name, groups) in zip(grid[0], partitions.items(), strict=True):
            areas = padded_tokens(values, groups)
            _draw_groups(axes, values, groups, areas)
            axes.set_title(f"{name}: bottleneck {max(areas):,}", loc="left", fontsize=9)
            axes.set_xlabel("texts, rank by rank")
        grid[0, 0].set(ylabel="tokens", ylim=(0, 1.28 * values.max()))
        fig.legend(
            handles=[Rectangle((0, 0), 1, 1, color=SKY), Rectangle((0, 0), 1, 1, color=ORANGE)],
            labels=["tokens of texts", "padding"],
            loc="outside upper center",
            ncols=2,
            fontsize=8,
        )
    return fig


def _draw_groups(
    axes: Axes, values: np.ndarray, groups: Sequence[Sequence[int]], areas: Sequence[int]
) -> None:
    start = 0.0
    for rank, group in enumerate(groups):
        texts = np.sort(values[list(group)])[::-1]
        width, height = len(texts), texts.max()
        fullest = areas[rank] == max(areas)
        axes.bar(start + np.arange(width) + 0.5, height, width=0.92, color=ORANGE, alpha=0.45)
        axes.bar(start + np.arange(width) + 0.5, texts, width=0.92, color=SKY)
        axes.add_patch(
            Rectangle(
                (start, 0),
                width,
                height,
                fill=False,
                zorder=3,
                edgecolor=RED if fullest else BLACK,
                linewidth=2 if fullest else 1.2,
            )
        )
        axes.text(
            start + width / 2,
            height + 0.02 * values.max(),
            f"rank {rank}\n{width}×{height}\n= {areas[rank]:,}",
            ha="center",
            va="bottom",
            fontsize=7.5,
            color=RED if fullest else BLACK,
        )
        start += width + 0.6
    axes.set_xticks([])
    axes.set_xlim(-0.4, start - 0.2)
    axes.grid(axis="x", visible=False)


def where_it_pays(
    ratios: Mapping[str, float],
    caption: str,
    measured: Mapping[str, tuple[float, float]],
) -> Figure:
    """Draws the ratio to static that is left, over the share of a static step that is constant.

    Args:
        ratios: Ratio that padded tokens promise, by data set.
        caption: Source of the lengths.
        measured: Share and measured ratio of computation, by data set, where they were measured.
    """
    share = np.linspace(0, 1, 50)
    with figure(caption, figsize=(7.2, 3.6)) as (fig, axes):
        for index, (name, ratio) in enumerate(ratios.items()):
            colour = CYCLE[index % len(CYCLE)]
            axes.plot(
                share * 100,
                share + (1 - share) * ratio,
                color=colour,
                linestyle=DASHES[index % len(DASHES)],
                label=f"{name}: promised",
            )
            if name in measured:
                at, measured_ratio = measured[name]
                axes.plot(
                    [at * 100], [measured_ratio], "D", color=colour, label=f"{name}: measured"
                )
        axes.axhline(1, color=GREY, linestyle="--", linewidth=1)
        axes.set(xlim=(0, 100), ylim=(0, 1.1))
        axes.set_xlabel("share of a static step's computation that no plan can move, c₀ (%)")
        axes.set_ylabel("dynamic over static")
        axes.legend(fontsize=8, loc="lower right", ncols=2)
    return fig
