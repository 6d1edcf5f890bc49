"""Counts of the bytes that this process has sent and received over its own TCP sockets.

The kernel counts the payload of every connection; ``getsockopt(TCP_INFO)`` reads the counts without
root and without looking at a packet. gloo's connections are such sockets, also between the ranks of
one machine, and so are those of NCCL's socket transport; GPUs that share memory, NVLink or
InfiniBand are not seen.

Source of the layout: ``struct tcp_info`` in Linux' include/uapi/linux/tcp.h, which only ever grows
at its end.
"""

from __future__ import annotations

import os
import socket
import stat
import struct
import sys
from collections.abc import Iterator

DESCRIPTORS = "/proc/self/fd"
NOTSENT_BYTES_AT = 144  # u32 tcpi_notsent_bytes, Linux 4.6
BYTES_RECEIVED_AT = 128  # u64 tcpi_bytes_received, Linux 4.1
BYTES_SENT_AT = 200  # u64 tcpi_bytes_sent, u64 tcpi_bytes_retrans, Linux 4.19
LONG_ENOUGH = BYTES_SENT_AT + 16
INFO_BYTES = 512  # more than any kernel's tcp_info has

PAYLOAD_SHARE = 1448 / 1514
"""Payload's share of the bytes on the wire: 1448 of 1514 (Ethernet, IP, TCP with timestamps)."""


def sent_bytes() -> int | None:
    """Returns the payload bytes written to this process's open TCP sockets, in their lifetime.

    Bytes that the kernel still has to send count, retransmitted bytes do not count again. The
    difference of two calls is what was sent in between, provided that no socket was closed, as its
    count is lost with it. None where the kernel does not tell (not Linux, or before 4.19).
    """
    return _total(_sent)


def received_bytes() -> int | None:
    """Returns the payload bytes that arrived at this process's TCP sockets; see ``sent_bytes``.

    The end of a connection that the other side closed counts as one byte.
    """
    return _total(_received)


def received_over(connection: socket.socket) -> int | None:
    """Returns the payload bytes that arrived over one connection, read by the program or not."""
    info = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, INFO_BYTES)
    return _received(info) if len(info) >= LONG_ENOUGH else None


def _sent(info: bytes) -> int:
    sent, sent_again = struct.unpack_from("=QQ", info, BYTES_SENT_AT)
    (not_sent_yet,) = struct.unpack_from("=I", info, NOTSENT_BYTES_AT)
    return sent - sent_again + not_sent_yet


def _received(info: bytes) -> int:
    return struct.unpack_from("=Q", info, BYTES_RECEIVED_AT)[0]


def _total(count) -> int | None:
    if not sys.platform.startswith("linux"):
        return None
    total = 0
    for info in _tcp_infos():
        if len(info) < LONG_ENOUGH:
            return None
        total += count(info)
    return total


def _tcp_infos() -> Iterator[bytes]:
    """Yields ``struct tcp_info`` of every TCP socket, once even if it has several descriptors."""
    inodes: set[int] = set()
    for name in os.listdir(DESCRIPTORS):
        try:
            status = os.fstat(int(name))
            if not stat.S_ISSOCK(status.st_mode) or status.st_ino in inodes:
                continue
            inodes.add(status.st_ino)
            # A copy, because the object closes what it holds: the original belongs to others.
            with socket.socket(fileno=os.dup(int(name))) as copy:
                is_tcp = copy.family in (socket.AF_INET, socket.AF_INET6)
                if is_tcp and copy.type == socket.SOCK_STREAM:
                    yield copy.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, INFO_BYTES)
        except OSError:  # closed meanwhile by another thread
            continue
