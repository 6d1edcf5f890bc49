"""A table of a run that was handed in."""

from __future__ import annotations

from pathlib import Path

import pandas as pd

from common.errors import UserError


def table(run: Path, name: str, stage: str = "") -> pd.DataFrame:
    """Reads ``run/stage/name.csv``; raises UserError if there is none."""
    path = run / stage / f"{name}.csv"
    if not path.is_file():
        raise UserError(f"{path.relative_to(run)} is not among the run's tables")
    return pd.read_csv(path)
