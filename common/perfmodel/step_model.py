"""A step on N ranks and on one, as a function of what a user can change.

Computation grows linearly with the batch, forward and backward apart: t(b) = c0 + c1·b. One rank
takes ``accumulation`` such passes and an update. N ranks do the same, and exchange gradients in the
last pass, whose backward part is simulated bucket by bucket (``simulator``)::

    one rank:  a·(f(b) + r(b)) + u + d
    N ranks:   (a − 1)·(f(b) + r(b)) + f(b) + T(buckets, network) + u + d + κ·C

with a passes, forward f, backward r, update u, data d, and C the seconds all-reduces are active. κ
is what a second of all-reduce takes from everything else on this machine (``contention``); it is
0 unless measured. A 16-bit exchange follows the measured curve of its own type: on a CPU it may be
slower than float32's.

A change is applied to one rank and to N alike. speedup = N · t(1) / t(N), as each of N ranks has
the batch that one rank has; efficiency = speedup / N.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from common.errors import UserError
from common.perfmodel.buckets import DdpOptions
from common.perfmodel.collectives import AllReduceModel
from common.perfmodel.pass_times import PassTimes
from common.perfmodel.profile import BackwardProfile, DdpCosts
from common.perfmodel.simulator import BackwardTimeline, profile_buckets, simulate_buckets

WIRE_TYPES = {"none": "float32", "fp16": "float16", "bf16": "bfloat16"}
"""Compression → the type on the wire, by which networks are known."""
COSTS = {"none": "copy", "fp16": "fp16", "bf16": "bf16"}
"""Compression → what bringing a gradient into its bucket and back is called in costs.csv."""


@dataclass(frozen=True)
class StepSettings:
    """What can be changed. ``exchanges``: passes of a step that exchange gradients; 1 suffices."""

    batch_per_rank: int
    accumulation: int = 1
    compression: str = "none"
    bucket_cap_mb: float | None = None
    exchanges: int = 1

    def __post_init__(self) -> None:
        if min(self.batch_per_rank, self.accumulation, self.exchanges) < 1:
            raise UserError("batch, accumulation and exchanges are at least 1")
        if self.exchanges > self.accumulation:
            raise UserError(
                f"{self.exchanges} exchanges in a step of {self.accumulation} micro-batches"
            )
        if self.compression not in WIRE_TYPES:
            raise UserError(f"compression {self.compression!r}; one of {', '.join(WIRE_TYPES)}")

    @property
    def samples(self) -> int:
        """Samples of one rank's step."""
        return self.batch_per_rank * self.accumulation


@dataclass(frozen=True, eq=False)
class StepModel:
    """A step, measured in pieces.

    Attributes:
        ranks: N.
        settings: those under which it was measured.
        together: passes while all ranks compute, the slowest rank's.
        alone: passes of one rank that has the machine to itself.
        profile: gradients in float32 and when they are ready, at any batch.
        networks: all-reduces by the type on the wire.
        costs: into a bucket and back (``copy``, ``fp16``, ``bf16``), by bytes in float32.
        optimizer_s, data_s_per_sample: update, and loading of a sample.
        contention: seconds that a second of all-reduce adds to the step.
        shares_cores: whether the cores that compute also do the all-reduces (gloo within one
            machine): beside computation an all-reduce then takes from it what it takes alone.
    """

    ranks: int
    settings: StepSettings
    together: PassTimes
    alone: PassTimes
    profile: BackwardProfile
    networks: Mapping[str, AllReduceModel]
    costs: Mapping[str, AllReduceModel] = field(default_factory=dict)
    optimizer_s: float = 0.0
    data_s_per_sample: float = 0.0
    contention: float = 0.0
    shares_cores: bool = False

    def __post_init__(self) -> None:
        if self.ranks < 2:
            raise UserError(f"{self.ranks} rank: a step without an exchange has nothing to scale")
        if "float32" not in self.networks:
            raise UserError("a step model needs float32's all-reduce times")


@dataclass(frozen=True)
class Prediction:
    """A step on one and on N ranks, in seconds.

    ``without_exchange_s`` is that of N ranks if they exchanged nothing; ``exchange`` is the last
    backward pass.
    """

    ranks: int
    step_1_s: float
    step_n_s: float
    without_exchange_s: float
    exchange: BackwardTimeline

    @property
    def speedup(self) -> float:
        """Samples per second on N ranks over those on one."""
        return self.ranks * self.step_1_s / self.step_n_s

    @property
    def efficiency(self) -> float:
        return self.speedup / self.ranks

    @property
    def exchange_efficiency(self) -> float:
        """What the exchange leaves of N ranks, whatever else they take from each other."""
        return self.without_exchange_s / self.step_n_s


def predict(model: StepModel, settings: StepSettings | None = None) -> Prediction:
    """The step under these settings, by default the model's own.

    Raises UserError for a compression whose all-reduce was not measured.
    """
    asked = settings or model.settings
    batch, passes = asked.batch_per_rank, asked.accumulation
    around = model.optimizer_s + model.data_s_per_sample * asked.samples
    one = passes * model.alone.time_s(batch) + around
    timeline = exchange(model, asked)
    several = (passes - asked.exchanges) * model.together.time_s(batch) + around
    several += asked.exchanges * (
        model.together.forward.time_s(batch)
        + timeline.total_s
        + model.contention * timeline.communication_s
    )
    bare = passes * model.together.time_s(batch) + around
    return Prediction(model.ranks, one, several, bare, timeline)


def exchange(model: StepModel, settings: StepSettings) -> BackwardTimeline:
    """The backward pass that exchanges gradients. DDP fills buckets by float32's sizes."""
    wire = WIRE_TYPES[settings.compression]
    if wire not in model.networks:
        raise UserError(
            f"compression {settings.compression}: no all-reduce times of {wire}; "
            f"measured: {', '.join(model.networks)}"
        )
    backward_s = model.together.backward.time_s(settings.batch_per_rank)
    profile = model.profile.scaled(compute=backward_s / model.profile.backward_s)
    buckets = profile_buckets(profile, DdpOptions(settings.bucket_cap_mb))
    width = 1.0 if wire == "float32" else 0.5
    costs = _copies(model, settings.compression, profile, buckets, width)
    network = model.networks[wire]
    if model.shares_cores:
        sent = sorted({float(profile.sizes_bytes[list(b)].sum() * width) for b in buckets})
        costs = replace(costs, lost_compute=(tuple(sent), tuple(map(network.time_s, sent))))
    return simulate_buckets(profile.scaled(size=width), network, buckets, costs)


def _copies(
    model: StepModel,
    compression: str,
    profile: BackwardProfile,
    buckets: Sequence[Sequence[int]],
    width: float,
) -> DdpCosts:
    """Half of what a bucket's way takes is given to each direction, per byte on the wire."""
    known = model.costs.get(COSTS[compression])
    if known is None:
        return DdpCosts()
    sizes = [float(profile.sizes_bytes[list(bucket)].sum()) for bucket in buckets]
    total_s = float(np.sum(known.time_s(np.asarray(sizes))))
    per_byte = total_s / 2 / (profile.total_bytes * width)
    return DdpCosts(copy_in_s_per_byte=per_byte, copy_out_s_per_byte=per_byte)


def calibrated(model: StepModel, measured_step_s: float) -> StepModel:
    """The model with the contention at which it predicts a measured step.

    What the measured step takes longer than computation and all-reduces measured apart is what
    they take from each other. Where it is shorter, it is the measurement apart that was disturbed.
    """
    bare = predict(replace(model, contention=0.0))
    active_s = bare.exchange.communication_s * model.settings.exchanges
    if active_s <= 0:
        return replace(model, contention=0.0)
    # A step cannot be shorter than its computation, however well all-reduces hide.
    spare_s = bare.exchange.exposed_communication_s * model.settings.exchanges
    over_s = max(measured_step_s - bare.step_n_s, -spare_s)
    return replace(model, contention=over_s / active_s)
