"""A process group of one rank whose all-reduces take a given time on the rank's own device.

DDP, its hooks and all benchmarks run over it unchanged: an all-reduce of x bytes takes a(x), the
time that ``Exchange`` says, and nothing is sent. All-reduces are served in the order of their
launches, one at a time, as NCCL serves them in its stream. On a GPU a kernel takes that time in a
stream of its own; it holds some of the GPU's multiprocessors and moves the message through its
memory meanwhile. On the CPU a thread sleeps.

    register("cuda")
    with process_group("cuda", EMULATED) as worker:
        connect(Exchange(alpha_s=30e-6, bytes_per_s=20e9))

``Exchange.stalls`` makes ``Work.get_future`` wait for the all-reduce, in the stream that asks for
it. That is what the process group "nccl" of torch 2.15 does (c10d::nccl2::WorkNCCL::getFuture).
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

EMULATED = "emulated"
"""Name of the backend."""
THREADS = 512
"""Threads of each block of the kernel."""
SHARED_BYTES = 82_000
"""Shared memory of each block, about that of NCCL's: no block of a matrix product fits beside."""
PASSES = 2
"""Times that the kernel reads and writes the message: a ring's 2(n−1)/n, and the receiving."""
SLICES = 64
UNTIMED_BYTES = 4
"""Messages up to this size take no time: the benchmarks let ranks go on together with them."""
KERNEL = r"""
__device__ __forceinline__ unsigned long long now_ns() {
    unsigned long long t;
    asm volatile("mov.u64 %0, %globaltimer;" : "=l"(t));
    return t;
}
// Reads and writes `items` float4s `passes` times in `slices`, each held back to its share of
// `duration_ns`; then multiplies them as float32 by `factor`. A rest below 16 bytes stays.
extern "C" __global__ void __launch_bounds__(512, 1)
exchange(float4* data, double items, int passes, double duration_ns, int slices, double factor) {
    const unsigned long long begin = now_ns();
    const long long all = (long long)items, share = (all + gridDim.x - 1) / gridDim.x;
    const long long first = share * blockIdx.x < all ? share * blockIdx.x : all;
    const long long end = first + share < all ? first + share : all;
    for (int slice = 0; slice < slices; ++slice) {
        const long long from = first + (end - first) * slice / slices;
        const long long to = first + (end - first) * (slice + 1) / slices;
        for (int pass = 0; pass < passes; ++pass)
            for (long long i = from + threadIdx.x; i < to; i += blockDim.x)
                __stcg(data + i, __ldcg(data + i));
        __syncthreads();
        const unsigned long long due_ns = duration_ns * (slice + 1) / slices;
        while (now_ns() - begin < due_ns) __nanosleep(200);
        __syncthreads();
    }
    if (factor != 1.0)
        for (long long i = first + threadIdx.x; i < end; i += blockDim.x) {
            float4 v = __ldcg(data + i);
            v.x *= factor, v.y *= factor, v.z *= factor, v.w *= factor;
            __stcg(data + i, v);
        }
}
"""


@dataclass(frozen=True)
class Exchange:
    """The duration of an all-reduce, and its load on the device meanwhile.

    Attributes:
        alpha_s, bytes_per_s: an all-reduce of x bytes takes alpha_s + x / bytes_per_s.
        blocks: thread blocks of the kernel, one on each multiprocessor; with 0 a single thread
            waits, and the message is not moved. NCCL takes 16 to 32 on NVLink, 2 to 8 on a card.
        factor: the sum's elements over each rank's, written when the all-reduce ends. At 2 whoever
            reads the result too soon, or uses its memory again, gets other gradients than twice.
        stalls: ``get_future`` waits for the all-reduce.
    """

    alpha_s: float
    bytes_per_s: float
    blocks: int = 24
    factor: float = 1.0
    stalls: bool = False

    @property
    def name(self) -> str:
        """Returns the name by which runs record it as their network."""
        name = f"emulated exchange, α {self.alpha_s * 1e6:.3g} µs"
        name += f", {self.bytes_per_s / 1e9:.3g} GB/s, {self.blocks} blocks"
        return name + (", get_future waits" if self.stalls else "")

    def time_s(self, size_bytes: int) -> float:
        """Returns the seconds of an all-reduce of a size."""
        return self.alpha_s + size_bytes / self.bytes_per_s


INSTANT = Exchange(alpha_s=0.0, bytes_per_s=float("inf"))
"""The exchange of groups that nobody has connected, such as one that measures DDP's copies."""


class EmulatedWork(dist._Work if hasattr(dist, "_Work") else dist.Work):
    """An all-reduce under way."""

    def __init__(self, line: HostLine | DeviceLine, tensors: list[Tensor], stalls: bool) -> None:
        super().__init__()
        self.line, self.tensors, self.stalls = line, tensors, stalls
        self.future, self.end = line.future(), line.event()

    def is_completed(self) -> bool:
        """Returns True once the all-reduce is over."""
        return self.line.is_over(self.end)

    def wait(self, timeout: object = None) -> bool:
        """Makes the current stream, on the CPU the caller, wait until the all-reduce is over."""
        self.line.wait_for(self.end)
        return True

    def synchronize(self) -> None:
        """Does as ``wait``."""
        self.wait()

    def get_future(self) -> torch.futures.Future:
        """Returns the future of the reduced tensors."""
        if self.stalls:
            self.wait()
        return self.future


class EmulatedGroup(dist.ProcessGroup):
    """The group of one rank; its ``exchange`` says how long what is launched next takes."""

    def __init__(self, rank: int, size: int, device: torch.device) -> None:
        super().__init__(rank, size)
        self.exchange = INSTANT
        self.line = DeviceLine(device) if device.type == "cuda" else HostLine()

    def getBackendName(self) -> str:
        """Returns the name of the backend."""
        return EMULATED

    def setGroupName(self, name: str) -> None:
        """Keeps the name, which a group with no backend of torch's has nowhere else."""
        self.known_as = name

    def getGroupName(self) -> str:
        """Returns the name."""
        return self.known_as

    def allreduce(self, tensors: Sequence[Tensor], opts: object = None) -> EmulatedWork:
        """Launches an all-reduce; in the current stream if the caller waits for it anyway."""
        return self._launch(tensors, opts, self.exchange)

    def broadcast(self, tensors: Sequence[Tensor], opts: object = None) -> EmulatedWork:
        """Leaves the tensors as they are."""
        return self._launch(tensors, opts, INSTANT)

    def barrier(self, opts: object = None) -> EmulatedWork:
        """Returns at once: there is no other rank."""
        return self._launch([], opts, INSTANT)

    def allgather(self, outputs, inputs, opts: object = None) -> EmulatedWork:
        """Copies the rank's own tensors."""
        for parts, tensor in zip(outputs, inputs, strict=True):
            parts[0].copy_(tensor)
        return self._launch([], opts, INSTANT)

    def _gather(self, output: Tensor, part: Tensor, opts: object = None) -> EmulatedWork:
        output.copy_(part.view_as(output))
        return self._launch([output], opts, INSTANT)

    def _scatter(self, output: Tensor, part: Tensor, opts: object = None) -> EmulatedWork:
        output.copy_(part.view_as(output))
        return self._launch([output], opts, self.exchange)

    # The names of these collectives before torch 2.15, and since.
    _allgather_base = all_gather_single = _gather
    _reduce_scatter_base = reduce_scatter_single = _scatter

    def _launch(self, tensors: Sequence[Tensor], opts: object, exchange: Exchange) -> EmulatedWork:
        work = EmulatedWork(self.line, list(tensors), exchange.stalls)
        size_bytes = sum(tensor.nbytes for tensor in tensors)
        timed = exchange if size_bytes > UNTIMED_BYTES else INSTANT
        self.line.serve(work, timed, awaited=getattr(opts, "asyncOp", True) is False)
        return work


class HostLine:
    """A thread that serves all-reduces in order on the CPU: it sleeps until each is over."""

    def __init__(self) -> None:
        self.launched: queue.SimpleQueue = queue.SimpleQueue()
        threading.Thread(target=self._serve_all, daemon=True).start()

    def future(self) -> torch.futures.Future:
        return torch.futures.Future()

    def event(self) -> threading.Event:
        return threading.Event()

    def is_over(self, end: threading.Event) -> bool:
        return end.is_set()

    def wait_for(self, end: threading.Event) -> None:
        end.wait()

    def serve(self, work: EmulatedWork, exchange: Exchange, *, awaited: bool) -> None:
        """Puts an all-reduce behind those under way; one that takes no time is over at once."""
        if exchange is INSTANT:
            self._end(work, exchange)
        else:
            self.launched.put((work, exchange, time.monotonic()))

    def _serve_all(self) -> None:
        over_s = 0.0
        while True:
            work, exchange, launched_s = self.launched.get()
            # From the moment at which the one before should have ended: sleeping too long by a
            # little then adds up to nothing.
            size_bytes = sum(tensor.nbytes for tensor in work.tensors)
            over_s = max(over_s, launched_s) + exchange.time_s(size_bytes)
            time.sleep(max(0.0, over_s - time.monotonic()))
            self._end(work, exchange)

    def _end(self, work: EmulatedWork, exchange: Exchange) -> None:
        if exchange.factor != 1:
            for tensor in work.tensors:
                tensor.detach().mul_(exchange.factor)
        work.end.set()
        work.future.set_result(work.tensors)


class DeviceLine:
    """A stream of a GPU, in which a kernel takes the time of each all-reduce."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        # ProcessGroupNCCL takes a stream of normal priority by default, too.
        self.stream = torch.cuda.Stream(device)
        self.kernel = torch.cuda._compile_kernel(KERNEL, "exchange")
        self.kernel.set_shared_memory_config(SHARED_BYTES)

    def future(self) -> torch.futures.Future:
        return torch.futures.Future(devices=[self.device])

    def event(self) -> torch.cuda.Event:
        return torch.cuda.Event()

    def is_over(self, end: torch.cuda.Event) -> bool:
        return end.query()

    def wait_for(self, end: torch.cuda.Event) -> None:
        torch.cuda.current_stream(self.device).wait_event(end)

    def serve(self, work: EmulatedWork, exchange: Exchange, *, awaited: bool) -> None:
        """Launches the kernel behind what the current stream has launched so far.

        One whose caller waits for it runs in the current stream, as NCCL's do since torch 2.8.
        """
        current = torch.cuda.current_stream(self.device)
        stream = current if awaited else self.stream
        if stream is not current:
            stream.wait_stream(current)
        with torch.cuda.stream(stream):
            if exchange is not INSTANT:
                for tensor in work.tensors:
                    self._run(tensor, exchange, stream)
            work.end.record(stream)
            work.future.set_result(work.tensors)

    def _run(self, tensor: Tensor, exchange: Exchange, stream: torch.cuda.Stream) -> None:
        moved = exchange.blocks > 0
        self.kernel(
            grid=(max(1, exchange.blocks), 1, 1),
            block=(THREADS if moved else 1, 1, 1),
            args=[
                tensor,
                float(tensor.nbytes // 16),
                PASSES if moved else 0,
                exchange.time_s(tensor.nbytes) * 1e9,
                SLICES,
                float(exchange.factor),
            ],
            shared_mem=SHARED_BYTES if moved else 0,
            stream=stream,
        )


def register(device_type: str) -> None:
    """Makes ``EMULATED`` a backend of this process, for tensors on ``cpu`` or ``cuda``."""

    def create(store: dist.Store, rank: int, size: int, timeout: object) -> EmulatedGroup:
        index = torch.cuda.current_device() if device_type == "cuda" else None
        return EmulatedGroup(rank, size, torch.device(device_type, index))

    if EMULATED not in dist.Backend.backend_list:
        dist.Backend.register_backend(EMULATED, create, devices=[device_type])


def connect(exchange: Exchange) -> None:
    """Gives the default group an exchange, for all that is launched from now on."""
    dist.group.WORLD.exchange = exchange
