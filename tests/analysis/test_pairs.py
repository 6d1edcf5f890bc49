"""Which host or link is slow, by times of pairs of known noise, and of real ranks."""

from __future__ import annotations

import re
import subprocess
import sys
from itertools import combinations

import numpy as np
import pandas as pd
import pytest
from command_line import ddplab, error_line

from common.analysis.pairs import lines_of, slow_parts
from common.cluster.emulated import why_no_hosts
from common.runtime.paths import project_root

SEEDS = 20


def times(
    ranks: int, seed: int, slow: tuple[int, ...] = (), factor: float = 2.0, rounds: int = 6
) -> pd.DataFrame:
    """Makes times with 5 % of noise; slow is one rank, or a link's two."""
    noise = np.random.default_rng(seed)
    pairs = [*combinations(range(ranks), 2)]
    table = {
        pair: 50
        * noise.lognormal(0, 0.05, rounds)
        * (factor if {*slow} and {*slow} <= {*pair} else 1)
        for pair in pairs
    }
    frame = pd.DataFrame(table)
    frame.columns = pd.Index(pairs, tupleize_cols=False)
    return frame


def named(table: pd.DataFrame, per_host: int = 1) -> list[tuple[int, ...]]:
    ranks = {rank for pair in table.columns for rank in pair}
    hosts = {rank: f"host{rank // per_host}" for rank in ranks}
    return [part.ranks for part in slow_parts(table, hosts)]


@pytest.mark.parametrize("ranks", [3, 4, pytest.param(8, marks=pytest.mark.slow)])
def test_a_slow_host_is_named_and_nobody_in_healthy_ones(ranks: int) -> None:
    slow = [named(times(ranks, seed, (seed % ranks,))) for seed in range(SEEDS)]
    assert [found == [(seed % ranks,)] for seed, found in enumerate(slow)].count(True) == SEEDS
    assert [named(times(ranks, seed)) for seed in range(SEEDS)].count([]) == SEEDS


def test_a_slow_link_is_told_from_a_slow_host() -> None:
    for seed in range(5):
        assert named(times(4, seed, (1, 3))) == [(1, 3)]
    both = times(8, 1, (2,))
    both[[pair for pair in both.columns if 5 in pair]] *= 2
    assert named(both) == [(2,), (5,)]


def test_ranks_of_one_host_are_compared_with_each_other_alone() -> None:
    # Two hosts of four: between them an exchange takes ten times as long, which is no fault.
    table = times(8, 3)
    for pair in table.columns:
        table[pair] *= 10 if pair[0] // 4 != pair[1] // 4 else 1
    assert named(table, per_host=4) == []
    within = [pair for pair in table.columns if 2 in pair and pair[0] // 4 == pair[1] // 4]
    table[within] *= 2
    assert named(table, per_host=4) == [(2,)]


def test_too_little_is_not_judged() -> None:
    assert named(times(4, 0, (1,), rounds=3)) == []
    assert named(times(2, 0)) == []
    assert named(times(4, 0, (1,), factor=1.15)) == []


def samples(slow: tuple[int, ...] = ()) -> pd.DataFrame:
    table = times(4, 0, slow)
    return pd.DataFrame(
        {"round": round_, "iteration": 0, "first": a, "second": b, "rank": rank}
        | {"host": f"h{rank}", "size_bytes": 2**20, "time_ms": ms}
        for (a, b), column in table.items()
        for round_, ms in enumerate(column)
        for rank in (a, b)
    )


def test_the_words_name_the_host_the_link_or_nobody() -> None:
    assert "Slow host: h2 (rank 2)" in lines_of(samples((2,)))[-1]
    assert "Slow link: between ranks 0 (h0) and 3 (h3)" in lines_of(samples((0, 3)))[-1]
    assert lines_of(samples())[-1].startswith("No host and no link")


@pytest.mark.slow
def test_the_command_times_two_ranks_here() -> None:
    printed = ddplab("doctor", "--pairs")
    assert printed.status == 0, printed.stderr
    assert "1 pair, 6 rounds" in printed.stdout
    assert "two ranks have one pair" in printed.stdout


def test_the_command_refuses_fewer_than_two_ranks() -> None:
    for count in (0, 1):
        refusal = error_line(ddplab("doctor", "--pairs", "--ranks", count))
        assert f"--ranks {count}: at least 2" in refusal
    assert "--ranks goes with --pairs" in error_line(ddplab("doctor", "--ranks", 2))


@pytest.mark.slow
@pytest.mark.xdist_group("emulated")
@pytest.mark.skipif(why_no_hosts() is not None, reason="no emulated hosts here")
def test_an_emulated_host_at_half_the_rate_is_named() -> None:
    pairs = ("--", "-m", "common.cli.main", "doctor", "--pairs")
    rates = ("--rate", "200mbit", "100mbit", "200mbit")
    # Hosts print by themselves, which a call in this process would not see.
    command = [sys.executable, "-m", "common.cli.main", "emulate", "--hosts", "3", *rates, *pairs]
    done = subprocess.run(command, cwd=project_root(), capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert re.search(r"Slow host: host2 \(rank 1\)", done.stdout)
    assert done.stdout.count("Slow ") == 1
