"""The rate of a plain TCP stream on each link of an emulated cluster, one link at a time."""

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
from common.runtime.group.socket_bytes import received_over

CLONE_NEWNET = 0x40000000
CHUNK_BYTES = 2**18
READING_S, POLL_S = 1e-3, 1e-4


def probe(host: int, rate_bit_per_s: float) -> dict[str, float]:
    """Measures the payload rates of a host's link in bit/s: ``up`` (to the switch) and ``down``."""
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
    """Enters a host's network: sockets made in this block, in this thread, belong to it."""
    home = os.open("/proc/thread-self/ns/net", os.O_RDONLY)
    other = os.open(Path("/run/netns") / f"host{host}", os.O_RDONLY)
    try:
        _enter(other)
        yield
    finally:
        _enter(home)
        os.close(other)
        os.close(home)


def _enter(namespace: int) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.setns(namespace, CLONE_NEWNET):
        raise UserError(f"emulated network: setns: {os.strerror(ctypes.get_errno())}")


def stream_rate(sender: socket.socket, receiver: socket.socket, seconds: float) -> float:
    """Measures for ``seconds`` how many bits of payload arrive per second.

    A warm-up of a fifth of ``seconds`` comes before and is not counted.

    The kernel counts what has arrived. A program would count what it reads: after it was held up
    it reads at once what came in over a longer time, and the link seems faster than it is.

    Raises UserError where the kernel does not count.
    """
    stopped = threading.Event()

    def send() -> None:
        chunk = bytes(CHUNK_BYTES)
        with sender:
            while not stopped.is_set():
                sender.sendall(chunk)

    def receive() -> None:
        buffer = bytearray(CHUNK_BYTES)
        while receiver.recv_into(buffer):
            pass

    threads = [threading.Thread(target=send), threading.Thread(target=receive)]
    with receiver:
        for thread in threads:
            thread.start()
        try:
            time.sleep(seconds / 5)
            first_s, first_bytes = _arrived(receiver, seconds)
            time.sleep(seconds)
            last_s, last_bytes = _arrived(receiver, seconds)
        finally:
            stopped.set()
            for thread in threads:
                thread.join()
    return (last_bytes - first_bytes) * 8 / (last_s - first_s)


def _arrived(receiver: socket.socket, within_s: float) -> tuple[float, int]:
    """Returns the moment of the next arrival (or the end of ``within_s``) and all bytes so far.

    From arrival to arrival, because a slow link hands over tens of kilobytes at once. Read again
    where reading took long: something else ran between the clock and the count.
    """
    begun_s, before_bytes = time.perf_counter(), received_over(receiver)
    if before_bytes is None:
        raise UserError("emulated network: this kernel does not count bytes by connection")
    while True:
        asked_s = time.perf_counter()
        count = received_over(receiver)
        told_s = time.perf_counter()
        at_once = told_s - asked_s < READING_S
        if (count != before_bytes and at_once) or told_s > begun_s + within_s:
            return (asked_s + told_s) / 2, count
        time.sleep(POLL_S)
