"""DDP on emulated hosts beside DDP over loopback: one measured sweep and prediction per network."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

import pandas as pd

from common.analysis.buckets.choice import cap_or_ties, gain_text, ratio_or_verdict
from common.analysis.buckets.measurements import (
    COMMAND,
    Assignment2Run,
    calibration_of,
    check_comparable,
    open_run,
)
from common.analysis.buckets.sweep import Accuracy, BucketSweep, read_sweep
from common.analysis.comparable import network_of, short_network
from common.analysis.runs import DOCTOR, Run, origin, recorded_assignment
from common.errors import UserError
from common.judged import Judged
from common.perfmodel.buckets import DdpOptions
from common.perfmodel.ddp.bucketings import profile_buckets
from common.perfmodel.model import DdpModel
from common.runtime.group.network import OVER_LOOPBACK
from common.runtime.group.socket_bytes import PAYLOAD_SHARE
from common.runtime.paths import relative_to_project
from common.runtime.records.run_directory import find_table
from common.runtime.wording import counted

TABLES = ("allreduce-samples.csv", "ddp-times.csv", "overlap-times.csv")
"""Tables of an emulated network."""
LINK_RATES = ("link (Mbit/s)", "TCP out (Mbit/s)", "TCP in (Mbit/s)")
REACHED = "of the payload"
TIMES = ("best T (ms)", "worst T (ms)")
GAIN = "gain over default"
SHARES = ("median error", "noise floor", "regret")


@dataclass(frozen=True)
class NetworkRun:
    """DDP's sweep over one network, with what predicts it.

    Attributes:
        name: name of the network: ``2 emulated hosts at 1 Gbit/s``, ``loopback``, ``NCCL, 1 host ×
            4 ranks``.
        folder: run directory of the sweep.
        caption: hardware, network, date and source.
        trained: name of the model that was trained.
        model: predicts backward passes over this network.
        links: per host what a TCP stream reached, in Mbit/s; empty where none is emulated.
        rate_bit_per_s: rate of the slowest link; infinite where none is emulated.
    """

    name: str
    folder: Path
    caption: str
    trained: str
    model: DdpModel
    sweep: BucketSweep
    links: pd.DataFrame
    rate_bit_per_s: float

    @property
    def link(self) -> str:
        """Returns the name for a table: the rate of emulated links, else the network's name."""
        return short_network(self.name)

    @property
    def scope(self) -> str:
        """Returns what the sweep was measured of: model, gradients, ranks and network."""
        profile = self.model.profile
        buckets = len(profile_buckets(profile, DdpOptions(None)))
        default = f"of which DDP's default makes {counted(buckets, 'bucket')}"
        return (
            f"{self.trained}, {profile.total_bytes / 2**20:.3g} MiB of gradients, {default}; "
            f"{counted(self.sweep.world_size, 'rank')}, {self.name}"
        )

    def accuracy(self) -> Accuracy:
        """Holds the prediction against the sweep."""
        return self.sweep.accuracy_of(self.model.backward_s, self.scope)

    def gain_over_default(self, cap_mib: float) -> Judged:
        """Judges what a measured cap saves of the backward pass with DDP's default."""
        return self.sweep.gain_over_default(cap_mib, self.scope)


@dataclass(frozen=True)
class Networks:
    """Loopback and the emulated networks of one run, slowest first.

    ``left_out`` is the reason why nothing was measured on emulated hosts in the reader's run;
    then these are recorded measurements.
    """

    runs: tuple[NetworkRun, ...]
    recorded: bool
    left_out: str | None

    @property
    def origin(self) -> str:
        """Returns whose data these are, and why there are none of the reader's own, as Markdown."""
        names = " and ".join(run.name for run in self.runs if not run.links.empty)
        left_out = f"{self.left_out}; {DOCTOR}" if self.left_out else ""
        return origin(names, self.recorded, COMMAND, left_out)


def open_networks(run_dir: str | Path | None = None) -> Networks:
    """Opens the networks of a run, or the recorded ones where the run has no emulated hosts.

    The profile of the backward pass holds no communication, so one serves all networks; what an
    all-reduce takes, and what it takes from computation, is each network's own.
    """
    run = open_run(run_dir)
    runs = measured_networks(run)
    if len(runs) == 1:
        reason = Run(run.run_dir, run.run_dir).environment.get("emulated_hosts_left_out")
        recorded = recorded_assignment("assignment2")
        if run.run_dir.resolve() == recorded.resolve():
            raise UserError(f"{relative_to_project(recorded)}: no runs on emulated hosts")
        left_out = reason or "the run that is shown measured none"
        return replace(open_networks(recorded), left_out=left_out)
    return Networks(runs, run.recorded, None)


def measured_networks(run: Assignment2Run) -> tuple[NetworkRun, ...]:
    """Returns the network that the ranks are on and the emulated ones, slowest first.

    Only those that this very run measured.
    """
    runs = [_not_emulated(run), *(_emulated(run, folder) for folder in emulated_in(run.run_dir))]
    return tuple(sorted(runs, key=lambda network: network.rate_bit_per_s))


def emulated_in(run_dir: Path) -> list[Path]:
    """Returns the folders of a run's emulated networks that have all tables."""
    folders = sorted(run_dir.glob("emulated-*"))
    return [folder for folder in folders if all(find_table(folder, name) for name in TABLES)]


def _not_emulated(run: Assignment2Run) -> NetworkRun:
    folder = find_table(run.run_dir, "ddp-times.csv").parent
    network = network_of(Run(folder, run.run_dir).environment)
    return NetworkRun(
        name="loopback" if network in (None, OVER_LOOPBACK) else network,
        folder=folder,
        caption=run.caption,
        trained=run.settings.get("model", "a model"),
        model=run.model,
        sweep=run.sweep,
        links=pd.DataFrame(),
        rate_bit_per_s=float("inf"),
    )


def _emulated(run: Assignment2Run, folder: Path) -> NetworkRun:
    all_reduces, times, overlap = (find_table(folder, name) for name in TABLES)
    ready = find_table(run.run_dir, "gradient-ready-times.csv")
    settings = check_comparable([ready, all_reduces, times, overlap])
    opened = Run(times.parent, run.run_dir)
    network = opened.environment["interconnect"]["emulated"]
    sweep = read_sweep(times)
    sweep.check_buckets(run.profile)
    links = pd.DataFrame(network["probe"]).assign(rate=network["rates_bit_per_s"])
    links[["up", "down", "rate"]] = links[["up", "down", "rate"]].astype(float) / 1e6
    return NetworkRun(
        name=opened.environment["network"],
        folder=opened.folder,
        caption=opened.caption,
        trained=run.settings.get("model", "a model"),
        model=calibration_of(settings, ready, all_reduces, overlap).model(),
        sweep=sweep,
        links=links,
        rate_bit_per_s=min(network["rates_bit_per_s"]),
    )


def summary(networks: Networks) -> pd.DataFrame:
    """Returns a row per network: what the caps do there, and how well that was predicted.

    The best and the worst cap are those that are told from all others, or all that are tied. The
    times are the least and the greatest median. ``GAIN`` is what the cap that the model chooses
    takes off DDP's default, paired by round.
    """
    rows = []
    for run in networks.runs:
        accuracy = run.accuracy()
        times = accuracy.table["measured_ms"]
        rows.append(
            {
                "network": run.link,
                "best b (MiB)": cap_or_ties(accuracy.best).removesuffix(" MiB"),
                "best T (ms)": times.min(),
                "worst b (MiB)": cap_or_ties(accuracy.worst).removesuffix(" MiB"),
                "worst T (ms)": times.max(),
                "worst / best": ratio_or_verdict(accuracy.worst_over_best),
                "median error": accuracy.median_error,
                "noise floor": accuracy.noise_floor,
                "regret": accuracy.regret.estimate,
                GAIN: gain_text(run.gain_over_default(accuracy.predicted_best_mib)),
                "error told from noise": accuracy.error.said,
                "regret told from noise": accuracy.regret.said,
            }
        )
    return pd.DataFrame(rows)


def links(networks: Networks) -> pd.DataFrame:
    """Returns per network and host the link's rate and what a TCP stream reached on it.

    ``REACHED`` is the faster direction over the most payload that the link can carry. No stream is
    faster than its link: above 100 % the probe was wrong by as much, as one that was held up reads
    late what came in before.
    """
    rows = [
        (run.link, link["host"], link["rate"], link["up"], link["down"])
        for run in networks.runs
        for link in run.links.to_dict("records")
    ]
    table = pd.DataFrame(rows, columns=["network", "host", *LINK_RATES])
    rate, *directions = LINK_RATES
    return table.assign(**{REACHED: table[directions].max(axis=1) / (table[rate] * PAYLOAD_SHARE)})
