"""Reading of CSV tables: what cannot be right is refused in one line that names the file."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pandas as pd

from common.errors import UserError


def read_table(path: Path | str, columns: Sequence[str]) -> pd.DataFrame:
    """Reads a CSV with at least these columns and one row; UserError names what is wrong."""
    path = Path(path)
    try:
        table = pd.read_csv(path)
    except FileNotFoundError:
        raise UserError(f"{path}: no such file") from None
    except pd.errors.EmptyDataError:
        raise UserError(f"{path}: empty, without even a header") from None
    except (pd.errors.ParserError, UnicodeDecodeError, OSError) as error:
        raise UserError(f"{path}: not a CSV table ({str(error).strip()})") from None
    table.columns = [str(column).strip() for column in table.columns]
    missing = [column for column in columns if column not in table.columns]
    if missing:
        raise UserError(
            f"{path}: no column {', '.join(map(repr, missing))}; has {', '.join(table.columns)}"
        )
    if table.empty:
        raise UserError(f"{path}: no rows")
    return table


def numbers(
    table: pd.DataFrame,
    column: str,
    path: Path | str,
    *,
    above: float | None = None,
    at_least: float | None = None,
) -> pd.Series:
    """Returns a column as finite numbers in a bound; UserError names the first row that fails."""
    values = pd.to_numeric(table[column], errors="coerce")
    bad = ~np.isfinite(values)
    bound = ""
    if above is not None:
        bad, bound = bad | ~(values > above), f" above {above:g}"
    elif at_least is not None:
        bad, bound = bad | ~(values >= at_least), f" of at least {at_least:g}"
    if bad.any():
        row = int(bad.idxmax())
        value = table[column][row]
        text = "blank" if pd.isna(value) else f"'{value}'"
        raise UserError(f"{path}: line {row + 2}, column '{column}': {text} is not a number{bound}")
    return values
