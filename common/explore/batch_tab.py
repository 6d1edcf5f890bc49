"""The tab of micro-batches: a global batch of texts, and how ranks share it."""

from __future__ import annotations

import numpy as np

from common.analysis.style import BLACK, BLUE, GREEN, ORANGE, RED
from common.data.text_lengths import LengthDistribution, read_text_lengths
from common.explore.controls import Key, Slider, Tab, Text, choice, needs, on_change
from common.explore.figures import Figure, bar, figure, line
from common.explore.micro_batches import PLANS, STATIC, BatchSettings, BatchView, divide, rectangles

DATA_SETS = {
    "SST-2: phrases of film reviews": "sst2",
    "AG News: news articles": "ag_news",
    "IMDB: whole film reviews": "imdb",
}
KEY = {
    "texts": Key(BLUE, "block"),
    "padding": Key(ORANGE, "block"),
    "bottleneck": Key(RED, "line"),
    "static's": Key(BLACK, "dashes"),
    "lower bound": Key(GREEN, "dots"),
}
POWERS = [1, 2, 4, 8, 16, 32, 64]
CUTS = [64, 128, 256, 512, 0]


class BatchTab(Tab):
    """The widgets of the tab."""

    def __init__(self) -> None:
        self._read: dict[str, LengthDistribution] = {}
        self.data_set = choice("Texts", DATA_SETS)
        self.plan = choice("Plan", {text: name for name, text in PLANS.items()})
        self.sliders: dict[str, Slider] = {
            "ranks": Slider("ranks", POWERS[1:], 4),
            "texts": Slider("texts of a rank (mean)", POWERS, 16),
            "max_length": Slider(
                "texts are cut at", CUTS, 256, lambda cut: f"{cut} tokens" if cut else "no length"
            ),
            "seed": Slider("draw", list(range(20)), 0, lambda seed: f"number {seed + 1}"),
        }
        super().__init__(
            {"rectangles": Text(heading=True), "ranks": Text(heading=True, legend=KEY)},
            {"rectangles": rectangle_figure(), "ranks": rank_figure()},
        )
        controls = [self.data_set, self.plan, *self.sliders.values()]
        self.widget = self.page(controls, width="timeline", has_command=False)
        on_change(controls, self.update)
        self.update()

    def settings(self) -> BatchSettings:
        """Returns what the controls say."""
        values = {name: slider.value for name, slider in self.sliders.items()}
        return BatchSettings(plan=self.plan.value, **values)

    def update(self) -> None:
        """Computes what the controls say and replaces the figures' data."""
        name, now = self.data_set.value, self.settings()
        with self.answering():
            if name not in self._read:
                self._read[name] = read_text_lengths(name)
            view = divide(self._read[name], now)
            self.message.show(*map(needs, view.unwritten))
            show_rectangles(self.figures["rectangles"], view)
            show_ranks(self.figures["ranks"], view)
            self._say(view, now)

    def _say(self, view: BatchView, now: BatchSettings) -> None:
        padding, static = 0.0, view.bottlenecks[STATIC]
        if view.padded.sum():
            padding = 1 - view.unpadded.sum() / view.padded.sum()
        self.headings["rectangles"].show(f"{padding:.0%} of what is computed is padding (orange)")
        heading, bottleneck = "", view.bottlenecks.get(now.plan)
        if bottleneck is not None:
            heading = f"bottleneck {bottleneck:,} tokens, {bottleneck / static:.0%} of static's"
        self.headings["ranks"].show(heading)
        by_plan = "; ".join(
            f"{plan} {tokens:,} ({tokens / static:.0%})"
            for plan, tokens in view.bottlenecks.items()
        )
        self.caption.show(
            f"Padded tokens of the slowest rank, by plan: {by_plan}; no plan has less than "
            f"{view.lower_bound:,}.",
            f"{len(view.lengths):,} texts, their lengths drawn from recorded ones "
            "(data/text-lengths). The optimum is task A3.1: in a student's tree the student's own.",
        )


def rectangle_figure() -> Figure:
    """Returns an empty drawing of a batch: a rectangle of each rank, filled by its texts."""
    return figure(
        line("padding", ORANGE, width=1, fill="tozeroy", fillcolor=ORANGE),
        line("texts", BLUE, width=1, fill="tozeroy", fillcolor=BLUE),
        x_title="texts, rank by rank",
        y_title="tokens",
        height=230,
        yaxis_rangemode="tozero",
        xaxis_showticklabels=False,
    )


def show_rectangles(made: Figure, view: BatchView) -> None:
    """Replaces the data of the rectangles."""
    padding, texts = made.data
    edges, heights, padded = rectangles(view)
    with made.batch_update():
        padding.x, padding.y = edges, padded
        texts.x, texts.y = edges, heights


def rank_figure() -> Figure:
    """Returns an empty plot of the padded tokens of each rank."""
    return figure(
        bar("texts", BLUE),
        bar("padding", ORANGE),
        line("bottleneck", RED, width=5),
        line("static's", BLACK, width=3, dash="dash"),
        line("lower bound", GREEN, width=5, dash="dot"),
        x_title="rank",
        y_title="tokens",
        height=290,
        barmode="stack",
        yaxis_rangemode="tozero",
    )


def show_ranks(made: Figure, view: BatchView) -> None:
    """Replaces the data of the ranks."""
    texts, padding, bottleneck, static, bound = made.data
    count = len(view.padded)
    ends = [-0.6, count - 0.4]
    with made.batch_update():
        made.layout.xaxis.dtick = max(1, count // 8)
        texts.x = padding.x = np.arange(count)
        texts.y, padding.y = view.unpadded, view.padded - view.unpadded
        for trace, height in (
            (bottleneck, view.padded.max()),
            (static, view.bottlenecks[STATIC]),
            (bound, view.lower_bound),
        ):
            trace.x, trace.y = ends, [int(height)] * 2
