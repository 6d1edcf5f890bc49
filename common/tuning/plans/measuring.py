"""Measures what predictions of plans start from: passes, updates, collectives, and DDP's costs.

Everything is visited in rounds whose order rotates. Each visit makes the model anew and drops it,
so that a rank holds one model at a time. Raw samples are tables of the run directory.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from itertools import accumulate
from statistics import median

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from common.benchmarks.buckets.calibration import passes_without_ddp
from common.benchmarks.buckets.lasting_messages import gradient_dtype
from common.errors import UserError
from common.perfmodel.ddp.profile import NO_COSTS
from common.perfmodel.fsdp.communication import FLOAT32_BYTES
from common.perfmodel.one_device.training_memory import predict_training_memory
from common.planning.measured_times import Inputs, collectives_of
from common.planning.space import SINGLE, Plan, Question, numerics_of, passes_of, sharding_of
from common.runtime.group.collective_timing import collective_call, time_repeated
from common.runtime.group.gradient_marks import ready_rows
from common.runtime.group.one_rank_group import own_group
from common.runtime.group.process_group import Worker
from common.runtime.records.recorder import Recorder
from common.runtime.wording import counted
from common.training.parallel import make_mesh
from common.tuning.measured import (
    WatchedPasses,
    measure_all_reduces,
    measure_costs,
    write_passes,
)
from common.tuning.plans.planned_step import (
    PlannedStep,
    drop_unused,
    in_half,
    make_optimizer,
    recompute,
    seconds_of,
)
from common.tuning.plans.read_inputs import ReadInputs
from common.tuning.plans.sized_model import SizedModel
from common.tuning.same_graph import check_same_graph
from common.tuning.user_model import user_step

ROUNDS, WARMUP, PASSES = 4, 1, 2
CALLS = 4
PRODUCT = 512
"""Rows of the square matrices by which precisions are compared."""
MOMENTS_BYTES = 8
"""Bytes of AdamW's two moments a parameter."""
PART_COLUMNS = ("arm", "samples", "round", "iteration", "rank", "part", "time_ms")
"""``plan-parts.csv``: a row per rank and pass, update, both passes of one rank while the others
wait (``one rank``), or step of FSDP over one rank (``alone``)."""
COLLECTIVE_COLUMNS = (
    *("operation", "group_size", "size_bytes", "round", "iteration", "rank", "time_ms"),
)
Row = dict[str, object]


@dataclass(frozen=True)
class _Arm:
    """Something that is visited in each round; ``visit`` returns rows of this rank."""

    name: str
    samples: int
    visit: Callable[[int], list[Row]]


def measure_inputs(
    model: SizedModel,
    question: Question,
    plans: Iterable[Plan],
    sizes: tuple[int, int],
    recorder: Recorder,
) -> Inputs:
    """Measures the inputs of a question's plans; all ranks do so together.

    Args:
        plans: the plans that may be chosen; what none of them needs is left out.
        sizes: the two sizes of a micro-batch whose passes are timed, the smaller one first.

    Raises UserError where ranks run different graphs, or the contract is not kept.
    """
    worker, plans = recorder.worker, list(plans)
    few, many = sizes
    lab = _Lab(model, question, plans, worker)
    check_same_graph(model.make(few, worker.device), worker)
    drop_unused(worker)
    casts = [numerics_of(question, plan).casts for plan in plans]
    base = "float32" if question.precisions[0] == "float32" else "autocast"
    zero1 = any(plan.strategy == "ZERO1" for plan in plans)
    kinds = {(plan.checkpointing, cast) for plan, cast in zip(plans, casts, strict=True)}
    kinds = sorted(kinds | {("none", base)})
    sharded = [plan for plan in plans if plan.is_sharded]
    within = "half" if sharded and base == "autocast" else base
    arms = [
        lab.passes(few, "none", base),
        lab.updates(few, zero1),
        *(lab.passes(many, *kind, ready=kind == ("none", base)) for kind in kinds),
        *([lab.passes(few, "none", within)] if within != base else []),
        *([lab.one_rank(many, base)] if any(plan.strategy == SINGLE for plan in plans) else []),
        *(lab.alone(strategy, few) for strategy in dict.fromkeys(map(_alone_as, sharded))),
    ]
    parts = recorder.stream("plan-parts.csv", PART_COLUMNS)
    messages = _Messages(question, sharded, worker)
    sent = recorder.stream("plan-collectives.csv", COLLECTIVE_COLUMNS)
    for round_, arm in recorder.rounds([*arms, messages], ROUNDS, stage="plan"):
        if isinstance(arm, _Messages):
            sent.write([{"round": round_} | row for row in arm.visit()])
        else:
            keys = {"arm": arm.name, "samples": arm.samples, "round": round_}
            parts.write([keys | row for row in arm.visit(round_)])
        drop_unused(worker)
    _, profile = write_passes(lab.watched, recorder)
    curve = crowded = None
    costs = NO_COSTS
    if any(plan.has_buckets for plan in plans):
        step = user_step(model.make(few, worker.device), worker)
        dtype = gradient_dtype(step.model.parameters())
        network = measure_all_reduces(profile, dtype, recorder, formats=())["none"]
        curve, crowded = network.curve, network.crowded
        costs = measure_costs(step, recorder)
        step = None
        drop_unused(worker)
    table, collectives = worker.broadcast((parts.table(), sent.table()))
    read = ReadInputs(table, collectives, few, many)
    return Inputs(
        passes={kind: read.lines(*kind, base) for kind in kinds},
        profile=profile,
        curve=curve,
        crowded=crowded,
        costs=costs,
        one_rank=read.one_rank(base),
        update_s=lab.longer * read.part_s("updates", "update"),
        zero1_s=read.part_s("updates", "zero1") if zero1 else 0.0,
        collectives=read.curves(),
        overhead_s=read.overheads(within, with_update=lab.holds_all),
        backend=worker.backend,
        noise=read.noise(),
        rounds=ROUNDS,
    )


def _alone_as(plan: Plan) -> str:
    """Returns the strategy whose own work a plan has, inside a group and without messages."""
    return "FULL_SHARD" if plan.strategy == "HYBRID_SHARD" else plan.strategy


class _Lab:
    """Makes the arms, and keeps the passes that one of them watches.

    Where no plan lets a rank update all parameters (``holds_all``), it may not have the memory: an
    update is that of its share, and FSDP over one rank has none. ``longer`` is how many times as
    many parameters the model has as were updated.
    """

    def __init__(
        self, model: SizedModel, question: Question, plans: Iterable[Plan], worker: Worker
    ) -> None:
        self.model, self.worker = model, worker
        self.precision = question.precisions[0]
        self.holds_all = holds_all(plans)
        self.longer = 1.0
        self.watched = WatchedPasses([], [])

    def passes(self, samples: int, checkpointing: str, casts: str, *, ready: bool = False) -> _Arm:
        """Returns the arm of passes without any exchange, all ranks computing at the same time.

        In ``half`` weights and inputs are cast before, as FSDP does.
        """

        def visit(round_: int) -> list[Row]:
            user = self.model.make(samples, self.worker.device)
            recompute(user.module, checkpointing)
            user = in_half(user) if casts == "half" else user
            step = user_step(user, self.worker, "bfloat16" if casts == "autocast" else "float32")
            rows: list[Row] = []
            passes = passes_without_ddp(
                step, warmup=WARMUP, passes=PASSES, barrier_before="forward"
            )
            for iteration, watched in passes:
                if iteration < 0:
                    continue
                times = {"forward": watched.forward_s, "backward": watched.backward_s}
                rows += _rows(iteration, times)
                if ready:
                    number = round_ * PASSES + iteration
                    self.watched.ready.extend(ready_rows(step.model, watched.ready_s, number))
                    self.watched.times.append(watched.row(number))
            return rows

        return _Arm(f"passes {checkpointing} {casts}", samples, visit)

    def updates(self, samples: int, zero1: bool) -> _Arm:
        """Returns the arm of a rank's updates, of all parameters or a share, and of ZeRO-1's."""

        def visit(_round: int) -> list[Row]:
            module = self.model.make(samples, self.worker.device).module
            trained = [parameter for parameter in module.parameters() if parameter.requires_grad]
            updated = trained if self.holds_all else _share(trained, self.worker.world_size)
            self.longer = _elements(trained) / _elements(updated)
            for parameter in trained if zero1 else updated:
                parameter.grad = torch.zeros_like(parameter)
            optimizers = {"update": make_optimizer(updated, False)}
            if zero1:
                optimizers["zero1"] = make_optimizer(trained, True)
            rows = []
            for iteration in range(-WARMUP, PASSES):
                times = {
                    part: seconds_of(optimizer.step, self.worker)
                    for part, optimizer in optimizers.items()
                }
                rows += _rows(iteration, times) if iteration >= 0 else []
            return rows

        return _Arm("updates", samples, visit)

    def one_rank(self, samples: int, casts: str) -> _Arm:
        """Returns the arm of rank 0's passes while the others wait, which may leave it faster.

        Ranks on one machine share its memory, caches and clocks, those on its cores their units.
        """
        precision = "bfloat16" if casts == "autocast" else "float32"
        plan = Plan(SINGLE, samples, precision=precision)

        def visit(_round: int) -> list[Row]:
            user = self.model.make(samples, self.worker.device)
            step = PlannedStep(user, plan, self.worker, updates=False)
            times = [step.timed_s() for _ in range(WARMUP + PASSES)][WARMUP:]
            self.worker.barrier()
            rows = [row for i, s in enumerate(times) for row in _rows(i, {"step": s})]
            return [] if step.idle else rows

        return _Arm(f"one rank {casts}", samples, visit)

    def alone(self, strategy: str, samples: int) -> _Arm:
        """Returns the arm of FSDP over one rank: its own work, and no message."""
        plan = Plan(strategy, samples, precision=self.precision)
        mesh = DeviceMesh.from_group(own_group(self.worker), self.worker.device.type)

        def visit(_round: int) -> list[Row]:
            user = self.model.make(samples, self.worker.device)
            step = PlannedStep(user, plan, self.worker, mesh, updates=self.holds_all)
            # The first step makes FSDP's state, the second what is kept of it.
            times = [step.timed_s() for _ in range(1 + WARMUP + PASSES)][1 + WARMUP :]
            return [row for i, s in enumerate(times) for row in _rows(i, {"step": s})]

        return _Arm(f"alone {strategy}", samples, visit)


def _elements(parameters: Iterable[torch.Tensor]) -> int:
    return sum(parameter.numel() for parameter in parameters)


def _share(parameters: list[nn.Parameter], ranks: int) -> list[nn.Parameter]:
    """Returns the first parameters that are a rank's share of all elements, or just above it."""
    sums = accumulate(parameter.numel() for parameter in parameters)
    below = [total < _elements(parameters) / ranks for total in sums]
    return parameters[: sum(below) + 1]


def half_is_no_slower(worker: Worker) -> bool:
    """Returns True if products take no longer in bfloat16 than in float32, on every rank."""
    times_s = {torch.float32: [], torch.bfloat16: []}
    for _ in range(ROUNDS + WARMUP):
        for dtype, seconds in times_s.items():
            matrix = torch.ones(PRODUCT, PRODUCT, dtype=dtype, device=worker.device)
            seconds.append(seconds_of(partial(torch.mm, matrix, matrix), worker))
    float32_s, half_s = (median(seconds[WARMUP:]) for seconds in times_s.values())
    return all(worker.gather(half_s <= float32_s))


def _rows(iteration: int, seconds: Mapping[str, float]) -> list[Row]:
    return [
        {"iteration": iteration, "part": part, "time_ms": s * 1e3} for part, s in seconds.items()
    ]


class _Messages:
    """The collectives of all sharded plans, each size once."""

    def __init__(self, question: Question, plans: list[Plan], worker: Worker) -> None:
        self.worker = worker
        self.groups: dict[tuple[str, int], object] = {}
        hybrid = next((plan for plan in plans if plan.strategy == "HYBRID_SHARD"), None)
        if hybrid:
            mesh = make_mesh(worker, hybrid.strategy, question.ranks_per_node)
            inside, between = (mesh.get_group(name) for name in ("shard", "replicate"))
            for operation in ("all_gather", "reduce_scatter"):
                self.groups[operation, question.ranks_per_node] = inside
            self.groups["all_reduce", question.ranks // question.ranks_per_node] = between
        sizes = {
            (call.operation, call.group_size, call.size_bytes)
            for plan in plans
            for call in collectives_of(question, plan)
            if call.size_bytes
        }
        kinds = Counter(call[:2] for call in sizes)
        # A curve has two sizes at least, and a model without blocks has one message.
        doubled = {(*call[:2], 2 * call[2]) for call in sizes if kinds[call[:2]] == 1}
        self.sizes = sorted(sizes | doubled)

    def visit(self) -> list[Row]:
        """Times each; returns this rank's rows of COLLECTIVE_COLUMNS, but for round and rank."""
        rows = []
        for operation, ranks, size_bytes in self.sizes:
            group = self.groups.get((operation, ranks))
            call = collective_call(operation, size_bytes, ranks, self.worker, group=group)
            keys = {"operation": operation, "group_size": ranks, "size_bytes": size_bytes}
            rows += [keys | row for row in time_repeated(call, CALLS, self.worker)]
        return rows


def sizes_to_time(question: Question, plans: Iterable[Plan], free_bytes: float) -> tuple[int, int]:
    """Returns the two sizes of a micro-batch whose passes are timed: the largest, and a quarter.

    The largest is that of a plan without checkpointing, as its passes are timed as well, and of
    which a rank can hold the passes by itself, with all weights and gradients.

    ``free_bytes`` is what each rank may take.

    Raises UserError where not even the smallest passes fit, or what else a rank does alone.
    """
    plans = list(plans)
    sizes = sorted({plan.micro_batch for plan in plans})
    kept = sorted({plan.micro_batch for plan in plans if plan.checkpointing == "none"})
    fitting = [size for size in kept if alone_bytes(question, SINGLE, size) <= free_bytes]
    many = max(fitting, default=sizes[0])
    few = [size for size in sizes if size <= max(sizes[0], many // 4)][-1]
    updates = holds_all(plans)
    strategies = dict.fromkeys(_alone_as(plan) for plan in plans if plan.is_sharded)
    needs = [(alone_bytes(question, strategy, few, updates), few) for strategy in strategies]
    if updates:  # weights, gradients and moments, and no activations
        sizes_of = question.architecture
        needs.append((FLOAT32_BYTES * (sizes_of.num_parameters + 3 * sizes_of.num_trained), few))
    if any(plan.has_buckets for plan in plans):  # whose costs are those of float32
        in_float32 = replace(question, precisions=("float32",))
        needs.append((alone_bytes(in_float32, "DDP", few), few))
    need_bytes, samples = max([*needs, (alone_bytes(question, SINGLE, many), many)])
    if need_bytes > free_bytes:
        raise UserError(
            f"a rank is timed alone before anything is sharded: of {counted(samples, 'sample')} "
            f"that takes {need_bytes / 1e9:.3g} GB, and {free_bytes / 1e9:.3g} GB are free for it "
            "here; for a larger machine plan with --cluster"
        )
    return few, many


def holds_all(plans: Iterable[Plan]) -> bool:
    """Returns True if a plan lets a rank update all parameters: then all have the memory for it."""
    return any(plan.strategy in (SINGLE, "DDP") for plan in plans)


def alone_bytes(question: Question, strategy: str, samples: int, updates: bool = False) -> float:
    """Returns the peak of a rank's step by itself, in the precision that takes most.

    Without ``updates`` there is nothing that AdamW keeps.
    """
    plans = [Plan(strategy, samples, precision=precision) for precision in question.precisions]
    peaks = [
        predict_training_memory(
            passes_of(question, plan), replace(sharding_of(question, plan), ranks=1)
        ).peak_bytes
        for plan in plans
    ]
    moments = 0 if updates else MOMENTS_BYTES * question.architecture.num_trained
    return max(peaks) - moments
