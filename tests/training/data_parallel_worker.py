"""One of two ranks for test_data_parallel_step.py: prints a JSON line per case, from each rank.

The oracle is a twin without DDP that sees both ranks' samples at once.
"""

from __future__ import annotations

import copy
import json

import numpy as np
import torch
from torch import nn
from torch.nn import functional

from common.models.mlp import MLP
from common.perfmodel.buckets import DdpOptions, ddp_buckets
from common.runtime.group.process_group import Worker, process_group
from common.training.scaling.data_parallel_step import Batch, DataParallelStep, StepOptions

CASES = {
    "as it is": StepOptions(),
    "accumulation": StepOptions(accumulation=3),
    "static graph, accumulation": StepOptions(accumulation=2, static_graph=True),
    "clipped": StepOptions(max_gradient_norm=0.01),
    "small buckets": StepOptions(bucket_cap_mb=0.001),
    "no bucket view": StepOptions(gradient_as_bucket_view=False),
    "fp16": StepOptions(compression="fp16"),
    "bf16": StepOptions(compression="bf16"),
}
STEPS, SIZE = 4, 6


def batch(step: int, ranks: list[int]) -> Batch:
    """Draws the samples of these ranks in a micro-batch, which any process can make."""
    inputs, targets = [], []
    for rank in ranks:
        generator = torch.Generator().manual_seed(step * 2 + rank)
        inputs.append(torch.randn(SIZE, 32, generator=generator, dtype=torch.float64))
        targets.append(torch.randn(SIZE, 8, generator=generator, dtype=torch.float64))
    count = SIZE * len(ranks)
    return Batch((torch.cat(inputs),), torch.cat(targets), np.arange(count), count, count, 1)


def loss_of(outputs: torch.Tensor, made: Batch) -> torch.Tensor:
    return functional.mse_loss(outputs, made.targets)


def train(model: nn.Module, options: StepOptions, worker: Worker, timed: bool) -> tuple[list, dict]:
    """Trains the steps; returns their losses, and what the newest step says of itself."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    step = DataParallelStep(model, optimizer, loss_of, worker, options, timed=timed)
    if options.accumulation > 1:
        step.settle(lambda: batch(0, [worker.rank]))
    losses, shares, least = [], [], []
    for index in range(STEPS):
        micro = iter(range(index * options.accumulation, (index + 1) * options.accumulation))
        times, _ = step.run(lambda micro=micro: batch(next(micro), [worker.rank]))
        losses.append(times.loss)
        if timed:
            parts = (times.data_s, times.forward_s, times.backward_s, times.exchange_s)
            shares.append((sum(parts) + times.optimizer_s) / times.step_s)
            least.append(min(parts))
    step.close()
    said = {}
    if timed:
        said = {
            "parts_shares": sorted(shares),
            "least_part": min(least),
            "exchanged_bytes": times.exchanged_bytes,
            "bucket_bytes": [bucket.size_bytes for bucket in times.buckets],
            "done_after_ready": all(b.done_s > b.ready_s >= 0 for b in times.buckets),
        }
    return losses, said


def twin(model: nn.Module, options: StepOptions) -> list[float]:
    """Trains the same steps with both ranks' samples in one batch, by PyTorch alone."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = []
    for index in range(STEPS):
        whole = [
            batch(index * options.accumulation + k, [0, 1]) for k in range(options.accumulation)
        ]
        inputs = torch.cat([one.inputs[0] for one in whole])
        loss = functional.mse_loss(model(inputs), torch.cat([one.targets for one in whole]))
        loss.backward()
        if options.max_gradient_norm:
            nn.utils.clip_grad_norm_(model.parameters(), options.max_gradient_norm)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def main() -> None:
    with process_group("cpu") as worker:
        for name, options in CASES.items():
            torch.manual_seed(3)
            first = MLP(32, 48, 2, 8).double()
            alone = copy.deepcopy(first)
            expected = twin(alone, options)
            sizes = [p.numel() * 8 for p in first.parameters()]
            for timed in (True, False):
                model = copy.deepcopy(first)
                losses, said = train(model, options, worker, timed)
                mean = np.mean(worker.gather(losses), axis=0)
                weights = torch.cat([p.detach().flatten() for p in model.parameters()])
                wanted = torch.cat([p.detach().flatten() for p in alone.parameters()])
                found = {
                    "case": f"{name}, {'timed' if timed else 'plain'}",
                    "loss": float(np.abs(mean - expected).max()),
                    "weights": float((weights - wanted).abs().max()),
                    "gradient_bytes": sum(sizes),
                    "expected_buckets": expected_buckets(sizes, options),
                }
                print(json.dumps(found | said), flush=True)


def expected_buckets(sizes: list[int], options: StepOptions) -> list[int]:
    """Computes the settled buckets' bytes by the rules that test_ddp_buckets holds against DDP."""
    ready = list(reversed(range(len(sizes))))
    made = ddp_buckets(sizes, ready, DdpOptions(options.bucket_cap_mb, options.static_graph))
    return [sum(sizes[index] for index in bucket) for bucket in made]


if __name__ == "__main__":
    main()
