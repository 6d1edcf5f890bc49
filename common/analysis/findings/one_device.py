"""Finds the speed of one device (assignment 0), its largest batch and its main kind of work."""

from __future__ import annotations

from pathlib import Path

from common.analysis.findings.finding import MEASURED, PREDICTED, Found, Question, span
from common.analysis.one_device.memory import open_memory_run
from common.analysis.one_device.profile import open_profile
from common.analysis.one_device.throughput import open_throughput
from common.runtime.wording import counted

GB = 1e9


def tokens_per_second(folder: Path) -> Found:
    """Finds the tokens per second of one device at the run's batch, and MFU."""
    run = open_throughput(folder)
    row = run.measured.set_index("batch_size").loc[run.batch_size]
    mfu = ""
    if run.peak_flops_per_s:
        mfu = f", {run.flops_per_s / run.peak_flops_per_s:.0%} MFU"
    quartiles = span(row["tokens_per_s_q25"], row["tokens_per_s_q75"], "{:,.0f}")
    return Found(
        value=f"{run.tokens_per_s:,.0f} tokens/s{mfu}",
        spread=f"quartiles {quartiles}; {run.title}, batch {run.batch_size}",
        kind=MEASURED,
        runs=(run.opened,),
    )


def largest_batch(folder: Path) -> Found:
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
    return Found(
        value=f"{counted(int(row['as_asked']), 'sequence')} in {row['memory_gb']:.0f} GB",
        spread=(
            f"{int(row['both']):,} with checkpointing and the loss in pieces; {work.title}, "
            f"{work.seq_len:,} tokens each; predicted peak over the one seen here: {exactly}"
        ),
        kind=PREDICTED,
        runs=(run.opened,),
    )


def largest_kind_of_work(folder: Path) -> Found:
    """Finds the kind of work that takes most of a step, with its range over the steps."""
    run = open_profile(folder)
    kinds = run.categories()
    name, row = kinds.index[0], kinds.iloc[0]
    shares = span(row["low_share"], row["high_share"], "{:.0%}")
    steps = run.operators["step"].nunique()
    return Found(
        value=f"{row['share']:.0%} {run.category_name(name)}",
        spread=f"{shares} over {counted(steps, 'step')}; {run.workload}",
        kind=MEASURED,
        runs=(run.opened,),
    )


QUESTIONS = (
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
        anchor="assignment0_profile-one-step-cut-into-kinds-of-work",
        find=largest_kind_of_work,
    ),
)
"""Questions of the first page to assignment 0."""
