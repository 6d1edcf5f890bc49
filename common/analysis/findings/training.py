"""Finds what training takes: on one device (assignment 0), under DDP (assignment 1), and with
planned micro-batches (assignment 3)."""

from __future__ import annotations

from pathlib import Path

import pandas as pd

from common.analysis.data_parallel.strategy_times import exchange_cost, open_strategies
from common.analysis.findings.finding import (
    MEASURED,
    PREDICTED,
    Answer,
    Question,
    hidden_by_noise,
    span,
)
from common.analysis.micro_batches.lab import open_assignment3
from common.analysis.micro_batches.mode_comparison import STATIC
from common.analysis.one_device.memory import open_memory_run
from common.analysis.one_device.profile import open_profile
from common.analysis.one_device.throughput import open_throughput
from common.analysis.runs import Run
from common.errors import UserError
from common.runtime.wording import counted

DYNAMIC = "dynamic"
GB = 1e9


def tokens_per_second(folder: Path) -> Answer:
    """Finds the tokens per second of one device at the run's batch, and MFU."""
    run = open_throughput(folder)
    row = run.measured.set_index("batch_size").loc[run.batch_size]
    mfu = ""
    if run.peak_flops_per_s:
        mfu = f", {run.flops_per_s / run.peak_flops_per_s:.0%} MFU"
    quartiles = span(row["tokens_per_s_q25"], row["tokens_per_s_q75"], "{:,.0f}")
    return Answer(
        value=f"{run.tokens_per_s:,.0f} tokens/s{mfu}",
        spread=f"quartiles {quartiles}; {run.title}, batch {run.batch_size}",
        kind=MEASURED,
        runs=(run.opened,),
    )


def largest_batch(folder: Path) -> Answer:
    """Finds the largest batch that is predicted to fit: in the GPU's memory, else in a 24 GB one.

    The table has the sizes of memory that were asked for; the GPU's is the largest of them that it
    has.
    """
    run = open_memory_run(folder)
    table = run.opened.table("largest-batch.csv").sort_values("memory_gb")
    gpus = run.opened.environment["gpus"]
    has_gb = gpus[0]["memory_bytes"] / GB if gpus else table["memory_gb"].iloc[0]
    fits = table[table["memory_gb"] <= has_gb * 1.01]
    row = (fits if len(fits) else table).iloc[-1 if len(fits) else 0]
    work = run.workload
    exactly = "the same to 0.01 %" if abs(run.error) < 1e-4 else f"{run.error:+.2%}"
    return Answer(
        value=f"{counted(int(row['as_asked']), 'sequence')} in {row['memory_gb']:.0f} GB",
        spread=(
            f"{int(row['both']):,} with checkpointing and the loss in pieces; {work.title}, "
            f"{work.seq_len:,} tokens each; predicted peak over the one seen here: {exactly}"
        ),
        kind=PREDICTED,
        runs=(run.opened,),
    )


def largest_kind_of_work(folder: Path) -> Answer:
    """Finds the kind of work that takes most of a step, with its range over the steps."""
    run = open_profile(folder)
    kinds = run.categories()
    name, row = kinds.index[0], kinds.iloc[0]
    shares = span(row["low_share"], row["high_share"], "{:.0%}")
    steps = run.operators["step"].nunique()
    return Answer(
        value=f"{row['share']:.0%} {run.category_name(name)}",
        spread=f"{shares} over {counted(steps, 'step')}; {run.workload}",
        kind=MEASURED,
        runs=(run.opened,),
    )


def speedup_of_ddp(folder: Path) -> Answer:
    """Finds DDP's speedup over one device at the fewest micro-batches, and where the rest went.

    With ``local``, the same computation without an exchange, the loss is split: what slower
    computation costs, and what the exchange adds, where that can be told from noise.
    """
    strategies = open_strategies(folder)
    table = strategies.summary()
    rows = table[(table["strategy"] == "DDP") & table["speedup"].notna()]
    if rows.empty:
        raise UserError("no step of DDP beside one of a single device")
    row = rows.sort_values("accumulation").iloc[0]
    ranks = strategies.ranks
    cost = exchange_cost(strategies).set_index("accumulation")
    lost = ""
    if row["accumulation"] in cost.index:
        exchange = cost.loc[row["accumulation"]]
        lost = f"; {hidden_by_noise('what the exchange adds')}"
        if exchange["above_noise"] == "yes":
            lost = (
                f"; without the exchange {exchange['local_speedup']:.2f} times, the exchange adds "
                f"{exchange['added_share']:.0%} to the step"
            )
    low, high, single = row["speedup_low"], row["speedup_high"], pd.isna(row["noise"])
    is_hidden = single or low < 1 < high
    rounds = "a single round" if single else f"{span(low, high)} times over rounds"
    return Answer(
        value=(
            f"{row['speedup']:.2f} times on {ranks} ranks, efficiency {row['speedup'] / ranks:.0%}"
        ),
        spread=f"{rounds}{lost}",
        kind=MEASURED,
        runs=(Run(strategies.folder, folder),),
        hidden=f"whether {ranks} ranks are faster than one device" if is_hidden else "",
    )


def dynamic_over_static(folder: Path) -> Answer:
    """Finds the mean step of dynamic micro-batches over static's, on the same global batches."""
    comparison = open_assignment3(folder).comparison
    if DYNAMIC not in comparison.summary.index:
        raise UserError(f"mode {DYNAMIC} was not compared with {STATIC}")
    row = comparison.summary.loc[DYNAMIC]
    return Answer(
        value=f"{row['ratio']:.2f} of static's step",
        spread=(
            f"95 % interval {span(row['ratio_low'], row['ratio_high'])}; the plan promises "
            f"{row['padded_ratio']:.2f}; {comparison.dataset}, {comparison.ranks} ranks"
        ),
        kind=MEASURED,
        runs=(comparison.opened,),
        hidden="" if row["differs"] else "whether it differs from static's step",
    )


ONE_DEVICE = (
    Question(
        title="Speed of one device",
        meaning=(
            "MFU is the share of the device's arithmetic that the model's own operations use; what "
            "is missing to 100 % is memory traffic, launches and waiting."
        ),
        anchor="assignment0_throughput-tokens-per-second-and-the-share-of-the-peak",
        find=tokens_per_second,
    ),
    Question(
        title="Largest batch",
        meaning="A larger batch does not fit; the section says what each option would free.",
        anchor="assignment0_memory-larger-batches",
        find=largest_batch,
    ),
    Question(
        title="Where a step's time goes",
        meaning="This kind of work is the first to look at: nothing else can gain as much.",
        anchor="assignment0_profile-one-step-by-kind-of-work",
        find=largest_kind_of_work,
    ),
)
"""Questions of the first page to assignment 0."""
DATA_PARALLEL = (
    Question(
        title="Speedup of DDP",
        meaning=(
            "As many times as there are ranks would be ideal; ranks that share a machine compute "
            "more slowly, and the exchange is what the next findings are about."
        ),
        anchor="assignment1_ddp-time-per-step",
        find=speedup_of_ddp,
    ),
)
"""Questions of the first page to assignment 1."""
MICRO_BATCHES = (
    Question(
        title="Dynamic over static batches",
        meaning=(
            "Below 1, the same texts in the same global batches take less time when ranks share "
            "them by work and not by number."
        ),
        anchor="assignment3_dynamic_batches-modes-on-the-same-global-batches",
        find=dynamic_over_static,
    ),
)
"""Questions of the first page to assignment 3."""
