"""Decisions beside plans: judged as bytes added up by hand judge them, and as the command answers.

gpt2-large is counted by its shapes. DDP keeps 20 bytes of each parameter on a rank (weight,
gradient, bucket, two moments), full sharding 16 divided by the ranks.
"""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest
from command_line import answered

from common.analysis.plans import decisions
from common.analysis.plans.decisions import (
    CLUSTER,
    GLOBAL_BATCH,
    GPUS,
    MODEL,
    NOTHING,
    TITLES,
    beside_plans,
)
from common.analysis.show import show
from common.errors import NotYetWritten

pytestmark = pytest.mark.slow  # it searches a dozen times

GB = 1e9
WIDTH, BLOCKS, VOCABULARY, POSITIONS = 1280, 36, 50_257, 1024
PARAMETERS = (VOCABULARY + POSITIONS + 2) * WIDTH + BLOCKS * (12 * WIDTH + 13) * WIDTH
LIBRARIES_GB = 1.0
"""Memory of a GPU that the context and the libraries take."""
PASSES_GB = 3.0
"""More than the passes of one sequence take with every block computed again: inputs of 36 blocks
(0.2 GB), what one block keeps (0.1 GB), three tables of logits (0.6 GB), and what autocast keeps
of weights in 16 bits (at most 1.5 GB)."""
SMALLEST = "micro_batch=1 checkpointing=block"
KEPT_GB = {"DDP": 20 * PARAMETERS / GB, "FULL_SHARD": 16 * PARAMETERS / GPUS / GB}


@pytest.fixture(scope="module")
def ddp() -> list[decisions.Decision]:
    """Returns the decision for DDP at all three memories."""
    return beside_plans(dict.fromkeys((24, 12, 6), f"DDP {SMALLEST}"))


def test_ddp_is_judged_as_by_hand_for_every_memory(ddp: list[decisions.Decision]) -> None:
    kept_gb = KEPT_GB["DDP"]
    for decision in ddp:
        peak_gb, usable_gb = decision.mine.peak_bytes / GB, decision.memory_gb - LIBRARIES_GB
        assert kept_gb < peak_gb < kept_gb + PASSES_GB
        if usable_gb > 1.03 * (kept_gb + PASSES_GB):
            assert re.match("right|fits", decision.verdict)
            assert decision.step_s > 0
        else:
            missing_gb = float(re.match(r"lacks ([\d.]+) GB", decision.verdict)[1])
            assert kept_gb < usable_gb + missing_gb < kept_gb + PASSES_GB
            assert decision.step_s is None
    assert [decision.step_s is None for decision in ddp] == [False, True, True]


def test_what_is_sharded_fits_into_the_middle_memory_alone() -> None:
    middle, least = beside_plans({12: f"FULL_SHARD {SMALLEST}", 6: f"FULL_SHARD {SMALLEST}"})
    assert KEPT_GB["FULL_SHARD"] < middle.mine.peak_bytes / GB < 12 - LIBRARIES_GB
    assert re.match("right|fits", middle.verdict)
    assert middle.searched.fastest(strategy="DDP") is None
    assert KEPT_GB["FULL_SHARD"] > 6 - LIBRARIES_GB
    assert least.verdict.startswith("lacks")
    assert least.answer == "nothing fits"


def test_nothing_is_a_decision_and_none_is_none(ddp: list[decisions.Decision]) -> None:
    right, undecided = beside_plans({6: NOTHING, 6.0001: None})
    assert right.verdict == "right: nothing fits"
    assert undecided.verdict is None
    wrong = decisions.Decision(24, NOTHING, ddp[0].searched, None)
    assert wrong.verdict == f"{ddp[0].searched.best.plan.label} fits"
    rows = show([ddp[0], replace(ddp[0], words=None, mine=None)], TITLES)._repr_markdown_()
    assert [row.count("–") for row in rows.splitlines()[2:]] == [0, 7]  # all but the memory


@pytest.mark.parametrize("words", ["FSDP", "DDP micro_batch=5", "DDP batch=4", 4])
def test_what_is_no_plan_gets_its_line(words: object) -> None:
    [decision] = beside_plans({6: words})
    assert decision.mine is None
    assert "\n" not in decision.verdict
    assert "--mine" in decision.verdict


def test_the_answer_is_that_of_the_command(tmp_path: Path, ddp: list[decisions.Decision]) -> None:
    path, best = tmp_path / "answer.json", ddp[1].searched.best
    flags = ("--model", MODEL, "--cluster", CLUSTER, "--gpus", GPUS, "--global-batch", GLOBAL_BATCH)
    answered("plan", *flags, "--memory", "12GB", "--json", str(path))
    answer = json.loads(path.read_text())
    assert (answer["peak_bytes"], answer["step_s"]) == (best.peak_bytes, best.time.step_s)
    [right] = beside_plans({12: f"{answer['strategy']} micro_batch={answer['micro_batch']}"})
    assert right.verdict == "right: the plan to take"


def test_a_students_tree_without_buckets_has_one(
    monkeypatch: pytest.MonkeyPatch, ddp: list[decisions.Decision]
) -> None:
    def not_there(*_: object, **__: object) -> None:
        raise NotYetWritten("A2.1")

    monkeypatch.setattr("common.perfmodel.ddp.bucketings.assign_buckets", not_there)
    [decision] = beside_plans({24: f"DDP {SMALLEST}"})
    written = ddp[0]
    assert decision.mine.peak_bytes == written.mine.peak_bytes
    assert decision.step_s > written.step_s  # nothing hides the only bucket
    gradients_mib = 4 * PARAMETERS / 2**20
    assert decision.mine.plan.bucket_cap_mib == pytest.approx(gradients_mib, rel=0.01)
    [line] = [line for line in decision.searched.basis if "A2.1" in line]
    assert "one bucket" in line
    assert not [line for line in written.searched.basis if "A2.1" in line]
