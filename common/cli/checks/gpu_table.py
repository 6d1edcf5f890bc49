"""The GPUs of this machine as rows of a table: what they are, how they are set, what joins them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from common.runtime.machine.gpus import Clock, Gpu, GpuFacts, GpuPair
from common.runtime.machine.pci import Nearest
from common.runtime.wording import counted

UNKNOWN = "not known"
MANY = 8
"""Upper bound on the GPUs or pairs with one value that are named one by one."""


def gpu_rows(facts: GpuFacts) -> list[tuple[str, str]]:
    """Returns (name, value) rows; GPUs and pairs with the same value share a line."""
    driver = f"{facts.driver or UNKNOWN}, for CUDA up to {facts.driver_cuda or UNKNOWN}"
    rows: list[tuple[str, str]] = [("driver", driver)]
    questions: tuple[tuple[str, Callable[[Gpu], str]], ...] = (
        ("name", _name),
        ("UUID", lambda gpu: gpu.uuid or UNKNOWN),
        ("SM clock", lambda gpu: _clock(gpu.sm_clock)),
        ("memory clock", lambda gpu: _clock(gpu.memory_clock)),
        ("power limit", lambda gpu: _watts(gpu.power_limit_w)),
        ("ECC", lambda gpu: _on_or_off(gpu.ecc)),
        ("MIG", _mig),
        ("compute mode", lambda gpu: gpu.compute_mode or UNKNOWN),
        ("persistence", lambda gpu: _on_or_off(gpu.persistence)),
        ("PCIe", _pcie),
        ("NUMA node", _numa),
        ("nearest network", _nearest),
    )
    for name, answer in questions:
        rows.append((name, _grouped({str(i): answer(gpu) for i, gpu in enumerate(facts.gpus)})))
    rows.append(("power draw", ", ".join(_watts(gpu.power_draw_w) for gpu in facts.gpus)))
    if facts.pairs:
        pairs = {f"{pair.first}–{pair.second}": _pair(pair) for pair in facts.pairs}
        rows.append(("between GPUs", _grouped(pairs)))
    return rows


def _grouped(values: Mapping[str, str]) -> str:
    """Returns the one value of all, else a line for each value with those that have it.

    Where more than MANY share the most frequent value, it stands last, without their names.
    """
    owners: dict[str, list[str]] = {}
    for owner, value in values.items():
        owners.setdefault(value, []).append(owner)
    if len(owners) == 1:
        return next(iter(owners))
    usual = max(owners, key=lambda value: len(owners[value]))
    last = [f"all others: {usual}"] if len(owners[usual]) > MANY else []
    lines = [
        f"{', '.join(names)}: {value}"
        for value, names in owners.items()
        if not last or value != usual
    ]
    return "\n".join(lines + last)


def _name(gpu: Gpu) -> str:
    memory = f"{gpu.memory_bytes / 2**30:.1f} GiB" if gpu.memory_bytes else "memory not known"
    return f"{gpu.name}, {memory}, compute capability {gpu.compute_capability or UNKNOWN}"


def _clock(clock: Clock) -> str:
    if clock.current_mhz is None:
        return UNKNOWN
    parts = [f"at most {clock.max_mhz}"] if clock.max_mhz is not None else []
    if clock.application_mhz is not None:
        parts.append(f"set to {clock.application_mhz}")
    return f"{clock.current_mhz} MHz" + (f" ({', '.join(parts)})" if parts else "")


def _watts(value: float | None) -> str:
    return UNKNOWN if value is None else f"{value:.0f} W"


def _on_or_off(value: bool | None) -> str:
    return UNKNOWN if value is None else "on" if value else "off"


def _mig(gpu: Gpu) -> str:
    return "a slice of a GPU" if gpu.mig_slice else _on_or_off(gpu.mig_mode)


def _pcie(gpu: Gpu) -> str:
    if gpu.pcie_generation is None or gpu.pcie_width is None:
        return UNKNOWN
    text = f"generation {gpu.pcie_generation} × {gpu.pcie_width}"
    if gpu.pcie_generation_max is None or gpu.pcie_width_max is None:
        return text
    return f"{text} (at most {gpu.pcie_generation_max} × {gpu.pcie_width_max})"


def _numa(gpu: Gpu) -> str:
    if gpu.numa_node is None:
        return UNKNOWN
    return f"{gpu.numa_node}" + (f" (cores {gpu.local_cores})" if gpu.local_cores else "")


def _nearest(gpu: Gpu) -> str:
    parts = [
        f"{', '.join(card.names)} (same {card.by})" if card.by != "PCIe" else ", ".join(card.names)
        for card in _cards(gpu)
    ]
    return "; ".join(parts) or "none found"


def _cards(gpu: Gpu) -> Sequence[Nearest]:
    return [card for card in (gpu.nearest_infiniband, gpu.nearest_network) if card is not None]


def _pair(pair: GpuPair) -> str:
    if pair.nvlinks:
        way = counted(pair.nvlinks, "NVLink")
    else:
        way = f"PCIe through {pair.pcie}" if pair.pcie else UNKNOWN
    peer = f", peer-to-peer {pair.peer_to_peer}" if pair.peer_to_peer else ""
    return way + peer
