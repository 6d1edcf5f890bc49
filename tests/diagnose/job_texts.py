"""Text in the formats that a job and its machine print, of known content."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

FILE = "ProcessGroupNCCL.cpp"


def timeout(rank: int, number: int, operation: str = "ALLREDUCE", elements: int = 25) -> str:
    """Returns the line of a watchdog that gives a collective up."""
    return (
        f"[rank{rank}]:[E1127 10:00:0{rank}.12345 {FILE}:632] [Rank {rank}] Watchdog caught "
        f"collective operation timeout: WorkNCCL(SeqNum={number}, OpType={operation}, "
        f"NumelIn={elements}, NumelOut={elements}, Timeout(ms)=600000) ran for 600081 milliseconds "
        "before timing out."
    )


def progress(rank: int, enqueued: int, completed: int, group: str = "0(default_pg)") -> str:
    """Returns the line of a rank that another one told to dump."""
    return (
        f"[rank{rank}]:[E1127 10:00:0{rank}.2 {FILE}:1484] [PG ID 0 PG GUID {group} Rank {rank}] "
        "Received a dump signal due to a collective timeout from rank 0 and we will try our best "
        f"to dump the debug info. Last enqueued NCCL work: {enqueued}, last completed NCCL work: "
        f"{completed}.This is most likely caused by incorrect usages of collectives"
    )


def summary(*failed: tuple[int, int, str], host: str = "node7") -> str:
    """Returns torchrun's summary of (rank, exit code, name of the signal), the root first."""

    def block(index: int, rank: int, code: int, name: str) -> str:
        return (
            f"[{index}]:\n  time      : 2026-11-27_10:00:0{index}\n  host      : {host}\n"
            f"  rank      : {rank} (local_rank: {rank})\n"
            f"  exitcode  : {code} (pid: {9000 + rank}) {f' ({name})' if name else ''}\n"
            "  error_file: <N/A>\n  traceback : Signal received"
        )

    (first, *others), rule = failed, "=" * 60
    rest = "\n".join(block(i, *other) for i, other in enumerate(others, 1))
    return (
        "torch.distributed.elastic.multiprocessing.errors.ChildFailedError: \n"
        f"{rule}\ntrain.py FAILED\n{rule}\nFailures:\n{rest or '  <NO_OTHER_FAILURES>'}\n{rule}\n"
        f"Root Cause (first observed failure):\n{block(0, *first)}\n{rule}\n"
    )


def traceback(rank: int, error: str, line: int = 12) -> str:
    """Returns the traceback of a rank, as PyTorch labels it."""
    lines = [
        "Traceback (most recent call last):",
        f'  File "/home/me/train.py", line {line}, in step',
        "    loss.backward()",
        '  File "/opt/lib/python3.11/site-packages/torch/_tensor.py", line 500, in backward',
        "    torch.autograd.backward(",
        error,
    ]
    return "\n".join(f"[rank{rank}]: {text}" for text in lines)


def nccl(host: str, rank: int, text: str, kind: str = "INFO") -> str:
    """Returns a line of NCCL; a rank's process is 70 more than the rank."""
    return f"{host}:{70 + rank}:{170 + rank} [{rank}] NCCL {kind} {text}"


def nccl_start(hosts: Sequence[str], job: str = "0xabc") -> str:
    """Returns the lines with which the ranks of a job begin their communicator."""
    return "\n".join(
        nccl(
            host,
            rank,
            f"ncclCommInitRankConfig comm 0x55 rank {rank} nranks {len(hosts)} cudaDev {rank} "
            f"nvmlDev {rank} busId {rank}1000 commId {job} - Init START",
        )
        for rank, host in enumerate(hosts)
    )


def topology(rows: Sequence[str], nics: int = 0) -> str:
    """Returns a matrix of nvidia-smi topo -m from the links of each row, underlined as it is."""
    devices = [f"GPU{i}" for i in range(len(rows) - nics)] + [f"NIC{i}" for i in range(nics)]
    header = "\x1b[4m\t" + "\t".join(devices) + "\tCPU Affinity\tNUMA Affinity\tGPU NUMA ID\x1b[0m"
    lines = [f"{name}\t" + "\t".join(row.split()) for name, row in zip(devices, rows, strict=True)]
    lines = [f"{text}\t0-31\t0\t\tN/A" if text.startswith("GPU") else text for text in lines]
    return "\n".join([header, *lines, "", "Legend:", "", "  X    = Self", "  SYS  = through QPI"])


QUERY = """\
==============NVSMI LOG==============

Timestamp                                 : Fri Nov 27 10:00:00 2026
Driver Version                            : 550.54.15
CUDA Version                              : 12.4

Attached GPUs                             : 2
GPU 00000000:17:00.0
    Product Name                          : NVIDIA A100-SXM4-80GB
    PCI
        Bus                               : 0x17
        GPU Link Info
            PCIe Generation
                Max                       : 4
                Current                   : 4
            Link Width
                Max                       : 16x
                Current                   : 8x
    Clocks Event Reasons
        Idle                              : Not Active
        SW Power Cap                      : Not Active
        HW Slowdown                       : Active
            HW Thermal Slowdown           : Active
            HW Power Brake Slowdown       : Not Active
    ECC Errors
        Volatile
            SRAM Correctable              : 0
            DRAM Uncorrectable            : 3
        Aggregate
            DRAM Uncorrectable            : 9
    Remapped Rows
        Correctable Error                 : 0
        Pending                           : Yes
    GPU Power Readings
        Power Draw                        : 210.00 W
        Current Power Limit               : 300.00 W
        Default Power Limit               : 400.00 W
GPU 00000000:65:00.0
    Clocks Event Reasons
        HW Slowdown                       : Not Active
    GPU Power Readings
        Current Power Limit               : 400.00 W
        Default Power Limit               : 400.00 W
"""


def dmon(clocks: Sequence[int], *, rows: int = 3, heat: int = 0) -> str:
    """Returns samples of nvidia-smi dmon -s pucv of busy GPUs with these clocks."""
    lines = [
        "# gpu    pwr  gtemp  mtemp     sm    mem    enc    dec   mclk   pclk  pviol  tviol",
        "# Idx      W      C      C      %      %      %      %    MHz    MHz      %   bool",
    ]
    for _ in range(rows):
        lines += [
            f"    {gpu}    350     61      -     97     60      0      0   1593   {clock}      0"
            f"      {heat if gpu == 0 else 0}"
            for gpu, clock in enumerate(clocks)
        ]
    return "\n".join(lines)


def ddp_runtime(rank: int, forward: int, backward: int, exchange: int, overlap: int) -> str:
    """Returns what DDP logs of its times (ns) under TORCH_DISTRIBUTED_DEBUG=DETAIL."""
    return (
        f"[rank{rank}]:[I1127 10:00:00.5 logger.cpp:389] [Rank {rank} / 2] [before iteration 20] "
        f"Training GPT unused_parameter_size=0 \n  Avg forward compute time: {forward} \n"
        f"  Avg backward compute time: {backward} \n Avg backward comm. time: {exchange} \n"
        f"  Avg backward comm/comp overlap time: {overlap}"
    )


def py_spy(pid: int, rank: int, *frames: str) -> str:
    """Returns a dump of a process, innermost frame first, beside a thread of no interest."""
    stack = "\n".join(f"    {frame}" for frame in frames)
    return (
        f"Process {pid}: /usr/bin/python3 -u train.py --local-rank={rank}\n"
        f'Python v3.11.6 (/usr/bin/python3.11)\n\nThread {pid} (active): "MainThread"\n{stack}\n'
        'Thread 0x7F12 (idle): "Thread-1"\n    wait (threading.py:331)\n'
    )


def nccl_tests(gpu: str, hosts: Sequence[str], gpus: int, busbw: float) -> str:
    """Returns what all_reduce_perf prints, 1 MiB to 8 GiB, of 40 µs and a bus bandwidth in GB/s."""
    rates = {}
    for size in (2**power for power in range(20, 34)):
        moved = size * 2 * (len(hosts) * gpus - 1) / (len(hosts) * gpus)
        rates[size] = moved / (40 + moved / busbw / 1e3) / 1e3
    return nccl_table(gpu, hosts, gpus, rates)


def nccl_table(gpu: str, hosts: Sequence[str], gpus: int, rates: Mapping[int, float]) -> str:
    """Returns what all_reduce_perf prints of bus bandwidths in GB/s, by size in bytes."""
    ranks = [(host, device) for host in hosts for device in range(gpus)]
    lines = [
        f"# nThread 1 nGpus {gpus} minBytes {min(rates)} maxBytes {max(rates)}",
        "#",
        "# Using devices",
    ]
    lines += [
        f"#  Rank {rank:2d} Group  0 Pid 1{rank} on {host} device {device} [0x07] {gpu}"
        for rank, (host, device) in enumerate(ranks)
    ]
    lines += [
        "#       size         count      type   redop    root     time   algbw   busbw #wrong",
        "#        (B)    (elements)                               (us)  (GB/s)  (GB/s)",
    ]
    share = 2 * (len(ranks) - 1) / len(ranks)
    for size, busbw in rates.items():
        algbw = busbw / share
        row = f"float sum -1 {size / algbw / 1e3:.2f} {algbw:.2f} {busbw:.2f} 0"
        lines.append(f"{size:12d} {size // 4:12d} {row}")
    mean = sum(rates.values()) / len(rates)
    return "\n".join(
        [*lines, "# Out of bounds values : 0 OK", f"# Avg bus bandwidth    : {mean:.4f}", ""]
    )
