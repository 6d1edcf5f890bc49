"""What a tab of the explorer still shows where it has no answer: the reason, and nothing else."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace

import pytest
from explore_support import small_system

from common.errors import NotYetWritten, UserError
from common.explore import batch_tab
from common.explore.batch_tab import BatchTab
from common.explore.bucket_tab import BucketTab
from common.explore.chosen_model import named_model
from common.explore.clusters.cluster_tab import ClusterTab
from common.explore.clusters.plan_tab import PlanTab
from common.explore.controls import Tab


def refusing(error: UserError) -> Callable:
    def refuse(*_: object) -> None:
        raise error

    return refuse


def bucket_tab() -> tuple[Tab, Callable[[], None]]:
    tab = BucketTab({"good": small_system, "bad": refusing(NotYetWritten("A2.4"))})
    return tab, lambda: tab.choice.set_trait("value", "bad")


def moved_bucket_tab() -> tuple[Tab, Callable[[], None]]:
    tab = BucketTab({"good": small_system})

    def move() -> None:
        tab.system = replace(tab.system, on=refusing(UserError("no such ranks")))
        tab.update()

    return tab, move


def batches() -> tuple[Tab, Callable[[], None]]:
    tab = BatchTab()

    def move() -> None:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(batch_tab, "divide", refusing(UserError("no such texts")))
            tab.update()

    return tab, move


def on_a_cluster(kind: type[ClusterTab | PlanTab]) -> tuple[Tab, Callable[[], None]]:
    tab = kind(named_model("gpt2-pico"))
    with tab.quietly():
        tab.choices["cluster"].value = "rtx4090-pcie"
        for slider in tab.sliders.values():
            slider.index = 0
    tab.update()
    return tab, lambda: tab.choices["cluster"].set_trait("value", "v100-dgx1")


@pytest.mark.parametrize(
    ("opens", "reason"),
    [
        (bucket_tab, "Task A2.4 is not written yet"),
        (moved_bucket_tab, "no such ranks"),
        (batches, "no such texts"),
        (lambda: on_a_cluster(ClusterTab), "no peak of V100-SXM2-16GB in bfloat16"),
        (lambda: on_a_cluster(PlanTab), "no peak of V100-SXM2-16GB in bfloat16"),
    ],
    ids=["buckets", "moved", "batches", "cluster", "plans"],
)
def test_a_refusal_takes_the_answer_before_away(opens: Callable, reason: str) -> None:
    tab, move = opens()

    def answer() -> list[str]:
        texts = [text.widget.value for text in (*tab.headings.values(), tab.caption)]
        written = [re.sub("<[^>]*>", "", text).strip() for text in texts]
        return [*filter(None, [*written, tab.command.line, tab.command.note])]

    def points() -> int:
        return sum(len(trace.x) for made in tab.figures.values() for trace in made.data)

    assert points()
    assert len(answer()) > 1
    move()
    assert reason in tab.message.widget.value
    assert (answer(), points()) == ([], 0)
