"""Causes in a script itself, from made-up runs whose answer is known."""

from __future__ import annotations

import json
from pathlib import Path

import pandas as pd
import pytest
from scaling_evidence import MadeUp

from common.diagnose.diagnosis import examine_case
from common.diagnose.evidence.case import Case
from common.diagnose.evidence.evidence import open_evidence


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
