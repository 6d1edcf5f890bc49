"""The slowest rank's step in every mode on up to thousands of ranks, and how long planning takes.

Nothing is trained: a step costs what the calibrated model says of each rank's micro-batch.
"""

from __future__ import annotations

import gc
import itertools
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Annotated

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from common.csv_tables import read_table
from common.data.text_lengths import LengthDistribution, read_text_lengths
from common.errors import UserError
from common.runtime.paths import relative_to_project
from common.runtime.progress import Progress
from common.runtime.records.recorder import record_run, single_device
from common.runtime.records.run_directory import find_table
from common.scheduling.cost import CalibratedCost, Cost, TokensCost, TokensSquaredCost
from common.scheduling.modes import MODES, SAME_BATCH, Planner, StepPlan
from common.scheduling.packing import karmarkar_karp, largest_first
from common.scheduling.partition import min_max_contiguous
from common.settings import AtLeast, NonEmpty, NonNegative, Positive, RunOptions
from common.training.scaling.cost_calibration import fit_cost

COLUMNS = (
    "dataset",
    "world_size",
    "global_batch",
    "draw",
    "mode",
    "same_batch",
    "bottleneck_ms",
    "lower_bound_ms",
    "padded_tokens",
    "tokens",
    "samples",
)
PLANNING_COLUMNS = ("world_size", "global_batch", "cost", "repeat", "time_ms")
PACKED = {"packed_largest_first": largest_first, "packed_karmarkar_karp": karmarkar_karp}
WARMUP_PLANS = 5


@dataclass(frozen=True)
class ModeSimulation(RunOptions):
    """Simulate a step of every mode on many ranks, and time the planning of dynamic batches.

    Each draw takes the lengths of a data set from a recorded distribution. Modes that share their
    global batches are given one step of it. Those that form their own batches (same_batch False)
    are given all steps of its first epoch, and a row holds the means over these: compare them by
    bottleneck_ms / samples. The packed rows pad nothing: what could be had without padding.

    Writes simulated-bottlenecks.csv (a row per data set, world size, draw and mode) and
    planning-times.csv (a row per plan; a plan's time is from lengths to each rank's indices).
    lower_bound_ms is valid for every partition of the same samples, padded or not (see
    lower_bound_s). Settings may also come from --config FILE (a YAML file; flags win).
    """

    datasets: Annotated[tuple[str, ...], NonEmpty] = ("sst2", "ag_news", "imdb")
    """Recorded length distributions, under data/text-lengths."""
    world_sizes: Annotated[tuple[int, ...], NonEmpty, AtLeast(1)] = (8, 32, 128, 512, 1024)
    """Numbers of ranks to simulate."""
    rank_batch: Annotated[int, Positive] = 12
    """Samples a rank has on average: the global batch is this times the world size."""
    draws: Annotated[int, Positive] = 5
    """Data sets drawn for each world size."""
    samples: Annotated[int, Positive] = 50_000
    """Texts in each data set drawn; at least two global batches are drawn."""
    max_length: Annotated[int, AtLeast(1)] = 256
    """Tokens after which a text is cut."""
    c0_s: float = 3e-3
    """Constant term of a step's cost c0 + c1·b·m + c2·b·m², in seconds (b texts, the longest of m
    tokens). The defaults of c0, c1 and c2 are the small encoder's on a laptop core."""
    c1_s: float = 1.2e-4
    """Coefficient of b·m in a step's cost, in seconds per token."""
    c2_s: float = 1e-8
    """Coefficient of b·m² in a step's cost, in seconds per squared token."""
    calibration: str = ""
    """Take c0, c1 and c2 from the calibration.csv of this run directory, or (newest) of the newest
    complete run below output_dir."""
    planning_world_sizes: Annotated[tuple[int, ...], AtLeast(1)] = (64, 1024)
    """World sizes whose planning is timed; --planning-batches has the global batch of
    each."""
    planning_batches: Annotated[tuple[int, ...], AtLeast(1)] = (512, 4096)
    """Global batches whose planning is timed."""
    planning_repeats: Annotated[int, Positive] = 30
    """Plans that are timed for each world size and cost."""
    seed: Annotated[int, NonNegative] = 42
    """Seed of the drawn batches."""
    output_dir: str = "outputs/assignment3"

    def __post_init__(self) -> None:
        super().__post_init__()
        if len(self.planning_world_sizes) != len(self.planning_batches):
            raise UserError(
                f"planning_batches has {len(self.planning_batches)} values and "
                f"planning_world_sizes {len(self.planning_world_sizes)}; one batch for each"
            )
        for ranks, batch in zip(self.planning_world_sizes, self.planning_batches, strict=True):
            if batch < ranks:
                raise UserError(f"planning_batches: {batch} samples for {ranks} ranks; too few")
        _ = self.cost

    @property
    def cost(self) -> CalibratedCost:
        """Returns the cost of every rank."""
        return CalibratedCost(self.c0_s, self.c1_s, self.c2_s)


def main(settings: ModeSimulation) -> None:
    """Simulates, times, and prints the medians."""
    settings = with_calibration(settings)
    distributions = [read_text_lengths(name) for name in settings.datasets]
    with (
        single_device("simulate_modes", "cpu") as worker,
        record_run(settings, "simulate_modes", worker) as recorder,
    ):
        run = recorder.run
        planning = planning_times(settings, distributions[0])
        run.write_table("planning-times.csv", planning)
        bottlenecks = run.stream("simulated-bottlenecks.csv", COLUMNS)
        rows = []
        points = list(itertools.product(distributions, settings.world_sizes, range(settings.draws)))
        progress = Progress(len(points))
        for distribution, world_size, draw in points:
            new = simulated_rows(settings, distribution, world_size, draw)
            bottlenecks.write(new)
            rows += new
            progress.step(f"{distribution.name}, {world_size} ranks")
        print(_medians(pd.DataFrame(rows)).to_string(float_format="%.3f"))
        keys = ["world_size", "global_batch", "cost"]
        medians = planning.groupby(keys, sort=False)["time_ms"].median().reset_index()
        print(medians.to_string(index=False, float_format="%.2f"))
        print(f"Written to {relative_to_project(run.path)}")


def with_calibration(settings: ModeSimulation) -> ModeSimulation:
    """Returns the settings with the cost that was calibrated, where they name a calibration.

    Raises UserError where there is no calibration.csv.
    """
    if not settings.calibration:
        return settings
    newest = settings.calibration == "newest"
    folder = Path(settings.output_dir if newest else settings.calibration)
    path = find_table(folder, "calibration.csv")
    if path is None:
        raise UserError(f"calibration: no calibration.csv of a complete run in {folder}")
    cost = fit_cost(read_table(path, ("batch_size", "longest", "time_ms")))
    return replace(settings, **asdict(cost))


def _medians(table: pd.DataFrame) -> pd.DataFrame:
    """Returns medians over draws of bottleneck over lower bound, a column per mode."""
    ratio = table["bottleneck_ms"] / table["lower_bound_ms"]
    keys = [table[key] for key in ("dataset", "world_size", "mode")]
    return ratio.groupby(keys, sort=False).median().unstack()


def simulated_rows(
    settings: ModeSimulation, distribution: LengthDistribution, world_size: int, draw: int
) -> list[dict]:
    """Returns a row of COLUMNS for every mode, of one drawn data set."""
    global_batch = settings.rank_batch * world_size
    rng = np.random.default_rng((settings.seed, draw))
    count = max(settings.samples, 2 * global_batch)
    lengths = distribution.draw(count, rng, settings.max_length)
    key = {
        "dataset": distribution.name,
        "world_size": world_size,
        "global_batch": global_batch,
        "draw": draw,
    }
    rows = []
    for mode in MODES:
        same = mode in SAME_BATCH
        planner = Planner(mode, lengths, world_size, global_batch, seed=settings.seed)
        steps = 1 if same else planner.steps_per_epoch()
        plans = (planner(step, settings.cost) for step in range(steps))
        means = pd.DataFrame([_columns(plan, settings.cost) for plan in plans]).mean().to_dict()
        rows.append(key | {"mode": mode, "same_batch": same} | means)
        if mode == "static":
            batch = np.concatenate([np.asarray(group) for group in planner(0).groups])
            packed = _packed(lengths[batch], world_size, settings.cost)
            rows += [key | {"same_batch": True} | row for row in packed]
    return rows


def _columns(plan: StepPlan, cost: CalibratedCost) -> dict:
    lengths = plan.lengths[np.concatenate([np.asarray(group) for group in plan.groups])]
    return {
        "bottleneck_ms": 1e3 * plan.slowest_cost(cost),
        "lower_bound_ms": 1e3 * lower_bound_s(lengths, len(plan.groups), cost),
        "padded_tokens": int(plan.padded_tokens.sum()),
        "tokens": plan.total_tokens,
        "samples": plan.global_batch,
    }


def _packed(lengths: NDArray, world_size: int, cost: CalibratedCost) -> Iterator[dict]:
    """Yields a row per way of packing; a rank costs c0 and what its samples cost by themselves."""
    weights = cost(1, lengths) - cost.c0_s
    total = int(lengths.sum())
    for mode, pack in PACKED.items():
        slowest = max(weights[group].sum() for group in pack(weights, world_size))
        yield {
            "mode": mode,
            "bottleneck_ms": 1e3 * (cost.c0_s + float(slowest)),
            "lower_bound_ms": 1e3 * lower_bound_s(lengths, world_size, cost),
            "padded_tokens": total,
            "tokens": total,
            "samples": len(lengths),
        }


def lower_bound_s(lengths: NDArray, world_size: int, cost: CalibratedCost) -> float:
    """Computes a lower bound (s) on the slowest rank of any partition, whether it pads or packs.

    Let w(m) = c1·m + c2·m² be a sample's own cost. A rank with samples m_1 … m_b, padded to the
    longest, takes c0 + b·w(max m_i) ≥ c0 + Σ w(m_i), which packed it takes exactly. The slowest
    rank is at least the mean of all, c0 + Σ w / G, and some rank has the longest sample: c0 + w(m).
    """
    # Whole numbers add up to the same in any order.
    work_s = cost.c1_s * int(lengths.sum()) + cost.c2_s * int((lengths**2).sum())
    return max(cost.c0_s + work_s / world_size, float(cost(1, int(lengths.max()))))


def planning_times(settings: ModeSimulation, distribution: LengthDistribution) -> pd.DataFrame:
    """Measures the time of each plan, for batches drawn anew every time."""
    rng = np.random.default_rng(settings.seed)
    costs = {"tokens": TokensCost(), "tokens_sq": TokensSquaredCost(), "calibrated": settings.cost}
    sizes = zip(settings.planning_world_sizes, settings.planning_batches, strict=True)
    rows = []
    for (world_size, batch), (name, cost) in itertools.product(list(sizes), costs.items()):
        plans = range(-WARMUP_PLANS, settings.planning_repeats)
        drawn = [distribution.draw(batch, rng, settings.max_length) for _ in plans]
        times = _time_plans(drawn, world_size, cost)[WARMUP_PLANS:]
        rows += [
            dict(zip(PLANNING_COLUMNS, (world_size, batch, name, repeat, time_ms), strict=True))
            for repeat, time_ms in enumerate(times)
        ]
    return pd.DataFrame(rows, columns=list(PLANNING_COLUMNS))


def _time_plans(batches: Sequence[NDArray], world_size: int, cost: Cost) -> list[float]:
    """Returns the milliseconds of each plan. Garbage is collected before, not during one."""
    gc.collect()
    times = []
    for lengths in batches:
        start = time.perf_counter()
        min_max_contiguous(lengths, world_size, cost)
        times.append(1e3 * (time.perf_counter() - start))
    return times
