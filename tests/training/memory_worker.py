"""Runs of the trainer on two ranks whose third step's memory is looked at; see --help."""

import sys

from common.runtime.process_group import process_group
from common.training.config import DdpConfig, FsdpConfig
from common.training.trainer import train

COMMON = {
    **{"model": "gpt2-nano", "global_batch_size": 16, "seq_len": 64, "num_steps": 3},
    **{"device": "cpu", "profile": False, "measure_memory": True, "output_dir": sys.argv[1]},
}
CASES = (
    (DdpConfig, {"gradient_as_bucket_view": False}),
    (DdpConfig, {}),
    (FsdpConfig, {"strategy": "FULL_SHARD"}),
    (FsdpConfig, {"strategy": "SHARD_GRAD_OP"}),
)

with process_group("cpu"):
    for micro_batch_size in (8, 4):
        for kind, settings in CASES:
            train(kind(micro_batch_size=micro_batch_size, **settings, **COMMON))
