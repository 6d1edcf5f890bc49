"""Reads ``surroundings.csv``, a row per rank, and the texts in it."""

from __future__ import annotations

import shlex

import pandas as pd
from ddplab_watch.machine_cores import parse_cores

from common.diagnose.evidence.case import Case
from common.diagnose.evidence.evidence import SURROUNDING_COLUMNS, SURROUNDINGS, NotJudged

TEXTS = (
    "host",
    "machine",
    "backend",
    "core_list",
    "core_numa_nodes",
    "interface",
    "interface_source",
    "fastest_interface",
    "infiniband",
    "nccl_settings",
    "gpu_uuid",
    "gpu_name",
    "gpu_bus_id",
    "gpu_throttle_reasons",
    "gpu_mig",
    "gpu_compute_mode",
)
"""The columns that hold text; the others hold numbers. What is not known is empty or NaN."""
OFF = ("", "0", "false", "no", "off")


def surroundings_of(case: Case, *, first: bool = False) -> pd.DataFrame:
    """Returns a row per rank, sorted by rank, its texts as text and its numbers as numbers.

    Where a rank was read more than once, the newest reading counts, column by column, or the
    ``first``.

    Raises NotJudged without the table, or where a rank has no row in it.
    """
    table = case.run.need(SURROUNDINGS)
    every = list(dict.fromkeys([*table.columns, *SURROUNDING_COLUMNS]))  # older watchers: fewer
    rows = table.reindex(columns=every)[table["rank"] < case.ranks]
    by_rank = rows.groupby("rank", as_index=False)
    table = by_rank.first() if first else by_rank.last()
    if list(table["rank"]) != list(range(case.ranks)):
        raise NotJudged(f"{SURROUNDINGS} in {case.run.name} has no row of some rank")
    numbers = [name for name in SURROUNDING_COLUMNS if name not in TEXTS]
    read = table.copy()
    read[numbers] = table[numbers].apply(pd.to_numeric, errors="coerce")
    for name in TEXTS:
        read[name] = [_text(value) for value in table[name]]
    return read


def _text(value: object) -> str:
    """Returns a cell as it was written: pandas reads the list of core 0 as a number."""
    if pd.isna(value):
        return ""
    if isinstance(value, float) and value.is_integer():
        return str(int(value))
    return str(value)


def machine_of(table: pd.DataFrame) -> pd.Series:
    """Returns what is equal for ranks on one machine: its checksum, or the host where unknown."""
    return table["machine"].where(table["machine"] != "", table["host"])


def host_of(case: Case, table: pd.DataFrame) -> pd.Series:
    """Returns what is equal for ranks under the same limits: the host, or all emulated ones."""
    return machine_of(table) if case.run.emulated else table["host"]


def number_of_cores(lists: pd.Series) -> int:
    """Returns the number of cores that ranks of one machine may run on; 0 if unknown."""
    return len(frozenset[int]().union(*map(parse_cores, lists)))


def setting(row: pd.Series, name: str) -> str | None:
    """Returns the value of a variable as this rank had it; None where it was not set."""
    words = (word.partition("=") for word in shlex.split(row["nccl_settings"]))
    return next((value for key, _, value in words if key == name), None)


def is_on(value: str | None) -> bool:
    """Returns True for a variable's value that switches something on."""
    return value is not None and value.strip().lower() not in OFF


def uses_nccl(case: Case, table: pd.DataFrame) -> bool:
    """Returns True if the default process group of several ranks is NCCL's."""
    return bool((table["backend"] == "nccl").all()) and case.ranks > 1


def named_ranks(ranks: list[int]) -> str:
    """Returns ``Rank 0`` or ``Ranks 0, 1``, to begin a sentence with."""
    return f"Rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"
