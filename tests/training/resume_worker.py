"""Runs on two ranks in one process group, and their continuations.

``resume_worker.py FOLDER TOKENS STRATEGY…``: runs of these strategies, each of which goes on from
its own checkpoints, and of others. A run is cut off by leaving only its earlier checkpoints.
"""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

from common.runtime.group.process_group import Worker, process_group
from common.training.config import config_of
from common.training.trainer import train

COMMON = {
    **{"model": "gpt2-pico", "seq_len": 16, "num_steps": 6, "save_every": 2, "lr": 0.003},
    **{"global_batch_size": 8, "profile": False, "device": "cpu", "keep_checkpoints": 9},
}

HALF = {"precision": "float16", "seq_len": 1, "global_batch_size": 2, "micro_batch_size": 1}
"""In float16 the first steps lower the loss scale, as gradients overflow."""


def main(folder: Path, data: Path, strategies: list[str], worker: Worker) -> None:
    """Trains all runs."""

    def run(strategy: str, name: str, **settings: object) -> None:
        """Trains run ``name``, with checkpoints in a folder of its name."""
        where = {"run_id": name, "checkpoint_dir": str(folder / "checkpoints" / name)}
        own = {"data": str(data), "output_dir": str(folder / "runs"), "micro_batch_size": 2}
        train(config_of(strategy, **(COMMON | own | where | settings)))

    def cut(name: str, copy: str, step: int) -> None:
        """Takes the checkpoint of this step over into the folder of another run."""
        if worker.is_main:
            checkpoints = folder / "checkpoints"
            shutil.copytree(*(checkpoints / run / f"step-{step:08d}" for run in (name, copy)))
        worker.barrier()

    for name in strategies:
        run(name, name)
        cut(name, f"{name}-resumed", 2)
        run(name, f"{name}-resumed")
        run(name, f"{name}-asynchronous", async_checkpoints="on", keep_checkpoints=2)
    run("DDP", "float16", **HALF)
    cut("float16", "float16-resumed", 2)
    run("DDP", "float16-resumed", **HALF)
    # From DDP to FULL_SHARD; the test takes the rest over on one device.
    exact = {"precision": "float64"}
    run("DDP", "exact", **exact)
    cut("exact", "moved", 2)
    run("FULL_SHARD", "moved", **exact)
    by_sgd = exact | {"optimizer": "sgd", "lr": 0.1}
    run("DDP", "sgd", **by_sgd)
    cut("sgd", "sgd-sharded", 2)
    run("FULL_SHARD", "sgd-sharded", **by_sgd)
    # And from one device, where the test leaves a checkpoint, to DDP.
    run("DDP", "from-one-device", **exact)
    # Through all of the exercises, a step each, at a learning rate that does not change.
    chain = ("DDP", "MY_FSDP", "MY_ZERO1", "MY_BUCKETS", "FULL_SHARD")
    exact |= {"min_lr": COMMON["lr"], "save_every": 1}
    run("DDP", "unchanged", **exact, num_steps=len(chain))
    for done, strategy in enumerate(chain):
        run(strategy, "chain", **exact, num_steps=done + 1)


if __name__ == "__main__":
    with process_group("cpu") as worker:
        main(Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3:], worker)
