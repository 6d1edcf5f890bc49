"""Makes the explorer's figures alike: large letters, units, colours; data that is replaced.

A figure is made once. What it shows is changed within ``batch_update``, which sends one message.
"""

from __future__ import annotations

import copy
from pathlib import Path

import anywidget
import plotly.basewidget
import plotly.graph_objects as go
import traitlets

from common.analysis.style import BLACK

CODE = Path(__file__).with_name("figure.js")
LETTERS = 20
"""Size of letters, in pixels."""
FONT = {"family": "system-ui, Segoe UI, Helvetica Neue, Arial, sans-serif", "size": LETTERS}
GRID = "#d9d9d9"
SHOWN = ["_widget_data", "_widget_layout"]
"""Traits that say what a figure shows."""


class Plotly(anywidget.AnyWidget):
    """Plotly's code, which a page needs once for all of its figures. Shows nothing."""

    _esm = CODE
    code = traitlets.Unicode().tag(sync=True)

    def __init__(self) -> None:
        # With the first message: JupyterLab looks for it as soon as the widget is there.
        super().__init__(code=str(plotly.basewidget.BaseFigureWidget._esm))
        self.layout.display = "none"


class Figure(go.FigureWidget):
    """A figure of which a page that is opened late, or again, gets what it shows by then.

    Plotly's own says what it was made with, and sends changes to the pages that are open.
    """

    _esm = CODE

    def __init__(self, *arguments: object, **options: object) -> None:
        super().__init__(*arguments, **options)
        self.on_msg(self._answer)

    def get_state(self, key: object = None, drop_defaults: bool = False) -> dict:
        """Returns the state that is sent to a page."""
        if (key is None or key == SHOWN) and getattr(self, "_data", None):
            self._trait_values["_widget_data"] = copy.deepcopy(self._data)
            self._trait_values["_widget_layout"] = copy.deepcopy(self._layout)
        return super().get_state(key, drop_defaults)

    def _answer(self, _: object, message: object, __: object) -> None:
        """Sends what the figure shows to a page that is about to draw it."""
        if message == {"figure": "show"}:
            self.send_state(SHOWN)
            self.send({"figure": "shown"})


def figure(
    *traces: go.Bar | go.Scatter, x_title: str, y_title: str, height: int, **layout: object
) -> Figure:
    """Returns a figure that fills its place and follows the window's size."""
    made = Figure(
        data=list(traces),
        layout=go.Layout(
            template="none",
            font={**FONT, "color": BLACK},
            autosize=True,
            height=height,
            margin={"l": 84, "r": 34, "t": 6, "b": 54},
            showlegend=False,
            hoverlabel={"font": FONT},
            bargap=0.1,
            **layout,
        ),
    )
    made.update_xaxes(title={"text": x_title, "standoff": 4}, gridcolor=GRID, zeroline=False)
    made.update_yaxes(title={"text": y_title, "standoff": 8}, gridcolor=GRID, zeroline=False)
    # No toolbar: its buttons have no names; zooming and hovering do without it.
    made._config = {**made._config, "responsive": True, "displayModeBar": False}
    return made


def line(
    name: str, colour: str, *, width: int = 4, dash: str = "solid", **options: object
) -> go.Scatter:
    """Returns a line without points yet."""
    style = {"color": colour, "width": width, "dash": dash}
    return go.Scatter(x=[], y=[], name=name, mode="lines", line=style, **options)


def points(name: str, colour: str, *, symbol: str, size: int = 16) -> go.Scatter:
    """Returns points that are not placed yet."""
    edge = {"color": BLACK, "width": 2}
    marker = {"color": colour, "size": size, "symbol": symbol, "line": edge}
    return go.Scatter(x=[], y=[], name=name, mode="markers", marker=marker)


def bar(name: str, colour: str) -> go.Bar:
    """Returns bars that are not placed yet."""
    return go.Bar(x=[], y=[], name=name, marker={"color": colour})


def clear(made: Figure) -> None:
    """Takes all points away."""
    for trace in made.data:
        trace.x, trace.y = [], []
