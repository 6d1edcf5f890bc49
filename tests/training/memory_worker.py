"""Runs of the trainer on two ranks whose third step's memory is looked at.

``memory_worker.py FOLDER TOKENS CASE…``: the cases of that number, each in a folder of that name.
"""

import sys
from dataclasses import replace

from common.runtime.group.process_group import process_group
from common.training.config import DdpConfig, FsdpConfig
from common.training.trainer import train

COMMON = {
    **{"model": "gpt2-nano", "global_batch_size": 16, "seq_len": 64, "num_steps": 3},
    **{"device": "cpu", "profile": False, "measure_memory": True},
}
STRATEGIES = (
    (DdpConfig, {"gradient_as_bucket_view": False}),
    (DdpConfig, {}),
    (FsdpConfig, {"strategy": "FULL_SHARD"}),
    (FsdpConfig, {"strategy": "SHARD_GRAD_OP"}),
)
CASES = [
    kind(micro_batch_size=size, **settings, **COMMON)
    for size in (8, 4)
    for kind, settings in STRATEGIES
]

if __name__ == "__main__":
    folder, tokens, *numbers = sys.argv[1:]
    with process_group("cpu"):
        for number in numbers:
            train(replace(CASES[int(number)], data=tokens, output_dir=folder, run_id=number))
