"""A bundle for Gradescope: ``setup.sh``, ``run_autograder`` and the project's files that grade.

Gradescope unpacks it, runs setup.sh once as root, and run_autograder for each submission
(https://gradescope-autograders.readthedocs.io/en/latest/specs/).
"""

from __future__ import annotations

import contextlib
import zipfile
from pathlib import Path

from common.course.export import tracked_files
from common.course.overlay import with_overlay
from common.course.tasks import read_tasks
from common.errors import UserError

PACKED = ("common/", "tests/exercises/", "assignments/", "pyproject.toml", "data/")
SUPPORT = ("tests/conftest.py", "tests/company.py", "tests/rank_support.py")
SETUP = """#!/usr/bin/env bash
# Installs what grading needs: Python 3.11 or newer, PyTorch for CPUs.
set -euo pipefail
if command -v apt-get >/dev/null; then
    apt-get update -qq
    DEBIAN_FRONTEND=noninteractive apt-get install -y -qq \\
        python3 python3-venv python3-pip util-linux iproute2
fi
here=$(cd "$(dirname "$0")" && pwd)
python3 -m venv "$here/venv"
"$here/venv/bin/pip" install --quiet uv
install() { "$here/venv/bin/uv" pip install --quiet --python "$here/venv/bin/python" "$@"; }
install --torch-backend=cpu torch || install torch
install numpy pandas pyyaml scipy psutil pytest pytest-timeout pytest-xdist hypothesis
# Another user may run Python here, and may not read what grades.
chmod 755 "$here" "$here/venv"
chmod -R go-rwx "$here/source/project" 2>/dev/null || chmod -R go-rwx "$here/project"
"""
RUN = """#!/usr/bin/env bash
# Grades the tarball in submission/ and writes results/results.json.
set -uo pipefail
here=$(cd "$(dirname "$0")" && pwd)
project="$here/source/project"
[ -d "$project" ] || project="$here/project"
venv="$here/venv"
[ -d "$venv" ] || venv="$here/source/venv"
cd "$project"
exec env PYTHONPATH="$project" PYTHONDONTWRITEBYTECODE=1 "$venv/bin/python" \\
    -m common.course.grading.autograde "$here/submission" "$here/results/results.json" {variant}
"""


def bundle(root: Path, out: Path, variant: int, overlay: Path | None = None) -> int:
    """Writes the bundle, whole or not at all; returns the number of its files.

    Raises:
        UserError: the file is there already, something is not committed, or it cannot be written.
    """
    if out.exists():
        raise UserError(f"{out} is there already; give a file that is not")
    names = [name for name in tracked_files(root) if is_packed(name)]
    beside = out.with_name(f".{out.name}.partial")
    try:
        with with_overlay(root, overlay) as merged, zipfile.ZipFile(beside, "w") as archive:
            if overlay:
                paths = (str(path.relative_to(overlay)) for path in overlay.rglob("*"))
                more = (name for name in paths if is_packed(name) and (merged / name).is_file())
                names = sorted({*names, *more})
            read_tasks(merged)
            for name, content in (("setup.sh", SETUP), ("run_autograder", RUN)):
                write(archive, name, content.replace("{variant}", str(variant)).encode(), 0o755)
            for name in names:
                write(archive, f"project/{name}", (merged / name).read_bytes(), 0o644)
        beside.rename(out)
    except OSError as error:
        raise UserError(f"{out}: {error.strerror}") from None
    finally:
        with contextlib.suppress(OSError):  # of a folder that is none
            beside.unlink()
    return len(names) + 2


def is_packed(name: str) -> bool:
    """Returns True for files that grade."""
    return name.startswith(PACKED) or name in SUPPORT


def write(archive: zipfile.ZipFile, name: str, content: bytes, mode: int) -> None:
    """Adds a file with its rights; the date says nothing, so that bundles are the same."""
    info = zipfile.ZipInfo(name)
    info.external_attr = (0o100000 | mode) << 16
    info.compress_type = zipfile.ZIP_DEFLATED
    archive.writestr(info, content)
