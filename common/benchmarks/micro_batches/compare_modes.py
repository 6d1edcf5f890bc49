"""Every mode of choosing micro-batches, in rotated order, step by step on the same global batches.

The learning rate is 0, so that the weights stay what they are: modes that make a step of the same
texts must then find the same loss, which is written down beside the times. Modes that choose other
texts are measured in the same rotation and marked. A control has texts of equal length, as many
tokens as the best plan has: what its ranks wait for is not for the schedule to remove.

Afterwards one rank is slowed down on purpose, without telling the planner.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated

import numpy as np

from common.analysis.micro_batches.calibration import CALIBRATED, NOT_TOLD, TOLD
from common.analysis.micro_batches.mode_comparison import CONTROL, STATIC, read_comparison
from common.analysis.runs import Run
from common.analysis.show import judged_format
from common.data.text_tokens import TokenizedTexts
from common.errors import UserError
from common.runtime.group.process_group import Worker, process_group
from common.runtime.paths import relative_to_project
from common.runtime.progress import Progress
from common.runtime.records.recorder import RankStream, Recorder, record_run
from common.runtime.wording import counted
from common.samples import rotated
from common.scheduling.cost import TokensCost, TokensSquaredCost
from common.scheduling.loader import AheadLoader, MicroBatch
from common.scheduling.modes import MODES, SAME_BATCH, Planner, StepPlan
from common.scheduling.rank_speeds import RankCosts
from common.settings import NonNegative, Positive
from common.tables import MODE_COLUMNS, MODE_RANK_COLUMNS
from common.training.micro_batches.config import TextSettings, slow_factor_of
from common.training.micro_batches.log import split_exchange, step_columns
from common.training.scaling.cost_calibration import calibrate, exchange_ratios
from common.training.texts.task import Task, open_task, planner_for

logger = logging.getLogger(__name__)

ARMS = {
    "static": "static",
    "dynamic": "dynamic",
    "dynamic_tokens_sq": "dynamic",
    "dynamic_calibrated": "dynamic",
    "karmarkar_karp": "karmarkar_karp",
    "length_grouped": "length_grouped",
    "token_budget": "token_budget",
}
"""Name of each arm in the tables, and its planner's mode."""
SLOW_COLUMNS = (
    *("mode", "step", "rank", "slow_factor", "estimated_factor", "expected_ms"),
    *MODE_RANK_COLUMNS,
)
Visit = tuple[str, int, int]
"""An arm, its step, and its place in the order of that step."""


@dataclass(frozen=True)
class ModeComparison(TextSettings):
    """Time every mode of choosing micro-batches on the same global batches, in rotated order.

    Recipe: uv run torchrun --nproc_per_node=2 assignments/assignment3/compare_modes.py
    --dataset sst2 --model_name small. Writes mode-times.csv (a row per step, mode and rank: the
    step, computing, waiting, planning apart), calibration.csv and slow-rank.csv.
    Settings may also come from --config FILE (a YAML file; flags win).
    """

    steps: Annotated[int, Positive] = 60
    """Global batches; each is one step of every mode."""
    warmup: Annotated[int, NonNegative] = 5
    """Global batches before the measured ones."""
    slow_steps: Annotated[int, NonNegative] = 40
    """Steps of each mode with one rank slowed down; 0 to leave that out."""
    refine_every: Annotated[int, Positive] = 10
    """Steps with a slowed rank after which ranks tell each other their times, by which
    dynamic_calibrated corrects its costs; without a slowed rank nothing is corrected."""
    slow_rank: int = -1
    """The rank that is slowed down in the slow_steps (CPU only); -1 is the last."""
    slow_factor: float = 2.0
    """How many times as long the slowed rank computes."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.slow_rank < -1:
            raise UserError(f"slow_rank is {self.slow_rank}; a rank, or -1 for the last")
        if not 1 < self.slow_factor < float("inf"):
            raise UserError(f"slow_factor is {self.slow_factor}; it must be above 1 and finite")


def main(settings: ModeComparison) -> None:
    """Runs the comparison and prints each mode's mean ratio to static."""
    with process_group(settings.device, settings.backend) as worker:
        if worker.world_size < 2:
            raise UserError("compare_modes needs 2 ranks or more; start it with torchrun")
        settings.check_ranks(worker.world_size)
        for reason in settings.without_effect() if worker.is_main else ():
            logger.warning("without effect: %s", reason)
        slow_rank = settings.slow_rank if settings.slow_rank >= 0 else worker.world_size - 1
        is_slowed = settings.slow_steps and worker.device.type == "cpu"
        if settings.slow_steps and not is_slowed and worker.is_main:
            logger.warning("without effect: slow_steps on a GPU, where sleeping slows nothing down")
        factor = slow_factor_of(worker, slow_rank, settings.slow_factor) if is_slowed else 1.0
        task = open_task(settings, worker, eval_samples=1)
        planners = {mode: planner_for(settings, mode, task, worker) for mode in MODES}
        with record_run(
            settings, "compare_modes", worker, recorded_settings=task.facts()
        ) as recorder:
            ranks = calibrate(settings, task, worker, recorder)
            compare(settings, task, planners, ranks, recorder)
            if is_slowed:
                task.step.exchange.slow_factor = factor
                slowdown = [1.0] * worker.world_size
                slowdown[slow_rank] = settings.slow_factor
                compare_slowed(settings, task, planners["dynamic"], ranks, slowdown, recorder)
        if worker.is_main:  # only now the witness has judged the machine
            print_ratios(recorder.run.path)
            print(f"Written to {relative_to_project(recorder.run.path)}")


def print_ratios(folder: Path) -> None:
    """Prints the modes of the same texts; the rest computes something else, for the notebook."""
    comparison = read_comparison(Run(folder, folder))
    print("Slowest rank's step over static's, mean of paired steps:")
    for mode, ratio in comparison.step_time_ratios_to(STATIC).items():
        print(f"  {mode:20s} {judged_format()(ratio)}, {counted(ratio.rounds, 'step')}")
    print("Other modes make their steps of other texts: see mode-times.csv by text.")


def compare(
    settings: ModeComparison,
    task: Task,
    planners: Mapping[str, Planner],
    ranks: RankCosts,
    recorder: Recorder,
) -> None:
    """Runs all modes on all global batches."""
    worker = recorder.worker
    table = recorder.stream("mode-times.csv", MODE_COLUMNS)
    costs = {name: TokensCost() for name in ARMS}
    costs |= {"dynamic_tokens_sq": TokensSquaredCost(), "dynamic_calibrated": ranks.costs}
    plans = {
        name: functools.partial(_plan, planners[mode], task, costs[name])
        for name, mode in ARMS.items()
    }
    control = control_texts(settings, task, plans["dynamic"], worker)
    visits = rotated_visits([*ARMS, CONTROL], range(-settings.warmup, settings.steps))
    progress = Progress(len(visits), worker.is_main)

    def request(loader: AheadLoader, visit: Visit) -> None:
        name, step, _ = visit
        at = step + settings.warmup
        if name == CONTROL:
            loader.request(functools.partial(plans["static"], at, control.lengths), data=control)
        else:
            loader.request(functools.partial(plans[name], at))

    rows: list[dict] = []
    for (name, step, order), columns, _, is_last in run_visits(task, worker, visits, request):
        same = ARMS.get(name) in SAME_BATCH
        keys = {"mode": name, "same_batch": same, "step": step, "order": order}
        rows.append(keys | columns)
        progress.step(f"step {step}, {name}")
        if is_last:
            if step >= 0:
                _write(table, rows, worker)
            rows = []
            recorder.witness("modes", step + 1)


def compare_slowed(
    settings: ModeComparison,
    task: Task,
    planner: Planner,
    ranks: RankCosts,
    slowdown: Sequence[float],
    recorder: Recorder,
) -> None:
    """Measures steps with a slowed rank: planned untold, corrected by calibration, and told.

    ``estimated_factor`` is what the step's plan took the rank's slowness to be, ``expected_ms`` the
    plan's bottleneck for ranks as slow as they really are.
    """
    worker = recorder.worker
    table = recorder.stream("slow-rank.csv", SLOW_COLUMNS)
    slowed_costs = [cost.scaled(by) for cost, by in zip(ranks.costs, slowdown, strict=True)]
    rank_factors = {
        NOT_TOLD: ranks.factors,
        TOLD: [a * b for a, b in zip(ranks.factors, slowdown, strict=True)],
    }
    visits = rotated_visits([NOT_TOLD, CALIBRATED, TOLD], range(settings.slow_steps))

    def request(loader: AheadLoader, visit: Visit) -> None:
        name, step, _ = visit
        factors = rank_factors.get(name, ranks.factors)
        costs = [ranks.base.scaled(factor) for factor in factors]
        loader.request(functools.partial(_plan, planner, task, costs, step), tag=factors)

    def refine(visit: Visit) -> None:
        name, step, _ = visit
        if name == CALIBRATED and step and step % settings.refine_every == 0:
            exchange_ratios(ranks, worker)

    rows: list[dict] = []
    visited = run_visits(task, worker, visits, request, refine)
    for (name, step, _), columns, batch, is_last in visited:
        del columns["loss"], columns["global_batch"]
        if name == CALIBRATED:
            ranks.note(
                batch_size=columns["local_batch"],
                longest=columns["max_seq_len_in_batch"],
                measured_s=columns["compute_time_ms"] / 1e3,
            )
        keys = {
            "mode": name,
            "step": step,
            "slow_factor": slowdown[worker.rank],
            "estimated_factor": batch.tag[worker.rank],
            "expected_ms": batch.plan.slowest_cost(slowed_costs) * 1e3,
        }
        rows.append(keys | columns)
        if is_last:
            _write(table, rows, worker)
            rows = []
            recorder.witness("slowed rank", step + 1)


def control_texts(
    settings: ModeComparison, task: Task, plan: Callable[[int], StepPlan], worker: Worker
) -> TokenizedTexts:
    """Returns the same texts, each cut or repeated to one length.

    With that length, which is ``max_length`` at most, a rank's equal share of a batch has as many
    tokens as the slowest rank of a good plan has with padding: the median over 20 steps of
    ``plan``.
    """
    share = settings.global_batch / worker.world_size
    bottlenecks = [plan(step).padded_tokens.max() for step in range(20)]
    length = max(3, round(float(np.median(bottlenecks)) / share))
    length = min(length, settings.max_length)
    tokens = [(text * (length // len(text) + 1))[:length] for text in map(list, task.train.tokens)]
    return replace(task.train, tokens=tokens, lengths=np.full(len(tokens), length))


def _plan(
    planner: Planner, task: Task, cost: object, step: int, lengths: np.ndarray | None = None
) -> StepPlan:
    plan = planner(step, cost, task.limits)
    return plan if lengths is None else replace(plan, lengths=lengths)


def rotated_visits(arms: Sequence[str], steps: range) -> list[Visit]:
    """Returns the visits of all arms in each step, in rotated order."""
    return [
        (name, step, order)
        for step in steps
        for order, name in enumerate(rotated(arms, step - steps.start))
    ]


def run_visits(
    task: Task,
    worker: Worker,
    visits: Sequence[Visit],
    request: Callable[[AheadLoader, Visit], None],
    prepare: Callable[[Visit], None] = lambda visit: None,
) -> Iterator[tuple[Visit, dict, MicroBatch, bool]]:
    """Runs the step of each visit while the next one is planned.

    Args:
        request: asks for the micro-batch of a visit.
        prepare: is called inside the step, before anything else.

    Yields the visit, this rank's columns, its micro-batch, and whether it is the last of its step.
    """
    with AheadLoader(task.train, worker.rank, pin=worker.device.type == "cuda") as loader:
        request(loader, visits[0])
        for index, visit in enumerate(visits):
            following = visits[index + 1 : index + 2]

            def next_batch(visit: Visit = visit, following: Sequence[Visit] = following):
                prepare(visit)
                batch = loader.take()
                for after in following:
                    request(loader, after)
                return batch

            parts, batch = task.step.run(next_batch)
            columns = step_columns(parts, batch)
            columns |= {"global_batch": batch.plan.global_batch, "loss": parts.loss}
            is_last = not following or following[0][1] != visit[1]
            yield visit, columns, batch, is_last


def _write(table: RankStream, rows: list[dict], worker: Worker) -> None:
    """Writes the rows with their exchange split."""
    local = []
    for ranks in zip(*worker.gather(rows), strict=True):
        row = split_exchange(ranks)[worker.rank]
        if "loss" in row:
            row["loss"] = sum(other["loss"] for other in ranks)
        local.append(row)
    table.write(local)
