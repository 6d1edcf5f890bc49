"""Ways to keep a student's code apart: which this machine allows, and how each is made."""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Sequence
from pathlib import Path

from common.errors import UserError

ISOLATIONS = ("namespaces", "user namespaces", "other user", "none")
"""From the strongest to none, which is for one's own code only."""
SYSTEM = ("/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64", "/etc/ld.so.cache")
DEVICES = ("null", "zero", "random", "urandom")
KINDS = ("--net", "--mount", "--uts", "--ipc", "--pid", "--fork", "--kill-child=SIGKILL")
PACKAGES = ("/usr/lib", "/usr/local/lib")
"""Folders of the system in which Pythons and their packages lie."""
INSIDE, BYTECODE = Path("/run/work"), Path("/run/bytecode")
"""Paths in the sandbox of the folder that it is given, and of bytecode that this process shares."""
SCRATCH = "/tmp"
"""Folder that student code may write to, in a root of its own."""
SCRATCH_BYTES = 2**29


def has_own_root(isolation: str) -> bool:
    """Returns True if the sandbox has files, network and processes of its own."""
    return isolation in ("namespaces", "user namespaces")


def isolated(isolation: str, folder: Path, uid: int, program: Sequence[str]) -> list[str]:
    """Returns the command that starts a program in namespaces, where ``INSIDE`` is ``folder``."""
    steps = [*root_of_its_own(folder, uid), f"exec {shlex.join(program)}"]
    return [*namespaces(isolation), "sh", "-ec", "\n".join(steps)]


def namespaces(isolation: str) -> list[str]:
    """Returns the ``unshare`` command; in a user namespace everybody is root."""
    users = ["--user", "--map-root-user"] if isolation == "user namespaces" else []
    return ["unshare", *users, *KINDS]


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
    steps = ["mount -t tmpfs none /mnt", "mount -t proc none /proc", "ip link set lo up"]
    command = [*namespaces(isolation), "sh", "-ec", "\n".join(steps)]
    tried = subprocess.run(command, capture_output=True, text=True)
    return "" if tried.returncode == 0 else (tried.stderr.strip().splitlines() or ["refused"])[-1]


def root_of_its_own(folder: Path, uid: int) -> list[str]:
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
    shown = {str(INSIDE): str(folder)} | shown_bytecode()
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
        f"echo 'student:x:{uid}:{uid}::/tmp:/bin/false' >{new}/etc/passwd",
        "hostname sandbox",
        "ip link set lo up",
        f"mkdir -p {new}/run/nothing/folder; touch {new}/run/nothing/file",
        f"cd {new}",
        "pivot_root . old",
        "umount -l /old",
        "mount -o remount,ro / 2>/dev/null || true",
    ]


def shown_bytecode() -> dict[str, str]:
    """Returns where the bytecode of Python and its packages is shown → where it lies.

    Beside it in the same folder is that of hidden tests and reference solutions.
    """
    if not sys.pycache_prefix:
        return {}
    prefix = os.path.abspath(sys.pycache_prefix)
    folders = [f"{prefix}{path}" for path in [*PACKAGES, *python_paths()]]
    return {f"{BYTECODE}{path[len(prefix) :]}": path for path in folders if os.path.isdir(path)}


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
