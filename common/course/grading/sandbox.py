"""The sandbox that a student's code runs in, seen from outside.

It is made of what emulated hosts are made of: namespaces of its own for files, processes, network
and users. Its root has Python, its packages and one folder, all read-only, and a small folder of
scratch. Only the loopback interface is up. Everything in it ends with its first process
(``common.course.grading.callee``), which ends with this one.

Where a machine refuses namespaces, student code runs as another user, who cannot read what he
may not. Where neither can be had, nothing is graded.
"""

from __future__ import annotations

import json
import os
import shlex
import shutil
import socket
import subprocess
import sys
import sysconfig
import tempfile
import threading
import time
from contextlib import suppress
from pathlib import Path

import psutil

from common.course.grading.confinement import STUDENT_UID
from common.course.grading.wire import Ended, Peer
from common.errors import RunFailed, UserError
from common.runtime import bytecode

ISOLATIONS = ("namespaces", "user namespaces", "other user", "none")
"""From the strongest to none, which is for one's own code only."""
SYSTEM = ("/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64", "/etc/ld.so.cache")
DEVICES = ("null", "zero", "random", "urandom")
KINDS = ("--net", "--mount", "--uts", "--ipc", "--pid", "--fork", "--kill-child=SIGKILL")
INSIDE, BYTECODE = Path("/run/work"), Path("/run/bytecode")
"""Where the sandbox has the folder that it is given, and what this process has compiled."""
START_S, SWEEP_S, ANSWER_S = 120.0, 20.0, 20.0
MEMORY_BYTES, PROCESSES, SCRATCH_BYTES = 6 * 2**30, 400, 2**29
LOOKED_EVERY_S = 0.05
NOT_STARTED = "the sandbox does not start"
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
        folder: what student code may read: packages ``common`` and ``probes``, or folders of such.
        isolation: one of ``ISOLATIONS``; None for the strongest that this machine allows.

    Raises:
        UserError: this machine does not allow that isolation, or any.
    """

    def __init__(self, folder: Path, isolation: str | None = None) -> None:
        self.folder = folder.resolve()
        self.isolation = isolation or strongest_isolation()
        self.broken = ""
        """Why it was ended before its time, or nothing."""

    def __enter__(self) -> Sandbox:
        self.scratch = Path(tempfile.mkdtemp(prefix="ddplab-scratch-"))
        if self.isolation == "other user":
            os.chown(self.scratch, STUDENT_UID, STUDENT_UID)
        self.control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            self.process = subprocess.Popen(
                self.command(theirs.fileno()),
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.PIPE,
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
        threading.Thread(target=self.process.stderr.read, daemon=True).start()
        self.guard = threading.Thread(target=self.watch, daemon=True)
        self.guard.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.control.close()
        if self.isolation in ("other user", "none"):  # there the first process ends the others
            with suppress(subprocess.TimeoutExpired):
                self.process.wait(SWEEP_S)
        self.process.kill()
        self.process.wait()
        shutil.rmtree(self.scratch, ignore_errors=True)

    def command(self, control: int) -> list[str]:
        """Returns the command of the first process."""
        callee = ["-P", "-m", "common.course.grading.callee", str(control), self.isolation]
        if self.isolation not in ("namespaces", "user namespaces"):
            return [sys.executable, *callee]
        users = ["--user", "--map-root-user"] if self.isolation == "user namespaces" else []
        steps = root_of_its_own(self.folder)
        program = f"exec {shlex.join([sys.executable, *callee])}"
        return ["unshare", *users, *KINDS, "sh", "-ec", "\n".join([*steps, program])]

    def environment(self) -> dict[str, str]:
        """Returns the variables of the first process: none of this one's, but where to look."""
        ours = str(INSIDE / "callee")
        if self.isolation in ("other user", "none"):
            ours = str(self.folder / "callee")
        path = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
        found = {"PATH": path, "PYTHONPATH": ours, "PYTHONDONTWRITEBYTECODE": "1"}
        if sys.pycache_prefix:  # what this process has compiled need not be compiled again
            inside = self.isolation in ("namespaces", "user namespaces")
            found[bytecode.FOLDER] = str(BYTECODE) if inside else sys.pycache_prefix
        return VARIABLES | found

    def start(
        self, below: str = "", *, timeout_s: float = ANSWER_S, variables: dict | None = None
    ) -> Peer:
        """Starts a process; returns the connection by which its exercises are called.

        Args:
            below: which part of the folder has its packages.
            timeout_s: how long an answer may take.
            variables: of its environment.

        Raises:
            Ended: the sandbox has gone.
        """
        ours, theirs = socket.socketpair()
        inside = self.isolation in ("namespaces", "user namespaces")
        wanted = {
            "folder": str((INSIDE if inside else self.folder) / below),
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
        return "/tmp" if self.isolation in ("namespaces", "user namespaces") else str(self.scratch)

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
        for path in self.scratch.iterdir():
            shutil.rmtree(path, ignore_errors=True) if path.is_dir() else path.unlink()

    def expect(self, word: bytes, seconds: float) -> None:
        """Waits for a word of the first process."""
        self.control.settimeout(seconds)
        try:
            said = self.control.recv(64)
        except OSError:
            said = b""
        if said != word:
            raise RunFailed("the sandbox does not answer")

    def watch(self) -> None:
        """Ends the sandbox when its processes together take too much."""
        while self.process.poll() is None:
            if reason := self.excess():
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
            except psutil.Error:
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
            found = psutil.Process(self.process.pid).children(recursive=True)
        except psutil.NoSuchProcess:
            return []
        if self.isolation == "other user":  # those that were orphaned, too
            everybody = psutil.process_iter(["uids"])
            theirs = [p for p in everybody if p.info["uids"] and p.info["uids"].real == STUDENT_UID]
            found = list({process.pid: process for process in [*found, *theirs]}.values())
        return found

    def sent_bytes(self) -> int:
        """Returns the bytes that were sent over the sandbox's loopback interface so far."""
        inside = self.isolation in ("namespaces", "user namespaces")
        [first] = psutil.Process(self.process.pid).children()[:1] if inside else [self.process]
        for line in Path(f"/proc/{first.pid}/net/dev").read_text().splitlines():
            name, _, counts = line.partition(":")
            if name.strip() == "lo":
                return int(counts.split()[8])
        raise RunFailed("the sandbox has no loopback interface")


def strongest_isolation() -> str:
    """Returns the strongest isolation that this machine allows. Raises UserError if there is none.

    Without root another user cannot be had, and with root a user namespace is not needed.
    """
    refusals = []
    for isolation in ("namespaces", "user namespaces", "other user"):
        refusal = why_not(isolation)
        if not refusal:
            return isolation
        refusals.append(f"{isolation}: {refusal}")
    raise UserError(f"nothing can be graded on this machine: {'; '.join(refusals)}")


def why_not(isolation: str) -> str:
    """Returns why this machine does not allow an isolation, or nothing."""
    is_root = os.geteuid() == 0
    if isolation == "other user":
        return "" if is_root else "only root can become one"
    if not sys.platform.startswith("linux") or not shutil.which("unshare"):
        return "needs Linux and unshare"
    if isolation == "namespaces" and not is_root:
        return "only root can make them"
    users = ["--user", "--map-root-user"] if isolation == "user namespaces" else []
    steps = ["mount -t tmpfs none /mnt", "mount -t proc none /proc", "ip link set lo up"]
    command = ["unshare", *users, *KINDS, "sh", "-ec", "\n".join(steps)]
    tried = subprocess.run(command, capture_output=True, text=True)
    return "" if tried.returncode == 0 else (tried.stderr.strip().splitlines() or ["refused"])[-1]


def root_of_its_own(folder: Path) -> list[str]:
    """Returns shell commands that leave nothing but these paths, read-only, and a small /tmp."""
    new = "/mnt"
    steps = [f"mount -t tmpfs -o size=16m,mode=755 none {new}"]
    for path in [*SYSTEM, *python_paths()]:
        if os.path.islink(path):
            steps.append(f"mkdir -p {new}{os.path.dirname(path)}")
            steps.append(f"ln -s {os.readlink(path)} {new}{path}")
        elif os.path.isdir(path):
            steps += [f"mkdir -p {new}{path}", *read_only(path, f"{new}{path}")]
        elif os.path.exists(path):
            steps.append(f"mkdir -p {new}{os.path.dirname(path)}; touch {new}{path}")
            steps += read_only(path, f"{new}{path}")
    shown = {INSIDE: str(folder)}
    if sys.pycache_prefix:
        shown[BYTECODE] = os.path.abspath(sys.pycache_prefix)
    for inside, path in shown.items():
        steps += [f"mkdir -p {new}{inside}", *read_only(path, f"{new}{inside}")]
    steps.append(f"mkdir {new}/dev {new}/proc {new}/tmp {new}/old")
    for device in DEVICES:
        steps += [f"touch {new}/dev/{device}", f"mount --bind /dev/{device} {new}/dev/{device}"]
    scratch = f"size={SCRATCH_BYTES},nr_inodes=20000,mode=1777"
    return [
        *steps,
        f"mkdir -p {new}/dev/shm {new}/etc",
        f"mount -t tmpfs -o size=64m,mode=1777 none {new}/dev/shm",
        f"mount -t tmpfs -o {scratch} none {new}/tmp",
        f"mount -t proc none {new}/proc",
        f"echo '127.0.0.1 localhost sandbox' >{new}/etc/hosts",
        f"echo 'student:x:{STUDENT_UID}:{STUDENT_UID}::/tmp:/bin/false' >{new}/etc/passwd",
        "hostname sandbox",
        "ip link set lo up",
        f"mkdir -p {new}/run/nothing/folder; touch {new}/run/nothing/file",
        f"cd {new}",
        "pivot_root . old",
        "umount -l /old",
        "mount -o remount,ro / 2>/dev/null || true",
    ]


def read_only(path: str, at: str) -> list[str]:
    """Returns shell commands that show a path somewhere else, where nobody can write to it."""
    # A user namespace may not drop what was locked outside, so it is asked for again.
    flags = "remount,bind,ro"
    return [
        f"mount --bind '{path}' '{at}'",
        f"mount -o {flags} '{at}' 2>/dev/null || mount -o {flags},nosuid,nodev '{at}'",
    ]


def python_paths() -> list[str]:
    """Returns the folders of this Python and its packages that do not lie below the system's."""
    paths = [sys.base_prefix, sys.prefix, sysconfig.get_paths()["purelib"], sys.executable]
    for path in (sys.executable, sys.prefix):
        paths.append(str(Path(path).resolve()))
    folders = [path if os.path.isdir(path) else os.path.dirname(path) for path in paths]
    found: list[str] = []
    for path in sorted(set(folders), key=len):
        if not any(is_below(path, known) for known in [*SYSTEM, *found]):
            found.append(path)
    return found


def is_below(path: str, folder: str) -> bool:
    """Returns True for a folder and what lies in it."""
    return path == folder or path.startswith(f"{folder}/")


def used_bytes(folder: Path) -> int:
    """Returns the bytes of the files below a folder."""
    total = 0
    for root, _, names in os.walk(folder):
        for name in names:
            try:
                total += os.lstat(os.path.join(root, name)).st_blocks * 512
            except OSError:
                continue
    return total
