"""What a Llama under real DDP and ``fully_shard`` holds and gathers on two ranks: one JSON line a
case.

Arguments: strategy and casts of each case, such as ``FULL_SHARD:half``, and units that are gathered
ahead, if not as FSDP does by itself: ``FULL_SHARD:float32:2``.
"""

from __future__ import annotations

import itertools
import json
import sys
from contextlib import contextmanager

import torch
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.profiler import ProfilerActivity, profile
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import LlamaConfig, LlamaForCausalLM

from common.runtime import torch_internals
from common.runtime.group.process_group import process_group
from common.training.parallel import gather_ahead

SIZES = {
    "hidden_size": 256,
    "intermediate_size": 688,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "vocab_size": 500,
}
BATCH, LENGTH = 8, 64
PROFILED_STEPS = 2


class Gathers(TorchDispatchMode):
    """Notes the bytes of each all-gather."""

    def __init__(self) -> None:
        super().__init__()
        self.sizes: list[int] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func is torch.ops.c10d._allgather_base_.default:
            self.sizes.append(args[0].nbytes)
        return func(*args, **(kwargs or {}))


def local_bytes(tensors) -> int:
    """Counts the bytes of this rank's part of the tensors."""
    own = [t.to_local() if hasattr(t, "to_local") else t for t in tensors]
    return sum(tensor.nbytes for tensor in own)


def wrapped(strategy: str, casts: str, prefetch: int) -> nn.Module:
    """Returns a Llama in a unit per block and one for the rest; half casts every unit."""
    module = LlamaForCausalLM._from_config(LlamaConfig(**SIZES), attn_implementation="sdpa")
    if strategy == "DDP":
        return DistributedDataParallel(module)
    policy = MixedPrecisionPolicy()
    if casts == "half":
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for unit in (*module.model.layers, module):
        reshard = strategy == "FULL_SHARD" and unit is not module  # FSDP2's default for the root
        fully_shard(unit, reshard_after_forward=reshard, mp_policy=policy)
    if prefetch != 1:
        gather_ahead(module, list(module.model.layers), prefetch)
    return module


@contextmanager
def counted_in_blocks(module: nn.Module, gathers: Gathers):
    """Yields counts of the gathers so far, noted inside the passes of each block as they come."""
    counts: list[int] = []

    def note(*_: object) -> None:
        counts.append(len(gathers.sizes))

    inside = [block.mlp for block in getattr(module, "module", module).model.layers]
    hooks = [part.register_forward_pre_hook(note) for part in inside]
    hooks += [part.register_full_backward_pre_hook(note) for part in inside]
    yield counts
    for hook in hooks:
        hook.remove()


with process_group("cpu") as worker:
    tokens = torch.zeros(BATCH, LENGTH, dtype=torch.int64)
    labels = tokens.clone()
    for case in sys.argv[1:]:
        strategy, casts, *ahead = case.split(":")
        module = wrapped(strategy, casts, int(*ahead or (1,)))
        optimizer = torch.optim.AdamW(module.parameters(), fused=True)
        above, gathers = [], Gathers()
        with counted_in_blocks(module, gathers) as counts, gathers:
            module(input_ids=tokens, labels=labels, use_cache=False).loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        for _ in range(1 + PROFILED_STEPS):
            with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
                module(input_ids=tokens, labels=labels, use_cache=False).loss.backward()
            above.append(max(itertools.accumulate(torch_internals.memory_changes(profiler))))
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        states = [value for state in optimizer.state.values() for value in state.values()]
        parameters = local_bytes(module.parameters())
        # DDP's buckets are made with it; what gloo's threads free is not seen, so the least counts.
        held = local_bytes(states) + parameters * (2 if strategy == "DDP" else 1)
        peak = held + min(above[1:]) + tokens.nbytes + labels.nbytes
        if worker.is_main:
            print(
                json.dumps(
                    {"case": case, "peak": peak, "gathers": gathers.sizes, "in_blocks": counts}
                ),
                flush=True,
            )
        del module, optimizer
