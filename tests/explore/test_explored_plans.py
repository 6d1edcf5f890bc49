"""The explorer's plans: a memory that the slider sets is what the command plans with."""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from typing import NoReturn

import pytest
from command_line import answered

from common.errors import UserError
from common.explore.chosen_model import ChosenModel, named_model
from common.explore.clusters import plan_tab
from common.explore.clusters.plan_tab import GB, Asked, PlanTab, searched_for, within
from common.perfmodel.architectures.published_sizes import sized_architecture


@pytest.mark.parametrize(
    ("memory_gb", "seq_len"),
    [
        (6, 512),
        *(
            pytest.param(*case, marks=pytest.mark.slow)
            for case in ((80, None), (12, None), (3, None))
        ),
    ],
)
def test_less_memory_leaves_what_the_command_finds_with_it(
    tmp_path: Path, memory_gb: int, seq_len: int | None
) -> None:
    model = named_model("gpt2-large")
    if seq_len:
        configuration = tmp_path / "two words" / "config.json"
        configuration.parent.mkdir()
        sizes = {"n_layer": 3, "n_embd": 1280, "n_head": 20, "vocab_size": 50257}
        configuration.write_text(json.dumps({"model_type": "gpt2", "n_positions": 1024} | sizes))
        name = str(configuration)
        model = ChosenModel(name, *sized_architecture(name, seq_len))
    tab = PlanTab(model)
    with tab.quietly():
        for name, value in (("gpus", 8), ("samples", 2)):
            slider = tab.sliders[name]
            slider.offer(slider.values, value)
    tab.update()
    tab.memory.offer([*tab.memory.values, memory_gb], memory_gb)
    asked = Asked("h100-ib", 8, 2, "bfloat16")
    here = within(searched_for(model, asked), memory_gb * GB)
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
    assert len(front.x) > (1 if seq_len else 3)


def test_as_many_gpus_are_offered_as_the_cluster_has(monkeypatch: pytest.MonkeyPatch) -> None:
    searches = []

    def search(_: ChosenModel, wanted: Asked) -> NoReturn:
        searches.append((wanted.cluster, wanted.gpus))
        raise UserError("not searched")

    monkeypatch.setattr(plan_tab, "searched_for", search)
    tab = PlanTab()
    gpus = tab.sliders["gpus"]
    for cluster, most in (("rtx4090-pcie", 8), ("h100-ib", 16384), ("titan-rtx-pcie", 2)):
        tab.choices["cluster"].value = cluster
        assert (gpus.values[0], gpus.values[-1]) == (2, most)
    # As many as before, where there are so many; each choice is searched once.
    assert searches == [("rtx4090-pcie", 8), ("h100-ib", 8), ("titan-rtx-pcie", 2)]
