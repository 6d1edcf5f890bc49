"""Causes that lie in what a machine grants a job: processor time, cores, and the right network."""

from __future__ import annotations

import math
from contextlib import suppress

import pandas as pd

from common.diagnose.causes.sharing import compute_share, cores_got, on_gpu, starved
from common.diagnose.evidence.case import (
    MINOR,
    Case,
    Verdict,
    gain_without,
    most_costly,
    percent,
)
from common.diagnose.evidence.evidence import PLACEMENT, STEPS, SURROUNDINGS, NotJudged
from common.diagnose.evidence.measured_surroundings import (
    host_of,
    is_on,
    machine_of,
    number_of_cores,
    setting,
    surroundings_of,
    uses_nccl,
)
from common.perfmodel.scaling.scaled_step import at_bandwidth
from common.perfmodel.scaling.step_model import predict
from common.runtime.wording import counted

THROTTLED_SHARE = 0.05
"""Threshold of the share of throttled periods. Starts (imports, compilation) use up a quota for a
second or two, a twentieth of the periods of half a minute; a run that its quota slows down is
throttled in most of them."""
SPARE = 2.0
"""With twice as many cores as threads every rank can have a second one."""
COMPUTING = 0.7
"""A rank whose processor time is less than 0.7 of its passes does not compute in them all the time:
it waits for a disk, sleeps or shares its core, and a second thread would wait as well."""
ONE_CORE = 1.5
"""A rank that got more than one core and a half has other threads that compute already."""
BOUND = "an upper bound (Amdahl's law), not tried"
GAIN_SHARE = 0.2
"""The upper bound of the gain must be a fifth of the step: what is reached is less."""
FASTER = 2.0
"""An interface is faster from twice the rate on: cards of one machine come in steps of 2 to 10, and
what a link carries of its rate differs by less."""
BRIDGES = ("docker", "br-", "virbr", "podman", "cni", "lxcbr")
"""Names of bridges to containers and virtual machines of the same host, with no card behind them.
"""


def cpu_quota(case: Case) -> Verdict | None:
    """Judges whether a cgroup's quota stops the ranks before the kernel's next period."""
    table = surroundings_of(case)
    throttled = table["interval_throttled_share"].fillna(table["cgroup_throttled_share"])
    table = table.assign(throttled=throttled)
    by_host = [_short_quota(case, rows) for _, rows in table.groupby(host_of(case, table))]
    return most_costly(*by_host)


def _short_quota(case: Case, rows: pd.DataFrame) -> Verdict | None:
    """Judges the ranks of one host, which share its quota."""
    quota, throttled = float(rows["cgroup_cpu_quota"].min()), float(rows["throttled"].max())
    if math.isnan(quota) or throttled < THROTTLED_SHARE:
        return None
    threads = float(rows["threads"].sum(min_count=len(rows)))  # NaN where torch was not asked
    cores = number_of_cores(rows["core_list"])
    wanted = min(threads, cores or math.inf)
    short = quota < wanted
    if not short and math.isnan(throttled):
        return None
    ranks = len(rows)
    evidence = [
        f"{rows['host'].iloc[0]} grants its {counted(ranks, 'rank')} {counted(quota, 'core')} "
        f"[{SURROUNDINGS}]."
    ]
    if not math.isnan(threads):
        evidence.append(
            f"They compute with {threads:.0f} threads on {cores} cores [{SURROUNDINGS}]."
        )
    if not math.isnan(throttled):
        evidence.append(
            f"In {percent(throttled)} of the kernel's periods it was used up, and all threads "
            f"stood still until the next [{SURROUNDINGS}]."
        )
    in_run = bool(rows["interval_throttled_share"].notna().any())
    lost = _stopped_share(case, quota, wanted, throttled) if short else 0.0
    if lost:
        evidence.append(
            f"Where {wanted:.0f} threads use it up together, they stand still for "
            f"{percent(1 - quota / wanted)} of such a period, {percent(lost)} of the time."
        )
    with suppress(NotJudged):
        evidence += starved(case)
    threads_per_rank = max(1, int(quota) // ranks)
    return _if_known(
        case,
        cause="cpu-quota",
        title=f"a quota of {counted(quota, 'core')} stops the ranks of {rows['host'].iloc[0]}",
        evidence=evidence,
        lost=lost,
        sure=_sure_of_quota(short, throttled, in_run=in_run),
        change=(
            f"Ask for the cores that the threads need: --cpus-per-task (Slurm), docker run "
            f"--cpus {wanted:.0f}, resources.limits.cpu (Kubernetes); until then "
            f"OMP_NUM_THREADS={threads_per_rank}."
            if short
            else "Ask for more cores (--cpus-per-task, docker run --cpus, resources.limits.cpu), "
            "or start fewer loader workers and other processes beside the ranks."
        ),
    )


def _if_known(case: Case, lost: float, **fields: object) -> Verdict:
    """Returns a verdict, without speedups and among the last where nothing is known to be lost."""
    if not lost:
        fields |= {"speedup_now": None, "gain": None, "group": MINOR}
    return case.verdict(lost=lost, **fields)


def _sure_of_quota(short: bool, throttled: float, *, in_run: bool) -> tuple[str, str]:
    """Returns how sure it is that the quota slows the ranks, and why."""
    if math.isnan(throttled):
        return "low", "there are more threads than granted cores; stops were not counted"
    if not short:
        return "medium", "stops are counted, but the threads alone do not explain them"
    reason = "stops are counted, and there are more threads than granted cores"
    if in_run:
        return "high", reason
    return "medium", f"{reason}; counted since the group was made, not in this run alone"


def _stopped_share(case: Case, quota: float, wanted: float, throttled: float) -> float:
    """Returns the share of time that the threads stood still; 0 where unknown.

    W threads that compute all the time use up a quota of Q cores in Q/W of a period and stand
    still for the rest of it: on two cores, a quota of one doubles a step. Threads that pause use it
    up later. On a GPU, torch's threads do not say how many are computing.
    """
    if math.isnan(throttled) or PLACEMENT not in case.run.tables or on_gpu(case):
        return 0.0
    return throttled * (1 - quota / wanted)


def too_few_threads(case: Case) -> Verdict | None:
    """Judges whether each rank computes with one thread while cores stand idle."""
    table = surroundings_of(case)
    if on_gpu(case):
        return None
    if table["threads"].isna().any():
        raise NotJudged(f"{SURROUNDINGS} does not say how many threads torch computes with")
    if (table["threads"] != 1).any():
        return None
    got = cores_got(case)
    if got is None:
        raise NotJudged(f"{STEPS} has no cpu_time_ms")
    share = compute_share(case)
    # The slowest rank decides, so a host without idle cores leaves nothing to gain.
    machines = table.groupby(machine_of(table))
    least = min(_free_cores(case, rows) / len(rows) for _, rows in machines)
    threads = math.floor(least)
    if least < SPARE or not COMPUTING * share <= got <= ONE_CORE:
        return None
    lost = share * (1 - 1 / threads)
    if lost < GAIN_SHARE:
        return None
    is_counted = bool(table["interval_busy_cores"].notna().all())
    by_torchrun = (table["omp_num_threads"] == 1).all()
    return case.verdict(
        cause="too-few-threads",
        title="one thread per rank, while cores stand idle",
        evidence=(
            f"Each of {counted(case.ranks, 'rank')} computes with one thread"
            f"{', as OMP_NUM_THREADS=1 says' if by_torchrun else ''}; {least:.3g} cores are there "
            f"for each [{SURROUNDINGS}].",
            f"A rank got {got:.2f} cores, and its passes take {percent(share)} of the step "
            f"[{STEPS}].",
            f"If {threads} threads shared all of the passes' work evenly, a step would take "
            f"{percent(lost)} less. That is an upper bound; small operators gain nothing.",
        ),
        lost=lost,
        sure=("medium", f"{BOUND}; the cores were seen idle")
        if is_counted
        else ("low", f"{BOUND}; nobody saw whether the cores are idle"),
        change=(
            f"OMP_NUM_THREADS={threads} before torchrun, which sets 1 where nothing is set; or "
            f"torch.set_num_threads({threads}) as the script begins."
        ),
        gain_low=1.0,  # an upper bound may bring nothing
        gain_high=gain_without(lost),
    )


def _free_cores(case: Case, rows: pd.DataFrame) -> float:
    """Returns the cores that the ranks of one machine can have: allowed, granted and not in use.

    Two hyper-threads of a core count as one, since they share what computes.
    """
    physical = rows["own_physical_cores"].fillna(rows["cores"]) / rows["cores"]
    allowed = number_of_cores(rows["core_list"]) * float(physical.min())
    if rows["cgroup_cpu_quota"].notna().all():
        quotas = rows.groupby(host_of(case, rows))["cgroup_cpu_quota"].min()
        allowed = min(allowed, float(quotas.sum()))
    if rows[["interval_busy_cores", "interval_own_cores"]].notna().all(axis=None):
        other_jobs = rows["interval_busy_cores"].max() - rows["interval_own_cores"].sum()
        unused = rows["machine_cores"].max() - max(0.0, float(other_jobs))
        if not math.isnan(unused):
            allowed = min(allowed, unused)
    return allowed


def wrong_interface(case: Case) -> Verdict | None:
    """Judges whether ranks of several machines exchange over a slow interface."""
    table = surroundings_of(case)
    if machine_of(table).nunique() < 2:
        return None
    nccl = uses_nccl(case, table)
    if nccl and _adapters_in_use(table):
        return None
    hosts = table.drop_duplicates("host")
    if (hosts["interface"] == "").all():
        raise NotJudged(f"{SURROUNDINGS} does not say which interface the ranks use")
    inside = hosts[
        hosts["interface_mbit"].isna()
        & ((hosts["interface"] == "lo") | hosts["interface"].str.startswith(BRIDGES))
    ]
    slow = hosts[hosts["fastest_interface_mbit"] >= FASTER * hosts["interface_mbit"]]
    if inside.empty and slow.empty:
        if hosts["interface_mbit"].isna().all():
            names = ", ".join(sorted(set(hosts["interface"])))
            raise NotJudged(f"the system does not tell the speed of {names}")
        return None
    return _interface_verdict(case, hosts, inside, slow, "nccl" if nccl else "gloo")


def _adapters_in_use(table: pd.DataFrame) -> bool:
    """Returns True if NCCL exchanges over InfiniBand, which needs sockets only to begin."""
    off = [
        is_on(setting(row, "NCCL_IB_DISABLE"))
        or (setting(row, "NCCL_NET") or "").lower() == "socket"
        for _, row in table.iterrows()
    ]
    return bool((table["infiniband"] != "").all()) and not any(off)


def _interface_verdict(
    case: Case, hosts: pd.DataFrame, inside: pd.DataFrame, slow: pd.DataFrame, backend: str
) -> Verdict:
    evidence = [
        f"{row.host} exchanges over {row.interface} ({row.interface_source}), which leads to no "
        f"other machine [{SURROUNDINGS}]."
        for row in inside.itertuples()
    ]
    evidence += [
        f"{row.host} exchanges over {row.interface} ({row.interface_source}) at "
        f"{row.interface_mbit:,.0f} Mbit/s; {row.fastest_interface} is up at "
        f"{row.fastest_interface_mbit:,.0f} Mbit/s [{SURROUNDINGS}]."
        for row in slow.itertuples()
    ]
    # The slowest link decides, and it becomes only as fast as the slowest of the fastest ones.
    factor = math.nan
    if inside.empty and hosts["interface_mbit"].notna().all():
        factor = float(hosts["fastest_interface_mbit"].min() / hosts["interface_mbit"].min())
    lost = _lost_to_slow_links(case, factor) if factor >= FASTER else 0.0
    named = hosts["interface_source"].str.endswith("_IFNAME").all()
    level = "medium" if named or (hosts["interface_source"] != "default route").all() else "low"
    if named and slow.empty:
        level = "high"
    names = sorted({*inside["interface"], *slow["interface"]})
    wanted = sorted(set(hosts["fastest_interface"]) - {""})
    variable = f"{backend.upper()}_SOCKET_IFNAME"
    source = "the variable names the interface" if named else "the interface is taken from routes"
    return _if_known(
        case,
        cause="wrong-interface",
        title=f"the exchange goes over the wrong interface: {', '.join(names)}",
        evidence=evidence,
        lost=lost,
        sure=(level, f"{source}; that the faster one leads to the other hosts was not tried"),
        change=(
            f"export {variable}={wanted[0]} on every host, if the hosts reach each other over it."
            if len(wanted) == 1
            else f"export {variable} on each host with the interface that leads to the others"
            + (f": {', '.join(wanted)}." if wanted else ".")
        ),
        gain_low=1.0 if lost else None,
        gain_high=gain_without(lost) if lost else None,
    )


def _lost_to_slow_links(case: Case, factor: float) -> float:
    """Returns the share of the step that links ``factor`` times as fast would save; 0 if unknown.

    By the step model, no more than the bytes' share of what is exposed; without the model's tables
    by that alone, which leaves out latency and so is an upper bound.
    """
    try:
        exposed = case.share("communication_time_ms")[0] * (1 - 1 / factor)
    except NotJudged:
        return 0.0
    model = case.model_or_none()
    if model is None:
        return exposed
    now, after = (predict(at_bandwidth(model, times)) for times in (1.0, factor))
    return min(exposed, max(0.0, 1 - after.step_n_s / now.step_n_s))
