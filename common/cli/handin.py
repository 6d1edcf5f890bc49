"""``ddplab handin``: the tarball that is handed in, checked."""

from __future__ import annotations

import re
import tarfile
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro

from common.errors import UserError


@dataclass(frozen=True)
class Handin:
    """Build and check lastname-firstname-assignN.tar.gz with the report of your newest run."""

    assignment: Annotated[str, tyro.conf.Positional]
    """Such as assignment1."""
    name: str
    """lastname-firstname, in lower case."""
    run_dir: str | None = None
    """The run to hand in; by default the newest complete one."""
    output_dir: str = "."
    """Where the tarball goes."""

    def run(self) -> None:
        """Builds the tarball and says what is in it."""
        path = build(self)
        print(f"{path}: report.pdf, {pages(read_back(path))} pages")


def build(asked: Handin) -> Path:
    """Writes the tarball, whole or not at all, and checks it by reading it back.

    Raises UserError for a name or an assignment that is not one, and for a run without a report.
    """
    if not re.fullmatch(r"[a-z]+(-[a-z]+)+", asked.name):
        raise UserError(f"name {asked.name!r}: expected lastname-firstname in lower-case letters")
    number = re.fullmatch(r"assignment(\d)", asked.assignment)
    if not number:
        raise UserError(f"unknown assignment {asked.assignment!r}; like assignment2")
    report = find_report(asked.assignment, asked.run_dir)
    stem = f"{asked.name}-assign{number[1]}"
    path = Path(asked.output_dir) / f"{stem}.tar.gz"
    beside = path.with_name(f".{path.name}.partial")
    try:
        with tarfile.open(beside, "w:gz") as tar:
            tar.add(report, arcname=f"{stem}/report.pdf")
        read_back(beside)
        beside.replace(path)
    except OSError as error:
        raise UserError(f"{path}: {error.strerror}") from None
    finally:
        beside.unlink(missing_ok=True)
    return path


def find_report(assignment: str, run_dir: str | None) -> Path:
    """Returns the report of the given run, or of the assignment's newest complete run.

    Raises UserError where there is none.
    """
    from common.runtime.paths import project_root
    from common.runtime.run_directory import newest_complete_run, read_environment

    if run_dir is None:
        folder = newest_complete_run(project_root() / "outputs" / assignment, ["report.pdf"])
        if folder is None:
            raise UserError(
                f"no complete run of {assignment} with a report.pdf; first: ddplab run {assignment}"
            )
        return folder / "report.pdf"
    report = Path(run_dir) / "report.pdf"
    if not report.is_file():
        raise UserError(f"{report}: no such file; first: ddplab run {assignment}")
    record = report.parent / "environment.json"
    if record.is_file() and read_environment(report.parent)["status"] != "complete":
        raise UserError(f"{run_dir} is not a complete run")
    return report


def read_back(path: Path) -> bytes:
    """Reads the report inside a tarball. Raises UserError unless it holds one PDF and no more."""
    with tarfile.open(path) as tar:
        members = tar.getmembers()
        if len(members) != 1 or not members[0].name.endswith("/report.pdf"):
            raise UserError(f"{path}: expected one report.pdf, found {[m.name for m in members]}")
        content = tar.extractfile(members[0]).read()
    if not content.startswith(b"%PDF-") or pages(content) < 1:
        raise UserError(f"{path}: report.pdf is not a PDF")
    return content


def pages(pdf: bytes) -> int:
    """Returns the number of pages of a PDF whose page tree is not compressed away."""
    # Every inner node of the page tree counts the pages below it, the root all of them.
    counts = [int(count) for count in re.findall(rb"/Count (\d+)", pdf)]
    return max(counts, default=len(re.findall(rb"/Type\s*/Page\b", pdf)))
