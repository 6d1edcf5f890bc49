"""The study of scripts: another tool beside ours, on the same case."""

from __future__ import annotations

import ast
import json
from pathlib import Path

import pandas as pd
import pytest
from bundle_support import with_values, write_bundle

from common.diagnose.opened import open_diagnosis
from common.diagnose.studies.script_cases import CASES, ELEVENTH, HEALTHY, TENTH
from common.diagnose.studies.watched_scripts import (
    ScriptsStudy,
    copy_case,
    different_samples_per_s,
    judge,
    rounds_that_agree,
    run_under_traceml,
    traceml_verdict,
)
from common.runtime.paths import project_root

LOADING = next(case for case in CASES if case.name == "data-loading-detector-mosaic")


@pytest.mark.slow
@pytest.mark.two_ranks
def test_traceml_judges_a_script_that_it_times_from_outside(tmp_path: Path) -> None:
    pytest.importorskip("traceml_ai")
    case = LOADING
    assert traceml_verdict(case, tmp_path) == ""
    run_under_traceml(case, tmp_path, lambda line: None)
    # Which phase it blames is up to it, and to how busy the machine is.
    assert traceml_verdict(case, tmp_path) in {
        "COMPUTE_BOUND",
        "COMPUTE_STRAGGLER",
        "STRAGGLER",
        "INPUT_BOUND",
        "INSUFFICIENT_STEP_TIME_DATA",
    }
    summary = json.loads((tmp_path / f"{case.name}-traceml.json").read_text())
    assert summary["step_time"]["metadata"]["global_ranks_used"] == 2
    assert summary["step_time"]["metadata"]["training_total_steps"] >= 50
    assert not (tmp_path / f"{case.name}-traceml").exists()


def test_a_case_is_taken_over_with_all_its_rounds_and_logs(tmp_path: Path) -> None:
    case = LOADING
    earlier, folder = tmp_path / "earlier", tmp_path / "now"
    folder.mkdir()
    for number in range(3):
        for removed in case.variants:
            bundle = earlier / case.bundle(removed, number)
            bundle.mkdir(parents=True)
            (bundle / "rank0.jsonl").write_text("{}")
            (earlier / f"{bundle.name}.log").write_text("")
    copy_case(case, earlier, folder)
    found = {path.relative_to(folder) for path in folder.rglob("*")}
    assert found == {path.relative_to(earlier) for path in earlier.rglob("*")}


@pytest.mark.parametrize(
    ("gains", "share"),
    [([1.0, 1.0], None), ([1.0, 1.05, 1.3], 1 / 3), ([2.0, 2.1, 1.9, 2.0, 2.5], 0.8)],
)
def test_rounds_agree_that_are_close_to_the_median_of_the_others(
    gains: list[float], share: float | None
) -> None:
    assert rounds_that_agree(gains) == share


def test_a_script_whose_samples_are_not_seen_has_its_speed_in_steps(tmp_path: Path) -> None:
    speeds = []
    for samples in (0, 1):
        bundle = write_bundle(tmp_path / f"samples-{samples}")
        with_values(bundle, "steps", samples=samples)
        speeds.append(different_samples_per_s(open_diagnosis(bundle)))
    assert speeds[1] == 2 * speeds[0] > 0  # two ranks, a sample each
    with_values(bundle, "steps", ranks=(1,), step_time_ms=40.0)
    assert different_samples_per_s(open_diagnosis(bundle)) < speeds[1]  # the slowest rank's steps


def test_the_recorded_sets_are_judged_as_published() -> None:
    folder = project_root() / "data" / "xeon-2-cores" / "study-scripts-sixth"
    cases = pd.read_csv(folder / "cases.csv", keep_default_na=False)
    held = judge(cases).set_index("promise")["found"]
    assert held["share of planted causes named first"] == 15 / 16
    assert held["healthy runs with a verdict of more than low confidence"] == 0
    assert held["share of predicted gains within a tenth"] == 7 / 14
    assert held["share of gains within their interval"] == 11 / 14
    # A second verdict is an alarm, too.
    is_first = cases["planted"].eq(HEALTHY) & ~cases["planted"].eq(HEALTHY).shift(fill_value=False)
    sure = judge(cases.assign(is_sure=is_first)).set_index("promise")["found"]
    assert sure["healthy runs with a verdict of more than low confidence"] == is_first.sum() > 0


@pytest.mark.parametrize("which", [TENTH, ELEVENTH])
def test_a_script_has_the_faults_of_its_cases(which: str) -> None:
    cases = ScriptsStudy(only=(which,)).cases()
    assert len({case.name for case in CASES}) == len(CASES)
    assert sum(case.cause == HEALTHY for case in cases) >= 10
    assert sum(case.cause != HEALTHY for case in cases) >= 30
    for case in cases:
        script, _, fault = case.words(removed=False)
        about = " ".join((ast.get_docstring(ast.parse(Path(script).read_text())) or "").split())
        assert fault == "none" or f"{fault} (" in about
        assert case.words(removed=True)[-1] == "none"
