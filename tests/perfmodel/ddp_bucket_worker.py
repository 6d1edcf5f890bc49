"""One rank of the real DDP runs whose buckets test_ddp_buckets_two_ranks.py looks at.

Started on two gloo ranks: ``ddp_bucket_worker.py FOLDER RUN…``. Every configuration
gets a fresh DDP instance and a few training steps; what DDP did goes to ``FOLDER/rank<r>.json``:

- ``reduced``: for each iteration the buckets in the order they were reduced, each as (size in
  bytes, registration indices), seen by a communication hook that all-reduces as DDP does;
- ``ready``: for each iteration the parameters in the order their gradients became ready;
- ``logged``: DDP's own record of its buckets.
"""

# No "from __future__ import annotations": DDP looks at the annotations of its hook.
import json
import os
import sys
from copy import deepcopy
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from common.models.gpt2 import GPT2, GPT2Config

ITERATIONS = 3  # the buckets of a static graph are only rebuilt for the third
CAPS_MIB = (None, 0.5, 1, 5, 25)
FEW_CAPS_MIB = (None, 1)
LOGGED = ("bucket_sizes", "rebuilt_bucket_sizes", "rebuilt_per_bucket_param_indices")


@dataclass(frozen=True)
class Run:
    """A model and the arguments given to DDP."""

    model: str
    cap_mib: float | None
    static_graph: bool = False
    find_unused_parameters: bool = False
    watched: bool = True  # by a communication hook
    caps_mib: tuple[float, ...] = ()  # bucket_cap_mb_list

    @property
    def name(self) -> str:
        """Returns a unique name, short enough for a test's id."""
        cap = "default" if self.cap_mib is None else f"{self.cap_mib:g}MiB"
        cap = ",".join(f"{cap:g}" for cap in self.caps_mib) or cap
        flags = ["static"] * self.static_graph + ["unused"] * self.find_unused_parameters
        return "-".join([self.model, cap, *flags, *([] if self.watched else ["unwatched"])])


RUNS = (
    *(Run(model, cap) for model in ("tied", "mixed") for cap in CAPS_MIB),
    *(Run(model, cap, static_graph=True) for model in ("tied", "mixed") for cap in FEW_CAPS_MIB),
    *(
        Run(model, cap, find_unused_parameters=True)
        for model in ("tied", "mixed", "with_unused")
        for cap in FEW_CAPS_MIB
    ),
    Run("tied", 5, static_graph=True, find_unused_parameters=True),
    Run("mixed", 1, static_graph=True, find_unused_parameters=True),
    Run("with_unused", 1, static_graph=True),
    Run("with_unused", 1, static_graph=True, find_unused_parameters=True),
    Run("ranks_differ", 0.5),
    Run("ranks_differ", None),
    Run("tied", 5, watched=False),
    Run("mixed", None, static_graph=True, watched=False),
    Run("tied", None, caps_mib=(0.5, 4, 1)),
    Run("mixed", 5, caps_mib=(1, 0.5)),
    Run("mixed", None, static_graph=True, caps_mib=(2, 0.5, 8)),
    Run("tied", None, find_unused_parameters=True, caps_mib=(0.5, 4, 1)),
)


class Tied(nn.Module):
    """A GPT-2 of 31 MiB whose output projection is its token embedding."""

    def __init__(self) -> None:
        super().__init__()
        config = GPT2Config(vocab_size=2048, n_positions=16, n_layer=3, n_head=4, n_embd=448)
        self.gpt2 = GPT2(config)

    def forward(self) -> torch.Tensor:
        tokens = torch.arange(4)[None]
        return self.gpt2(tokens, tokens)


class Chain(nn.Module):
    """Pairs of linear layers, 256 → width → 256, of given dtypes; one pair may be unused."""

    def __init__(
        self, pairs: list[tuple[torch.dtype, torch.dtype, int]], unused: int | None = None
    ) -> None:
        super().__init__()
        self.unused = unused
        self.pairs = nn.ModuleList(
            nn.ModuleList([nn.Linear(256, width, dtype=up), nn.Linear(width, 256, dtype=down)])
            for up, down, width in pairs
        )

    def forward(self) -> torch.Tensor:
        x = torch.ones(1, 256)
        for index, pair in enumerate(self.pairs):
            for layer in pair if index != self.unused else ():
                x = layer(x.to(layer.weight.dtype))
        return x.double().mean()


class RanksDiffer(nn.Module):
    """Each rank adds up its two branches in another order, so gradients are ready in another."""

    def __init__(self) -> None:
        super().__init__()
        self.left = nn.Sequential(nn.Linear(256, 700), nn.Linear(700, 256))
        self.right = nn.Sequential(nn.Linear(256, 900), nn.Linear(900, 256))

    def forward(self) -> torch.Tensor:
        branches = [self.left, self.right]
        x = torch.ones(1, 256)
        for branch in branches if dist.get_rank() == 0 else branches[::-1]:
            x = branch(x)
        return x.mean()


@cache
def build(name: str) -> nn.Module:
    """Builds a model by the name of its run."""
    f32, f64 = torch.float32, torch.float64
    if name == "tied":
        return Tied()
    if name == "mixed":
        # Dtypes change inside a pair and between pairs, and both are left over at the end.
        kinds = ((f32, f64), (f64, f32), (f32, f32), (f64, f64), (f64, f32), (f32, f64))
        widths = (2000, 3000, 1600, 3600, 300, 2600)
        return Chain([(*pair, width) for pair, width in zip(kinds, widths, strict=True)])
    if name == "with_unused":
        return Chain([(f32, f32, width) for width in (600, 1100, 500)], unused=1)
    return RanksDiffer()


def observe(run: Run) -> dict:
    """Trains a few iterations and tells what DDP did in each."""
    model = deepcopy(build(run.model))
    parameters = list(model.parameters())
    index_of = {id(parameter): index for index, parameter in enumerate(parameters)}
    reduced: list[list] = []
    ready: list[list[int]] = []

    def all_reduce(_: None, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
        members = [index_of[id(parameter)] for parameter in bucket.parameters()]
        reduced[-1].append((bucket.buffer().nbytes, members))
        buffer = bucket.buffer().div_(dist.get_world_size())
        work = dist.all_reduce(buffer, async_op=True)
        return work.get_future().then(lambda done: done.value()[0])

    limits = {"bucket_cap_mb_list": list(run.caps_mib)} if run.caps_mib else {}
    ddp = DistributedDataParallel(
        model,
        **limits,
        bucket_cap_mb=run.cap_mib,
        static_graph=run.static_graph,
        find_unused_parameters=run.find_unused_parameters,
    )
    if run.watched:
        ddp.register_comm_hook(None, all_reduce)
    for index, parameter in enumerate(parameters):
        parameter.register_post_accumulate_grad_hook(lambda _, index=index: ready[-1].append(index))
    for _ in range(ITERATIONS):
        reduced.append([])
        ready.append([])
        ddp().backward()
    ddp()  # what a step changed is only logged when the next one begins
    record = ddp._get_ddp_logging_data()
    return {
        "run": asdict(run),
        "sizes_bytes": [parameter.nbytes for parameter in parameters],
        "kinds": [str(parameter.dtype) for parameter in parameters],
        "names": [name for name, _ in model.named_parameters()],
        "reduced": reduced,
        "ready": ready,
        "logged": {key: str(record.get(key) or "") for key in LOGGED},
    }


def main() -> None:
    """Observes the runs, in the same order on both ranks."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    dist.init_process_group("gloo")
    observed = {run.name: observe(run) for run in RUNS if run.name in sys.argv[2:]}
    path = Path(sys.argv[1]) / f"rank{os.environ['RANK']}.json"
    path.write_text(json.dumps(observed))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
