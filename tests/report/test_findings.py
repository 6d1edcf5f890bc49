"""The first page's numbers, each computed once more from the raw tables of a recorded run.

Nothing of the project computes here but the model whose predictions are judged: its T(b).
"""

from __future__ import annotations

import functools
import io
import json
import re
import shutil
from collections.abc import Callable
from dataclasses import replace
from datetime import datetime
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from rich.console import Console
from scipy import stats
from students_interval import students_interval

from common.analysis.buckets.choice import choice_facts
from common.analysis.buckets.measurements import open_run
from common.analysis.buckets.networks import (
    GAIN,
    NetworkRun,
    measured_networks,
    open_networks,
    summary,
)
from common.analysis.data_parallel.strategies import open_strategies
from common.analysis.data_parallel.strategy_times import exchange_cost
from common.analysis.findings import scaling
from common.analysis.findings.collect import QUESTIONS, findings_of
from common.analysis.findings.decisions import CONSEQUENCES, DECISIONS, decisions
from common.analysis.findings.figures import FIGURES, figure_of
from common.analysis.findings.finding import Answer, Finding
from common.analysis.findings.your_step import step_bars
from common.analysis.one_device.options import open_options
from common.analysis.runs import recorded_assignment
from common.analysis.show import show
from common.analysis.speedups import find_speedups, tabulate_speedups
from common.analysis.step_parts import decompose
from common.benchmarks.one_device.option_arms import OPTIONS
from common.diagnose.changes import ChangesLab, changes_facts, open_changes
from common.diagnose.diagnosis import Diagnosis, case_of, examine_case, lost_by_round
from common.diagnose.evidence.case import Case
from common.judged import FIRST_PAGE_ROUNDS
from common.report.document import Document, render
from common.report.first_page import FirstPage, print_page
from common.report.first_page import as_html as first_page_html
from common.runtime.paths import project_root

RUNS = {name: recorded_assignment(name) for name in QUESTIONS}
slow = functools.partial(pytest.param, marks=pytest.mark.slow)
NUMBER = r"-?\d[\d,]*(?:\.\d+)?"


@functools.cache
def recorded_networks() -> tuple[NetworkRun, ...]:
    return measured_networks(open_run(RUNS["assignment2"]))


@functools.cache
def recorded_diagnosis() -> Diagnosis:
    return examine_case(case_of(RUNS["assignment4"] / "emulated-2x1gbit" / "sweep_text"))


@pytest.fixture(scope="module")
def found() -> dict[str, Finding]:
    return {
        one.question.title: one
        for assignment, folder in RUNS.items()
        for one in findings_of(assignment, folder)
    }


def numbers(text: str) -> list[float]:
    return [float(word.replace(",", "")) for word in re.findall(NUMBER, text)]


def all_is_computed(answer: Answer, *parts: str) -> None:
    """Fails where an answer has a number that is neither in these parts nor in its scope."""
    text = f"{answer.value}; {answer.spread}"
    assert [part for part in parts if part not in text] == [], text
    for part in filter(None, (*parts, answer.judged and answer.judged.scope)):
        text = text.replace(part, "")
    assert not re.search(r"\d", text), text


def interval_format(low: float, high: float, form: str, rounds: int) -> str:
    return f"95 % interval {form.format(low)} to {form.format(high)}, {rounds} rounds"


def slowest(table: pd.DataFrame, keys: list[str], column: str) -> pd.Series:
    return table.groupby(keys, dropna=False)[column].max()


def test_there_are_at_most_ten_and_recorded_ones_are_marked(found: dict[str, Finding]) -> None:
    assert len(found) == sum(map(len, QUESTIONS.values())) <= 10
    for one in found.values():
        assert one.answer is not None, one.missing
        assert "recorded data, not measured here" in one.marks


def test_tokens_per_second_and_mfu(found: dict[str, Finding]) -> None:
    folder = RUNS["assignment0"] / "throughput"
    times = pd.read_csv(folder / "throughput-times.csv")
    rates = 8 * 128 / times.loc[times["batch_size"] == 8, "step_time_ms"] * 1e3
    # gpt2-nano: 6 blocks of width 256, 8,192 words. A token takes 6 operations for each weight of a
    # matrix product (12 d² a block, and the head), and 12 · layers · d · length for attention.
    width, layers, words, length = 256, 6, 8192, 128
    per_token = 6 * (12 * width**2 * layers + words * width) + 12 * layers * width * length
    peak = pd.read_csv(folder / "device-peak.csv")["flops_per_s"].iloc[0]
    one = found["Speed of one device"].answer
    median = rates.median()
    all_is_computed(
        one,
        f"{median:,.0f} tokens/s, {median * per_token / peak:.0%} MFU",
        "95 % interval not told (1 round; 4 are needed)",
        "GPT-2 Nano, batch 8",
    )
    # Fifteen steps of a single visit are no repetitions.
    assert not one.is_settled
    assert one.judged.said == "not settled: 5 more rounds"
    assert one.to_settle.endswith(
        "throughput.py --config assignments/assignment0/configs/laptop.yaml --rounds 6"
    )
    # Five more visits to this batch; those to the other batches and the peak stay as they are.
    record = json.loads((folder / "environment.json").read_text())
    start, end = (datetime.fromisoformat(record[name]) for name in ("start_time", "end_time"))
    taken = times.groupby("batch_size")["step_time_ms"].sum()
    longer = 1 + 5 * taken[8] / taken.sum()
    minutes = max(1, round((end - start).total_seconds() / 60 * longer))
    assert f"6 rounds ({minutes} minute{'s' * (minutes > 1)}) may settle it" in one.to_settle


def test_the_largest_batch_is_that_of_the_smallest_memory_on_a_cpu(
    found: dict[str, Finding],
) -> None:
    folder = RUNS["assignment0"] / "memory_analysis"
    row = pd.read_csv(folder / "largest-batch.csv").sort_values("memory_gb").iloc[0]
    peaks = pd.read_csv(folder / "memory-peak.csv").set_index("source")["peak_bytes"]
    one = found["Largest batch"].answer
    assert abs(peaks["predicted"] / peaks["tracked"] - 1) < 1e-4
    all_is_computed(
        one,
        f"{row['as_asked']} sequences in {row['memory_gb']} GB; {row['both']} with checkpointing",
        "GPT-2 Small, 1,024 tokens each",
        "with nothing allocated by 0.00%",
    )


def test_the_largest_kind_of_work(found: dict[str, Finding]) -> None:
    folder = RUNS["assignment0"] / "profile_training"
    table = pd.read_csv(folder / "profile-operators.csv")
    by_step = table.groupby(["step", "category"])["time_us"].sum().unstack(fill_value=0)
    lengths = by_step.sum(axis=1).sort_values()
    middle = lengths.index[(len(lengths) - 1) // 2]
    name = by_step.loc[middle].idxmax()
    one = found["Where a step's time goes"].answer
    shares = by_step.loc[middle] / lengths[middle]
    # the rival is the one that it is told from the least
    others = {
        other: students_interval(by_step[name] / by_step[other])
        for other in by_step.drop(columns=name)
    }
    rival, (ratio, low, high) = min(others.items(), key=lambda other: other[1][1])
    all_is_computed(
        one,
        f"{shares[name]:.0%} {name}",
        f"{ratio:.2f} times as long as its closest rival, {shares[rival]:.0%} {rival}",
        interval_format(low, high, "{:.2f}", len(by_step)).replace("rounds", "steps"),
    )
    assert one.is_settled
    assert one.doubt == "steps of a single visit"


def test_the_speedup_of_ddp_and_what_the_exchange_adds(found: dict[str, Finding]) -> None:
    folder = RUNS["assignment1"] / "compare_strategies"
    table = pd.read_csv(folder / "strategy-times.csv")
    fewest = table[table["accumulation"] == table["accumulation"].min()]
    steps = slowest(fewest, ["strategy", "round", "iteration"], "step_time_ms")
    rounds = steps.groupby(["strategy", "round"]).median().unstack("strategy")
    # All strategies but one device, at each accumulation, are rows of the section's table.
    claims = (table["strategy"].nunique() - 1) * table["accumulation"].nunique()
    speedup, *_ends = students_interval(rounds["single"] / rounds["DDP"], claims)
    one = found["Speedup of DDP"].answer
    all_is_computed(
        one,
        f"{speedup:.2f} times on 2 ranks, efficiency {speedup / 2:.0%}",
        "95 % interval not told (2 rounds; 4 are needed)",
        "what the exchange adds is not settled: 4 more rounds",
    )
    assert one.text == ("not settled: whether 2 ranks are faster than one device; 4 more rounds")


KEYS = ["bucket_cap_mib", "round", "iteration"]
AT_1_GBIT = (
    "gpt2-nano, 26.3 MiB of gradients, of which DDP's default makes 2 buckets; 2 ranks, "
    "2 emulated hosts at 1 Gbit/s"
)


SWEEP_AT_1_GBIT = "assignment2/emulated-2x1gbit/ddp_benchmark/ddp-times.csv"


def sweep_at_1_gbit(runs: Path = RUNS["assignment2"].parent) -> pd.DataFrame:
    """Returns the slowest rank's backward pass of each step, on the slowest network."""
    table = pd.read_csv(runs / SWEEP_AT_1_GBIT)
    return slowest(table, KEYS, "backward_time_ms").reset_index()


def rounds_at_1_gbit(runs: Path = RUNS["assignment2"].parent) -> pd.DataFrame:
    """Returns the median backward pass of each round (rows) at each cap (columns)."""
    medians = sweep_at_1_gbit(runs).groupby(["round", "bucket_cap_mib"], dropna=False)
    return medians["backward_time_ms"].median().unstack("bucket_cap_mib")


def test_the_best_cap_and_which_measured_ones_are_tied(found: dict[str, Finding]) -> None:
    one = found["Best bucket cap"].answer
    model = recorded_networks()[0].model
    # Brute force: no cap of a fine grid is predicted faster than b*, by more than its digits tell.
    best = numbers(one.value)[-1]
    grid = np.geomspace(1 / 256, 64, 600)
    assert model.backward_s(best) <= min(map(model.backward_s, grid)) * (1 + 1e-3)
    low, high = re.search(rf"within 1 %: ({NUMBER}) to ({NUMBER}) MiB", one.spread).groups()
    assert float(low) <= best <= float(high)
    near = [cap for cap in grid if model.backward_s(cap) <= 1.01 * model.backward_s(best)]
    assert [float(low), float(high)] == pytest.approx([near[0], near[-1]], rel=0.02)
    all_is_computed(
        one,
        f"b* = {best:.3g} MiB; within 1 %: {low} to {high} MiB",
        "the best of the 7 measured is not settled: 47 more rounds",
        AT_1_GBIT,
    )


def test_the_gain_over_the_default_is_measured_where_the_default_was(
    found: dict[str, Finding],
) -> None:
    one = found["Gain over DDP's default"].answer
    rounds = rounds_at_1_gbit()
    model = recorded_networks()[0].model
    caps = rounds.columns.dropna()
    times = {cap: model.backward_s(cap) for cap in caps}
    chosen = max(cap for cap in caps if times[cap] <= min(times.values()) * (1 + 1e-9))
    logs = np.log(rounds[chosen] / rounds[np.nan])
    low, high = 1 - np.exp(stats.ttest_1samp(logs, 0).confidence_interval(0.95))
    all_is_computed(
        one,
        f"{1 - np.exp(logs.mean()):.1%} of the backward pass",
        interval_format(*sorted([low, high]), "{:.1%}", 4),
        f"{chosen:g} MiB against 1 MiB, then 25",
        AT_1_GBIT,
    )
    assert one.kind == "measured"
    # Four rounds are fewer than a first page asks for.
    assert one.text == "not settled: whether it gains anything; 2 more rounds"
    command = "uv run ddplab emulate --hosts 2 --rate 1000mbit -- assignments/assignment2/ddp_bench"
    # The recorded stage took its rounds in as many seconds as its record says.
    sweep = RUNS["assignment2"] / "emulated-2x1gbit" / "ddp_benchmark"
    record = json.loads((sweep / "environment.json").read_text())
    start, end = (datetime.fromisoformat(record[name]) for name in ("start_time", "end_time"))
    minutes = round((end - start).total_seconds() / 60 * 6 / 4)
    assert f"about 6 rounds ({minutes} minutes) would settle it: {command}" in one.to_settle


def median_error(network: str) -> float:
    """Returns the median |error| on a network, of the slowest rank's median steps."""
    [run] = [one for one in recorded_networks() if one.name == network]
    table = pd.read_csv(run.folder / "ddp-times.csv").dropna(subset="bucket_cap_mib")
    # Caps that made the same buckets are one, under the smallest of them.
    buckets = ["num_buckets", "first_bucket_bytes", "last_bucket_bytes"]
    table["smallest"] = table.groupby(buckets)["bucket_cap_mib"].transform("min")
    steps = slowest(table, ["smallest", *KEYS], "backward_time_ms")
    medians = steps.groupby("smallest").median() / 1e3
    errors = [abs(run.model.backward_s(cap) / time - 1) for cap, time in medians.items()]
    return float(np.median(errors))


def test_the_error_of_the_prediction_stands_beside_the_noise(found: dict[str, Finding]) -> None:
    one = found["Error of the prediction"].answer
    steps = sweep_at_1_gbit().dropna()
    medians = steps.groupby("bucket_cap_mib")["backward_time_ms"].median() / 1e3
    model = recorded_networks()[0].model
    errors = [abs(model.backward_s(cap) / time - 1) for cap, time in medians.items()]
    half = steps["round"] // 2 % 2 == 0
    halves = [
        part.groupby("bucket_cap_mib")["backward_time_ms"].median()
        for part in (steps[half], steps[~half])
    ]
    noise = (halves[0] / halves[1] - 1).abs().median()
    ends = []
    for cap, times in (rounds_at_1_gbit()[medians.index] / 1e3).items():
        _, below, above = students_interval(model.backward_s(cap) / times, claims=2)
        sides = [below - 1, 1 - above]
        ends.append((max(0.0, *sides), max(map(abs, sides))))
    low, high = np.median(ends, axis=0)
    on_2_gbit, on_loopback = map(median_error, ("2 emulated hosts at 2 Gbit/s", "loopback"))
    all_is_computed(
        one,
        f"{np.median(errors):.1%} in the median; {interval_format(low, high, '{:.1%}', 4)}",
        f"noise {noise:.1%}; at most {max(errors):.1%}, of {len(medians)} bucketings",
        re.search(r"on 2 emulated hosts at 2 Gbit/s: not settled: \d+ more rounds", one.spread)[0],
        f"on loopback: {on_loopback:.1%}",
    )
    assert f"{on_2_gbit:.1%}" not in one.spread
    # Not told from no error at most caps: intervals at once of the errors of seven.
    rounds = rounds_at_1_gbit()[medians.index] / 1e3
    told = 0
    for cap, times in rounds.items():
        test = stats.ttest_1samp(np.log(model.backward_s(cap) / times), 0)
        told += test.pvalue < 0.05 / len(medians)
    assert told < len(medians) / 2
    assert one.text.startswith(f"not settled: the median error, at most {high:.1%}; ")


def test_dynamic_over_static_with_its_interval(found: dict[str, Finding]) -> None:
    table = pd.read_csv(RUNS["assignment3"] / "compare_modes" / "mode-times.csv")
    steps = slowest(table, ["mode", "step"], "step_time_ms").unstack("mode")
    both = steps[["dynamic", "static"]].dropna()
    one = found["Dynamic over static batches"].answer
    # The interval by the bootstrap, which assumes no form of the noise; the section shows ten pairs
    # of modes with the same batches, and two modes with their own.
    times = both.to_numpy()
    drawn = times[np.random.default_rng(0).integers(len(times), size=(20_000, len(times)))].mean(1)
    ends = np.quantile(drawn[:, 0] / drawn[:, 1], [0.025 / 12, 1 - 0.025 / 12])
    low, high = re.search(r"interval ([\d.]+) to ([\d.]+)", one.spread).groups()
    assert [float(low), float(high)] == pytest.approx(ends, abs=0.015)
    assert one.is_settled
    padded = slowest(table, ["mode", "step"], "padded_tokens").unstack("mode")
    promised = padded["dynamic"].mean() / padded["static"].mean()
    ratio = both["dynamic"].mean() / both["static"].mean()
    all_is_computed(
        one,
        f"{ratio:.2f} of static's step",
        f"95 % interval {low} to {high}, {len(both)} rounds",
        f"promises {promised:.2f}",
    )


def plain_medians(folder: Path) -> pd.DataFrame:
    """Returns the slowest rank's median plain step: a row per round, a column per arm."""
    steps = pd.read_csv(folder / "steps.csv")
    steps = steps[~steps["warmup"].astype(str).str.lower().isin(["true", "1"])]
    plain = set(steps.loc[steps["kind"] == "plain", "arm"])
    steps = steps[(steps["kind"] == "plain") | ~steps["arm"].isin(plain)]
    keys = ["arm", "round", "epoch", "step"]
    single = slowest(steps, keys, "step_time_ms")
    return single.groupby(["round", "arm"]).median().unstack("arm")


def test_the_main_cause_takes_the_share_that_nothing_hides(found: dict[str, Finding]) -> None:
    one = found["What limits scaling"].answer
    assert "too small for this exchange" in one.value
    steps = pd.read_csv(RUNS["assignment4"] / "emulated-2x1gbit" / "sweep_text" / "steps.csv")
    timed = steps[(steps["arm"] == 1) & (steps["kind"] == "timed") & ~steps["warmup"]]
    parts = timed[["communication_time_ms", "step_time_ms"]].mean()
    share = parts["communication_time_ms"] / parts["step_time_ms"]
    rounds = timed.groupby("round")[["communication_time_ms", "step_time_ms"]].mean()
    shares = rounds["communication_time_ms"] / rounds["step_time_ms"]
    test = stats.ttest_1samp(shares, 0).confidence_interval()
    said = re.search(r"takes (\d+)% .*interval (\d+)% to (\d+)%", f"{one.value}; {one.spread}")
    assert [*map(int, said.groups())] == pytest.approx([100 * end for end in (share, *test)], abs=1)
    all_is_computed(
        one, f"{said[1]}% of the step", interval_format(int(said[2]), int(said[3]), "{}%", 4)
    )


def speedups_of_changes(folder: Path) -> pd.DataFrame:
    """Returns speedups over one rank with the same change: a row per round, a column per change."""
    arms = pd.read_csv(folder / "arms.csv").assign(
        change=lambda table: table["change"].fillna("none")
    )
    rounds = plain_medians(folder)
    speedups = {}
    for change, of_change in arms.groupby("change", sort=False):
        one, both = (of_change[of_change["world_size"] == ranks].iloc[0] for ranks in (1, 2))
        samples = both["global_batch"] / one["global_batch"]
        speedups[change] = samples * rounds[one["arm"]] / rounds[both["arm"]]
    return pd.DataFrame(speedups)


def test_the_change_that_helps_most_and_what_was_predicted(found: dict[str, Finding]) -> None:
    folder = RUNS["assignment4"] / "emulated-2x1gbit" / "verify_changes"
    predicted = pd.read_csv(folder / "proposals.csv").set_index("change")["predicted_speedup"]
    speedups = np.exp(np.log(speedups_of_changes(folder)).mean())
    best = speedups.idxmax()
    one = found["The change that helps most"].answer
    all_is_computed(
        one,
        f"{best}: {speedups['none']:.2f} → {speedups[best]:.2f} times as fast as one rank",
        f"{best}: {speedups[best]:.2f} (not told); without it {speedups['none']:.2f} (not told)",
        f"predicted {predicted[best]:.2f}; not settled, 3 more rounds",
    )
    # Three rounds settle nothing, whatever they say.
    assert one.text == ("not settled: which change helps most, or whether any does; 3 more rounds")
    assert "-- assignments/assignment4/verify_changes.py --config" in one.to_settle
    assert one.to_settle.endswith(" --rounds 6")


def every_form(*findings: Finding) -> str:
    """Returns all that the first page says of some findings, in the terminal and in a browser."""
    page = FirstPage(machine=("a machine",), findings=findings, figures=())
    console = Console(file=io.StringIO(), width=200)
    print_page(page, console)
    return " ".join((console.file.getvalue() + first_page_html(page)).split())


def noisy_run(
    target: Path, table: str, scale: Callable[[pd.DataFrame], pd.Series], copies: int = 1
) -> Path:
    """Copies the recorded run that has a table and multiplies the times in it, row by row.

    Of several ``copies`` of its rounds, each is further rounds.
    """
    assignment = table.split("/")[0]
    run = target / assignment
    shutil.copytree(RUNS[assignment], run)
    path = run / table.removeprefix(f"{assignment}/")
    rows = pd.read_csv(path)
    if copies > 1:
        count = rows["round"].nunique()
        parts = [rows.assign(round=rows["round"] + copy * count) for copy in range(copies)]
        rows = pd.concat(parts, ignore_index=True)
    times = [name for name in rows.columns if name.endswith("_time_ms")]
    rows[times] = rows[times].mul(scale(rows), axis=0)
    rows.to_csv(path, index=False)
    return run


def in_turns(rows: pd.DataFrame, low: float, high: float) -> pd.Series:
    """Returns the first factor for rows of even rounds, the other for those of odd ones."""
    return (rows["round"] % 2).map({0: low, 1: high})


def test_what_an_exchange_adds_is_not_said_where_its_section_calls_it_noise(tmp_path: Path) -> None:
    # DDP as fast as one device without an exchange, give or take: in one round much faster
    def scale(rows: pd.DataFrame) -> pd.Series:
        return in_turns(rows, 0.4, 1.0).where(rows["strategy"] == "DDP", 1.0)

    table = "assignment1/compare_strategies/strategy-times.csv"
    run = noisy_run(tmp_path, table, scale, copies=4)
    strategies = open_strategies(run)
    section = exchange_cost(strategies).iloc[0]
    assert section["above_noise"] == "hidden by noise"
    assert section["added_share"] < -0.1  # no exchange takes less than no time
    [one] = findings_of("assignment1", run)
    text = every_form(one)
    assert f"{section['added_share']:.0%}" not in text
    assert text.count("the exchange adds") == text.count("the exchange adds is hidden by noise")
    assert "what the exchange adds is hidden by noise" in text
    # the speedup is above 1 in all rounds, and is said
    assert re.search(r"\d\.\d\d times on 2 ranks, efficiency \d+%", text)


def test_a_speedup_that_rounds_do_not_agree_on_is_not_said(tmp_path: Path) -> None:
    def scale(rows: pd.DataFrame) -> pd.Series:
        return in_turns(rows, 0.8, 2.5).where(rows["strategy"] == "DDP", 1.0)

    table = "assignment1/compare_strategies/strategy-times.csv"
    run = noisy_run(tmp_path, table, scale, copies=4)
    section = open_strategies(run).summary(("DDP",)).iloc[0]
    low, high = section["judged"].interval.low, section["judged"].interval.high
    assert low < 1 < high
    assert section["verdict"] == "hidden by noise"
    text = every_form(*findings_of("assignment1", run))
    assert "hidden by noise: whether 2 ranks are faster than one device" in text
    assert "efficiency" not in text
    assert f"95 % interval {low:.2f} to {high:.2f}, 8 rounds" in text


def test_a_number_of_strategies_is_the_same_wherever_it_is_said(tmp_path: Path) -> None:
    # Eight rounds: the recorded two, four times, each time a little slower for DDP alone.
    def scale(rows: pd.DataFrame) -> pd.Series:
        return (1 + 0.01 * rows["round"]).where(rows["strategy"] == "DDP", 1.0)

    table = "assignment1/compare_strategies/strategy-times.csv"
    run = noisy_run(tmp_path, table, scale, copies=4)
    strategies = open_strategies(run)
    [one] = findings_of("assignment1", run)
    assert one.answer.judged is strategies.speedups[1, "DDP"] or (
        one.answer.judged == strategies.speedups[1, "DDP"]
    )
    of_stage = [row for row in find_speedups([run]) if row.run.folder == strategies.folder]
    assert [row.speedup for row in of_stage] == list(strategies.speedups.values())
    assert len(of_stage) == 8
    section = strategies.summary().set_index(["accumulation", "strategy"])
    printed = tabulate_speedups(of_stage).set_index("what").loc["DDP"]
    assert printed["speedup"] == section.at[(1, "DDP"), "speedup"]
    assert printed["interval"] == section.at[(1, "DDP"), "judged"].interval
    assert section.at[(1, "DDP"), "verdict"] == str(of_stage[1].speedup.verdict)

    [bar] = (
        step_bars(run).query("configuration == 'gpt2-nano, DDP, 2 ranks'").to_dict("records")[:1]
    )
    [cost] = exchange_cost(strategies).query("accumulation == 1").to_dict("records")
    assert bar["exchange"] == cost["above_noise"]
    assert bar["exchange_ms"] / bar["computation_ms"] == pytest.approx(cost["added_share"])

    over = strategies.step_time_ratios_to(1, "DDP")["FULL_SHARD"]
    change = "FULL_SHARD in place of DDP"
    made = [row.judged for row in decisions(run) if row.change == change]
    [judged] = [one for one in made if one.rounds == over.rounds]
    assert (judged.verdict, judged.estimate) == (over.verdict, pytest.approx(1 / over.estimate))
    assert (judged.interval.low, judged.interval.high) == pytest.approx(
        (1 / over.interval.high, 1 / over.interval.low)
    )


def test_on_the_first_page_one_rule_says_how_many_rounds_are_enough() -> None:
    judged = [row.judged for folder in RUNS.values() for row in decisions(folder)]
    judged += [row.speedup for row in find_speedups(RUNS.values())]
    judged += list(open_options(RUNS["assignment0"]).ratios.values())
    assert {one.least_rounds for one in judged} == {FIRST_PAGE_ROUNDS}
    assert len(judged) > 30
    # The recorded options have four rounds: their section says what the first page says.
    options = open_options(RUNS["assignment0"]).ratios.values()
    assert all(one.said.startswith("not settled: ") for one in options)


@pytest.mark.parametrize(
    ("lost", "value"),
    [
        ("", "no limiting cause found"),
        ("A step waits most.", "scaling falls short, and no cause was found for it"),
    ],
)
def test_that_nothing_limits_scaling_takes_as_many_rounds(
    monkeypatch: pytest.MonkeyPatch, lost: str, value: str
) -> None:
    def without_causes(case: Case) -> Diagnosis:
        return replace(recorded_diagnosis(), verdicts=(), unexplained=None, lost=lost)

    monkeypatch.setattr(scaling, "examine_case", without_causes)
    one = findings_of("assignment4", RUNS["assignment4"])[0].answer
    assert (one.value, one.doubt) == (value, lost)
    assert one.text == "not settled: what limits scaling; 2 more rounds"


def test_a_limit_that_is_not_told_from_the_next_one_is_not_settled(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def with_two_causes(case: Case) -> Diagnosis:
        found = recorded_diagnosis()
        first = found.verdicts[0]
        rival = replace(first, cause="unequal-lengths", title="Texts of unequal length")
        return replace(found, verdicts=(first, rival))

    def shares(case: Case, cause: str) -> list[float]:
        near = {"unequal-lengths": [0.20, 0.30, 0.22, 0.31, 0.19, 0.30]}
        return near.get(cause, [0.25, 0.26, 0.25, 0.26, 0.24, 0.25])

    monkeypatch.setattr(scaling, "examine_case", with_two_causes)
    monkeypatch.setattr(scaling, "lost_by_round", shares)
    one = findings_of("assignment4", RUNS["assignment4"])[0].answer
    assert one.text.startswith("hidden by noise: which limits scaling most: ")
    assert one.text.endswith(", or Texts of unequal length")


@pytest.mark.slow  # in kind: test_disturbed_run.py
def test_the_main_limit_is_said_where_enough_rounds_show_it_by_themselves(tmp_path: Path) -> None:
    # Twice the recorded four rounds.
    folder = "assignment4/emulated-2x1gbit/sweep_text"
    run = noisy_run(tmp_path, f"{folder}/steps.csv", lambda rows: rows["arm"] * 0 + 1, copies=2)
    path = tmp_path / folder / "buckets.csv"
    buckets = pd.read_csv(path)
    later = buckets.assign(round=buckets["round"] + 4)
    pd.concat([buckets, later]).to_csv(path, index=False)
    recorded, one = (
        {finding.question.title: finding for finding in findings_of("assignment4", where)}[
            "What limits scaling"
        ].answer
        for where in (RUNS["assignment4"], run)
    )
    assert recorded.text == "not settled: what limits scaling; 2 more rounds"
    assert (one.judged.rounds, one.is_settled) == (8, True)
    assert one.text == one.value == recorded.value
    low, high = one.judged.interval.low, one.judged.interval.high
    assert f"95 % interval {low:.0%} to {high:.0%}, 8 rounds" in one.spread
    # The share of all steps lies among those of single rounds.
    shares = lost_by_round(case_of(tmp_path / folder), "batch-too-small")
    assert shares[:4] == pytest.approx(shares[4:])
    assert min(shares) <= one.judged.estimate <= max(shares)


def test_a_change_that_cannot_be_told_from_none_has_no_speedup(tmp_path: Path) -> None:
    folder = "assignment4/emulated-2x1gbit/verify_changes"
    arms = pd.read_csv(RUNS["assignment4"].parent / folder / "arms.csv")
    changed = arms.loc[(arms["world_size"] > 1) & (arms["change"] != "none"), "arm"]

    def scale(rows: pd.DataFrame) -> pd.Series:
        return in_turns(rows, 0.1, 10.0).where(rows["arm"].isin(changed), 1.0)

    noisy_run(tmp_path, f"{folder}/steps.csv", scale, copies=4)
    changes = open_changes(tmp_path / folder)
    table = ChangesLab(changes, ()).table()
    section = pd.DataFrame(table.cells, columns=table.columns).set_index("change")
    assert set(section.iloc[1:]["told from no change"]) == {"hidden by noise"}
    one = findings_of("assignment4", tmp_path / "assignment4")[1]
    text = every_form(one)
    assert "hidden by noise: which change helps most, or whether any does" in text
    assert "→" not in text
    assert "are tied" in text
    assert section.loc[changes.best.arm, "95 % interval"] in text


def test_caps_whose_differences_are_noise_have_no_best_and_no_gain(tmp_path: Path) -> None:
    def halves(rows: pd.DataFrame) -> pd.Series:
        # two rounds of each cap last twice as long: of neighbours, such as the default and 1 MiB,
        # not the same ones
        caps = rows["bucket_cap_mib"].fillna(0.99).rank(method="dense").astype(int)
        return (rows["round"] // 2 + caps) % 2 + 1

    run = noisy_run(tmp_path, SWEEP_AT_1_GBIT, halves, copies=2)
    best, gain, error = findings_of("assignment2", run)
    network = measured_networks(open_run(run))[0]
    accuracy = network.accuracy()
    regret = choice_facts(accuracy, network.model.best_cap())
    assert regret["regret can be told from noise"] == "hidden by noise"
    text = every_form(best, gain, error)
    assert f"{accuracy.median_error:.1%} in the median" not in text
    assert "hidden by noise: the median error, at most" in text
    logs = np.log(rounds_at_1_gbit(tmp_path)).drop(columns=np.nan)
    fastest = logs.mean().idxmin()
    tied = [
        f"{cap:g}"
        for cap in logs
        if cap == fastest or stats.ttest_1samp(logs[cap] - logs[fastest], 0).pvalue > 0.05
    ]
    assert len(tied) > 2
    words = f"{len(tied)} caps are tied: {', '.join(tied[:-1])}, and {tied[-1]} MiB"
    assert f"of the 7 measured, {words} (within noise over 8 rounds)" in text
    assert "hidden by noise: whether it gains anything" in text
    assert not re.search(r"best of the \d+ measured|% of the backward pass", text)


def with_rounds(
    times: pd.DataFrame, rounds: int, arm: str, effect: float, seed: int
) -> pd.DataFrame:
    """Returns a table with so many rounds, copies of its first with noise of 3 %.

    The last arm of the column ``arm`` takes less by ``effect``.
    """
    draw = np.random.default_rng(seed)
    columns = [name for name in times if name.endswith("_time_ms")]
    first = times[times["round"] == 0]
    arms = first[arm].fillna(-1)
    made = []
    for round_ in range(rounds):
        noise = {name: np.exp(draw.normal(0, 0.03)) for name in sorted(set(arms))}
        noise[arms.max()] *= 1 - effect
        factors = arms.map(noise).to_numpy()[:, None]
        made.append(first.assign(round=round_, **(first[columns] * factors)))
    return pd.concat(made)


@pytest.mark.parametrize(("rounds", "effect"), [slow(5, 0.4), (8, 0.4), slow(2, 0.4), slow(8, 0.0)])
def test_of_caps_the_first_page_says_what_the_section_says(
    rounds: int, effect: float, tmp_path: Path
) -> None:
    def all_alike(rows: pd.DataFrame) -> pd.Series:
        return 100 / rows["backward_time_ms"]

    run = noisy_run(tmp_path, SWEEP_AT_1_GBIT, all_alike)
    path = tmp_path / SWEEP_AT_1_GBIT
    with_rounds(pd.read_csv(path), rounds, "bucket_cap_mib", effect, seed=rounds).to_csv(path)
    best, gain, error = (one.answer for one in findings_of("assignment2", run))
    section = summary(open_networks(run)).set_index("network").loc["1 Gbit/s"]
    assert gain.is_settled == (": " not in section[GAIN])
    assert error.is_settled == (section["error told from noise"] == "settled")
    named = effect > 0 and rounds >= FIRST_PAGE_ROUNDS
    words = "tied" if rounds >= 6 else "not settled: "
    assert (words in best.spread) == (not named)
    assert section["best b (MiB)"] in best.spread
    assert (section["best b (MiB)"] == "64") == named
    assert not gain.is_settled or rounds >= 6
    if named:
        assert section["best b (MiB)"] == "64"
        assert "best of the 7 measured: 64 MiB" in best.spread


@pytest.mark.parametrize(("rounds", "effect"), [slow(5, 0.4), (8, 0.4), slow(3, 0.4), slow(8, 0.0)])
def test_of_changes_the_first_page_says_what_the_section_says(
    rounds: int, effect: float, tmp_path: Path
) -> None:
    table = "assignment4/emulated-2x1gbit/verify_changes/steps.csv"
    run = noisy_run(tmp_path, table, lambda rows: 100 / rows["step_time_ms"])
    path = tmp_path / table
    with_rounds(pd.read_csv(path), rounds, "arm", effect, seed=rounds).to_csv(path)
    one = findings_of("assignment4", run)[1].answer
    changes = open_changes(path.parent)
    says = changes_facts(changes)["the change that helps most"]
    named = effect > 0 and rounds >= FIRST_PAGE_ROUNDS
    assert one.is_settled == named == (says in set(changes.table["change"]))
    assert one.judged == changes.lead
    if named:
        assert one.text.startswith(f"{says}: ")
    else:
        verdict = "hidden by noise" if rounds >= FIRST_PAGE_ROUNDS else "not settled"
        assert f"{verdict}: which change helps most, or whether any does" in one.text


ANCHORS = [question.anchor for questions in QUESTIONS.values() for question in questions]


@pytest.mark.parametrize("notebook", sorted({anchor.split("-")[0] for anchor in ANCHORS}))
def test_every_finding_leads_to_a_heading_of_a_notebook(notebook: str) -> None:
    path = project_root() / "notebooks" / f"{notebook}.ipynb"
    part = render(Document(notebook.split("_")[0], (path,)))
    anchors = {heading.anchor for heading in part.contents}
    assert {anchor for anchor in ANCHORS if anchor.startswith(f"{notebook}-")} <= anchors


def test_a_run_without_a_table_says_what_is_not_there(tmp_path: Path) -> None:
    run = shutil.copytree(RUNS["assignment0"], tmp_path / "run")
    shutil.rmtree(run / "throughput")
    (run / "profile_training" / "environment.json").write_text('{"status": "failed"}')
    speed, batch, kinds = findings_of("assignment0", run)
    assert (speed.answer, kinds.answer) == (None, None)
    assert "no complete run with throughput-batches.csv" in speed.missing
    assert "profile-operators.csv" in kinds.missing
    assert batch.answer is not None
    assert batch.marks == ("predicted",)  # a copy elsewhere did not come with the project
    assert figure_of("assignment0", run) is None


@pytest.mark.parametrize("content", ["", "batch_size\n", "batch_size,status\n8,measured\n", "\0"])
def test_a_table_that_is_cut_costs_its_finding_alone(content: str, tmp_path: Path) -> None:
    run = shutil.copytree(RUNS["assignment0"], tmp_path / "run")
    for table in ("throughput/throughput-batches.csv", "profile_training/profile-operators.csv"):
        (run / table).write_text(content)
    speed, batch, kinds = findings_of("assignment0", run)
    assert speed.answer is None
    assert speed.missing
    assert kinds.answer is None
    assert batch.answer is not None
    assert figure_of("assignment0", run) is None


def test_changes_whose_table_cannot_be_read_are_a_row_with_the_reason(tmp_path: Path) -> None:
    run = shutil.copytree(RUNS["assignment0"], tmp_path / "run")
    assert all(row.judged for row in decisions(run))
    (run / "options" / "options-times.csv").write_text("arm,round\nbaseline,0\n")
    [row] = decisions(run)
    assert (row.change, row.judged) == ("options", None)
    assert row.where.startswith("its tables cannot be read (KeyError: ")
    [cells] = show(decisions(run), DECISIONS).cells
    assert cells[:4] == [row.change, row.where, "–", "–"]


def test_what_was_found_is_not_sought_again_while_a_run_grows(tmp_path: Path) -> None:
    run = shutil.copytree(RUNS["assignment0"], tmp_path / "run")
    before = findings_of("assignment0", run)
    shutil.rmtree(run / "throughput")
    again = findings_of("assignment0", run, earlier=before)
    assert again[0] is before[0]


@pytest.mark.parametrize("assignment", FIGURES)
def test_small_figures_have_units_on_their_axes(assignment: str) -> None:
    small = figure_of(assignment, RUNS[assignment])
    [axes] = small.figure.axes
    assert re.search(r"\((%|ms|MiB)\)|over static|speedup", axes.get_xlabel())
    assert re.search(r"\d", small.alt)


def test_a_configuration_of_two_stages_has_a_bar_of_each() -> None:
    folder = RUNS["assignment4"]
    bars = step_bars(folder).set_index("configuration")["step_ms"]
    assert bars.index.is_unique
    for stage, arm in (("benchmark", 0), ("sweep", 5)):
        step = decompose(pd.read_csv(folder / stage / "steps.csv"), arm)
        assert bars[f"MLP 1024-3×1024-512, 2 ranks × 128 ({stage})"] == step.step_ms


def test_every_option_of_a_step_has_its_consequences_among_the_decisions() -> None:
    assert set(OPTIONS) <= set(CONSEQUENCES)


def test_a_change_is_as_fast_as_the_samples_of_all_ranks_are_faster() -> None:
    folder = RUNS["assignment4"] / "emulated-2x1gbit" / "verify_changes"
    arms = pd.read_csv(folder / "arms.csv", keep_default_na=False)
    both = arms[arms["world_size"] == 2].set_index("change")
    rates = both["global_batch"] / plain_medians(folder)[both["arm"]].set_axis(both.index, axis=1)
    [judged] = [one.judged for one in decisions(folder) if one.change == "compression=fp16"]
    ratio = rates["compression=fp16"] / rates["none"]
    assert judged.estimate == pytest.approx(np.exp(np.log(ratio).mean()))
    # One rank is slower with the change: over one rank each, it would look like more.
    assert judged.estimate < open_changes(folder).told["compression=fp16"].estimate - 0.05
