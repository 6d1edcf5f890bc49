"""What tables of assignments 0, 1 and 3 say of made-up measurements whose truth is known.

The noise is this project's own (``test_judged``). A page is all that one table says. Where nothing
differs, at most 5 % of pages may say that something does; and the first page says of a number that
it is not settled exactly where the table of its section does.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from functools import partial
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace

import pandas as pd
import pytest
from assignment1_support import BENCHMARK, ENVIRONMENT, strategy_rows, write_run
from micro_batch_support import mode_times, write_comparison
from test_judged import pages, upper_limit

from common.analysis.data_parallel.emulated_strategies import EmulatedStrategies
from common.analysis.data_parallel.strategies import StrategyTimes, open_strategies
from common.analysis.data_parallel.strategy_times import exchange_cost, over_fastest
from common.analysis.findings import training
from common.analysis.findings.finding import Answer
from common.analysis.micro_batches.lab import open_assignment3
from common.analysis.micro_batches.mode_comparison import ModeComparison
from common.analysis.one_device.options import OptionsRun
from common.analysis.one_device.profile import ProfileRun, open_profile
from common.analysis.one_device.profile_text import PROFILER
from common.analysis.one_device.throughput import UTILISATION, open_throughput
from common.analysis.show import told_of
from common.judged import DISTURBED, NOT_WITNESSED, QUIET, Verdict
from common.perfmodel.fsdp.schedule import StepPrediction

slow = partial(pytest.param, marks=pytest.mark.slow)
SETTLED = "settled"
MANY, FEW = 100, 20
"""Pages on which nothing differs, and on which something does."""
WORKLOAD = {
    **{"model": "gpt2-nano", "batch_size": 4, "seq_len": 64, "precision": "float32"},
    **{"tf32": False, "attention": "sdpa", "compile": False, "optimizer": "adamw"},
    **{"optimizer_implementation": "fused", "activation_checkpointing": False},
    **{"loss_chunks": 1, "gradient_accumulation": 1, "device": "cpu", "vocab_multiple": 1},
}
OPENED = SimpleNamespace(
    settings=WORKLOAD, environment={}, machine_state=NOT_WITNESSED, folder=Path("nowhere")
)


def in_rows(times: pd.DataFrame, names: Iterable[str], arm: str, value: str) -> pd.DataFrame:
    """Returns a row per round and arm, of a table with a row per round and a column per arm."""
    named = times.set_axis(list(names), axis=1).rename_axis("round").reset_index()
    return named.melt(id_vars="round", var_name=arm, value_name=value)


def strategies_of(names: Iterable[str], tables: Iterable[pd.DataFrame]) -> StrategyTimes:
    """Returns steps under strategies; each table is of another number of micro-batches."""
    times = pd.concat(
        in_rows(table, names, "strategy", "step_time_ms").assign(accumulation=count)
        for count, table in enumerate(tables, 1)
    )
    return StrategyTimes(
        folder=Path("nowhere"),
        caption="",
        recorded=False,
        rotated=True,
        settings=BENCHMARK,
        environment=ENVIRONMENT | {"world_size": 2},
        times=times.assign(iteration=0, rank=0, sent_bytes=0),
    )


def speedups_say(tables: tuple[pd.DataFrame, ...]) -> set[str]:
    """Returns the strategies whose speedup is said to be settled."""
    names = ["DDP", "single", "local", "FULL_SHARD", "SHARD_GRAD_OP"]
    table = strategies_of(names, tables).summary()
    return set(table.loc[table["verdict"] == SETTLED, "strategy"])


def exchange_says(tables: tuple[pd.DataFrame, ...]) -> set[str]:
    """Returns the step without an exchange, where DDP's is said to be longer."""
    table = exchange_cost(strategies_of(["local", "DDP"], tables))
    return {"local"} if (table["above_noise"] == SETTLED).any() else set()


def accumulation_says(tables: tuple[pd.DataFrame, ...]) -> set[str]:
    """Returns DDP, where its samples are said to go as fast with another number of micro-batches.

    A step of two takes twice as long.
    """
    run = strategies_of(["DDP"], [tables[0], 2 * tables[1]])
    return {"DDP"} if any(judged.is_settled for judged in run.accumulated.values()) else set()


def fastest_says(tables: tuple[pd.DataFrame, ...]) -> set[str]:
    names = ["DDP", "FULL_SHARD", "SHARD_GRAD_OP", "MY_ZERO1"]
    table = over_fastest(strategies_of(names, tables))
    settled = table["above_noise"] == SETTLED
    # A strategy is named exactly where all others of its table are told from it.
    for _, rows in table.groupby("accumulation"):
        named = rows["fastest"].eq("yes").any()
        assert named == (rows["above_noise"].dropna() == SETTLED).all()
    slower = set(table.loc[settled, "strategy"])
    return slower | set(table.loc[table["fastest"] == "yes", "strategy"])


class Predicted(EmulatedStrategies):
    """Predicts 100 ms, which is what steps take but for noise."""

    def predict(self, strategy: str, accumulation: int) -> StepPrediction:
        return StepPrediction(strategy, 0.1, 0.05)


def errors_say(tables: tuple[pd.DataFrame, ...]) -> set[str]:
    names = ["DDP", "FULL_SHARD", "SHARD_GRAD_OP", "MY_ZERO1"]
    emulated = Predicted(strategies_of(names, tables[:1]), *[None] * 5)
    table = emulated.table()
    return set(table.loc[table["above_noise"] == SETTLED, "strategy"])


def options_say(tables: tuple[pd.DataFrame, ...]) -> set[str]:
    names = ["sdpa", "baseline", "baseline-again", "bfloat16", "fused", "compile", "all", "foreach"]
    times = in_rows(tables[0], names, "arm", "step_time_ms").assign(iteration=0, tokens=100)
    arms = pd.DataFrame({"arm": names, "measured": True, "reason": ""})
    run = OptionsRun(opened=OPENED, times=times, arms=arms)
    settled = set(run.measured.index[run.measured["above_noise"] == SETTLED])
    # One is called the largest only of those that are told from the baseline.
    assert run.largest is None or run.clear
    return settled | ({run.largest.split("(")[1].split(")")[0]} if run.largest else set())


def modes_say(tables: tuple[pd.DataFrame, ...]) -> set[str]:
    names = ["dynamic", "static", "dynamic_calibrated", "karmarkar_karp", "dynamic_tokens_sq"]
    times = in_rows(tables[0], names, "mode", "step_time_ms").rename(columns={"round": "step"})
    constant = {"rank": 0, "same_batch": True, "global_batch": 8, "padded_tokens": 100}
    zero = dict.fromkeys(("compute_time_ms", "waiting_time_ms", "planning_time_ms"), 1.0)
    run = ModeComparison(opened=OPENED, times=times.assign(**constant, **zero))
    table = run.summary
    told = set(table.index[table["differs"] == SETTLED]) | set(table.index[~table["tied"]])
    return told | ({run.fastest.arm} if len(run.fastest.tied) == 1 else set())


def kinds_say(tables: tuple[pd.DataFrame, ...]) -> set[str]:
    names = ["attention", "loss", "optimizer", "matrix products"]
    longer = 1e4 / tables[0]  # the first takes most where its arm is the fastest
    times = in_rows(longer, names, "category", "time_us").rename(columns={"round": "step"})
    most = ProfileRun(opened=OPENED, operators=times, steps=None, roofline=None, peak=None).most
    return {most.arm} if most.lead.is_settled else set()


RULES: dict[str, tuple[Callable[..., set[str]], int, int]] = {
    "speedups over one device": (speedups_say, 5, 6),
    "what the exchange adds": (exchange_says, 2, 6),
    "over the fastest strategy": (fastest_says, 4, 6),
    "more micro-batches": (accumulation_says, 1, 6),
    "errors of predicted strategies": (errors_say, 4, 6),
    "options": (options_say, 8, 6),
    "modes on the same batches": (modes_say, 5, 12),
    "the kind of work that takes most": (kinds_say, 4, 6),
}
"""Rule → what it says of a page, its number of arms, and its rounds."""


def drawn(
    rounds: int, arms: int, faster: float = 0.0, *, count: int
) -> list[tuple[pd.DataFrame, ...]]:
    """Draws pages of two tables, which are of two numbers of micro-batches."""
    return list(pairwise(pages(rounds, arms, faster, count=count + 1)))


@pytest.mark.slow
@pytest.mark.parametrize("rule", RULES)
def test_where_nothing_differs_few_pages_say_that_something_does(rule: str) -> None:
    says, arms, rounds = RULES[rule]
    alarms = sum(bool(says(page)) for page in drawn(rounds, arms, count=MANY))
    assert alarms <= upper_limit(0.05, MANY)


@pytest.mark.parametrize(
    ("rule", "faster", "share"),
    [
        slow("speedups over one device", 0.2, 0.7),
        ("what the exchange adds", 0.2, 0.95),
        slow("over the fastest strategy", 0.2, 0.7),
        slow("options", 0.2, 0.7),
        slow("modes on the same batches", 0.1, 0.9),
        slow("the kind of work that takes most", 0.1, 0.7),
    ],
)
def test_a_planted_difference_is_said_of_the_right_arm(
    rule: str, faster: float, share: float
) -> None:
    says, arms, rounds = RULES[rule]
    first = {
        **{"what the exchange adds": "local", "options": "sdpa"},
        **{"modes on the same batches": "dynamic"},
        **{"the kind of work that takes most": "attention"},
    }.get(rule, "DDP")
    named = [says(page) for page in drawn(rounds, arms, faster, count=FEW)]
    assert sum(first in names for names in named) >= share * FEW


@pytest.mark.parametrize("rule", RULES)
def test_of_few_rounds_no_table_says_anything(rule: str) -> None:
    says, arms, _ = RULES[rule]
    assert not any(says(page) for rounds in (1, 3) for page in drawn(rounds, arms, 1.0, count=2))


# The first page


def of_strategies(folder: Path, times: pd.DataFrame) -> tuple[Answer, bool]:
    """Writes DDP, one device and no exchange; returns the finding, and what its section says."""
    names = ("DDP", "single", "local")
    rounds = {
        name: [[(time, time / 2)] * 2 for time in times[column]]
        for column, name in enumerate(names)
    }
    environment = {"world_size": 2, "command": "python assignments/assignment1/compare.py"}
    write_run(folder / "compare", BENCHMARK, environment, strategy_times=strategy_rows(rounds, {}))
    strategies = open_strategies(folder)
    answer = training.speedup_of_ddp(folder)
    [exchange] = exchange_cost(strategies)["above_noise"]
    left_out = f"what the exchange adds is {exchange}" in answer.spread
    assert left_out == (exchange != SETTLED)
    assert bool(re.search(r"the exchange adds -?\d", answer.spread)) == (exchange == SETTLED)
    return answer, strategies.summary(("DDP",))["verdict"].iloc[0] == SETTLED


def of_modes(folder: Path, times: pd.DataFrame) -> tuple[Answer, bool]:
    rows = mode_times(len(times), {"static": 1.0, "dynamic": 0.6})
    columns = rows["mode"].map({"dynamic": 0, "static": 1, "control": 2})
    rows["step_time_ms"] = times.to_numpy()[rows["step"], columns]
    write_comparison(folder / "compare", rows)
    section = open_assignment3(folder).comparison.summary.loc["dynamic", "differs"]
    return training.dynamic_over_static(folder), section == SETTLED


def of_throughput(folder: Path, times: pd.DataFrame) -> tuple[Answer, bool]:
    table = pd.DataFrame(
        {"batch_size": 4, "round": round_, "iteration": step, "step_time_ms": time_ms}
        for round_, time_ms in enumerate(times[0])
        for step in range(3)
    )
    rows = [{"batch_size": 4, "status": "measured", "tokens_per_s": 1.0, "steps_per_s": 1.0}]
    tables = {"throughput_times": table, "throughput_batches": rows, "device_peak": PEAK}
    write_run(folder / "throughput", WORKLOAD, ONE_CPU, **tables)
    section = told_of(open_throughput(folder), UTILISATION)["tokens/s are"]
    return training.tokens_per_second(folder), section == SETTLED


def of_kinds(folder: Path, times: pd.DataFrame) -> tuple[Answer, bool]:
    names = ["matrix products", "attention", "loss"]
    table = in_rows(1e6 / times, names, "category", "time_us").rename(columns={"round": "step"})
    table = table.assign(phase="forward", operator=table["category"], shapes="8x8", calls=1)
    steps = pd.DataFrame({"step": range(8), "profiled": [True, False] * 4, "time_ms": 10.0})
    roofline = [{"phase": "forward", "operator": "addmm", "flops": 1.0, "shapes": "8x8"}]
    tables = {"profile_operators": table, "profile_steps": steps, "device_peak": PEAK}
    write_run(folder / "profile", WORKLOAD, ONE_CPU, **tables, roofline=roofline)
    assert "the profiler's cost is" in told_of(open_profile(folder), PROFILER)
    [section] = open_profile(folder).categories()["most"].dropna()
    return training.largest_kind_of_work(folder), section == SETTLED


PEAK = pd.DataFrame(columns=["device", "precision", "flops_per_s", "memory_bytes_per_s", "source"])
ONE_CPU = {"gpus": [], "cpu": {"model": "a CPU"}, "world_size": 1}
FINDINGS = {
    **{"strategies": of_strategies, "modes": of_modes},
    **{"throughput": of_throughput, "kinds": of_kinds},
}


@pytest.mark.parametrize("rounds", [slow(1), slow(5), 6])
@pytest.mark.parametrize("name", FINDINGS)
def test_the_first_page_says_not_settled_exactly_where_the_section_does(
    name: str, rounds: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("common.analysis.runs.Run.machine_state", QUIET)
    seen = set()
    for number, faster in enumerate((0.0, 0.1, 0.6)):
        [*_, times] = pages(rounds, 3, faster, count=number + 1)
        answer, section = FINDINGS[name](tmp_path / str(number), times)
        assert answer.is_settled == section
        assert answer.hidden
        if section:
            assert answer.text == answer.value
        else:
            assert answer.text.startswith(f"{answer.judged.verdict}: {answer.hidden}")
            assert (answer.judged.verdict is Verdict.OPEN) == (rounds < 6)
            assert answer.judged.reason in answer.text or rounds >= 6
        seen.add(section)
    assert (True in seen) == (rounds >= 6)


@pytest.mark.parametrize("name", FINDINGS)
def test_a_disturbed_run_says_so_and_what_repeats_it(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("common.analysis.runs.Run.machine_state", DISTURBED)
    [times] = pages(9, 3, 0.6, count=1)
    answer, section = FINDINGS[name](tmp_path, times)
    assert not section
    assert answer.text.startswith("disturbed: ")
    if name == "strategies":
        again = "uv run torchrun --nproc_per_node=2 assignments/assignment1/compare.py"
        assert answer.to_settle == f"measure again while the machine is quiet: {again}"
