"""The networks of the accuracy study: loopback, and links that suit a model.

A regime says how long all communication takes beside the backward pass, each alone. The rate
follows from the model on the machine at hand, so that every model is seen in every regime.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from common.errors import UserError
from common.perfmodel.expected_error import LOOPBACK, REGIMES

PAYLOAD = 0.94
"""Share of a link's rate that a TCP stream carries as payload; the rest is headers."""
FASTEST_MBIT = 4_000


@dataclass(frozen=True)
class Network:
    """A regime, or loopback, and a latency that every bucket gets on top."""

    regime: str
    added_latency_ms: float = 0.0

    @property
    def name(self) -> str:
        """Returns the network's name, such as ``balanced`` or ``balanced+4ms``."""
        return self.regime + (f"+{self.added_latency_ms:g}ms" if self.added_latency_ms else "")

    def rate_mbit(self, backward_s: float, gradient_bytes: int, ranks: int) -> float:
        """Computes the rate of links (Mbit/s) that puts a model into this regime; 0 for loopback.

        At this rate a ring all-reduce of all gradients takes the regime's share of the backward
        pass. It sends 2(n−1)/n of their bytes over every link (nccl-tests, doc/PERFORMANCE.md).
        The rate is rounded to two digits and at most ``FASTEST_MBIT``, as links carry no more.
        """
        if self.regime == LOOPBACK:
            return 0.0
        wanted_s = REGIMES[self.regime] * backward_s
        ring_bits = 2 * (ranks - 1) / ranks * gradient_bytes * 8
        rate = min(FASTEST_MBIT, ring_bits / PAYLOAD / wanted_s / 1e6)
        return float(f"{rate:.2g}")


def parse_network(name: str) -> Network:
    """Returns the network of a name. Raises UserError for a name that is not legal."""
    match = re.fullmatch(r"([a-z-]+)(?:\+([\d.]+)ms)?", name)
    if not match or match[1] not in (LOOPBACK, *REGIMES):
        legal = ", ".join((LOOPBACK, *REGIMES))
        raise UserError(f"network {name!r}: there are {legal}; +4ms adds a latency")
    return Network(match[1], float(match[2] or 0))
