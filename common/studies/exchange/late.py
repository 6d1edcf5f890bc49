"""Gradients of every strategy where the sum of an all-reduce is there at its very end only.

One rank whose all-reduces double each element when they end (``Exchange.factor``). A strategy whose
gradients are not exactly twice those of the model alone has read them too soon, or has used their
memory again. PyTorch's FSDP is left out, as it exchanges nothing on one rank.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import pandas as pd
import torch

from common.data.batches import random_tokens
from common.models.gpt2 import GPT2, GPT2Config
from common.runtime.group.process_group import Worker, process_group
from common.runtime.machine.device import choose_device
from common.runtime.script import run_script
from common.runtime.seeding import seed_everything
from common.studies.exchange.emulated_group import EMULATED, Exchange, connect, register
from common.training.config import DDP_STRATEGIES, MY_FSDP, config_of
from common.training.parallel import gradient_sync, parallelise

LATE = Exchange(alpha_s=3e-3, bytes_per_s=5e9, factor=2.0)
MODEL, BATCH_SIZE, SEQUENCE = "gpt2-pico", 2, 32


@dataclass(frozen=True)
class LateCheck:
    """Folder of the table."""

    table: Path
    device: str | None = None


def main(check: LateCheck) -> None:
    """Writes the table: a row per strategy, with the column ``exact``."""
    device = choose_device(check.device)
    register(device)
    with process_group(device, EMULATED) as worker:
        connect(LATE)
        alone = gradients("single", worker)
        rows = [
            {"strategy": name, "exact": torch.equal(gradients(name, worker), LATE.factor * alone)}
            for name in (*DDP_STRATEGIES, MY_FSDP)
        ]
    pd.DataFrame(rows).to_csv(check.table, index=False)


def gradients(strategy: str, worker: Worker) -> torch.Tensor:
    """Returns all elements of the gradients of one pass, sorted, as strategies lay them out anew.

    Two passes are made, as DDP forms its buckets anew after the first.
    """
    several = {"bucket_cap_mb": 0.05} if strategy in ("DDP", "MY_BUCKETS", "MY_ZERO1") else {}
    config = config_of(strategy, model=MODEL, device=worker.device.type, **several)
    seed_everything(42)
    shape = GPT2Config.named(MODEL)
    model = parallelise(GPT2(shape).to(worker.device), config, worker)
    tokens, targets = random_tokens(BATCH_SIZE, SEQUENCE, shape.vocab_size, worker.device)
    for _ in range(2):
        model.zero_grad(set_to_none=True)
        with gradient_sync(model, strategy, is_last=True):
            model(tokens, targets).backward()
    gradients = [parameter.grad.flatten() for parameter in model.parameters()]
    return torch.cat(gradients).sort().values


if __name__ == "__main__":
    run_script(main, LateCheck)
