"""The controls: a slider, a command to copy, and a choice.

ipywidgets' own slider has no name for a screen reader, and numbers on it are small. This one is a
native range input over a list of values, with what each value is called.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Generic, TypeVar

import anywidget
import ipywidgets
import numpy as np
import traitlets

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
            self.texts = [self.text(one) for one in self.values]
            self.index = self.values.index(value)


class Command(anywidget.AnyWidget):
    """A command to copy, and a note on what it leaves out."""

    _esm = HERE / "command.js"
    label = traitlets.Unicode("The same as a command").tag(sync=True)
    line = traitlets.Unicode().tag(sync=True)
    note = traitlets.Unicode().tag(sync=True)


def choice(label: str, options: Mapping[str, str] | Sequence[str]) -> ipywidgets.Dropdown:
    """Returns a list to choose from. A mapping goes from what is shown to the value."""
    pairs = list(options.items()) if isinstance(options, Mapping) else list(options)
    found = ipywidgets.Dropdown(description=label, options=pairs)
    found.style.description_width = "auto"
    found.add_class("ddplab-choice")
    return found


def box(*children: ipywidgets.Widget, css_class: str) -> ipywidgets.Box:
    """Returns a box whose layout is the style sheet's."""
    found = ipywidgets.Box(children)
    found.add_class(css_class)
    return found


def steps_between(low: float, high: float, own: float | None = None) -> list[float]:
    """Returns round numbers from ``low`` to ``high``, a decade's ``STEPS``, and ``own`` among them.

    >>> steps_between(4, 20, own=7)
    [4.0, 5.0, 6.0, 7, 8.0, 10.0, 12.0, 15.0, 20.0]
    """
    first, last = np.floor(np.log10([low, high])).astype(int)
    powers = range(first, last + 1)
    values = [float(f"{step}e{power}") for power in powers for step in STEPS]
    found = [value for value in values if low <= value <= high]
    if own is not None and own not in found:
        found.append(own)
    return sorted(found)
