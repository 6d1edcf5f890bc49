"""What is said of a link's rate, against a link whose rate is known."""

from __future__ import annotations

import socket
import threading
import time

import pytest

from common.cluster.link_probe import stream_rate

LINK_BYTES_PER_S = 500_000
BUFFER_BYTES = 200_000
PIECE_BYTES = 4096


class HeldUp(socket.socket):
    """A reader that is held up when it begins, and then reads as fast as it can."""

    held_up = False

    def recv_into(self, buffer, *arguments) -> int:
        if not self.held_up:
            self.held_up = True
            time.sleep(0.3)
        return super().recv_into(memoryview(buffer)[:PIECE_BYTES], *arguments)


def connected(server: socket.socket) -> tuple[socket.socket, socket.socket]:
    """Opens both ends of a new connection over loopback, with small buffers on the way there."""
    near = socket.socket()
    near.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, PIECE_BYTES)
    near.connect(server.getsockname())
    return near, server.accept()[0]


def carry(source: socket.socket, target: socket.socket) -> None:
    """Passes bytes on as a link does, never more than its rate allows since it began."""
    begun_s, carried = time.perf_counter(), 0
    with source, target:
        while piece := source.recv(PIECE_BYTES):
            carried += len(piece)
            time.sleep(max(0.0, begun_s + carried / LINK_BYTES_PER_S - time.perf_counter()))
            target.sendall(piece)


@pytest.fixture
def link_to_a_reader_held_up():
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, BUFFER_BYTES)
        sender, into_link = connected(server)
        out_of_link, receiver = connected(server)
        thread = threading.Thread(target=carry, args=(into_link, out_of_link))
        thread.start()
        yield sender, HeldUp(fileno=receiver.detach())
        thread.join()


@pytest.mark.alone
def test_a_reader_that_was_held_up_does_not_make_a_link_faster(link_to_a_reader_held_up) -> None:
    found = stream_rate(*link_to_a_reader_held_up, seconds=0.5)
    # What came in while the reader was held up is 0.15 MB, a third of what the link carries.
    assert found / 8 == pytest.approx(LINK_BYTES_PER_S, rel=0.12)
