"""``ddplab study trainer``: this project's trainer beside transformers', and what checkpoints cost.

Both parts run on two gloo ranks of one thread each (``trainer_ranks``).

*Speed* (``trainer-times.csv``, ``trainer-ratios.csv``): the same model, weights, batches, fused
AdamW, gradient limit and cosine schedule under DDP in our ``train`` and in transformers'
``Trainer``, one after another in rotated rounds, each visit with a new instance; a round before the
first is not counted, as a new process has to grow its memory. Their losses must agree step by step.
A step's time is that from the moment at which a trainer says that a step begins to the same moment
of the next, on the slowest rank: a whole turn of the loop with loading its batches, the update and
all bookkeeping, whatever it is. Neither prints or saves; ours agrees on the loss and keeps its row
of measurements in every step, as it always does.

*Checkpoints* (``checkpoint-times.csv``, ``checkpoint-cost.csv``): what one costs, as a share of the
steps between two. That is the time inside of ``Checkpoints.save``, in which ranks do not train,
and what the steps take longer in which one is written besides. The last checkpoint of a run is
left out: there is no step after it.
"""

from __future__ import annotations

import importlib.util
import itertools
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import pandas as pd

from common.cluster.launch import launch
from common.errors import RunFailed, UserError
from common.report.progress import StageProgress
from common.runtime.recorder import require_positive
from common.studies.study import study_run, with_verdicts

OURS, THEIRS = "ours", "transformers"
RANKS = 2
SCRIPT = Path(__file__).with_name("trainer_ranks.py")
TIMES, CHECKPOINTS = "trainer-times.csv", "checkpoint-times.csv"
LOSS_TOLERANCE = 1e-5
"""Relative difference of two losses of the same step that rounding explains."""
LEAST_RATIO = 1.0
"""Lower bound on their time over ours. Both compute the same, so only their bookkeeping differs;
medians of rounds that differ by a per cent or two say nothing."""
ALLOWED_SHARE = 0.02


@dataclass(frozen=True)
class TrainerStudy:
    """Settings of the study: the training, and how long it is measured."""

    model: str = "gpt2-nano"
    seq_len: int = 64
    micro_batch_size: int = 4
    accumulations: tuple[int, ...] = (1, 2)
    """Micro-batches of a rank in a step."""
    rounds: int = 8
    steps: int = 10
    """Measured steps per visit."""
    warmup_steps: int = 4
    """First steps of a visit, not measured: the optimizer's states and DDP's buckets are made."""
    strategies: tuple[str, ...] = ("DDP", "FULL_SHARD")
    """Under which checkpoints are made."""
    global_batch_size: int = 16
    """Global batch of the runs that make checkpoints."""
    checkpoint_rounds: int = 3
    steps_between: int = 6
    """Steps between two checkpoints of a measured run; each makes three."""
    save_every: int = 50
    """Steps over which the cost of a checkpoint is spread."""

    def __post_init__(self) -> None:
        require_positive(
            self,
            "rounds",
            "steps",
            "warmup_steps",
            "checkpoint_rounds",
            "save_every",
        )
        if self.steps_between < 3:
            raise UserError(f"steps_between {self.steps_between}: must be at least 3")
        if not self.accumulations or min(self.accumulations) < 1:
            raise UserError(f"accumulations {self.accumulations}: one or more, each at least 1")


def run_study(study: TrainerStudy, output_dir: str, progress: StageProgress) -> Path:
    """Measures both parts and judges them; returns the run directory.

    Raises:
        UserError: accelerate, without which transformers has no Trainer, is not installed.
        RunFailed: the two trainers do not compute the same.
    """
    if importlib.util.find_spec("accelerate") is None:
        raise UserError(
            "transformers' Trainer needs the package accelerate, which is not installed: "
            "uv pip install accelerate"
        )
    with study_run("trainer", study, output_dir, progress, backend="gloo", ranks=RANKS) as run:
        scratch = run.path / "runs"
        scratch.mkdir()
        with progress.stage("speed beside transformers' Trainer") as update:
            times = measure(study, "speed", TIMES, scratch, update)
        run.write_table(TIMES, times)
        compare_losses(times)
        ratios = compare_times(times)
        run.write_table("trainer-ratios.csv", ratios)
        with progress.stage("cost of checkpoints") as update:
            saved = measure(study, "checkpoints", CHECKPOINTS, scratch, update)
        run.write_table(CHECKPOINTS, saved)
        costs = checkpoint_costs(saved, study.save_every)
        run.write_table("checkpoint-cost.csv", costs)
        verdicts = judge(ratios, costs)
        run.write_table("verdicts.csv", verdicts)
    progress.say(verdicts.to_string(index=False, float_format="%.4f"))
    return run.path


def measure(
    study: TrainerStudy, part: str, table: str, scratch: Path, update: Callable[[str], None]
) -> pd.DataFrame:
    """Measures a part of the study on ranks of its own; returns the samples of all ranks."""
    flags = ["--part", part, "--output_dir", str(scratch), "--run_id", part]
    for name, value in asdict(study).items():
        values = value if isinstance(value, tuple) else (value,)
        flags += [f"--{name}", *map(str, values)]
    launch(SCRIPT, flags, RANKS, scratch / f"{part}.log", on_output=update)
    return pd.read_csv(scratch / part / table)


def compare_losses(times: pd.DataFrame) -> None:
    """Raises RunFailed unless both trainers have the same loss in each step of every round."""
    keys = ["accumulation", "round", "iteration"]
    losses = times.groupby([*keys, "arm"])["loss"].mean().unstack("arm")
    apart = (losses[THEIRS] / losses[OURS] - 1).abs()
    if not (apart <= LOSS_TOLERANCE).all():
        accumulation, round_, iteration = apart.idxmax()
        one, other = losses.loc[apart.idxmax(), [OURS, THEIRS]]
        raise RunFailed(
            f"losses differ in step {iteration} of round {round_} with {accumulation} "
            f"micro-batches, {one:.7g} and {other:.7g}: not the same computation"
        )


def compare_times(times: pd.DataFrame) -> pd.DataFrame:
    """Computes transformers' step time over ours; returns a row per accumulation.

    Columns: accumulation, rounds, ratio (median over rounds), lowest, highest, and the median step
    of each trainer in ms.
    """
    keys = ["accumulation", "arm", "round"]
    # A ratio is taken within a round, where both met the same machine: of medians over its steps,
    # each step as long as its slowest rank's.
    slowest = times[~times["warmup"]].groupby([*keys, "iteration"])["step_time_ms"].max()
    medians = slowest.groupby(keys).median().unstack("arm")
    rows = []
    for accumulation, by_round in medians.groupby("accumulation"):
        ratio = by_round[THEIRS] / by_round[OURS]
        row = {"accumulation": accumulation, "rounds": len(ratio), "ratio": ratio.median()}
        row |= {"lowest": ratio.min(), "highest": ratio.max()}
        rows.append(row | {f"{arm}_ms": by_round[arm].median() for arm in (OURS, THEIRS)})
    return pd.DataFrame(rows)


def checkpoint_costs(samples: pd.DataFrame, save_every: int) -> pd.DataFrame:
    """Computes what each checkpoint took from training, and its share of ``save_every`` steps.

    Returns a row per checkpoint. Times are the slowest rank's, in ms: ``step_time_ms`` the median
    step while nothing was written; ``save_ms`` inside of ``save``; ``slowdown_ms`` by how much the
    steps in which it was being written exceeded that median, in sum; ``writing_ms`` the time that
    writing took.
    """
    visit = ["strategy", "mode", "round"]
    slowest = ["step_time_ms", "save_ms", "writing_ms"]
    steps = samples.groupby([*visit, "step"], as_index=False)[slowest].max()
    flags = samples.groupby([*visit, "step"], as_index=False)[["warmup", "disturbed"]].any()
    steps = steps.merge(flags)
    rows = []
    for name, run in steps.groupby(visit):
        usual_ms = run.loc[~run["warmup"] & ~run["disturbed"], "step_time_ms"].median()
        saves = run.index[run["save_ms"].notna()]
        # The steps from one checkpoint to the next (or to the run's end) may be slowed by it.
        for at, following in itertools.pairwise([*saves, run.index[-1]]):
            after = run.loc[at + 1 : following]
            written_in = after[after["disturbed"]]
            row = dict(zip(visit, name, strict=True)) | {"step": run.loc[at, "step"]}
            row |= {"step_time_ms": usual_ms, "save_ms": run.loc[at, "save_ms"]}
            row["writing_ms"] = run.loc[at, "writing_ms"]
            row["slowdown_ms"] = (written_in["step_time_ms"] - usual_ms).sum()
            cost_ms = row["save_ms"] + row["slowdown_ms"]
            rows.append(row | {"share": cost_ms / (save_every * usual_ms)})
    return pd.DataFrame(rows)


def judge(ratios: pd.DataFrame, costs: pd.DataFrame) -> pd.DataFrame:
    """Compares what was found with what was promised; returns a row per promise.

    Columns: promise, at_least, at_most, found, lowest, highest and held.
    """
    rows = [
        (
            f"their time over ours, {row.accumulation} micro-batches a step",
            LEAST_RATIO,
            None,
            row.ratio,
            row.lowest,
            row.highest,
        )
        for row in ratios.itertuples()
    ]
    for (strategy, mode), share in costs.groupby(["strategy", "mode"])["share"]:
        promise = f"share of the time that checkpoints take, {strategy}, {mode}"
        rows.append((promise, None, ALLOWED_SHARE, share.median(), share.min(), share.max()))
    columns = ["promise", "at_least", "at_most", "found", "lowest", "highest"]
    table = pd.DataFrame(rows, columns=columns).astype(dict.fromkeys(columns[1:], float))
    return with_verdicts(table)
