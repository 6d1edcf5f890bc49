"""One of two ranks for test_micro_batch_step.py: prints a JSON line per case, from each rank.

The oracle is one model that sees the whole global batch at once: no DDP, no scaling. Under SGD with
a learning rate of 1, the weights change by the gradient.
"""

from __future__ import annotations

import copy
import ctypes
import json

import numpy as np
import torch
from torch import nn
from torch.nn import functional

from common.data.text_tokens import TokenizedTexts
from common.errors import RunFailed
from common.models.text_classifier import TextClassifier, TextClassifierConfig
from common.runtime.group.process_group import Worker, process_group
from common.runtime.machine.memory_limit import limit_memory, writable_bytes
from common.scheduling.loader import MicroBatch, collate
from common.scheduling.modes import StepPlan
from common.training.micro_batches.micro_batch_step import MicroBatchStep
from common.training.scaling.timed_exchange import TimedExchange

M_MMAP_THRESHOLD = -3  # malloc.h
PLANS = {
    "equal": ((0, 1, 2, 3), (4, 5, 6, 7)),
    "unequal": ((0, 1, 2, 3, 4, 5, 6), (7,)),
    "sorted": ((5, 1), (0, 2, 3, 4, 6, 7)),
}


def texts(lengths: list[int]) -> TokenizedTexts:
    """Draws random texts of these lengths, in two classes."""
    rng = np.random.default_rng(1)
    tokens = [rng.integers(5, 50, size=length).tolist() for length in lengths]
    labels = rng.integers(2, size=len(lengths))
    return TokenizedTexts(np.array(lengths), tokens, labels, 50, 0, 2, "random", "random")


def classifier(dtype: torch.dtype, **sizes: int) -> nn.Module:
    """Makes a small classifier, the same on every rank."""
    torch.manual_seed(7)
    config = {"n_layer": 2, "n_head": 2, "d_model": 16, "d_ff": 32, "max_length": 2048} | sizes
    return TextClassifier(TextClassifierConfig(50, 2, **config)).to(dtype)


def make_step(model: nn.Module, worker: Worker, data: TokenizedTexts, mean: str) -> MicroBatchStep:
    """Makes a step that takes the gradient off the weights."""
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    step = MicroBatchStep(
        TimedExchange(model, worker, sync_buffers=False, gradient_as_bucket_view=True),
        optimizer,
        loss_mean=mean,
    )
    step.settle(collate(data, StepPlan(((0,), (1,)), data.lengths), worker.rank).first_tokens())
    return step


def whole_batch(model: nn.Module, data: TokenizedTexts, mean: str) -> tuple[float, list]:
    """Computes loss and gradients of all texts in one batch on one device."""
    everything = StepPlan((tuple(range(len(data.labels))),), data.lengths)
    batch = collate(data, everything, 0)
    losses = functional.cross_entropy(
        model(batch.input_ids, batch.attention_mask), batch.labels, reduction="none"
    )
    weights = torch.from_numpy(data.lengths) if mean == "tokens" else torch.ones(len(data.labels))
    loss = (losses * weights).sum() / weights.sum()
    return loss.item(), torch.autograd.grad(loss, list(model.parameters()))


def apart(model: nn.Module, before: list, gradients: list) -> float:
    """Computes how far the weights' change is from the gradients, relative to their norm."""
    change = [old - new.detach() for old, new in zip(before, model.parameters(), strict=True)]
    gap = sum(float((a - b).square().sum()) for a, b in zip(change, gradients, strict=True))
    return (gap / sum(float(g.square().sum()) for g in gradients)) ** 0.5


def compare(case: str, worker: Worker, data: TokenizedTexts, plan: StepPlan, mean: str) -> None:
    """Compares one step under a plan with the oracle."""
    model = classifier(torch.float64)
    loss, gradients = whole_batch(copy.deepcopy(model), data, mean)
    step = make_step(model, worker, data, mean)
    before = [parameter.detach().clone() for parameter in model.parameters()]
    parts, _ = step.run(lambda: collate(data, plan, worker.rank))
    total = sum(worker.gather(parts.loss))
    found = {"loss": abs(total / loss - 1), "gradient": apart(model, before, gradients)}
    print(json.dumps({"case": case, **found, "halvings": parts.halvings}), flush=True)


def meet_nan(worker: Worker) -> None:
    """Takes a step whose gradients are NaN on one rank, as float16's are now and then."""
    data = texts([5, 6, 7, 8])
    model = classifier(torch.float32)
    step = make_step(model, worker, data, "samples")
    if worker.rank == 1:
        model.head.register_full_backward_pre_hook(lambda _, grads: (grads[0] * torch.nan,))
    plan = StepPlan(((0, 1), (2, 3)), data.lengths)
    parts, _ = step.run(lambda: collate(data, plan, worker.rank))
    is_nan = all(parameter.isnan().any().item() for parameter in model.head.parameters())
    print(json.dumps({"case": "nan", "halvings": parts.halvings, "is_nan": is_nan}), flush=True)


def run_out_of_memory(worker: Worker) -> None:
    """Leaves rank 1 no memory for its texts at once, only in parts; nothing tells rank 0 before."""
    data = texts([512] * 20)
    plan = StepPlan((tuple(range(4)), tuple(range(4, 20))), data.lengths)
    sizes = {"n_layer": 1, "n_head": 1, "d_model": 8, "d_ff": 1024}
    model = classifier(torch.float32, **sizes)
    _, gradients = whole_batch(copy.deepcopy(model), data, "samples")
    step = make_step(model, worker, data, "samples")
    before = [parameter.detach().clone() for parameter in model.parameters()]
    # Tensors are mapped one by one, so that a freed one does not count against the limit.
    ctypes.CDLL(None).mallopt(M_MMAP_THRESHOLD, 64 * 1024)
    if worker.rank == 1:
        # 16 texts keep 34 MB after each of two operators; 4 of them a quarter of that.
        limit_memory(writable_bytes() + 50_000_000)

    def next_batch() -> MicroBatch:
        return collate(data, plan, worker.rank)

    parts, _ = step.run(next_batch)
    found = {"gradient": apart(model, before, gradients), "halvings": parts.halvings}
    print(json.dumps({"case": "out of memory", **found}), flush=True)

    after, _ = step.run(next_batch)
    print(json.dumps({"case": "step after it", "halvings": after.halvings}), flush=True)

    hopeless = classifier(torch.float32, **sizes | {"d_ff": 2**16})  # 134 MB for a single text
    step = make_step(hopeless, worker, data, "samples")
    try:
        step.run(lambda: collate(data, StepPlan(((0,), (1,)), data.lengths), worker.rank))
    except RunFailed as error:
        print(json.dumps({"case": "hopeless", "error": str(error)}), flush=True)


with process_group("cpu") as worker:
    lengths = [3, 40, 9, 9, 1, 25, 17, 2]
    for mean in ("samples", "tokens"):
        data = texts(lengths)
        for name, groups in PLANS.items():
            compare(f"{name} {mean}", worker, data, StepPlan(groups, data.lengths), mean)
    meet_nan(worker)
    run_out_of_memory(worker)
