"""Causes that lie in what ranks share, a device or cores, and how ranks hinder each other there.

While one rank is late, the others wait, and their cores are free to send and to let it compute.
Once it is as quick as they are, nobody waits: passes and their exchange then hinder each other. A
watch measures that outside of steps, by passes that send their gradients (``exchanging.py``).
"""

from __future__ import annotations

import math

import numpy as np
import pandas as pd

from common.analysis.step_parts import flags
from common.diagnose.evidence.case import (
    LIKELY,
    SURE,
    Case,
    Verdict,
    confidence,
    looks,
    percent,
    share_at,
)
from common.diagnose.evidence.evidence import (
    EXCHANGING,
    PLACEMENT,
    PROBES,
    STACKS,
    STEPS,
    NotJudged,
    standard_error,
)
from common.diagnose.evidence.measured_step import watched_exchanges
from common.runtime.wording import counted
from common.samples import slowest_rank

TOGETHER_RATIO = 1.6
"""Ranks that compute together share caches, memory and hyper-threads: up to 1.4 is seen where
each has a core of its own. Two on one core take 2."""
CROWDED_RATIO = 1.25
"""Lower threshold where there are more threads than cores: the ratio only has to confirm it."""
PASSES = ("forward", "backward")
EXCHANGES = (
    "torch.distributed.",
    "accelerate.accelerator.gather",
    "accelerate.accelerator.pad_across_processes",
    "accelerate.accelerator.reduce",
    "accelerate.accelerator.wait_for_everyone",
    "accelerate.utils.operations.",
)
"""Beginnings of the calls by which a script exchanges something itself."""
KEYS = ["repeat", "iteration"]
PARTS = ["forward_time_ms", "backward_time_ms", "exchange_time_ms"]


def shared_device(case: Case) -> Verdict | None:
    """Returns the cause where several ranks compute on one GPU; None where each has its own.

    Raises NotJudged without ``placement.csv``.
    """
    placement = case.run.need(PLACEMENT)
    placement = placement[placement["rank"] < case.ranks]
    gpus = placement[placement["device"].astype(str).str.startswith("cuda")]
    groups = {key: sorted(rows["rank"]) for key, rows in gpus.groupby(["host", "identity"])}
    shared = {key: ranks for key, ranks in groups.items() if len(ranks) > 1}
    if not shared:
        return None
    evidence = [
        f"Ranks {', '.join(map(str, ranks))} compute on one device, {identity} on {host} "
        f"[{PLACEMENT}]."
        for (host, identity), ranks in shared.items()
    ]
    most = max(map(len, shared.values()))
    ratio, sentence = _together(case) or (float(most), "")
    return case.verdict(
        cause="shared-device",
        title="ranks share a GPU",
        evidence=(*evidence, sentence),
        lost=(1 - 1 / ratio) * compute_share(case),
        sure=("high", "the device's identity is the same"),
        change=(
            "Start one rank per device: --nproc_per_node at most the number of visible devices, "
            "and torch.cuda.set_device(LOCAL_RANK)."
        ),
    )


def oversubscribed_cores(case: Case) -> Verdict | None:
    """Returns the cause where passes take longer together than alone; None if not, or on a GPU.

    Raises NotJudged without passes of ranks alone and together.
    """
    measured = _together(case)
    crowds = _crowded(case)
    if measured is None:
        if crowds:
            raise NotJudged(f"no {PROBES} to see whether ranks hinder each other: {crowds[0]}")
        raise NotJudged(f"no {PROBES} with ranks alone and together in {case.run.name}")
    if on_gpu(case):
        return None
    ratio, sentence = measured
    threshold = CROWDED_RATIO if crowds else TOGETHER_RATIO
    # With cores enough for all, a few disturbed passes must not look like a crowd.
    doubt = 0.0 if crowds else LIKELY * together_error(case)
    if ratio < threshold + doubt:
        return None
    return case.verdict(
        cause="oversubscribed-cores",
        title=f"ranks share cores: passes take {ratio:.2f} times as long as alone",
        evidence=(sentence, *crowds, *starved(case)),
        lost=(1 - 1 / ratio) * _share_on_cores(case),
        sure=confidence(ratio, threshold, together_error(case), of="together over alone"),
        change=(
            "Give each rank cores of its own: no more ranks than cores, OMP_NUM_THREADS = cores "
            "over ranks, and no taskset or --cpu-bind that puts them on the same ones."
        ),
    )


def on_gpu(case: Case) -> bool:
    """Returns True if a rank computes on a GPU; raises NotJudged without placement.csv."""
    placement = case.run.need(PLACEMENT)
    return bool(placement["device"].astype(str).str.startswith("cuda").any())


def compute_share(case: Case) -> float:
    """Returns the share of the step that forward and backward pass take."""
    parts = case.run.parts
    return min(1.0, parts.compute_ms / parts.step_ms)


def _share_on_cores(case: Case) -> float:
    """Returns the share of a step that a rank spends on its cores: all but the exchange."""
    parts = case.run.parts
    sending_ms = parts.parts_ms["waiting"] + parts.parts_ms["communication"]
    return min(1.0, max(0.0, 1 - sending_ms / parts.step_ms))


def together_times(case: Case) -> tuple[pd.Series, pd.Series] | None:
    """Returns both passes' time by rank and repeat, together and alone, at one batch."""
    probes = case.run.rows(PROBES)
    together = flags(probes["together"])
    rows = probes[probes["batch_per_rank"].isin(probes.loc[~together, "batch_per_rank"].head(1))]
    if flags(rows["together"]).nunique() < 2:
        return None
    times = rows["forward_time_ms"] + rows["backward_time_ms"]
    keys = [rows["rank"], rows["repeat"]]
    medians = times.groupby([flags(rows["together"]), *keys]).median()
    return medians.loc[True], medians.loc[False]


def _together(case: Case) -> tuple[float, str] | None:
    """Returns passes' time together over alone, the mean over ranks, and a sentence with it."""
    times = together_times(case)
    if times is None:
        return None
    together, alone = (series.groupby("rank").median().mean() for series in times)
    ratio = float(together / alone)
    return ratio, (
        f"Forward and backward pass take {together:.3g} ms while all ranks compute and "
        f"{alone:.3g} ms alone, {ratio:.2f} times as long [{PROBES}]."
    )


def together_error(case: Case) -> float:
    """Returns the standard error of passes' time together over alone."""
    together, alone = together_times(case)
    ratio = together.groupby("rank").median().mean() / alone.groupby("rank").median().mean()
    errors = [
        standard_error(s.groupby("repeat").mean()) / s.groupby("rank").median().mean()
        for s in (together, alone)
    ]
    return float(ratio * np.hypot(*errors))


def _crowded(case: Case) -> list[str]:
    """Returns a sentence for each set of ranks with more threads than cores."""
    placement = case.run.rows(PLACEMENT)
    placement = placement[placement["rank"] < case.ranks]
    hosts = placement.assign(host="all") if case.run.emulated else placement
    sentences = []
    for _, on_host in hosts.groupby("host"):
        cores = set(" ".join(on_host["core_list"].fillna("").astype(str)).split())
        threads = int(on_host["threads"].sum())
        if cores and threads > len(cores) and len(on_host) > 1:
            sentences.append(
                f"{len(on_host)} ranks with {threads} threads in all may run on "
                f"{counted(len(cores), 'core')} [{PLACEMENT}]."
            )
    return sentences


def cores_got(case: Case) -> float | None:
    """Returns the processor time that a rank got, in cores, the median; None where unknown."""
    timed = case.run.timed
    got = pd.to_numeric(timed["cpu_time_ms"], errors="coerce") / timed["step_time_ms"]
    return float(got.median()) if np.isfinite(got).any() else None


def starved(case: Case) -> list[str]:
    """Returns a sentence with the processor time that ranks got; none where it is not known."""
    got = cores_got(case)
    return [] if got is None else [f"Each rank got {percent(got)} of a core [{STEPS}]."]


def hindered(case: Case, rank: int, longer_ms: float = 0.0) -> tuple[float, str]:
    """Computes how much longer passes will be, once no rank is late, than those of ``rank`` now.

    Args:
        case: the run.
        rank: rank that the others wait for.
        longer_ms: time that its passes take longer than the others' in a step, and will not then.

    Returns:
        ms of a step, and a sentence with them. 0 and no sentence where nobody computes slower
        because nobody waits, and where passes that send their gradients were not measured.
    """
    then_ms = _passes_ms(case, rank)
    if then_ms is None:
        return 0.0, ""
    now_ms = case.run.by_step("forward_time_ms") + case.run.by_step("whole_backward_time_ms")
    more_ms = then_ms - (float(now_ms[rank].median()) - longer_ms)
    if not more_ms > 0:  # not a number where the other ranks' passes were not measured
        return 0.0, ""
    return more_ms, (
        f"Once no rank is late, ranks hinder each other: passes and their exchange then take "
        f"{then_ms:.3g} ms of a step, {more_ms:.3g} ms more than without that [{EXCHANGING}]."
    )


def _passes_ms(case: Case, rank: int) -> float | None:
    """Computes what the passes of a step would take if ``rank`` were as fast as the others.

    Forward passes then take what the others' take in a step now. What follows them takes what it
    took in the measured passes, less what the passes of ``rank`` take longer even alone.

    Returns:
        ms with all exchanges; None where passes that send their gradients were not measured.
    """
    measured, times = case.run.rows(EXCHANGING), together_times(case)
    if measured.empty or times is None:
        return None
    alone = times[1].groupby("rank").median()
    if rank not in alone.index or len(alone) < 2:
        return None
    longer_ms = max(0.0, float(alone[rank] - alone.drop(rank).mean()))
    # A pass ends with its slowest rank, which is now one and now another.
    whole_ms = slowest_rank(measured.assign(whole=measured[PARTS].sum(axis=1)), "whole", by=KEYS)
    other_ranks = measured[measured["rank"] != rank]
    probed_ms = float(other_ranks.groupby("rank")[PARTS[0]].median().mean())
    sending_ms = float(whole_ms.median()) - longer_ms - probed_ms
    exchanges = watched_exchanges(case.run, case.run.gradient_bytes)
    forward_ms = float(own_pass_ms(case, PASSES[0]).median().drop(rank).mean())
    silent = case.run.accumulation - exchanges
    silent_ms = silent * _silent_backward_ms(case, rank) if silent else 0.0
    return forward_ms + exchanges * sending_ms + silent_ms


def own_pass_ms(case: Case, name: str) -> pd.DataFrame:
    """Returns a pass in ms, by step and rank, without waiting in the script's own exchange.

    All ranks leave such an exchange together, so a pass that holds one is as long on every rank as
    on the slowest. The looks tell which rank computes meanwhile, where they tell the ranks apart.
    """
    pass_ms = case.run.by_step(f"{name}_time_ms")
    if pass_ms.empty or STACKS not in case.run.tables:
        return pass_ms
    shares, errors = {}, {}
    for rank in pass_ms:
        rows = looks(case, (name,), rank)
        count = max(1, rows["samples"].sum())
        share = shares[rank] = share_at(rows, EXCHANGES)
        errors[rank] = math.sqrt(max(share * (1 - share), 1 / count) / count)
    most, least = max(shares, key=shares.get), min(shares, key=shares.get)
    if shares[most] - shares[least] <= SURE * math.hypot(errors[most], errors[least]):
        return pass_ms
    return pass_ms * (1 - pd.Series(shares))


def _silent_backward_ms(case: Case, rank: int) -> float:
    """Returns the ms of a backward pass of all ranks at once that sends nothing."""
    passes = case.run.own_passes
    if passes.empty:
        raise NotJudged(f"{PROBES} has no passes of the script's own batch")
    return float(passes[passes["rank"] != rank].groupby("rank")["backward_time_ms"].median().mean())
