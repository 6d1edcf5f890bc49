"""What runs say of the conclusions of answers: the recorded ones, and ones that were changed."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from command_line import ROOT

from common.analysis.conclusions.conclusion import (
    SAME_DATA,
    Conclusion,
    Status,
    above,
    below,
    conclusions,
    conclusions_of,
    seen,
)
from common.analysis.runs import recorded_assignment
from common.errors import UserError
from common.judged import Judged
from common.samples import student

NOTEBOOKS = sorted(path.stem for path in (ROOT / "notebooks").glob("assignment*.ipynb"))
NOT_SETTLED = {
    "assignment0_memory": {  # four rounds of six
        "the loss in pieces makes the step slower",
        "checkpointing makes the step slower",
    },
    "assignment0_profile": {
        "its time is a smaller multiple of forward's",
        "`torch.compile` stays below what fusing could gain",
    },
    "assignment0_throughput": {
        "the step reaches more than half of the peak",  # a single visit
        "bfloat16 makes the step faster",  # four rounds of six
        "`compile` makes the step faster",
        "four passes an update make the step faster",
        "checkpointing makes the step slower",
        "sdpa makes the step faster",
        "the fused update makes the step faster",
        "all together gain less than the product",
    },
    "assignment1_ddp": {  # two rounds
        "without an exchange, n ranks are less than n times as fast",
        "the second gap is the larger one, 1 micro-batch",
        "the second gap is the larger one, 2 micro-batches",
        "the exchange makes the step longer, 1 micro-batch",
        "the exchange makes the step longer, 2 micro-batches",
        "the exchange's share falls with the micro-batches",
        "the exchange's milliseconds fall with the micro-batches",
        "DDP hides less than half of its communication",  # three traced steps
    },
    "assignment1_fsdp": {  # two rounds
        "FULL_SHARD hides less than 5 % over gloo",  # three traced steps
        "SHARD_GRAD_OP hides less than 5 %",
        "DDP is the fastest, 1 micro-batch",
        "DDP is the fastest, 2 micro-batches",
        "FULL_SHARD is slower than SHARD_GRAD_OP, 1 micro-batch",
        "FULL_SHARD is slower than SHARD_GRAD_OP, 2 micro-batches",
        "between hosts DDP is the fastest",
        "DDP's step is predicted too short",
        "FULL_SHARD's step is predicted too short",
        "SHARD_GRAD_OP's step is predicted too short",
    },
    "assignment2_part2_prediction": {"what is chosen is not slower than the best"},
    "assignment2_part3_evaluation": {
        "no error is above 5 %",  # at most 3.3 %, and it may be 7
        "what is chosen is not slower than the best",
        "the pass without DDP was slower in the sweep",
        "less is exposed than DDP recorded, at every cap",
        "on the slowest link a(x) is enough for 3 %",  # four rounds of six
        "the smallest cap does so at worst, not in the median",  # 3 % (0 to 13)
    },
    "assignment2_emulated_hosts": {  # four rounds of six
        "on the slowest link one bucket is slower than the best",
        "on the slowest link the chosen cap beats the default",
        "on the slowest link the error is told from noise",
    },
    "assignment3_dynamic_batches": {
        "ranks wait less than padded tokens alone would say",  # 12.1 % ends the interval
        "on IMDB dynamic takes less than static",
        "on IMDB dynamic does not pay",
    },
    "assignment4_synthetic_scaling": {
        "weak scaling, largest batch: faster than one rank",  # four rounds of six
        "weak scaling, smallest batch: slower than one rank",
        "strong scaling, smallest batch: slower than one rank",
        "no series reaches 80 %",
        "the correction makes the other arms' predictions worse",
        "no law describes the points",  # three rounds
        "all steps of the replay are predicted too short",
        "on the most hosts ranks wait or send for half of the step",
    },
    "assignment4_text_scaling": {
        "per sample four GPUs are faster on AG News, too",  # a single run of either
        "several ranks are faster than one",
        "accumulation raises the speedup",  # three rounds
        "a 16-bit exchange raises the speedup",
        "with a 16-bit exchange several ranks are slower than one",
    },
}
"""By notebook what the recorded run leaves open: noise hides it, or there are too few rounds."""
LONG = {
    "assignment2_emulated_hosts",
    "assignment2_part3_evaluation",
    "assignment2_part4_scale",
    "assignment2_discussion",
    "assignment4_synthetic_scaling",
    "assignment4_text_scaling",
}
"""Notebooks whose conclusions take longest."""
NOT_MEASURED = {"assignment0_memory": {"more is reserved than allocated"}}  # on a CPU


def statements(found: dict[str, Status], status: Status) -> set[str]:
    return {statement for statement, said in found.items() if said is status}


@pytest.mark.parametrize(
    "notebook",
    [pytest.param(name, marks=[pytest.mark.slow] * (name in LONG)) for name in NOTEBOOKS],
)
def test_the_recorded_run_contradicts_no_conclusion(notebook: str) -> None:
    recorded = recorded_assignment(notebook.partition("_")[0])
    found = {c.statement: seen(c, recorded).status for c in conclusions_of(notebook)}
    assert len(found) == len(conclusions_of(notebook))
    assert statements(found, Status.FAILS) == set()
    assert statements(found, Status.OPEN) == NOT_SETTLED.get(notebook, set())
    assert statements(found, Status.ABSENT) == NOT_MEASURED.get(notebook, set())


@pytest.mark.parametrize("notebook", NOTEBOOKS)
def test_answers_and_conclusions_are_of_the_notebooks_questions(notebook: str) -> None:
    cells = json.loads((ROOT / "notebooks" / f"{notebook}.ipynb").read_text())["cells"]
    staff = ["".join(c["source"]) for c in cells if "staff" in c["metadata"].get("tags", ())]
    asked = ["".join(c["source"]) for c in cells if "staff" not in c["metadata"].get("tags", ())]
    numbers = re.findall(r"\*\*Question (\d+)\.\*\*", "\n".join(asked))
    assert numbers == [str(number + 1) for number in range(len(numbers))]
    assert re.findall(r"\*\*Answer (\d+)\.\*\*", staff[0]) == numbers
    assert f'conclusions("{notebook}", run_dir)' in staff[1]
    assert {str(c.question) for c in conclusions_of(notebook)} <= set(numbers)
    assert "Answer" not in re.sub(r"[Aa]nswer the question", "", "".join(asked))
    assert len(cells) <= 40


@pytest.fixture
def copied(tmp_path: Path) -> Path:
    """Returns a copy of the recorded run of assignment 0."""
    folder = tmp_path / "assignment0"
    shutil.copytree(recorded_assignment("assignment0"), folder)
    return folder


def said_of_options(folder: Path) -> dict[str, str]:
    found = conclusions_of("assignment0_throughput")
    return {c.statement: str(seen(c, folder).status) for c in found if c.question == 3}


def change_times(folder: Path, change: Callable[[pd.DataFrame], pd.DataFrame]) -> None:
    path = folder / "options" / "options-times.csv"
    change(pd.read_csv(path)).to_csv(path, index=False)


def eight_rounds(times: pd.DataFrame) -> pd.DataFrame:
    """Returns the recorded four rounds twice."""
    return pd.concat([times, times.assign(round=times["round"] + 4)], ignore_index=True)


def test_a_run_that_says_the_opposite_contradicts(copied: Path) -> None:
    names = {"bfloat16": "activation_checkpointing", "activation_checkpointing": "bfloat16"}
    change_times(copied, lambda times: eight_rounds(times).replace({"arm": names}))
    found = said_of_options(copied)
    assert found["bfloat16 makes the step faster"] == "does not hold"
    assert found["checkpointing makes the step slower"] == "does not hold"


def test_of_too_few_rounds_nothing_is_concluded(copied: Path) -> None:
    change_times(copied, lambda times: times[times["round"] < 3])
    assert set(said_of_options(copied).values()) == {"not settled"}


def test_what_was_not_measured_or_cannot_be_read_is_said_to_be_missing(copied: Path) -> None:
    change_times(copied, lambda times: times[times["arm"] != "bfloat16"])
    assert said_of_options(copied)["bfloat16 makes the step faster"] == "not measured"
    (copied / "options" / "options-times.csv").unlink()
    # The folder's name tells it from the one whose tables were read before.
    moved = copied.rename(copied.with_name("assignment0-without"))
    assert set(said_of_options(moved).values()) == {"not measured"}


def test_the_table_shows_the_recorded_run_beside_this_one(copied: Path) -> None:
    change_times(copied, eight_rounds)
    table = conclusions("assignment0_throughput", str(copied))
    assert table.columns == ["question", "conclusion", "recorded run", "this run"]
    [row] = [row for row in table.cells if row[1] == "bfloat16 makes the step faster"]
    assert row[2].startswith("**not settled**: 1.6")
    assert row[2].endswith("2 more rounds")
    assert row[3].startswith("**holds**: 1.6")
    own = str(recorded_assignment("assignment0"))
    assert conclusions("assignment0_throughput", own).columns == table.columns[:3]
    of_study = conclusions("assignment0_memory", str(copied))
    assert {row[3] for row in of_study.cells if row[0] == "6"} == {SAME_DATA}


def test_settled_above_holds_settled_below_does_not_and_the_rest_is_open() -> None:
    clear, hidden = np.array([0.2, 0.21, 0.19, 0.2]), np.array([0.2, -0.3, 0.1, 0.05])
    assert above(Judged(student(clear), null=0.0)).status is Status.HOLDS
    assert below(Judged(student(clear), null=0.0)).status is Status.FAILS
    assert above(Judged(student(hidden), null=0.0)).status is Status.OPEN
    assert above(Judged(student(clear[:3]), null=0.0)).status is Status.OPEN
    assert below(Judged(student(hidden * np.nan), null=0.0)).status is Status.ABSENT


@pytest.mark.parametrize("error", [UserError("no such table"), KeyError("column"), ValueError()])
def test_a_run_without_the_numbers_costs_a_row_and_no_notebook(error: Exception) -> None:
    def look(_: str) -> None:
        raise error

    assert seen(Conclusion(1, "it is so", look), "nowhere").status is Status.ABSENT
