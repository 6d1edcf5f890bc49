"""Gradescope's grader: the bundle that is uploaded, and the program that grades in it.

The bundle has ``setup.sh``, ``run_autograder`` and the project's files that grade. Gradescope
unpacks it, runs setup.sh once as root, and run_autograder for each submission
(https://gradescope-autograders.readthedocs.io/en/latest/specs/).

``python -m common.course.autograder SUBMISSION RESULTS`` grades: SUBMISSION is the folder of what a
student uploaded, which is one tarball, and RESULTS the file that Gradescope reads. Whatever happens
meanwhile, that file is there afterwards; of a fault of the grader it says so, and the traceback is
printed.
"""

from __future__ import annotations

import contextlib
import json
import sys
import zipfile
from pathlib import Path

from common.course.export import tracked_files
from common.course.grading.grade import Grader, write_json
from common.course.overlay import with_overlay
from common.course.tasks import read_tasks
from common.errors import RunFailed, UserError
from common.runtime.paths import project_root

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
    -m common.course.autograder "$here/submission" "$here/results/results.json" {variant}
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


def main() -> None:
    """Grades, or says why not; a fault of the grader is raised afterwards."""
    folder, results = Path(sys.argv[1]), Path(sys.argv[2])
    try:
        variant = int(sys.argv[3]) if len(sys.argv) > 3 else 0
        tarballs = sorted(folder.glob("*.tar.gz"))
        if len(tarballs) != 1:
            raise UserError(
                f"{len(tarballs)} tarballs were uploaded; expected one, of `ddplab handin`"
            )
        write_json(Grader(project_root(), variant).grade(tarballs[0]), results)
    except (UserError, RunFailed) as error:
        write_refusal(results, str(error))
        print(error)
    except Exception as error:
        write_refusal(results, f"not graded: {type(error).__name__} in the grader; tell the staff")
        raise


def write_refusal(results: Path, reason: str) -> None:
    """Writes a result without points that says why there are none."""
    results.parent.mkdir(parents=True, exist_ok=True)
    results.write_text(json.dumps({"score": 0.0, "output": reason, "tests": []}) + "\n")


if __name__ == "__main__":
    main()
