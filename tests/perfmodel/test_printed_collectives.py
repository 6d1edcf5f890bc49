"""Tables as nccl-tests and all_reduce_bench.py print them, with published figures of 8 × A100, 8 ×
H200 (stas00/ml-engineering, network/README.md) and what a user's file may have around them."""

from __future__ import annotations

from pathlib import Path

import pytest
from perfmodel_support import refused

from common.perfmodel.printed.collectives import is_printed, read_printed
from common.perfmodel.tables import has_samples, read_all_reduce

HEADER = """\
#                                                              out-of-place                       in-place
#       size         count      type   redop    root     time   algbw   busbw #wrong     time   algbw   busbw #wrong
#        (B)    (elements)                               (us)  (GB/s)  (GB/s)            (us)  (GB/s)  (GB/s)
"""  # noqa: E501
RANKS = "".join(
    f"#  Rank {rank:2d} Group  0 Pid 1{rank} on node device {rank} [0x07] NVIDIA A100-SXM4-80GB\n"
    for rank in range(8)
)
A100_ROWS = """\
     1048576        262144     float     sum      -1    101.9   10.29   18.01      0    100.2   10.46   18.31      0
  1073741824     268435456     float     sum      -1   8203.9  130.88  229.04      0   8201.1  130.93  229.12      0
 17179869184    4294967296     float     sum      -1   127997  134.22  234.89    N/A   127990  134.23  234.90    N/A
"""  # noqa: E501
BENCH = """
Environment:
- software: torch=2.9.1+cu130, cuda=13.0, nccl=(2, 27, 7)

The average bandwidth of all_reduce over 8 ranks (5 warmups / 20 trials):

| payload |    busbw   |    algbw   |
| ------: | ---------: | ---------: |
|   32KiB |   1.44GBps |   0.82GBps |
|   64MiB | 346.51GBps | 198.01GBps |
|   16GiB | 482.26GBps | 275.58GBps |

*** Plotting results
"""


def written(folder: Path, text: str) -> Path:
    path = folder / "printed.txt"
    path.write_text(text)
    return path


def test_nccl_tests_times_are_out_of_place_and_in_microseconds(tmp_path):
    path = written(tmp_path, f"# nThread 1 nGpus 8\n#\n{RANKS}#\n{HEADER}{A100_ROWS}# Avg: 1\n")
    table = read_all_reduce(path)
    assert table.world_size == 8
    assert table.curve.sizes_bytes.tolist() == [2**20, 2**30, 2**34]
    assert table.curve.times_s == pytest.approx([101.9e-6, 8203.9e-6, 127997e-6])
    assert table.crowded is None
    assert not has_samples(path)


@pytest.mark.parametrize("prefix", ["[1,0]<stdout>:", "0: ", "    "])
def test_a_launchers_prefix_and_ncclss_log_do_not_matter(tmp_path, prefix):
    log = "node:1:2 [0] NCCL INFO Channel 00/24 : 0 1 2 3\n"
    lines = f"{log}{HEADER}{log}{A100_ROWS}".splitlines()
    printed = read_printed(written(tmp_path, "\n".join(prefix + line for line in lines)))
    # without lines of ranks their number follows from 234.89 / 134.22 = 2 · 7 / 8
    assert (printed.collective, printed.ranks) == ("all_reduce", 8)
    assert printed.curve.times_s[-1] == pytest.approx(127997e-6)


@pytest.mark.parametrize(
    ("collective", "redop", "time_us", "busbw"),
    # 16 GiB on 8 H200; the bus bandwidth is 7/8 of the algorithm bandwidth
    [("all_gather", "none", 41594.9, 361.40), ("reduce_scatter", "sum", 41422.9, 362.90)],
)
def test_halves_of_an_all_reduce_are_told_apart(tmp_path, collective, redop, time_us, busbw):
    algbw = 2**34 / time_us / 1e3
    rows = "".join(
        f" {size} {size // 4} float {redop} -1 {time_us * size / 2**34:.1f} {algbw:.2f} {busbw:.2f}"
        " 0 1.0 1.0 1.0 0\n"
        for size in (2**33, 2**34)
    )
    for title in ("", f"# Collective test starting: {collective}_perf\n"):
        path = written(tmp_path, title + HEADER + rows)
        printed = read_printed(path)
        assert (printed.collective, printed.ranks) == (collective, 8)
        assert printed.curve.time_s(2**34) == pytest.approx(time_us * 1e-6)
        with refused("printed.txt", collective, "not of all_reduce"):
            read_all_reduce(path)


def test_the_table_of_all_reduce_bench_has_units_in_its_cells(tmp_path):
    table = read_all_reduce(written(tmp_path, BENCH))
    assert table.world_size == 8
    assert table.curve.sizes_bytes.tolist() == [2**15, 2**26, 2**34]
    assert table.curve.times_s == pytest.approx(
        [2**15 / 0.82e9, 2**26 / 198.01e9, 2**34 / 275.58e9]
    )
    # gigabits, sizes that are called KB, and a table without the line of ranks
    old = "| size | algbw | busbw |\n|---|---|---|\n| 64MB | 1584.08Gbps | 2772.08Gbps |\n"
    old += "| 16GB | 2204.64Gbps | 3858.08Gbps |\n"
    again = read_all_reduce(written(tmp_path, old))
    assert again.world_size == 8
    assert again.curve.times_s == pytest.approx(table.curve.times_s[1:])


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (HEADER.replace("(us)", "(ms)") + A100_ROWS, ["line 3", "ms", "us"]),
        (HEADER.replace("(B)", "(KB)") + A100_ROWS, ["line 3", "KB"]),
        ("\n".join(HEADER.splitlines()[:2]) + "\n" + A100_ROWS, ["units none"]),
        (HEADER, ["no rows"]),
        (HEADER + A100_ROWS.replace("8203.9", "82.039"), ["line 5", "130.88 GB/s"]),
        (HEADER + A100_ROWS.replace("8203.9", "fast"), ["line 5"]),
        (HEADER + A100_ROWS.splitlines()[0], ["1 sizes", "at least 2"]),
        (HEADER + A100_ROWS + A100_ROWS, ["ascend"]),
        ("# broadcast_perf\n" + HEADER + A100_ROWS, ["broadcast", "all_gather"]),
        (HEADER + A100_ROWS.replace("234.89", "268.40"), ["number of ranks", "# Rank"]),
        (BENCH.replace("346.51GBps", "346.51MiBps"), ["line 10", "346.51MiBps", "Gbps"]),
        (BENCH.replace("198.01GBps", "0.00GBps"), ["line 10", "above 0"]),
        (BENCH.replace("64MiB", "64 pages"), ["line 10", "64 pages"]),
        (BENCH.replace("|   64MiB |", "|"), ["line 10", "2 columns"]),
        (BENCH.replace("payload", "what"), ["what", "payload"]),
        (BENCH.replace("   algbw", "my algbw"), ["columns payload, busbw, my", "algbw"]),
        (BENCH.replace("64MiB", "1.2.3MiB"), ["line 10", "1.2.3MiB"]),
        (BENCH.replace("346.51GBps", "3.4.6GBps"), ["line 10", "3.4.6GBps"]),
    ],
)
def test_what_cannot_be_read_is_one_line_with_the_path(tmp_path, text, words):
    with refused("printed.txt", *words):
        read_all_reduce(written(tmp_path, text))


def test_other_files_are_not_taken_for_one(tmp_path):
    assert not is_printed(written(tmp_path, "world_size,total_bytes,average_time\n8,4,0.1\n"))
    assert not is_printed(tmp_path / "missing.txt")
    (tmp_path / "binary").write_bytes(b"\xff\xfe\x00")
    assert not is_printed(tmp_path / "binary")
