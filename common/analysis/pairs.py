"""Which host or link is slow, by the times of all pairs of ranks (``benchmarks/pairs.py``).

Pairs of ranks on one host and pairs between hosts are judged apart. A rank is slow if even its
fastest pair is slower than the fastest pair without it; a link, if its pair is slower than that and
neither of its ranks is slow. Both are ratios within rounds, whose intervals hold at once.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import pandas as pd

from common.judged import Judged
from common.runtime.wording import counted, size_text
from common.samples import paired_ratio, per_round

PAIR_COLUMNS = (
    *("round", "iteration", "first", "second", "rank", "host", "size_bytes", "time_ms"),
)
SLOWER = 1.25
"""Ratio above which something is called slow: equal links of emulated hosts differ by less than a
tenth."""

Pair = tuple[int, int]


@dataclass(frozen=True)
class Slow:
    """A slow rank, or pair of ranks: the ratio of its time to that of the fastest other."""

    ranks: tuple[int, ...]
    ratio: Judged


def per_pair(samples: pd.DataFrame) -> pd.DataFrame:
    """Returns the median exchange of each round: a row per round, a column per pair; ms."""
    pairs = list(zip(samples["first"], samples["second"], strict=True))
    return per_round(samples.assign(pair=pairs), "time_ms", "pair")


def hosts_of(samples: pd.DataFrame) -> dict[int, str]:
    """Returns the host of each rank."""
    return dict(zip(samples["rank"], samples["host"], strict=True))


def slow_parts(times: pd.DataFrame, hosts: Mapping[int, str]) -> list[Slow]:
    """Returns the slow ranks and links, ranks first.

    Args:
        times: a row per round, a column per pair of ranks; any unit.
        hosts: rank → host.
    """
    named_pairs = []
    for is_within in (False, True):
        pairs = [pair for pair in times.columns if (hosts[pair[0]] == hosts[pair[1]]) == is_within]
        named_pairs += _slow_among(times[pairs], pairs)
    return sorted(named_pairs, key=lambda slow: len(slow.ranks))


def _slow_among(times: pd.DataFrame, pairs: Sequence[Pair]) -> list[Slow]:
    ranks = sorted({rank for pair in pairs for rank in pair})
    claims = len(ranks) + len(pairs)
    slow = [
        Slow((rank,), ratio)
        for rank in ranks
        if (ratio := _ratio(times, [p for p in pairs if rank in p], pairs, claims))
    ]
    named = {rank for part in slow for rank in part.ranks}
    healthy = [pair for pair in pairs if not named & {*pair}]
    links = [(pair, _ratio(times, [pair], healthy, claims)) for pair in healthy]
    return slow + [Slow(pair, ratio) for pair, ratio in links if ratio]


def _ratio(
    times: pd.DataFrame, pairs: Sequence[Pair], all_pairs: Sequence[Pair], claims: int
) -> Judged | None:
    """Judges the fastest of some pairs over the fastest of the others; None if not slower."""
    rest_of_pairs = [pair for pair in all_pairs if pair not in pairs]
    if not rest_of_pairs:
        return None
    interval = paired_ratio(
        times[list(pairs)].min(axis=1), times[rest_of_pairs].min(axis=1), claims=claims
    )
    judged = Judged(interval, null=SLOWER)
    return judged if judged.is_settled and judged.estimate > SLOWER else None


def lines_of(samples: pd.DataFrame) -> list[str]:
    """Returns what was measured and found, as text."""
    times, hosts = per_pair(samples), hosts_of(samples)
    size = float(samples["size_bytes"].iloc[0])
    lines = [
        f"{counted(len(hosts), 'rank')} on {counted(len(set(hosts.values())), 'host')}, "
        f"{counted(times.shape[1], 'pair')}, {counted(len(times), 'round')}: each sends "
        f"{size_text(size)} to the other. Gbit/s in one direction, medians:"
    ]
    rates = {pair: size * 8 / (ms / 1e3) / 1e9 for pair, ms in times.median().items()}
    lines.append(" " * 8 + "".join(f"{rank:>9}" for rank in sorted(hosts)))
    for rank in sorted(hosts):
        cells = [rates.get((min(rank, b), max(rank, b))) for b in sorted(hosts)]
        cells = ["-" if rate is None else f"{rate:.3g}" for rate in cells]
        lines.append(f"rank {rank:<3}" + "".join(f"{c:>9}" for c in cells) + f"  {hosts[rank]}")
    return [*lines, *sentences(slow_parts(times, hosts), hosts, times.shape[1])]


def sentences(slow: Sequence[Slow], hosts: Mapping[int, str], pairs: int) -> list[str]:
    """Returns a sentence for each slow host, rank and link."""
    if pairs < 3:
        return ["Not judged: two ranks have one pair, and nothing to compare it with."]
    lines = []
    ranks = {part.ranks[0] for part in slow if len(part.ranks) == 1}
    for part in slow:
        ratio = part.ratio.interval
        times = f"{ratio.estimate:.2f} times as long ({ratio.low:.2f} to {ratio.high:.2f})"
        if len(part.ranks) == 2:
            first, second = part.ranks
            names = f"{first} ({hosts[first]}) and {second} ({hosts[second]})"
            lines.append(f"Slow link: between ranks {names} an exchange takes {times}.")
            continue
        (rank,) = part.ranks
        on_host = {other for other, host in hosts.items() if host == hosts[rank]}
        what = f"host: {hosts[rank]} (rank {rank})" if on_host <= ranks else f"rank: {rank}"
        where = "" if on_host <= ranks else f" on {hosts[rank]}"
        lines.append(f"Slow {what}{where}: even its fastest exchange takes {times}.")
    if lines:
        return lines
    return [f"No host and no link is told to be slower than {SLOWER:g} times the fastest."]
