"""``ddplab study``: what a study does not take is refused before it begins."""

from __future__ import annotations

import pytest
from command_line import refused


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["cs336", "--rounds", "2"], "--rounds: study cs336 has no rounds to choose"),
        (["grading", "--rounds", "-2"], "--rounds -2: at least 1"),
        (["memory", "--only", "x"], "--only: study memory runs all of its cases"),
        (["memory", "--continues", "x"], "--continues: study memory cannot be continued"),
        (["scripts", "--only", "nothing"], "unknown case 'nothing'"),
        (["plan", "--only", "llama-2x1gbits"], "did you mean 'llama-2x1gbit'"),
        (["plan", "--continues", "none"], "no case of it was planned"),
        (["scripts", "--only", "fifth", "--continues", "none"], "there is no cases.csv in it"),
    ],
)
def test_a_mistake_is_said_in_a_line(words: list[str], said: str) -> None:
    assert said in refused("study", *words)
