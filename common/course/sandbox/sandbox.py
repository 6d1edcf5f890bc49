"""The sandbox that a student's code runs in, seen from outside.

It is made of what emulated hosts are made of: namespaces of its own for files, processes, network
and users. Its root has Python, its packages and one folder, all read-only, and a small folder of
scratch. Only the loopback interface is up. Everything in it ends with its first process
(``common.course.sandbox.callee``), which ends with this one.

Where a machine refuses namespaces, student code runs as another user, who cannot read what he
may not. Where neither can be had, nothing is graded.
"""

from __future__ import annotations

import itertools
import json
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import threading
import time
from contextlib import AbstractContextManager, suppress
from pathlib import Path

import psutil

from common.course.sandbox.isolation import has_own_root, isolated, strongest_isolation
from common.course.sandbox.outside import (
    bytes_in_memory,
    descendants,
    discard,
    limited_network,
    private_bytes,
    sent_bytes,
    still,
    used_bytes,
)
from common.course.sandbox.own_root import BYTECODE, INSIDE, SCRATCH, SCRATCH_BYTES, WRITABLE
from common.course.sandbox.scratch import empty
from common.course.sandbox.wire import Ended, Peer
from common.errors import RunFailed, UserError
from common.runtime.processes import bytecode

START_S, SWEEP_S, ANSWER_S = 120.0, 20.0, 20.0
MEMORY_BYTES, PROCESSES = 6 * 2**30, 400
LOOKED_EVERY_S = 0.05
NOT_STARTED = "the sandbox does not start"
FIRST_UID = 2**30
_NUMBERS = itertools.count()
VARIABLES = {
    "OMP_NUM_THREADS": "1",
    "GLOO_SOCKET_IFNAME": "lo",
    "TP_SOCKET_IFNAME": "lo",
    "MASTER_ADDR": "127.0.0.1",
    "HOME": "/tmp",
    "MALLOC_MMAP_THRESHOLD_": "65536",  # what is freed is the system's again: memory can be seen
    "PYTHONHASHSEED": "0",
}


class Sandbox:
    """Processes for student code; ``with Sandbox(folder) as sandbox``.

    Args:
        folder: readable to student code: packages ``common`` and ``probes``, or folders of such.
        isolation: one of ``ISOLATIONS``; None for the strongest that this machine allows.

    Raises:
        UserError: this machine does not allow that isolation, or any.
    """

    def __init__(self, folder: Path, isolation: str | None = None) -> None:
        self.folder = folder.resolve()
        self.isolation = isolation or strongest_isolation()
        self.uid = FIRST_UID + 64 * os.getpid() + next(_NUMBERS) % 64
        """The user that student code becomes, whom no other sandbox has: all of his is ended."""
        self.guard: threading.Thread | None = None
        self.broken = ""
        """Reason why it was ended before its time; empty where it was not."""
        self.sweeps, self.lock = 0, threading.Lock()
        """Number of sweeps, and its lock; what is seen of processes counts until the next sweep."""

    def __enter__(self) -> Sandbox:
        try:
            self.scratch = Path(tempfile.mkdtemp(prefix="ddplab-scratch-"))
        except OSError as error:
            raise RunFailed(f"{NOT_STARTED}: {error}") from None
        if self.isolation == "other user":
            os.chown(self.scratch, self.uid, self.uid)
        self.control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            self.process = subprocess.Popen(
                self.command(theirs.fileno()),
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.PIPE,
                # Who ends this process's group does not end the first process, which then still
                # sweeps: it sees its control socket closed.
                start_new_session=True,
                env=self.environment(),
                cwd="/",
            )
        try:
            self.expect(b"ready", START_S)
        except RunFailed:
            self.process.kill()
            words = self.process.stderr.read().decode(errors="replace").strip().splitlines()
            self.__exit__()
            raise RunFailed(f"{NOT_STARTED}: {(words or ['no reason'])[-1]}") from None
        threading.Thread(target=discard, args=(self.process.stderr,), daemon=True).start()
        self.guard = threading.Thread(target=self.watch, daemon=True)
        self.guard.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.control.close()
        if not has_own_root(self.isolation):  # there the first process ends the others
            with suppress(subprocess.TimeoutExpired):
                self.process.wait(SWEEP_S)
        self.process.kill()
        self.process.wait()
        # Otherwise the thread would watch the next first process, and hold against it what is left
        # of this one's.
        if self.guard:
            self.guard.join()
        deadline = time.monotonic() + SWEEP_S
        while (survivors := self.processes()) and time.monotonic() < deadline:
            for process in survivors:
                with suppress(psutil.Error):
                    process.kill()
            time.sleep(LOOKED_EVERY_S)
        with suppress(OSError):  # what is left is removed below
            empty(self.scratch)
        shutil.rmtree(self.scratch, ignore_errors=True)

    def command(self, control: int) -> list[str]:
        """Returns the command of the first process."""
        callee = ["-P", "-m", "common.course.sandbox.callee", str(control), self.isolation]
        callee.append(str(self.uid))
        if has_own_root(self.isolation):
            return isolated(self.isolation, self.folder, self.uid, callee, self.scratch)
        return [sys.executable, *callee]

    def environment(self) -> dict[str, str]:
        """Returns the variables of the first process: none of this one's, but where to look."""
        ours = str(self.folder_inside / "callee")
        path = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
        variables = {"PATH": path, "PYTHONPATH": ours, "PYTHONDONTWRITEBYTECODE": "1"}
        if sys.pycache_prefix:  # what this process has compiled need not be compiled again
            has_root = has_own_root(self.isolation)
            variables[bytecode.FOLDER] = str(BYTECODE) if has_root else sys.pycache_prefix
        return VARIABLES | variables

    def start(
        self, below: str = "", *, timeout_s: float = ANSWER_S, variables: dict | None = None
    ) -> Peer:
        """Starts a process; returns the connection by which its exercises are called.

        Args:
            below: part of the folder that has its packages.
            timeout_s: longest time to an answer.
            variables: variables of its environment.

        Raises:
            Ended: the sandbox has gone.
        """
        ours, theirs = socket.socketpair()
        wanted = {
            "folder": str(self.folder_inside / below),
            "scratch": self.scratch_inside,
            "variables": VARIABLES | (variables or {}),
        }
        with theirs:
            try:
                socket.send_fds(self.control, [json.dumps(wanted).encode()], [theirs.fileno()])
            except OSError:
                raise Ended(self.broken or "the sandbox has ended") from None
        ours.settimeout(timeout_s)
        return Peer(ours)

    @property
    def scratch_inside(self) -> str:
        """Returns the folder that student code may write to, as it is called inside."""
        return SCRATCH if has_own_root(self.isolation) else str(self.scratch)

    @property
    def folder_inside(self) -> Path:
        """Returns the sandbox's folder, as it is called inside."""
        return INSIDE if has_own_root(self.isolation) else self.folder

    def afresh(self) -> None:
        """Ends what runs in it and deletes what was written; starts it again if it has ended."""
        try:
            self.sweep()
        except Ended:
            self.__exit__()
            self.broken = ""
            self.__enter__()

    def sweep(self) -> None:
        """Ends all processes of students, deletes what they wrote; raises Ended if it cannot."""
        try:
            self.control.send(b"{}")
            self.expect(b"swept", SWEEP_S)
        except (OSError, RunFailed):
            raise Ended(self.broken or "the sandbox has ended") from None
        with self.lock:
            if self.broken:
                raise Ended(self.broken)
            self.sweeps += 1
        try:
            empty(self.scratch)
        except OSError as error:
            raise Ended(str(error)) from None

    def expect(self, word: bytes, seconds: float) -> None:
        """Waits for a word of the first process."""
        self.control.settimeout(seconds)
        try:
            answer = self.control.recv(64)
        except OSError:
            answer = b""
        if answer != word:
            raise RunFailed("the sandbox does not answer")

    def watch(self) -> None:
        """Ends the sandbox when its processes together take too much."""
        while self.process.poll() is None:
            sweeps = self.sweeps
            reason = self.excess()  # may take long; what was seen may have been swept meanwhile
            with self.lock:
                if reason and sweeps == self.sweeps:
                    self.broken = reason
                    self.process.kill()
                    if self.isolation == "other user":
                        for process in self.processes():
                            process.kill()
            time.sleep(LOOKED_EVERY_S)

    def excess(self) -> str:
        """Returns what the processes have too much of, or nothing."""
        memory, processes = 0, self.processes()
        for process in processes:
            try:
                memory += process.memory_info().rss
            except psutil.Error:  # gone
                continue
        if memory > MEMORY_BYTES:
            return f"its processes took more than {MEMORY_BYTES / 2**30:.0f} GiB of memory"
        if len(processes) > PROCESSES:
            return f"it had more than {PROCESSES} processes"
        if self.isolation == "other user" and used_bytes(self.scratch) > SCRATCH_BYTES:
            return f"it wrote more than {SCRATCH_BYTES / 2**20:.0f} MiB"
        return ""

    def processes(self) -> list[psutil.Process]:
        """Returns the sandbox's processes."""
        try:
            processes = descendants(self.process.pid)
        except psutil.NoSuchProcess:
            processes = []
        if self.isolation == "other user":  # those that were orphaned, too
            everybody = psutil.process_iter(["uids"])
            theirs = [p for p in everybody if p.info["uids"] and p.info["uids"].real == self.uid]
            processes = list({process.pid: process for process in [*processes, *theirs]}.values())
        return processes

    def limited_network(self, rate: str) -> AbstractContextManager[None]:
        """Limits what all processes together send to a rate such as ``800mbit``, in the block.

        Raises:
            UserError: this machine cannot limit the sandbox's network.
        """
        if self.isolation != "namespaces":
            raise UserError(f"the network of {self.isolation} cannot be limited")
        return limited_network(self.first_pid(), rate)

    def private_bytes(self) -> int:
        """Returns the memory of all processes together, and of what they wrote to the scratch."""
        processes = self.processes()
        if not has_own_root(self.isolation):
            return private_bytes(processes) + used_bytes(self.scratch)
        # All of them have the same scratch, which lies in memory.
        written = bytes_in_memory(processes[0].pid, WRITABLE) if processes else 0
        return private_bytes(processes) + written

    def still(self) -> AbstractContextManager[None]:
        """Stops all processes in the block, so that they take no processor from somebody else."""
        return still(self.processes)

    def sent_bytes(self) -> int:
        """Returns the bytes that the processes have sent to each other over the network."""
        return sent_bytes(self.first_pid())

    def first_pid(self) -> int:
        """Returns the process id of the sandbox's first process, as it is outside."""
        if not has_own_root(self.isolation):
            return self.process.pid
        return descendants(self.process.pid)[0].pid
