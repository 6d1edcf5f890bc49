"""The study of scripts: another tool beside ours, on the same case."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from common.studies.script_cases import CASES
from common.studies.watched_scripts import run_under_traceml, traceml_verdict


@pytest.mark.slow
@pytest.mark.two_ranks
def test_traceml_judges_a_script_that_it_times_from_outside(tmp_path: Path) -> None:
    pytest.importorskip("traceml_ai")
    case = next(case for case in CASES if case.name == "data-loading-slow-loader-plain")
    assert traceml_verdict(case, tmp_path) == ""
    run_under_traceml(case, tmp_path, lambda line: None)
    # The fault delays the loader of one rank. On a busy machine TraceML sees that rank, but no
    # single phase of its step that is to blame.
    assert traceml_verdict(case, tmp_path) in {"INPUT_STRAGGLER", "STRAGGLER"}
    summary = json.loads((tmp_path / f"{case.name}-traceml.json").read_text())
    assert summary["step_time"]["metadata"]["global_ranks_used"] == 2
    assert summary["step_time"]["metadata"]["training_total_steps"] >= 50
    assert not (tmp_path / f"{case.name}-traceml").exists()
