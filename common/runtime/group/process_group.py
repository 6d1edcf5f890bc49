"""The process group as a context manager: joined on entry, left on exit, also after an error."""

from __future__ import annotations

import dataclasses
import datetime
import gc
import json
import os
import socket
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass

import torch
import torch.distributed as dist

from common.errors import Preempted, RunFailed, UserError
from common.runtime import torch_internals
from common.runtime.group import nccl
from common.runtime.group.network import give_gloo_the_interface_of_nccl, require_interfaces
from common.runtime.group.rendezvous import agree_on_attempt
from common.runtime.machine.device import choose_device
from common.runtime.processes.orphans import die_with_parent
from common.runtime.processes.ranks import (
    Ranks,
    current_ranks,
    meeting_port,
    node_address,
    rendezvous_environment,
)

BACKENDS = ("nccl", "gloo")
TORCH_BACKENDS = tuple(dist.Backend.backend_list)
OBJECTS_TIMEOUT_S = 1800
"""Time limit for another rank's object: a host may import or compile meanwhile."""
LOST_PEER = (
    # gloo's messages
    "Connection closed by peer",
    "Connection reset by peer",
    "Broken pipe",
    "timed out",
    # NCCL's results, and what ProcessGroupNCCL says of them
    "ncclRemoteError",
    "ncclSystemError",
    "remote process exited",
    "unhandled system error",
    "communicator was aborted",
    "NCCL watchdog",
    # ProcessGroupNCCL2's; its others have the words above
    "NCCL operation failed",
)

# State of the process, as torch's default group is: what a block must know of the one around it.
_joined: ContextVar[Worker | None] = ContextVar("worker of the block around this", default=None)
_left_behind: ContextVar[dist.ProcessGroup | None] = ContextVar("group nobody left", default=None)


@dataclass(frozen=True)
class Worker:
    """One rank of a running job: its place, its device and the backend that connects it.

    Attributes:
        ranks_per_gpu: the largest number of ranks that share a GPU; 1 on CPUs.
        objects: a gloo group of all ranks for what is no tensor, or None for the default group.
    """

    ranks: Ranks
    device: torch.device
    backend: str
    ranks_per_gpu: int = 1
    objects: dist.ProcessGroup | None = dataclasses.field(default=None, repr=False, compare=False)

    @property
    def rank(self) -> int:
        return self.ranks.rank

    @property
    def world_size(self) -> int:
        return self.ranks.world_size

    @property
    def is_main(self) -> bool:
        return self.ranks.is_main

    @property
    def group_class(self) -> str:
        """Returns the class of torch's process group; over NCCL there are several."""
        return nccl.group_class(self.device)

    def gather(self, item: object) -> list:
        """Returns the item of every rank, in rank order, on every rank. Not for timed regions."""
        items: list = [None] * self.world_size
        dist.all_gather_object(items, item, group=self.objects)
        return items

    def broadcast(self, item: object) -> object:
        """Returns rank 0's item, on every rank. Not for timed regions."""
        items = [item]
        dist.broadcast_object_list(items, src=0, group=self.objects)
        return items[0]

    @contextmanager
    def mistakes_shared(self) -> Iterator[None]:
        """Makes a UserError of one rank in the block one of all ranks, which all enter it.

        What only a later host can see, such as a folder that is missing there, its ranks would say
        to nobody: rank 0 prints a mistake.
        """
        problem = None
        try:
            yield
        except UserError as error:
            problem = str(error)
        problems = [message for message in self.gather(problem) if message]
        if problems:
            raise UserError(problems[0])

    def barrier(self, group: dist.ProcessGroup | None = None) -> None:
        """Waits for all ranks, or for those of a group that this one is in, and for their GPUs."""
        if self.backend == "nccl":
            dist.barrier(group, device_ids=[self.device.index])
            return
        if self.device.type == "cuda":  # gloo's barrier is one of hosts: kernels may still run
            torch.cuda.synchronize(self.device)
        dist.barrier(group)


@contextmanager
def process_group(
    device: str | None = None,
    backend: str | None = None,
    timeout_s: float = 600,
    *,
    claim_gpu: bool = True,
) -> Iterator[Worker]:
    """Joins the job's process group and leaves it at the end of the block.

    A block inside such a block uses the group that is there, and does not leave it. Over NCCL
    leaving is collective: a rank that fails does not leave, so that its error is reported at once.
    Its process should then end, as ``script.exit_status`` makes it; a group joined later aborts
    the one left behind.

    Args:
        device: ``cpu`` or ``cuda``; by default as ``choose_device`` finds.
        backend: ``nccl`` or ``gloo``; by default NCCL on CUDA and gloo on the CPU. Over gloo ranks
            may share a GPU, over NCCL where it is told so (``nccl.shares_gpus``).
        timeout_s: time limit, in seconds, for a collective that waits for a rank; collectives of
            objects have a longer one.
        claim_gpu: make the GPU this process's current device, which creates a context on it. In
            exclusive compute mode a process with a context keeps all others out, even its children.

    Raises:
        UserError: unknown device or backend, a device that cannot be used, a rank without a GPU,
            two ranks on one GPU over an NCCL that does not allow it.
    """
    ranks, around = current_ranks(), _joined.get()
    if ranks.launcher == "torchrun":
        die_with_parent()
    device_type = around.device.type if device is None and around else choose_device(device)
    if backend is None and around and around.device.type == device_type:
        backend = around.backend
    backend = backend or ("nccl" if device_type == "cuda" else "gloo")
    if backend not in BACKENDS and backend not in registered_backends():
        raise UserError(f"backend {backend!r}: legal are {' and '.join(BACKENDS)}")
    if backend == "nccl" and device_type == "cpu":
        raise UserError("backend nccl needs GPUs; on the CPU use --backend gloo")

    if dist.is_initialized() and dist.group.WORLD is _left_behind.get():
        torch_internals.abort_default_group()
    if dist.is_initialized():
        worker = around or Worker(ranks, torch.device("cpu"), backend)
        chosen = _choose_device(ranks, device_type, backend)
        yield dataclasses.replace(worker, device=chosen, backend=backend)
        return
    store = _rendezvous(ranks)
    chosen, ranks_per_gpu = torch.device("cpu"), 1
    if device_type == "cuda":
        chosen, ranks_per_gpu = _agree_on_gpus(ranks, backend, store)
        if claim_gpu:
            torch.cuda.set_device(chosen)
    if backend == "nccl":
        nccl.choose_group()
        give_gloo_the_interface_of_nccl()
    require_interfaces()
    dist.init_process_group(
        backend,
        store=store,
        rank=ranks.rank,
        world_size=ranks.world_size,
        timeout=datetime.timedelta(seconds=timeout_s),
        device_id=chosen if backend == "nccl" else None,
    )
    worker = Worker(ranks, chosen, backend, ranks_per_gpu, _object_group(ranks, timeout_s))
    if backend == "nccl" and worker.is_main:
        nccl.warn_of_group(worker.group_class)
    # The half million objects of imported modules stay, so garbage collection can skip them.
    # Benchmarks collect after every DDP instance: 0.4 s each with them, 0.01 s without.
    gc.freeze()
    _joined.set(worker)
    try:
        yield worker
    except Preempted:  # raised by all ranks together, so all can leave
        dist.destroy_process_group()
        raise
    except BaseException as error:
        if backend == "nccl" and ranks.world_size > 1:
            _left_behind.set(dist.group.WORLD)
        else:
            dist.destroy_process_group()
        if is_lost_peer(error):
            first_line = str(error).splitlines()[0]
            raise RunFailed(f"rank {ranks.rank} lost another rank: {first_line}") from None
        raise
    else:
        dist.destroy_process_group()
    finally:
        _joined.set(None)
        gc.unfreeze()


def registered_backends() -> list[str]:
    """Returns the backends that this process has added to torch's own."""
    return [name for name in dist.Backend.backend_list if name not in TORCH_BACKENDS]


def is_lost_peer(error: BaseException) -> bool:
    """Returns True if a collective failed because another rank is gone, or does not answer.

    Over NCCL that is seen only where Python waits: by default (TORCH_NCCL_ASYNC_ERROR_HANDLING=3)
    the watchdog ends the process, which is right, as all later results of the GPU are wrong.
    """
    if not isinstance(error, RuntimeError):
        return False
    if any(words in str(error) for words in LOST_PEER):
        return True
    # NCCL's other errors, such as an invalid usage, tell nothing about other ranks.
    return isinstance(error, dist.DistError) and "NCCL" not in str(error)


def _object_group(ranks: Ranks, timeout_s: float) -> dist.ProcessGroup | None:
    """Makes a gloo group for objects; None if this rank is alone.

    Its time limit is long: a host that imports or compiles is no reason to end the job.
    """
    if ranks.world_size == 1:
        return None
    limit = datetime.timedelta(seconds=max(timeout_s, OBJECTS_TIMEOUT_S))
    return dist.new_group(backend="gloo", timeout=limit)


def _rendezvous(ranks: Ranks, rendezvous_s: float = 300) -> dist.Store:
    if ranks.world_size == 1 and ranks.launcher != "torchrun":
        return dist.HashStore()
    if ranks.launcher == "torchrun":
        # torchrun serves the store, or its rank 0 does. Without a limit, a rank whose torchrun was
        # killed before the rank called ``die_with_parent`` would try for half an hour.
        limit = datetime.timedelta(seconds=rendezvous_s)
        try:
            store, _, _ = next(iter(dist.rendezvous("env://", timeout=limit)))
        except dist.DistError as error:
            raise _no_rendezvous(ranks, error) from None
        store = dist.PrefixStore("ddplab", store)
        attempt = agree_on_attempt(store, ranks.rank, ranks.world_size, rendezvous_s)
        return dist.PrefixStore(attempt, store)
    meet = rendezvous_environment()
    host, port = node_address(meet["MASTER_ADDR"]), meeting_port(meet)
    try:
        return dist.TCPStore(host, port, ranks.world_size, is_master=ranks.is_main)
    except dist.DistError as error:
        raise _no_rendezvous(ranks, error) from None


def _no_rendezvous(ranks: Ranks, error: dist.DistError) -> RunFailed:
    first_line = str(error).splitlines()[0]
    return RunFailed(f"rank {ranks.rank} found no rendezvous: {first_line}")


def _choose_device(ranks: Ranks, device_type: str, backend: str) -> torch.device:
    if device_type == "cpu":
        return torch.device("cpu")
    visible = torch.cuda.device_count()
    if visible == 1:  # Slurm's --gpus-per-task shows each rank its own GPU as number 0
        return torch.device("cuda", 0)
    if ranks.local_rank >= visible and backend == "nccl" and not nccl.shares_gpus():
        raise UserError(
            f"rank {ranks.rank} on {socket.gethostname()}: local rank {ranks.local_rank}, but "
            f"{visible} GPUs are visible (CUDA_VISIBLE_DEVICES="
            f"{os.environ.get('CUDA_VISIBLE_DEVICES', 'unset')}); start one rank per GPU, use "
            f"--backend gloo, over which ranks can share one, or {nccl.sharing_advice()}",
            this_rank_only=True,
        )
    return torch.device("cuda", ranks.local_rank % visible)


def visible_gpus() -> list[str]:
    """Returns the UUIDs of the GPUs that CUDA shows this process, in CUDA's order."""
    count = torch.cuda.device_count()
    return [str(torch.cuda.get_device_properties(index).uuid) for index in range(count)]


def find_shared_device(devices: list[str]) -> tuple[int, int] | None:
    """Returns the first two ranks with the same device name, or None."""
    first: dict[str, int] = {}
    for rank, device in enumerate(devices):
        if device in first:
            return first[device], rank
        first[device] = rank
    return None


def _agree_on_gpus(ranks: Ranks, backend: str, store: dist.Store) -> tuple[torch.device, int]:
    """Returns this rank's GPU, and the largest number of ranks on one GPU.

    Ranks tell each other what they found, so that none waits for one that has no GPU.

    Raises:
        UserError: the same on all ranks; one has no GPU, or two share a GPU over NCCL, which must
            allow it on all.
    """
    try:
        device = _choose_device(ranks, "cuda", backend)
        uuid = torch.cuda.get_device_properties(device).uuid
        may_share = backend != "nccl" or nccl.shares_gpus()
        where = f"{socket.gethostname()} GPU {uuid}"
        # Two containers may have one GPU; some GPUs have no number of their own, or all the same.
        gpu = str(uuid) if set(str(uuid)) - set("0-") else where
        answer = {"gpu": gpu, "where": where, "may_share": may_share}
    except UserError as refused:
        answer = {"problem": str(refused)}
    store.set(f"gpu/{ranks.rank}", json.dumps(answer))
    answers = [json.loads(store.get(f"gpu/{rank}")) for rank in range(ranks.world_size)]
    problem = next((answer["problem"] for answer in answers if "problem" in answer), None)
    if problem is None:
        names = [answer["gpu"] for answer in answers]
        shared = find_shared_device(names)
        if not shared or all(answer["may_share"] for answer in answers):
            return device, max(Counter(names).values())
        problem = (
            f"ranks {shared[0]} and {shared[1]} share one GPU ({answers[shared[0]]['where']}), "
            "which NCCL does not allow by default; start as many ranks as there are GPUs, use "
            f"--backend gloo, or {nccl.sharing_advice()} on every rank"
        )
    store.set(f"gpu/{ranks.rank}/known", "yes")
    if ranks.is_main:  # may serve the store, which the others still read
        store.wait([f"gpu/{rank}/known" for rank in range(ranks.world_size)])
    raise UserError(problem)
