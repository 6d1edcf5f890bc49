"""The three figures of buckets: the timeline, T(b) with b*, and efficiency over ranks."""

from __future__ import annotations

import itertools

import numpy as np
import plotly.graph_objects as go

from common.analysis.style import BLACK, BLUE, GOOD_EFFICIENCY, GREEN, GREY, ORANGE, RED, SKY
from common.explore.buckets import BucketSettings, BucketView, cap_curve
from common.explore.controls import Key
from common.explore.figures import Figure, clear, figure, line, points
from common.explore.systems import System
from common.perfmodel.perfetto_trace import in_flight_lanes

COMPUTATION, LANE_GAP = 1.0, 0.45
LIGHT_RED = "#f4c9ac"
CAP_KEY = {
    "predicted": Key(BLUE, "line"),
    "within 1 %": Key(GREEN, "band"),
    "b*": Key(RED, "star"),
    "this cap": Key(ORANGE, "dot"),
    "measured": Key(BLACK, "cross"),
}
EFFICIENCY_KEY = {"at this cap": Key(BLUE, "line"), "at b*": Key(GREEN, "dashes")}


def timeline_figure() -> Figure:
    """Returns an empty timeline: computation above, all-reduces below, exposed time behind."""
    bar = {"orientation": "h", "x": [], "y": [], "base": [], "width": []}
    edge = {"line": {"color": "white", "width": 1}}
    made = figure(
        go.Bar(**bar, name="exposed", marker={"color": LIGHT_RED}, hoverinfo="skip"),
        go.Bar(**bar, name="gradients computed", marker=edge),
        go.Bar(**bar, name="all-reduces", marker=edge),
        line("computation ends", BLACK, width=3, dash="dash"),
        line("all gradients are there", RED, width=4),
        x_title="time in the backward pass (ms)",
        y_title="",
        height=190,
        barmode="overlay",
    )
    made.update_xaxes(rangemode="tozero")
    made.update_yaxes(
        showgrid=False,
        range=[-0.5, 1.5],
        tickvals=[COMPUTATION, 0],
        ticktext=["gradients", "all-reduces"],
        ticks="",
    )
    made.update_layout(margin={"l": 120})
    return made


def show_timeline(made: Figure, view: BucketView) -> None:
    """Replaces the timeline's data."""
    exposed, computed, reduced, computation_end, all_there = made.data
    timeline = view.timeline
    with made.batch_update():
        if timeline is None:
            clear(made)
            return
        events = timeline.events
        ready_ms = np.maximum.accumulate([event.ready_s * 1e3 for event in events])
        start_ms = np.array([event.start_s * 1e3 for event in events])
        end_ms, total_ms = timeline.compute_end_s * 1e3, timeline.total_s * 1e3
        before = np.concatenate([[0.0], ready_ms[:-1]])
        colours = list(itertools.islice(itertools.cycle((BLUE, SKY)), len(events)))
        exposed.base, exposed.x, exposed.y, exposed.width = (
            [end_ms],
            [total_ms - end_ms],
            [0.5],
            [2],
        )
        computed.base, computed.x = before, ready_ms - before
        computed.y = np.full(len(events), COMPUTATION)
        computed.width = np.full(len(events), 0.8)
        computed.marker.color = colours
        lane = np.array(in_flight_lanes(events))
        most = lane.max() + 1
        reduced.base = start_ms
        reduced.x = np.array([event.end_s * 1e3 for event in events]) - start_ms
        reduced.y = LANE_GAP * ((most - 1) / 2 - lane) * (most > 1)
        reduced.width = np.full(len(events), 0.8 / most)
        reduced.marker.color = colours
        computation_end.x, computation_end.y = [end_ms, end_ms], [-0.5, 1.5]
        all_there.x, all_there.y = [total_ms, total_ms], [-0.5, 1.5]


def cap_figure() -> Figure:
    """Returns an empty plot of T(b)."""
    made = figure(
        line("within 1 % of b*", GREEN, width=14, connectgaps=False),
        line("T(b), predicted", BLUE),
        points("measured", BLACK, symbol="x-thin-open", size=12),
        points("b*", RED, symbol="star", size=24),
        points("this cap", ORANGE, symbol="circle", size=18),
        x_title="bucket cap b (MiB)",
        y_title="T (ms)",
        height=280,
    )
    caps = [4.0**power for power in range(-1, 7)]
    texts = [f"{cap:g}" for cap in caps]
    made.update_xaxes(type="log", tickvals=caps, ticktext=texts, tickangle=0)
    return made


def show_caps(
    made: Figure, view: BucketView, settings: BucketSettings, system: System, as_is: bool
) -> None:
    """Replaces the data of T(b).

    Args:
        made: Result of ``cap_figure``.
        view: T(b), and the pass at the cap.
        settings: Settings of the sliders.
        system: System with the measured points.
        as_is: Whether nothing was moved, so that measured points are shown.
    """
    near, curve, measured, best, chosen = made.data
    measured_ms = system.measured_ms if as_is else ()
    with made.batch_update():
        if view.best is None:
            clear(made)
            return
        caps, times_ms, near_ms = cap_curve(view.best)
        curve.x, curve.y = caps, times_ms
        near.x, near.y = caps, near_ms
        measured.x = [cap for cap, _ in measured_ms]
        measured.y = [time_ms for _, time_ms in measured_ms]
        measured.visible = bool(measured_ms)
        best.x, best.y = [view.best.cap_mib], [view.best.total_s * 1e3]
        chosen.x = [settings.cap_mib]
        chosen.y = [view.timeline.total_s * 1e3] if view.timeline else [None]


def efficiency_figure() -> Figure:
    """Returns an empty plot of efficiency over ranks."""
    made = figure(
        line(f"{GOOD_EFFICIENCY:.0%}", GREY, width=3, dash="dot"),
        line("at b*", GREEN, width=5, dash="dash"),
        line("at this cap", BLUE),
        points("here", ORANGE, symbol="circle", size=18),
        x_title="ranks",
        y_title="efficiency (%)",
        height=280,
    )
    ranks = [1, 4, 16, 64, 256, 1024]
    made.update_xaxes(
        type="log", tickvals=ranks, ticktext=list(map(str, ranks)), tickangle=0, range=[-0.05, 3.06]
    )
    made.update_yaxes(range=[0, 105], dtick=20)
    with made.batch_update():
        made.data[0].x, made.data[0].y = [1, 1024], [100 * GOOD_EFFICIENCY] * 2
    return made


def show_efficiency(made: Figure, view: BucketView, settings: BucketSettings) -> None:
    """Replaces the data of efficiency."""
    _, at_best, at_cap, chosen = made.data
    with made.batch_update():
        for trace, efficiency in ((at_best, view.at_best), (at_cap, view.at_cap)):
            trace.x = list(view.ranks) if efficiency is not None else []
            trace.y = 100 * efficiency if efficiency is not None else []
        chosen.x, chosen.y = [], []
        if view.at_cap is not None:
            chosen.x = [settings.ranks]
            chosen.y = [100 * view.at_cap[view.ranks.index(settings.ranks)]]
