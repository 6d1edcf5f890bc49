"""Sets of runs with faults, whose folders do not say which: ``RUN/*.csv`` and ``causes.csv``.

The public set, which students set thresholds on, is made of the study's runs that were seen when
the reference's thresholds were set. Fresh sets are planted
(``common/course/fresh_faults.py``).
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from pathlib import Path

import pandas as pd

STUDY = Path("data") / "xeon-2-cores" / "study-diagnosis"
PUBLIC = Path("data") / "fault-runs"
CAUSES = "causes.csv"
BASELINES = {"mixed-configurations-held-out": "baseline"}


def opaque(name: str, seed: int) -> str:
    """Returns a name that does not say which run it is."""
    return "run-" + hashlib.sha256(f"{seed} {name}".encode()).hexdigest()[:8]


def recorded_runs(study: Path, *, held_out: bool) -> list[tuple[str, str, str]]:
    """Returns name, cause and baseline (or nothing) of the study's runs of one kind."""
    listed = pd.read_csv(study / "faults.csv")
    return [
        (case.case, case.planted, BASELINES.get(case.case, ""))
        for case in listed[listed["held_out"] == held_out].itertuples()
    ]


def set_of_files(folder: Path, runs: Iterable[tuple[str, str, str]], seed: int) -> dict[str, bytes]:
    """Returns the files of a set, by their path in it.

    Args:
        folder: folder of the runs, each in one of its name.
        runs: name, cause and baseline of each.
        seed: seed of the names that the set gives them.
    """
    files, rows, taken = {}, [], set()
    for name, cause, baseline in runs:
        hidden = opaque(name, seed)
        rows.append((hidden, cause, opaque(baseline, seed) if baseline else ""))
        taken |= {name, baseline} - {""}
    for name in taken:
        for path in (folder / name).glob("*.csv"):
            files[f"{opaque(name, seed)}/{path.name}"] = path.read_bytes()
    table = pd.DataFrame(sorted(rows), columns=["run", "cause", "baseline"])
    files[CAUSES] = table.to_csv(index=False).encode()
    return dict(sorted(files.items()))


def public_set(root: Path) -> dict[str, bytes]:
    """Returns the files of the set that students get, by their path in the project."""
    runs = recorded_runs(root / STUDY, held_out=False)
    return {
        f"{PUBLIC}/{name}": content
        for name, content in set_of_files(root / STUDY, runs, seed=0).items()
    }
