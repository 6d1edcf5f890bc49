"""What cannot be true of a run, whatever was measured: such a value says that something is wrong
with the measurement, and stands in a box on the first page."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

from common.analysis.buckets.measurements import open_run
from common.analysis.data_parallel.strategies import read_strategies
from common.analysis.findings.finding import UNREADABLE, stage_of, unreadable
from common.analysis.runs import DEPTHS, Run, complete_runs
from common.analysis.step_parts import TIMED, decompose_all
from common.analysis.sweep_speedups import sweep_speedups
from common.errors import UserError
from common.judged import Judged
from common.samples import per_round, slowest_rank, student

PEAKS_APART = 0.05
"""Largest relative difference between two peaks of one device."""
STAGES_APART = 0.10
"""Relative difference up to which one step in two stages is the same, whatever the intervals."""
PARTS_OF_STEP = 1.05
"""Most that the parts of a step may be of it, each a mean over the same steps."""
UNSTEADY = 2.0
"""Times that one configuration's median step may take as long as its fastest; 1.4 were seen."""
SAME_STEPS = (
    ("strategy-times.csv", "step_time_ms", ["strategy", "accumulation"]),
    ("ddp-times.csv", "backward_time_ms", ["bucket_cap_mib"]),
    ("options-times.csv", "step_time_ms", ["arm"]),
)
"""Tables whose steps of one configuration do the same work: table, time, configuration."""


def violations(folder: Path) -> tuple[str, ...]:
    """Returns a sentence for each value of a run directory that cannot be, with its numbers.

    What was not measured violates nothing. Of what cannot be read a sentence says so.
    """
    sentences: list[str] = []
    for check in CHECKS:
        try:
            sentences += check(folder)
        except UserError:  # such as a stage that is not over
            continue
        except UNREADABLE as error:
            name = check.__name__.replace("_", " ")
            sentences.append(f"{name}: not checked, {unreadable(error)}")
    return tuple(sentences)


def exchange_that_gains(folder: Path) -> Iterator[str]:
    """Yields where steps with an exchange are surely shorter than the same without one."""
    for run in complete_runs(folder, "strategy-times.csv", DEPTHS):
        for accumulation, ratio in read_strategies(run).exchange.items():
            if ratio.is_settled and ratio.estimate < 1:
                yield (
                    f"{stage_of(run)}: with its exchange DDP's step takes "
                    f"{ratio.estimate:.2f} times ({ratio.interval.text()}) "
                    f"as long as the same computation without one, at {accumulation} "
                    "micro-batches; it cannot be shorter"
                )


def more_than_ideal(folder: Path) -> Iterator[str]:
    """Yields where ranks are surely faster than as many single devices."""
    for run in complete_runs(folder, "strategy-times.csv", DEPTHS):
        strategies = read_strategies(run)
        for (_, strategy), judged in strategies.speedups.items():
            yield from _too_fast(run, strategies.ranks, strategy, judged)
    for run in complete_runs(folder, "arms.csv", DEPTHS):
        table = sweep_speedups(run.table("arms.csv"), run.table("steps.csv"))
        for row in table.dropna(subset="judged").itertuples():
            yield from _too_fast(run, row.world_size, f"arm {row.arm}", row.judged)


def _too_fast(run: Run, ranks: int, name: str, speedup: Judged) -> Iterator[str]:
    if speedup.interval.is_told and speedup.interval.low > ranks * (1 + PEAKS_APART):
        yield (
            f"{stage_of(run)}: {name} on {ranks} ranks is {speedup.estimate:.2f} times "
            f"({speedup.interval.text()}) as fast as one; more than {ranks} times is not possible"
        )


def parts_beyond_the_step(folder: Path) -> Iterator[str]:
    """Yields arms whose parts add up to more than the step that they were measured in."""
    for run in complete_runs(folder, "arms.csv", DEPTHS):
        steps = run.table("steps.csv")
        if TIMED not in set(steps["kind"]):
            continue
        parts = decompose_all(run.table("arms.csv"), steps)
        for row in parts[parts["sum_ms"] > PARTS_OF_STEP * parts["step_ms"]].itertuples():
            yield (
                f"{stage_of(run)}: the parts of arm {row.arm} add up to "
                f"{row.sum_ms:.1f} ms of a step of {row.step_ms:.1f} ms"
            )


def peaks_apart(folder: Path) -> Iterator[str]:
    """Yields a device whose peak was measured twice with different results."""
    peaks: dict[tuple[str, str], tuple[str, float]] = {}
    for run in complete_runs(folder, "device-peak.csv"):
        for row in run.table("device-peak.csv").itertuples():
            stage = stage_of(run)
            before, peak = peaks.setdefault((row.device, row.precision), (stage, row.flops_per_s))
            ratio = row.flops_per_s / peak
            if not 1 / (1 + PEAKS_APART) <= ratio <= 1 + PEAKS_APART:
                yield (
                    f"the device's peak in {row.precision} is {peak / 1e9:.0f} GFLOP/s in "
                    f"{before} and {row.flops_per_s / 1e9:.0f} in {stage}: shares of it differ by "
                    f"{abs(ratio - 1):.0%}"
                )


def unsteady_steps(folder: Path) -> Iterator[str]:
    """Yields stages in which one configuration's steps show that the machine had other speeds."""
    for table, column, configuration in SAME_STEPS:
        for run in complete_runs(folder, table, DEPTHS):
            steps = slowest_rank(
                run.table(table), column, by=[*configuration, "round", "iteration"]
            )
            spread = steps.groupby(configuration, dropna=False).agg(["min", "median", "max"])
            ratio = spread["median"] / spread["min"]
            if ratio.max() > UNSTEADY:
                low, usual, high = spread.iloc[int(ratio.argmax())]
                yield (
                    f"{stage_of(run)}: the same step took {low:,.0f} to "
                    f"{high:,.0f} ms, half of its repetitions more than {usual:,.0f}: the machine "
                    "did not keep its speed"
                )


def one_pass_in_two_stages(folder: Path) -> Iterator[str]:
    """Yields a backward pass without DDP that takes another time in another stage."""
    run = open_run(folder)
    stages = complete_runs(folder, "local-times.csv")
    if not stages:
        raise UserError("no pass without DDP")
    times = stages[-1].table("local-times.csv").assign(arm="local")
    rounds = student(per_round(times, "backward_time_ms", "arm")["local"])
    profile_ms = run.profile.backward_s * 1e3
    apart = abs(profile_ms / rounds.estimate - 1)
    is_outside = rounds.is_told and not rounds.low <= profile_ms <= rounds.high
    if is_outside and apart > STAGES_APART:
        yield (
            f"the backward pass without DDP takes {profile_ms:.1f} ms where gradients were "
            f"timed and {rounds.estimate:.1f} ({rounds.text('{:.1f}')}) "
            f"among the rounds of the sweep: {apart:.0%} apart"
        )


CHECKS: tuple[Callable[[Path], Iterator[str]], ...] = (
    exchange_that_gains,
    more_than_ideal,
    parts_beyond_the_step,
    peaks_apart,
    unsteady_steps,
    one_pass_in_two_stages,
)
