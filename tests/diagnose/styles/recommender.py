"""A recommender as DLRM is: tables of categories, a dense part, shards that each rank reads.

Faults: table (a table has forty times the rows that occur), collect (garbage is collected after
each step, as in huggingface/peft#2894), lzma (the shards of rank 1 are compressed).
"""

import argparse
import io
import lzma
import os
import tempfile

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, IterableDataset

ROWS, FIELDS, DENSE = 1500, 8, 32


class Shards(IterableDataset):
    """Reads shards of (categories, numbers, clicks) one after the other, for ever."""

    def __init__(self, folder, rank, compressed):
        self.paths, self.open = [], lzma.open if compressed else open
        rng = np.random.default_rng(rank)
        for shard in range(12):
            columns = io.BytesIO()
            np.savez(
                columns,
                categories=rng.integers(0, ROWS, (2048, FIELDS)),
                numbers=rng.normal(size=(2048, DENSE)).astype(np.float32),
                clicks=rng.integers(0, 2, 2048),
            )
            self.paths.append(os.path.join(folder, f"{rank}-{shard}.npz"))
            with self.open(self.paths[-1], "wb") as file:
                file.write(columns.getvalue())

    def __iter__(self):
        while True:
            for path in self.paths:
                with self.open(path, "rb") as file:
                    shard = np.load(io.BytesIO(file.read()))
                    columns = [torch.from_numpy(shard[name]) for name in shard.files]
                for start in range(0, 2048, 512):
                    yield tuple(column[start : start + 512] for column in columns)


class Recommender(nn.Module):
    def __init__(self, width, rows):
        super().__init__()
        self.tables = nn.ModuleList(nn.Embedding(n, 32) for n in [rows] + [ROWS] * (FIELDS - 1))
        self.bottom = nn.Sequential(nn.Linear(DENSE, width), nn.ReLU(), nn.Linear(width, 32))
        self.top = nn.Sequential(
            *(nn.Linear(32 * (FIELDS + 1), width), nn.ReLU()),
            *(nn.Linear(width, width), nn.ReLU(), nn.Linear(width, 1)),
        )

    def forward(self, categories, numbers):
        vectors = [table(categories[:, i]) for i, table in enumerate(self.tables)]
        return self.top(torch.cat([*vectors, self.bottom(numbers)], dim=1)).squeeze(1)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--width", type=int, default=768)
    parser.add_argument("--fault", default="none")
    flags = parser.parse_args()
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(0)
    model = Recommender(flags.width, ROWS * (40 if flags.fault == "table" else 1))
    model = DistributedDataParallel(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    cached = []
    if flags.fault == "collect":
        import gc

        cached = [{"user": number, "clicks": [number]} for number in range(150_000)]
    with tempfile.TemporaryDirectory() as folder:
        shards = Shards(folder, rank, compressed=flags.fault == "lzma" and rank == 1)
        for step, (categories, numbers, clicks) in enumerate(DataLoader(shards, batch_size=None)):
            loss = nn.functional.binary_cross_entropy_with_logits(
                model(categories, numbers), clicks.float()
            )
            loss.backward()
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            if cached:
                gc.collect()  # "frees memory between steps"
            if step + 1 == flags.steps:
                break
        dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
