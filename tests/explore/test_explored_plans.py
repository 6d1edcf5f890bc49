"""The explorer's plans: a memory that the slider sets is what the command plans with."""

from __future__ import annotations

import json
import shlex
from pathlib import Path

import pytest
from command_line import answered

from common.explore.chosen_model import named_model
from common.explore.clusters.plan_tab import GB, Asked, PlanTab, searched_for, within


@pytest.mark.parametrize("memory_gb", [80, 12, 3])
def test_less_memory_leaves_what_the_command_finds_with_it(tmp_path: Path, memory_gb: int) -> None:
    tab = PlanTab()
    for name, value in (("gpus", 8), ("samples", 2)):
        slider = tab.sliders[name]
        slider.offer(slider.values, value)
    tab.update()
    tab.memory.offer([*tab.memory.values, memory_gb], memory_gb)
    asked = Asked("h100-ib", 8, 2, "bfloat16")
    here = within(searched_for(named_model("gpt2-large"), asked), memory_gb * GB)
    path = tmp_path / "answer.json"
    answered(*shlex.split(tab.command.line)[3:], "--json", str(path))
    answer = json.loads(path.read_text())
    *_, front, star, edge = tab.figure.data
    assert edge.x == (here.question.usable_bytes / GB,) * 2
    if answer["strategy"] is None:
        assert here.best is None
        assert "Nothing fits" in tab.heading.widget.value
        assert len(star.x) == 0
        return
    assert here.best.time.step_s == pytest.approx(answer["step_s"])
    assert here.best.peak_bytes == answer["peak_bytes"]
    assert here.best.plan.label in tab.heading.widget.value
    assert list(star.x) == [here.best.peak_bytes / GB]
    found = [plan["peak_bytes"] for plan in answer["frontier"]]
    assert [plan.peak_bytes for plan in here.frontier] == found
    assert len(front.x) > 3


def test_what_cannot_be_planned_is_said_in_place_of_the_figure() -> None:
    tab = PlanTab()
    tab.choices["cluster"].value = "v100-dgx1"
    assert "no peak of V100-SXM2-16GB in bfloat16" in tab.message.widget.value
    assert not any(len(trace.x) for trace in tab.figure.data)
