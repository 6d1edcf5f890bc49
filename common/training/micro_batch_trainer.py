"""Fine-tunes a text classifier with DDP; each rank's micro-batch is chosen anew every step.

Read ``train_micro_batches`` from top to bottom: texts, model, what memory holds, what a micro-batch
costs, then step after step. The plan of a step is made on every rank alike, by a thread that runs
ahead.
"""

from __future__ import annotations

import functools
import logging
import time
from collections.abc import Callable
from pathlib import Path

from common.runtime.paths import relative_to_project
from common.runtime.process_group import Worker, process_group
from common.runtime.recorder import Recorder, record_run
from common.runtime.run_directory import write_atomically
from common.scheduling.cost import TokensCost, TokensSquaredCost
from common.scheduling.loader import AheadLoader, MicroBatch
from common.scheduling.modes import Planner, StepPlan
from common.scheduling.speeds import RankCosts
from common.training.cost_calibration import calibrate, exchange_ratios
from common.training.memory_watch import PeakMemory
from common.training.micro_batch_config import MicroBatchConfig
from common.training.micro_batch_log import MicroBatchLog
from common.training.schedule import linear, set_learning_rate
from common.training.text_task import Task, evaluate_task, open_task, planner_for, task_facts

logger = logging.getLogger(__name__)

EVALUATION_COLUMNS = ("rank", "step", "samples", "loss", "accuracy")


def train_micro_batches(config: MicroBatchConfig) -> None:
    """Trains as ``config`` says, writes the run directory and prints what is done.

    Raises:
        UserError: settings, data or model that do not go together.
        RunFailed: a single text needs more memory than a rank has.
    """
    with process_group(config.device, config.backend) as worker:
        config = config.resolved(worker)
        task = open_task(config, worker, config.slow_factor_of(worker), config.eval_samples)
        planner = planner_for(config, config.mode, task, worker)
        for setting in config.without_effect() if worker.is_main else ():
            logger.warning("without effect: %s", setting)
        with record_run(
            config,
            f"assignment3-{config.mode}",
            worker,
            recorded_settings=task_facts(task, worker),
        ) as recorder:
            costs = choose_costs(config, task, worker, recorder)
            run_steps(config, task, planner, costs, worker, recorder)
            if recorder.run:
                print(f"Written to {relative_to_project(recorder.run.path)}")
                remember_run(config.mode, recorder.run.path)


def run_steps(
    config: MicroBatchConfig,
    task: Task,
    planner: Planner,
    costs: StepCosts,
    worker: Worker,
    recorder: Recorder,
) -> None:
    """Runs all steps, records their times, and evaluates in between."""
    say = functools.partial(print, flush=True) if worker.is_main else lambda line: None
    evaluations = recorder.stream("evaluations.csv", EVALUATION_COLUMNS)
    log = MicroBatchLog(worker, recorder, config.discard_steps)
    ahead = max(1, config.buffer_size // config.global_batch)
    peak = PeakMemory(worker.device)
    began = time.perf_counter()
    with AheadLoader(task.train, worker.rank, pin=worker.device.type == "cuda") as loader:
        for index in range(min(ahead, config.steps)):
            loader.request(costs.plan(planner, index))
        for index in range(config.steps):
            lr = linear(index, config.lr, config.warmup_steps, config.steps)
            set_learning_rate(task.step.optimizer, lr)
            peak.start()

            # Called inside the step, so that the time that it holds the step up is counted.
            def next_batch(index: int = index) -> MicroBatch:
                costs.refine(index, worker)
                batch = loader.take()
                if index + ahead < config.steps:
                    loader.request(costs.plan(planner, index + ahead))
                return batch

            parts, batch = task.step.run(next_batch)
            if not parts.halvings:
                costs.note(batch, parts.compute_s)
            log.add(index, batch, parts, peak.peak_bytes(), lr)
            done = index + 1
            if done % config.log_every == 0 or done == config.steps:
                newest = log.flush()
                if newest:
                    say(
                        f"step={newest['step']} | loss={newest['loss']:.4f} | lr={lr:.2e} | "
                        f"time={newest['step_time_ms']:.0f} ms"
                    )
            if done == config.steps or (config.eval_every and done % config.eval_every == 0):
                loss, accuracy = evaluate_task(task, worker)
                count = len(task.validation.labels)
                row = {"step": done, "samples": count, "loss": loss, "accuracy": accuracy}
                evaluations.write([row] if worker.is_main else [])
                say(f"after {done} steps: accuracy {accuracy:.4f} on {count:,} texts")
    say(f"Training completed in {time.perf_counter() - began:.1f}s")


class StepCosts:
    """The cost of micro-batches in plans: fixed, or calibrated and corrected in training."""

    def __init__(self, config: MicroBatchConfig, limits: list[int], cost: object) -> None:
        self.limits, self.refine_every = limits, config.refine_every
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
        return StepCosts(config, task.limits, TokensCost())
    if config.cost_type == "tokens_sq":
        return StepCosts(config, task.limits, TokensSquaredCost())
    return StepCosts(config, task.limits, calibrate(config, task, worker, recorder))


def remember_run(mode: str, folder: Path) -> None:
    """Writes the run directory's path to ``last_run_<mode>.txt`` beside it."""
    path = relative_to_project(folder)
    write_atomically(folder.parent / f"last_run_{mode}.txt", f"{path}\n")
