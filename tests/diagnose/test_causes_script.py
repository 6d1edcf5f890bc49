"""Causes in a script itself, from made-up runs whose answer is known."""

from __future__ import annotations

import json
from pathlib import Path

import pandas as pd
import pytest
from scaling_evidence import MadeUp

from common.diagnose.diagnosis import examine_case
from common.diagnose.evidence.case import Case, Verdict
from common.diagnose.evidence.evidence import open_evidence
from common.tables import STACK_COLUMNS

WAITING = "torch.distributed.distributed_c10d.barrier"


@pytest.mark.parametrize("in_turn", [False, True])
def test_a_collection_on_one_rank_stops_all(tmp_path: Path, in_turn: bool) -> None:
    """Ranks collect for 10 ms of each step of 40: both at once, or now one and now the other."""
    folder = MadeUp(noise=0.0).write(tmp_path / "run")
    environment = json.loads((folder / "environment.json").read_text()) | {"label": "watch"}
    (folder / "environment.json").write_text(json.dumps(environment))
    steps = pd.read_csv(folder / "steps.csv")
    steps = steps.assign(step_time_ms=40.0, collecting_time_ms=10.0)
    if in_turn:
        steps["collecting_time_ms"] *= (steps["step"] + steps["rank"]) % 2
    steps.to_csv(folder / "steps.csv", index=False)
    found = {v.cause: v for v in examine_case(Case(open_evidence(folder))).verdicts}
    verdict = found["garbage-collection"]
    assert verdict.lost_share == pytest.approx(0.25)
    assert verdict.predicted_speedup / verdict.speedup_now == pytest.approx(4 / 3)


@pytest.mark.parametrize(
    ("phase", "call", "between_ms", "title"),
    [
        ("evaluation", "torch.nn.modules.module.call", (30, 0), "rank 0 evaluates (train.py:31)"),
        (
            "between",
            "torch.serialization.save",
            (30, 0),
            "rank 0 writes a checkpoint (train.py:31)",
        ),
        ("between", "", (30, 30), "every rank does other work (train.py:31)"),
        ("evaluation", "x.call", (30, 31), "rank 0 evaluates (train.py:31) while"),  # 1 waits for 0
    ],
)
def test_work_between_steps_has_its_name_and_line(
    tmp_path: Path, phase: str, call: str, between_ms: tuple[int, int], title: str
) -> None:
    folder = MadeUp(noise=0.0).write(tmp_path / "run")
    environment = json.loads((folder / "environment.json").read_text()) | {"label": "watch"}
    (folder / "environment.json").write_text(json.dumps(environment))
    steps = pd.read_csv(folder / "steps.csv")
    steps["between_time_ms"] = steps["rank"].map(dict(enumerate(between_ms)))
    steps.to_csv(folder / "steps.csv", index=False)
    rows = [(0, phase, "/my code/train.py:31 validate", call, 60), (0, phase, "/a.py:1 f", "", 50)]
    rows += [(1, "between", "/my code/train.py:40 main", WAITING, 60)] * (between_ms == (30, 31))
    stacks = pd.DataFrame(rows, columns=STACK_COLUMNS)
    stacks.to_csv(folder / "stacks.csv", index=False)
    first = examine_case(Case(open_evidence(folder))).verdicts[0]
    assert first.title.startswith(title)


def test_no_cause_takes_more_than_the_step() -> None:
    verdict = Verdict("slow-rank", "", (), 1.95, "high", "", "")
    assert verdict.lost_share == 1.0
