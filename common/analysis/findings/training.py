"""Finds what training takes: on one device (assignment 0), under DDP (assignment 1), and with
planned micro-batches (assignment 3)."""

from __future__ import annotations

from pathlib import Path

from common.analysis.data_parallel.strategies import StrategyTimes, open_strategies
from common.analysis.findings.finding import Answer, Question, with_interval
from common.analysis.micro_batches.lab import open_assignment3
from common.analysis.micro_batches.mode_comparison import DYNAMIC, STATIC
from common.analysis.one_device.memory import open_memory_run
from common.analysis.one_device.profile import open_profile
from common.analysis.one_device.throughput import open_throughput
from common.analysis.runs import Run
from common.errors import UserError
from common.runtime.wording import counted

GB = 1e9


def tokens_per_second(folder: Path) -> Answer:
    """Finds the tokens per second of one device at the run's batch, and MFU."""
    run = open_throughput(folder)
    mfu = ""
    if run.peak_flops_per_s:
        mfu = f", {run.flops_per_s / run.peak_flops_per_s:.0%} MFU"
    step = f"{run.workload.title}, batch {run.batch_size}"
    return Answer(
        value=f"{run.tokens_per_s:,.0f} tokens/s{mfu}",
        spread=f"{with_interval(run.speed, '{:,.0f}')}; {step}",
        run=run.opened,
        judged=run.speed,
        hidden="how much another visit to the same batch would differ",
        in_rounds=run.share_of_visits,
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
    is_allocated = run.peak_bytes("allocator") is not None
    seen_by = "the allocator's" if is_allocated else "another count's, with nothing allocated"
    return Answer(
        value=f"{counted(int(row['as_asked']), 'sequence')} in {row['memory_gb']:.0f} GB",
        spread=(
            f"{int(row['both']):,} with checkpointing and the loss in pieces; {work.title}, "
            f"{work.seq_len:,} tokens each; predicted peak off {seen_by} by {abs(run.error):.2%}"
        ),
        run=run.opened,
    )


def largest_kind_of_work(folder: Path) -> Answer:
    """Finds the kind of work that takes most of a step, with its lead over its closest rival."""
    run = open_profile(folder)
    if run.most is None:
        raise UserError("fewer than two kinds of work in every step")
    first, rival = (
        f"{run.categories()['share'][name]:.0%} {run.category_name(name)}"
        for name in (run.most.arm, run.most.rival)
    )
    return Answer(
        value=first,
        spread=(
            f"{run.most.lead.estimate:.2f} times as long as its closest rival, {rival}; "
            f"{with_interval(run.most.lead, '{:.2f}', 'step')}; {run.workload}"
        ),
        run=run.opened,
        judged=run.most.lead,
        doubt="steps of a single visit",
        hidden=f"which takes more, {first} or {rival}",
        option="--active_steps",
    )


def speedup_of_ddp(folder: Path) -> Answer:
    """Finds DDP's speedup over one device at the fewest micro-batches, and where the rest went.

    With ``local``, the same computation without an exchange, the loss is split: what slower
    computation costs, and what the exchange adds, as far as either is settled.
    """
    strategies = open_strategies(folder)
    measured = [count for count, strategy in strategies.speedups if strategy == "DDP"]
    if not measured:
        raise UserError("no step of DDP beside one of a single device")
    accumulation, ranks = min(measured), strategies.ranks
    speedup = strategies.speedups[accumulation, "DDP"]
    run = Run(strategies.folder, folder)
    efficiency = speedup.estimate / ranks
    return Answer(
        value=f"{speedup.estimate:.2f} times on {ranks} ranks, efficiency {efficiency:.0%}",
        spread=(
            f"{with_interval(speedup, '{:.2f}')}{_lost(strategies, accumulation)}; {speedup.scope}"
        ),
        run=run,
        judged=speedup,
        hidden=f"whether {ranks} ranks are faster than one device",
    )


def _lost(strategies: StrategyTimes, accumulation: int) -> str:
    """Returns what slower computation and the exchange cost, in words; what is not settled as such.

    Empty where no step without an exchange was measured.
    """
    exchange = strategies.exchange.get(accumulation)
    local = strategies.speedups.get((accumulation, "local"))
    if exchange is None or local is None:
        return ""
    if not exchange.is_settled:
        return f"; what the exchange adds is {exchange.said}"
    alone = f"without the exchange {local.estimate:.2f} times, " if local.is_settled else ""
    added = exchange.interval.map(lambda ratio: ratio - 1)
    return f"; {alone}the exchange adds {added.estimate:.0%} to the step ({added.text('{:.0%}')})"


def dynamic_over_static(folder: Path) -> Answer:
    """Finds the mean step of dynamic micro-batches over static's, on the same global batches."""
    comparison = open_assignment3(folder).comparison
    if comparison.dynamic is None:
        raise UserError(f"mode {DYNAMIC} was not compared with {STATIC}")
    ratio = comparison.judged[DYNAMIC]
    return Answer(
        value=f"{ratio.estimate:.2f} of static's step",
        spread=(
            f"{with_interval(ratio, '{:.2f}')}; the plan promises "
            f"{comparison.dynamic['padded_ratio']:.2f}; {ratio.scope}"
        ),
        run=comparison.opened,
        judged=ratio,
        hidden="whether it differs from static's step",
        option="--steps",
    )


ONE_DEVICE = (
    Question(
        title="Speed of one device",
        priority=6,
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
        priority=7,
        meaning="This kind of work is the first to look at: nothing else can gain as much.",
        anchor="assignment0_profile-one-step-by-kind-of-work",
        find=largest_kind_of_work,
    ),
)
"""Questions of the first page to assignment 0."""
DATA_PARALLEL = (
    Question(
        title="Speedup of DDP",
        priority=1,
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
        priority=5,
        meaning=(
            "Below 1, the same texts in the same global batches take less time when ranks share "
            "them by work and not by number."
        ),
        anchor="assignment3_dynamic_batches-modes-on-the-same-global-batches",
        find=dynamic_over_static,
    ),
)
"""Questions of the first page to assignment 3."""
