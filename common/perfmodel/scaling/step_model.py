"""A step on N ranks and on one, as a function of what a user can change.

Computation grows linearly with the batch, forward and backward apart: t(b) = c0 + c1·b. One rank
takes ``accumulation`` such passes and an update. N ranks do the same, and exchange gradients in the
last pass, whose backward part is simulated bucket by bucket (``model``)::

    one rank:  a·(f(b) + r(b)) + u + d
    N ranks:   (a − 1)·(f(b) + r(b)) + f(b) + T(buckets, network) + u + d + κ·C

with a passes, forward f, backward r, update u, data d, and C the seconds all-reduces are active. κ
is what a second of all-reduce takes from everything else on this machine (``contention``); it is
0 unless measured, and below 0 counts for no more of C than was measured (``contention_s``). A
16-bit exchange follows the measured curve of its own type: on a CPU it may be slower than
float32's.

A change is applied to one rank and to N alike. speedup = N · t(1) / t(N), as each of N ranks has
the batch that one rank has; efficiency = speedup / N.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import numpy as np

from common.errors import UserError
from common.perfmodel.buckets import DdpOptions
from common.perfmodel.collectives import AllReduceModel
from common.perfmodel.ddp.bucketings import profile_buckets
from common.perfmodel.ddp.comm_hooks import CastHook
from common.perfmodel.ddp.profile import NO_COSTS, BackwardProfile, DdpCosts
from common.perfmodel.ddp.step import StepOptions, StepParts
from common.perfmodel.ddp.timeline import BackwardTimeline
from common.perfmodel.model import DdpModel
from common.perfmodel.scaling.pass_times import PassTimes

WIRE_TYPES = {"none": "float32", "fp16": "float16", "bf16": "bfloat16"}
"""Compression → the type on the wire, by which networks are known."""
WIRE_SHARES = {"none": 1.0, "fp16": 0.5, "bf16": 0.5}
"""Compression → bytes on the wire per byte of float32 gradient."""
COSTS = {"none": "copy", "fp16": "fp16", "bf16": "bf16"}
"""Compression → name in costs.csv of bringing a gradient into its bucket and back."""


@dataclass(frozen=True)
class StepSettings:
    """The settings that can be changed.

    ``exchanges``: passes of a step that exchange gradients; 1 suffices.
    """

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
        """Returns the samples of one rank's step."""
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
        contended_s: all-reduces of an exchange in the step that contention was found in.
        gradient_as_bucket_view: as for DDP; gradients are not copied back. What a compression casts
            it casts all the same.
        shares_cores: True if the cores that compute also do the all-reduces (gloo within one
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
    contended_s: float = float("inf")
    gradient_as_bucket_view: bool = False
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
        """Returns the samples per second on N ranks over those on one."""
        return self.ranks * self.step_1_s / self.step_n_s

    @property
    def efficiency(self) -> float:
        return self.speedup / self.ranks

    @property
    def exchange_efficiency(self) -> float:
        """Returns the share of N ranks' speed that the exchange leaves, other effects apart."""
        return self.without_exchange_s / self.step_n_s


def predict(model: StepModel, settings: StepSettings | None = None) -> Prediction:
    """Predicts the step under these settings, by default the model's own.

    Raises UserError for a compression whose all-reduce was not measured.
    """
    asked = settings or model.settings
    batch, passes = asked.batch_per_rank, asked.accumulation
    parts = StepParts(
        forward_s=model.together.forward.time_s(batch),
        update_s=model.optimizer_s,
        before_s=model.data_s_per_sample * asked.samples,
    )
    options = StepOptions(
        ddp=DdpOptions(asked.bucket_cap_mb),
        accumulation=passes,
        exchanges=asked.exchanges,
        hook=_hook(asked),
    )
    step = ddp_model(model, asked).step(parts, options)
    added_s = asked.exchanges * contention_s(model, step.backward)
    one_s = parts.before_s + passes * model.alone.time_s(batch) + model.optimizer_s
    return Prediction(
        ranks=model.ranks,
        step_1_s=one_s,
        step_n_s=step.total_s + added_s,
        without_exchange_s=step.without_ddp_s,
        exchange=step.backward,
    )


def contention_s(model: StepModel, backward: BackwardTimeline) -> float:
    """Returns the seconds that contention adds to a step for each of its exchanges.

    Where it is below 0, all-reduces of the step it was found in were faster than those measured
    apart. More all-reduces than that step had save no more: else each bucket would seem to gain.
    """
    if model.contention < 0:
        return model.contention * min(backward.communication_s, model.contended_s)
    return model.contention * backward.communication_s


def exchange(model: StepModel, settings: StepSettings) -> BackwardTimeline:
    """Predicts the backward pass that exchanges gradients."""
    options = DdpOptions(settings.bucket_cap_mb)
    return ddp_model(model, settings).backward(options, hook=_hook(settings))


def ddp_model(model: StepModel, settings: StepSettings) -> DdpModel:
    """Returns the model of DDP at this batch and compression.

    Copies are given half to each direction, by the byte. Raises UserError for a compression whose
    all-reduce was not measured.
    """
    wire = WIRE_TYPES[settings.compression]
    if wire not in model.networks:
        raise UserError(
            f"compression {settings.compression}: no all-reduce times of {wire}; "
            f"measured: {', '.join(model.networks)}"
        )
    network = model.networks[wire]
    backward_s = model.together.backward.time_s(settings.batch_per_rank)
    profile = model.profile.scaled(compute=backward_s / model.profile.backward_s)
    buckets = profile_buckets(profile, DdpOptions(settings.bucket_cap_mb))
    sizes = np.array([float(profile.sizes_bytes[list(bucket)].sum()) for bucket in buckets])
    costs = NO_COSTS
    copies = model.costs.get(COSTS[settings.compression])
    if copies is not None:
        per_byte = float(np.sum(copies.time_s(sizes))) / 2 / profile.total_bytes
        costs = DdpCosts(copy_in_s_per_byte=per_byte, copy_out_s_per_byte=per_byte)
        if model.gradient_as_bucket_view and settings.compression == "none":
            costs = costs.as_bucket_view()
    if model.shares_cores:
        sent = np.unique(sizes * WIRE_SHARES[settings.compression])
        lost_s = np.atleast_1d(network.time_s(sent))
        costs = replace(costs, lost_compute=(tuple(sent.tolist()), tuple(lost_s.tolist())))
    return DdpModel(profile, network, costs)


def _hook(settings: StepSettings) -> CastHook | None:
    return None if settings.compression == "none" else CastHook(settings.compression)


def calibrated(model: StepModel, measured_step_s: float) -> StepModel:
    """Returns the model with the contention at which it predicts a measured step.

    Contention is the time that the measured step takes beyond computation and all-reduces measured
    apart. Where the step is shorter than these, the measurement apart was disturbed.
    """
    bare = predict(replace(model, contention=0.0))
    active_s = bare.exchange.communication_s * model.settings.exchanges
    if active_s <= 0:
        return replace(model, contention=0.0)
    # A step cannot be shorter than its computation, however well all-reduces hide.
    spare_s = bare.exchange.exposed_communication_s * model.settings.exchanges
    over_s = max(measured_step_s - bare.step_n_s, -spare_s)
    return replace(
        model,
        contention=over_s / active_s,
        contended_s=bare.exchange.communication_s,
    )
