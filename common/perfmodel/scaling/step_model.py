"""A step on N ranks and on one, as a function of what a user can change.

Computation grows linearly with the batch, forward and backward apart: t(b) = c0 + c1·b. One rank
takes ``accumulation`` such passes and an update. N ranks do the same, and exchange gradients in the
last pass, whose backward part is simulated bucket by bucket (``DdpModel``)::

    one rank:  a·(f(b) + r(b)) + u + d
    N ranks:   (a − 1)·(f(b) + r(b)) + f(b) + T(buckets, network) + u + d

with a passes, forward f, backward r, update u and data d. Within a step an all-reduce takes
(1 + κ)·a(x), of which κ·a(x) are taken from the computation beside it. κ is the *contention* that
the measured step shows (``calibrated``); it is 0 unless measured, and below 0 where all-reduces
were faster in the step than apart. A 16-bit exchange follows the measured curve of its own type: on
a CPU it may be slower than float32's.

A change is applied to one rank and to N alike. speedup = N · t(1) / t(N), as each of N ranks has
the batch that one rank has; efficiency = speedup / N.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from common.errors import UserError
from common.perfmodel.buckets import DdpOptions
from common.perfmodel.calibration import calibrated_model
from common.perfmodel.collectives import AllReduceModel, AlphaBeta, relative_line, scaled
from common.perfmodel.ddp.bucketings import profile_buckets
from common.perfmodel.ddp.comm_hooks import CASTS, CastHook
from common.perfmodel.ddp.profile import BackwardProfile, DdpCosts, SecondsBySize
from common.perfmodel.ddp.step import StepOptions, StepParts
from common.perfmodel.ddp.timeline import BackwardTimeline
from common.perfmodel.model import DdpModel


@dataclass(frozen=True)
class LinearTime:
    """t(b) = fixed + per_sample · b, in seconds."""

    fixed_s: float
    per_sample_s: float

    def __post_init__(self) -> None:
        if not (self.fixed_s >= 0 and self.per_sample_s >= 0):
            raise UserError("a pass takes no negative time")

    def time_s(self, batch: float) -> float:
        """Computes the seconds for a batch of so many samples."""
        return self.fixed_s + self.per_sample_s * batch

    @classmethod
    def fit(cls, batches: Sequence[float], times_s: Sequence[float]) -> LinearTime:
        """Fits both parts by least squares of the relative error; neither is below 0.

        One batch size alone gives a time in proportion to it. Raises UserError for unusable times.
        """
        sizes, times = np.asarray(batches, float), np.asarray(times_s, float)
        if not len(times) or not (np.isfinite(times) & (times > 0) & (sizes > 0)).all():
            raise UserError("times of passes and their batches must be above 0")
        if len(set(sizes)) == 1:
            return cls(0.0, float((sizes / times).sum() / ((sizes / times) ** 2).sum()))
        fixed, per_sample = relative_line(sizes, times)
        if per_sample < 0:
            return cls(float((1 / times).sum() / (1 / times**2).sum()), 0.0)
        return cls(fixed, per_sample)

    @classmethod
    def through(cls, first: tuple[int, float], second: tuple[int, float]) -> LinearTime:
        """Makes the line through two points (samples, seconds), without a negative part."""
        (few, few_s), (many, many_s) = sorted((first, second))
        if few == many:
            return cls(0.0, many_s / many)
        per_sample_s = max(0.0, (many_s - few_s) / (many - few))
        fixed_s = many_s - per_sample_s * many
        return cls(fixed_s, per_sample_s) if fixed_s >= 0 else cls(0.0, many_s / many)


@dataclass(frozen=True)
class PassTimes:
    """Forward and backward pass of one micro-batch without any exchange."""

    forward: LinearTime
    backward: LinearTime

    def time_s(self, batch: float) -> float:
        """Computes the seconds of both."""
        return self.forward.time_s(batch) + self.backward.time_s(batch)


WIRE_TYPES = {"none": "float32"} | CASTS
"""Compression → the type on the wire, by which networks are known."""
WIRE_SHARES = {"none": 1.0, "fp16": 0.5, "bf16": 0.5}
"""Compression → bytes on the wire per byte of float32 gradient."""
LEAST_FACTOR = 1e-9
"""Lower bound on (1 + κ): an all-reduce takes some time."""
MOST_BYTES = 2**50
"""A size beyond any message, up to which a line is given as two points."""


@dataclass(frozen=True)
class StepSettings:
    """The settings that can be changed, by the names of the flags; 1 exchange a step suffices."""

    batch_per_rank: int
    accumulation: int = 1
    compression: str = "none"
    bucket_cap_mb: float | None = None
    exchanges: int = 1

    def __post_init__(self) -> None:
        if min(self.batch_per_rank, self.accumulation, self.exchanges) < 1:
            raise UserError("batch, accumulation and exchanges are at least 1")
        if self.compression not in WIRE_TYPES:
            raise UserError(f"compression {self.compression!r}; one of {', '.join(WIRE_TYPES)}")
        self.options()

    def options(self, hook: CastHook | None = None) -> StepOptions:
        """Returns them for ``DdpModel.step``. Raises UserError for more exchanges than passes."""
        return StepOptions(
            ddp=DdpOptions(self.bucket_cap_mb),
            accumulation=self.accumulation,
            exchanges=self.exchanges,
            hook=hook,
        )

    @property
    def samples(self) -> int:
        """Returns the samples of one rank's step."""
        return self.batch_per_rank * self.accumulation


@dataclass(frozen=True, eq=False)
class StepModel:
    """A step, measured in pieces.

    Attributes:
        together: passes while all ranks compute, the slowest rank's.
        alone: passes of one rank that has the machine to itself.
        profile: gradients in float32 and when they are ready, at any batch.
        networks: type on the wire → its all-reduces.
        costs: seconds into a bucket and back (``copy``, ``fp16``, ``bf16``), by bytes in float32.
        optimizer_s, data_s_per_sample: update, and loading of a sample.
        contention: κ, what an all-reduce takes longer in the step, and from computation beside it,
            as a share of its time.
        backend: decides how many all-reduces are in flight; one where it is not known.
        gradient_as_bucket_view: DDP's argument; gradients are not copied back. What a compression
            casts it casts all the same.
        shares_cores: True if the cores that compute also do the all-reduces (gloo within one
            machine): beside computation an all-reduce then takes from it all of its time.
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
    backend: str = ""
    gradient_as_bucket_view: bool = False
    shares_cores: bool = False

    def __post_init__(self) -> None:
        if self.ranks < 2:
            raise UserError(f"{self.ranks} rank: a step without an exchange has nothing to scale")
        if "float32" not in self.networks:
            raise UserError("a step model needs float32's all-reduce times")


@dataclass(frozen=True)
class Prediction:
    """A step on one, on N, and on N ranks that exchange nothing, in seconds.

    ``exchange`` is the last backward pass.
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
    settings = settings or model.settings
    batch, passes = settings.batch_per_rank, settings.accumulation
    parts = StepParts(
        forward_s=model.together.forward.time_s(batch),
        update_s=model.optimizer_s,
        before_s=model.data_s_per_sample * settings.samples,
    )
    step = ddp_model(model, settings).step(parts, settings.options(cast_hook(model, settings)))
    one_s = parts.before_s + passes * model.alone.time_s(batch) + model.optimizer_s
    return Prediction(
        ranks=model.ranks,
        step_1_s=one_s,
        step_n_s=step.total_s,
        without_exchange_s=step.without_ddp_s,
        exchange=step.backward,
    )


def ddp_model(model: StepModel, settings: StepSettings) -> DdpModel:
    """Returns the model of DDP at this batch and compression, with copies half in each direction.

    Raises UserError for a compression whose all-reduce was not measured.
    """
    wire = WIRE_TYPES[settings.compression]
    if wire not in model.networks:
        raise UserError(
            f"compression {settings.compression}: no all-reduce times of {wire}; "
            f"measured: {', '.join(model.networks)}"
        )
    factor = max(1 + model.contention, LEAST_FACTOR)
    network = scaled(model.networks[wire], latency=factor, transfer=factor)
    costs = DdpCosts(
        copy_in_s_per_byte=_s_per_byte(model, "copy") / 2,
        copy_out_s_per_byte=_s_per_byte(model, "copy") / 2,
    )
    lost = 1.0 if model.shares_cores else max(0.0, model.contention) / factor
    if lost:
        costs = replace(costs, lost_compute=_seconds_by_size(network, lost))
    backward_s = model.together.backward.time_s(settings.batch_per_rank)
    return calibrated_model(
        profile=model.profile.scaled(compute=backward_s / model.profile.backward_s),
        network=network,
        costs=costs,
        backend=model.backend,
        gradient_as_bucket_view=model.gradient_as_bucket_view,
    )


def cast_hook(model: StepModel, settings: StepSettings) -> CastHook | None:
    """Returns the hook of a compression, with what casts take beyond copies; None without one."""
    name = settings.compression
    if name == "none":
        return None
    there_s = back_s = _s_per_byte(model, name) / 2
    there_s -= _s_per_byte(model, "copy") / 2
    if not model.gradient_as_bucket_view:
        back_s -= _s_per_byte(model, "copy") / 2
    return CastHook(name, max(0.0, there_s), max(0.0, back_s))


def _s_per_byte(model: StepModel, cost: str) -> float:
    """Returns a cost for each byte of gradient, there and back, in the buckets of the step."""
    curve = model.costs.get(cost)
    if curve is None:
        return 0.0
    buckets = profile_buckets(model.profile, model.settings.options().ddp)
    sizes = np.array([float(model.profile.sizes_bytes[list(bucket)].sum()) for bucket in buckets])
    return float(np.sum(curve.time_s(sizes))) / model.profile.total_bytes


def _seconds_by_size(network: AllReduceModel, share: float) -> SecondsBySize:
    """Returns a share of the all-reduces' times, in the form of ``DdpCosts``."""
    sizes = np.array([0.0, MOST_BYTES])
    if not isinstance(network, AlphaBeta):
        sizes = network.sizes_bytes
    return tuple(sizes.tolist()), tuple((share * network.time_s(sizes)).tolist())


def apart(model: StepModel) -> StepModel:
    """Returns the model with all-reduces as they were measured apart from any step."""
    return replace(model, contention=0.0)


def calibrated(model: StepModel, measured_step_s: float) -> StepModel:
    """Returns the model with the contention at which it predicts a measured step.

    Contention is the time that the measured step takes beyond computation and all-reduces measured
    apart. Where the step is shorter than these, the measurement apart was disturbed.
    """
    from scipy.optimize import brentq  # ranks import this module for its lines, without SciPy

    bare = predict(apart(model))
    active_s = bare.exchange.communication_s * model.settings.exchanges
    if active_s <= 0:
        return apart(model)

    def longer_s(contention: float) -> float:
        return predict(replace(model, contention=contention)).step_n_s - measured_step_s

    # A step cannot be shorter than its computation, however well all-reduces hide.
    exposed_s = bare.exchange.exposed_communication_s * model.settings.exchanges
    low = -min(1.0, exposed_s / active_s)
    if longer_s(low) >= 0:
        return replace(model, contention=low)
    high = 1.0
    while longer_s(high) < 0:
        high *= 2
    return replace(model, contention=float(brentq(longer_s, low, high, xtol=1e-9)))
