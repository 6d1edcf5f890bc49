"""The names that operators, ranges and calls of the runtime are known by in a trace.

They are those of torch 2.0 to 2.15 with NCCL, RCCL and gloo. A name that is missing here is one
line more.
"""

from __future__ import annotations

import re
from math import prod

COLLECTIVES = {
    "allreduce": "all_reduce",
    "allgather": "all_gather",
    "reducescatter": "reduce_scatter",
    "alltoall": "all_to_all",
    "broadcast": "broadcast",
    "reduce": "reduce",
    "gather": "gather",
    "scatter": "scatter",
    "barrier": "barrier",
    "send": "send",
    "recv": "recv",
}
"""Operation by how its names begin in small letters and without underscores, in order of trial:
``allreduce``, ``all_reduce_``, ``allGatherSingleImpl``, ``reduceScatterSingleImpl``,
``AllReduce_RING_LL``."""
HANDED_OVER = ("c10d::", "_c10d_functional::", "c10d_functional::")
"""Operators that hand a collective over, or wait for one."""
NOT_HANDED = ("wait", "monitored_barrier", "record")
GLOO, NCCL = "gloo:", "nccl:"
DEVICE_COLLECTIVE = re.compile(r"nccl|rccl|msccl|symm_mem|one_shot_all|two_shot_all|multimem", re.I)
"""Kernels that communicate."""
LAUNCHES = re.compile(r"(cuda|cu|hip)(Ext)?(Module)?(Graph)?(Launch|Mem(cpy|set))")
"""Calls of the runtime that hand the device something to do."""
SYNCHRONISES = re.compile(r"(cuda|cu|hip)(Device|Stream|Event|Ctx)Synchronize|(cuda|hip)Memcpy")
"""Calls of the runtime in which the host waits for the device."""
STREAM_WAITS = ("cudaStreamWaitEvent", "hipStreamWaitEvent", "cuStreamWaitEvent")
COPIED_IN = (
    "torch::distributed::reducer::mul_out",
    "torch::distributed::reducer::copy_",
)
"""A gradient's copy into its bucket."""
COPIED_OUT = "torch.distributed.ddp.reducer::copy_bucket_to_grad"
NODE, ACCUMULATES = "autograd::engine::evaluate_function", "AccumulateGrad"
STEP, UPDATE = "ProfilerStep#", "Optimizer.step#"
LOADS = ("enumerate(DataLoader)", "data")
"""Ranges in which the program waits for its next batch: torch's, and this project's."""
ITEM_BYTES = {
    "float": 4,
    "double": 8,
    "bfloat16": 2,
    "half": 2,
    "long": 8,
    "int": 4,
    "byte": 1,
    "char": 1,
    "bool": 1,
}
"""Bytes of an element by the name of its type in small letters, without ``c10::`` and ``long int``
as ``long``."""


def collective(name: str) -> str | None:
    """Returns the operation of a collective by any of its names; None of what is none."""
    before = r"^(_?c10d(_functional)?::|gloo:|nccl:|nccl(symk?)?(dev)?kernel|nccl)|_"
    plain = re.sub(before, "", name.lower())
    return next((op for start, op in COLLECTIVES.items() if plain.startswith(start)), None)


def item_bytes(kind: str) -> int:
    """Returns the bytes of an element of a type; 0 of one that is not known."""
    plain = kind.lower().removeprefix("c10::").removesuffix(" int")
    return ITEM_BYTES.get(plain, 0)


def count_elements(dimensions: object) -> int:
    """Counts the elements of a tensor by its sizes, or of a list of tensors."""
    if not isinstance(dimensions, list) or not dimensions:
        return 0
    if all(isinstance(size, int) for size in dimensions):
        return prod(dimensions)
    return sum(map(count_elements, dimensions))
