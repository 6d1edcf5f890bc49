"""The controls, a slider, a command to copy and a choice, and the text around them.

ipywidgets' own slider has no name for a screen reader, and numbers on it are small. This one is a
native range input over a list of values, with what each value is called.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Generic, TypeVar

import anywidget
import ipywidgets
import numpy as np
import traitlets

from common.analysis.html import rendered
from common.errors import NotYetWritten, UserError
from common.explore.figures import Figure, clear
from common.runtime.wording import digits

HERE = Path(__file__).parent
STEPS = (1, 1.2, 1.5, 2, 2.5, 3, 4, 5, 6, 8)
"""The values of a decade."""
Value = TypeVar("Value")


class Slider(anywidget.AnyWidget, Generic[Value]):
    """A slider over values; each has a text, which is shown and read out."""

    _esm = HERE / "slider.js"
    _css = HERE / "explore.css"
    label = traitlets.Unicode().tag(sync=True)
    texts = traitlets.List(traitlets.Unicode()).tag(sync=True)
    index = traitlets.Int().tag(sync=True)

    def __init__(
        self, label: str, values: Sequence[Value], value: Value, text: Callable[[Value], str] = str
    ) -> None:
        self.values: list[Value] = []
        self.text = text
        super().__init__()
        self.offer(values, value, label)

    @property
    def value(self) -> Value:
        """Returns the value that the slider stands on."""
        return self.values[self.index]

    def offer(self, values: Sequence[Value], value: Value, label: str = "") -> None:
        """Puts the slider on ``value`` of other ``values``."""
        self.values = list(values)
        with self.hold_sync(), self.hold_trait_notifications():
            self.label = label or self.label
            self.texts = [self.text(option) for option in self.values]
            self.index = self.values.index(value)


class Command(anywidget.AnyWidget):
    """A command to copy, and a note on what it leaves out."""

    _esm = HERE / "command.js"
    label = traitlets.Unicode("The same as a command").tag(sync=True)
    line = traitlets.Unicode().tag(sync=True)
    note = traitlets.Unicode().tag(sync=True)


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
        """Replaces the text; empty lines are left out.

        Args:
            lines: Text of each line.
            without: Names that the legend leaves out.
        """
        keys = {name: key for name, key in self.legend.items() if name not in without}
        self.widget.value = rendered(
            HERE / "text.html.j2", lines=list(filter(None, lines)), heading=self.heading, keys=keys
        )


class Tab:
    """What a tab answers: figures under headings, a caption, the command, or why there is none."""

    def __init__(self, headings: dict[str, Text], figures: dict[str, Figure]) -> None:
        self.headings, self.figures = headings, figures
        self.message, self.caption = Text("ddplab-message"), Text("ddplab-caption")
        self.command = Command()
        self.is_quiet = False

    def page(
        self,
        controls: Sequence[ipywidgets.Widget],
        above: Sequence[ipywidgets.Widget] = (),
        *,
        width: str = "",
        has_command: bool = True,
    ) -> ipywidgets.Box:
        """Returns the tab: controls beside figures; all else is as wide as the page.

        ``above`` comes first. ``width`` is the name of the figures' width in the style sheet, by
        default their own.
        """
        above = [*above, self.message.widget]
        below = [*[self.command] * has_command, self.caption.widget]
        for widget in (*above, *below):
            widget.add_class("ddplab-wide")
        panels = [
            _styled(
                ipywidgets.VBox([self.headings[name].widget, made]),
                "ddplab-panel",
                f"ddplab-{width or name}",
            )
            for name, made in self.figures.items()
        ]
        side = _styled(ipywidgets.VBox(controls), "ddplab-controls")
        plots = _styled(ipywidgets.Box(panels), "ddplab-plots")
        return _styled(ipywidgets.Box([*above, side, plots, *below]), "ddplab-explore")

    @contextmanager
    def quietly(self) -> Iterator[None]:
        """Sets ``is_quiet`` inside the block, in which controls are moved by the tab itself."""
        self.is_quiet = True
        try:
            yield
        finally:
            self.is_quiet = False

    @contextmanager
    def answering(self) -> Iterator[None]:
        """Says why there is no answer where the block raises UserError, and shows no other."""
        try:
            yield
        except UserError as error:
            self.refuse(error)

    def refuse(self, error: UserError) -> None:
        """Says why there is no answer, and takes the one before away."""
        self.message.show(needs(error.task) if isinstance(error, NotYetWritten) else str(error))
        for made in self.figures.values():
            clear(made)
        for text in (*self.headings.values(), self.caption):
            text.show()
        with self.command.hold_sync():
            self.command.line = self.command.note = ""


def needs(task: str) -> str:
    """Returns the sentence that stands where a student's code is missing."""
    return (
        f"Task {task} is not written yet: this is drawn by the code that you write for it in "
        "common/exercises. Write it and open this page again."
    )


def choice(
    label: str, options: Mapping[str, str] | Sequence[str], value: str = "", stacked: bool = True
) -> ipywidgets.Dropdown:
    """Returns a list to choose from, below its label or beside it; the first or ``value`` chosen.

    A mapping goes from what is shown to the value.
    """
    pairs = list(options.items()) if isinstance(options, Mapping) else list(options)
    dropdown = ipywidgets.Dropdown(description=label, options=pairs)
    dropdown.value = value or dropdown.value
    dropdown.style.description_width = "auto"
    for name in ("ddplab-choice", *["ddplab-stacked"] * stacked):
        dropdown.add_class(name)
    return dropdown


def on_change(controls: Iterable[ipywidgets.Widget], update: Callable[[], None]) -> None:
    """Calls ``update`` whenever one of these sliders and lists is moved."""
    for control in controls:
        trait = "index" if isinstance(control, Slider) else "value"
        control.observe(lambda _: update(), trait)


def _styled(container: ipywidgets.Box, *css_classes: str) -> ipywidgets.Box:
    """Returns a container whose layout is the style sheet's."""
    for name in css_classes:
        container.add_class(name)
    return container


def steps_between(low: float, high: float, extra: float | None = None) -> list[float]:
    """Returns round numbers from ``low`` to ``high``, a decade's ``STEPS``, with ``extra`` added.

    >>> steps_between(4, 20, extra=7)
    [4.0, 5.0, 6.0, 7, 8.0, 10.0, 12.0, 15.0, 20.0]
    """
    first, last = np.floor(np.log10([low, high])).astype(int)
    powers = range(first, last + 1)
    values = [float(f"{step}e{power}") for power in powers for step in STEPS]
    steps = {value for value in values if low <= value <= high}
    return sorted(steps if extra is None else steps | {extra})


def time_text(seconds: float) -> str:
    """Formats a time with three figures in its unit: ``85 µs``, ``1.2 ms``, ``3.4 s``."""
    for unit, name in ((1.0, "s"), (1e-3, "ms")):
        if seconds >= unit:
            return f"{digits(seconds / unit)} {name}"
    return f"{digits(seconds * 1e6)} µs"
