"""Changes to a step's settings that make it scale, and the gain predicted for each.

The step and its prediction are in ``step_model``. A change is applied to one rank and to N alike;
one of batch or accumulation changes the global batch, and says so.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np

from common.perfmodel.collectives import AlphaBeta, as_alpha_beta
from common.perfmodel.ddp.best_cap import ROUNDING
from common.perfmodel.scaling.step_model import (
    WIRE_TYPES,
    Prediction,
    StepModel,
    StepSettings,
    cast_hook,
    ddp_model,
    predict,
)

CHECKED, MOST_TRIED = 17, 4096
"""Numbers at which a function is looked at before it is bisected, and where it cannot be."""


def at_bandwidth(model: StepModel, factor: float) -> StepModel:
    """Returns the model on links ``factor`` times as fast, their latency unchanged."""
    networks = {}
    for name, network in model.networks.items():
        line = as_alpha_beta(network)
        faster = AlphaBeta(line.alpha_s, line.bandwidth_bytes_per_s * factor)
        networks[name] = faster
    return replace(model, networks=networks)


def needed_bandwidth(
    model: StepModel, efficiency: float, settings: StepSettings | None = None
) -> float | None:
    """Finds the algorithm bandwidth (bytes/s), at most 10⁴ times that measured, for an efficiency.

    None if none suffices.
    """
    settings = settings or model.settings
    low, high = 1.0, 1e4
    if predict(at_bandwidth(model, high), settings).exchange_efficiency < efficiency:
        return None
    if predict(at_bandwidth(model, low), settings).exchange_efficiency >= efficiency:
        high = low
    while high / low > 1.001:
        middle = float(np.sqrt(low * high))
        reached = predict(at_bandwidth(model, middle), settings).exchange_efficiency >= efficiency
        low, high = (low, middle) if reached else (middle, high)
    wire = WIRE_TYPES[settings.compression]
    return as_alpha_beta(model.networks[wire]).bandwidth_bytes_per_s * high


def smallest_that_suffices(
    model: StepModel, settings: StepSettings, name: str, most: int, target: float
) -> StepSettings | None:
    """Finds the smallest larger batch per rank, or accumulation, that reaches an efficiency.

    ``name`` is the field that grows up to ``most``, ``batch_per_rank`` or ``accumulation``;
    ``target`` the exchange efficiency. Returns the settings, or None where none suffices.
    """

    def larger(value: int) -> StepSettings:
        return replace(settings, **{name: value})

    smallest = first_reaching(
        lambda value: predict(model, larger(value)).exchange_efficiency,
        getattr(settings, name) + 1,
        most,
        target,
    )
    return None if smallest is None else larger(smallest)


def first_reaching(
    function: Callable[[int], float], least: int, most: int, target: float
) -> int | None:
    """Finds the smallest whole number at which a function reaches a target; None if none does.

    It is found by bisection where the function does not fall between ``CHECKED`` numbers over the
    whole range; else by trying numbers in ascending order, all of them or ``MOST_TRIED``.
    """
    checked = _spread(least, most, CHECKED)
    values = [function(number) for number in checked]
    if any(after < before - ROUNDING for before, after in pairwise(values)):
        tried = _spread(least, most, MOST_TRIED)
        return next((number for number in tried if function(number) >= target), None)
    reached = next((index for index, value in enumerate(values) if value >= target), None)
    if not reached:
        return None if reached is None else least
    low, high = checked[reached - 1], checked[reached]
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if function(middle) >= target else (middle, high)
    return high


def _spread(least: int, most: int, count: int) -> list[int]:
    """Returns whole numbers from least to most: all of them, or some at equal ratios."""
    if most - least < count:
        return list(range(least, most + 1))
    return np.unique(np.rint(np.geomspace(least, most, count)).astype(int)).tolist()


@dataclass(frozen=True)
class Proposal:
    """One change, and the step predicted with it.

    Attributes:
        change: such as ``accumulation=4``, ``compression=fp16``, ``batch_per_rank=64``,
            ``bucket_cap_mb=2.5``, or ``network=2.4 GB/s`` (bus bandwidth).
        settings: the settings with the change; the model's own for ``network``.
        gain: speedup with the change over that without, minus 1.
        global_batch_changed: whether a step then takes more samples, which changes training, too.
    """

    change: str
    settings: StepSettings
    predicted_step_ms_1: float
    predicted_step_ms_n: float
    predicted_speedup: float
    predicted_efficiency: float
    gain: float
    global_batch_changed: bool

    @property
    def kind(self) -> str:
        """Returns the name of what is changed: a setting such as accumulation, or network."""
        return self.change.split("=")[0]


BATCH_FACTORS = (2, 4, 8, 16)
TARGET_EFFICIENCY = 0.8
"""Lower bound on an acceptable efficiency: the line that the course's plots draw."""
LEAST_GAIN = 0.03
"""Lower bound on a predicted gain: less cannot be told from the noise of a measurement."""


def propose(model: StepModel, *, batch_factors: Sequence[int] = BATCH_FACTORS) -> list[Proposal]:
    """Proposes changes that make N ranks scale better, one setting at a time.

    Accumulation and batch per rank are multiplied by each of ``batch_factors``.

    Of each kind the first is the one to take: the smallest change that reaches the target
    efficiency, or else the one that comes closest. Kinds come in the order of what this first one
    is predicted to reach, and ``network``, which no flag changes, comes last. Changes predicted to
    gain less than ``LEAST_GAIN`` are left out.
    """
    now = model.settings
    before = predict(model)
    kinds: list[list[Proposal]] = []
    for changes in _changes(model, batch_factors):
        kind = [_proposal(model, changed, before) for changed in changes]
        kind = [proposal for proposal in kind if proposal.gain >= LEAST_GAIN]
        # Stable: those that reach the target stay in the order from small to large.
        kind.sort(key=lambda proposal: -min(proposal.predicted_efficiency, TARGET_EFFICIENCY))
        if kind:
            kinds.append(kind)
    kinds.sort(key=lambda kind: -kind[0].predicted_efficiency)
    proposals = [proposal for kind in kinds for proposal in kind]
    bandwidth = needed_bandwidth(model, TARGET_EFFICIENCY)
    if bandwidth is not None and before.exchange_efficiency < TARGET_EFFICIENCY:
        wire = WIRE_TYPES[now.compression]
        factor = bandwidth / as_alpha_beta(model.networks[wire]).bandwidth_bytes_per_s
        bus = bandwidth * 2 * (model.ranks - 1) / model.ranks
        # A line through the measured times may reach the target as it is: nothing is to be changed.
        if factor > 1:
            after = predict(at_bandwidth(model, factor))
            network = _filled(f"network={bus / 1e9:.3g} GB/s", now, after, before, now)
            proposals += [network] if network.gain >= LEAST_GAIN else []
    return proposals


def _changes(model: StepModel, batch_factors: Sequence[int]) -> list[list[StepSettings]]:
    """Returns settings to try, by kind, from small to large changes."""
    now = model.settings
    compressions = [
        name
        for name in WIRE_TYPES
        if name != now.compression and WIRE_TYPES[name] in model.networks
    ]
    return [
        [replace(now, exchanges=1)] if now.exchanges > 1 else [],
        [
            replace(now, accumulation=now.accumulation * factor, exchanges=1)
            for factor in batch_factors
        ],
        [replace(now, batch_per_rank=now.batch_per_rank * factor) for factor in batch_factors],
        [replace(now, compression=name) for name in compressions if name != "none"],
        [replace(now, bucket_cap_mb=best_cap_mb(model, now))],
    ]


def best_cap_mb(model: StepModel, settings: StepSettings | None = None) -> float:
    """Finds b* in MiB: the middle of the caps with the shortest step; larger caps win ties."""
    settings = settings or model.settings
    return ddp_model(model, settings).best_cap(hook=cast_hook(model, settings)).cap_mib


def _proposal(model: StepModel, changed: StepSettings, before: Prediction) -> Proposal:
    now = model.settings
    names = ("accumulation", "batch_per_rank", "compression", "bucket_cap_mb", "exchanges")
    name = next(name for name in names if getattr(changed, name) != getattr(now, name))
    value = getattr(changed, name)
    text = f"{value:.4g}" if isinstance(value, float) else value
    if name == "bucket_cap_mb":
        changed = replace(changed, bucket_cap_mb=float(text))  # what is run is what is predicted
    return _filled(f"{name}={text}", changed, predict(model, changed), before, now)


def _filled(
    change: str, settings: StepSettings, after: Prediction, before: Prediction, now: StepSettings
) -> Proposal:
    return Proposal(
        change=change,
        settings=settings,
        predicted_step_ms_1=after.step_1_s * 1e3,
        predicted_step_ms_n=after.step_n_s * 1e3,
        predicted_speedup=after.speedup,
        predicted_efficiency=after.efficiency,
        gain=after.speedup / before.speedup - 1,
        global_batch_changed=settings.samples != now.samples,
    )
