"""A rank for test_text_scaling.py: ``text_scaling_worker.py FOLDER``, alone or one of two.

FOLDER/texts has the files of AG News.

Trains on the same texts as one process and as two ranks, with every option at once, and with a
sampler that gives each rank everything; then tries what must be refused, and prints a JSON line for
each refusal.
"""

from __future__ import annotations

import json
import sys

import torch.utils.data.distributed

from common.errors import RunFailed, UserError
from common.runtime.group.process_group import process_group
from common.training.texts.config import TextScalingConfig
from common.training.texts.text_trainer import train_text

MODEL = {"d_model": 16, "n_head": 2, "n_layer": 1, "d_ff": 32, "vocab_size": 500, "max_length": 24}
TRAINING = {
    **{"max_train_samples": 35, "eval_samples": 21, "epochs": 2, "warmup_steps": 3, "seed": 7},
    **{"dropout": 0.0, "workers": 0, "probe_repeats": 0, "discard_steps": 1, "device": "cpu"},
}
EVERYTHING = {
    **{"dropout": 0.1, "precision": "bf16", "compression": "bf16", "static_graph": True},
    **{"gradient_as_bucket_view": False, "bucket_cap_mb": 0.01, "accumulation": 2, "workers": 1},
    **{"persistent_workers": True, "pad": "max_length", "probe_repeats": 1},
}
REFUSED = {
    "fewer texts than a step": {"batch_size": 18},
    "another total": {"batch_size": 4, "total_batch_size": 32},
    "no such folder": {"dataset": "imdb", "dataset_dir": "nowhere"},
    "no number": {"batch_size": 4, "lr": 1e30, "warmup_steps": 0},
}


class EverythingForEveryone(torch.utils.data.distributed.DistributedSampler):
    """What a training without a distributed sampler does: each rank goes through all texts."""

    def __init__(self, *args: object, **settings: object) -> None:
        super().__init__(*args, **settings | {"num_replicas": 1, "rank": 0})


def settings(folder: str, name: str, **more: object) -> TextScalingConfig:
    """Makes the settings of a run of that name."""
    texts = {"dataset": "ag_news", "dataset_dir": f"{folder}/texts"}
    return TextScalingConfig(**texts | MODEL | TRAINING | more, output_dir=folder, run_id=name)


def main(folder: str) -> None:
    """Runs all of this number of ranks."""
    with process_group("cpu") as worker:
        if worker.world_size == 1:
            train_text(settings(folder, "one-rank", batch_size=8))
            train_text(settings(folder, "one-rank-fp64", batch_size=8, precision="fp64"))
            return
        train_text(settings(folder, "two-ranks", batch_size=4, total_batch_size=8))
        train_text(settings(folder, "two-ranks-fp64", batch_size=4, precision="fp64"))
        train_text(settings(folder, "accumulated", batch_size=2, accumulation=2))
        train_text(settings(folder, "everything", **EVERYTHING, batch_size=4))
        sampler = torch.utils.data.distributed.DistributedSampler
        torch.utils.data.distributed.DistributedSampler = EverythingForEveryone
        train_text(settings(folder, "no-sampler", batch_size=4))
        torch.utils.data.distributed.DistributedSampler = sampler
        for name, wrong in REFUSED.items():
            try:
                train_text(settings(folder, f"refused {name}", **wrong))
            except (UserError, RunFailed) as error:
                print(json.dumps({"refused": name, "error": str(error)}), flush=True)


if __name__ == "__main__":
    main(sys.argv[1])
