"""Splits a training step into data, forward, backward, waiting, communication and optimizer.

Ranks have no common clock, so a part is the mean over the ranks of the same step, and the step is
the slowest rank's. A rank whose own step was shorter began it later or ended it earlier than that
one: the ranks were not together, and what is between the two counts as waiting. What the parts then
leave of a step is what no rank has noted; it is stated, not spread over them.

Over steps, parts are averaged over the middle half of the steps, by step time. Medians of parts do
not add up to the median step (where a slow forward pass shortens the wait, both medians are of
other steps); means over the same steps do, and the middle half keeps hiccups of the machine out of
them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import pandas as pd

from common.errors import UserError
from common.samples import slowest_rank
from common.tables import ARM_COLUMNS, BUCKET_COLUMNS, STEP_COLUMNS

PARTS = {
    "data": "data_time_ms",
    "forward": "forward_time_ms",
    "backward": "backward_time_ms",
    "waiting": "waiting_time_ms",
    "communication": "communication_time_ms",
    "optimizer": "optimizer_time_ms",
}
"""The parts in their order within a step, and the column of each."""

ADDED = (
    "sum_ms",
    "unaccounted_share",
    "watching_share",
    "error",
    "adds_up",
    "exposed_ratio",
    "total_ratio",
)
"""Properties of ``StepParts`` that ``decompose_all`` adds beside the times of the parts."""
STEP = ["round", "epoch", "step"]
TIMED, PLAIN = "timed", "plain"
TOLERANCE = 0.03
"""Parts are a plain step's where their sum is within this share of it."""


@dataclass(frozen=True, eq=False)
class StepParts:
    """The mean step of one arm, in parts; times in ms.

    Attributes:
        steps: Number of steps measured in parts, without warm-up.
        step_ms: Mean of the slowest rank's times over the middle half of the steps.
        parts_ms: Parts by the names of ``PARTS``, in their order; means over ranks and these steps.
        plain_step_ms: Mean as ``step_ms``, of steps with nothing watched; None where none ran.
        hidden_communication_ms: Time with an all-reduce under way beside computation; None where
            no buckets were noted.
        exchanged_bytes_per_step: Bytes that one rank exchanges; NaN where they were not counted.
        by_rank: Medians by rank: every part as ``<part>_ms``, step_ms, and between_ms.
    """

    arm: int
    world_size: int
    steps: int
    step_ms: float
    parts_ms: Mapping[str, float]
    plain_step_ms: float | None
    hidden_communication_ms: float | None
    exchanged_bytes_per_step: float
    by_rank: pd.DataFrame

    @property
    def sum_ms(self) -> float:
        """Sums all parts."""
        return float(sum(self.parts_ms.values()))

    @property
    def unaccounted_share(self) -> float:
        """Computes the share that the parts leave of the step that they were measured in."""
        return 1 - self.sum_ms / self.step_ms

    @property
    def watching_share(self) -> float | None:
        """Computes the watched step over the plain one, minus 1; None where no plain step ran.

        It is the price of watching, and the noise of two kinds of steps taken in turns.
        """
        return self.step_ms / self.plain_step_ms - 1 if self.plain_step_ms else None

    @property
    def error(self) -> float:
        """Computes the sum of parts over the unwatched step (or else the watched one), minus 1."""
        return self.sum_ms / (self.plain_step_ms or self.step_ms) - 1

    @property
    def adds_up(self) -> bool:
        """Judges if the parts are a plain step's, too: ``error`` is within ``TOLERANCE``."""
        return abs(self.error) <= TOLERANCE

    @property
    def compute_ms(self) -> float:
        """Sums forward and backward pass."""
        return self.parts_ms["forward"] + self.parts_ms["backward"]

    @property
    def exposed_ratio(self) -> float:
        """Computes the ratio of exposed communication to computation."""
        return self.parts_ms["communication"] / self.compute_ms

    @property
    def total_communication_ms(self) -> float | None:
        """Sums all communication, hidden or exposed; None where no buckets were noted."""
        if self.hidden_communication_ms is None:
            return None
        return self.parts_ms["communication"] + self.hidden_communication_ms

    @property
    def total_ratio(self) -> float | None:
        """Computes the ratio of all communication to computation; None without buckets."""
        total_ms = self.total_communication_ms
        return None if total_ms is None else total_ms / self.compute_ms


def decompose(steps: pd.DataFrame, arm: int = 0, buckets: pd.DataFrame | None = None) -> StepParts:
    """Computes an arm's mean step and its parts, in ms, over the middle half of its steps.

    Args:
        steps: Rows of ``steps.csv``, with ``STEP_COLUMNS``.
        arm: Number of the arm.
        buckets: Rows of ``buckets.csv``, for all communication.

    Raises:
        UserError: a column is missing, the arm has no step measured in parts besides warm-up, a
            rank is missing in a step, or a time is no number.
    """
    _need(steps, STEP_COLUMNS, "steps.csv")
    rows = steps[(steps["arm"] == arm) & ~flags(steps["warmup"])]
    timed = rows[rows["kind"] == TIMED].fillna(dict.fromkeys(STEP, 0))
    if timed.empty:
        raise UserError(f"steps.csv: arm {arm} has no step of kind 'timed' after its warm-up")
    _check(timed, arm)
    by_step = _by_step(timed)
    middle = by_step.loc[middle_half(by_step["step_time_ms"])]
    plain = rows[rows["kind"] == PLAIN].fillna(dict.fromkeys(STEP, 0))
    return StepParts(
        arm=arm,
        world_size=int(timed["rank"].nunique()),
        steps=len(by_step),
        step_ms=float(middle["step_time_ms"].mean()),
        parts_ms={name: float(middle[column].mean()) for name, column in PARTS.items()},
        plain_step_ms=_plain(plain),
        hidden_communication_ms=None if buckets is None else hidden_communication_ms(buckets, arm),
        exchanged_bytes_per_step=float(by_step["exchanged_bytes"].mean()),
        by_rank=_by_rank(timed),
    )


def decompose_all(
    arms: pd.DataFrame, steps: pd.DataFrame, buckets: pd.DataFrame | None = None
) -> pd.DataFrame:
    """Decomposes each arm measured in parts: a row per arm, in ``arms.csv``'s order, columns kept.

    Adds step_ms, plain_step_ms, the parts as ``<part>_ms``, and ``ADDED``.
    """
    _need(arms, ARM_COLUMNS, "arms.csv")
    measured = set(steps.loc[(steps["kind"] == TIMED) & ~flags(steps["warmup"]), "arm"])
    by_arm = [decompose(steps, arm, buckets) for arm in arms["arm"] if arm in measured]
    rows = [
        {name: getattr(parts, name) for name in ("arm", "step_ms", "plain_step_ms")}
        | {f"{name}_ms": value for name, value in parts.parts_ms.items()}
        | {name: getattr(parts, name) for name in ADDED}
        for parts in by_arm
    ]
    if not rows:
        raise UserError("steps.csv: no arm has a step of kind 'timed' after its warm-up")
    return arms.merge(pd.DataFrame(rows), on="arm", validate="one_to_one")


def parts_by_round(
    arms: pd.DataFrame, steps: pd.DataFrame, buckets: pd.DataFrame | None
) -> pd.DataFrame:
    """Decomposes each arm round by round: ``decompose_all`` of every round's steps, with ``round``.

    A round is the repetition that tells how much the parts of an arm differ.
    """
    steps = steps.assign(round=steps["round"].fillna(0))
    measured = (steps["kind"] == TIMED) & ~flags(steps["warmup"])
    tables = []
    for round_ in sorted(set(steps["round"][measured])):
        watched = None if buckets is None else buckets[buckets["round"].fillna(0) == round_]
        parts = decompose_all(arms, steps[steps["round"] == round_], watched)
        tables.append(parts.assign(round=round_))
    return pd.concat(tables, ignore_index=True) if tables else decompose_all(arms, steps, buckets)


def middle_half(times: pd.Series) -> pd.Index:
    """Selects the labels of the middle half of these times; of fewer than four, of all."""
    cut = len(times) // 4
    ordered = times.sort_values(kind="stable").index
    return ordered[cut : len(ordered) - cut]


def flags(column: pd.Series) -> pd.Series:
    """Parses True and False from a CSV, in whichever way they were written."""
    return column.astype(str).str.lower().isin(["true", "1", "1.0"])


def hidden_communication_ms(buckets: pd.DataFrame, arm: int = 0) -> float | None:
    """Computes how long all-reduces ran beside computation, in ms a step, from ``buckets.csv``.

    Buckets are reduced one after another, so one starts when it is ready and the one before is
    done; computation lasts until the last one is ready. A rank that is early waits in an all-reduce
    for the others; the rank with the least time waited for nobody, so a step's is the least over
    ranks. The mean over the middle half of the steps; None without rows.
    """
    _need(buckets, BUCKET_COLUMNS, "buckets.csv")
    rows = buckets[buckets["arm"] == arm].fillna({"round": 0})
    if rows.empty:
        return None
    rows = rows.sort_values(["round", "step", "rank", "bucket"])
    groups = rows.groupby(["round", "step", "rank"])
    computed = groups["ready_time_ms"].transform("max")
    start = np.fmax(rows["ready_time_ms"], groups["done_time_ms"].shift())
    beside = (np.fmin(rows["done_time_ms"], computed) - start).clip(lower=0)
    by_rank = beside.groupby([rows["round"], rows["step"], rows["rank"]]).sum()
    by_step = by_rank.groupby(["round", "step"]).min()
    return float(by_step.loc[middle_half(by_step)].mean())


def _need(table: pd.DataFrame, columns: Sequence[str], name: str) -> None:
    """Raises UserError where a table lacks a column."""
    missing = [column for column in columns if column not in table]
    if missing:
        raise UserError(f"{name}: no column {missing[0]!r}; is it of another program?")


def _check(timed: pd.DataFrame, arm: int) -> None:
    """Raises UserError for a step that lacks a rank (or has one twice), and for no number."""
    ranks = set(timed["rank"])
    counts = timed.groupby(STEP)["rank"].agg(["size", "nunique"])
    wrong = counts[(counts["size"] != len(ranks)) | (counts["nunique"] != len(ranks))]
    if len(wrong):
        round_, epoch, step = (int(value) for value in wrong.index[0])
        raise UserError(
            f"steps.csv: arm {arm}, round {round_}, epoch {epoch}, step {step} has "
            f"{int(wrong['size'].iloc[0])} rows for {len(ranks)} ranks; each rank writes one"
        )
    for column in ("step_time_ms", *PARTS.values()):
        values = pd.to_numeric(timed[column], errors="coerce")
        if not np.isfinite(values).all():
            at = timed.loc[~np.isfinite(values)].iloc[0]
            raise UserError(
                f"steps.csv: arm {arm}, step {at['step']}, rank {at['rank']}: {column} is "
                f"{at[column]}; it must be a finite number of ms"
            )


def _by_step(timed: pd.DataFrame) -> pd.DataFrame:
    """Joins ranks to a row per step: mean parts, the slowest rank's step, what was exchanged.

    Columns as in ``steps.csv``.
    """
    groups = timed.groupby(STEP)
    table = groups[list(PARTS.values())].mean()
    table["step_time_ms"] = groups["step_time_ms"].max()
    table["waiting_time_ms"] += table["step_time_ms"] - groups["step_time_ms"].mean()
    table["exchanged_bytes"] = groups["exchanged_bytes"].max()
    return table


def _plain(plain: pd.DataFrame) -> float | None:
    if plain.empty:
        return None
    slowest = slowest_rank(plain, "step_time_ms", by=STEP)
    return float(slowest.loc[middle_half(slowest)].mean())


def _by_rank(timed: pd.DataFrame) -> pd.DataFrame:
    names = {column: f"{name}_ms" for name, column in PARTS.items()}
    names |= {"step_time_ms": "step_ms", "between_time_ms": "between_ms"}
    medians = timed.groupby("rank")[[*names]].median()
    return medians.rename(columns=names).reset_index()
