"""Times every pair of ranks, one pair at a time, in rounds: which host or link is slow?

Both ranks of a pair send a message to each other at once; all others wait meanwhile, so no link
is shared. ``analysis/pairs.py`` judges the times.
"""

from __future__ import annotations

import socket
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path
from typing import Annotated

import pandas as pd
import torch
import torch.distributed as dist

from common.analysis.pairs import PAIR_COLUMNS, lines_of
from common.errors import UserError
from common.runtime.group.process_group import Worker, process_group
from common.runtime.records.recorder import gather_rows
from common.runtime.records.run_directory import write_atomically
from common.runtime.script import run_script
from common.runtime.timing import clock_for
from common.samples import rotated
from common.settings import Positive, RankOptions

LEAST_S = 0.05
"""An exchange that takes so long is one of bandwidth on a link of 1 Gbit/s."""
SIZES = tuple(2**power for power in range(18, 28, 2))
"""Bytes of a message: 256 KiB to 64 MiB, the first of which takes the slowest pair ``LEAST_S``."""
REPEATS = 3


@dataclass(frozen=True)
class PairBenchmark(RankOptions):
    """Time every pair of ranks and name the slow host or link."""

    rounds: Annotated[int, Positive] = 6
    """Rounds: every pair once in each."""
    results: str = ""
    """Write the times to this file, too."""


def main(settings: PairBenchmark) -> None:
    """Measures, and prints what was found."""
    with process_group(settings.device, settings.backend) as worker:
        with worker.mistakes_shared():
            folder = Path(settings.results).parent
            if worker.is_main and not folder.is_dir():
                raise UserError(f"--results {settings.results}: there is no folder {folder}")
            if worker.is_main and settings.results and Path(settings.results).is_dir():
                raise UserError(f"--results {settings.results}: it is a folder; name a file in it")
        samples = measure(worker, settings.rounds)
        if worker.is_main:
            if settings.results:
                write_atomically(Path(settings.results), samples.to_csv(index=False))
            print("\n".join(lines_of(samples)))


def measure(worker: Worker, rounds: int) -> pd.DataFrame:
    """Times all pairs in rounds; returns PAIR_COLUMNS of all ranks, on rank 0."""
    if worker.world_size < 2:
        raise UserError("one rank has no pair: start at least two (--ranks, torchrun, srun)")
    pairs = [*combinations(range(worker.world_size), 2)]
    size_bytes = _long_enough(worker, pairs)
    rows: list[dict] = []
    host = socket.gethostname()
    for round_ in range(rounds):
        for pair in rotated(pairs, round_):
            worker.barrier()
            times_s = exchange_s(worker, pair, size_bytes, REPEATS)
            for iteration, seconds in enumerate(times_s):
                about = {"round": round_, "first": pair[0], "second": pair[1], "host": host}
                about |= {"iteration": iteration, "size_bytes": size_bytes}
                rows.append(about | {"rank": worker.rank, "time_ms": seconds * 1e3})
    return pd.DataFrame(gather_rows(worker, rows), columns=list(PAIR_COLUMNS))


def exchange_s(worker: Worker, pair: tuple[int, int], size_bytes: int, repeats: int) -> list[float]:
    """Exchanges messages between a pair, the first to warm up; returns the others' seconds.

    Empty on ranks that are not of the pair.
    """
    if worker.rank not in pair:
        return []
    other = pair[1] if worker.rank == pair[0] else pair[0]
    sent, received = torch.zeros(2, size_bytes, dtype=torch.uint8, device=worker.device)
    clock = clock_for(worker.device)
    times_s = []
    for _ in range(1 + repeats):
        clock.wait()
        start = clock.mark()
        # gloo says in the same stream that it waits for a message: behind one that is being sent,
        # the other rank hears of it late, and the two messages take turns.
        calls = [dist.P2POp(dist.irecv, received, other), dist.P2POp(dist.isend, sent, other)]
        for work in dist.batch_isend_irecv(calls):
            work.wait()
        end = clock.mark()
        clock.wait()
        times_s.append(clock.elapsed_s(start, end))
    return times_s[1:]


def _long_enough(worker: Worker, pairs: list[tuple[int, int]]) -> int:
    """Returns the size of message that takes the slowest pair long enough."""
    for size_bytes in SIZES:
        slowest_s = 0.0
        for pair in pairs:
            worker.barrier()
            slowest_s = max(slowest_s, *exchange_s(worker, pair, size_bytes, 1), 0.0)
        if max(worker.gather(slowest_s)) >= LEAST_S:
            break
    return size_bytes


if __name__ == "__main__":
    run_script(main, PairBenchmark)
