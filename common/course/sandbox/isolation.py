"""Ways to keep a student's code apart: which this machine allows, and how each is made."""

from __future__ import annotations

import os
import shlex
import shutil
import stat
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Sequence
from pathlib import Path

from common.course.sandbox.own_root import program_inside, root_of_its_own, visible_paths
from common.errors import UserError

ISOLATIONS = ("namespaces", "user namespaces", "other user", "none")
"""From the strongest to none, which is for one's own code only."""
KINDS = ("--net", "--mount", "--uts", "--ipc", "--pid", "--fork", "--kill-child=SIGKILL")


def has_own_root(isolation: str) -> bool:
    """Returns True if the sandbox has files, network and processes of its own."""
    return isolation in ("namespaces", "user namespaces")


def isolated(
    isolation: str, folder: Path, uid: int, arguments: Sequence[str], new: Path
) -> list[str]:
    """Returns the command that starts Python in namespaces, in a root of its own.

    Args:
        isolation: ``namespaces`` or ``user namespaces``.
        folder, uid, new: arguments of ``root_of_its_own``.
        arguments: Python's.
    """
    program = shlex.join([program_inside(), *arguments])
    steps = [*root_of_its_own(folder, uid, new), f"exec {program}"]
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
        refusal = why_unavailable(isolation)
        if not refusal:
            return isolation
        refusals.append(f"{isolation}: {refusal}")
    raise UserError(f"nothing can be graded on this machine: {'; '.join(refusals)}")


def why_unavailable(isolation: str) -> str:
    """Returns why this machine does not allow an isolation, or nothing."""
    is_root = os.geteuid() == 0
    if not sys.platform.startswith("linux"):
        return "needs Linux"
    if isolation == "other user":
        return closed_to_others(isolation) if is_root else "only root can become one"
    if not shutil.which("unshare"):
        return "needs unshare"
    if isolation == "namespaces":
        if not is_root:
            return "only root can make them"
        if closed := closed_to_others(isolation):
            return closed
    folder = shlex.quote(tempfile.gettempdir())
    steps = [f"mount -t tmpfs none {folder}", "mount -t proc none /proc", "ip link set lo up"]
    command = [*namespaces(isolation), "sh", "-ec", "\n".join(steps)]
    tried = subprocess.run(command, capture_output=True, text=True)
    return "" if tried.returncode == 0 else (tried.stderr.strip().splitlines() or ["refused"])[-1]


def closed_to_others(isolation: str) -> str:
    """Returns why the user that student code becomes cannot use Python, or nothing.

    A root of its own has folders of its own, and of this machine's only the packages'. Elsewhere he
    needs all that lead to them and to his own files.
    """
    packages = os.path.realpath(sysconfig.get_paths()["purelib"])
    if has_own_root(isolation):
        needed = [Path(path) for path in [*visible_paths()[1], packages]]
    else:
        ends = (Path(packages), Path(tempfile.gettempdir()).resolve())
        needed = [folder for end in ends for folder in (end, *end.parents)]
    closed = (
        str(path) for path in needed if path.is_dir() and not path.stat().st_mode & stat.S_IXOTH
    )
    return next((f"another user may not enter {path}" for path in closed), "")
