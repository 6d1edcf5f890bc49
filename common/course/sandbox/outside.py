"""Looks at processes of a sandbox from outside: their memory, files and messages."""

from __future__ import annotations

import os
import subprocess
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO

import psutil

from common.errors import UserError

MEASURED_EVERY_S = 0.01
PIECE_BYTES = 2**16
OWN = ("RssAnon", "RssShmem")


@contextmanager
def measured(nbytes: Callable[[], int]) -> Iterator[list[int]]:
    """Yields a list with the bytes that processes have at first, and then again and again."""
    memory, ended = [nbytes()], threading.Event()

    def watch() -> None:
        while not ended.wait(MEASURED_EVERY_S):
            memory.append(nbytes())

    thread = threading.Thread(target=watch, daemon=True)
    thread.start()
    try:
        yield memory
    finally:
        ended.set()
        thread.join()


def has_ended(process: psutil.Process) -> bool:
    """Returns True for a process that is gone, or that nobody has waited for yet."""
    try:
        return process.status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def await_ends(processes: Iterable[psutil.Process], seconds: float) -> bool:
    """Waits until processes have ended; returns False if one has not within this time."""
    deadline = time.monotonic() + seconds
    while alive := [process for process in processes if not has_ended(process)]:
        if time.monotonic() > deadline:
            return False
        processes = alive
        time.sleep(0.001)
    return True


@contextmanager
def still(processes: Callable[[], Iterable[psutil.Process]]) -> Iterator[None]:
    """Stops processes in the block, and those that they fork while they are stopped."""
    stopped: dict[int, psutil.Process] = {}
    while more := [process for process in processes() if process.pid not in stopped]:
        for process in more:
            stopped[process.pid] = process
            with suppress(psutil.Error):  # gone meanwhile, here and below
                process.suspend()
    try:
        yield
    finally:
        for process in stopped.values():
            with suppress(psutil.Error):
                process.resume()


@contextmanager
def limited_network(pid: int, rate: str) -> Iterator[None]:
    """Limits the loopback interface of a process's network in the block; see ``Sandbox``."""
    tc = ["nsenter", "--target", str(pid), "--net", "tc", "qdisc"]
    # A packet of the loopback interface has up to 64 KiB.
    bucket = ["tbf", "rate", rate, "burst", "256kb", "limit", "16mb"]
    limited = [*tc, "replace", "dev", "lo", "root", *bucket]
    try:
        process = subprocess.run(limited, capture_output=True, text=True)
    except FileNotFoundError as error:
        raise UserError(f"{error.filename}: not found; it limits the network") from None
    if process.returncode:
        raise UserError(f"the network cannot be limited: {process.stderr.strip()}")
    try:
        yield
    finally:
        subprocess.run([*tc, "del", "dev", "lo", "root"], capture_output=True)


def sent_bytes(pid: int) -> int:
    """Returns the bytes that have left the loopback interface of a process's network."""
    lines = Path(f"/proc/{pid}/net/dev").read_text().splitlines()
    [counts] = [line.partition(":")[2].split() for line in lines if line.lstrip().startswith("lo:")]
    return int(counts[8])


def discard(stream: IO[bytes]) -> None:
    """Reads to the end of a stream, of which nothing is kept."""
    while stream.read(PIECE_BYTES):
        pass


def descendants(pid: int) -> list[psutil.Process]:
    """Returns the processes that a process has forked, and theirs; looks at no others.

    psutil reads all processes of the machine, which takes twenty times as long.
    """
    if not Path(f"/proc/self/task/{os.getpid()}/children").exists():
        return psutil.Process(pid).children(recursive=True)
    processes: list[psutil.Process] = []
    ahead = [pid]
    while ahead:
        numbers: list[str] = []
        with suppress(OSError):  # it, or a thread of its, has ended meanwhile
            for path in Path(f"/proc/{ahead.pop()}/task").glob("*/children"):
                numbers += path.read_text().split()
        for number in numbers:
            with suppress(psutil.Error):
                processes.append(psutil.Process(int(number)))
                ahead.append(int(number))
    return processes


def private_bytes(processes: Iterable[psutil.Process]) -> int:
    """Returns the memory of processes that is no program's file, shared memory too."""
    total = 0
    for process in processes:
        with suppress(OSError):
            lines = Path(f"/proc/{process.pid}/status").read_text().splitlines()
            total += sum(2**10 * int(line.split()[1]) for line in lines if line.startswith(OWN))
    return total


def bytes_in_memory(pid: int, folders: Iterable[str]) -> int:
    """Returns the bytes of the file systems that a process has at folders; 0 if it is protected."""
    total = 0
    for folder in folders:
        with suppress(OSError):
            system = os.statvfs(f"/proc/{pid}/root{folder}")
            total += system.f_frsize * (system.f_blocks - system.f_bfree)
    return total


def used_bytes(folder: Path) -> int:
    """Returns the bytes of the files below a folder."""
    total = 0
    for root, _, names in os.walk(folder):
        for name in names:
            try:
                total += os.lstat(os.path.join(root, name)).st_blocks * 512
            except OSError:  # gone meanwhile
                continue
    return total
