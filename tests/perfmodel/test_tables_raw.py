"""This project's raw tables against numbers worked out by hand, and the refusals of bad ones."""

from __future__ import annotations

import pytest
from perfmodel_support import refused, write_csv

from common.perfmodel.tables import (
    read_all_reduce,
    read_costs,
    read_overlap_samples,
    read_ready_times,
)

# --- gradient-ready-times.csv ----------------------------------------------------------------

READY_HEADER = "rank,iteration,parameter,registration_index,dtype,size_bytes,ready_time_ms"

# Ready times of three parameters by (rank, iteration). The slower rank differs by iteration, and
# the median of the slowest is neither that of a rank nor the slowest of the medians: for head,
# max over ranks is 3, 9, 4 ms (median 4), while the ranks' own medians are 2 and 3 ms.
READY_MS = {
    "wte.weight": {(0, 0): 20, (0, 1): 30, (0, 2): 21, (1, 0): 19, (1, 1): 22, (1, 2): 25},
    "body.weight": {(0, 0): 8, (0, 1): 9, (0, 2): 10, (1, 0): 11, (1, 1): 8, (1, 2): 9},
    "head.weight": {(0, 0): 2, (0, 1): 9, (0, 2): 1, (1, 0): 3, (1, 1): 1, (1, 2): 4},
}
ABOUT = {
    "wte.weight": (0, "torch.float32", 400),
    "body.weight": (1, "torch.float64", 800),
    "head.weight": (2, "torch.float32", 40),
}


def ready_rows() -> list[tuple]:
    """Makes one row per rank, iteration and parameter, in registration order."""
    return [
        (rank, iteration, name, *ABOUT[name], READY_MS[name][rank, iteration])
        for rank in range(2)
        for iteration in range(3)
        for name in READY_MS
    ]


def test_ready_times_are_medians_over_iterations_of_the_slowest_rank(tmp_path):
    path = write_csv(tmp_path / "gradient-ready-times.csv", READY_HEADER, ready_rows())
    profile = read_ready_times(path)
    # max over ranks: head 3, 9, 4; body 11, 9, 10; wte 20, 30, 25.
    assert profile.names == ("head.weight", "body.weight", "wte.weight")
    assert profile.ready_s == pytest.approx([0.004, 0.010, 0.025])
    assert profile.backward_s == pytest.approx(0.025)
    assert profile.sizes_bytes.tolist() == [40, 800, 400]
    assert profile.kinds == ("torch.float32", "torch.float64", "torch.float32")
    assert profile.registration == (2, 1, 0)


def test_the_order_of_the_rows_does_not_matter(tmp_path):
    one = write_csv(tmp_path / "one.csv", READY_HEADER, ready_rows())
    other = write_csv(tmp_path / "other.csv", READY_HEADER, ready_rows()[::-1])
    first, second = read_ready_times(one), read_ready_times(other)
    assert first.names == second.names
    assert first.ready_s.tolist() == second.ready_s.tolist()


GOOD = (1, 0, "a", 0, "float32", 4, 1.5)


def test_ready_times_without_the_order_of_rank_0_are_refused(tmp_path):
    rows = [(1, 0, "a", 0, "float32", 4, 1.5, 0), (0, 0, "b", 1, "float32", 4, 2.5, 1)]
    path = write_csv(tmp_path / "gradient-ready-times.csv", f"{READY_HEADER},ready_index", rows)
    with refused("gradient-ready-times.csv", "no row of a on rank 0"):
        read_ready_times(path)


# --- overlap-times.csv -----------------------------------------------------------------------

OVERLAP_HEADER = (
    "arm,message_bytes,messages,round,iteration,rank,"
    "backward_time_ms,all_reduce_time_ms,messages_done,gradient_bytes"
)
GRADIENT_BYTES = 1000


def arm(
    name: str,
    size: int,
    messages: int,
    by_round: dict[int, list[tuple]],
    reduce_ms: float = 0.0,
    done: tuple[int, int] = (0, 0),
):
    """Makes rows of an arm: by round its iterations, each the two ranks' backward times in ms.

    ``done`` are the two ranks' counts.
    """
    return [
        (name, size, messages, round_, iteration, rank, ms, reduce_ms, done[rank], GRADIENT_BYTES)
        for round_, iterations in by_round.items()
        for iteration, ranks in enumerate(iterations)
        for rank, ms in enumerate(ranks)
    ]


# The slowest rank's medians are 100, 110 and 130 ms: the machine drifts from round to round.
LOCAL = arm(
    *("local", 0, 0), {0: [(98, 99), (100, 90), (1, 140)], 1: [(110, 109)] * 2, 2: [(130, 120)] * 2}
)
# DDP's bookkeeping adds 6, 4 and 5 ms in its rounds: 5 ms.
BOOKKEEPING = arm("bookkeeping", 0, 0, {0: [(106, 90)], 1: [(114, 90)], 2: [(135, 90)]})


def beside(size: int, messages: int, added: tuple, alone_ms: float, left_ms: float, done):
    """Makes both arms of a size: a pass takes ``added`` longer by round, 140 ms in the median."""
    local = (100, 110, 130)
    passes = {r: [(local[r] + more, 1)] for r, more in enumerate(added)}
    rows = [
        (*row[:7], row[6] + left_ms if row[5] == 0 else 1, *row[8:])
        for row in arm("continuous", size, messages, passes, done=done)
    ]
    alone = arm("all_reduce", size, messages, {r: [(0, 0)] for r in range(3)}, reduce_ms=alone_ms)
    return [*rows, *alone]


# 20 messages of 64 bytes take 200 ms alone, 10 ms each. The pass takes 40, 30 and 10 ms longer,
# 30 in the median, and 140 ms. After it they take another 100 ms: ten were done, each in 14 ms.
SMALL = beside(64, 20, (40, 30, 10), 200, 100, done=(9, 10))
# 8 messages of 256 bytes, 25 ms each alone. After the pass they take 150 ms, six of them: two were
# done in 140 ms, and took 30 ms of computation.
LARGE = beside(256, 8, (40, 30, 10), 200, 150, done=(1, 2))
OVERLAP = [*LOCAL, *BOOKKEEPING, *SMALL, *LARGE]


def test_costs_are_differences_within_rounds_as_computed_by_hand(tmp_path):
    costs = read_costs(write_csv(tmp_path / "overlap-times.csv", OVERLAP_HEADER, OVERLAP))
    # 5 ms for 1000 bytes, half for the copies in and half for those out.
    assert costs.copy_in_s_per_byte == pytest.approx(2.5e-6)
    assert costs.copy_out_s_per_byte == pytest.approx(2.5e-6)
    sizes, seconds = costs.lost_compute
    assert sizes == (64, 256)
    assert seconds == pytest.approx((0.030 / 10, 0.030 / 2))
    assert costs.delays == (sizes, (pytest.approx(0.004), pytest.approx(0.070 - 0.025)))


def test_all_reduces_launched_in_the_pass_are_read_with_the_time_that_as_many_take_alone(tmp_path):
    # 12 of 64 bytes take 120 ms alone. The pass takes 30 ms longer in the median, and after it
    # they take another 80: four were done.
    local = (100, 110, 130)
    passes = {r: [(local[r] + more, 1)] for r, more in enumerate((40, 30, 10))}
    launched = [
        (*row[:7], row[6] + 80 if row[5] == 0 else 1, *row[8:])
        for row in arm("launched", 64, 12, passes, done=(3, 4))
    ]
    rows = [*LOCAL, *BOOKKEEPING, *SMALL, *launched]
    costs = read_costs(write_csv(tmp_path / "overlap-times.csv", OVERLAP_HEADER, rows))
    assert costs.lost_compute == ((64,), (pytest.approx(0.030 / 4),))
    assert costs.delays == ((64,), (pytest.approx(0.004),))


def test_a_table_without_messages_has_copies_only(tmp_path):
    path = write_csv(tmp_path / "overlap-times.csv", OVERLAP_HEADER, [*LOCAL, *BOOKKEEPING])
    costs = read_costs(path)
    assert costs.copy_in_s_per_byte == pytest.approx(2.5e-6)
    assert (costs.lost_compute, costs.delays) == (None, None)


@pytest.mark.parametrize("idle", [False, True])
def test_what_a_bucket_takes_is_the_difference_to_one_bucket_in_its_round(tmp_path, idle):
    # Eleven buckets take 10, 20 and 30 ms more than one in rounds of other speeds; where a GPU was
    # idle before these passes, one bucket was timed in this way, too.
    one_ms = (50, 70, 60) if idle else (106, 114, 135)
    many = {r: [(ms + 10 * (r + 1), 1)] for r, ms in enumerate(one_ms)}
    one = arm("buckets", 1000, 1, {r: [(ms, 1)] for r, ms in enumerate(one_ms)}) if idle else []
    rows = [*OVERLAP, *arm("buckets", 90, 11, many), *one]
    path = write_csv(tmp_path / "overlap-times.csv", OVERLAP_HEADER, rows)
    assert read_overlap_samples(path).per_bucket_s == pytest.approx([0.001, 0.002, 0.003])
    assert read_costs(path, "nccl").launch_s == pytest.approx(0.002 if idle else 0)
    assert read_costs(path, "gloo") == read_costs(path)
    older = write_csv(tmp_path / "older.csv", OVERLAP_HEADER, OVERLAP)
    assert read_costs(older, "nccl").launch_s == 0


def test_a_record_of_copies_out_is_read_and_need_not_be_there_for_every_row(tmp_path):
    # The slowest rank's by round: 2, 1 and 3 ms.
    copied_ms = iter([2, 1, 0.5, 1, 3, 0.1])
    rows = [(*row, next(copied_ms) if row[0] == "bookkeeping" else "") for row in OVERLAP]
    header = f"{OVERLAP_HEADER},copy_out_time_ms"
    costs = read_costs(write_csv(tmp_path / "overlap-times.csv", header, rows))
    assert costs.copy_out_s_per_byte == pytest.approx(0.002 / GRADIENT_BYTES)
    assert costs.copy_in_s_per_byte == pytest.approx(0.002 / GRADIENT_BYTES)
    with refused("overlap-times.csv", "copy_out_time_ms", "-1"):
        read_costs(
            write_csv(tmp_path / "overlap-times.csv", header, [*rows[:-1], (*rows[-1][:-1], -1)])
        )


def test_costs_below_the_noise_are_none_and_not_negative(tmp_path):
    fast = [
        (*row[:6], row[6] / 2, *row[7:]) if row[0] in ("bookkeeping", "continuous") else row
        for row in OVERLAP
    ]
    costs = read_costs(write_csv(tmp_path / "overlap-times.csv", OVERLAP_HEADER, fast))
    assert costs.copy_in_s_per_byte == costs.copy_out_s_per_byte == 0
    assert costs.lost_compute == ((64, 256), (0, 0))


# --- allreduce-samples.csv -------------------------------------------------------------------

SAMPLES_HEADER = "mode,total_elements,total_bytes,in_flight,round,iteration,rank,time_ms"

# By size: the slowest rank of each sample, then the median. 4 bytes: 3, 9, 4 → 4 ms.
SAMPLES_MS = {4: [(2, 3), (9, 1), (1, 4)], 4000: [(8, 7), (7, 9), (30, 10)]}


def sample_rows(mode: str = "sequential", slower: float = 1.0) -> list[tuple]:
    """Makes one row per sample and rank, the larger size first, as an interleaved run does."""
    return [
        (mode, size // 4, size, 1, round_, 0, rank, milliseconds * slower)
        for size in sorted(SAMPLES_MS, reverse=True)
        for round_, ranks in enumerate(SAMPLES_MS[size])
        for rank, milliseconds in enumerate(ranks)
    ]


def test_a_point_from_raw_samples_is_the_median_of_the_slowest_rank(tmp_path):
    rows = [*sample_rows("sequential"), *sample_rows("in_flight", slower=2)]
    path = write_csv(tmp_path / "allreduce-samples.csv", SAMPLES_HEADER, rows)
    table = read_all_reduce(path)
    assert table.world_size == 2
    assert table.curve.sizes_bytes.tolist() == [4, 4000]
    assert table.curve.times_s == pytest.approx([0.004, 0.009])
    # The other mode's samples are not mixed in.
    assert table.crowded.times_s == pytest.approx([0.008, 0.018])


# --- tables that cannot be right -------------------------------------------------------------

SAMPLES = sample_rows()  # the last one is on line 13
FILES = {
    read_ready_times: ("gradient-ready-times.csv", READY_HEADER),
    read_costs: ("overlap-times.csv", OVERLAP_HEADER),
    read_all_reduce: ("allreduce-samples.csv", SAMPLES_HEADER),
}


def changed(rows: list[tuple], column: int, value: object, arm: str | None = None) -> list[tuple]:
    """Returns rows with another value in the last one, or in all rows of an arm."""
    chosen = [row[0] == arm for row in rows] if arm else [*[False] * (len(rows) - 1), True]
    return [
        (*row[:column], value, *row[column + 1 :]) if is_chosen else row
        for row, is_chosen in zip(rows, chosen, strict=True)
    ]


@pytest.mark.parametrize(
    ("read", "rows", "words"),
    [
        *((read, [], ["no rows"]) for read in FILES),
        (read_ready_times, changed([GOOD] * 2, 6, -1), ["line 3", "ready_time_ms", "-1"]),
        (read_ready_times, changed([GOOD] * 2, 6, "soon"), ["line 3", "soon"]),
        (read_ready_times, changed([GOOD] * 2, 5, 0), ["line 3", "size_bytes"]),
        (read_ready_times, changed([GOOD] * 2, 5, "big"), ["line 3", "size_bytes"]),
        (read_ready_times, changed([GOOD] * 2, 3, "first"), ["registration_index"]),
        (read_costs, LOCAL, ["bookkeeping"]),
        (read_costs, changed(OVERLAP, 6, -5), ["backward_time_ms", "-5"]),
        (read_costs, changed(OVERLAP, 7, "long"), ["all_reduce_time_ms", "long"]),
        (read_costs, changed(OVERLAP, 8, -1), ["messages_done", "-1"]),
        (read_costs, changed(OVERLAP, 9, ""), ["gradient_bytes"]),
        (read_costs, changed(OVERLAP, 1, "big"), ["message_bytes", "big"]),
        (read_costs, [r for r in OVERLAP if r[0] != "all_reduce"], ["64", "all_reduce"]),
        (read_costs, [r for r in OVERLAP if r[0] != "local"], ["local"]),
        (
            read_costs,
            changed(OVERLAP, 1, 64, "local"),
            ["local with message_bytes 64", "sends nothing"],
        ),
        (read_costs, [(*row[:9], 0) for row in OVERLAP], ["gradient_bytes"]),
        (read_costs, changed(OVERLAP, 2, 0, "continuous"), ["messages"]),
        (read_all_reduce, sample_rows("in_flight"), ["'sequential'", "in_flight"]),
        (read_all_reduce, SAMPLES[:6], ["at least 2"]),
        (read_all_reduce, changed(SAMPLES, 7, -1), ["line 13", "time_ms", "-1"]),
        (read_all_reduce, changed(SAMPLES, 7, "long"), ["line 13", "time_ms", "long"]),
        (read_all_reduce, changed(SAMPLES, 2, "large"), ["line 13", "total_bytes", "large"]),
        (read_all_reduce, changed(SAMPLES, 6, "first"), ["line 13", "rank", "first"]),
    ],
)
def test_an_unusable_table_is_refused_by_its_name(tmp_path, read, rows, words):
    name, header = FILES[read]
    with refused(name, *words):
        read(write_csv(tmp_path / name, header, rows))


@pytest.mark.parametrize(
    ("read", "rows", "column"),
    [
        *((read_ready_times, [GOOD], column) for column in READY_HEADER.split(",")),
        *((read_costs, OVERLAP, column) for column in ("arm", "round", "gradient_bytes")),
        *((read_all_reduce, SAMPLES, column) for column in ("mode", "total_bytes")),
    ],
)
def test_a_misnamed_column_is_refused_by_its_file_and_name(tmp_path, read, rows, column):
    name, header = FILES[read]
    names = ["other" if title == column else title for title in header.split(",")]
    with refused(name, f"'{column}'", "other"):
        read(write_csv(tmp_path / name, ",".join(names), rows))
