"""A4.4: why is this run slow, or its comparison void? One name, from what was measured.

Tables are those of a run directory of assignment 4; what was set is not among them. Their columns
stand in ``common/tables.py``. Times are in milliseconds.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import pandas as pd

from common.exercises.bucket_time import backward_time_s
from common.exercises.cap_search import fastest_cap

Tables = Mapping[str, pd.DataFrame]
"""Tables of a run by the names of their files without ``.csv``: ``steps``, ``facts``, ``samples``,
``placement``, ``probes``, ``buckets``, ``gradient-ready-times``, ``allreduce-samples``, and with
epochs ``epochs``."""

HEALTHY = "healthy"
CAUSES = (
    "wrong-sampler",
    "mixed-configurations",
    "warm-up-counted",
    "oversubscribed-cores",
    "slow-rank",
    "unequal-lengths",
    "data-loading",
    "evaluation-or-logging",
    "needless-synchronisation",
    "bucket-cap",
    "model-too-small",
    "batch-too-small",
    "network-too-slow",
)
"""In the order in which they are looked for: those that make a comparison void come first."""


def main_cause(run: Tables, baseline: Tables | None = None) -> str:
    """Names the main cause, of ``CAUSES``, or says ``healthy``; the tables stay as they are.

    The cause is that of the run, not of the machine: where all times are twice as long, it is the
    same.

    Args:
        run: on several ranks.
        baseline: the same on one rank, which the run is compared with, if there is one.
    """
    # BEGIN SOLUTION A4.4
    if void := what_makes_it_void(run, baseline):
        return void
    shares = lost_shares(run)
    cause = max(shares, key=shares.__getitem__)
    return cause if shares[cause] > 0 else HEALTHY
    # END SOLUTION


# BEGIN SOLUTION A4.4
STEP = ["round", "epoch", "step"]
SAME = ["parameters", "gradient_dtype", "compute_dtype", "input_shape", "model", "data"]


def what_makes_it_void(run: Tables, baseline: Tables | None) -> str | None:
    """Returns the cause that makes the comparison void, or None."""
    of_epoch = run["samples"].groupby("epoch")
    processed = of_epoch["processed"].sum().sum()
    different = of_epoch["distinct_all_ranks"].first().sum()
    ranks = run["samples"]["rank"].nunique()
    # To make shares equal a sampler repeats less than a sample a rank.
    if processed - different - ranks * len(of_epoch) > 0.01 * processed:
        return "wrong-sampler"

    facts = run["facts"][SAME].astype(str)
    measured = run["steps"][~truth(run["steps"]["warmup"])]
    batches = measured.groupby("rank")["samples"].median()
    if (facts.nunique() > 1).any() or batches.nunique() > 1:
        return "mixed-configurations"
    if baseline is not None and (
        (facts.iloc[0] != baseline["facts"][SAME].astype(str).iloc[0]).any()
        or baseline["steps"]["samples"].median() not in (batches.iloc[0], batches.sum())
    ):
        return "mixed-configurations"

    kinds = set(measured["kind"])
    counted = measured[measured["kind"] == "plain"] if "plain" in kinds else measured
    times = counted.fillna(dict.fromkeys(STEP, 0)).groupby(STEP)["step_time_ms"].max()
    later = times.iloc[len(times) // 2 :]
    steady = later.median()
    slow = times > max(2 * steady, 1.2 * later.sort_values().iloc[-2])
    early = int(slow.cumprod().sum())  # slow ones before the first that is not
    if early and times.mean() > 1.05 * times.iloc[early:].mean():
        return "warm-up-counted"
    return None


def lost_shares(run: Tables) -> dict[str, float]:
    """Returns the share of the time that each cause takes; 0 below its threshold."""
    steps = run["steps"]
    steps = steps[~truth(steps["warmup"])].fillna(dict.fromkeys(STEP, 0))
    timed = steps[steps["kind"] == "timed"]

    def by_step(column: str) -> pd.DataFrame:
        return timed.pivot_table(index=STEP, columns="rank", values=column).dropna()

    step = by_step("step_time_ms").max(axis=1)
    compute = by_step("forward_time_ms") + by_step("backward_time_ms")
    tokens = by_step("padded_tokens")
    shares = {
        "oversubscribed-cores": crowded_share(run) * (compute.max(axis=1) / step).median(),
        "slow-rank": slow_rank_share(compute, tokens, step),
        "unequal-lengths": unequal_share(compute, tokens, step),
        "data-loading": above(0.1, by_step("data_time_ms").max(axis=1).sum() / step.sum()),
    }
    between = pd.to_numeric(steps["between_time_ms"], errors="coerce")
    known = steps.assign(between=between).dropna(subset=["between"]).groupby(["kind", *STEP])
    lost = known["between"].max().sum()
    logging = above(0.1, lost / (lost + known["step_time_ms"].max().sum())) if len(known) else 0
    epochs = run.get("epochs", pd.DataFrame())
    if not epochs.empty:
        longest = epochs.groupby("epoch")[["evaluation_time_s", "epoch_time_s"]].max().sum()
        logging = max(logging, above(0.25, longest.iloc[0] / longest.iloc[1]))
    shares["evaluation-or-logging"] = logging
    return shares | shares_of_the_exchange(run, by_step("communication_time_ms"), compute, timed)


def crowded_share(run: Tables) -> float:
    """Returns the share of computation that ranks take from each other beyond caches and memory."""
    probes = run["probes"]
    together = truth(probes["together"])
    batch = probes.loc[~together, "batch_per_rank"].iloc[0]
    at_batch = probes["batch_per_rank"] == batch
    both = probes["forward_time_ms"] + probes["backward_time_ms"]
    ratio = both[together & at_batch].median() / both[~together & at_batch].median()
    cores = set(" ".join(run["placement"]["core_list"].astype(str)).split())
    is_crowd = run["placement"]["threads"].sum() > len(cores)
    return above(1 - 1 / (1.25 if is_crowd else 1.6), 1 - 1 / ratio)


def slow_rank_share(compute: pd.DataFrame, tokens: pd.DataFrame, step: pd.Series) -> float:
    """Returns what one rank takes longer than the others for as much work, in most steps."""
    rate = compute / tokens
    slowest = rate.median().idxmax()
    others = [rank for rank in rate if rank != slowest]
    ratio = (rate[slowest] / rate[others].median(axis=1)).median()
    if ratio < 1.15 or (rate.idxmax(axis=1) == slowest).mean() < 0.8:
        return 0.0
    medians = compute.median()
    return (medians[slowest] - medians[others].mean()) / step.median()


def unequal_share(compute: pd.DataFrame, tokens: pd.DataFrame, step: pd.Series) -> float:
    """Returns what the largest rank's tokens take beyond the mean rank's, where time follows them.

    Whether it does: the slope of time over tokens, both over the mean of the step's ranks.
    """
    uneven = tokens.max(axis=1) / tokens.mean(axis=1) - 1
    x, y = (
        table.div(table.mean(axis=1), axis=0).sub(1).to_numpy().ravel()
        for table in (tokens, compute)
    )
    if uneven.mean() < 0.025:
        return 0.0
    y = np.clip(y, *np.quantile(y, [0.05, 0.95]))  # hiccups do not decide
    slope = (x @ y) / (x @ x)
    share = (min(slope, 1.0) * uneven * compute.mean(axis=1) / step).mean()
    return above(0.05, share) if slope > 0.3 else 0.0


def shares_of_the_exchange(
    run: Tables, exposed: pd.DataFrame, compute: pd.DataFrame, timed: pd.DataFrame
) -> dict[str, float]:
    """Returns the shares of the causes that lie in the exchange of gradients."""
    step_ms = timed.groupby(STEP)["step_time_ms"].max().median()
    share = exposed.mean(axis=1).median() / step_ms
    one = run["facts"]["gradient_bytes"].max()
    exchanges = timed.groupby(STEP)["exchanged_bytes"].max().median() / one
    shares = {}
    if exchanges > 1.5:
        shares["needless-synchronisation"] = share * (1 - 1 / exchanges)
        share /= exchanges

    alone = run["allreduce-samples"]
    alone = alone[alone["mode"] == "sequential"]
    calls = alone.groupby(["total_bytes", "round", "iteration"])["time_ms"].max()
    curve = calls.groupby("total_bytes").median()
    latency_ms = curve.iloc[0]

    def all_reduce_ms(size_bytes: float) -> float:
        within = np.interp(size_bytes, curve.index, curve)
        return float(max(within, curve.iloc[-1] * size_bytes / curve.index[-1]))

    table = run["gradient-ready-times"]
    gradients = table.groupby("ready_index")[["size_bytes", "ready_time_ms"]].median()
    sizes = gradients["size_bytes"].astype(int).tolist()
    ready_ms = gradients["ready_time_ms"].cummax().tolist()
    seen = run["buckets"]
    newest = seen[seen["step"] == seen["step"].max()]
    bucket_bytes = newest[newest["rank"] == 0].sort_values("bucket")["size_bytes"].tolist()
    now_ms = backward_time_s(sizes, ready_ms, split(sizes, bucket_bytes), all_reduce_ms)
    _, best_ms = fastest_cap(sizes, ready_ms, all_reduce_ms)
    gain = min((now_ms - best_ms) / step_ms, share)
    shares["bucket-cap"] = above(0.08, gain)

    left = share - max(gain, 0.0)
    if left > 0.2:
        total_ms = sum(map(all_reduce_ms, bucket_bytes))
        compute_ms = compute.mean(axis=1).median()
        if latency_ms * len(bucket_bytes) > total_ms / 2:
            shares["model-too-small"] = left
        elif exposed_beside(16 * compute_ms, total_ms) < 0.2:
            shares["batch-too-small"] = left
        else:
            shares["network-too-slow"] = left
    return shares


def exposed_beside(compute_ms: float, exchange_ms: float) -> float:
    """Returns the exposed share of a step; two thirds of computation can hide an exchange."""
    exposed_ms = max(0.0, exchange_ms - compute_ms * 2 / 3)
    return exposed_ms / (compute_ms + exposed_ms)


def split(sizes: list[int], bucket_bytes: list[int]) -> list[list[int]]:
    """Returns the gradients of each bucket that was watched, in ready order."""
    ends = np.searchsorted(np.cumsum(sizes), np.cumsum(bucket_bytes)) + 1
    starts = [0, *ends[:-1].tolist()]
    buckets = [
        list(range(start, min(end, len(sizes))))
        for start, end in zip(starts, ends.tolist(), strict=True)
    ]
    return [bucket for bucket in buckets if bucket]


def truth(column: pd.Series) -> pd.Series:
    """Returns a column of booleans that was read as text or as such."""
    return column.astype(str).str.lower() == "true"


def above(threshold: float, share: float) -> float:
    """Returns a share where it is above its threshold, else 0."""
    return float(share) if share > threshold else 0.0


# END SOLUTION
