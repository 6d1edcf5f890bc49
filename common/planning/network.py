"""Whether the network is as it should be: all-reduces beside recorded ones over its kind."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import numpy as np

from common.perfmodel.collectives import MeasuredAllReduce
from common.perfmodel.tables import read_all_reduce
from common.runtime.paths import project_root
from common.runtime.records.run_directory import read_environment
from common.runtime.wording import counted, digits

SIZES = {"1 KiB": 2**10, "1 MiB": 2**20}
SLOW = 2.0
"""Ratio to the recorded median from which a network is called slow: runs of one kind on one machine
differ by less."""
RECORDED = "*/study-tune/*/tune/allreduce-samples.csv"
"""Tables below ``data`` of runs in which nothing was planted."""


def recorded_tables() -> list[Path]:
    """Returns the tables of all-reduces that come with the project; none in a tree without data."""
    return sorted((project_root() / "data").glob(RECORDED))


def network_health(
    curve: MeasuredAllReduce | None, network: str | None, ranks: int, tables: Iterable[Path]
) -> str:
    """Returns a sentence: all-reduces here beside the median of those recorded, or *not known*.

    Args:
        curve: all-reduces that were measured here; None where none were.
        network: kind of the network, as ``describe_environment`` names it.
        ranks: ranks of the job.
        tables: recorded tables, of any network.
    """
    if curve is None:
        return "network: no all-reduce was measured, so its health is not known"
    curves = []
    for table in tables:
        environment = read_environment(table.parent)
        if (environment.get("network"), environment.get("world_size")) == (network, ranks):
            curves.append(read_all_reduce(table).curve)
    if not curves:
        kind = f"{counted(ranks, 'rank')} over {network or 'a network without a name'}"
        return f"network: nothing was recorded of {kind}, so its health is not known"
    ratios, texts = [], []
    for name, size in SIZES.items():
        usual_s = float(np.median([float(other.time_s(size)) for other in curves]))
        here_s = float(curve.time_s(size))
        ratios.append(here_s / usual_s)
        texts.append(f"{name} in {digits(here_s * 1e3)} ms ({digits(usual_s * 1e3)} usually)")
    measured = f"{network}: an all-reduce of {', of '.join(texts)}, by {len(curves)} recorded runs"
    if max(ratios) < SLOW:
        return f"network: as usual for {measured}"
    return f"network: {max(ratios):.1f} times slower than usual for {measured}; find out why first"
