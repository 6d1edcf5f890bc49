"""The study of traces: what a cut one takes over, and predictions that were refused."""

from __future__ import annotations

import re
import shutil
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pandas as pd
import pytest

from common.perfmodel.replay.changes import Predicted
from common.perfmodel.replay.gate import Gate
from common.runtime.paths import project_root
from common.runtime.stage_progress import StageProgress
from common.samples import Interval
from common.studies.traces import traces
from common.studies.traces.traces import TABLES, TracesStudy, cases_of, run_study, summary

RECORDED = project_root() / "data" / "xeon-2-cores" / "study-traces"


def test_a_study_without_a_job_left_has_the_tables_of_the_one_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(traces, "why_no_hosts", lambda: None)
    for name in TABLES:
        shutil.copy(RECORDED / name, tmp_path)
    path = run_study(TracesStudy(continues=str(tmp_path)), str(tmp_path), StageProgress())
    for name in (*TABLES, "cases.csv"):
        tables = [pd.read_csv(folder / name) for folder in (path, RECORDED)]
        pd.testing.assert_frame_equal(*tables)


def test_a_refused_prediction_is_a_miss() -> None:
    arms, predictions = (pd.read_csv(RECORDED / name) for name in TABLES)
    of_case = (predictions["kind"] == "bf16") & (predictions["rate"] == "40mbit")
    of_case &= (predictions["model"] == "equal") & (predictions["round"] == 0)
    numbers = ["step_ms", "low_ms", "high_ms"]
    refused = predictions.assign(**{name: predictions[name].mask(of_case) for name in numbers})
    before, after = (cases_of(arms, table) for table in (predictions, refused))
    assert len(before) == len(after)
    [changed] = np.flatnonzero(before["error"] != after["error"])
    assert np.isinf(after["error"][changed])
    assert after["inside"][changed] == before["inside"][changed] - 1 / after["rounds"][changed]
    assert "by 10%: predicted within 10% of the change in 47;" in summary(before, arms)
    assert "by 10%: predicted within 10% of the change in 46;" in summary(after, arms)
    interval = r"median error of the change [\d.]+% \([\d.]+% to [\d.]+%\), of the step [\d.]+% \("
    assert re.search(interval, summary(before, arms))


@pytest.mark.parametrize(
    ("replayed_s", "expected"),
    [(1.01, (900.0, "")), (1.2, (None, "rank 0 is off in step 0"))],
)
def test_a_replay_that_is_off_refuses_its_predictions(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, replayed_s: float, expected: tuple
) -> None:
    steps = pd.DataFrame({"step": [0], "measured_s": [1.0], "replayed_s": [replayed_s]})
    gate = Gate(steps, "rank 0 is off in step 0")
    answer = Predicted("no slow rank", Interval(0.9, 0.8, 1.0))
    monkeypatch.setattr(traces, "read_job", lambda path: SimpleNamespace(program=None))
    monkeypatch.setattr(traces, "run", lambda program: None)
    monkeypatch.setattr(traces, "gate_of", lambda replayed: gate)
    monkeypatch.setattr(traces, "predicted", lambda *arguments: answer)
    (tmp_path / "round-0" / traces.SLOW).mkdir(parents=True)
    [measured], [foretold] = traces.job_rows(tmp_path, "equal", "40mbit", ("40mbit",))
    assert measured["replay_error"] == pytest.approx(replayed_s - 1)
    assert (foretold["step_ms"], foretold["not_judged"]) == expected
