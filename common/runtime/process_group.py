"""The process group as a context: joined on entry, left on exit, whatever happens in between."""

from __future__ import annotations

import datetime
import gc
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
import torch.distributed as dist

from common.errors import RunFailed, UserError
from common.runtime.orphans import die_with_parent
from common.runtime.ranks import Ranks, current_ranks, node_address, rendezvous_environment
from common.runtime.rendezvous import agree_on_attempt

BACKENDS = ("nccl", "gloo")


@dataclass(frozen=True)
class Worker:
    """One rank of a running job: its place, its device and the backend that connects it."""

    ranks: Ranks
    device: torch.device
    backend: str

    @property
    def rank(self) -> int:
        return self.ranks.rank

    @property
    def world_size(self) -> int:
        return self.ranks.world_size

    @property
    def is_main(self) -> bool:
        return self.ranks.is_main

    def gather(self, item: object) -> list:
        """The item of every rank, in rank order, on every rank. Not for timed regions."""
        items: list = [None] * self.world_size
        dist.all_gather_object(items, item)
        return items

    def broadcast(self, item: object) -> object:
        """Rank 0's item, on every rank. Not for timed regions."""
        items = [item]
        dist.broadcast_object_list(items, src=0)
        return items[0]

    def barrier(self, group: dist.ProcessGroup | None = None) -> None:
        """Wait for all ranks, or for those of a group that this one is in."""
        if self.device.type == "cuda":
            dist.barrier(group, device_ids=[self.device.index])
        else:
            dist.barrier(group)


@contextmanager
def process_group(
    device: str | None = None, backend: str | None = None, timeout_s: float = 600
) -> Iterator[Worker]:
    """Join the job's process group and leave it at the end.

    Inside such a block the group that is there is used again, and stays.

    Args:
        device: ``cpu`` or ``cuda``; by default CUDA where it is, else the CPU.
        backend: ``nccl`` or ``gloo``; by default NCCL on CUDA and gloo on the CPU.
        timeout_s: how long a collective may wait for a rank, in seconds.

    Raises:
        UserError: unknown device or backend, a rank without a GPU, two ranks on one GPU.
    """
    ranks = current_ranks()
    if ranks.launcher == "torchrun":
        die_with_parent()
    device_type = device or ("cuda" if torch.cuda.is_available() else "cpu")
    if device_type not in ("cpu", "cuda"):
        raise UserError(f"device {device_type!r}: legal are cpu and cuda")
    if device_type == "cuda" and not torch.cuda.is_available():
        raise UserError("device cuda: this process sees no GPU; use --device cpu")
    backend = backend or ("nccl" if device_type == "cuda" else "gloo")
    if backend not in BACKENDS:
        raise UserError(f"backend {backend!r}: legal are {' and '.join(BACKENDS)}")
    if backend == "nccl" and device_type == "cpu":
        raise UserError("backend nccl needs GPUs; on the CPU use --backend gloo")

    if dist.is_initialized():
        yield Worker(ranks, _choose_device(ranks, device_type), backend)
        return
    store = _rendezvous(ranks)
    chosen = _choose_device(ranks, device_type)
    if device_type == "cuda":
        _refuse_shared_gpus(ranks, chosen, store)
        torch.cuda.set_device(chosen)
    dist.init_process_group(
        backend,
        store=store,
        rank=ranks.rank,
        world_size=ranks.world_size,
        timeout=datetime.timedelta(seconds=timeout_s),
        device_id=chosen if backend == "nccl" else None,
    )
    # What is imported by now stays: half a million objects that no collection need look at again.
    # Benchmarks collect after every DDP instance, 0.4 s each with them and 0.01 s without.
    gc.freeze()
    try:
        yield Worker(ranks, chosen, backend)
    except RuntimeError as error:
        if _is_lost_peer(error):
            first_line = str(error).splitlines()[0]
            raise RunFailed(f"rank {ranks.rank} lost another rank: {first_line}") from None
        raise
    finally:
        gc.unfreeze()
        dist.destroy_process_group()


def _is_lost_peer(error: RuntimeError) -> bool:
    """Whether a collective failed because another rank is gone."""
    lost = ("Connection closed by peer", "Connection reset by peer", "Broken pipe", "timed out")
    return isinstance(error, dist.DistError) or any(words in str(error) for words in lost)


def _rendezvous(ranks: Ranks, rendezvous_s: float = 300) -> dist.Store:
    if ranks.world_size == 1 and ranks.launcher == "single":
        return dist.HashStore()
    if ranks.launcher == "torchrun":
        # torchrun serves the store, or its rank 0 does. A rank whose torchrun was killed before it
        # could ask to end with it would otherwise try for half an hour.
        limit = datetime.timedelta(seconds=rendezvous_s)
        try:
            store, _, _ = next(iter(dist.rendezvous("env://", timeout=limit)))
        except dist.DistError as error:
            first_line = str(error).splitlines()[0]
            raise RunFailed(f"rank {ranks.rank} found no rendezvous: {first_line}") from None
        store = dist.PrefixStore("ddplab", store)
        attempt = agree_on_attempt(store, ranks.rank, ranks.world_size, rendezvous_s)
        return dist.PrefixStore(attempt, store)
    meet = rendezvous_environment()
    host, port = node_address(meet["MASTER_ADDR"]), int(meet["MASTER_PORT"])
    return dist.TCPStore(host, port, ranks.world_size, is_master=ranks.is_main)


def _choose_device(ranks: Ranks, device_type: str) -> torch.device:
    if device_type == "cpu":
        return torch.device("cpu")
    visible = torch.cuda.device_count()
    if visible == 1:  # Slurm's --gpus-per-task shows each rank its own GPU as number 0
        return torch.device("cuda", 0)
    if ranks.local_rank >= visible:
        raise UserError(
            f"rank {ranks.rank} on {socket.gethostname()}: local rank {ranks.local_rank}, but "
            f"{visible} GPUs are visible (CUDA_VISIBLE_DEVICES="
            f"{os.environ.get('CUDA_VISIBLE_DEVICES', 'unset')}); start one rank per GPU",
            this_rank_only=True,
        )
    return torch.device("cuda", ranks.local_rank)


def visible_gpus() -> list[str]:
    """The UUIDs of the GPUs that CUDA shows this process, in its order."""
    count = torch.cuda.device_count()
    return [str(torch.cuda.get_device_properties(index).uuid) for index in range(count)]


def find_shared_device(devices: list[str]) -> tuple[int, int] | None:
    """The first two ranks with the same device name, or None. ``devices`` is in rank order."""
    first: dict[str, int] = {}
    for rank, device in enumerate(devices):
        if device in first:
            return first[device], rank
        first[device] = rank
    return None


def _refuse_shared_gpus(ranks: Ranks, device: torch.device, store: dist.Store) -> None:
    uuid = torch.cuda.get_device_properties(device).uuid
    store.set(f"gpu/{ranks.rank}", f"{socket.gethostname()} GPU {uuid}")
    names = [store.get(f"gpu/{rank}").decode() for rank in range(ranks.world_size)]
    shared = find_shared_device(names)
    if shared:
        raise UserError(
            f"ranks {shared[0]} and {shared[1]} share one GPU ({names[shared[0]]}); start as many "
            "ranks as there are GPUs, or use --device cpu"
        )
