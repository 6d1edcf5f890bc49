"""The recorded backward pass that a replay follows, and the factors by which it is made smaller."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from common.errors import UserError, unknown_name
from common.perfmodel.ddp.profile import BackwardProfile
from common.perfmodel.published import DATA, LAYERS, load_recorded
from common.perfmodel.tables import read_ready_times
from common.runtime.paths import project_root
from common.runtime.records.run_directory import find_table

TABLE = "gradient-ready-times.csv"


@dataclass(frozen=True)
class ReplayedProfile:
    """A recorded backward pass, scaled down.

    Attributes:
        source: the recording's folder: below data/ or the project where it is, else in full.
        factor: the recording's sizes are divided by this.
        time_factor: factor that the recording's times are divided by.
        profile: the gradients as they are replayed; sizes are multiples of 4 bytes.
    """

    source: str
    factor: float
    time_factor: float
    profile: BackwardProfile

    @property
    def label(self) -> str:
        """Returns a label for settings and captions: ``replay of umd-2x4-a100, sizes / 64``."""
        source = Path(self.source)
        faster = f", times / {self.time_factor:g}" if self.time_factor != 1 else ""
        short = source.name if source.is_absolute() else source
        return f"replay of {short}, sizes / {self.factor:g}{faster}"


def open_replayed(name: str, factor: float, time_factor: float = 1.0) -> ReplayedProfile:
    """Reads a recording and makes it smaller.

    With sizes divided by F and times as they are, links F times slower than the real ones give
    the same picture: what is sent still takes as long beside what is computed.

    Args:
        name: a system below data/ (``umd-2x4-a100``), a run directory, or a
            gradient-ready-times.csv; relative to the present folder, the project or data/.
        factor: divides the gradients' sizes; at least 1.
        time_factor: divides their ready times; above 0.

    Raises UserError for no such recording, a run directory without the table, a table that cannot
    be read, or a factor out of its range.
    """
    if not 1 <= factor < float("inf"):
        raise UserError(f"replay_factor is {factor:g}; it must be at least 1 and finite")
    if not 0 < time_factor < float("inf"):
        raise UserError(f"replay_time_factor is {time_factor:g}; it must be above 0 and finite")
    path = _find(name)
    if (path / LAYERS).is_file():
        folder, profile = path, load_recorded(path.name, path.parent).profile
    else:
        table = find_table(path, TABLE) if path.is_dir() else path
        if table is None:
            raise UserError(f"replay {name}: no complete run with {TABLE} there")
        folder, profile = table.parent, read_ready_times(table)
    profile = profile.scaled(compute=1 / time_factor, size=1 / factor)
    sizes = np.maximum(1, np.rint(profile.sizes_bytes / 4)).astype(np.int64) * 4  # float32
    return ReplayedProfile(_path(folder), factor, time_factor, replace(profile, sizes_bytes=sizes))


def _find(name: str) -> Path:
    for path in (Path(name), project_root() / name, DATA / name):
        if path.exists():
            return path.resolve()
    names = [source.parent.name for source in sorted(DATA.glob(f"*/{LAYERS}"))]
    message = unknown_name("recording", name, names)
    raise UserError(f"replay: {message}; a run directory or a {TABLE} will do too")


def _path(folder: Path) -> str:
    for above in (DATA, project_root()):
        if folder.is_relative_to(above):
            return folder.relative_to(above).as_posix()
    return str(folder)
