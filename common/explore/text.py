"""Text of the tabs: headings that say a result, legends, messages, and numbers with their units."""

from __future__ import annotations

import html
from collections.abc import Collection, Mapping
from dataclasses import dataclass

import ipywidgets


@dataclass(frozen=True)
class Key:
    """The sign of a trace in a legend: its colour, and a shape that the style sheet draws."""

    colour: str
    shape: str


class Text:
    """Lines of text, the first of which may be a heading, and a legend below them.

    A legend inside of a figure would take room from it, and is cut on a narrow page.
    """

    def __init__(
        self, css_class: str = "", heading: bool = False, legend: Mapping[str, Key] | None = None
    ) -> None:
        self.widget = ipywidgets.HTML()
        self.heading = heading
        self.legend = legend or {}
        if css_class:
            self.widget.add_class(css_class)

    def show(self, *lines: str, without: Collection[str] = ()) -> None:
        """Shows these lines in place of others; empty ones are left out.

        Args:
            lines: the text.
            without: what the legend leaves out.
        """
        parts = [html.escape(line) for line in lines if line]
        tags = ["h2" if self.heading and not place else "p" for place in range(len(parts))]
        pairs = zip(tags, parts, strict=True)
        shown = "".join(f"<{tag}>{part}</{tag}>" for tag, part in pairs)
        if self.legend and parts:
            signs = (
                f'<span><i class="ddplab-{key.shape}" style="--colour: {key.colour}"></i>'
                f"{html.escape(name)}</span>"
                for name, key in self.legend.items()
                if name not in without
            )
            shown += f'<p class="ddplab-legend">{"".join(signs)}</p>'
        self.widget.value = shown


def time_text(seconds: float) -> str:
    """Formats a time with three figures in its unit: ``85 µs``, ``1.2 ms``, ``3.4 s``."""
    for unit, name in ((1.0, "s"), (1e-3, "ms")):
        if seconds >= unit:
            return f"{three(seconds / unit)} {name}"
    return f"{three(seconds * 1e6)} µs"


def three(value: float) -> str:
    """Formats a number with three figures, without an exponent."""
    return f"{value:,.0f}" if abs(value) >= 99.95 else f"{value:.3g}"
