"""One training step under each strategy, in rotated order, on the same ranks: which is fastest?

Beside DDP and FSDP there are two ways to do without communication: ``single`` is one rank that does
the whole global batch while the others wait, which is what a speedup is measured against; ``local``
is every rank with its own part of it at the same time, and no exchange: the computation that a
prediction starts from.
"""

from __future__ import annotations

import functools
import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Annotated

import pandas as pd
import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from common.analysis.data_parallel.strategies import read_strategies
from common.analysis.runs import Run
from common.data.batches import random_tokens
from common.errors import UserError
from common.exercises.sharded_optimizer import ShardedOptimizer
from common.perfmodel.ddp.step import BUCKET_VIEW
from common.perfmodel.fsdp.communication import (
    all_broadcasts,
    gathered_item_bytes,
    step_collectives,
)
from common.perfmodel.one_device.workload import Workload
from common.runtime.group.collective_timing import collective_call, time_repeated
from common.runtime.group.gradient_marks import (
    READY_COLUMNS,
    ready_marks,
    ready_rows,
    ready_seconds,
)
from common.runtime.group.one_rank_group import own_group
from common.runtime.group.process_group import Worker, process_group
from common.runtime.group.socket_bytes import sent_bytes
from common.runtime.progress import Progress
from common.runtime.records.recorder import Recorder, record_run
from common.runtime.seeding import seed_everything
from common.runtime.timing import clock_for
from common.samples import per_round
from common.settings import AtLeast, NonEmpty, OneOf, Positive, RankOptions, RoundOptions, Seed
from common.tables import STRATEGY_COLUMNS
from common.training.config import (
    DDP_STRATEGIES,
    FSDP_STRATEGIES,
    OWN_STRATEGIES,
    TrainingConfig,
    config_of,
)
from common.training.parallel import gradient_sync, parallelise, refuse_unshardable
from common.training.step import TrainingStep, build_model

STRATEGIES = ("single", "local", "DDP", "FULL_SHARD", "SHARD_GRAD_OP")
"""Strategies that are compared unless others are asked for."""
KNOWN = (*STRATEGIES, *OWN_STRATEGIES)
ALONE = "alone"
ALONE_COLUMNS = ("strategy", "accumulation", "round", "iteration", "rank", "step_time_ms")
COLLECTIVE_COLUMNS = ("operation", "size_bytes", "round", "iteration", "rank", "time_ms")
LOCAL_COLUMNS = (
    "accumulation",
    "round",
    "iteration",
    "rank",
    "before_time_ms",
    "backward_time_ms",
    "update_time_ms",
)


@dataclass(frozen=True)
class StrategyBenchmark(RoundOptions, RankOptions):
    """Time one training step under each strategy, in rounds whose order rotates.

    Recipe: uv run torchrun --nproc_per_node=2 assignments/assignment1/compare_strategies.py
    --accumulations 1 4. Every visit to a strategy is a fresh instance. Writes strategy-times.csv
    (raw, one row per measured step and rank, with the bytes that the rank sent where its sockets
    tell), local-times.csv and gradient-ready-times.csv (the computation without communication), and
    with --parts alone-times.csv (FSDP on a mesh of one rank: its own work, without a message) and
    collective-times.csv (each collective of an FSDP step by itself).
    Settings may also come from --config FILE (a YAML file; flags win).
    """

    strategies: Annotated[tuple[str, ...], NonEmpty, OneOf(KNOWN, "strategy")] = STRATEGIES
    """single, local, DDP, FULL_SHARD, SHARD_GRAD_OP; and the exercises' MY_DDP, MY_BUCKETS,
    MY_ZERO1, MY_FSDP."""
    accumulations: Annotated[tuple[int, ...], NonEmpty, AtLeast(1)] = (1,)
    """Micro-batches per step and rank; each is measured."""
    model: str = "gpt2-large"
    """Name of a GPT-2 configuration, as gpt2-large."""
    micro_batch_size: Annotated[int, Positive] = 4
    """Sequences per forward pass of a rank."""
    seq_len: Annotated[int, Positive] = 1024
    """Tokens of a sequence."""
    precision: str = "float32"
    """float32 or bfloat16."""
    bucket_cap_mb: float | None = None
    """Bucket cap of DDP and MY_BUCKETS in MiB; by default a first bucket of 1 MiB, then 25."""
    parts: bool = False
    """Also measure, in the same rounds, what FSDP's steps are predicted from."""
    rounds: Annotated[int, Positive] = 6
    """Rounds, at least; each visits every strategy once."""
    num_steps: Annotated[int, Positive] = 4
    """Measured steps per visit."""
    warmup_steps: Annotated[int, AtLeast(3, "DDP forms its buckets in the first two")] = 3
    """Steps before the measured ones; at least 3, as DDP forms its buckets in the first two."""
    seed: Annotated[int, Seed] = 42
    """Seed of the initial weights and of the random tokens."""
    output_dir: str = "outputs/assignment1"

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("strategies", "accumulations"):
            values = getattr(self, name)
            if len(set(values)) < len(values):
                raise UserError(f"{name} {', '.join(map(str, values))}: give each once")
        self.workload(1)
        for name in self.strategies:
            self.strategy_config(name)

    def workload(self, accumulation: int) -> Workload:
        """Makes one rank's workload of a step.

        Raises UserError for sizes that do not go together.
        """
        return Workload(
            model=self.model,
            batch_size=self.micro_batch_size,
            seq_len=self.seq_len,
            precision=self.precision,
            optimizer_implementation="fused",
            gradient_accumulation=accumulation,
        )

    @property
    def sharded(self) -> tuple[str, ...]:
        """Returns the strategies that are FSDP's."""
        return tuple(name for name in self.strategies if name in FSDP_STRATEGIES)

    def strategy_config(self, strategy: str) -> TrainingConfig:
        """Returns the configuration by which a strategy wraps the model."""
        common = {"model": self.model, "precision": self.precision}
        if strategy in DDP_STRATEGIES and strategy != "MY_DDP":
            common["bucket_cap_mb"] = self.bucket_cap_mb
        return config_of("single" if strategy == "local" else strategy, **common)


def main(settings: StrategyBenchmark) -> None:
    """Runs the benchmark and prints each strategy's step and speedup."""
    with process_group(settings.device, settings.backend) as worker:
        if worker.world_size < 2:
            raise UserError("compare_strategies needs 2 ranks or more; start it with torchrun")
        for strategy in settings.sharded:
            refuse_unshardable(strategy, worker)
        facts = {BUCKET_VIEW: settings.strategy_config("DDP").gradient_as_bucket_view}
        with record_run(
            settings, "compare_strategies", worker, recorded_settings=facts
        ) as recorder:
            measure(settings, recorder)
        if recorder.run:  # only now the witness has judged the machine
            compared = read_strategies(Run(recorder.run.path, recorder.run.path))
            table = compared.summary().drop(columns="judged")
            print(table.to_string(index=False, float_format="{:,.2f}".format))
            print(f"Written to {recorder.run.path}")


def measure(settings: StrategyBenchmark, recorder: Recorder) -> None:
    """Visits all strategies in rotated rounds, and writes the rows of all ranks."""
    worker = recorder.worker
    times = recorder.stream("strategy-times.csv", STRATEGY_COLUMNS)
    local = recorder.stream("local-times.csv", LOCAL_COLUMNS)
    ready = recorder.stream("gradient-ready-times.csv", READY_COLUMNS)
    alone = recorder.stream("alone-times.csv", ALONE_COLUMNS) if settings.parts else None
    single = recorder.stream("collective-times.csv", COLLECTIVE_COLUMNS) if settings.parts else None
    names = list(settings.strategies)
    if settings.parts:
        names += [f"{name} {ALONE}" for name in settings.sharded]
    arms = [(name, count) for count in settings.accumulations for name in names]
    of_one = (
        DeviceMesh.from_group(own_group(worker), worker.device.type) if settings.parts else None
    )
    progress = Progress(settings.rounds * len(arms), worker.is_main)
    rounds = recorder.rounds(
        arms,
        settings,
        stage="strategies",
        times=lambda: step_times_by_round(times.table()),
        progress=progress,
    )
    for visited, (round_, (strategy, accumulation)) in enumerate(rounds, start=1):
        name = strategy.removesuffix(f" {ALONE}")
        is_alone = name != strategy
        mesh = of_one if is_alone else None
        visit = _Visit(settings, name, accumulation, round_, worker, mesh)
        rows = visit.run()
        keys = {"strategy": name, "accumulation": accumulation, "round": round_}
        if is_alone:
            for row in rows:
                del row["sent_bytes"]
        (alone if is_alone else times).write([keys | row for row in rows])
        if strategy == "local":
            keys = {"accumulation": accumulation, "round": round_}
            local.write([keys | row for row in visit.local_rows])
            first = accumulation == settings.accumulations[0]
            ready.write(visit.ready_rows if first else [])
        del visit
        gc.collect()  # DDP's hooks and buckets, FSDP's parameters
        progress.step(f"round {round_ + 1}, {strategy} × {accumulation}")
        if single and visited % len(arms) == 0:
            single.write([{"round": round_} | row for row in time_collectives(settings, worker)])


def step_times_by_round(times: pd.DataFrame) -> pd.DataFrame:
    """Returns the median step in ms: a row per round, a column per strategy and accumulation."""
    arms = times["strategy"] + " × " + times["accumulation"].astype(str)
    return per_round(times.assign(arm=arms), "step_time_ms", "arm")


def time_collectives(settings: StrategyBenchmark, worker: Worker) -> list[dict]:
    """Times each collective of the FSDP strategies' steps by itself, one call after another.

    Each has the dtype that the step sends: blocks may be gathered in bfloat16. The broadcasts of
    MY_ZERO1 are under way together, and are timed as one.

    Returns this rank's rows of COLLECTIVE_COLUMNS, but for the round and the rank.
    """
    config, ranks = settings.workload(1).config, worker.world_size
    calls: dict[tuple[str, int], Callable[[], object]] = {}
    for (operation, size_bytes), dtype in sharded_messages(settings, ranks).items():
        call = collective_call(operation, size_bytes, ranks, worker, dtype=dtype)
        calls[operation, size_bytes] = call
    if "MY_ZERO1" in settings.strategies:
        sent = all_broadcasts(step_collectives(config, "MY_ZERO1", ranks))
        model = build_model(settings.workload(1), worker.device)
        updated = ShardedOptimizer(model.parameters(), torch.optim.SGD, lr=0.0)
        calls[sent.operation, sent.size_bytes] = updated.send_parameters
    return [
        {"operation": operation, "size_bytes": size_bytes} | row
        for (operation, size_bytes), call in calls.items()
        for row in time_repeated(call, settings.num_steps, worker)
    ]


def sharded_messages(settings: StrategyBenchmark, ranks: int) -> dict[tuple[str, int], torch.dtype]:
    """Returns operation and bytes of each distinct collective of the FSDP steps, and its dtype."""
    dtypes: dict[tuple[str, int], torch.dtype] = {}
    for strategy in settings.sharded:
        item_bytes = gathered_item_bytes(strategy, settings.precision)
        collectives = step_collectives(
            settings.workload(1).config, strategy, ranks, parameter_bytes=item_bytes
        )
        for collective in collectives:
            operation, unit = collective.operation, collective.unit
            halved = item_bytes == 2 and (operation, unit) == ("all_gather", "block")
            dtype = torch.bfloat16 if halved else torch.float32
            dtypes[operation, collective.size_bytes] = dtype
    return dict(sorted(dtypes.items(), key=lambda item: item[0]))


class _Visit:
    """A fresh instance of a strategy, and its measured steps on this rank."""

    def __init__(
        self,
        settings: StrategyBenchmark,
        strategy: str,
        accumulation: int,
        round_: int,
        worker: Worker,
        mesh: DeviceMesh | None = None,
    ) -> None:
        self.settings, self.strategy, self.worker = settings, strategy, worker
        self.round = round_
        # One rank alone does what all do together.
        passes = accumulation * (worker.world_size if strategy == "single" else 1)
        workload = settings.workload(passes)
        config = settings.strategy_config(strategy)
        self.model = parallelise(build_model(workload, worker.device), config, worker, mesh)
        self.step = TrainingStep(
            workload,
            worker.device,
            model=self.model,
            gradient_sync=functools.partial(gradient_sync, self.model, strategy),
            max_gradient_norm=1.0,
            shard_states=strategy == "MY_ZERO1",
        )
        seed_everything(settings.seed, worker.rank)
        self.batches = [
            random_tokens(
                batch_size=settings.micro_batch_size,
                sequence_length=settings.seq_len,
                vocab_size=workload.config.vocab_size,
                device=worker.device,
            )
            for _ in range(passes)
        ]
        self.local_rows: list[dict] = []
        self.ready_rows: list[dict] = []

    def run(self) -> list[dict]:
        """Runs warm-up and measured steps; returns a row for each of the latter."""
        steps = range(-self.settings.warmup_steps, self.settings.num_steps)
        clock = clock_for(self.worker.device)
        rows = []
        idle = self.strategy == "single" and not self.worker.is_main
        with marked(self.model, clock, self.strategy == "local") as (ready, forward_ends):
            for iteration in steps:
                self.worker.barrier()
                if idle:
                    continue
                sent_before = sent_bytes()
                clock.wait()
                start = clock.mark()
                self.step.run(self.batches)
                end = clock.mark()
                clock.wait()
                sent = sent_bytes()
                if iteration < 0:
                    continue
                step_ms = clock.elapsed_s(start, end) * 1e3
                exchanged = None if None in (sent, sent_before) else sent - sent_before
                row = {"step_time_ms": step_ms, "sent_bytes": exchanged}
                rows.append({"iteration": iteration} | row)
                if ready:
                    self._note_parts(iteration, start, forward_ends[-1], end, ready, clock)
        self.worker.barrier()
        return rows

    def _note_parts(self, iteration: int, start, forward_end, end, ready: dict, clock) -> None:
        """Notes the parts of a step without communication, from which predictions are made."""
        at = ready_seconds(ready, forward_end, clock)
        backward_s = max(at.values())
        parts = {
            "before_time_ms": clock.elapsed_s(start, forward_end) * 1e3,
            "backward_time_ms": backward_s * 1e3,
            "update_time_ms": (clock.elapsed_s(forward_end, end) - backward_s) * 1e3,
        }
        self.local_rows.append({"iteration": iteration} | parts)
        over_rounds = self.round * self.settings.num_steps + iteration
        self.ready_rows += ready_rows(self.model, at, over_rounds)


@contextmanager
def marked(model: nn.Module, clock, enabled: bool) -> Iterator[tuple[dict, list]]:
    """Yields marks of each gradient's last moment and of the ends of all forward passes so far.

    Both are empty unless ``enabled``.
    """
    if not enabled:
        yield {}, []
        return
    ends: list = []
    hook = model.register_forward_hook(lambda *_: ends.append(clock.mark()))
    with hook, ready_marks(model, clock) as ready:
        yield ready, ends
