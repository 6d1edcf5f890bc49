"""Causes in how fast collectives are: a table of theirs beside what the hardware should give."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

from common.diagnose.evidence.case import MINOR, Verdict
from common.diagnose.evidence.evidence import NotJudged
from common.diagnose.evidence.left_behind import LeftBehind
from common.perfmodel.cluster.judged_table import (
    ACROSS_SOCKETS,
    NO_P2P,
    NO_SHARED_MEMORY,
    ONE_CARD,
    SOCKETS,
    JudgedTable,
    judge_rows,
)
from common.runtime.wording import counted, size_text

NAME_IT = "name it with --hardware, as in --hardware h100-ib (data/clusters), or a YAML file"
CHANGES = {
    NO_P2P: "NCCL_DEBUG=INFO says how ranks are connected (via P2P, via SHM); unset "
    "NCCL_P2P_DISABLE, turn off ACS, all GPUs of the host in one container",
    SOCKETS: "NCCL_DEBUG=INFO names the network (NET/IB, NET/Socket); unset NCCL_IB_DISABLE, give "
    "the container /dev/infiniband",
    ONE_CARD: "name all cards in NCCL_IB_HCA, or unset it; nvidia-smi topo -m shows them",
    NO_SHARED_MEMORY: "unset NCCL_SHM_DISABLE; a larger /dev/shm for containers",
    ACROSS_SOCKETS: "GPUs of one socket (nvidia-smi topo -m, CUDA_VISIBLE_DEVICES), or NVLink",
}


def judged_tables(job: LeftBehind) -> list[JudgedTable]:
    """Judges every table of collectives that was read."""
    faults = tuple(_seen(job))
    judge = partial(judge_rows, hardware=job.hardware, gpu=job.gpu, faults=faults)
    return [judge(table) for table in job.collectives]


def _seen(job: LeftBehind) -> Iterator[str]:
    """Yields the faults that NCCL's log shows."""
    log = job.printed.nccl
    set_to = {name: value for name, (value, _) in log.settings.items()}
    if log.largest.pairs("SHM", one_host=True) or set_to.get("NCCL_P2P_DISABLE") == "1":
        yield NO_P2P
    if log.largest.pairs("NET", one_host=True):
        yield NO_SHARED_MEMORY
    on_sockets = log.networks == {"Socket"} or log.largest.pairs("NET/Socket", one_host=False)
    if on_sockets or set_to.get("NCCL_IB_DISABLE") == "1":
        yield SOCKETS
    if len(log.adapters) == 1:
        yield ONE_CARD


def slow_collectives(job: LeftBehind) -> Verdict | None:
    """Judges whether collectives are slower than their hardware makes them."""
    tables = judged_tables(job)
    if not tables:
        raise NotJudged("no table of nccl-tests, all_reduce_bench.py or NCCL Inspector")
    on_clusters = [table for table in tables if table.clusters]
    if not on_clusters:
        raise NotJudged(f"{tables[0].why_not}; {NAME_IT}")
    low = [table for table in on_clusters if table.is_low]
    if not low:
        return None
    faults = list(dict.fromkeys(fault for table in low for fault in table.faults))
    sentences = [_sentence(table) for table in low]
    if not faults:
        sentences.append("It looks like none of the faults that are known.")
    margin = max(table.margin for table in low)
    return Verdict(
        cause="slow-collectives",
        title=f"collectives are slow: {' or '.join(faults) or 'it is not known why'}",
        evidence=sentences,
        confidence="medium" if len(faults) == 1 else "low",
        reason=f"the best row of healthy hardware takes at most {margin:g} times what the model of "
        "NCCL gives; a fault is told by NCCL's log where it shows one, else by what is left",
        change="; ".join(CHANGES[fault] for fault in faults) + "."
        if faults
        else "look at its log.",
        group=MINOR,
    )


def _sentence(judged: JudgedTable) -> str:
    table, row = judged.table, judged.best
    should = row.busbw_gb_per_s * row.time_s / row.high_s
    return (
        f"{table.collective} over {counted(table.ranks, 'rank')} reaches {row.busbw_gb_per_s:.3g} "
        f"GB/s of bus bandwidth at {size_text(row.size_bytes)}, where {', '.join(judged.clusters)} "
        f"should give at least {should:.3g} {table.where}."
    )


def list_rows(judged: JudgedTable) -> list[str]:
    """Returns a table's rows beside what should come, in lines."""
    table = judged.table
    about = f", {table.gpu}" if table.gpu else ""
    should = ", ".join(judged.clusters) or f"not known ({judged.why_not}; {NAME_IT})"
    lines = [
        "",
        f"{table.collective} over {counted(table.ranks, 'rank')}{about} {table.where}. "
        f"What should come: {should}.",
        f"{'size':>10}  {'time (us)':>10}  {'busbw (GB/s)':>12}  {'should be (us)':>19}  ",
    ]
    for row in judged.rows:
        ends = f"{row.low_s * 1e6:.4g}"
        if row.high_s > row.low_s * 1.005:
            ends += f" to {row.high_s * 1e6:.4g}"
        ends = ends if row.low_s == row.low_s else "not known"
        lines.append(
            f"{size_text(row.size_bytes):>10}  {row.time_s * 1e6:>10.4g}  "
            f"{row.busbw_gb_per_s:>12.4g}  {ends:>19}  {row.verdict}"
        )
    return lines


def rows_as_json(judged: JudgedTable) -> dict[str, object]:
    """Returns a judged table as JSON can hold it."""
    return {
        "collective": judged.table.collective,
        "ranks": judged.table.ranks,
        "where": judged.table.where,
        "hardware": list(judged.clusters),
        "faults": list(judged.faults),
        "rows": [
            {
                "size_bytes": row.size_bytes,
                "time_us": row.time_s * 1e6,
                "should_be_us": None
                if row.low_s != row.low_s
                else [row.low_s * 1e6, row.high_s * 1e6],
                "verdict": row.verdict,
            }
            for row in judged.rows
        ],
    }
