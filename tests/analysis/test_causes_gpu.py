"""Causes in scripts that only a GPU can show, on tables made up for them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from scaling_evidence import MadeUp
from test_causes_machine import network

from common.analysis.diagnosis.causes import MINOR, Case, Verdict
from common.analysis.diagnosis.causes_settings import NOT_ON_A_GPU
from common.analysis.diagnosis.diagnosis import GPU_CAUSES, diagnose_folder
from common.analysis.diagnosis.evidence import NotJudged, open_evidence

ON_GPU = MadeUp(placement={"device": "cuda:0"})


def write(folder: Path, run: MadeUp = ON_GPU, **facts: object) -> Path:
    """Writes a made-up run of a watched script, with further facts of all ranks."""
    every = dict.fromkeys(range(run.ranks), facts)
    return network(replace(run, facts=every).write(folder), "NCCL within one host")


def judge(cause: str, folder: Path) -> Verdict | None:
    return GPU_CAUSES[cause](Case(open_evidence(folder)))


def named(cause: str, folder: Path) -> Verdict:
    """Returns the verdict, after checking what holds for each."""
    verdict = judge(cause, folder)
    assert verdict is not None
    assert verdict.cause == cause
    assert verdict.group == MINOR
    assert NOT_ON_A_GPU in verdict.reason
    assert verdict.confidence in ("low", "medium")
    assert any(".csv]" in sentence for sentence in verdict.evidence)
    assert verdict.change.endswith(".")
    return verdict


@pytest.mark.parametrize("cause", GPU_CAUSES)
def test_programs_of_this_project_are_not_judged_by_a_watch(cause, tmp_path):
    found = diagnose_folder(ON_GPU.write(tmp_path / "run"))
    assert cause not in {verdict.cause for verdict in found.verdicts}
    assert cause not in dict(found.not_judged)


# Norms that exchange.


def step_ms(run: MadeUp) -> float:
    """Returns a step without noise: data, passes, exchange and update."""
    passes = run.accumulation * (run.forward_ms + run.backward_ms)
    return run.data_ms + passes + run.communication_ms + run.optimizer_ms


@pytest.mark.parametrize("accumulation", [1, 4])
def test_two_small_all_reduces_a_norm_and_pass_are_what_norms_cost(accumulation, tmp_path):
    run = replace(ON_GPU, noise=0.0, accumulation=accumulation)
    verdict = named("synchronised-norms", write(tmp_path, run, synchronised_norms=20))
    # 0.2 ms latency and 4 B at 1e6 B/ms.
    expected = 2 * 20 * accumulation * (0.2 + 4e-6) / step_ms(run)
    assert verdict.lost_share == pytest.approx(expected)
    assert verdict.confidence == "medium"
    assert verdict.predicted_speedup == pytest.approx(verdict.speedup_now / (1 - expected))


def test_norms_are_told_by_their_number_where_no_all_reduce_was_measured(tmp_path):
    folder = write(tmp_path, synchronised_norms=20)
    (folder / "allreduce-samples.csv").unlink()
    verdict = named("synchronised-norms", folder)
    assert verdict.confidence == "low"
    assert verdict.lost_share == 0
    assert verdict.predicted_speedup is None
    assert len(verdict.evidence) == 1


@pytest.mark.parametrize(("norms", "latency_ms"), [(0, 0.2), (20, 0.001)])
def test_no_norms_or_a_quick_network_are_no_cause(norms, latency_ms, tmp_path):
    run = replace(ON_GPU, latency_ms=latency_ms)
    assert judge("synchronised-norms", write(tmp_path, run, synchronised_norms=norms)) is None


def test_norms_of_one_rank_exchange_nothing(tmp_path):
    folder = write(tmp_path, replace(ON_GPU, ranks=1), synchronised_norms=20)
    assert judge("synchronised-norms", folder) is None


def test_norms_that_nobody_counted_are_not_judged(tmp_path):
    with pytest.raises(NotJudged, match="no synchronised_norms"):
        judge("synchronised-norms", write(tmp_path))


def test_norms_are_ranked_by_what_they_cost_after_what_is_measured(tmp_path):
    run = replace(ON_GPU, data_ms=12.0)
    folder = write(tmp_path, run, synchronised_norms=60)
    causes = [verdict.cause for verdict in diagnose_folder(folder).verdicts]
    assert causes.index("data-loading") < causes.index("synchronised-norms")
