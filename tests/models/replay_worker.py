"""One of two ranks that train a replay under real DDP; prints what DDP did for each arm."""

from __future__ import annotations

import json

import numpy as np
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from common.models.replay import ReplayModel
from common.perfmodel.ddp.profile import BackwardProfile

ITERATIONS = 4
CAPS_MIB = (0.001, 0.004, 0.01, None)
ARMS = {
    **{f"cap {cap}": {"bucket_cap_mb": cap} for cap in CAPS_MIB},
    "views": {"bucket_cap_mb": 0.01, "gradient_as_bucket_view": True},
    "static": {"bucket_cap_mb": 0.01, "static_graph": True},
    "unused": {"bucket_cap_mb": 0.01, "find_unused_parameters": True},
}

# In the order of readiness; a module's parameters are registered next to each other.
NAMES = (
    *("top.weight", "top.bias", "blocks.1.up.bias", "blocks.1.up.weight", "blocks.0.up.weight"),
    *("blocks.0.norm.bias", "blocks.0.norm.weight", "blocks.0.up.bias", "embedding.weight"),
)
ELEMENTS = (11, 300, 7, 5000, 1300, 4, 900, 1, 30_000)
REGISTRATION = (7, 8, 6, 5, 1, 4, 3, 2, 0)
PROFILE = BackwardProfile(
    names=NAMES,
    sizes_bytes=np.array(ELEMENTS) * 4,
    ready_s=np.array([1, 1, 2, 3, 5, 5, 5, 6, 7]) * 1e-3,
    backward_s=8e-3,
    kinds=("float32",) * len(NAMES),
    registration=REGISTRATION,
)


def observe(arguments: dict) -> dict:
    """Runs a few steps.

    Returns:
        the parameters in the order they became ready in each step, the smallest and the largest
        element of each gradient after each step, and DDP's record of its buckets.
    """
    model = ReplayModel(PROFILE, value=dist.get_rank() + 1.0)
    ready: list[list[str]] = []
    for name, parameter in model.named_parameters():
        parameter.register_post_accumulate_grad_hook(lambda _, name=name: ready[-1].append(name))
    ddp = DistributedDataParallel(model, **arguments)
    ranges = []
    for _ in range(ITERATIONS):
        model.zero_grad()
        ready.append([])
        ddp().backward()
        gradients = {name: parameter.grad for name, parameter in model.named_parameters()}
        ranges.append({name: [float(g.min()), float(g.max())] for name, g in gradients.items()})
    model.zero_grad()
    ddp()  # what a step changed is only logged when the next one begins
    record = ddp._get_ddp_logging_data()
    return {
        "ready": ready,
        "ranges": ranges,
        "bucket_sizes": record.get("rebuilt_bucket_sizes") or record["bucket_sizes"],
    }


def main() -> None:
    """Observes every arm, in the same order on both ranks."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    print(json.dumps({name: observe(arguments) for name, arguments in ARMS.items()}))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
