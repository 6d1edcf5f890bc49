"""Which network joins the ranks, as far as it is known: loopback, emulated links, a real one."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence

from common.runtime.ranks import current_ranks

EMULATED_NETWORK = "DDPLAB_EMULATED_NETWORK"


def emulated_network(env: Mapping[str, str] = os.environ) -> dict | None:
    """The emulated network that this process runs in, as its switch describes it, or None.

    Keys: hosts, rates_bit_per_s, ranks_per_host, delay_ms, burst_bytes, congestion_control and
    probe (what a plain TCP stream reached on each link, in bit/s of payload).
    """
    return json.loads(env[EMULATED_NETWORK]) if EMULATED_NETWORK in env else None


def network_name(backend: str | None) -> str | None:
    """Short name of the network between the ranks, where it is known for sure.

    Measurements over networks with different names are not comparable.
    """
    emulated = emulated_network()
    if emulated:
        delay = f", {emulated['delay_ms']:g} ms delay" if emulated["delay_ms"] else ""
        rates = describe_rates(emulated["rates_bit_per_s"])
        return f"{emulated['hosts']} emulated hosts at {rates}{delay}"
    ranks = current_ranks()
    if backend == "gloo" and ranks.world_size == ranks.local_world_size:
        return "TCP over loopback"
    return None


def describe_rates(rates_bit_per_s: Sequence[float]) -> str:
    """``1 Gbit/s``, or the rate of each host where they differ: ``1, 0.5 Gbit/s``."""
    unit, name = (1e9, "Gbit/s") if max(rates_bit_per_s) >= 1e9 else (1e6, "Mbit/s")
    if len(set(rates_bit_per_s)) == 1:
        return f"{rates_bit_per_s[0] / unit:g} {name}"
    return f"{', '.join(f'{rate / unit:g}' for rate in rates_bit_per_s)} {name}"
