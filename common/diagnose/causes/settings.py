"""Causes in the settings of an exchange and in the state of processors, by documented signals.

NCCL's variables are judged by its user guide (*Environment Variables*), the state of a GPU by
NVIDIA's *NVML API Reference*. Of a core Linux tells the clock and counts how often heat has lowered
it, and how long a hypervisor gave it to other machines. What they cost depends on the machine and
is not known from them, so no share of the step is given, and verdicts come after those with one.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace

import pandas as pd
from ddplab_watch.machine_cores import parse_cores

from common.diagnose.causes.needless_work import judge_of
from common.diagnose.causes.sharing import on_gpu
from common.diagnose.evidence.case import MINOR, Case, Verdict, percent
from common.diagnose.evidence.evidence import FACTS, SURROUNDINGS, NotJudged
from common.diagnose.evidence.measured_surroundings import (
    host_of,
    is_on,
    machine_of,
    named_ranks,
    setting,
    surroundings_of,
    uses_nccl,
)
from common.machine_state import STOLEN
from common.runtime.wording import counted, size_text

CAUSE = "nccl-settings"
NOT_ON_A_GPU = "from documented signals; not judged on a GPU by this project"
SHARED_BYTES_PER_WORKER = 64 * 2**20
"""A loader worker keeps two batches in shared memory; 32 MiB are 55 images of 224 × 224 in float32.
"""
DOCKER_SHARED_BYTES = 64 * 2**20
"""Docker's default size of /dev/shm (``--shm-size``)."""
SLOWED = ("HwSlowdown", "SwThermalSlowdown", "HwThermalSlowdown", "HwPowerBrakeSlowdown")
"""Reasons of NVML that mean heat or a failing supply; the others are settings, or an idle GPU."""
BUSY_SHARE = 0.5
"""Least utilisation of a GPU that is not idle: an idle one lowers the generation of its link to
save power."""
FALLEN = 0.8
"""A core whose clock is below four fifths of what it was: a turbo for one core falls to one for all
by less."""
BEHIND = 0.9
"""A GPU's clock over that of the other ranks' of its kind: cards differ by a few percent."""
SEAT_IT = "seat the card (or its riser) anew, or look at the slot's setting in the firmware"
COOL = "look at temperature, fans and supply: nvidia-smi -q -d TEMPERATURE,POWER,PERFORMANCE"
COOL_HOST = (
    "look at the host's temperature and power limits (turbostat, sensors), and at its governor: "
    "cpupower frequency-set -g performance"
)
LEVELS = ("high", "medium", "low")


@dataclass(frozen=True)
class Signal:
    """One thing that was seen: a sentence, what to do about it, how sure it is that it costs time.

    ``of_gpu`` where only a GPU could show what it costs.
    """

    sentence: str
    change: str
    level: str
    of_gpu: bool = True


@dataclass(frozen=True)
class Slowing:
    """A variable that slows the exchange or the step where ``slows(value)`` is True.

    ``where`` says under which conditions it can: ``one host``, ``hosts``, ``nccl``, ``gpu``,
    ``infiniband``, ``logged``, all of which must hold.
    """

    name: str
    effect: str
    slows: Callable[[str], bool] = is_on
    where: tuple[str, ...] = ("nccl",)
    level: str = "medium"


OF_EACH = {"ALL", "CALL", "COLL", "P2P", "PROFILE", "PROXY"}
"""Subsystems of NCCL that log each call; others log while it begins."""
ONE_HOST, ACROSS_HOSTS = ("nccl", "one host"), ("nccl", "hosts", "infiniband")
SOCKETS = "NCCL uses sockets, though InfiniBand (or RoCE) is active"
SLOWING = (
    Slowing(
        "NCCL_P2P_DISABLE",
        "copies from GPU to GPU (NVLink, PCIe) are off, and go through host memory",
        where=ONE_HOST,
    ),
    Slowing(
        "NCCL_P2P_LEVEL",
        "copies from GPU to GPU (NVLink, PCIe) are never used, and go through host memory",
        lambda value: value.upper() in ("LOC", "0"),
        ONE_HOST,
    ),
    Slowing(
        "NCCL_SHM_DISABLE",
        "GPUs of one host that cannot copy to each other exchange over the network",
        where=ONE_HOST,
    ),
    Slowing("NCCL_IB_DISABLE", SOCKETS, where=ACROSS_HOSTS, level="high"),
    Slowing("NCCL_NET", SOCKETS, lambda value: value.lower() == "socket", ACROSS_HOSTS, "high"),
    Slowing("NCCL_ALGO", "NCCL's own choice of an algorithm is restricted", bool, level="low"),
    Slowing("NCCL_PROTO", "NCCL's own choice of a protocol is restricted", bool, level="low"),
    Slowing("TORCH_NCCL_BLOCKING_WAIT", "the host waits for each exchange instead of going on"),
    Slowing(
        "CUDA_LAUNCH_BLOCKING",
        "the host waits for each kernel, and nothing overlaps",
        where=("gpu",),
        level="high",
    ),
    Slowing(
        "NCCL_DEBUG_SUBSYS",
        "NCCL writes of each exchange, into its log or file",
        lambda value: bool(OF_EACH & set(value.upper().split(","))),
        ("nccl", "logged"),
        "low",
    ),
    Slowing(
        "TORCH_DISTRIBUTED_DEBUG",
        "before each exchange ranks compare what they are about to do, in an exchange of its own",
        lambda value: value.upper() == "DETAIL",
        (),
        "high",
    ),
)


def nccl_settings(case: Case) -> Verdict | None:
    """Judges whether settings of NCCL, torch or the container slow down the exchange."""
    case.need_ranks("exchanges nothing")
    table = surroundings_of(case)
    holds = {
        "nccl": uses_nccl(case, table),
        "gpu": on_gpu(case),
        "one host": bool(machine_of(table).duplicated().any()),
        "hosts": machine_of(table).nunique() > 1,
        "infiniband": bool((table["infiniband"] != "").all()),
        "logged": any(
            (setting(row, "NCCL_DEBUG") or "").upper() in ("INFO", "TRACE")
            for _, row in table.iterrows()
        ),
    }
    signals = []
    for slowing in SLOWING:
        if all(holds[condition] for condition in slowing.where):
            signals += _set_on(case, table, slowing)
    signals += _small_shared_memory(case, table, nccl=holds["nccl"])
    verdict = of_signals(CAUSE, "environment variables or a small /dev/shm slow the step", signals)
    measured = judge_of(CAUSE)(case)
    if verdict is None or measured is None:
        return verdict or measured
    evidence = (*measured.evidence, *verdict.evidence)
    return replace(measured, evidence=evidence, change=verdict.change)


def _set_on(case: Case, table: pd.DataFrame, slowing: Slowing) -> Iterable[Signal]:
    values = {row["rank"]: setting(row, slowing.name) for _, row in table.iterrows()}
    ranks = [rank for rank, value in values.items() if value is not None and slowing.slows(value)]
    if ranks:
        where = "all ranks" if len(ranks) == case.ranks else named_ranks(ranks).lower()
        yield Signal(
            f"{slowing.name}={values[ranks[0]]} is set on {where}: {slowing.effect} "
            f"[{SURROUNDINGS}].",
            f"unset {slowing.name}",
            slowing.level,
            of_gpu=bool(slowing.where),
        )


def _small_shared_memory(case: Case, table: pd.DataFrame, *, nccl: bool) -> Iterable[Signal]:
    """Yields a signal for a host whose shared memory is too small for its loader workers.

    Where nobody counted them, only Docker's default is too small, and only for ranks that exchange
    through it.
    """
    facts = case.run.rows(FACTS).set_index("rank").reindex(columns=["loader_workers"])
    workers = pd.to_numeric(facts["loader_workers"], errors="coerce")
    are_counted = len(workers) > 0 and bool(workers.notna().all())
    for host, rows in table.groupby(host_of(case, table)):
        size = float(rows["dev_shm_bytes"].min())
        if not are_counted:
            too_small = nccl and len(rows) > 1 and size <= DOCKER_SHARED_BYTES
            who, needed = f"{len(rows)} ranks", 2**30  # NVIDIA recommends 1 GiB for containers
        else:
            count = int(workers[workers.index.isin(rows["rank"])].sum())
            needed = count * SHARED_BYTES_PER_WORKER
            who, too_small = f"{count} loader workers [{FACTS}]", size < needed
        if too_small:
            yield Signal(
                f"/dev/shm of {host} has {size_text(size)} for {who} [{SURROUNDINGS}].",
                f"docker run --shm-size={math.ceil(needed / 2**30)}g (Kubernetes: an emptyDir of "
                "medium Memory at /dev/shm)",
                "medium" if are_counted else "low",
                of_gpu=not are_counted,
            )


def gpu_surroundings(case: Case) -> Verdict | None:
    """Judges whether a GPU's link, place or other users slow it down."""
    if not on_gpu(case):
        return None
    table = surroundings_of(case)
    if (table["gpu_uuid"] == "").all():
        raise NotJudged(f"{SURROUNDINGS} has no facts of GPUs (pynvml was not there)")
    signals = []
    for _, row in table.iterrows():
        signals += [*_narrow_link(row), *_far_cores(row), *_others(row, table)]
    title = "a GPU's link, its place or other processes slow it down"
    return of_signals("gpu-surroundings", title, signals)


def _narrow_link(row: pd.Series) -> Iterable[Signal]:
    link = f"Rank {row['rank']}: the PCIe link of {row['gpu_name']} ({row['gpu_bus_id']})"
    width, most = row["gpu_pcie_width"], row["gpu_pcie_width_max"]
    if width < most:
        lanes = f"{link} has {width:.0f} of {most:.0f} lanes [{SURROUNDINGS}]."
        yield Signal(lanes, SEAT_IT, "medium")
    now, best = row["gpu_pcie_generation"], row["gpu_pcie_generation_max"]
    if now < best and row["gpu_utilisation_share"] >= BUSY_SHARE:
        yield Signal(
            f"{link} runs at generation {now:.0f} of {best:.0f} while the GPU computes in "
            f"{percent(row['gpu_utilisation_share'])} of the time [{SURROUNDINGS}].",
            SEAT_IT,
            "low",
        )


def _far_cores(row: pd.Series) -> Iterable[Signal]:
    nodes, node = parse_cores(row["core_numa_nodes"]), row["gpu_numa_node"]
    if nodes and not math.isnan(node) and int(node) not in nodes:
        yield Signal(
            f"Rank {row['rank']}: {row['gpu_bus_id']} hangs on NUMA node {node:.0f}, the process "
            f"may run on cores of node {row['core_numa_nodes']} only [{SURROUNDINGS}].",
            f"numactl --cpunodebind={node:.0f} --membind={node:.0f}, or srun --gpu-bind=closest",
            "medium",
        )


def _others(row: pd.Series, table: pd.DataFrame) -> Iterable[Signal]:
    """Yields a signal for processes on the GPU that are no ranks (those are ``shared-device``)."""
    on_host = table[table["host"] == row["host"]]
    same = on_host["gpu_uuid"].map(on_host["gpu_uuid"].value_counts())
    foreign = on_host["gpu_other_processes"] - (same - 1)
    elsewhere = foreign[on_host["gpu_uuid"] != row["gpu_uuid"]]
    count = foreign[row.name]
    if count > 0 and count == len(elsewhere) and elsewhere.eq(0).all():
        yield Signal(
            f"Rank {row['rank']}: as many other processes as ranks on other GPUs, "
            f"{len(elsewhere)}, hold memory on {row['gpu_uuid']} [{SURROUNDINGS}].",
            "torch.cuda.set_device(LOCAL_RANK) before anything is put on a GPU, "
            "torch.load(..., map_location='cpu'), and no .cuda() or 'cuda:0' in what all ranks run",
            "medium",
        )
    elif count > 0:
        yield Signal(
            f"Rank {row['rank']}: {counted(count, 'process')} of another job "
            f"compute{'' if count > 1 else 's'} on {row['gpu_uuid']} [{SURROUNDINGS}].",
            "nvidia-smi shows which; end them, or take another GPU (CUDA_VISIBLE_DEVICES)",
            "medium",
        )


def of_signals(cause: str, title: str, signals: list[Signal]) -> Verdict | None:
    """Makes one verdict of all signals, as sure as the surest of them."""
    if not signals:
        return None
    reasons = ["settings and states are seen; what they cost is not measured"]
    if any(signal.of_gpu for signal in signals):
        reasons.append(NOT_ON_A_GPU)
    return Verdict(
        cause=cause,
        title=title,
        evidence=tuple(signal.sentence for signal in signals),
        confidence=min((signal.level for signal in signals), key=LEVELS.index),
        reason="; ".join(reasons),
        change="; ".join(dict.fromkeys(signal.change for signal in signals)) + ".",
        group=MINOR,
    )


def lowered_clocks(case: Case) -> Verdict | None:
    """Judges whether the clock of a rank's processor fell, or somebody else was given its cores."""
    signals = [signal for _, signal in _signals(case)]
    return of_signals("lowered-clocks", "a processor runs slower than it can", signals)


def clock_sentences(case: Case, rank: int) -> list[str]:
    """Returns what is known of the clocks of a rank, as sentences; none where nothing is."""
    try:
        return [signal.sentence for whose, signal in _signals(case) if whose == rank]
    except NotJudged:
        return []


def _signals(case: Case) -> list[tuple[int, Signal]]:
    """Returns each signal with its rank; of a machine, that of its first one."""
    first, last = surroundings_of(case, first=True), surroundings_of(case)
    columns = ["cpu_mhz", "gpu_sm_clock_mhz", "interval_stolen_cores", "interval_heat_stops"]
    if last[columns].isna().all(axis=None) and (last["gpu_throttle_reasons"] == "").all():
        raise NotJudged(f"{SURROUNDINGS} says nothing of clocks")
    signals = []
    for index, row in last.iterrows():
        of_rank = [*_of_gpu(row), *_behind(row, last), *_of_core(row, first.loc[index])]
        signals += [(int(row["rank"]), signal) for signal in of_rank]
    machines = last[~machine_of(last).duplicated()]
    signals += [(int(row["rank"]), s) for _, row in machines.iterrows() for s in _of_machine(row)]
    return signals


def _of_gpu(row: pd.Series) -> Iterable[Signal]:
    reasons = [name for name in row["gpu_throttle_reasons"].split() if name in SLOWED]
    limit, usual = row["gpu_power_limit_w"], row["gpu_power_default_w"]
    # At its own limit a busy GPU is always near the cap; a lowered one is somebody's decision.
    capped = "SwPowerCap" in row["gpu_throttle_reasons"].split() and limit < usual
    clock, most = row["gpu_sm_clock_mhz"], row["gpu_sm_clock_max_mhz"]
    are_known = not math.isnan(clock) and not math.isnan(most)
    clocks = f" (at {clock:.0f} of {most:.0f} MHz as it was read)" if are_known else ""
    if reasons:
        yield Signal(
            f"Rank {row['rank']}: clocks are lowered by {', '.join(reasons)}{clocks} "
            f"[{SURROUNDINGS}].",
            COOL,
            "medium",
        )
    if capped:
        yield Signal(
            f"Rank {row['rank']}: power is limited to {limit:.0f} W, below the {usual:.0f} W of "
            f"this GPU, and lowers the clocks{clocks} [{SURROUNDINGS}].",
            f"nvidia-smi -pl {usual:.0f} (an administrator's)",
            "medium",
        )


def _behind(row: pd.Series, table: pd.DataFrame) -> Iterable[Signal]:
    """Yields a signal for a GPU whose clock is below that of the other ranks' of its kind."""
    is_alike = (table["gpu_name"] == row["gpu_name"]) & (table["rank"] != row["rank"])
    clock, usual = row["gpu_sm_clock_mhz"], table.loc[is_alike, "gpu_sm_clock_mhz"].median()
    if row["gpu_name"] and clock < BEHIND * usual:
        yield Signal(
            f"Rank {row['rank']}: its GPU runs at {clock:.0f} MHz, the other ranks' at "
            f"{usual:.0f} MHz [{SURROUNDINGS}].",
            COOL,
            "medium",
        )


def _of_core(row: pd.Series, before: pd.Series) -> Iterable[Signal]:
    """Yields a signal for a core whose clock fell, or that heat has slowed."""
    stops, clock, earlier = row["interval_heat_stops"], row["cpu_mhz"], before["cpu_mhz"]
    if stops > 0:
        yield Signal(
            f"Rank {row['rank']}: heat has lowered the clocks of its cores {stops:.0f} times while "
            f"it was watched [{SURROUNDINGS}].",
            COOL_HOST,
            "medium",
            of_gpu=False,
        )
    if clock < FALLEN * earlier:
        yield Signal(
            f"Rank {row['rank']}: its core runs at {clock / 1e3:.2f} GHz, and at "
            f"{earlier / 1e3:.2f} GHz as the watch began [{SURROUNDINGS}].",
            COOL_HOST,
            "low",  # two moments
            of_gpu=False,
        )


def _of_machine(row: pd.Series) -> Iterable[Signal]:
    """Yields a signal for a virtual machine whose cores a hypervisor gives to others."""
    stolen, cores = row["interval_stolen_cores"], row["machine_cores"]
    if stolen >= STOLEN * cores:
        yield Signal(
            f"{row['host']}: the hypervisor gave {stolen:.2g} of {cores:.0f} cores, "
            f"{percent(stolen / cores)}, to other machines while it was watched [{SURROUNDINGS}].",
            "take an instance whose cores are its own (no burstable or shared one), or move it to "
            "another host",
            "medium",
            of_gpu=False,
        )
