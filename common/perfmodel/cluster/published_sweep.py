"""A published sweep of bucket caps on two A100s: why its curve is flat, and what that says.

The model of NCCL gives the all-reduces, the model's FLOPs give when gradients are ready, and one
number per model, the MFU, is set so that the mean over the caps is the published one. So the level
is not predicted; the shape is. Throughput on one GPU and on two, published for three batches, tests
the rest: there the MFU is that of the one GPU, and the step on two is predicted.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import numpy as np
import pandas as pd
import yaml

from common.csv_tables import numbers, read_table
from common.errors import UserError
from common.perfmodel.buckets import DdpOptions
from common.perfmodel.cluster.assumptions import STRAGGLER_SPREAD
from common.perfmodel.cluster.clusters import load_cluster
from common.perfmodel.cluster.computed_profile import computed_model, computed_profile
from common.perfmodel.cluster.nccl import NcclAllReduce
from common.perfmodel.cluster.pass_time import adamw_s
from common.perfmodel.cluster.stragglers import slowest_of
from common.perfmodel.collectives import AllReduceModel, AlphaBeta
from common.perfmodel.ddp.profile import BackwardProfile
from common.perfmodel.ddp.step import StepOptions, StepParts
from common.perfmodel.ddp.timeline import BackwardTimeline
from common.perfmodel.model import DdpModel
from common.perfmodel.one_device.architecture import GPT2Config
from common.perfmodel.one_device.peaks import GPUS
from common.perfmodel.published import DATA

PUBLISHED = DATA / "bucket-sweeps-published"
PEAK = GPUS["A100-SXM4-80GB"]
LATENCY_S = 20e-6
"""Latency of an all-reduce between two GPUs of a node, where only the bandwidth is varied."""


@dataclass(frozen=True)
class PublishedStep:
    """A float32 step of a GPT-2 on one of two A100s; ``mfu`` is a share of the float32 peak."""

    config: GPT2Config
    batch: int
    seq_len: int
    mfu: float

    def parts(self) -> StepParts:
        """Returns the times of forward pass and optimizer."""
        operations = self.batch * self.config.architecture(self.seq_len).forward_flops
        return StepParts(
            forward_s=operations / (self.mfu * PEAK.flops("float32")),
            update_s=adamw_s(self.config.num_parameters(), PEAK.memory_bytes_per_s),
        )

    def one_gpu_s(self) -> float:
        """Returns the seconds of a step that exchanges nothing."""
        parts = self.parts()
        return 3 * parts.forward_s + parts.update_s

    def ddp(self, network: AllReduceModel) -> DdpModel:
        """Returns the model of its backward pass."""
        profile = _at_peak(self.config, self.batch, self.seq_len).scaled(compute=1 / self.mfu)
        return computed_model(profile, network, PEAK.memory_bytes_per_s)

    def backward(self, network: AllReduceModel, cap_mib: float | None) -> BackwardTimeline:
        """Predicts the backward pass under DDP."""
        return self.ddp(network).at_cap(cap_mib)

    def step_s(self, network: AllReduceModel, cap_mib: float | None) -> float:
        """Predicts the seconds of a step under DDP on GPUs that are equally fast."""
        options = StepOptions(DdpOptions(cap_mib))
        return self.ddp(network).step(self.parts(), options).total_s


@cache
def _at_peak(config: GPT2Config, batch: int, seq_len: int) -> BackwardProfile:
    return computed_profile(config.architecture(seq_len), batch, PEAK.flops("float32"))


@dataclass(frozen=True)
class SweepExplained:
    """A published sweep of one model beside the prediction.

    Attributes:
        table: bucket_cap_mib, num_buckets, published_buckets (counted in the published profile),
            measured_ms, predicted_ms, deviation (predicted over measured, minus 1), exposed_ms.
        mfu: the share of the float32 peak that gives the mean of the published steps.
        all_reduces_ms: all buckets of 25 MiB, one after another, with nothing beside them.
    """

    model: str
    table: pd.DataFrame
    mfu: float
    all_reduces_ms: float

    @property
    def worst_deviation(self) -> float:
        """Returns the largest deviation of a step, as a fraction."""
        return float(self.table["deviation"].abs().max())

    @property
    def communication_share(self) -> float:
        """Returns the time of all-reduces alone, as a share of the mean step."""
        return self.all_reduces_ms / float(self.table["measured_ms"].mean())

    def spread(self, column: str) -> float:
        """Computes slowest over fastest cap, minus 1, of ``measured_ms`` or ``predicted_ms``."""
        return float(self.table[column].max() / self.table[column].min() - 1)


def two_a100s() -> AllReduceModel:
    """Returns the model of NCCL between two GPUs of an A100 node."""
    return NcclAllReduce(load_cluster("a100-ib"), 2)


def explain_sweep(
    model: str, network: AllReduceModel | None = None, folder: Path = PUBLISHED
) -> SweepExplained:
    """Puts the published sweep of ``gpt2`` or ``gpt2-large`` beside the prediction.

    Raises UserError for a model that is not in the table.
    """
    network = network or two_a100s()
    source = yaml.safe_load((folder / "source.yaml").read_text())["settings"]
    published = _published(folder / "step-times.csv", model)
    config = GPT2Config.named(model, n_positions=source["n_positions"])
    caps = published["bucket_cap_mib"].tolist()
    measured_s = published["step_time_ms"].to_numpy() / 1e3

    def predicted(mfu: float) -> tuple[PublishedStep, np.ndarray]:
        step = PublishedStep(config, source["batch_per_gpu"], source["seq_len"], mfu)
        return step, np.array([step.step_s(network, cap) for cap in caps])

    mfu = _mfu_for(lambda share: predicted(share)[1].mean(), measured_s.mean())
    step, predicted_s = predicted(mfu)
    timelines = [step.backward(network, cap) for cap in caps]
    events = source["events_per_all_reduce"] * source["profiled_steps"]
    table = pd.DataFrame(
        {
            "bucket_cap_mib": caps,
            "num_buckets": [timeline.num_buckets for timeline in timelines],
            "published_buckets": published["profiled_events"].to_numpy() // events,
            "measured_ms": measured_s * 1e3,
            "predicted_ms": predicted_s * 1e3,
            "deviation": predicted_s / measured_s - 1,
            "exposed_ms": [timeline.exposed_communication_s * 1e3 for timeline in timelines],
        }
    )
    sizes = [event.size_bytes for event in step.backward(network, 25.0).events]
    alone_s = float(np.sum(network.time_s(np.array(sizes, dtype=float))))
    return SweepExplained(model, table, mfu, alone_s * 1e3)


def deviation_by_bandwidth(model: str, bandwidths_gb_per_s: Sequence[float]) -> pd.DataFrame:
    """Predicts the curve on links of other bandwidths (algorithm bandwidth, 1e9 bytes/s).

    Columns: bandwidth_gb_per_s, communication_share (of the step), predicted_spread (slowest over
    fastest cap, minus 1), worst_deviation (from the published steps).
    """
    rows = []
    for bandwidth in bandwidths_gb_per_s:
        explanation = explain_sweep(model, AlphaBeta(LATENCY_S, bandwidth * 1e9))
        row = (
            explanation.communication_share,
            explanation.spread("predicted_ms"),
            explanation.worst_deviation,
        )
        rows.append((bandwidth, *row))
    columns = ["bandwidth_gb_per_s", "communication_share", "predicted_spread", "worst_deviation"]
    return pd.DataFrame(rows, columns=columns)


def least_bandwidth_gb_per_s(model: str) -> float:
    """Finds the slowest link (1e9 bytes/s) with all steps within 1 % of the published.

    More bandwidth never makes the curve steeper, so it is found by bisection of the logarithm.
    """
    low, high = 1.0, 1000.0
    for _ in range(20):
        middle = (low * high) ** 0.5
        if deviation_by_bandwidth(model, [middle])["worst_deviation"][0] > 0.01:
            low = middle
        else:
            high = middle
    return high


def explain_efficiency() -> pd.DataFrame:
    """Puts published throughput on two GPUs beside the prediction from one GPU's.

    Columns: batch_per_gpu, mfu (of the one GPU), measured_efficiency, predicted_efficiency,
    without_stragglers (predicted, on GPUs that are equally fast).
    """
    network = two_a100s()
    source = yaml.safe_load((PUBLISHED / "source.yaml").read_text())["settings"]
    path = PUBLISHED / "efficiency.csv"
    published = read_table(path, ["model", "batch_per_gpu", "one_gpu_tokens_per_s"])
    slower = float(slowest_of(2, STRAGGLER_SPREAD.value)) - 1
    rows = []
    for row in published.itertuples():
        config = GPT2Config.named(row.model, n_positions=source["n_positions"])
        batch, seq_len = int(row.batch_per_gpu), source["seq_len"]

        def one_gpu_s(mfu: float, sizes=(config, batch, seq_len)) -> float:
            return PublishedStep(*sizes, mfu).one_gpu_s()

        alone_s = batch * seq_len / row.one_gpu_tokens_per_s
        step = PublishedStep(config, batch, seq_len, _mfu_for(one_gpu_s, alone_s))
        together_s = step.step_s(network, None)
        measured = row.two_gpus_tokens_per_s / (2 * row.one_gpu_tokens_per_s)
        predicted = alone_s / (together_s + slower * alone_s)
        rows.append((batch, step.mfu, measured, predicted, alone_s / together_s))
    columns = ["batch_per_gpu", "mfu", "measured_efficiency", "predicted_efficiency"]
    return pd.DataFrame(rows, columns=[*columns, "without_stragglers"])


def _published(path: Path, model: str) -> pd.DataFrame:
    table = read_table(path, ["model", "bucket_cap_mib", "step_time_ms", "profiled_events"])
    table["step_time_ms"] = numbers(table, "step_time_ms", path, above=0)
    steps = table[table["model"] == model].reset_index(drop=True)
    if steps.empty:
        models = ", ".join(dict.fromkeys(table["model"]))
        raise UserError(f"{path}: no steps of {model!r}; has {models}")
    return steps


def _mfu_for(step_s: Callable[[float], float], wanted_s: float) -> float:
    """Finds the MFU at which a step takes the wanted time.

    A step is all but linear in 1/MFU, so the secant method is there after a few steps.
    """
    # ``earlier`` and ``later`` are the last two values of 1/MFU; 0.5 keeps the MFU at 2 or below.
    earlier, later = 1 / 0.9, 1 / 0.5
    earlier_s = step_s(1 / earlier)
    for _ in range(10):
        later_s = step_s(1 / later)
        if abs(later_s / wanted_s - 1) < 1e-12 or later_s == earlier_s:
            break
        step = (wanted_s - later_s) * (later - earlier) / (later_s - earlier_s)
        earlier, earlier_s, later = later, later_s, max(later + step, 0.5)
    return 1 / later
