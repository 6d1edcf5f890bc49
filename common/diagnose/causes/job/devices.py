"""Causes in the GPUs of a machine and their links, from what nvidia-smi prints."""

from __future__ import annotations

import re
from collections.abc import Iterator

from common.diagnose.causes.settings import SEAT_IT, SLOWED, Signal, of_signals
from common.diagnose.evidence.case import Verdict
from common.diagnose.evidence.evidence import NotJudged
from common.diagnose.evidence.left_behind import LeftBehind
from common.runtime.wording import counted
from common.traces.logs.nvidia_smi import GpuState

COOL = "look at temperature, fans and supply: nvidia-smi -q -d TEMPERATURE,POWER"
CLOCK_SHARE = 0.9
"""GPUs of one model boost to clocks a few percent apart; a tenth below the others is a fault."""
BUSY_PERCENT = 50
FAST = ("NV", "PIX", "PXB")
"""Links that do not leave a PCIe tree: NVLink, or switches below one host bridge."""
SLOWING_REASONS = {*SLOWED, "SWThermalSlowdown", "HWSlowdown", "HWThermalSlowdown"}
SLOWING_REASONS |= {"HWPowerBrakeSlowdown"}
"""Reasons as NVML spells them, and as nvidia-smi does, without spaces."""


def gpu_links(job: LeftBehind) -> Verdict | None:
    """Judges whether GPUs, or GPUs and network adapters, are far from each other."""
    smi = job.printed.smi
    if not any(topology.links for topology in smi.topologies):
        raise NotJudged("no matrix of nvidia-smi topo -m")
    signals = []
    for topology in smi.topologies:
        links = topology.between_gpus()
        far = {pair: link for pair, link in links.items() if not link.startswith(FAST)}
        if far:
            (a, b), link = next(iter(far.items()))
            through = "the processor's host bridge" if link == "PHB" else "its interconnect"
            signals.append(
                Signal(
                    f"{len(far)} of {counted(len(links), 'pair')} of GPUs are connected only "
                    f"through the processor, such as GPU{a} and GPU{b} by {link} ({through}) "
                    f"{topology.where}.",
                    "use GPUs that NVLink or a PCIe switch connects (CUDA_VISIBLE_DEVICES) where "
                    "a job needs fewer than all; else exchange less (bf16 gradients, accumulation)",
                    "low",
                )
            )
        nics = topology.to_nics()
        lone = [gpu for gpu, ways in nics.items() if ways <= {"SYS", "SOC"}]
        if lone and len(lone) < len(nics):
            names = ", ".join(f"GPU{gpu}" for gpu in sorted(lone))
            signals.append(
                Signal(
                    f"{names}: every network adapter is at the other processor (SYS) "
                    f"{topology.where}.",
                    "an adapter for each processor; NCCL_CROSS_NIC and PXN are NCCL's own remedies",
                    "low",
                )
            )
    title = "GPUs, or their network adapters, are connected only through processors"
    return of_signals("gpu-links", title, signals)


def gpu_state(job: LeftBehind) -> Verdict | None:
    """Judges whether a GPU is slowed down or damaged, by nvidia-smi -q and dmon."""
    smi = job.printed.smi
    if not (any(state.values for state in smi.states) or smi.samples):
        raise NotJudged("no output of nvidia-smi -q or dmon")
    signals = [signal for state in smi.states for signal in _of_state(state)]
    signals += _of_samples(job)
    return of_signals("gpu-surroundings", "a GPU is slowed down or damaged", signals)


def _of_state(state: GpuState) -> Iterator[Signal]:
    name = f"GPU {state.name}"
    for path, value in state.values.items():
        section, _, entry = path.rpartition("/")
        where = state.where[path]
        if "Reasons" in section and value == "Active" and entry.replace(" ", "") in SLOWING_REASONS:
            yield Signal(
                f"{name}: clocks are lowered by {entry} {where}.",
                COOL,
                "medium",
            )
        if "ncorrectable" in entry and "Volatile" in section and value not in ("0", "N/A"):
            yield Signal(
                f"{name}: {value} memory errors could not be corrected ({entry}) {where}.",
                "reset or replace the GPU; dmesg | grep Xid",
                "high",
            )
        if entry in ("Pending", "Pending Page Blacklist") and value == "Yes":
            yield Signal(
                f"{name}: damaged memory waits to be replaced by spare rows ({path}) {where}.",
                "reset that GPU (nvidia-smi --gpu-reset, or a reboot)",
                "medium",
            )
    yield from _narrow_link(state, name)
    yield from _lowered_power(state, name)


def _first(state: GpuState, *entries: str) -> tuple[float, str]:
    """Returns the first number of these entries, with its path; 0 where there is none."""
    path, text = next(iter(state.find(*entries).items()), ("", ""))
    match = re.match(r"\d+(?:\.\d+)?", text)
    return float(match[0]) if match else 0.0, path


def _narrow_link(state: GpuState, name: str) -> Iterator[Signal]:
    now, path = _first(state, "Link Width/Current")
    most, _ = _first(state, "Link Width/Max")
    if now and most and now < most:
        yield Signal(
            f"{name}: its PCIe link has {now:.0f} of {most:.0f} lanes {state.where[path]}.",
            SEAT_IT,
            "medium",
        )


def _lowered_power(state: GpuState, name: str) -> Iterator[Signal]:
    now, path = _first(state, "Current Power Limit", "Readings/Power Limit")
    usual, _ = _first(state, "Default Power Limit")
    if now and usual and now < usual:
        yield Signal(
            f"{name}: power is limited to {now:.0f} W, below the {usual:.0f} W of this GPU "
            f"{state.where[path]}.",
            f"nvidia-smi -pl {usual:.0f} (an administrator's)",
            "medium",
        )


def _of_samples(job: LeftBehind) -> Iterator[Signal]:
    table = job.printed.smi.table()
    if table.empty:
        return
    where = table.groupby("gpu")["where"].first()
    for column, why in (("pviol", "power"), ("tviol", "heat")):
        if column in table:
            for gpu, value in table.groupby("gpu")[column].median().items():
                if value > 0:
                    yield Signal(
                        f"GPU {gpu:.0f}: clocks are lowered for want of {why} headroom in more "
                        f"than half of the samples ({column}) {where[gpu]}.",
                        COOL,
                        "medium",
                    )
    busy = table[table["sm"] >= BUSY_PERCENT] if "sm" in table else table.iloc[:0]
    if "pclk" not in busy or busy["gpu"].nunique() < 2:
        return
    clocks = busy.groupby("gpu")["pclk"].median()
    for gpu, clock in clocks.items():
        usual_mhz = clocks.drop(gpu).median()
        if clock < CLOCK_SHARE * usual_mhz:
            yield Signal(
                f"GPU {gpu:.0f} runs at {clock:.0f} MHz while it is busy, the others at "
                f"{usual_mhz:.0f} MHz {where[gpu]}.",
                "look at its clocks (nvidia-smi -q -d PERFORMANCE,CLOCK): all ranks wait for it",
                "medium",
            )
