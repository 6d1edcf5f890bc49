"""The tab of buckets: what moves, what is said, and the three figures."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace

import ipywidgets

from common.analysis.style import GOOD_EFFICIENCY
from common.explore.bucket_figures import (
    CAP_KEY,
    EFFICIENCY_KEY,
    cap_figure,
    efficiency_figure,
    show_caps,
    show_efficiency,
    show_timeline,
    timeline_figure,
)
from common.explore.buckets import (
    RANKS,
    SMALLEST_SHOWN_MIB,
    BucketSettings,
    BucketView,
    explore,
    falls_below,
    first_settings,
    predict_line,
    shown_ranks,
)
from common.explore.controls import (
    Slider,
    Tab,
    Text,
    choice,
    needs,
    on_change,
    steps_between,
    time_text,
)
from common.explore.systems import System
from common.perfmodel.ddp.best_cap import BestCap
from common.runtime.wording import counted, digits

FACTORS = steps_between(0.1, 10)
CONTENTION = [0.0, 0.25, 0.5, 0.75, 1.0, 1.25, 1.5, 2.0, 2.5, 3.0]
DEFAULT_CAP_MIB = 25.0


class BucketTab(Tab):
    """The widgets of the tab, and the system and T(b) that they show."""

    def __init__(self, systems: Mapping[str, Callable[[], System]]) -> None:
        self.systems = systems
        self.system: System | None = None
        self.at_first: BucketSettings | None = None
        self._searched: tuple[BucketSettings, BestCap | None] | None = None
        self.choice = choice("Start from", list(systems), stacked=False)
        self.sliders: dict[str, Slider] = {
            "alpha_us": Slider("latency α", [1.0], 1.0, lambda value: time_text(value / 1e6)),
            "beta_gb_per_s": Slider(
                "bandwidth β", [1.0], 1.0, lambda value: f"{digits(value)} GB/s"
            ),
            "ranks": Slider("ranks", list(RANKS), RANKS[0], lambda count: f"{count:,}"),
            "cap_mib": Slider("bucket cap b", [1.0], 1.0, lambda value: f"{digits(value)} MiB"),
            "compute": Slider("computation", FACTORS, 1.0, lambda value: f"× {value:g}"),
            "contention": Slider("contention", CONTENTION, 1.0, lambda value: f"× {value:g}"),
        }
        self.reset = ipywidgets.Button(description="Back to the system as it is")
        self.reset.add_class("ddplab-again")
        headings = {
            "timeline": Text(heading=True),
            "caps": Text(heading=True, legend=CAP_KEY),
            "efficiency": Text(heading=True, legend=EFFICIENCY_KEY),
        }
        figures = {
            "timeline": timeline_figure(),
            "caps": cap_figure(),
            "efficiency": efficiency_figure(),
        }
        super().__init__(headings, figures)
        self.widget = self.page([*self.sliders.values(), self.reset], above=[self.choice])
        self.choice.observe(lambda _: self.open(self.choice.value), "value")
        self.reset.on_click(lambda _: self.start_anew())
        on_change(self.sliders.values(), self.update)
        self.open(self.choice.value)

    def settings(self) -> BucketSettings:
        """Returns what the sliders say."""
        return BucketSettings(**{name: slider.value for name, slider in self.sliders.items()})

    def open(self, name: str) -> None:
        """Opens a system of the list and shows it as it is."""
        self.system, self._searched = None, None
        self.message.show(f"Opening {name} …")
        with self.answering():
            self.system = self.systems[name]()
            self.start_anew()

    def start_anew(self) -> None:
        """Puts all sliders where they change nothing."""
        if self.system is None:
            return
        most_mib = self.system.gradient_mib
        caps = steps_between(SMALLEST_SHOWN_MIB, max(1.0, most_mib * 1.5))
        few = max(cap for cap in caps if cap <= min(DEFAULT_CAP_MIB, max(1.0, most_mib / 4)))
        self.at_first = now = first_settings(self.system, few)
        with self.quietly():
            self._offer("alpha_us", now.alpha_us, f"latency α, {now.ranks} ranks")
            self._offer("beta_gb_per_s", now.beta_gb_per_s, f"bandwidth β, {now.ranks} ranks")
            self.sliders["cap_mib"].offer(caps, now.cap_mib)
            self.sliders["ranks"].offer(shown_ranks(self.system), now.ranks)
            for name in ("compute", "contention"):
                slider = self.sliders[name]
                slider.offer(slider.values, getattr(now, name))
        self.update()

    def update(self) -> None:
        """Computes what the sliders say and replaces the figures' data."""
        if self.is_quiet or self.system is None:
            return
        now = self.settings()
        # T(b) does not depend on the cap that is chosen.
        but_for_cap = replace(now, cap_mib=self.at_first.cap_mib)
        searched, best = self._searched or (None, None)
        with self.answering():
            view = explore(self.system, now, best if searched == but_for_cap else None)
            self._searched = (but_for_cap, view.best)
            self.message.show(*map(needs, view.unwritten))
            as_is = but_for_cap == self.at_first
            show_timeline(self.figures["timeline"], view)
            show_caps(self.figures["caps"], view, now, self.system, as_is)
            show_efficiency(self.figures["efficiency"], view, now)
            self._say(view, now, as_is)
            command = predict_line(self.system, now, self.at_first)
            with self.command.hold_sync():
                self.command.line, self.command.note = command.line, command.note

    def _offer(self, name: str, value: float, label: str) -> None:
        """Offers values from a thousandth of ``value`` to a thousand times as much."""
        self.sliders[name].offer(steps_between(value / 1000, value * 1000, value), value, label)

    def _say(self, view: BucketView, now: BucketSettings, as_is: bool) -> None:
        timeline, best = view.timeline, view.best
        texts = dict.fromkeys(self.headings, "")
        if timeline:
            texts["timeline"] = (
                f"T = {time_text(timeline.total_s)} at b = {digits(now.cap_mib)} MiB: "
                f"{counted(timeline.num_buckets, 'bucket')}, "
                f"{time_text(timeline.exposed_communication_s)} exposed (red)"
            )
        if best:
            texts["caps"] = f"b* = {digits(best.cap_mib)} MiB: T = {time_text(best.total_s)}"
        if view.at_cap is not None:
            share = view.at_cap[view.ranks.index(now.ranks)]
            under = falls_below(view, GOOD_EFFICIENCY)
            texts["efficiency"] = f"{share:.0%} on {now.ranks:,} ranks; " + (
                f"under {GOOD_EFFICIENCY:.0%} from {under:,} on"
                if under
                else f"never under {GOOD_EFFICIENCY:.0%}"
            )
        without = () if as_is and self.system.measured_ms else ("measured",)
        for name, text in texts.items():
            self.headings[name].show(text, without=without)
        moved = (now.alpha_us, now.beta_gb_per_s) != (
            self.at_first.alpha_us,
            self.at_first.beta_gb_per_s,
        )
        how = "all-reduces stretched to this α and β" if moved else "all-reduces as they are"
        if now.ranks != self.at_first.ranks:
            how += f", on {now.ranks:,} ranks"
        self.caption.show(f"{self.system.caption}. Shown: {how}.")
