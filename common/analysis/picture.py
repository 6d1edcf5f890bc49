"""A figure as a picture and as words: the smaller of SVG and PNG, and what is drawn on it.

Words are for those who cannot see the picture: titles, axes with their units, what each line or
bar stands for, and the caption.
"""

from __future__ import annotations

import base64
import io
import re

import matplotlib
from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator

PIXELS_PER_INCH = 100
"""Pixels of a page that an inch of a figure is shown on."""
SMALL_BYTES = 40_000
"""No PNG of a whole figure is smaller than this, so none is made beside a smaller SVG."""
WORDS_OF_A_PANEL = 8
"""Remarks on a panel that are read out; more would bury the others."""

SVG_STYLE = {
    "svg.fonttype": "none",  # letters stay letters
    "svg.hashsalt": "ddplab",  # the same figure has the same ids
    "font.sans-serif": ["DejaVu Sans", "Verdana"],
}
LESS = {"Date": None, "Creator": None, "Format": None, "Type": None}


def picture(figure: Figure, dpi: int) -> tuple[str, str]:
    """Returns the media type and the data of the smaller picture of a figure, as a page holds it.

    A page holds a PNG in base64, which takes four letters for three bytes.
    """
    drawing = svg(figure)
    if len(drawing) <= SMALL_BYTES:
        return "image/svg+xml", drawing
    png = _png(figure, dpi)
    return ("image/png", png) if len(png) < len(drawing) else ("image/svg+xml", drawing)


def width_px(figure: Figure) -> int:
    """Returns the width that a figure is shown at."""
    return int(figure.get_figwidth() * PIXELS_PER_INCH)


def describe(figure: Figure) -> str:
    """Returns what is drawn on a figure, in words, and its caption."""
    panels = [axes for axes in figure.axes if axes.get_visible() and axes.has_data()]
    shared = _texts([text for legend in figure.legends for text in legend.texts])
    words = [_panel(axes, shared) for axes in panels]
    if len(panels) > 1:
        words = [f"Panel {number}: {text}" for number, text in enumerate(words, 1)]
    words += [f"Legend: {'; '.join(shared)}."] if shared else []
    title = _plain(figure.get_suptitle())
    words[:0] = [f"{title}."] if title else []
    caption = _plain(figure.get_supxlabel())
    words += [caption if caption.endswith(".") else f"{caption}."] if caption else []
    return " ".join(word for word in words if word)


def _panel(axes: Axes, shared: list[str]) -> str:
    legend = axes.get_legend()
    labels = axes.get_legend_handles_labels()[1]
    drawn = _texts(legend.texts) if legend else [_plain(label) for label in labels]
    drawn = [text for text in drawn if text not in shared]
    parts = [
        _plain(axes.get_title(loc="left") or axes.get_title()),
        _axis("horizontal axis", axes.xaxis),
        _axis("vertical axis", axes.yaxis),
        f"drawn: {'; '.join(drawn)}" if drawn else "",
    ]
    remarks = [text for text in _texts(axes.texts) if re.search("[A-Za-z]{2}", text)]
    parts += [f"remarks: {'; '.join(remarks[:WORDS_OF_A_PANEL])}"] if remarks else []
    return "; ".join(part for part in parts if part) + "."


def _axis(name: str, axis: Axis) -> str:
    """Returns an axis's label, whether it is logarithmic, and the names along it."""
    label = _plain(axis.get_label_text())
    scale = ", logarithmic" if axis.get_scale() == "log" else ""
    is_named = isinstance(axis.get_major_locator(), FixedLocator)
    names = _texts(axis.get_ticklabels()) if is_named else []
    along = ", ".join(names) if any(re.search("[A-Za-z]", name) for name in names) else ""
    if not (label or along):
        return ""
    return f"{name}: {label}{scale}{': ' if label and along else ''}{along}"


def _texts(artists: list) -> list[str]:
    """Returns the texts of artists, each once, in order."""
    return list(dict.fromkeys(text for artist in artists if (text := _plain(artist.get_text()))))


def _plain(text: str) -> str:
    """Returns a text on one line, without the marks of formulas.

    >>> _plain("best $b^*$\\n(MiB)")
    'best b^* (MiB)'
    """
    return " ".join(re.sub(r"\\[a-z]+|[${}\\]", "", text).split())


def svg(figure: Figure) -> str:
    """Returns a figure as SVG with hundredths of a point, sized in pixels of a page."""
    buffer = io.StringIO()
    with matplotlib.rc_context(SVG_STYLE):
        figure.savefig(buffer, format="svg", metadata=LESS)
    text = re.sub(r"<\?xml.*?\?>|<!DOCTYPE[^>]*>|<!--.*?-->", "", buffer.getvalue(), flags=re.S)
    text = re.sub(r">\s+<", "><", text).strip()
    text = re.sub(r"<[^>]+>", _round_numbers, text)
    height_px = width_px(figure) * figure.get_figheight() / figure.get_figwidth()
    size = f'width="{width_px(figure)}" height="{height_px:.0f}"'
    return re.sub(r'width="[\d.]+pt" height="[\d.]+pt"', size, text, count=1)


def _round_numbers(tag: re.Match) -> str:
    """Returns a tag whose numbers have two decimals at most; texts between tags stay as they are.

    >>> _round_numbers(re.match(".*", '<path d="M 1.23456 20.000001 L 3.5 4"/>'))
    '<path d="M 1.23 20 L 3.5 4"/>'
    """
    return re.sub(
        r"\d+\.\d{3,}",
        lambda number: f"{float(number[0]):.2f}".rstrip("0").rstrip("."),
        re.sub(r"\s+", " ", tag[0]),
    )


def _png(figure: Figure, dpi: int) -> str:
    """Returns a PNG with a palette, which charts lose nothing by."""
    from PIL import Image

    buffer, smaller = io.BytesIO(), io.BytesIO()
    figure.savefig(buffer, format="png", dpi=dpi)
    image = Image.open(buffer).convert("RGB").quantize(256, dither=Image.Dither.NONE)
    image.save(smaller, format="png", optimize=True)
    return base64.b64encode(smaller.getvalue()).decode()
