"""What each change that a run tried brought, what it costs, and whether training stays the same."""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pandas as pd

from common.analysis.buckets.measurements import open_run
from common.analysis.buckets.networks import measured_networks
from common.analysis.comparable import network_of, short_network
from common.analysis.data_parallel.strategies import read_strategies
from common.analysis.findings.finding import UNREADABLE, unreadable
from common.analysis.micro_batches.lab import open_assignment3
from common.analysis.micro_batches.mode_comparison import DYNAMIC
from common.analysis.one_device.options import open_options
from common.analysis.runs import DEPTHS, complete_runs
from common.analysis.show import ends_format
from common.analysis.sweep_speedups import NO_CHANGE, step_times_by_round
from common.csv_tables import read_table
from common.diagnose.changes import Changes, find_changes, open_changes
from common.errors import UserError
from common.judged import Judged, compared

SAME, ROUNDED = "the same", "the same but for rounding"
CONSEQUENCES = {
    "sdpa": ("nothing", ROUNDED),
    "bfloat16": ("nothing", "8 bits of mantissa in products"),
    "float16": ("nothing", "10 bits of mantissa in products, scaled losses"),
    "tf32": ("nothing", "10 bits of mantissa in products"),
    "vocab_multiple": ("a little memory", ROUNDED),
    "async_batches": ("nothing", SAME),
    "foreach": ("memory", ROUNDED),
    "compile": ("a longer first step", ROUNDED),
    "fused": ("nothing", ROUNDED),
    "loss_chunks": ("nothing; it frees memory", ROUNDED),
    "gradient_accumulation": ("nothing; it frees memory", ROUNDED),
    "activation_checkpointing": ("a second forward pass; it frees memory", SAME),
    "FULL_SHARD": ("traffic; it frees the most memory", SAME),
    "SHARD_GRAD_OP": ("traffic; it frees memory", SAME),
    "HYBRID_SHARD": ("traffic; it frees memory", SAME),
    "MY_ZERO1": ("traffic; it frees memory", SAME),
    "compression": ("nothing", "gradients rounded to 16 bits"),
    "accumulation": ("fewer updates", "a larger global batch"),
}
"""What a change costs beside time, and what becomes of training, by name."""
DECISIONS = {
    "change": "change",
    "where": "where",
    "judged": ("verdict", lambda judged: judged.said),
    "judged.estimate": ("times as fast", "{:.2f}"),
    "judged.interval": ("95 %", ends_format),
    "judged.rounds": "rounds",
    "costs": "what it costs",
    "training": "training is then",
}
"""Titles of ``Decision``."""


@dataclass(frozen=True)
class Decision:
    """A change and what it brought.

    Attributes:
        change, where: what replaces what; model and network.
        judged: how many times as fast it is; intervals of one kind of change hold at once. None
            where its tables cannot be read.
        costs, training: what it costs beside time, and what becomes of training.
    """

    change: str
    where: str
    judged: Judged | None
    costs: str = ""
    training: str = ""


def decisions(run_dir: Path) -> tuple[Decision, ...]:
    """Returns the changes that a run directory has measured; what it has not is left out.

    Of tables that cannot be read there is a row with the reason.
    """
    made: list[Decision] = []
    for measured in (options, strategies, caps, plans, changes):
        try:
            made += measured(run_dir)
        except UserError:  # not measured
            continue
        except UNREADABLE as error:
            made.append(Decision(measured.__name__, unreadable(error), None))
    return tuple(made)


def options(run_dir: Path) -> Iterator[Decision]:
    """Yields the options of one device, each against the baseline."""
    run = open_options(run_dir)
    where = f"one device, {run.settings['model']}"
    for name in run.alone.index:
        yield Decision(name, where, run.ratios[name], *CONSEQUENCES.get(name, ()))


def strategies(run_dir: Path) -> Iterator[Decision]:
    """Yields the other strategies in place of DDP, and more micro-batches between two exchanges."""
    for run in complete_runs(run_dir, "strategy-times.csv", DEPTHS):
        measured = read_strategies(run)
        if not any("DDP" in times for times in measured.exchanging.values()):
            continue  # nothing is in place of DDP
        where = f"{measured.settings['model']}, {short_network(network_of(run.environment))}"
        fewest = min(measured.exchanging)
        for name, longer in measured.step_time_ratios_to(fewest, "DDP").items():
            change, faster = f"{name} in place of DDP", longer.map(lambda ratio: 1 / ratio)
            yield Decision(change, where, faster, *CONSEQUENCES.get(name, ()))
        for count, judged in measured.accumulated.items():
            change = f"accumulation of {count} in place of {fewest}"
            yield Decision(change, where, judged, *CONSEQUENCES["accumulation"])


def caps(run_dir: Path) -> Iterator[Decision]:
    """Yields, by network, the cap that the model chooses in place of DDP's default."""
    for network in measured_networks(open_run(run_dir)):
        cap_mib = network.accuracy().predicted_best_mib
        gain = network.sweep.gain_over_default(cap_mib)
        gradient_mib = network.model.profile.total_bytes / 2**20
        yield Decision(
            change=f"a cap of {cap_mib:g} MiB in place of DDP's default",
            where=f"backward pass, {gradient_mib:.0f} MiB, {network.link}",
            judged=gain.map(lambda saved: 1 / (1 - saved), null=1.0),
            costs="nothing",
            training=ROUNDED,
        )


def plans(run_dir: Path) -> Iterator[Decision]:
    """Yields, by data set, texts shared by work in place of number."""
    for comparison in open_assignment3(run_dir).comparisons:
        if DYNAMIC in comparison.judged:
            yield Decision(
                change="dynamic micro-batches in place of static",
                where=f"{comparison.dataset}, {comparison.ranks} ranks",
                judged=comparison.judged[DYNAMIC].map(lambda ratio: 1 / ratio),
                costs="planning",
                training=ROUNDED,
            )


def changes(run_dir: Path) -> Iterator[Decision]:
    """Yields the changes that the diagnosis proposed, as they were run."""
    for folder in find_changes(run_dir)[-1:]:
        made = open_changes(folder)
        where = f"{made.model}, {made.ranks} ranks"
        for name, judged in _rate_gains(folder, made).items():
            kind = str(name).partition("=")[0]
            yield Decision(str(name), where, judged, *CONSEQUENCES.get(kind, ()))


def _rate_gains(folder: Path, made: Changes) -> dict[Hashable, Judged]:
    """Judges the samples per second of all ranks under each change over those without one.

    ``Changes.told`` compares speedups, each over one rank under the same change: there, what slows
    a single rank counts as a gain.
    """
    arms = read_table(folder / "arms.csv", ("arm", "change", "world_size", "global_batch"))
    steps = read_table(folder / "steps.csv", ("arm", "kind", "step_time_ms"))
    step_ms = step_times_by_round(steps)
    several = arms[arms["world_size"] == made.ranks].fillna({"change": NO_CHANGE})
    rates = {arm.change: arm.global_batch / step_ms[arm.arm] for arm in several.itertuples()}
    return compared(pd.DataFrame(rates), NO_CHANGE, **made.conditions)
