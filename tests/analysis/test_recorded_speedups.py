"""Throughput, speedup and efficiency of every recorded run, recomputed from its raw rows.

The oracle is this file's own arithmetic over the CSV files: nothing of the library is in it.
"""

from __future__ import annotations

import csv
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from statistics import geometric_mean, mean, median

import pandas as pd
import pytest
import yaml

from common.analysis.data_parallel.strategies import open_strategies
from common.analysis.micro_batches.mode_comparison import STATIC, read_comparison
from common.analysis.one_device.throughput import open_throughput
from common.analysis.runs import Run
from common.analysis.scaling.speedups import speedup
from common.analysis.scaling.study_files import read_runs
from common.analysis.sweep_speedups import sweep_speedups
from common.diagnose.evidence.case import Case
from common.diagnose.evidence.evidence import baseline_arm, open_evidence

PROJECT = Path(__file__).resolve().parents[2]
DATA = PROJECT / "data"
EXACT = 1e-9

Rows = list[dict[str, str]]


def folders_with(*names: str) -> list[Path]:
    found = {path.parent for path in DATA.glob(f"**/{names[0]}")}
    return sorted(path for path in found if all((path / name).is_file() for name in names))


def name_of(folder: Path) -> str:
    return str(folder.relative_to(DATA))


def read(path: Path) -> Rows:
    with path.open() as file:
        return list(csv.DictReader(file))


SCALING = folders_with("steps.csv", "arms.csv")
SWEEPS = [path for path in SCALING if len(read(path / "arms.csv")) > 1]
COMPARED = folders_with("mode-times.csv")
STRATEGIES = folders_with("strategy-times.csv")
ONE_DEVICE = folders_with("throughput-times.csv")


def rows_of_arm(rows: Rows, arm: str) -> Rows:
    """Selects an arm's measured rows: those of plain steps if it has some, else of timed ones."""
    own = [row for row in rows if row["arm"] == arm and row["warmup"] == "False"]
    plain = [row for row in own if row["kind"] == "plain"]
    return plain or own


def rounds_of_arm(rows: Rows, arm: str) -> tuple[dict[str, float], float]:
    """Computes an arm's median step of each round in seconds, and the samples of a step.

    A step is its slowest rank's.
    """
    times: dict[tuple, list[float]] = defaultdict(list)
    samples: dict[tuple, float] = defaultdict(float)
    for row in rows_of_arm(rows, arm):
        key = row["round"], row["epoch"], row["step"]
        times[key].append(float(row["step_time_ms"]))
        samples[key] += float(row["samples"])
    rounds: dict[str, list[float]] = defaultdict(list)
    for key, of_ranks in times.items():
        rounds[key[0]].append(max(of_ranks) / 1e3)
    medians = {round_: median(of_round) for round_, of_round in rounds.items()}
    return medians, median(samples.values())


def step_of_arm(rows: Rows, arm: str) -> tuple[float, float]:
    """Computes an arm's step, the median over rounds of their medians, and its samples."""
    rounds, samples = rounds_of_arm(rows, arm)
    return median(rounds.values()), samples


def one_rank_arm(arms: Rows, arm: dict[str, str]) -> str | None:
    """Finds the arm that does the same on one rank."""
    kept = "global_batch" if arm["regime"] == "strong" else "batch_per_rank"
    for other in arms:
        alike = all(other[name] == arm[name] for name in ("regime", "change", kept))
        if other["world_size"] == "1" and alike:
            return other["arm"]
    return None


def first_of_each_study(folders: list[Path]) -> Iterator:
    """Yields all folders; those that are not the first of theirs are slow."""
    seen: set[Path] = set()
    for folder in folders:
        marks = [pytest.mark.slow] * (folder.parent in seen)
        seen.add(folder.parent)
        yield pytest.param(folder, id=name_of(folder), marks=marks)


@pytest.mark.parametrize("folder", [*first_of_each_study(SCALING)])
def test_throughput_of_a_scaling_run_is_that_of_its_raw_rows(folder: Path) -> None:
    rows, arms = read(folder / "steps.csv"), read(folder / "arms.csv")
    for arm in arms:
        step_s, samples = step_of_arm(rows, arm["arm"])
        opened = open_evidence(folder, int(arm["arm"]))
        assert opened.throughput == pytest.approx(samples / step_s, rel=EXACT)
        # A step of a sweep consumes the global batch that its table states.
        if len(arms) > 1:
            assert samples == float(arm["global_batch"])


@pytest.mark.parametrize("folder", [*first_of_each_study(SWEEPS)])
def test_speedup_and_efficiency_are_one_number_in_sweep_and_diagnosis(folder: Path) -> None:
    arms, rows = read(folder / "arms.csv"), read(folder / "steps.csv")
    table = sweep_speedups(pd.read_csv(folder / "arms.csv"), pd.read_csv(folder / "steps.csv"))
    compared = 0
    for arm, row in zip(arms, table.itertuples(), strict=True):
        base = one_rank_arm(arms, arm)
        if base is None or arm["world_size"] == "1":
            continue
        (base_s, base_samples), (step_s, samples) = (
            rounds_of_arm(rows, name) for name in (base, arm["arm"])
        )
        ratios = [base_s[round_] / step_s[round_] for round_ in step_s if round_ in base_s]
        expected = geometric_mean(ratios) * samples / base_samples
        run = open_evidence(folder, int(arm["arm"]))
        assert baseline_arm(run) == int(base)
        diagnosed = Case(run, open_evidence(folder, int(base))).speedup_now
        assert diagnosed == pytest.approx(expected, rel=EXACT)
        assert row.speedup == pytest.approx(expected, rel=EXACT)
        assert row.efficiency == pytest.approx(expected / int(arm["world_size"]), rel=EXACT)
        compared += 1
    assert compared


def test_the_published_changes_are_those_of_their_raw_rows() -> None:
    folder = DATA / "xeon-2-cores" / "study-remedies"
    run = folder / "emulated-2x1gbit" / "changes"
    arms, rows = read(run / "arms.csv"), read(run / "steps.csv")
    for change in read(folder / "changes.csv"):
        [arm] = [
            arm
            for arm in arms
            if arm["change"] == change["change"] and arm["world_size"] == change["world_size"]
        ]
        base_s, base_samples = step_of_arm(rows, one_rank_arm(arms, arm))
        step_s, samples = step_of_arm(rows, arm["arm"])
        expected = samples / step_s / (base_samples / base_s)
        assert float(change["speedup"]) == pytest.approx(expected, rel=EXACT)


def test_speedup_of_the_text_runs_is_that_of_their_epochs() -> None:
    folder = DATA / "xeon-2-cores" / "assignment4"
    seconds, distinct = {}, {}
    for ranks, name in ((1, "text_1_rank"), (2, "text_2_ranks")):
        slowest: dict[str, float] = defaultdict(float)
        for row in read(folder / name / "epochs.csv"):
            slowest[row["epoch"]] = max(slowest[row["epoch"]], float(row["train_time_s"]))
        seconds[ranks] = mean(time for epoch, time in slowest.items() if epoch != "1")
        counts = {
            row["epoch"]: row["distinct_all_ranks"] for row in read(folder / name / "samples.csv")
        }
        distinct[ranks] = median(map(float, counts.values()))
    expected = seconds[1] / seconds[2] * distinct[2] / distinct[1]

    runs = {run.identity.world_size: run for run in read_runs(folder).runs}
    found = speedup([runs[1]], [runs[2]], "strong")
    assert found.value == pytest.approx(expected, rel=EXACT)
    assert found.efficiency == pytest.approx(expected / 2, rel=EXACT)


@pytest.mark.parametrize("folder", STRATEGIES, ids=name_of)
def test_speedup_of_strategies_is_that_of_rounds_beside_one_rank(folder: Path) -> None:
    times: dict[tuple, list[float]] = defaultdict(list)
    for row in read(folder / "strategy-times.csv"):
        key = (row["accumulation"], row["strategy"], row["round"], row["iteration"])
        times[key].append(float(row["step_time_ms"]))
    rounds: dict[tuple, list[float]] = defaultdict(list)
    for (accumulation, strategy, round_, _), of_ranks in times.items():
        rounds[accumulation, strategy, round_].append(max(of_ranks))
    medians = {key: median(found) for key, found in rounds.items()}
    settings = yaml.safe_load((folder / "config.yaml").read_text())
    for row in open_strategies(folder).summary().itertuples():
        own = {
            round_: found
            for (accumulation, strategy, round_), found in medians.items()
            if (accumulation, strategy) == (str(row.accumulation), row.strategy)
        }
        # Emulated hosts have no step on one rank beside them.
        beside = [
            medians[str(row.accumulation), "single", round_] / found
            for round_, found in own.items()
            if (str(row.accumulation), "single", round_) in medians
        ]
        expected = geometric_mean(beside) if beside else float("nan")
        assert row.speedup == pytest.approx(expected, rel=EXACT, nan_ok=True)
        steps = [
            max(of_ranks)
            for key, of_ranks in times.items()
            if key[:2] == (str(row.accumulation), row.strategy)
        ]
        tokens = settings["micro_batch_size"] * settings["seq_len"] * 2 * row.accumulation
        assert row.tokens_per_s == pytest.approx(tokens / median(steps) * 1e3, rel=EXACT)


@pytest.mark.parametrize("folder", [*first_of_each_study(COMPARED)])
def test_gain_of_micro_batch_modes_is_that_of_their_mean_steps(folder: Path) -> None:
    slowest: dict[tuple, float] = defaultdict(float)
    for row in read(folder / "mode-times.csv"):
        key = row["mode"], row["step"]
        slowest[key] = max(slowest[key], float(row["step_time_ms"]))
    summary = read_comparison(Run(folder, folder)).summary
    assert len(summary) > 1
    means = {
        mode: mean(time for (name, _), time in slowest.items() if name == mode)
        for mode in summary.index
    }
    for mode, ratio in summary["ratio"].items():
        assert ratio == pytest.approx(means[mode] / means[STATIC], rel=EXACT)


@pytest.mark.parametrize("folder", ONE_DEVICE, ids=name_of)
def test_throughput_of_one_device_is_that_of_its_median_step(folder: Path) -> None:
    run = open_throughput(folder)
    settings = yaml.safe_load((folder / "config.yaml").read_text())
    tokens = settings["seq_len"] * settings["gradient_accumulation"]
    rows = read(folder / "throughput-times.csv")
    for point in run.measured.itertuples():
        steps = [float(r["step_time_ms"]) for r in rows if int(r["batch_size"]) == point.batch_size]
        expected = point.batch_size * tokens / median(steps) * 1e3
        assert point.tokens_per_s == pytest.approx(expected, rel=EXACT)
