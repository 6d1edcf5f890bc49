"""The study of scripts: another tool beside ours, on the same case."""

from __future__ import annotations

import ast
import json
from dataclasses import replace
from pathlib import Path

import pandas as pd
import pytest
from bundle_support import with_values, write_bundle

from common.diagnose.opened import open_diagnosis
from common.diagnose.studies.script_cases import CASES, FOURTH, FRESH, HEALTHY, SIXTH, Case
from common.diagnose.studies.style_cases import EIGHTH, NINTH
from common.diagnose.studies.watched_scripts import (
    ALL_CASES,
    ScriptsStudy,
    copy_case,
    different_samples_per_s,
    judge,
    rounds_that_agree,
    run_under_traceml,
    traceml_verdict,
)
from common.perfmodel.scaling.step_model import StepSettings
from common.runtime.paths import project_root

SLOW_LOADER = next(case for case in CASES if case.name == "data-loading-slow-loader-plain")
SMALL_BATCH = next(case for case in CASES if case.cause == "batch-too-small")


@pytest.mark.slow
@pytest.mark.two_ranks
def test_traceml_judges_a_script_that_it_times_from_outside(tmp_path: Path) -> None:
    pytest.importorskip("traceml_ai")
    case = SLOW_LOADER
    assert traceml_verdict(case, tmp_path) == ""
    run_under_traceml(case, tmp_path, lambda line: None)
    # The fault delays the loader of one rank. On a busy machine TraceML sees that rank, but no
    # single phase of its step that is to blame.
    assert traceml_verdict(case, tmp_path) in {"INPUT_STRAGGLER", "STRAGGLER"}
    summary = json.loads((tmp_path / f"{case.name}-traceml.json").read_text())
    assert summary["step_time"]["metadata"]["global_ranks_used"] == 2
    assert summary["step_time"]["metadata"]["training_total_steps"] >= 50
    assert not (tmp_path / f"{case.name}-traceml").exists()


def test_a_case_is_taken_over_with_all_its_rounds_and_logs(tmp_path: Path) -> None:
    case = SLOW_LOADER
    earlier, folder = tmp_path / "earlier", tmp_path / "now"
    folder.mkdir()
    for number in range(3):
        for removed in case.planted_or_not:
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


@pytest.mark.parametrize("later", [FRESH, FOURTH])
def test_a_later_set_can_be_run_by_itself(later: str) -> None:
    cases = ScriptsStudy(only=(later,)).cases()
    assert all(case.held_out for case in cases)
    assert {case.cause for case in cases} == {c.cause for c in CASES if c.later != SIXTH}
    assert len({case.name for case in ALL_CASES}) == len(ALL_CASES)
    assert not set(cases) & set(ScriptsStudy().cases())


def test_no_case_of_a_later_set_is_one_that_was_seen_before() -> None:
    def what(case: Case) -> tuple:
        return case.script, case.fault, case.flags, case.rate

    known = {what(case) for case in CASES if case.later != FOURTH}
    assert known.isdisjoint(what(case) for case in CASES if case.later == FOURTH)


@pytest.mark.parametrize("which", [EIGHTH, NINTH])
def test_a_script_of_another_style_has_the_faults_of_its_cases(which: str) -> None:
    cases = ScriptsStudy(only=(which,)).cases()
    assert sum(case.cause == HEALTHY for case in cases) >= 10
    assert sum(case.cause != HEALTHY for case in cases) >= 30
    for case in cases:
        script, fault = case.folder / f"{case.script}.py", dict(case.flags)["fault"]
        about = " ".join((ast.get_docstring(ast.parse(script.read_text())) or "").split())
        assert fault == "none" or f"{fault} (" in about
        removed = case.words(removed=True)
        assert removed[removed.index("--fault") + 1] == "none"


def test_the_remedy_of_a_small_batch_is_the_one_that_is_proposed() -> None:
    case, batch = SMALL_BATCH, dict(SMALL_BATCH.flags)["batch_size"]
    remedied = case.with_proposal(StepSettings(batch_per_rank=7 * batch))
    before, after = remedied.words(removed=False), remedied.words(removed=True)
    assert [(one, other) for one, other in zip(before, after, strict=True) if one != other] == [
        (str(batch), str(7 * batch))
    ]
    assert remedied.bundle(removed=True) == f"{case.name}-batch-{7 * batch}"
    assert remedied.planted_or_not == (False, True)


def test_without_another_batch_to_try_nothing_is_removed() -> None:
    case, batch = SMALL_BATCH, dict(SMALL_BATCH.flags)["batch_size"]
    for proposed in (None, StepSettings(batch_per_rank=batch, accumulation=16)):
        assert case.with_proposal(proposed).planted_or_not == (False,)


@pytest.mark.parametrize("case", [case for case in CASES if case.cause == "bucket-cap"])
def test_the_remedy_of_a_bucket_cap_is_the_one_that_is_proposed(case: Case) -> None:
    settings = StepSettings(batch_per_rank=8, bucket_cap_mb=0.75)
    remedied = case.with_proposal(settings)
    assert remedied.words(removed=False)[1] == case.fault
    assert remedied.words(removed=True)[1] == "bucket-cap=0.75"
    assert remedied.bundle(removed=True) == f"{case.name}-bucket-cap-0.75"
    # Where the diagnosis proposes no other cap, DDP's default is tried.
    planted = float(case.fault.partition("=")[2])
    for proposed in (None, replace(settings, bucket_cap_mb=planted)):
        assert case.with_proposal(proposed).words(removed=True)[1] == HEALTHY
        assert case.with_proposal(proposed).planted_or_not == (False, True)
