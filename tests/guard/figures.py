"""What a figure plots: every number in it, and every word on it, as text."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from matplotlib.axes import Axes
from matplotlib.collections import Collection
from matplotlib.figure import Figure
from matplotlib.patches import Patch, Rectangle
from plain_text import numbers


def figure_text(figure: Figure) -> str:
    """Returns the axes of a figure, one after another: scales, words, and all that is drawn."""
    lines = [f"figure text: {text.get_text()}" for text in figure.texts if text.get_text()]
    for place, axes in enumerate(figure.axes):
        lines += [f"axes {place}", *(f"  {line}" for line in _axes(axes))]
    return "\n".join(lines)


def _axes(axes: Axes) -> Iterator[str]:
    yield f"title: {axes.get_title()}"
    yield f"x: {axes.get_xlabel()} ({axes.get_xscale()})"
    yield f"y: {axes.get_ylabel()} ({axes.get_yscale()})"
    if axes.get_legend():
        yield f"legend: {' | '.join(text.get_text() for text in axes.get_legend().texts)}"
    for line in axes.lines:
        yield f"line {line.get_label()}: {numbers(line.get_xydata())}"
    for patch in axes.patches:
        yield f"patch {patch.get_label()}: {_patch(patch)}"
    for collection in axes.collections:
        yield f"collection {collection.get_label()}: {_collection(collection)}"
    for image in axes.images:
        yield f"image: {numbers(image.get_array())}"
    for text in axes.texts:
        yield f"text: {text.get_text()}"
    for axis in (axes.xaxis, axes.yaxis):
        if not _plain_ticks(axis):
            yield f"ticks: {' | '.join(label.get_text() for label in axis.get_ticklabels())}"


def _plain_ticks(axis: object) -> bool:
    """Returns whether the ticks are matplotlib's own choice, which is no answer of ours."""
    return not hasattr(axis.get_major_formatter(), "seq")


def _patch(patch: Patch) -> str:
    if isinstance(patch, Rectangle):
        return numbers([*patch.get_xy(), patch.get_width(), patch.get_height()])
    return numbers(patch.get_path().vertices)


def _collection(collection: Collection) -> str:
    offsets = np.ma.filled(collection.get_offsets(), np.nan)
    if offsets.any():
        return numbers(offsets)
    return " ; ".join(numbers(path.vertices) for path in collection.get_paths())
