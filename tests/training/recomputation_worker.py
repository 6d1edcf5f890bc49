"""One of two ranks that counts what MY_FSDP sends in a pass: ``recomputation_worker.py``.

Prints the bytes of a pass that keeps activations, and of one that computes them again, as JSON.
"""

import json

import torch

from common.exercises.fsdp import FSDP
from common.models.gpt2 import GPT2, GPT2Config
from common.runtime.group.process_group import Worker, process_group
from common.runtime.group.socket_bytes import sent_bytes

CONFIG = GPT2Config(256, 8, n_layer=6, n_head=2, n_embd=64)


def bytes_of_a_pass(worker: Worker, recomputed: bool) -> int | None:
    """Returns the bytes that this rank sends in a forward and backward pass, if it can be told."""
    model = FSDP(GPT2(CONFIG, activation_checkpointing=recomputed))
    tokens = torch.randint(CONFIG.vocab_size, (1, 8))
    worker.barrier()
    before = sent_bytes()
    model(tokens, tokens).backward()
    model.finish_gradient_synchronization()
    after = sent_bytes()
    worker.barrier()
    return None if before is None else after - before


with process_group("cpu") as worker:
    bytes_of_a_pass(worker, recomputed=False)  # connections are there from now on
    counts = {str(recomputed): bytes_of_a_pass(worker, recomputed) for recomputed in (False, True)}
print(json.dumps(counts))
