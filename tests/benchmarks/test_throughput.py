"""throughput.py: one real run whose largest batch does not fit, and what follows from outcomes.

The oracle for rates is a second computation from the raw samples; the run's processes are real,
with a real limit on their memory, and forked, because fresh ones would import torch anew. How the
sweep goes on after failures is tried with outcomes made up.
"""

from __future__ import annotations

import json
import logging
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pandas as pd
import pytest
import torch
from scipy import stats

from common.analysis.one_device.throughput import open_throughput
from common.analysis.one_device.throughput_text import utilisation_text
from common.benchmarks.one_device import device_peak, throughput
from common.benchmarks.one_device.throughput import ThroughputBenchmark, main
from common.benchmarks.one_device.throughput_point import (
    FAILED,
    MEASURED,
    OUT_OF_MEMORY,
    PointOutcome,
)
from common.errors import RunFailed, UserError
from common.perfmodel.one_device.peaks import known_peak
from common.runtime.processes.child import ChildExit
from common.runtime.records.run_directory import read_environment

linux = pytest.mark.skipif(sys.platform != "linux", reason="only Linux limits a process's memory")
TOO_LARGE = 65536
TINY = ThroughputBenchmark(
    model="gpt2-nano",
    batch_size=1,
    seq_len=32,
    optimizer="sgd",  # torch needs seconds to import the machinery of AdamW
    batch_sizes=(TOO_LARGE, 1),
    num_steps=3,
    warmup_steps=1,
    memory_limit_gib=1.6,  # the embeddings of too many sequences alone take 2 GiB
    device="cpu",
    run_id="run",
)
BLOCKS = [
    "Task 2: Throughput Measurement & Scaling",
    "Model: GPT-2 Nano",
    "Batch size: 1",
    "Sequence length: 32",
    "Device: CPU",
    "Warming up...",
    "Measuring throughput over 3 steps...",
    "--- Throughput Results ---",
    "Total tokens processed: 96",
    "Time elapsed:",
    "Tokens per second:",
    "Steps per second:",
    "--- Modern LLM Training Extrapolation ---",
    "GPT-2 Nano:",
    "1T Model throughput:",
    "Training 10T tokens:",
    "Time:",
    f"Testing batch_size={TOO_LARGE}...",
    f"OOM at batch_size={TOO_LARGE}",
    "Testing batch_size=1...",
    "--- Batch Size Results ---",
    "MFU:",
]


@pytest.fixture(scope="module", autouse=True)
def _small_products():
    """Measures peaks in no time; no test reads their value."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(device_peak, "SIZES", (64, 128))
        patch.setattr(device_peak, "COPY_BYTES", 2**20)
        yield


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """Runs the benchmark; returns the folder of the run and what it printed."""
    if sys.platform != "linux":
        pytest.skip("only Linux limits a process's memory")
    folder = tmp_path_factory.mktemp("runs")

    with pytest.MonkeyPatch.context() as patch:
        lines: list[str] = []
        patch.setattr("builtins.print", lambda *text, **_: lines.append(" ".join(text)))
        main(replace(TINY, output_dir=str(folder)))
    return folder / "run", "\n".join(lines)


def test_it_prints_the_courses_blocks_in_order(finished: tuple[Path, str]) -> None:
    printed = [line for line in finished[1].splitlines() if line]
    places = [next(i for i, line in enumerate(printed) if line.startswith(b)) for b in BLOCKS]
    assert places == sorted(places)
    table = printed[printed.index("--- Batch Size Results ---") + 1 :]
    assert table[0].split() == ["Batch", "Size", "Tokens/sec", "Memory"]
    assert table[1].split()[0] == "1"
    assert table[1].split()[-1] == "MiB"
    assert table[2].split(maxsplit=1) == [str(TOO_LARGE), "out of memory"]


def test_a_batch_that_does_not_fit_is_out_of_memory_and_the_run_complete(
    finished: tuple[Path, str],
) -> None:
    folder, _ = finished
    assert read_environment(folder)["status"] == "complete"
    table = pd.read_csv(folder / "throughput-batches.csv").set_index("batch_size")
    assert table["status"].to_dict() == {1: MEASURED, TOO_LARGE: OUT_OF_MEMORY}
    assert "tried to allocate" in table.loc[TOO_LARGE, "reason"]
    # A GPU's columns stay empty; the process needs less than its limit.
    assert table[["peak_allocated_mib", "peak_reserved_mib"]].isna().all(axis=None)
    assert 100 < table.loc[1, "peak_resident_mib"] < 1.6 * 1024


def test_the_headline_is_measured_once_and_its_samples_are_raw(finished: tuple[Path, str]) -> None:
    folder, printed = finished
    times = pd.read_csv(folder / "throughput-times.csv")
    keys = times[["batch_size", "round", "iteration"]]
    assert keys.to_numpy().tolist() == [[1, 0, 0], [1, 0, 1], [1, 0, 2]]
    assert len(pd.read_csv(folder / "throughput-warmup-times.csv")) == TINY.warmup_steps
    median = 32 / times["step_time_ms"].median() * 1e3
    table = pd.read_csv(folder / "throughput-batches.csv").set_index("batch_size")
    assert table.loc[1, "tokens_per_s"] == pytest.approx(median)
    mean = 96 / times["step_time_ms"].sum() * 1e3
    assert f"Tokens per second: {mean:,.1f}" in printed


def test_the_peak_is_measured_and_says_so(finished: tuple[Path, str]) -> None:
    folder, printed = finished
    peak = pd.read_csv(folder / "device-peak.csv")
    samples = pd.read_csv(folder / "device-peak-samples.csv")
    rates = samples["amount"] / samples["time_ms"] * 1e3
    best = rates.groupby(samples["quantity"]).max()
    assert peak["flops_per_s"].tolist() == [pytest.approx(best["float32"])]
    assert peak["memory_bytes_per_s"].tolist() == [pytest.approx(best["memory"])]
    assert "measured here" in peak["source"][0]
    assert peak["source"][0] in printed


def test_the_run_opens_as_the_notebook_opens_it(finished: tuple[Path, str]) -> None:
    run = open_throughput(finished[0])
    assert run.ended["batch_size"].tolist() == [TOO_LARGE]
    assert run.saturation is None  # one point is no line
    assert run.naive.tokens_per_s == pytest.approx(run.tokens_per_s * 6_901_760 / 1e12)
    per_token = 6 * (6 * 12 * 256**2 + 8192 * 256) + 12 * 6 * 256 * 32
    assert run.flops_per_token == per_token


Outcomes = Callable[[dict[int, PointOutcome | int | list[PointOutcome | int]]], list[int]]


@pytest.fixture
def outcomes(monkeypatch: pytest.MonkeyPatch) -> Outcomes:
    """Gives each batch an outcome, or an exit status, or several, instead of a process.

    The function returns the batches in the order of their visits.
    """

    def give(by_batch: dict[int, PointOutcome | int | list[PointOutcome | int]]) -> list[int]:
        visited = []

        def run_forked(
            module: str, arguments: list[str], log: Path, on_output: object
        ) -> ChildExit:
            point = json.loads(arguments[0])
            visited.append(point["batch_size"])
            ended = by_batch[point["batch_size"]]
            if isinstance(ended, list):
                ended = ended.pop(0)
            if isinstance(ended, int):
                return ChildExit(ended, log)
            Path(arguments[1]).write_text(json.dumps(vars(ended)))
            return ChildExit(0, log)

        monkeypatch.setattr(throughput, "run_forked", run_forked)
        return visited

    return give


GOOD = PointOutcome(MEASURED, step_times_ms=(10.0, 20.0, 30.0), peak_resident_bytes=2**30)
FULL = PointOutcome(OUT_OF_MEMORY, "tried to allocate 8 bytes", held_bytes=2**29)


def test_the_sweep_goes_on_after_any_end(
    outcomes: Outcomes, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    outcomes({1: GOOD, 2: -9, 4: FULL, 8: GOOD})
    main(replace(TINY, batch_sizes=(1, 2, 4, 8), output_dir=str(tmp_path)))
    table = pd.read_csv(tmp_path / "run" / "throughput-batches.csv").set_index("batch_size")
    table = table.sort_index()
    assert table["status"].to_list() == [MEASURED, FAILED, OUT_OF_MEMORY, MEASURED]
    assert table.loc[2, "reason"] == "killed by SIGKILL: the kernel ran out of memory?"
    rates = table["tokens_per_s"].dropna().to_dict()
    assert rates == pytest.approx({1: 32 / 0.02, 8: 8 * 32 / 0.02})
    printed = capsys.readouterr().out
    assert "Failed at batch_size=2: killed by SIGKILL" in printed
    assert "OOM at batch_size=4" in printed


def test_rounds_visit_the_headline_between_the_other_sizes(
    outcomes: Outcomes, tmp_path: Path
) -> None:
    visits = [replace(GOOD, step_times_ms=(time_ms,) * 3) for time_ms in (10.0, 20.0, 40.0)]
    order = outcomes({1: [visits[0], -9, *visits[1:]], 2: GOOD})
    main(replace(TINY, batch_sizes=(1, 2), rounds=4, output_dir=str(tmp_path)))
    assert order == [1, 1, 2, 1, 1]
    times = pd.read_csv(tmp_path / "run" / "throughput-times.csv")
    of_headline = times[times["batch_size"] == 1]
    # The second visit died, and has no steps.
    assert of_headline.groupby("round")["step_time_ms"].median().to_dict() == {0: 10, 2: 20, 3: 40}
    table = pd.read_csv(tmp_path / "run" / "throughput-batches.csv").set_index("batch_size")
    rates = [32 / 0.01, 32 / 0.02, 32 / 0.04]
    assert table.loc[1, "tokens_per_s"] == pytest.approx(np.mean(rates))
    opened = open_throughput(tmp_path / "run")
    low, high = stats.ttest_1samp(rates, 0).confidence_interval()
    assert (opened.speed.interval.low, opened.speed.interval.high) == pytest.approx((low, high))
    assert opened.tokens_per_s == pytest.approx(np.mean(rates))
    assert opened.speed.said == "not settled: 3 more rounds"


@pytest.mark.parametrize(
    ("outcome", "error", "said"),
    [
        (
            FULL,
            UserError,
            r"out of memory on .* with 1\.6 GiB; largest batch predicted to fit: \d",
        ),
        (-9, RunFailed, "killed by SIGKILL"),
    ],
    ids=["does not fit", "died"],
)
def test_a_headline_without_a_result_fails_the_run_and_says_what_would_fit(
    outcomes: Outcomes, tmp_path: Path, outcome: object, error: type, said: str
) -> None:
    outcomes({1: outcome})
    with pytest.raises(error, match=f"batch_size 1: {said}"):
        main(replace(TINY, output_dir=str(tmp_path)))
    assert read_environment(tmp_path / "run")["status"] == "failed"


def test_options_without_effect_are_named_once(
    outcomes: Outcomes, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    outcomes({1: GOOD, TOO_LARGE: FULL})
    with caplog.at_level(logging.WARNING):
        main(replace(TINY, async_batches=True, output_dir=str(tmp_path)))
    assert [record.message for record in caplog.records] == [
        "without effect: async_batches needs a GPU to copy to"
    ]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"device": "tpu"}, "device 'tpu': legal are cpu and cuda"),
        ({"memory_limit_gib": 0.01}, "Python and PyTorch alone take"),
    ],
)
@linux
def test_devices_and_limits_that_cannot_be_are_one_line(
    changes: dict, message: str, tmp_path: Path, outcomes: Outcomes
) -> None:
    refused = PointOutcome("refused", "memory_limit_gib 0.01: Python and PyTorch alone take 1 GiB")
    outcomes({1: refused})
    with pytest.raises(UserError, match=message):
        main(replace(TINY, output_dir=str(tmp_path), **changes))


def test_a_gpu_is_left_to_the_processes_that_measure(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    # In exclusive compute mode a context of this process would keep them out.
    contexts = []
    gpu = SimpleNamespace(name="GPU", uuid="a", total_memory=2**33)
    for name, answer in {"is_available": True, "device_count": 1}.items():
        monkeypatch.setattr(torch.cuda, name, lambda answer=answer: answer)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: gpu)
    for makes_context in ("set_device", "init", "mem_get_info", "synchronize"):
        monkeypatch.setattr(torch.cuda, makes_context, lambda *_: contexts.append("made"))
    measured = []
    monkeypatch.setattr(throughput, "report", lambda settings, points: measured.append(points))
    main(replace(TINY, device="cuda", memory_limit_gib=0.0, output_dir=str(tmp_path)))
    assert [points.device.type for points in measured] == ["cuda"]
    assert contexts == []


def test_compiling_without_a_compiler_is_refused_before_anything_runs(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CXX", raising=False)
    with pytest.raises(UserError, match=r"compile: needs a C\+\+ compiler"):
        main(replace(TINY, compile=True, output_dir=str(tmp_path / "runs")))
    assert not (tmp_path / "runs").exists()


def test_mfu_is_unknown_rather_than_guessed() -> None:
    assert utilisation_text(1e12, None, None, "NVIDIA Foo") == (
        "unknown (NVIDIA Foo is not in the table of peaks)"
    )
    volta = known_peak("Tesla V100-SXM2-16GB")
    peak = volta.flops("bfloat16")
    assert utilisation_text(1e12, peak, volta, volta.device).startswith("unknown")
    known = utilisation_text(50e12, volta.flops("float16"), volta, volta.device)
    assert known == "40.0% of 125 TFLOP/s (NVIDIA's V100 data sheet)"


def test_a_precision_without_hardware_is_measured_in_little_time() -> None:
    # The size of the product follows the speed: a slow one ends with the first size.
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(device_peak, "PRODUCT_S", 0.0)
        assert device_peak.largest_product(torch.float32) == 64
        patch.setattr(device_peak, "PRODUCT_S", 1e9)
        assert device_peak.largest_product(torch.float32) == 128
