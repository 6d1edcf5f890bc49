"""What the explorer's figures share: large letters, units, colours; data that is replaced.

A figure is made once. What it shows is changed within ``batch_update``, which sends one message.
"""

from __future__ import annotations

import plotly.graph_objects as go

from common.analysis.style import BLACK

LETTERS = 20
"""Size of letters, in pixels."""
FONT = {"family": "system-ui, Segoe UI, Helvetica Neue, Arial, sans-serif", "size": LETTERS}
GRID = "#d9d9d9"


def figure(
    *traces: go.Bar | go.Scatter, x_title: str, y_title: str, height: int, **layout: object
) -> go.FigureWidget:
    """Returns a figure that fills its place and follows the window's size."""
    made = go.FigureWidget(
        data=list(traces),
        layout=go.Layout(
            template="none",
            font={**FONT, "color": BLACK},
            autosize=True,
            height=height,
            margin={"l": 82, "r": 16, "t": 8, "b": 62},
            legend={"orientation": "h", "x": 0, "y": 1.0, "yanchor": "bottom", "font": FONT},
            hoverlabel={"font": FONT},
            bargap=0.1,
            **layout,
        ),
    )
    made.update_xaxes(title={"text": x_title, "standoff": 6}, gridcolor=GRID, zeroline=False)
    made.update_yaxes(title={"text": y_title, "standoff": 8}, gridcolor=GRID, zeroline=False)
    # No toolbar: its buttons have no names; zooming and hovering do without it.
    made._config = {**made._config, "responsive": True, "displayModeBar": False}
    return made


def line(
    name: str, colour: str, *, width: int = 4, dash: str = "solid", **options: object
) -> go.Scatter:
    """Returns a line without points yet."""
    return go.Scatter(
        x=[],
        y=[],
        name=name,
        mode="lines",
        line={"color": colour, "width": width, "dash": dash},
        **options,
    )


def points(name: str, colour: str, *, symbol: str, size: int = 16, **options: object) -> go.Scatter:
    """Returns points that are not placed yet."""
    marker = {
        "color": colour,
        "size": size,
        "symbol": symbol,
        "line": {"color": BLACK, "width": 2},
    }
    return go.Scatter(x=[], y=[], name=name, mode="markers", marker=marker, **options)
