"""What a plain TCP stream reaches on each link of an emulated cluster, one link at a time."""

from __future__ import annotations

import ctypes
import os
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from common.cluster.links import SWITCH_ADDRESS, address
from common.errors import UserError

CLONE_NEWNET = 0x40000000
# Of 1514 bytes on the wire (Ethernet, IP, TCP with timestamps) 1448 are payload.
PAYLOAD_SHARE = 1448 / 1514
CHUNK_BYTES = 2**18


def probe(host: int, rate_bit_per_s: float) -> dict[str, float]:
    """Payload rates of a host's link in bit/s: ``up`` (to the switch) and ``down``."""
    seconds = min(1.0, max(0.25, 8 * 2**20 / rate_bit_per_s))
    with network_of(host):
        inside = socket.create_server((address(host), 0))
    with inside, socket.create_server((SWITCH_ADDRESS, 0)) as outside:
        with network_of(host):
            sender = socket.create_connection(outside.getsockname(), timeout=5)
        outside.settimeout(5)
        inside.settimeout(5)
        up = stream_rate(sender, outside.accept()[0], seconds)
        sender = socket.create_connection(inside.getsockname(), timeout=5)
        down = stream_rate(sender, inside.accept()[0], seconds)
    return {"up": up, "down": down}


@contextmanager
def network_of(host: int) -> Iterator[None]:
    """Sockets made in this block, in this thread, belong to the host's network."""
    own = os.open("/proc/thread-self/ns/net", os.O_RDONLY)
    other = os.open(Path("/run/netns") / f"host{host}", os.O_RDONLY)
    try:
        _enter(other)
        yield
    finally:
        _enter(own)
        os.close(other)
        os.close(own)


def _enter(namespace: int) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.setns(namespace, CLONE_NEWNET):
        raise UserError(f"emulated network: setns: {os.strerror(ctypes.get_errno())}")


def stream_rate(sender: socket.socket, receiver: socket.socket, seconds: float) -> float:
    """Bits per second that arrive, after a start that is not counted (a fifth of the time)."""
    stop_at = time.perf_counter() + 1.2 * seconds
    counted_from = stop_at - seconds

    def send() -> None:
        chunk = bytes(CHUNK_BYTES)
        with sender:
            while time.perf_counter() < stop_at:
                sender.sendall(chunk)

    thread = threading.Thread(target=send)
    thread.start()
    buffer = bytearray(CHUNK_BYTES)
    received, first, last = 0, None, None
    with receiver:
        while count := receiver.recv_into(buffer):
            at = time.perf_counter()
            if first is not None:
                received, last = received + count, at
            elif at >= counted_from:
                first = at
    thread.join()
    return received * 8 / (last - first) if last else 0.0
