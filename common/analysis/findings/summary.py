"""What a whole run measured, for the pages that come first in its report (notebooks/summary)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import pandas as pd
from matplotlib.figure import Figure

from common.analysis.buckets import networks
from common.analysis.buckets.cap_gains import (
    GRADIENTS,
    cap_gains,
    gain_matrix,
    on_clusters,
    on_networks,
)
from common.analysis.buckets.figures import bucket_times_by_network
from common.analysis.buckets.measurements import open_run
from common.analysis.buckets.networks import GAIN, Networks, measured_networks
from common.analysis.clusters.figures import efficiency
from common.analysis.comparable import short_network
from common.analysis.findings.decisions import DECISIONS, decisions
from common.analysis.findings.your_step import step_bars, step_bars_figure
from common.analysis.runs import (
    Run,
    caption_of,
    given_folder,
    is_recorded,
    origin,
    recorded_assignment,
)
from common.analysis.show import Table, show
from common.analysis.speedups import TITLES as SPEEDUPS
from common.analysis.speedups import find_speedups, tabulate_speedups
from common.judged import Verdict
from common.perfmodel.buckets import DdpOptions
from common.perfmodel.cluster.clusters import load_cluster
from common.perfmodel.cluster.job import Job
from common.perfmodel.cluster.scale_out import (
    ScaleOut,
    one_at_a_time,
    parse_gpus,
    predict_scale_out,
)
from common.perfmodel.ddp.bucketings import profile_buckets
from common.perfmodel.one_device.workload import Workload


def _said(share: float, verdict: str) -> str:
    """Returns a share, or the verdict in its place where it is not settled."""
    return f"{share:.1%}" if verdict == Verdict.SETTLED else verdict


PREDICTION = {
    "network": "network",
    "gradient_mib": ("gradients (MiB)", "{:.0f}"),
    "buckets": ("buckets by default", "{:.0f}"),
    ("median error", "error told from noise"): ("median error", _said),
    "noise floor": "noise floor",
    ("regret", "regret told from noise"): ("regret", _said),
    GAIN: GAIN,
}
"""Titles of ``Summary.errors_of_prediction``."""
LEFT_OUT = {"model", "gradient_bytes", "regime", "rounds", "computation_ms"}
"""Columns of the table of speedups that have no room on a page."""
ASSIGNMENTS = tuple(f"assignment{number}" for number in range(5))


@dataclass(frozen=True, eq=False)
class Summary:
    """The run directories of a run by assignment; those that were not run are left out."""

    folders: Mapping[str, Path]

    @property
    def origin(self) -> str:
        """Returns whose data these are, as Markdown."""
        recorded = any(map(is_recorded, self.folders.values()))
        return origin(self.caption.replace("\n", "; "), recorded, "uv run ddplab run")

    @property
    def caption(self) -> str:
        """Returns hardware, date and sources, for figures; a line for each machine."""
        records = [next(folder.rglob("environment.json")) for folder in self.folders.values()]
        captions = [caption_of(Run(path.parent, path.parent).environment, path) for path in records]
        return "\n".join(dict.fromkeys(text.rpartition(";")[0] for text in captions))

    @cached_property
    def bars(self) -> pd.DataFrame:
        """Returns the step of every configuration that was measured (``step_bars``)."""
        bars = [step_bars(folder) for folder in self.folders.values()]
        return pd.concat(bars, ignore_index=True)

    def steps(self) -> Figure | None:
        """Draws ``bars``."""
        return step_bars_figure(self.bars, self.caption) if len(self.bars) else None

    def speedups(self) -> Table | str:
        """Returns every speedup of several ranks over one that the run measured."""
        table = tabulate_speedups(find_speedups(self.folders.values()))
        if table.empty:
            return _not_run("assignment1")
        network = table["network"].map(short_network)
        what = table["what"] + ", " + table["model"].str.split(r",| of | \d", regex=True).str[0]
        short = table.assign(what=what, network=network)
        titles = {name: SPEEDUPS[name] for name in SPEEDUPS if name not in LEFT_OUT}
        hidden_at = ("hidden at (GB/s)", "{:.2f}")
        return show(short, titles | {"verdict": "verdict", "needed_bytes_per_s": hidden_at})

    def tried_changes(self) -> Table:
        """Returns a row per change that was tried, of all assignments."""
        made = [decision for folder in self.folders.values() for decision in decisions(folder)]
        return show(made, DECISIONS)

    @cached_property
    def networks(self) -> Networks | None:
        """Returns the bucket sweeps of the run's networks; None where assignment 2 was not run."""
        folder = self.folders.get("assignment2")
        if folder is None:
            return None
        run = open_run(folder)
        return Networks(measured_networks(run), run.recorded, left_out=None)

    def errors_of_prediction(self) -> Table | str:
        """Returns, by network, the error of the predicted backward pass and the noise beside it."""
        if self.networks is None:
            return _not_run("assignment2")
        table = networks.summary(self.networks)
        buckets = [
            len(profile_buckets(run.model.profile, DdpOptions(None))) for run in self.networks.runs
        ]
        gradient_mib = [run.model.profile.total_bytes / 2**20 for run in self.networks.runs]
        return show(table.assign(buckets=buckets, gradient_mib=gradient_mib), PREDICTION)

    def gains_of_caps(self) -> Table:
        """Returns what the best cap gains over DDP's default, by the size of the gradients."""
        folder = self.folders.get("assignment2")
        own = on_networks(folder) if folder else []
        gains = gain_matrix(cap_gains([*own, *on_clusters()]))
        networks_named = [name for name in gains if name not in GRADIENTS]
        return show(gains, GRADIENTS | {name: (name, "{:.1%}") for name in networks_named})

    def measured_passes(self) -> Figure | None:
        """Draws T(b), predicted and measured, on each network."""
        return bucket_times_by_network(self.networks.runs) if self.networks else None

    @cached_property
    def cluster(self) -> ScaleOut:
        """Returns the predicted steps of a GPT-2 on more and more GPUs of a published cluster."""
        work = Workload(model="gpt2-large", precision="bfloat16")
        return predict_scale_out(Job.of(work), load_cluster("h100-ib"), parse_gpus("8..4096"))

    def efficiency(self) -> Figure:
        """Draws the efficiency of each GPU over their number."""
        return efficiency(self.cluster)

    def assumptions(self) -> Table:
        """Returns what each assumption is worth on 1,024 GPUs, the weightiest first."""
        table = one_at_a_time(self.cluster, "weak", "DDP", 1024)
        moved = (table["efficiency"] - table["efficiency"].iloc[0]).abs()
        order = [0, *moved.iloc[1:].sort_values(ascending=False).index]
        return show(
            table.loc[order], {"assumption": None, "step_s": "step (ms)", "efficiency": None}
        )


def open_summary(run_dirs: Mapping[str, str]) -> Summary:
    """Opens the run directories of a run, by assignment; without any, the recorded ones.

    Raises UserError for a folder that is not there.
    """
    if run_dirs:
        return Summary({name: given_folder(path) for name, path in run_dirs.items()})
    return Summary({name: recorded_assignment(name) for name in ASSIGNMENTS})


def _not_run(assignment: str) -> str:
    return f"Not measured: `uv run ddplab run {assignment}` does."
