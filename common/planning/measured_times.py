"""The time of plans on ranks that were measured: passes, updates and collectives of their own.

Passes were timed alone at two sizes of a micro-batch, all ranks computing at the same time, and lie
on a line between these; where one rank trains by itself they are as much shorter as its own were
while the others waited. Gradients become ready in the same proportions at every size. Exchanges
come from ``DdpModel``, and of FSDP from its collectives: over gloo it waits for each of them, over
NCCL they are scheduled beside passes that are divided among units by their operations.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from common.errors import NotYetWritten
from common.perfmodel.architectures.architecture import Layer
from common.perfmodel.architectures.variants import in_units
from common.perfmodel.buckets import MIB, DdpOptions
from common.perfmodel.calibration import calibrated_model
from common.perfmodel.collectives import MeasuredAllReduce
from common.perfmodel.ddp.best_cap import Candidate
from common.perfmodel.ddp.bucketings import Bucketing, distinct_bucketings
from common.perfmodel.ddp.profile import BackwardProfile, DdpCosts
from common.perfmodel.ddp.step import StepOptions, StepParts
from common.perfmodel.fsdp.communication import ROOT, Collective, Unit, sharded_collectives
from common.perfmodel.fsdp.schedule import ShardedModel, predict_fsdp_step, simulate_step
from common.perfmodel.model import DdpModel
from common.perfmodel.scaling.step_model import PassTimes
from common.planning.search import StepTime, in_one_bucket
from common.planning.space import SINGLE, Plan, Question, numerics_of
from common.samples import student_quantile

MODEL_ERROR = 0.04
"""Share of a step that the model is off besides the noise of its inputs, as an interval's half."""


@dataclass(frozen=True)
class Inputs:
    """All that was measured.

    Attributes:
        passes: (checkpointing, one of ``CASTS``) → passes without any exchange.
        profile: a backward pass without exchange, whose proportions hold at any size.
        curve, crowded: all-reduces one after another, and in flight together; None where no plan
            needs them.
        costs: DDP's copies and contention.
        update_s: update of all parameters by a rank.
        zero1_s: ZeRO-1's update: of a part, and sending all parts.
        collectives: (operation, ranks of the group) → seconds by bytes of the whole message.
        overhead_s: FSDP strategy → its own work in a micro-batch, without a message.
        backend: backend of the process group.
        noise: relative standard deviation of a round's passes, and of its collectives.
        rounds: rounds of both.
        network: a sentence on the network's health.
        one_rank: passes of a rank while the others wait, relative to those of all at once.
    """

    passes: Mapping[tuple[str, str], PassTimes]
    profile: BackwardProfile
    curve: MeasuredAllReduce | None
    crowded: MeasuredAllReduce | None
    costs: DdpCosts
    update_s: float
    zero1_s: float
    collectives: Mapping[tuple[str, int], MeasuredAllReduce]
    overhead_s: Mapping[str, float]
    backend: str
    noise: tuple[float, float]
    rounds: int
    network: str = ""
    one_rank: float = 1.0


class MeasuredTimes:
    """Predicts steps of plans on the ranks that ``inputs`` were measured on."""

    def __init__(self, question: Question, inputs: Inputs) -> None:
        self.question, self.inputs = question, inputs
        self.basis = (
            *filter(None, [inputs.network]),
            f"times are predicted from passes at two sizes of a micro-batch, updates and "
            f"collectives, measured here in {inputs.rounds} rounds over {inputs.backend}; their "
            f"intervals hold the rounds' spread ({inputs.noise[0]:.1%} of passes, "
            f"{inputs.noise[1]:.1%} of collectives) and an assumed {MODEL_ERROR:.0%} for the model",
        )

    def _passes(self, plan: Plan) -> PassTimes:
        return self.inputs.passes[plan.checkpointing, numerics_of(self.question, plan).casts]

    def at_least_s(self, plan: Plan) -> float:
        """Returns the seconds of all passes and of a rank's own part of the update."""
        passes_s = plan.accumulation * self._passes(plan).time_s(plan.micro_batch)
        if plan.strategy == SINGLE:
            passes_s *= self.inputs.one_rank
        update_s = self.inputs.update_s
        if plan.strategy == "ZERO1":
            update_s = min(self.inputs.zero1_s, update_s)
        elif plan.is_sharded:
            update_s /= self.question.shards(plan)
        return passes_s + update_s

    def step(self, plan: Plan) -> StepTime:
        """Predicts a step; of DDP at the best cap."""
        cap = None
        if plan.strategy == SINGLE:
            total_s = self.at_least_s(plan)
        elif plan.is_sharded:
            total_s = self._sharded_s(plan)
        else:
            total_s, cap = self._in_buckets(plan)
        computation_s = min(self.at_least_s(plan), total_s)
        half = self._half_width(computation_s, total_s - computation_s)
        return StepTime(total_s, max(0.0, total_s - half), total_s + half, computation_s, cap)

    def _half_width(self, computation_s: float, exposed_s: float) -> float:
        """Returns half of a step's interval: noise of the inputs, and the model's error."""
        passes, collectives = self.inputs.noise
        chance_s = math.hypot(passes * computation_s, collectives * exposed_s)
        chance_s *= student_quantile(self.inputs.rounds - 1) / math.sqrt(self.inputs.rounds)
        return math.hypot(chance_s, MODEL_ERROR * (computation_s + exposed_s))

    def _ddp_model(self, plan: Plan) -> DdpModel:
        inputs = self.inputs
        backward_s = self._passes(plan).backward.time_s(plan.micro_batch)
        return calibrated_model(
            inputs.profile.scaled(compute=backward_s / inputs.profile.backward_s),
            inputs.curve,
            inputs.costs,
            crowded=inputs.crowded,
            backend=inputs.backend,
        )

    @cached_property
    def _bucketings(self) -> tuple[Bucketing, ...]:
        return distinct_bucketings(self.inputs.profile)

    def bucketings(self, plan: Plan) -> tuple[Candidate, ...]:
        """Returns every distinct bucketing of DDP or ZeRO-1, with its backward pass, by cap.

        Where a student has not written their tasks yet, there are none.
        """
        with suppress(NotYetWritten):
            return self._ddp_model(plan).best_cap(bucketings=self._bucketings).candidates
        return ()

    def _in_buckets(self, plan: Plan) -> tuple[float, float | None]:
        """Returns the step of DDP or ZeRO-1 in seconds, and its cap in MiB.

        Where a student has not written the tasks of buckets yet, one follows the passes.
        """
        try:
            return self._in_best_buckets(plan)
        except NotYetWritten as error:
            self.basis = in_one_bucket(self.basis, error)
        size = self.inputs.profile.total_bytes
        exchange_s = float(self.inputs.curve.time_s(size))
        return self.at_least_s(plan) + exchange_s, float(math.ceil(size / MIB))

    def _in_best_buckets(self, plan: Plan) -> tuple[float, float | None]:
        inputs, model = self.inputs, self._ddp_model(plan)
        update_s = inputs.zero1_s if plan.strategy == "ZERO1" else inputs.update_s
        parts = StepParts(self._passes(plan).forward.time_s(plan.micro_batch), update_s)
        cap = plan.bucket_cap_mib
        if cap is None:
            best = model.best_cap(bucketings=self._bucketings)
            cap = best.candidate(best.cap_mib).short_cap_mib
        options = StepOptions(ddp=DdpOptions(cap), accumulation=plan.accumulation)
        return model.step(parts, options).total_s, cap

    def _sharded_s(self, plan: Plan) -> float:
        inputs = self.inputs
        if inputs.backend == "nccl":
            return self._scheduled_s(plan) + inputs.update_s / self.question.shards(plan)
        alone_s = plan.accumulation * (
            self._passes(plan).time_s(plan.micro_batch) + inputs.overhead_s[plan.strategy]
        )
        return predict_fsdp_step(
            strategy=plan.strategy,
            alone_s=alone_s + inputs.update_s,
            update_s=inputs.update_s,
            collectives=collectives_of(self.question, plan),
            time_s=self._collective_s,
            backend=inputs.backend,
        ).total_s

    def _scheduled_s(self, plan: Plan) -> float:
        """Returns the seconds of a step's passes with what is exposed of collectives over NCCL.

        FSDP's own work in a micro-batch is taken as spread over it like computation.
        """
        passes, samples = self._passes(plan), plan.micro_batch
        longer = 1 + self.inputs.overhead_s[plan.strategy] / passes.time_s(samples)
        architecture = in_units(self.question.architecture, plan.blocks_per_unit)
        layers = architecture.layers
        units = [(unit_name(index, layer), layer) for index, layer in enumerate(layers)]
        forward, backward = Counter({ROOT: 0.0}), Counter({ROOT: 0.0})
        for unit, layer in units:
            flops = layer.forward_flops * (1 if layer.is_block else layer.count)
            forward[unit] += flops * passes.forward.time_s(samples)
            backward[unit] += flops * layer.backward_ratio * passes.backward.time_s(samples)
        scale = np.array([longer / architecture.forward_flops])
        back = np.array([longer / (architecture.backward_flops or 1)])
        calls = {(call.operation, call.unit): call for call in collectives_of(self.question, plan)}
        model = ShardedModel(
            blocks=tuple(
                unit for unit, layer in units if layer.is_block for _ in range(layer.count)
            ),
            forward_s={unit: seconds * scale for unit, seconds in forward.items()},
            backward_s={unit: seconds * back for unit, seconds in backward.items()},
            collective_s={key: np.array([self._collective_s(c)]) for key, c in calls.items()},
            copy_s=dict.fromkeys(calls, np.zeros(1)),  # they are in the work of its own
            prefetch=plan.prefetch,
            forward_only=frozenset(
                unit for unit, layer in units if layer.is_block and not layer.is_gathered_again
            ),
        )
        counts, slowdown = np.array([plan.accumulation]), np.ones(1)
        simulated = simulate_step(
            model, plan.strategy, counts, slowdown, reduces_each=plan.reduces_each
        )
        return float(simulated[0][0])

    def _collective_s(self, collective: Collective) -> float:
        if not collective.size_bytes:  # a root without parameters
            return 0.0
        curve = self.inputs.collectives[collective.operation, collective.group_size]
        return float(curve.time_s(collective.size_bytes))


def unit_name(index: int, layer: Layer) -> str:
    """Returns the name of the unit of a layer at an index; what is no block is in the root."""
    return f"{index} {layer.name}" if layer.is_block else ROOT


def _unit(layer: Layer, item_bytes: int) -> Unit:
    """Returns the sizes of a layer that FSDP gathers in numbers of so many bytes."""
    trained, frozen = ([tensor.shape for tensor in of] for of in (layer.tensors, layer.frozen))
    return Unit(trained, layer.count, item_bytes, frozen, layer.is_gathered_again)


def collectives_of(question: Question, plan: Plan) -> list[Collective]:
    """Returns the collectives of a step of a sharded plan."""
    architecture = in_units(question.architecture, plan.blocks_per_unit)
    numerics = numerics_of(question, plan)
    units = {
        unit_name(index, layer): _unit(layer, numerics.compute_bytes)
        for index, layer in enumerate(architecture.layers)
        if layer.is_block
    }
    units[ROOT] = _unit(architecture.root, numerics.root_bytes)
    return sharded_collectives(
        units=units,
        strategy=plan.strategy,
        ranks=question.ranks,
        shards=question.shards(plan),
        accumulation=plan.accumulation,
        reduces_each=plan.reduces_each,
        prefetch=plan.prefetch,
    )
