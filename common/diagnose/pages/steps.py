"""Shows the parts of a step by rank on a diagnosis' web page: their medians, and single steps."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import pandas as pd

from common.analysis.step_parts import PARTS
from common.diagnose.evidence.case import Case
from common.diagnose.evidence.evidence import BUCKETS, PLACEMENT, STEP, STEPS, Evidence, NotJudged
from common.diagnose.pages.bars import (
    BETWEEN,
    STEP_PARTS,
    Axis,
    Bar,
    BarFigure,
    Row,
    number,
    stacked,
)
from common.runtime.wording import size_text
from common.samples import slowest_rank

MOST_RANKS, MOST_IN_TIME, MOST_BUCKETS = 16, 6, 32
"""Ranks drawn as bars and in time, and buckets of a step: more are a sample, which says so."""
MOST_ROWS = 256
"""Ranks in the table of numbers."""
UNTIL_READY = ["data", "forward", "backward"]
"""Parts of a step until a rank's gradients are ready; the straggler in them keeps the others
waiting."""
SPARE = 1.02
"""An axis ends a little after the longest bar."""
LANE, GAP, LEAST_LANE, BUCKET_HEIGHT = 16, 4, 10, 4
"""Heights in pixels: the lane of computation, what is left below it, the lane of buckets at least,
and a bucket in it."""


def ranks_section(case: Case) -> dict[str, object] | str:
    """Returns a step as a bar by rank, with a table of the same numbers; or why it is not shown.

    Keys: said, between (whether there is time between steps), sample, figure, header, numbers.
    """
    try:
        parts = case.run.parts
    except NotJudged as missing:
        return f"Not shown: {missing}."
    columns = {f"{name}_ms": name for name in (*STEP_PARTS, "step")}
    medians = parts.by_rank.set_index("rank")[list(columns)].rename(columns=columns)
    medians = medians.dropna(axis="columns", how="all")
    kinds = [name for name in STEP_PARTS if name in medians]
    lengths = medians[kinds].fillna(0.0).clip(lower=0.0)
    ready_ms = medians[UNTIL_READY].sum(axis=1)
    ranks = drawn_ranks(ready_ms, MOST_RANKS)
    axis = Axis(float(lengths.loc[ranks].sum(axis=1).max()) * SPARE)
    names = rank_names(case.run)
    rows = []
    for rank in ranks:
        lengths_ms = {name: float(value) for name, value in lengths.loc[rank].items()}
        slowest = len(medians) > 1 and rank == ready_ms.idxmax()
        label = f"{names[rank]} – the slowest" if slowest else names[rank]
        rows.append(Row(label, _sentence(label, lengths_ms), stacked(lengths_ms)))
    tabled = medians if len(medians) <= MOST_ROWS else medians.loc[ranks]
    return {
        "said": f"{_slowest_sentence(ready_ms)} Each part is its median over {parts.steps:,} steps "
        "[steps.csv]; medians of parts need not add up to the median step.",
        "between": BETWEEN in kinds,
        "sample": sample_sentence(ranks, ready_ms),
        "figure": BarFigure(axis, "ms", rows, [(name, name) for name in kinds]),
        "header": ["rank", *medians.columns],
        "numbers": [[rank, *map(number, values)] for rank, values in tabled.T.items()],
    }


def _slowest_sentence(ready_ms: pd.Series) -> str:
    if len(ready_ms) == 1:
        return "There is one rank, which waits for nobody."
    slowest, fastest = ready_ms.idxmax(), ready_ms.idxmin()
    return (
        f"Rank {slowest} is the slowest: its gradients are ready after {number(ready_ms[slowest])} "
        f"ms, those of the fastest, rank {fastest}, after {number(ready_ms[fastest])} ms."
    )


def drawn_ranks(ready_ms: pd.Series, most: int) -> list[int]:
    """Returns the ranks to draw: all, or the fastest, the slowest and an even sample of the rest.

    Args:
        ready_ms: time until a rank's gradients are ready, by rank.
        most: number of ranks to draw.
    """
    ordered = ready_ms.sort_values(kind="stable").index
    return sorted(int(ordered[position]) for position in _even_sample(len(ordered), most))


def _even_sample(count: int, most: int) -> list[int]:
    """Returns places of a sequence: all, or so many at equal distances with both ends."""
    return np.linspace(0, count - 1, min(count, most)).round().astype(int).tolist()


def sample_sentence(ranks: Sequence[int], ready_ms: pd.Series) -> str:
    """Returns a sentence that says which ranks are drawn; nothing where all are."""
    if len(ranks) == len(ready_ms):
        return ""
    return (
        f"{len(ranks)} of {len(ready_ms):,} ranks are drawn: the fastest, the slowest, and an "
        "even sample of those between, by the time at which their gradients are ready."
    )


def rank_names(run: Evidence) -> dict[int, str]:
    """Returns the name of each rank, with its host where that is known."""
    names = {int(rank): f"rank {rank}" for rank in run.measured["rank"].unique()}
    placement = run.tables.get(PLACEMENT)
    if placement is not None:
        for rank, host in placement[["rank", "host"]].itertuples(index=False):
            names[int(rank)] = f"rank {rank} on {host}"
    return names


def _sentence(label: str, lengths_ms: Mapping[str, float]) -> str:
    parts = ", ".join(f"{name} {number(value)}" for name, value in lengths_ms.items() if value > 0)
    return f"{label}, in ms: {parts}."


def timeline_section(case: Case) -> dict[str, object] | str:
    """Returns up to three steps in time: a lane of computation and one of buckets by rank.

    Keys: said, sample, kinds (of the legend), panels (by title); or why it is not shown.
    """
    try:
        timed = case.run.timed
    except NotJudged as missing:
        return f"Not shown: {missing}."
    buckets, no_buckets = _buckets_of(case.run)
    ready_ms = timed.groupby("rank")[[PARTS[name] for name in UNTIL_READY]].median().sum(axis=1)
    ranks = drawn_ranks(ready_ms, MOST_IN_TIME)
    steps = {
        name: rows.set_index("rank").loc[ranks]
        for name, rows in chosen_steps(timed, buckets).items()
    }
    placed = {name: _placed_buckets(rows, buckets) for name, rows in steps.items()}
    axis = Axis(max(_end_ms(steps[name], placed[name]) for name in steps) * SPARE)
    names = rank_names(case.run)
    panels = dict(_panel(axis, name, steps[name], placed[name], names) for name in steps)
    kinds = [(name, name) for name in PARTS]
    sentences = [
        "Ranks have no common clock: each rank's step is drawn from its own start, and bars below "
        "one another were not at the same moment.",
        _which_steps(steps, buckets),
    ]
    if buckets.empty:
        sentences.append(f"Buckets are not drawn: {no_buckets}.")
    else:
        kinds.append(("bucket slim", "a bucket, from ready to done"))
    if timed["micro_batches"].max() > 1:
        sentences.append(
            "A step has several micro-batches: each part is drawn once, as their sum, and the "
            "buckets are those of the last one."
        )
    return {
        "said": " ".join(sentences),
        "sample": sample_sentence(ranks, ready_ms),
        "kinds": kinds,
        "panels": panels,
    }


def _which_steps(steps: Mapping[str, object], buckets: pd.DataFrame) -> str:
    *earlier, last = steps
    chosen = f"{', the '.join(earlier)} and the {last}" if earlier else last
    if buckets.empty:
        return f"Shown: the {chosen} of the steps measured in parts [steps.csv]."
    return f"Shown: the {chosen} of the steps whose buckets were noted [buckets.csv]."


def _buckets_of(run: Evidence) -> tuple[pd.DataFrame, str]:
    """Returns the buckets of steps measured in parts, and why there are none."""
    try:
        buckets = run.need(BUCKETS)
    except NotJudged as missing:
        return pd.DataFrame(columns=["rank", "round", "step"]), str(missing)
    buckets = buckets.fillna({"round": 0})
    timed = set(run.timed[["round", "step"]].itertuples(index=False, name=None))
    steps = buckets[["round", "step"]].itertuples(index=False, name=None)
    of_timed = buckets[[step in timed for step in steps]]
    return of_timed, f"{BUCKETS} in {run.name} has no step that {STEPS} has"


def chosen_steps(timed: pd.DataFrame, buckets: pd.DataFrame) -> dict[str, pd.DataFrame]:
    """Chooses the shortest, the median and the longest step, by the slowest rank's time.

    Args:
        timed: rows of ``steps.csv``.
        buckets: rows of ``buckets.csv``; where there are some, steps without any are left out.

    Returns:
        up to three steps, by what they are; a row per rank.
    """
    lengths = slowest_rank(timed, "step_time_ms", by=STEP)
    # Buckets name no epoch: where the number of a step comes again, the first is meant.
    lengths = lengths[~lengths.index.droplevel("epoch").duplicated()]
    if len(buckets):
        noted = set(buckets[["round", "step"]].itertuples(index=False, name=None))
        lengths = lengths[[(round_, step) in noted for round_, _, step in lengths.index]]
    ordered = lengths.sort_values(kind="stable").index
    last = len(ordered) - 1
    positions = {"shortest": 0, "median": last // 2, "longest": last}
    if last < len(positions) - 1:
        positions = {"shortest": 0, "longest": last} if last else {"only one": 0}
    return {
        name: timed[timed[STEP].eq(list(ordered[position])).all(axis=1)]
        for name, position in positions.items()
    }


def _placed_buckets(rows: pd.DataFrame, buckets: pd.DataFrame) -> dict[int, pd.DataFrame]:
    """Returns each rank's buckets of a step, with ``start_ms`` and ``end_ms`` from its start."""
    placed = {}
    for rank, step in rows.iterrows():
        rank_buckets = buckets[
            (buckets["rank"] == rank)
            & (buckets["round"] == step["round"])
            & (buckets["step"] == step["step"])
        ]
        if rank_buckets.empty:
            continue
        # Buckets are timed from the start of the backward pass that exchanged them.
        origin_ms = step[PARTS["data"]] + step[PARTS["forward"]]
        if step["micro_batches"] > 1:
            # That is the last of several, and ends when its last bucket is ready.
            origin_ms += step[PARTS["backward"]] - rank_buckets["ready_time_ms"].max()
        placed[rank] = rank_buckets.sort_values("bucket").assign(
            start_ms=origin_ms + rank_buckets["ready_time_ms"],
            end_ms=origin_ms + rank_buckets["done_time_ms"],
        )
    return placed


def _end_ms(rows: pd.DataFrame, placed: Mapping[int, pd.DataFrame]) -> float:
    parts_ms = rows[list(PARTS.values())].sum(axis=1).max()
    buckets_ms = [rank_buckets["end_ms"].max() for rank_buckets in placed.values()]
    return float(max(rows["step_time_ms"].max(), parts_ms, *buckets_ms))


def _panel(
    axis: Axis,
    name: str,
    rows: pd.DataFrame,
    placed: Mapping[int, pd.DataFrame],
    names: Mapping[int, str],
) -> tuple[str, BarFigure]:
    first = rows.iloc[0]
    numbers = [f"{key} {first[key]:g}" for key in STEP if first[key] or key == "step"]
    lanes = [
        _lanes(f"{names[rank]}: {number(step['step_time_ms'])}\u00a0ms", step, placed.get(rank))
        for rank, step in rows.iterrows()
    ]
    title = f"The {name}: {', '.join(numbers)}"
    return title, BarFigure(axis, "ms from the start of the step", lanes)


def _lanes(label: str, step: pd.Series, buckets: pd.DataFrame | None) -> Row:
    """Returns a rank's step: its parts, and below them its buckets, each below the one before."""
    lengths = {name: max(0.0, float(step[column])) for name, column in PARTS.items()}
    shapes = [
        Bar("whole", 0.0, float(step["step_time_ms"]), 2, LANE),
        *stacked(lengths, height=LANE),
    ]
    sentence, height = _sentence(label, lengths), LANE + GAP
    if buckets is not None:
        drawn = buckets.iloc[_even_sample(len(buckets), MOST_BUCKETS)]
        top, lane = LANE + 2 * GAP, max(LEAST_LANE, BUCKET_HEIGHT * len(drawn))
        shapes += _bucket_bars(drawn, top, lane / len(drawn))
        height = top + lane + GAP
        if len(drawn) < len(buckets):
            label += f" ({len(drawn)} of {len(buckets)} buckets are drawn)"
        sentence += (
            f" Buckets: {len(buckets)}, the first ready after {number(buckets.start_ms.min())} ms, "
            f"the last done after {number(buckets.end_ms.max())} ms."
        )
    return Row(label, sentence, shapes, height)


def _bucket_bars(buckets: pd.DataFrame, top: float, height: float) -> list[Bar]:
    return [
        Bar(
            "bucket",
            bucket.start_ms,
            bucket.end_ms - bucket.start_ms,
            top + index * height,
            height - 1,
            f"bucket {bucket.bucket}, {size_text(bucket.size_bytes)}: ready after "
            f"{number(bucket.start_ms)} ms, done after {number(bucket.end_ms)} ms",
        )
        for index, bucket in enumerate(buckets.itertuples())
    ]
