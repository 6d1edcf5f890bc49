"""allreduce_benchmark.py and allreduce_chunk_benchmark.py: tables, summary, checks, bad input."""

from __future__ import annotations

import statistics

import pandas as pd
import pytest
import torch
import torch.distributed as dist
from rank_support import ASSIGNMENT2

from common.benchmarks.buckets.allreduce import SIZES, course_table, summarise
from common.benchmarks.buckets.allreduce_chunks import chunk_sizes
from common.errors import RunFailed
from common.perfmodel.tables import read_all_reduce
from common.runtime.group.collective_timing import check_sum
from common.runtime.group.process_group import Worker
from common.runtime.processes.ranks import Ranks

ALONE = Worker(Ranks(), torch.device("cpu"), "gloo")


def hand_made(times_ms: dict[int, list[float]], mode: str = "sequential") -> pd.DataFrame:
    """Makes samples of two ranks by size in bytes; rank 1 takes 0.5 ms less than rank 0."""
    return pd.DataFrame(
        [
            {
                **{"mode": mode, "total_elements": size // 4, "total_bytes": size, "in_flight": 1},
                **{"round": 0, "iteration": i, "rank": rank, "time_ms": time_ms - 0.5 * rank},
            }
            for size, times in times_ms.items()
            for i, time_ms in enumerate(times)
            for rank in (0, 1)
        ]
    )


def test_the_table_has_the_courses_columns_and_a_row_for_each_size_of_numel(allreduce_run):
    table = pd.read_csv(allreduce_run / "allreduce-times.csv")
    assert list(table.columns) == [
        *("backend", "world_size", "total_elements", "total_bytes", "average_time", "stdev_time")
    ]
    assert list(table["total_elements"]) == [1, 1000, 20000]
    assert list(table["total_bytes"]) == [4, 4000, 80000]
    assert set(table["backend"]) == {"gloo"}
    assert set(table["world_size"]) == {2}
    assert (table["average_time"] > 0).all()


def test_the_tables_times_are_the_raw_samples_slowest_ranks_in_seconds(allreduce_run):
    samples = pd.read_csv(allreduce_run / "allreduce-samples.csv")
    table = pd.read_csv(allreduce_run / "allreduce-times.csv").set_index("total_elements")
    for numel, row in table.iterrows():
        own = samples[(samples["mode"] == "sequential") & (samples["total_elements"] == numel)]
        by_rank = own.pivot(index=["round", "iteration"], columns="rank", values="time_ms")
        slowest = [max(pair) / 1e3 for pair in zip(by_rank[0], by_rank[1], strict=True)]
        assert len(slowest) == 3 * 2  # rounds × iterations, no warm-up
        assert row["average_time"] == pytest.approx(statistics.mean(slowest))
        assert row["stdev_time"] == pytest.approx(statistics.stdev(slowest))


def test_raw_samples_hold_both_modes_of_every_size_round_and_rank(allreduce_run):
    samples = pd.read_csv(allreduce_run / "allreduce-samples.csv")
    for mode in ("sequential", "in_flight"):
        seen = samples[samples["mode"] == mode][["total_elements", "round", "rank"]]
        assert len(seen.drop_duplicates()) == 3 * 3 * 2
    assert (samples["time_ms"] > 0).all()
    in_flight = samples[samples["mode"] == "in_flight"]
    # 1 MiB of buffers holds 13 of 80,000 bytes; of smaller ones there are 16 at most.
    assert set(zip(in_flight["total_elements"], in_flight["in_flight"], strict=True)) == {
        *((1, 16), (1000, 16), (20000, 13))
    }


def test_the_performance_model_reads_both_tables(allreduce_run):
    for name in ("allreduce-times.csv", "allreduce-samples.csv"):
        table = read_all_reduce(allreduce_run / name)
        assert table.world_size == 2
        assert table.curve.time_s(4000) > 0


def test_the_summary_has_median_p95_and_bandwidths_of_the_slowest_rank():
    # 0 to 100 ms in steps of 1: the median is 50 and the 95th percentile 95, by definition.
    samples = hand_made({10**9: [float(ms) for ms in range(101)]})
    for world_size, factor in ((2, 1.0), (4, 1.5), (8, 1.75), (1, 0.0)):  # 2(n−1)/n
        row = summarise(samples, world_size).iloc[0]
        assert (row["p50_ms"], row["p95_ms"]) == (50, 95)
        assert row["algbw_gb_per_s"] == pytest.approx(20)  # 1 GB in 50 ms
        assert row["busbw_gb_per_s"] == pytest.approx(20 * factor)


def test_the_courses_table_leaves_calls_in_flight_out():
    both = pd.concat([hand_made({4: [2.0, 4.0]}), hand_made({4: [90.0]}, mode="in_flight")])
    row = course_table(both, "sequential", SIZES, {"backend": "gloo"}).iloc[0]
    assert row["average_time"] == pytest.approx(3e-3)
    assert row["stdev_time"] == pytest.approx(2**0.5 / 1e3)  # of 2 and 4 ms


def test_a_right_sum_passes_the_check_and_leaves_zeros(monkeypatch):
    monkeypatch.setattr(dist, "all_reduce", lambda tensor: None)  # the sum over one rank
    buffer = torch.full((5,), 7.0)
    check_sum(buffer, ALONE)
    assert buffer.tolist() == [0] * 5


@pytest.mark.parametrize("wrong_element", [0, 4])
def test_a_sum_that_is_wrong_in_one_element_breaks_the_run_off(monkeypatch, wrong_element):
    def tampered(tensor):
        tensor[wrong_element] += 1

    monkeypatch.setattr(dist, "all_reduce", tampered)
    with pytest.raises(RunFailed, match="all-reduce of 5 elements is wrong on rank 0"):
        check_sum(torch.zeros(5), ALONE)


def test_the_chunk_table_has_the_courses_columns_and_chunks_of_powers_of_ten(chunk_run):
    table = pd.read_csv(chunk_run / "allreduce-chunk-times.csv")
    assert list(table.columns) == [
        *("backend", "world_size", "num_gpus", "total_elements", "total_bytes"),
        *("chunk_elements", "chunk_bytes", "average_time", "stdev_time"),
    ]
    assert list(table["chunk_elements"]) == [1000, 10000, 12000]  # NUMEL=12000
    assert list(table["chunk_bytes"]) == [4000, 40000, 48000]
    assert set(table["total_elements"]) == {12000}
    assert (table[["world_size", "num_gpus"]] == [2, 0]).all().all()


def test_the_chunk_tables_times_are_of_all_chunks_in_flight_the_raw_ones_of_both_modes(chunk_run):
    samples = pd.read_csv(chunk_run / "allreduce-chunk-samples.csv")
    table = pd.read_csv(chunk_run / "allreduce-chunk-times.csv").set_index("chunk_elements")
    assert len(samples) == 2 * 3 * 2 * 2 * 2  # modes, chunk sizes, rounds, iterations, ranks
    for size, row in table.iterrows():
        own = samples[(samples["mode"] == "in_flight") & (samples["chunk_elements"] == size)]
        slowest = own.groupby(["round", "iteration"])["time_ms"].max() / 1e3
        assert row["average_time"] == pytest.approx(slowest.mean())


@pytest.mark.parametrize(
    ("total", "sizes"),
    [
        (10_000_000, (1000, 10_000, 100_000, 1_000_000, 10_000_000)),  # the course's
        (25_000, (1000, 10_000, 25_000)),
        (1000, (1000,)),
        (7, (7,)),
    ],
)
def test_chunks_grow_tenfold_up_to_the_total(total, sizes):
    assert chunk_sizes(total) == sizes


def test_the_record_says_whether_launches_count_and_a_cpu_that_they_always_do(
    rank_server, tmp_path
):
    flags = ["--numel", 10, "--rounds", 1, "--iterations", 1, "--device", "cpu"]
    where = ["--output_dir", tmp_path, "--run_id", "here"]
    script = ASSIGNMENT2 / "allreduce_benchmark.py"
    done = rank_server.run(script, *flags, *where, "--launch_included")
    assert done.exit_codes == [0], done.stderr
    assert "without effect: launch_included" in done.stderr[0]
    assert "launch_included: true" in (tmp_path / "here" / "config.yaml").read_text()
