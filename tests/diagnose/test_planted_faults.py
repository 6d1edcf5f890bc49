"""The cheapest planted faults on two real ranks, a healthy run, and the study around them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from common.course import fresh_faults
from common.diagnose.diagnosis import diagnose_folder, diagnosis_lines
from common.diagnose.studies.planted import (
    CASES,
    FLAGS,
    PLANTED,
    Case,
    DiagnosisStudy,
    diagnose_case,
    row_of,
)
from common.diagnose.studies.planted_faults import FAULTS, parse_faults
from common.errors import UserError
from common.runtime.stage_progress import StageProgress

BRIEF = {
    "text": {"max_train_samples": 512, "eval_samples": 32, "epochs": 1, "batch_size": 16},
    "benchmark": {"batch_size": 512, "steps_per_epoch": 8, "warmup_steps": 2},
}
TESTED = {
    "wrong-sampler": Case(
        *("run", "wrong-sampler", "text", "missing-sampler"),
        flags=(("max_train_samples", 256), ("eval_samples", 16)),
    ),
    "slow-rank": Case("run", "slow-rank", "benchmark", "slow-rank=4"),
    "healthy": Case("run", "healthy", "benchmark", flags=(("batch_size", 2048),)),
}


def test_a_mistake_is_one_line_and_status_2(rank_server):
    done = rank_server.run(PLANTED, "slow-data=4", "none.py", ranks=2)
    assert done.exit_codes == [2, 2]
    assert "none.py: no such file" in done.error_line


def test_fresh_faults_need_a_folder_that_can_be_made_before_any_run(tmp_path, monkeypatch):
    monkeypatch.setattr(fresh_faults, "run_cases", lambda *_: pytest.fail("cases were run"))
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match="Not a directory"):
        fresh_faults.plant(tmp_path / "file" / "faults", 0, StageProgress())


ATTEMPTS = 3  # a shared machine takes cores away for seconds, which is a fault nobody has planted
JUDGED_BY_TIMES = (pytest.mark.slow, pytest.mark.alone)
"""Company on the ranks' cores would be a fault, too, and be named first. The rules of these are
tried on tables made up in tests/diagnose/test_diagnosis.py, and one by ``ddplab diagnose``."""


@pytest.mark.two_ranks
@pytest.mark.parametrize(
    "cause",
    [
        pytest.param("wrong-sampler", marks=pytest.mark.slow),
        *(pytest.param(cause, marks=JUDGED_BY_TIMES) for cause in [*TESTED][1:]),
    ],
)
def test_a_fault_planted_from_outside_is_named_first(cause, rank_server, tmp_path):
    case = TESTED[cause]
    case = replace(case, flags=tuple((BRIEF[case.program] | dict(case.flags)).items()))
    for folder in (tmp_path / f"attempt-{attempt}" for attempt in range(ATTEMPTS)):
        script, *words = case.words(folder)
        done = rank_server.run(Path(script), *words, ranks=2)
        assert done.exit_codes == [0, 0], "\n".join(done.stderr)
        found = [verdict.cause for verdict in diagnose_folder(folder / "run").verdicts]
        if cause == "wrong-sampler" or "oversubscribed-cores" not in found:
            break
    told = "\n".join(diagnosis_lines(folder / "run"))
    assert found[:1] == ([] if cause == "healthy" else [cause]), told
    row = row_of(case, diagnose_case(case, folder))
    assert row["right"]
    assert row["first"] == cause


def test_every_cause_is_planted_twice_and_once_unseen():
    by_cause: dict[str, list[Case]] = {}
    for case in CASES:
        if case.ranks > 1:
            by_cause.setdefault(case.cause, []).append(case)
    healthy = by_cause.pop("healthy")
    assert len(healthy) >= 6
    assert sum(map(len, by_cause.values())) >= 14
    assert all(len(cases) >= 2 for cases in by_cause.values())
    assert all(any(case.held_out for case in cases) for cases in by_cause.values())
    assert sum(case.held_out for case in CASES) * 2 >= sum(case.ranks > 1 for case in CASES)
    assert len({case.name for case in CASES}) == len(CASES)
    for case in CASES:
        assert parse_faults(case.fault)
        assert set(dict(case.flags)) <= set(FLAGS[case.program]) | {
            *("accumulation", "bucket_cap_mb", "synthetic_like", "log_every")
        }


def test_a_run_asked_for_brings_its_baseline():
    chosen = DiagnosisStudy(only=("mixed-configurations",)).cases()
    assert {case.name for case in chosen} == {
        *("baseline", "mixed-configurations-seen", "mixed-configurations-held-out")
    }


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("slow-rnk", "did you mean 'slow-rank'"),
        ("slow-rank=fast", "'fast' is not a number"),
        ("slow-rank=2@soon", "'soon' is not a number of passes"),
        ("", "unknown fault"),
    ],
)
def test_a_fault_that_is_none_gets_one_line(text, message):
    with pytest.raises(UserError, match=message):
        parse_faults(text)


def test_faults_are_joined_and_have_strengths_of_their_own():
    assert parse_faults("slow-rank=3@90+one-core") == [("slow-rank", 3, 90), ("one-core", 0, 0)]
    assert parse_faults("slow-data") == [("slow-data", FAULTS["slow-data"].strength, 0)]
    with pytest.raises(UserError, match="unknown case 'x'"):
        DiagnosisStudy(only=("x",))
