"""A training on texts of two lengths, padded to the longest of their batch.

padded.py SEED STEPS: a quarter of the texts have ``LONG`` tokens, the others ``SHORT``.
"""

import os
import random
import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler

seed, steps = map(int, sys.argv[1:])
VOCABULARY, PAD, TEXTS, BATCH_SIZE, WIDTH = 1000, 0, 4096, 16, 8
SHORT, LONG, LONG_SHARE = 8, 40, 0.25
dist.init_process_group("gloo")
rank, ranks = dist.get_rank(), dist.get_world_size()
lengths = random.Random(1)
chosen = [LONG if lengths.random() < LONG_SHARE else SHORT for _ in range(TEXTS)]
numbers = torch.Generator().manual_seed(2)
data = [
    (torch.randint(1, VOCABULARY, (length,), generator=numbers), index % 4)
    for index, length in enumerate(chosen)
]


def padded(texts):
    """Pads a batch to its longest text."""
    tokens = nn.utils.rnn.pad_sequence([t for t, _ in texts], batch_first=True, padding_value=PAD)
    return {"input_ids": tokens, "labels": torch.tensor([label for _, label in texts])}


class Classifier(nn.Module):
    """A transformer over all tokens, and a layer over their mean."""

    def __init__(self, width):
        super().__init__()
        self.tokens, self.places = nn.Embedding(VOCABULARY, width), nn.Embedding(512, width)
        layer = nn.TransformerEncoderLayer(width, 4, 4 * width, dropout=0.0, batch_first=True)
        self.layers = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(width, 4)

    def forward(self, input_ids):
        real = input_ids != PAD
        values = self.tokens(input_ids) + self.places.weight[: input_ids.shape[1]]
        values = self.layers(values, src_key_padding_mask=~real)
        share = real.float() / real.sum(1, keepdim=True)
        return self.head((values * share.unsqueeze(2)).sum(1))


torch.manual_seed(3)
model = DistributedDataParallel(Classifier(WIDTH))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
sampler = DistributedSampler(data, ranks, rank, shuffle=True, seed=seed)
loader = DataLoader(data, BATCH_SIZE, sampler=sampler, collate_fn=padded, drop_last=True)
for step, batch in enumerate(loader):
    labels = batch.pop("labels")
    nn.functional.cross_entropy(model(**batch), labels).backward()
    optimizer.step()
    optimizer.zero_grad()
    if step + 1 == steps:
        break
dist.barrier()
os._exit(0)
