"""The root of a sandbox: the system, Python and its packages, and one folder, all read-only.

Python may lie anywhere: below /tmp, which student code may write to, below a folder of the system,
in the project itself, or behind links. So the root is a list of paths, of which each is made after
those above it.
"""

from __future__ import annotations

import os
import shlex
import sys
import sysconfig
from pathlib import Path

from common.runtime.paths import project_root

SYSTEM = ("/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64", "/etc/ld.so.cache")
DEVICES = ("null", "zero", "random", "urandom")
PARTS = ("bin", "lib", "lib64", "pyvenv.cfg")
"""What Python needs of a prefix, which may also be somebody's home or the project."""
INSIDE, BYTECODE = Path("/sandbox/work"), Path("/sandbox/bytecode")
"""Paths in the sandbox of the folder that it is given, and of bytecode that this process shares."""
SCRATCH = "/tmp"
"""Folder that student code may write to."""
SCRATCH_BYTES = 2**29
WRITABLE = {
    SCRATCH: f"size={SCRATCH_BYTES},nr_inodes=20000,mode=1777",
    "/dev/shm": "size=64m,mode=1777",
}
EMPTY = "size=1m,mode=755"


def root_of_its_own(folder: Path, uid: int, new: Path) -> list[str]:
    """Returns shell commands that leave nothing but these paths, read-only, and a small /tmp.

    Args:
        folder: folder that the sandbox has as ``INSIDE``.
        uid: user that student code becomes.
        new: an empty folder. The new root lies over it, and thus hides nothing that it shows.
    """
    links, visible = visible_paths()
    made = {path: file_system("tmpfs", path, new, options) for path, options in WRITABLE.items()}
    made["/proc"] = file_system("proc", "/proc", new)
    # A folder below /tmp that leads to Python is a file system of its own, which is closed in the
    # end: whoever could rename it could put other modules into Python's place.
    closed = {first_below(path) for path in [*links, *visible]} - {"", *visible}
    if is_covered(project := os.path.realpath(project_root()), visible):
        closed.add(project)
    for path in sorted(closed):
        made[path] = file_system("tmpfs", path, new, EMPTY)
    for path, target in links.items():
        made[path] = [parent(path, new), f"ln -s {shlex.quote(target)} {within(path, new)}"]
    inside = {path: path for path in visible} | {str(INSIDE): str(folder)} | shown_bytecode()
    for path, source in inside.items():
        made[path] = [*mounted(source, path, new), *closing(path, new)]
    for device in DEVICES:
        made[f"/dev/{device}"] = mounted(f"/dev/{device}", f"/dev/{device}", new)
    for name, line in {
        "hosts": "127.0.0.1 localhost sandbox",
        "passwd": f"student:x:{uid}:{uid}::/tmp:/bin/false",
    }.items():
        path = f"/etc/{name}"
        made[path] = [parent(path, new), f"echo '{line}' >{within(path, new)}"]
    return [
        "umask 022",  # whatever the user's is, student code may enter these folders
        f"mount -t tmpfs -o size=16m,mode=755 none {within('', new)}",
        *(step for path in sorted(made) for step in made[path]),
        *(step for path in sorted(closed) for step in closing(path, new)),
        f"cd {within('', new)}",
        "mkdir -p sandbox/nothing/folder sandbox/old; touch sandbox/nothing/file",
        "hostname sandbox",
        "ip link set lo up",
        "pivot_root . sandbox/old",
        "umount -l /sandbox/old",
        "mount -o remount,ro / 2>/dev/null || true",
    ]


def within(path: str, new: Path) -> str:
    """Returns a path of the new root as the shell reads it before that is the root."""
    return shlex.quote(f"{new}{path}")


def parent(path: str, new: Path) -> str:
    """Returns the shell command that makes the folder of a path of the new root."""
    return f"mkdir -p {within(os.path.dirname(path), new)}"


def file_system(kind: str, path: str, new: Path, options: str = "rw") -> list[str]:
    """Returns shell commands that mount a file system of a kind at a path of the new root."""
    at = within(path, new)
    return [f"mkdir -p {at}", f"mount -t {kind} -o {options} none {at}"]


def mounted(source: str, path: str, new: Path) -> list[str]:
    """Returns shell commands that show a file or folder of the old root in the new one."""
    at = within(path, new)
    make = "mkdir -p" if os.path.isdir(source) else "touch"
    return [parent(path, new), f"{make} {at}", f"mount --bind {shlex.quote(source)} {at}"]


def closing(path: str, new: Path) -> list[str]:
    """Returns the shell command after which nobody can write to a mounted path."""
    # A user namespace may not drop what was locked outside, so it is asked for again.
    flags, at = "remount,bind,ro,nosuid,nodev", within(path, new)
    return [f"mount -o {flags} {at} 2>/dev/null || mount -o {flags},noexec {at}"]


def visible_paths() -> tuple[dict[str, str], list[str]]:
    """Returns the links that lead to the system and to Python, with their targets, and real paths.

    No real path lies below another, unless it belongs to the project, which is shown nowhere else.
    """
    links: dict[str, str] = {}
    visible: list[str] = []
    real = []
    for path in [*SYSTEM, *python_paths(), program_inside()]:
        on_the_way, end = resolved(path)
        if os.path.exists(end):
            links |= on_the_way
            real.append(end)
    for path in sorted(set(real), key=len):
        if not is_covered(path, visible):
            visible.append(path)
    return {path: to for path, to in links.items() if not is_covered(path, visible)}, visible


def python_paths() -> list[str]:
    """Returns what this Python needs, as it is called inside, where ``program_inside`` starts it.

    A virtual environment knows the Python that it was made of by a path, which may have links.
    """
    prefixes = {os.path.realpath(sys.prefix)}
    if sys.prefix != sys.base_prefix:
        prefixes.add(sys.base_prefix)
    parts = [os.path.join(prefix, part) for prefix in sorted(prefixes) for part in PARTS]
    return parts + [os.path.realpath(path) for path in package_folders()]


def package_folders() -> list[str]:
    """Returns the folders from which Python imports, as this process calls them."""
    named = sysconfig.get_paths()
    return [named[kind] for kind in ("stdlib", "platstdlib", "purelib", "platlib")]


def program_inside() -> str:
    """Returns the path of Python in the sandbox: without the links that lead to its folder."""
    folder, name = os.path.split(sys.executable)
    return os.path.join(os.path.realpath(folder), name)


def resolved(path: str) -> tuple[dict[str, str], str]:
    """Returns the links on the way to a path, with their targets, and where the way ends.

    A link in place of a folder that student code may write to, or directly in one, is taken for
    what it points to: such a link could be replaced.
    """
    links: dict[str, str] = {}
    end, ahead = "/", path.split("/")[::-1]
    while ahead:
        part = ahead.pop()
        current = os.path.normpath(os.path.join(end, part))
        if os.path.islink(current) and not {current, os.path.dirname(current)} & WRITABLE.keys():
            links[current] = target = os.readlink(current)
            ahead += target.split("/")[::-1]
            current = "/" if target.startswith("/") else end
        end = current
    return links, end


def first_below(path: str) -> str:
    """Returns the folder directly in one that student code may write to that a path lies below."""
    for folder in WRITABLE:
        if path != folder and is_below(path, folder):
            return os.path.join(folder, os.path.relpath(path, folder).partition("/")[0])
    return ""


def shown_bytecode() -> dict[str, str]:
    """Returns where the bytecode of Python and its packages is shown → where it lies.

    Beside it in the same folder is that of hidden tests and reference solutions.
    """
    if not sys.pycache_prefix:
        return {}
    prefix = os.path.abspath(sys.pycache_prefix)
    folders: dict[str, str] = {}
    for path in sorted(set(package_folders()), key=len):
        for inside in {f"{BYTECODE}{path}", f"{BYTECODE}{os.path.realpath(path)}"}:
            if os.path.isdir(f"{prefix}{path}") and not is_covered(inside, list(folders)):
                folders[inside] = f"{prefix}{path}"
    return folders


def is_covered(path: str, visible: list[str]) -> bool:
    """Returns True if a path can be seen through one of the visible paths.

    The project cannot be seen through a folder that it lies in.
    """
    project = os.path.realpath(project_root())
    return any(
        is_below(path, folder)
        and not (path != project and is_below(path, project) and is_below(project, folder))
        for folder in visible
    )


def is_below(path: str, folder: str) -> bool:
    """Returns True for a folder and what lies in it."""
    return path == folder or path.startswith(f"{folder}/")
