"""One rank whose all-reduce takes a while in a thread; its get_future() blocks, or does not."""

import json
import threading
import time

import torch
import torch.distributed as dist

from common.runtime.group.nccl import group_class
from common.runtime.group.overlap_probe import get_future_waits

EXCHANGE_S = 0.1


class Work(dist._Work):
    """An all-reduce that ends EXCHANGE_S after it began."""

    def __init__(self, tensors: list[torch.Tensor], blocks: bool) -> None:
        super().__init__()
        self.tensors, self.blocks = tensors, blocks
        self.end, self.future = threading.Event(), torch.futures.Future()
        threading.Thread(target=self.exchange).start()

    def exchange(self) -> None:
        time.sleep(EXCHANGE_S)
        self.end.set()
        self.future.set_result(self.tensors)

    def is_completed(self) -> bool:
        return self.end.is_set()

    def wait(self, timeout: object = None) -> bool:
        return self.end.wait()

    def get_future(self) -> torch.futures.Future:
        if self.blocks:
            self.end.wait()
        return self.future


class SlowGroup(dist.ProcessGroup):
    """A group of one rank."""

    blocks = False

    def getBackendName(self) -> str:
        return "slow"

    def allreduce(self, tensors: list[torch.Tensor], options: object = None) -> Work:
        return Work(tensors, self.blocks)


dist.Backend.register_backend(
    "slow", lambda _, rank, size, __: SlowGroup(rank, size), devices="cpu"
)
cpu, found = torch.device("cpu"), {}
for blocks in (False, True):
    SlowGroup.blocks = blocks
    dist.init_process_group("slow", store=dist.HashStore(), rank=0, world_size=1)
    found |= {"group": group_class(cpu), str(blocks): get_future_waits(cpu)}
    dist.destroy_process_group()
print(json.dumps(found))
