"""Traces written by hand, in Kineto's format: of ranks that compute on CPUs, and on GPUs."""

from __future__ import annotations

import json
from pathlib import Path

from command_line import ROOT

SHARED = ROOT.parent / "shared" / "measured" / "traces" / "ddp-2-gpus-rank0.json.gz"
"""A recorded trace that is not part of the project."""
FLOATS = 2**18
"""Elements of a gradient of 1 MiB."""
STEPS = 5


def trace(rank: int, *, forward_us: int = 5000, clock_us: float = 0.0, world: int = 2) -> dict:
    """Makes the trace of a rank that has two gradients of 1 MiB, each a bucket.

    Forward; gradients ready 4 and 8 ms later, each copied in for 1 ms and handed over; the link
    takes 6 ms for each bucket, in equal parts where two are under way, once the slowest rank is
    there, whose forward pass takes 9 ms. Each is copied out for 1 ms, and the update takes 2 ms.
    """
    events: list[dict] = []

    def add(name: str, start: float, length: float, thread: int = 1, **arguments) -> None:
        kind = "user_annotation" if name.startswith(("Profiler", "gloo", "Optim")) else "cpu_op"
        row = {"ph": "X", "cat": kind, "name": name, "pid": 9, "tid": thread, "args": arguments}
        events.append(row | {"ts": start + clock_us, "dur": length})

    def tensor(name: str, start: float, length: float, thread: int = 1) -> None:
        sizes = {"Input Dims": [[FLOATS]], "Input type": ["float"]}
        add(name, start, length, thread, **sizes)

    slowest_us = 9000
    begin = 0.0
    for step in range(STEPS):
        add("aten::linear", begin + 1, forward_us - 2)
        pass_us = begin + forward_us
        ready = [pass_us + 4000, pass_us + 9000]
        # The first is alone for 5 ms of its 6, and both share the link for the next 2 ms.
        ends = [begin + slowest_us + 12000, begin + slowest_us + 17000]
        for index, at in enumerate(ready):
            add("autograd::engine::evaluate_function: MmBackward0", at - 4000, 4000)
            tensor("torch::distributed::reducer::mul_out", at, 1000)
            add("c10d::allreduce_", at + 1000, 1)
            tensor("gloo:all_reduce", at + 1001, ends[index] - at - 1001, thread=2 + index)
        now = pass_us + 10001
        for end in ends:
            now = max(now, end)
            tensor("torch.distributed.ddp.reducer::copy_bucket_to_grad", now, 1000)
            now += 1000
        add("Optimizer.step#SGD.step", now, 2000)
        add("aten::add_", now + 1, 1998)
        add(f"ProfilerStep#{step}", begin, now + 2000 - begin)
        begin = now + 2000
    who = {"rank": rank, "world_size": world, "backend": "gloo"}
    return {"schemaVersion": 1, "distributedInfo": who, "traceEvents": events}


def device_trace(
    rank: int, *, metric: bool = False, launch: str = "cudaLaunchKernel", steps: int = STEPS
) -> dict:
    """Makes the trace of a rank of two that computes on a GPU, without shapes.

    The same gradients, each a bucket: 4 ms of forward pass, and 4 of backward pass for each; copies
    take 0.1 ms, all-reduces of buckets 6 ms, and the update 2 ms, for which the host waits. A step
    takes 21 ms from launch to launch; ``metric`` begins it with an all-reduce of one element.
    """
    events: list[dict] = []
    sent = {"dtype": "Float", "Process Group Name": "0", "Collective name": "allreduce"}

    def add(kind: str, name: str, at: float, length: float, thread: int = 1, **arguments) -> None:
        row = {"ph": "X", "cat": kind, "name": name, "pid": 9, "tid": thread, "args": arguments}
        events.append(row | {"ts": at, "dur": length})

    def kernel(name: str, at: float, start: float, length: float, stream: int = 7, **about) -> None:
        number = len(events)
        add("cuda_runtime", launch, at, 2, correlation=number)
        add("kernel", name, start, length, stream, stream=stream, correlation=number, **about)

    def all_reduce(at: float, start: float, length: float, count: int) -> None:
        add("cpu_op", "c10d::allreduce_", at, 10)
        add("user_annotation", "nccl:all_reduce", at + 1, 8)
        size = {"In msg nelems": count, "Out msg nelems": count}
        kernel("ncclDevKernel_AllReduce_Sum_f32", at + 5, start, length, 20, **sent, **size)

    for step in range(steps):
        begin = step * 21_000.0
        add("user_annotation", f"ProfilerStep#{step}", begin, 21_000)
        add("cpu_op", "aten::linear", begin + 10, 20)
        kernel("gemm", begin + 15, begin + 20, 4_000)
        if metric:
            all_reduce(begin + 50, begin + 4_020, 30, 1)
        at, start = begin + 100, begin + 4_100
        for end in (begin + 14_300, begin + 20_300):
            node = "autograd::engine::evaluate_function: "
            add("cpu_op", f"{node}MmBackward0", at, 20)
            kernel("gemm", at + 5, start, 4_000)
            add("cpu_op", f"{node}torch::autograd::AccumulateGrad", at + 30, 50)
            add("cpu_op", "torch::distributed::reducer::mul_out", at + 40, 5)
            kernel("mul", at + 42, start + 4_000, 100)
            all_reduce(at + 60, max(start + 4_100, end - 6_000), 6_000, FLOATS)
            at, start = at + 100, start + 4_100
        now = at
        for end in (begin + 14_300, begin + 20_300):
            add("cpu_op", "torch.distributed.ddp.reducer::copy_bucket_to_grad", now, 10)
            kernel("copy", now + 5, end, 100)
            now += 20
        add("user_annotation", "Optimizer.step#SGD.step", now, 20)
        kernel("update", now + 5, begin + 20_400, 500)
        add("cuda_runtime", "cudaDeviceSynchronize", now + 50, begin + 20_950 - now - 50)
    who = {"rank": rank, "world_size": 2, "backend": "nccl"}
    return {"schemaVersion": 1, "distributedInfo": who, "traceEvents": events}


def write(folder: Path, *traces: dict) -> Path:
    for content in traces:
        rank = content["distributedInfo"]["rank"]
        (folder / f"rank{rank}.json").write_text(json.dumps(content))
    return folder
