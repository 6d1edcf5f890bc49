"""The cost of a micro-batch on each rank, timed at the start over batch sizes and lengths."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pandas as pd
import torch
import torch.distributed as dist

from common.runtime.group.process_group import Worker
from common.runtime.records.recorder import Recorder
from common.scheduling.cost import CalibratedCost
from common.scheduling.loader import MicroBatch
from common.scheduling.modes import StepPlan
from common.scheduling.rank_speeds import RankCosts
from common.tables import CALIBRATION_COLUMNS
from common.training.micro_batches.config import TextSettings
from common.training.micro_batches.micro_batch_step import MicroBatchStep
from common.training.texts.task import Task

LENGTHS = 4
REPEATS = 3
"""Timed passes of each size, in rotated order, after one for warm-up."""


def calibration_sizes(
    lengths: Sequence[int], world_size: int, global_batch: int, limit: int
) -> list[tuple[int, int]]:
    """Returns the (batch size, longest text in tokens) pairs to time, which span those of plans.

    Lengths go from a short text's to the longest, batch sizes up by factors of four; no pair has
    more padded tokens than the worst micro-batch of equal counts.

    Args:
        lengths: tokens of each text of the data set.
        limit: upper bound on the texts of a micro-batch.
    """
    # Lengths are spaced geometrically, from the 5 % quantile to the maximum. Equal counts give a
    # rank ``per_rank`` texts, of the longest at worst: those padded tokens bound every pair. A
    # dynamic plan leaves each other rank at least one text, which bounds the batch size.
    short, longest = np.quantile(lengths, 0.05), np.max(lengths)
    chosen = np.unique(np.geomspace(max(short, 3), longest, LENGTHS).round().astype(int))
    per_rank = -(-global_batch // world_size)
    most = min(limit, global_batch - world_size + 1)
    sizes = set()
    for length in chosen.tolist():
        fitting = max(1, min(most, int(per_rank * longest // length)))
        sizes |= {(batch, length) for batch in (1, 4, 16, 64, 256) if batch < fitting}
        sizes.add((fitting, length))
    return sorted(sizes)


def time_sizes(
    step: MicroBatchStep, sizes: Sequence[tuple[int, int]], vocab_size: int, recorder: Recorder
) -> list[dict]:
    """Times forward and backward pass of each size; returns rows of CALIBRATION_COLUMNS.

    The rows lack the rank. All ranks time the same size at the same time, as in training: they
    share memory and, on a laptop, more than that. Nothing is exchanged, and gradients are dropped.

    ``sizes`` are (batch size, longest text in tokens) pairs, the same on all ranks.
    """
    worker = recorder.worker
    batches = [(size, random_batch(size, vocab_size, worker)) for size in sizes]
    rows = []
    # Repeat -1 is the warm-up.
    rounds = recorder.rounds(batches, REPEATS, stage="calibration", first=-1)
    for repeat, ((batch_size, longest), batch) in rounds:
        worker.barrier()
        time_s = step.local_pass(batch)
        if repeat >= 0:
            row = {"batch_size": batch_size, "longest": longest}
            rows.append(row | {"repeat": repeat, "time_ms": time_s * 1e3})
    return rows


def fit_cost(samples: pd.DataFrame) -> CalibratedCost:
    """Fits a cost to the rows of ``time_sizes``, of one rank or of several alike."""
    # The median over repeats stands for each size, as a single slow pass must not move the fit.
    sizes = samples.groupby(["batch_size", "longest"], as_index=False)["time_ms"].median()
    return CalibratedCost.fit(sizes["batch_size"], sizes["longest"], sizes["time_ms"] / 1e3)


def random_batch(size: tuple[int, int], vocab_size: int, worker: Worker) -> MicroBatch:
    """Draws a micro-batch of (batch size, length in tokens), as if every rank had that size."""
    batch_size, longest = size
    generator = torch.Generator().manual_seed(worker.rank)
    tokens = torch.randint(vocab_size, size, generator=generator)
    ranks = worker.world_size
    # The loss is scaled by the plan's totals, so the plan gives every rank texts of this size.
    groups = np.arange(batch_size * ranks).reshape(ranks, batch_size)
    plan = StepPlan(tuple(map(tuple, groups.tolist())), np.full(batch_size * ranks, longest))
    mask = torch.ones(size, dtype=torch.bool)
    return MicroBatch(plan, tokens, mask, torch.zeros(batch_size, dtype=torch.int64))


def calibrate(config: TextSettings, task: Task, worker: Worker, recorder: Recorder) -> RankCosts:
    """Times micro-batches on every rank, writes calibration.csv and fits the costs of all ranks."""
    sizes = calibration_sizes(
        task.train.lengths, worker.world_size, config.global_batch, min(task.limits)
    )
    rows = time_sizes(task.step, sizes, task.train.vocab_size, recorder)
    recorder.stream("calibration.csv", CALIBRATION_COLUMNS).write(rows)
    costs = worker.gather(fit_cost(pd.DataFrame(rows)))
    rank_costs = RankCosts(costs, sizes, config.speed_tolerance)
    for rank, (cost, samples) in enumerate(zip(rank_costs.costs, worker.gather(rows), strict=True)):
        table = pd.DataFrame(samples)
        error = cost.relative_error(table["batch_size"], table["longest"], table["time_ms"] / 1e3)
        if worker.is_main:
            print(
                f"Cost on rank {rank}: {cost.c0_s * 1e3:.2f} ms + {cost.c1_s * 1e6:.2f} µs·b·m + "
                f"{cost.c2_s * 1e9:.2f} ns·b·m² (off by {error:.1%}, median)"
            )
    return rank_costs


def exchange_ratios(ranks: RankCosts, worker: Worker) -> None:
    """Gathers every rank's recent time relative to the typical rank's, and updates ``ranks``."""
    own_ratio = torch.tensor([ranks.own_ratio], device=worker.device)
    every = [torch.empty_like(own_ratio) for _ in range(worker.world_size)]
    dist.all_gather(every, own_ratio)
    ranks.update([ratio.item() for ratio in every])
