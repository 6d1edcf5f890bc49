"""A run whose micro-batches a planner chooses: each rank's own, anew every step.

The plan of a step is made on every rank alike, by a thread that runs ahead. ``PlannedRun`` is what
``text_trainer`` trains; ``PlannedBatches`` is its source of micro-batches.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from common.runtime.group.process_group import Worker
from common.runtime.paths import relative_to_project
from common.runtime.records.recorder import Recorder
from common.runtime.records.run_directory import write_atomically
from common.scheduling.cost import Cost, TokensCost, TokensSquaredCost
from common.scheduling.loader import AheadLoader, MicroBatch, collate
from common.scheduling.modes import StepPlan
from common.scheduling.rank_speeds import RankCosts
from common.training.evaluation import LabelledBatch, own_batches
from common.training.micro_batches.config import MicroBatchConfig, slow_factor_of
from common.training.micro_batches.log import MicroBatchLog
from common.training.micro_batches.micro_batch_step import StepParts
from common.training.scaling.cost_calibration import calibrate, exchange_ratios
from common.training.texts.task import Task, open_task, planner_for

EVALUATION_BATCH = 32
"""Texts of an evaluation's batch on a rank, unless its limit is lower."""


class PlannedRun:
    """The texts, the step and the planner of a run. All ranks open it."""

    def __init__(self, config: MicroBatchConfig, worker: Worker) -> None:
        self.config, self.worker = config, worker
        slow_factor = slow_factor_of(worker, config.slow_rank, config.slow_factor)
        self.task = open_task(
            config,
            worker,
            slow_factor,
            config.eval_samples,
            lr=config.lr,
            weight_decay=config.weight_decay,
        )
        self.planner = planner_for(config, config.mode, self.task, worker)
        self.step = self.task.step
        self.model = self.step.exchange.model
        self.kind = f"assignment3-{config.mode}"
        every = config.eval_every or config.steps
        self.spans = [
            range(first, min(first + every, config.steps))
            for first in range(0, config.steps, every)
        ]

    def without_effect(self) -> list[str]:
        """Returns the settings that this run ignores, each with the reason."""
        return self.config.without_effect()

    def facts(self) -> dict[str, object]:
        """Returns the entries of ``config.yaml`` that are not among the settings."""
        return self.task.facts()

    def validation_batches(self) -> Iterator[LabelledBatch]:
        """Yields this rank's part of the validation split."""
        data = self.task.validation
        batch_size = min(EVALUATION_BATCH, self.task.limits[self.worker.rank])
        for group in own_batches(data.lengths, batch_size, self.worker):
            plan = StepPlan((tuple(group),), data.lengths)
            batch = collate(data, plan, 0).to(self.worker.device)
            yield (batch.input_ids, batch.attention_mask), batch.labels

    @contextmanager
    def begin(self, recorder: Recorder) -> Iterator[tuple[PlannedBatches, MicroBatchLog]]:
        """Measures what a micro-batch costs, if plans go by that; yields the source and the log."""
        config, worker = self.config, self.worker
        cost = choose_cost(config, self.task, worker, recorder)
        log = MicroBatchLog(worker, recorder, config, len(self.task.validation.labels))
        began = time.perf_counter()
        with AheadLoader(self.task.train, worker.rank, pin=worker.device.type == "cuda") as loader:
            yield PlannedBatches(self, cost, loader), log
        log.say(f"Training completed in {time.perf_counter() - began:.1f}s")
        if recorder.run:
            path = recorder.run.path
            remembered = path.parent / f"last_run_{config.mode}.txt"
            write_atomically(remembered, f"{relative_to_project(path)}\n")


class PlannedBatches:
    """Micro-batches of this rank in the order of the steps, planned some steps before their use.

    ``cost`` is what plans go by: fixed, or that of each rank, which is corrected in training.
    """

    def __init__(self, run: PlannedRun, cost: Cost | RankCosts, loader: AheadLoader) -> None:
        self.config, self.worker, self.planner = run.config, run.worker, run.planner
        self.limits, self.loader, self.cost = run.task.limits, loader, cost
        self.ranks = cost if isinstance(cost, RankCosts) else None
        self.taken = 0
        ahead = max(1, self.config.buffer_size // self.config.global_batch)
        for _ in range(min(ahead, self.config.steps)):
            self._request()

    def begin(self, span: int) -> Callable[[], MicroBatch]:
        """Returns the function that gives the next micro-batch, whatever the span."""
        return self.next_batch

    def next_batch(self) -> MicroBatch:
        """Returns the next step's micro-batch, and requests one that is further ahead.

        If costs are calibrated, ranks exchange their speeds every ``refine_every`` steps.
        """
        if self.ranks and self.taken and self.taken % self.config.refine_every == 0:
            exchange_ratios(self.ranks, self.worker)
        batch = self.loader.take()
        self.taken += 1
        self._request()
        return batch

    def learn(self, parts: StepParts, batch: MicroBatch) -> None:
        """Notes what the micro-batch cost; one computed in halves tells nothing of it."""
        if self.ranks and not parts.halvings:
            self.ranks.note(len(batch.labels), batch.longest, parts.compute_s)

    def _request(self) -> None:
        step = self.taken + len(self.loader)
        if step < self.config.steps:
            cost = self.ranks.costs if self.ranks else self.cost
            self.loader.request(functools.partial(self.planner, step, cost, self.limits))


def choose_cost(
    config: MicroBatchConfig, task: Task, worker: Worker, recorder: Recorder
) -> Cost | RankCosts:
    """Returns the cost of a micro-batch in the run's plans; measures it if it is calibrated."""
    if config.mode != "dynamic" or config.cost_type == "tokens":
        return TokensCost()
    if config.cost_type == "tokens_sq":
        return TokensSquaredCost()
    return calibrate(config, task, worker, recorder)
