"""Counting bytes of TCP sockets, against plain sockets and against gloo's ring."""

from __future__ import annotations

import os
import socket
import sys
from pathlib import Path

import pytest

from common.perfmodel.fsdp.communication import Collective, control_bytes, wire_bytes
from common.runtime.group import socket_bytes
from common.runtime.group.socket_bytes import received_bytes, sent_bytes

WORKER = Path(__file__).with_name("socket_bytes_worker.py")
on_linux = pytest.mark.skipif(
    not sys.platform.startswith("linux"), reason="the counts are those of Linux"
)


@pytest.fixture(params=[socket.AF_INET, socket.AF_INET6], ids=["IPv4", "IPv6"])
def connection(request):
    """Opens both ends of a TCP connection inside this process."""
    address = "127.0.0.1" if request.param == socket.AF_INET else "::1"
    with socket.socket(request.param, socket.SOCK_STREAM) as listener:
        try:
            listener.bind((address, 0))
        except OSError:
            pytest.skip(f"no {address} on this machine")
        listener.listen()
        with socket.create_connection(listener.getsockname()[:2]) as one:
            other, _ = listener.accept()
            with other:
                yield one, other


def receive(end: socket.socket, count: int) -> None:
    while count:
        count -= len(end.recv(min(count, 65536)))


@on_linux
@pytest.mark.parametrize("count", [1, 12_345, 1_000_000])
def test_bytes_of_a_connection_are_counted_to_the_byte(connection, count):
    one, other = connection
    one.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 20)
    sent = sent_bytes()
    one.setblocking(False)  # what does not fit into the buffers is not written
    left = count
    while left:
        try:
            left -= one.send(b"x" * left)
        except BlockingIOError:
            # Written is written, whether it is on its way or waits for the receiver.
            assert sent_bytes() - sent == count - left
            receive(other, min(count - left, 65536))
    assert sent_bytes() - sent == count


@on_linux
def test_both_directions_are_counted_apart(connection):
    one, other = connection
    sent, received = sent_bytes(), received_bytes()
    one.sendall(b"x" * 1000)
    receive(other, 1000)
    other.sendall(b"y" * 24)
    receive(one, 24)
    assert (sent_bytes() - sent, received_bytes() - received) == (1024, 1024)


@on_linux
def test_a_socket_that_is_open_twice_counts_once(connection):
    one, other = connection
    with one.dup():
        sent = sent_bytes()
        one.sendall(b"x" * 1000)
        receive(other, 1000)
        assert sent_bytes() - sent == 1000


@on_linux
def test_counting_leaves_no_descriptor_open_and_ignores_other_sockets(connection):
    with (
        socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as datagrams,
        socket.socket(socket.AF_UNIX) as local,
    ):
        assert datagrams.fileno() != local.fileno()
        before = len(os.listdir("/proc/self/fd"))
        sent = sent_bytes()
        datagrams.sendto(b"x" * 100, ("127.0.0.1", 9))
        for _ in range(20):
            assert sent_bytes() == sent
            received_bytes()
        # Other threads of this process open and close a few meanwhile.
        assert len(os.listdir("/proc/self/fd")) < before + 10


def test_elsewhere_the_answer_is_none(monkeypatch):
    monkeypatch.setattr(socket_bytes.sys, "platform", "darwin")
    assert sent_bytes() is None
    assert received_bytes() is None


@on_linux
def test_an_old_kernel_that_tells_less_gives_none(connection, monkeypatch):
    monkeypatch.setattr(socket_bytes, "_tcp_infos", lambda: iter([b"\0" * 192]))
    assert sent_bytes() is None


@on_linux
@pytest.mark.two_ranks
@pytest.mark.parametrize("ranks", [2, 3])
def test_gloo_sends_what_its_ring_says(rank_server, ranks):
    done = rank_server.succeed(WORKER, ranks=ranks)
    found = [line for rank in range(ranks) for line in done.lines(rank)]
    assert len(found) == ranks * 3 * 2
    for seen in found:
        collective = Collective(seen["operation"], "x", seen["size_bytes"], 1, ranks)
        payload, control = wire_bytes(collective, "gloo"), control_bytes(collective, "gloo")
        # gloo cuts into at least two pieces a rank, so single elements make a difference.
        assert seen["sent_bytes"] <= payload + control + 16
        if seen["size_bytes"] > 100_000:
            assert seen["sent_bytes"] == pytest.approx(payload + control, abs=16)
            # A neighbour's first header may have come before this rank began to count.
            assert seen["received_bytes"] == pytest.approx(payload + control, abs=ranks * 1000)
