"""Tables of nccl-tests, all_reduce_bench.py and NCCL Inspector beside what hardware should give.

Tables are made by a line of latency and bus bandwidth; what a fault leaves is by data sheets: PCIe,
one card of several, TCP. Published tables of healthy hardware must not be accused.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import job_texts as texts
import pandas as pd
import pytest
from command_line import ROOT, ddplab, error_line

from common.diagnose.causes.job.collectives import judged_tables
from common.diagnose.opened import PostMortem, open_postmortem
from common.perfmodel.cluster.judged_table import (
    EXPECTED,
    LOW,
    NO_P2P,
    NO_SHARED_MEMORY,
    NOT_KNOWN,
    ONE_CARD,
    SOCKETS,
    judge_rows,
)
from common.perfmodel.printed.collectives import PrintedCollective
from common.studies.public.hardware import PEAK_NAMES

A100, H100 = "NVIDIA A100-SXM4-80GB", "NVIDIA H100 80GB HBM3"
PUBLISHED = ROOT.parent / "shared" / "measured" / "public-gpus" / "collectives.csv"


def opened(folder: Path, text: str, hardware: str = "", name: str = "tests.log") -> PostMortem:
    path = folder / name
    path.write_text(text)
    return open_postmortem(path, hardware=hardware)


@pytest.mark.parametrize(
    ("gpu", "hosts", "gpus", "busbw", "hardware", "fault"),
    [
        (A100, 1, 8, 232, "", None),
        (A100, 1, 4, 230, "", None),
        (A100, 1, 8, 6, "", NO_P2P),
        (A100, 1, 8, 1.2, "", NO_SHARED_MEMORY),
        (H100, 2, 8, 350, "", None),
        (H100, 2, 8, 5, "", SOCKETS),
        (H100, 2, 8, 45, "h100-ib", ONE_CARD),
        (H100, 2, 1, 45, "h100-ib", None),  # a GPU of each node has one card
        ("NVIDIA A100-SXM4-40GB", 2, 8, 1.1, "", SOCKETS),
    ],
)
def test_what_is_slow_is_named_and_what_is_not_is_left_alone(
    tmp_path: Path, gpu: str, hosts: int, gpus: int, busbw: float, hardware: str, fault: str | None
) -> None:
    text = texts.nccl_tests(gpu, [f"n{h}" for h in range(hosts)], gpus, busbw)
    postmortem = opened(tmp_path, text, hardware)
    [judged] = judged_tables(postmortem.job)
    verdicts = [v for v in postmortem.diagnosis.verdicts if v.cause == "slow-collectives"]
    last = judged.rows[-1]
    assert last.busbw_gb_per_s == pytest.approx(busbw, rel=0.02)
    assert last.verdict == (LOW if fault else EXPECTED)
    assert [fault in verdict.title for verdict in verdicts] == [True] * bool(fault)
    assert sum("GiB" in line and last.verdict in line for line in postmortem.lines()) >= 3


@pytest.mark.parametrize(
    ("hosts", "line", "fault"),
    [
        (1, "NCCL_P2P_DISABLE set by environment to 1.", NO_P2P),
        (2, "Using network Socket", SOCKETS),
        (2, "NET/IB : Using [0]mlx5_0:1/RoCE [RO]; OOB eth0:10.0.0.1<0>", ONE_CARD),
        (2, "NET/IB : Using [0]mlx5_0:1/IB [1]mlx5_1:1/IB [RO]; OOB eth0:10.0.0.1<0>", None),
    ],
)
def test_a_log_beside_the_table_decides_between_faults(
    tmp_path: Path, hosts: int, line: str, fault: str | None
) -> None:
    # 10 GB/s may be the host's memory or the processors' interconnect, TCP or one of eight cards.
    text = texts.nccl_tests(A100, [f"n{host}" for host in range(hosts)], 8, 10)
    [alone] = judged_tables(opened(tmp_path, text).job)
    assert len(alone.faults) == 2
    [judged] = judged_tables(opened(tmp_path, f"n0:1:2 [0] NCCL INFO {line}\n{text}").job)
    assert judged.faults == ((fault,) if fault else alone.faults)


def published_tables() -> Iterator[object]:
    """Yields all-reduces that others have published: GPU, hosts, GPUs of each, fault, bandwidths.

    Figures are nccl-tests' bus bandwidths out of place; a range or an average that a source has
    stands at the ends of its sizes.
    """
    rows = pd.read_csv(Path(__file__).with_name("published_tables.csv"), keep_default_na=False)
    for (source, *about), part in rows.groupby(
        ["source", "gpu", "hosts", "gpus", "fault"], sort=False
    ):
        rates = dict(zip(part["size_mib"] * 2**20, part["busbw_gb_per_s"], strict=True))
        yield pytest.param(*about, rates, id=source)


@pytest.mark.parametrize(("gpu", "hosts", "gpus", "fault", "rates"), [*published_tables()])
def test_published_faults_are_named_and_healthy_hardware_is_not_accused(
    tmp_path: Path, gpu: str, hosts: int, gpus: int, fault: str, rates: dict[int, float]
) -> None:
    text = texts.nccl_table(gpu, [f"n{host}" for host in range(hosts)], gpus, rates)
    postmortem = opened(tmp_path, text)
    [judged] = judged_tables(postmortem.job)
    titles = [v.title for v in postmortem.diagnosis.verdicts if v.cause == "slow-collectives"]
    assert judged.clusters
    assert [fault in title for title in titles] == [True] * bool(fault)


def test_the_bench_and_the_inspector_are_read_and_judged(tmp_path: Path) -> None:
    bench = (
        "- hardware: _CudaDeviceProperties(name='NVIDIA A100-SXM4-80GB', major=8, minor=0)\n"
        "The average bandwidth of all_reduce over 8 ranks (5 warmups / 20 trials):\n"
        "| payload |    busbw   |    algbw   |\n| ------: | ---------: | ---------: |\n"
        "|    1GiB |   5.25GBps |   3.00GBps |\n|   16GiB | 234.50GBps | 134.00GBps |\n"
    )
    [judged] = judged_tables(opened(tmp_path, bench).job)
    assert [row.verdict for row in judged.rows] == [LOW, EXPECTED]
    lines = [
        json.dumps(
            {
                "header": {"id": "0x7f", "rank": rank, "n_ranks": 8, "nnodes": 1},
                "metadata": {"hostname": "n0", "pid": 7},
                "coll_perf": {"coll": operation, "coll_sn": number, "coll_msg_size_bytes": 2**28}
                | {"coll_exec_time_us": 9_000 + 50_000 * (rank != number % 8)},
            }
        )
        for operation in ("AllReduce", "AllGather")
        for number in range(3)
        for rank in range(8)
    ]
    cut = "\n".join(lines)[:-40]
    inspected = judged_tables(opened(tmp_path, cut, "a100-ib").job)
    # 256 MiB in 9 ms once the last rank is there; of an all-gather it is a rank's part.
    assert [table.table.collective for table in inspected] == ["all_reduce", "all_gather"]
    assert [table.table.times_s for table in inspected] == [(0.009,), (0.009,)]
    assert inspected[1].table.sizes_bytes == (2**31,)
    assert [table.rows[0].verdict for table in inspected] == [LOW, EXPECTED]


def test_what_is_not_known_is_not_judged(tmp_path: Path) -> None:
    text = texts.nccl_tests("NVIDIA Nobody 9", ["n0"], 8, 6)
    postmortem = opened(tmp_path, text)
    [judged] = judged_tables(postmortem.job)
    assert {row.verdict for row in judged.rows} == {NOT_KNOWN}
    assert "--hardware" in dict(postmortem.diagnosis.not_judged)["slow-collectives"]
    # Between the slowest and the fastest network it depends on which it is.
    text = texts.nccl_tests(H100, ["n0", "n1"], 8, 150)
    [judged] = judged_tables(opened(tmp_path, text).job)
    assert judged.rows[-1].verdict == NOT_KNOWN
    assert not judged.is_low


def test_broken_and_other_tables_are_named_and_the_rest_is_read(tmp_path: Path) -> None:
    whole = texts.nccl_tests(A100, ["n0"], 8, 232)
    (tmp_path / "cut.log").write_text(whole[: len(whole) * 4 // 5])
    (tmp_path / "utf16.log").write_text(whole, encoding="utf-16")
    (tmp_path / "units.log").write_text(whole.replace("(us)", "(ms)"))
    (tmp_path / "other.log").write_text(f"# Collective test starting: alltoall_perf\n{whole}")
    coloured = "".join(f"\x1b[32m[1,0]<stdout>:{line}\x1b[0m\n" for line in whole.splitlines())
    (tmp_path / "coloured.log").write_text(coloured)
    postmortem = open_postmortem(tmp_path)
    read = sorted(table.table.where.partition(":")[0] for table in judged_tables(postmortem.job))
    assert read == ["[coloured.log", "[cut.log", "[utf16.log"]
    noted = sorted(note.partition(":")[0] for note in postmortem.job.notes)
    assert noted == ["other.log", "units.log"]
    assert not postmortem.diagnosis.verdicts


def test_hardware_that_is_not_known_is_refused(tmp_path: Path) -> None:
    (tmp_path / "x.log").write_text(texts.nccl_tests(A100, ["n0"], 8, 232))
    path = str(tmp_path / "x.log")
    assert "h100-ib" in error_line(ddplab("diagnose", "--read", path, "--hardware", "h100-lb"))
    assert "--read" in error_line(ddplab("diagnose", "--hardware", "h100-ib", path))


@pytest.mark.skipif(not PUBLISHED.exists(), reason="published rows are not part of the project")
def test_published_tables_of_healthy_hardware_are_not_accused() -> None:
    rows = pd.read_csv(PUBLISHED, keep_default_na=False)
    rows = rows[rows["time_us"].astype(str) != ""].assign(
        operation=rows["model"].where(rows["model"] != "", rows["strategy"])
    )
    keys = ["source_path", "gpu", "gpus", "network", "operation", "note"]
    judged = []
    for key, part in rows.groupby(keys):
        operations = ("all_reduce", "all_gather", "reduce_scatter")
        gpus, per_node = int(key[2]), int(part["gpus_per_node"].iloc[0])
        part = part.astype({"size_bytes": float, "time_us": float}).sort_values("size_bytes")
        table = PrintedCollective(
            collective=next(name for name in operations if name in key[4]),
            ranks=gpus,
            sizes_bytes=tuple(part["size_bytes"]),
            times_s=tuple(part["time_us"] / 1e6),
            gpu=PEAK_NAMES[key[1]],
            nodes=max(1, gpus // per_node),
        )
        judged.append(judge_rows(table))
    assert len(judged) >= 39
    assert not [table for table in judged if table.is_low or not table.clusters]
