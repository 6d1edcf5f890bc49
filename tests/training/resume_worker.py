"""Runs on two ranks in one process group, and their continuations: arguments are a folder for all
of them and the token shards. A run is cut off by leaving only its earlier checkpoints."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

from common.runtime.process_group import process_group
from common.training.config import DdpConfig, FsdpConfig
from common.training.trainer import train

folder, data = map(Path, sys.argv[1:])
COMMON = {
    **{"data": str(data), "model": "gpt2-pico", "seq_len": 16, "num_steps": 6, "save_every": 2},
    **{"global_batch_size": 8, "micro_batch_size": 2, "lr": 0.003, "profile": False},
    **{"device": "cpu", "output_dir": str(folder / "runs"), "keep_checkpoints": 9},
}


def run(kind: type, name: str, **settings: object) -> None:
    """A run called ``name``, with checkpoints in a folder of its name unless told otherwise."""
    where = {"run_id": name, "checkpoint_dir": str(folder / "checkpoints" / name)}
    train(kind(**COMMON | where | settings))


with process_group("cpu") as worker:

    def cut(name: str, copy: str, *steps: int) -> None:
        """Take the checkpoints of these steps over into the folder of another run."""
        if worker.is_main:
            for step in steps:
                path = Path("checkpoints") / "NAME" / f"step-{step:08d}"
                shutil.copytree(*(folder / str(path).replace("NAME", one) for one in (name, copy)))
        worker.barrier()

    for kind in (DdpConfig, FsdpConfig):
        name = kind(**COMMON).strategy
        run(kind, name)
        cut(name, f"{name}-resumed", 2)
        run(kind, f"{name}-resumed")
        run(kind, f"{name}-asynchronous", async_checkpoints="on", keep_checkpoints=2)
    # From DDP to FULL_SHARD; the test takes the rest over on one device.
    exact = {"precision": "float64"}
    run(DdpConfig, "exact", **exact)
    cut("exact", "moved", 2)
    run(FsdpConfig, "moved", **exact)
    # And from one device, where the test leaves a checkpoint, to DDP.
    run(DdpConfig, "from-one-device", **exact)
