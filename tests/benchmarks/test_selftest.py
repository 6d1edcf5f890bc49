"""The self-test: what passes, what fails with a remedy, and that it always ends in a table."""

from __future__ import annotations

import dataclasses
import json
import re
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from common.benchmarks import selftest, selftest_checks
from common.benchmarks.selftest import (
    LOST,
    Result,
    Selftest,
    attempt,
    print_results,
    print_row,
    read_results,
)
from common.benchmarks.selftest_checks import CHECKS, Check, alone, tiny_training
from common.errors import NotYetWritten
from common.runtime.group.process_group import Worker, process_group
from common.runtime.machine.gpus import CudaDevice
from common.runtime.processes.ranks import Ranks
from common.training.config import FsdpConfig


def test_messages_with_brackets_do_not_break_the_table(capsys: pytest.CaptureFixture) -> None:
    # as gloo words them; rich would take them for markup
    said = "[/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:547] Connection closed [rank0]"
    print_results([Result("all-reduce", "failed", said, "look [here]")])
    shown = "".join(capsys.readouterr().out.split())
    assert "pair.cc:547]Connection" in shown.replace("│", "").replace("all-reducefailed", "")


def test_the_last_word_on_a_check_counts(tmp_path: Path) -> None:
    path = tmp_path / "results"
    words = [("a", "failed", "ended the process"), ("a", "passed", "1 s"), ("b", "failed", "x")]
    path.write_text(
        "".join(
            json.dumps({"name": n, "outcome": o, "detail": d, "remedy": ""}) + "\n"
            for n, o, d in words
        )
    )
    found = [(result.name, result.outcome) for result in read_results(path)]
    assert found == [("a", "passed"), ("b", "failed")]
    assert read_results(tmp_path / "nothing") == []


def test_a_row_is_printed_when_its_check_has_ended(capsys: pytest.CaptureFixture) -> None:
    rows = [Result("a", "passed", "1 s"), Result("b", "failed", "the disk is full", "free space")]
    print_row(rows[0])
    first = capsys.readouterr().out
    print_results(rows)
    printed = capsys.readouterr().out
    assert first in printed  # as wide as in the whole table
    assert "free space" in printed


def test_a_row_does_not_wait_for_later_checks(
    monkeypatch, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    seen = []

    def look(worker: Worker, folder: Path) -> str:
        seen.append(capsys.readouterr().out)
        return ""

    checks = (Check("the first", lambda worker, folder: "", ""), Check("the second", look, ""))
    monkeypatch.setattr(selftest, "CHECKS", checks)
    selftest.main(Selftest(output_dir=str(tmp_path), device="cpu"))
    [before] = seen
    assert "passed" in before.partition("the first")[2]
    assert "the second" in capsys.readouterr().out


def raising(error: Exception) -> Check:
    def run(worker: Worker, folder: Path) -> str:
        raise error

    return Check("all-reduce", run, "look at the network")


def test_after_a_lost_rank_the_rest_is_not_tried(tmp_path: Path) -> None:
    lost = raising(dist.DistBackendError("ncclRemoteError: remote process exited"))
    passing = Check("next", lambda worker, folder: "", "")
    with process_group("cpu") as worker:
        before = [attempt(raising(ValueError("2")), worker, tmp_path, [])]
        assert attempt(passing, worker, tmp_path, before).outcome == "passed"
        before.append(attempt(lost, worker, tmp_path, before))
        assert before[-1].detail.startswith(LOST)
        after = attempt(passing, worker, tmp_path, before)
    assert (after.outcome, after.is_bad) == ("not run", True)


@pytest.mark.parametrize("mode", ["EXCLUSIVE_PROCESS", "EXCLUSIVE_THREAD"])
def test_programs_that_the_gpus_mode_keeps_out_are_left_out_and_that_is_no_failure(
    monkeypatch, tmp_path: Path, mode: str
) -> None:
    gpu = SimpleNamespace(compute_mode=mode)
    monkeypatch.setattr(selftest_checks, "cuda_devices", lambda: [CudaDevice("GPU", "a", 1)])
    facts = SimpleNamespace(gpus=(gpu,))
    monkeypatch.setattr(selftest_checks, "read_gpu_facts", lambda devices: facts)
    check = Check("throughput", alone("assignment0.throughput"), "run it by itself")
    with process_group("cpu") as worker:
        on_gpu = dataclasses.replace(worker, device=torch.device("cuda", 0), backend="nccl")
        result = attempt(check, on_gpu, tmp_path, [])
    assert (result.outcome, result.is_bad) == ("left out", False)
    assert mode in result.detail


def test_fsdp_is_left_out_where_gloo_joins_gpus(tmp_path: Path) -> None:
    with process_group("cpu") as worker:
        on_gpu = Worker(Ranks(), torch.device("cuda", 0), "gloo", objects=worker.objects)
        result = attempt(Check("fsdp", tiny_training(FsdpConfig), ""), on_gpu, tmp_path, [])
    assert result.outcome == "left out"
    assert "NCCL" in result.detail


def test_scripts_that_are_not_run_are_those_that_the_text_names() -> None:
    folder = Path(selftest.__file__).resolve().parents[2] / "assignments"
    scripts = {f"{path.parent.name}/{path.name}" for path in folder.glob("assignment*/*.py")}
    remedies = " ".join(check.remedy for check in CHECKS)
    run = set(re.findall(r"assignments/(\S+\.py)", remedies))
    assert run < scripts
    assert {name.partition("/")[2] for name in scripts - run} == {
        *("predict_bucket_size.py", "analyze_metrics.py", "plot_comprehensive_analysis.py"),
        *("simulate_modes.py", "verify_changes.py"),
    }


def test_a_task_that_is_not_written_is_left_out(tmp_path: Path) -> None:
    with process_group("cpu") as worker:
        result = attempt(raising(NotYetWritten("A3.1")), worker, tmp_path, [])
    assert (result.outcome, result.detail) == ("left out", "task A3.1 is not written yet")


@pytest.mark.parametrize("name", ["compare_strategies", "compare_modes"])
def test_one_rank_compares_nothing_and_that_is_no_failure(name: str, tmp_path: Path) -> None:
    [check] = [check for check in CHECKS if check.name == name]
    with process_group("cpu") as worker:
        result = attempt(check, worker, tmp_path, [])
    assert (result.outcome, result.is_bad) == ("left out", False)
    assert result.detail == "1 rank here; it takes 2"
