"""Bundles of ``ddplab-watch``: what its ranks wrote, read again.

Rows that a rank did not write before it ended are missing; what is missing is noted.
"""

from __future__ import annotations

import json
import tarfile
import zlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import mkdtemp

import pandas as pd

from common.diagnose.evidence.left_behind import read_traces
from common.diagnose.evidence.measured_surroundings import named_ranks
from common.errors import UserError, naming_os_errors

FORMAT = 1
"""The newest format that is known here (``ddplab_watch.record.FORMAT``)."""
REQUEUED, AGAIN = "requeue-", "restart-"
"""Begin the names of folders in a bundle that ranks have written which were started anew: by Slurm,
and, below those, by the launcher."""


@dataclass(frozen=True, eq=False)
class Bundle:
    """Holds the records that the ranks of a watched script wrote.

    Attributes:
        folder: folder of their files.
        about: row per rank that says who it was.
        rows: table → rows of all ranks, with a column ``rank``.
        notes: sentences on what is not in it.
    """

    folder: Path
    about: pd.DataFrame
    rows: Mapping[str, pd.DataFrame]
    notes: tuple[str, ...]

    def of(self, table: str) -> pd.DataFrame:
        """Returns the rows of a table; an empty one where no rank wrote any."""
        return self.rows.get(table, pd.DataFrame({"rank": []}))

    @property
    def script(self) -> str:
        """Returns the name of what was run."""
        return Path(str(self.about["command"].iloc[0][0])).name

    @property
    def world_size(self) -> int:
        """Returns the number of ranks of the job."""
        return int(self.about["world_size"].max())


def is_bundle(path: Path) -> bool:
    """Returns True for a folder with a rank's file in it, or a packed one."""
    return path.name.endswith(".tar.gz") or bool(starts_of(path))


def starts_of(folder: Path) -> list[Path]:
    """Returns the folders of a job's records, one of each start of its ranks, in their order.

    A launcher that starts the ranks anew, as torchrun does with ``--max-restarts``, lets them write
    into ``restart-1`` and so on; a job that Slurm has requeued writes into ``requeue-1`` and so on.
    A start that ended before the first step has left none.
    """
    jobs = [folder, *_numbered(folder, REQUEUED)]
    starts = [start for job in jobs for start in (job, *_numbered(job, AGAIN))]
    return [start for start in starts if files_of_ranks(start)]


def _numbered(folder: Path, prefix: str) -> list[Path]:
    """Returns the paths in a folder that are named by a prefix and a number, by number."""
    numbers = {path.name.removeprefix(prefix): path for path in folder.glob(f"{prefix}*")}
    return [path for _, path in sorted((int(n), p) for n, p in numbers.items() if n.isdecimal())]


def _name_in(folder: Path, start: Path) -> str:
    return folder.name if start == folder else str(start.relative_to(folder))


def files_of_ranks(folder: Path) -> dict[int, Path]:
    """Returns the file of each rank in a folder, by rank."""
    named = {file.stem.removeprefix("rank"): file for file in folder.glob("rank*.jsonl")}
    return dict(sorted((int(rank), file) for rank, file in named.items() if rank.isdecimal()))


def read_bundle(path: Path | str) -> Bundle:
    """Reads a bundle: a folder, or one that was packed as ``.tar.gz``.

    Where the ranks were started anew, it is the first start that got as far as a step.

    Raises:
        UserError: it is none, it is from a later version, or no rank has written a step.
    """
    folder = _unpacked(Path(path)) if str(path).endswith(".tar.gz") else Path(path)
    starts = starts_of(folder)
    if not starts:
        raise UserError(f"{path}: no bundle; it has no rank0.jsonl")
    refused: list[UserError] = []
    for start in starts:
        try:
            bundle = _read_start(start, path if start == folder else start, start != starts[-1])
        except UserError as error:
            refused.append(error)
            continue
        further = ", ".join(_name_in(folder, other) for other in starts if other != start)
        name = _name_in(folder, start)
        note = f"The ranks were started anew: this is the record in {name}, not in {further}."
        return replace(bundle, notes=(*bundle.notes, *[note] * bool(further)))
    raise refused[0]


def _read_start(folder: Path, path: Path | str, is_resumed: bool) -> Bundle:
    """Reads what the ranks wrote from one of their starts on.

    Args:
        folder: folder of their files.
        path: what messages call it.
        is_resumed: the ranks were started anew after that.

    Raises:
        UserError: as ``read_bundle``.
    """
    files = files_of_ranks(folder)
    notes: list[str] = []
    by_table: dict[str, list[dict]] = {}
    for rank, file in files.items():
        for row in _lines(file, notes):
            by_table.setdefault(row.pop("table"), []).append({"rank": rank} | row)
    if "about" not in by_table:
        raise UserError(f"{path}: no rank says who it was; the files were cut off at their start")
    about = pd.DataFrame(by_table.pop("about"))
    if (newest := int(about["format"].max())) > FORMAT:
        raise UserError(
            f"{path}: of format {newest}, written by ddplab-watch {about['version'].max()}; this "
            f"ddplab reads formats up to {FORMAT}: take a newer one"
        )
    if len(sizes := sorted(about["world_size"].unique())) > 1:
        raise UserError(
            f"{path}: its files are of jobs of {' and '.join(map(str, sizes))} ranks; give each "
            "job a folder of its own"
        )
    rows = {name: pd.DataFrame(records) for name, records in by_table.items()}
    if "steps" not in rows:
        raise UserError(f"{path}: no step was seen; {_why_none(rows)}")
    traces = read_traces(sorted(folder.glob("rank*-trace.json.gz")))
    rows |= {"trace-steps": traces.steps, "trace-operations": traces.operations}
    bundle = Bundle(folder, about, rows, ())
    return Bundle(folder, about, rows, (*notes, *traces.notes, *_notes(bundle, is_resumed)))


def _unpacked(path: Path) -> Path:
    try:
        with tarfile.open(path) as archive:
            into = Path(mkdtemp(prefix="ddplab-bundle-"))
            archive.extractall(into, filter="data")
    except (OSError, tarfile.TarError, EOFError, zlib.error) as error:
        # tarfile tells, line by line, of each way that it tried.
        why = (str(error).splitlines() or [type(error).__name__])[0]
        raise UserError(f"{path}: cannot be unpacked ({why})") from None
    records = sorted(into.rglob("rank*.jsonl"), key=lambda file: len(file.parts))
    folder = records[0].parent if records else into
    while folder.name.startswith((REQUEUED, AGAIN)):
        folder = folder.parent
    return folder


def _lines(file: Path, notes: list[str]) -> list[dict]:
    """Reads a rank's rows; a last line that was cut off is left out, and noted."""
    rows = []
    with naming_os_errors(file):
        text = file.read_text(encoding="utf-8", errors="replace")
    for number, line in enumerate(text.splitlines(), 1):
        try:
            row = json.loads(line)
            rows.append({"table": str(row["table"])} | row)
        except (ValueError, TypeError, KeyError):
            notes.append(f"{file.name}: line {number} cannot be read; it was cut off.")
    return rows


def _why_none(rows: Mapping[str, pd.DataFrame]) -> str:
    for table in ("unseen", "end"):
        if table in rows:
            return f"the ranks say: {rows[table].iloc[0].drop('rank').to_dict()}"
    return "the script ended, or is still in its first steps"


def _notes(bundle: Bundle, is_resumed: bool) -> list[str]:
    """Returns what is missing: ranks, what could not be seen, and how the watch ended."""
    notes = []
    ranks = set(bundle.about["rank"])
    if missing := sorted(set(range(bundle.world_size)) - ranks):
        notes.append(
            f"Of {bundle.world_size} ranks there is no record of {', '.join(map(str, missing))}: "
            "on other hosts, or ended before their first step."
        )
    unseen = bundle.of("unseen")
    if len(unseen):
        # An error's first sentence: PyTorch lists parameters after it.
        sentences = unseen["why"].str.split(r"\.\s|\n", regex=True).str[0]
        for (what, why), rows in unseen.groupby(["what", sentences]):
            notes.append(f"Not seen on {_ranks(rows['rank'])}: {what} ({why}).")
    ended = set(bundle.of("end")["rank"])
    if cut := sorted(ranks - ended):
        why = ", its disk was full, or it still runs" if not is_resumed else "; the job was resumed"
        notes.append(f"The record of {_ranks(cut)} breaks off: it was killed{why}.")
    elif (bundle.of("end")["status"] == "ended").any():
        notes.append("The script ended before the watch did: fewer steps than asked for.")
    elif (bundle.of("end")["status"] == "interrupted").any():
        notes.append("The script ended by an exception, or by Ctrl-C, before the watch did.")
    return notes


def _ranks(ranks: Iterable[int]) -> str:
    return named_ranks(sorted(set(ranks))).lower()
