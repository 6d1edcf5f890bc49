"""A run whose micro-batches a planner chooses: each rank's own, anew every step.

The plan of a step is made on every rank alike, by a thread that runs ahead. ``PlannedRun`` is what
``text_trainer`` trains; ``PlannedBatches`` is its source of micro-batches.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from common.runtime.group.process_group import Worker
from common.runtime.paths import relative_to_project
from common.runtime.records.recorder import Recorder
from common.runtime.records.run_directory import write_atomically
from common.scheduling.cost import TokensCost, TokensSquaredCost
from common.scheduling.loader import AheadLoader, MicroBatch
from common.scheduling.modes import Planner, StepPlan
from common.scheduling.rank_speeds import RankCosts
from common.training.evaluation import LabelledBatch
from common.training.micro_batches.config import MicroBatchConfig
from common.training.micro_batches.log import MicroBatchLog
from common.training.micro_batches.micro_batch_step import StepParts
from common.training.scaling.cost_calibration import calibrate, exchange_ratios
from common.training.texts.task import Task, open_task, planner_for, validation_batches


class PlannedRun:
    """The texts, the step and the planner of a run. All ranks open it.

    Raises:
        UserError: settings, data or model that do not go together.
    """

    def __init__(self, config: MicroBatchConfig, worker: Worker) -> None:
        self.config, self.worker = config, worker
        self.task = open_task(config, worker, config.slow_factor_of(worker), config.eval_samples)
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
        return validation_batches(self.task, self.worker)

    @contextmanager
    def begin(self, recorder: Recorder) -> Iterator[tuple[PlannedBatches, MicroBatchLog]]:
        """Measures what a micro-batch costs, if plans go by that; yields the source and the log."""
        config, worker = self.config, self.worker
        costs = choose_costs(config, self.task, worker, recorder)
        log = MicroBatchLog(
            worker,
            recorder,
            steps=config.steps,
            discard_steps=config.discard_steps,
            log_every=config.log_every,
            eval_texts=len(self.task.validation.labels),
        )
        ahead = max(1, config.buffer_size // config.global_batch)
        began = time.perf_counter()
        with AheadLoader(self.task.train, worker.rank, pin=worker.device.type == "cuda") as loader:
            yield PlannedBatches(self.planner, costs, loader, config.steps, ahead, worker), log
        log.say(f"Training completed in {time.perf_counter() - began:.1f}s")
        if recorder.run:
            remember_run(config.mode, recorder.run.path)


class PlannedBatches:
    """Micro-batches of this rank in the order of the steps, planned ``ahead`` steps before use."""

    def __init__(
        self,
        planner: Planner,
        costs: StepCosts,
        loader: AheadLoader,
        steps: int,
        ahead: int,
        worker: Worker,
    ) -> None:
        self.planner, self.costs, self.loader, self.worker = planner, costs, loader, worker
        self.steps, self.taken = steps, 0
        for _ in range(min(ahead, steps)):
            self._request()

    def begin(self, span: int) -> Callable[[], MicroBatch]:
        """Returns the function that gives the next micro-batch, whatever the span."""
        return self.next_batch

    def next_batch(self) -> MicroBatch:
        """Returns the next step's micro-batch, and requests one that is further ahead."""
        self.costs.refine(self.taken, self.worker)
        batch = self.loader.take()
        self.taken += 1
        self._request()
        return batch

    def learn(self, parts: StepParts, batch: MicroBatch) -> None:
        """Notes what the micro-batch cost; one computed in halves tells nothing of it."""
        if not parts.halvings:
            self.costs.note(batch, parts.compute_s)

    def _request(self) -> None:
        step = self.taken + len(self.loader)
        if step < self.steps:
            self.loader.request(self.costs.plan(self.planner, step))


class StepCosts:
    """The cost of micro-batches in plans: fixed, or calibrated and corrected in training."""

    def __init__(self, refine_every: int, limits: list[int], cost: object) -> None:
        self.limits, self.refine_every = limits, refine_every
        self.cost, self.ranks = cost, cost if isinstance(cost, RankCosts) else None

    def plan(self, planner: Planner, step: int) -> Callable[[], StepPlan]:
        """Returns a function that makes the plan of a step, under the cost as it is now."""
        cost = self.ranks.costs if self.ranks else self.cost
        return functools.partial(planner, step, cost, self.limits)

    def note(self, batch: MicroBatch, compute_s: float) -> None:
        """Records the compute time of this rank's micro-batch; does nothing for a fixed cost."""
        if self.ranks:
            self.ranks.note(len(batch.labels), batch.longest, compute_s)

    def refine(self, step: int, worker: Worker) -> None:
        """Exchanges the ranks' speeds before every ``refine_every``-th step, if calibrated."""
        if self.ranks and step and step % self.refine_every == 0:
            exchange_ratios(self.ranks, worker)


def choose_costs(
    config: MicroBatchConfig, task: Task, worker: Worker, recorder: Recorder
) -> StepCosts:
    """Returns the cost of a micro-batch in the run's plans; measures it if it is calibrated."""
    if config.mode != "dynamic" or config.cost_type == "tokens":
        cost = TokensCost()
    elif config.cost_type == "tokens_sq":
        cost = TokensSquaredCost()
    else:
        cost = calibrate(config, task, worker, recorder)
    return StepCosts(config.refine_every, task.limits, cost)


def remember_run(mode: str, folder: Path) -> None:
    """Writes the run directory's path to ``last_run_<mode>.txt`` beside it."""
    path = relative_to_project(folder)
    write_atomically(folder.parent / f"last_run_{mode}.txt", f"{path}\n")
