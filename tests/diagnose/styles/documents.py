"""A character-level language model, trained on documents that are streamed from gzipped shards.

Faults: lookup (each document is looked up by its number in a gzipped shard, which is read from its
start each time, as in dask/dask#901), reservoir (a large shuffle buffer is filled before each short
epoch, as in NVIDIA/Megatron-Energon#18), early (the stream is set up before the process group, so
all ranks take themselves for rank 0 of 1, as in pytorch/pytorch#84492).
"""

import argparse
import gzip
import json
import random
import string
from itertools import islice
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

IDS = {char: i for i, char in enumerate(string.ascii_lowercase + " .\n")}
SHARDS, DOCS, CONTEXT, EPOCH_STEPS = 4, 3500, 128, 6


def write_shards(folder):
    rng = random.Random(3)
    words = ["".join(rng.choices(string.ascii_lowercase, k=rng.randint(2, 9))) for _ in range(900)]
    for shard in range(SHARDS):
        with gzip.open(folder / f"part-{shard:03d}.jsonl.gz", "wt", compresslevel=4) as lines:
            for _ in range(DOCS):
                text = " ".join(rng.choices(words, k=rng.randint(30, 90))) + "."
                lines.write(json.dumps({"text": text}) + "\n")


class TextStream(IterableDataset):
    def __init__(self, folder, buffer_size, by_number):
        self.paths, self.buffer_size = sorted(folder.iterdir()), buffer_size
        self.by_number, self.epoch, ready = by_number, 0, dist.is_initialized()
        self.rank, self.world = (dist.get_rank(), dist.get_world_size()) if ready else (0, 1)

    def documents(self, path, rng):
        for start in rng.sample(range(DOCS), DOCS) if self.by_number else [0]:
            with gzip.open(path, "rt") as lines:
                yield from islice(lines, start, start + 1 if self.by_number else None)

    def tokenized(self, rng):
        info, paths = get_worker_info(), rng.sample(self.paths, len(self.paths))
        worker, workers = (info.id, info.num_workers) if info else (0, 1)
        for path in paths[self.rank * workers + worker :: self.world * workers]:
            for line in self.documents(path, rng):
                yield [IDS[char] for char in json.loads(line)["text"] + "\n"]

    def __iter__(self):
        rng = random.Random(self.epoch)
        self.epoch += 1
        documents, packed = self.tokenized(rng), []
        buffer = list(islice(documents, self.buffer_size))
        for document in documents:
            slot = rng.randrange(len(buffer))
            packed += buffer[slot]
            buffer[slot] = document
            while len(packed) > CONTEXT:
                yield torch.tensor(packed[: CONTEXT + 1])
                packed = packed[CONTEXT:]


class CharGRU(nn.Module):
    def __init__(self, width=160):
        super().__init__()
        self.embed, self.out = nn.Embedding(len(IDS), width), nn.Linear(width, len(IDS))
        self.rnn = nn.GRU(width, width, 2, batch_first=True)

    def forward(self, tokens):
        return self.out(self.rnn(self.embed(tokens))[0])


def train(args, folder):
    write_shards(folder)
    buffer_size = 5000 if args.fault == "reservoir" else 50
    if args.fault != "early":
        dist.init_process_group("gloo")
    loader = DataLoader(TextStream(folder, buffer_size, args.fault == "lookup"), args.batch_size)
    if not dist.is_initialized():
        dist.init_process_group("gloo")
    model = DistributedDataParallel(CharGRU())
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
    for done in range(0, args.steps, EPOCH_STEPS):
        for tokens in islice(loader, min(EPOCH_STEPS, args.steps - done)):
            loss = cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    dist.destroy_process_group()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    for flag, default in (("--steps", 60), ("--batch_size", 8), ("--fault", "none")):
        parser.add_argument(flag, type=type(default), default=default)
    with TemporaryDirectory() as name:
        train(parser.parse_args(), Path(name))
