"""What a Llama under real DDP and ``fully_shard`` holds on two ranks: one JSON line a case.

Arguments: strategy and casts of each case, such as ``FULL_SHARD:half``.
"""

from __future__ import annotations

import itertools
import json
import sys

import torch
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.profiler import ProfilerActivity, profile
from transformers import LlamaConfig, LlamaForCausalLM

from common.runtime import private
from common.runtime.group.process_group import process_group

SIZES = {
    "hidden_size": 256,
    "intermediate_size": 688,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "vocab_size": 500,
}
BATCH, LENGTH = 8, 128
PROFILED_STEPS = 3


def local_bytes(tensors) -> int:
    """Counts the bytes of this rank's part of the tensors."""
    own = [t.to_local() if hasattr(t, "to_local") else t for t in tensors]
    return sum(tensor.nbytes for tensor in own)


def wrapped(strategy: str, casts: str) -> nn.Module:
    """Returns a Llama in a unit per block and one for the rest; half casts every unit."""
    module = LlamaForCausalLM._from_config(LlamaConfig(**SIZES), attn_implementation="sdpa")
    if strategy == "DDP":
        return DistributedDataParallel(module)
    policy = MixedPrecisionPolicy()
    if casts == "half":
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for unit in (*module.model.layers, module):
        fully_shard(unit, reshard_after_forward=strategy == "FULL_SHARD", mp_policy=policy)
    return module


with process_group("cpu") as worker:
    tokens = torch.zeros(BATCH, LENGTH, dtype=torch.int64)
    labels = tokens.clone()
    for strategy, casts in (case.split(":") for case in sys.argv[1:]):
        module = wrapped(strategy, casts)
        optimizer = torch.optim.AdamW(module.parameters(), fused=True)
        above = []
        for _ in range(1 + PROFILED_STEPS):
            with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
                module(input_ids=tokens, labels=labels, use_cache=False).loss.backward()
            above.append(max(itertools.accumulate(private.memory_changes(profiler))))
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        states = [value for state in optimizer.state.values() for value in state.values()]
        parameters = local_bytes(module.parameters())
        # DDP's buckets are made with it; what gloo's threads free is not seen, so the least counts.
        held = local_bytes(states) + parameters * (2 if strategy == "DDP" else 1)
        peak = held + min(above[1:]) + tokens.nbytes + labels.nbytes
        if worker.is_main:
            print(json.dumps({"case": f"{strategy}:{casts}", "peak": peak}), flush=True)
        del module, optimizer
