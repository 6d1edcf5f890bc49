"""What real training steps of a small GPT-2 send on this rank: one JSON line a case.

Arguments: a folder for the profiler's traces, then cases such as ``DDP:1`` (strategy and
micro-batches a step). HYBRID_SHARD shares a copy between two ranks.
"""

from __future__ import annotations

import json
import sys
import time
from contextlib import nullcontext
from pathlib import Path

import torch
from torch.distributed import FileStore
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.profiler import ProfilerActivity, profile, schedule

from common.exercises.sharded_optimizer import ShardedOptimizer
from common.models.gpt2 import GPT2
from common.perfmodel.one_device.architecture import GPT2Config
from common.runtime.group.process_group import process_group
from common.runtime.group.socket_bytes import received_bytes, sent_bytes
from common.training.config import OWN_STRATEGIES, config_of
from common.training.parallel import gradient_sync, parallelise

# No size here is a multiple of 3, the vocabulary not of 2 either: padding shows.
CONFIG = GPT2Config.named(
    "gpt2-nano", n_layer=2, vocab_size=1001, n_embd=64, n_positions=32, n_head=4
)
BUCKET_CAP_MB = 0.2


def parallel(strategy: str, ranks: int) -> torch.nn.Module:
    """Wraps the model in a strategy, in one unit per block and one for the rest."""
    model = GPT2(CONFIG)
    if strategy in OWN_STRATEGIES:
        cap = {} if strategy in ("MY_DDP", "MY_FSDP") else {"bucket_cap_mb": BUCKET_CAP_MB}
        return parallelise(model, config_of(strategy, **cap), worker)
    if strategy == "DDP":
        return DistributedDataParallel(model, bucket_cap_mb=BUCKET_CAP_MB)
    reshard = strategy != "SHARD_GRAD_OP"
    mesh = None
    if strategy == "HYBRID_SHARD":
        mesh = init_device_mesh("cpu", (ranks // 2, 2), mesh_dim_names=("replicate", "shard"))
    for block in model.blocks:
        fully_shard(block, mesh=mesh, reshard_after_forward=reshard)
    return fully_shard(model, mesh=mesh, reshard_after_forward=False)


def train_step(model, strategy: str, accumulation: int, optimizer) -> None:
    """Trains one step that synchronises in its last micro-batch only."""
    tokens = torch.randint(CONFIG.vocab_size, (2, CONFIG.n_positions))
    for micro_batch in range(accumulation):
        last = micro_batch == accumulation - 1
        if strategy in OWN_STRATEGIES:
            with gradient_sync(model, strategy, last):
                model(tokens, tokens).backward()
            continue
        is_ddp = strategy == "DDP"
        if not is_ddp:  # what a backward pass needs stays gathered until the last one
            model.set_requires_gradient_sync(last)
            model.set_reshard_after_backward(last, recurse=strategy == "SHARD_GRAD_OP")
        with model.no_sync() if is_ddp and not last else nullcontext():
            model(tokens, tokens).backward()
    optimizer.step()
    optimizer.zero_grad()


def wait_for_all(store: FileStore, name: str, ranks: int) -> None:
    """Waits until every rank is here, without a byte over a socket."""
    store.add(name, 1)
    while store.add(name, 0) < ranks:
        time.sleep(0.001)


folder = Path(sys.argv[1])
with process_group("cpu") as worker:
    ranks = worker.world_size
    store = FileStore(str(folder / "all-here"), ranks)
    for case in sys.argv[2:]:
        strategy, accumulation = case.split(":")
        model = parallel(strategy, ranks)
        optimizer = torch.optim.AdamW(model.parameters())
        if strategy == "MY_ZERO1":
            optimizer = ShardedOptimizer(model.parameters(), torch.optim.AdamW)
        arguments = (model, strategy, int(accumulation), optimizer)
        for _ in range(2):  # DDP has its final buckets from the second step on
            train_step(*arguments)
        wait_for_all(store, f"{case} begins", ranks)
        before = sent_bytes(), received_bytes()
        wait_for_all(store, f"{case} has looked", ranks)  # no rank sends before all have looked
        train_step(*arguments)
        wait_for_all(store, f"{case} ends", ranks)
        after = sent_bytes(), received_bytes()
        wait_for_all(store, f"{case} has looked again", ranks)
        # Only with a schedule does the profiler mark steps.
        steps = schedule(wait=0, warmup=1, active=2, repeat=1)
        cpu = [ProfilerActivity.CPU]
        with profile(activities=cpu, schedule=steps, record_shapes=True) as profiler:
            for _ in range(3):
                train_step(*arguments)
                profiler.step()
        trace = folder / f"{strategy}_{accumulation}_{worker.rank}.json"
        profiler.export_chrome_trace(str(trace))
        found = {"case": case, "sent_bytes": after[0] - before[0], "trace": str(trace)}
        found["received_bytes"] = after[1] - before[1]
        print(json.dumps(found), flush=True)
        del model, optimizer, arguments
