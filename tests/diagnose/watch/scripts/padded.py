"""A training on texts of two lengths, padded to the longest of their batch: padded.py [--flags].

Of the texts a ``--long_share`` has ``--long`` tokens, the others ``--short``. With ``--mask 1`` the
model gets an attention mask, too, as tokenizers make it. By default rank 0's 45th step, the last
that is watched by default, has short texts only.
"""

import argparse
import os
import random

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler

parser = argparse.ArgumentParser()
parser.add_argument("--steps", type=int, default=60)
parser.add_argument("--texts", type=int, default=4096)
parser.add_argument("--short", type=int, default=8)
parser.add_argument("--long", type=int, default=120)
parser.add_argument("--long_share", type=float, default=0.25)
parser.add_argument("--batch_size", type=int, default=16)
parser.add_argument("--width", type=int, default=64)
parser.add_argument("--mask", type=int, default=0)
parser.add_argument("--seed", type=int, default=72)
arguments = parser.parse_args()

VOCABULARY, PAD = 1000, 0
dist.init_process_group("gloo")
rank, ranks = dist.get_rank(), dist.get_world_size()
lengths = random.Random(1)
chosen = [
    arguments.long if lengths.random() < arguments.long_share else arguments.short
    for _ in range(arguments.texts)
]
numbers = torch.Generator().manual_seed(2)
data = [
    (torch.randint(1, VOCABULARY, (length,), generator=numbers), index % 4)
    for index, length in enumerate(chosen)
]


def padded(texts):
    """Pads a batch to its longest text."""
    tokens = nn.utils.rnn.pad_sequence([t for t, _ in texts], batch_first=True, padding_value=PAD)
    batch = {"input_ids": tokens, "labels": torch.tensor([label for _, label in texts])}
    return batch | ({"attention_mask": (tokens != PAD).long()} if arguments.mask else {})


class Classifier(nn.Module):
    """A transformer over all tokens, and a layer over their mean."""

    def __init__(self, width):
        super().__init__()
        self.tokens, self.places = nn.Embedding(VOCABULARY, width), nn.Embedding(512, width)
        layer = nn.TransformerEncoderLayer(width, 4, 4 * width, dropout=0.0, batch_first=True)
        self.layers = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(width, 4)

    def forward(self, input_ids, attention_mask=None):
        real = (input_ids != PAD) if attention_mask is None else attention_mask.bool()
        values = self.tokens(input_ids) + self.places.weight[: input_ids.shape[1]]
        values = self.layers(values, src_key_padding_mask=~real)
        share = real.float() / real.sum(1, keepdim=True)
        return self.head((values * share.unsqueeze(2)).sum(1))


torch.manual_seed(3)
model = DistributedDataParallel(Classifier(arguments.width))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
sampler = DistributedSampler(data, ranks, rank, shuffle=True, seed=arguments.seed)
loader = DataLoader(data, arguments.batch_size, sampler=sampler, collate_fn=padded, drop_last=True)
for step, batch in enumerate(loader):
    labels = batch.pop("labels")
    nn.functional.cross_entropy(model(**batch), labels).backward()
    optimizer.step()
    optimizer.zero_grad()
    if step + 1 == arguments.steps:
        break
dist.barrier()
os._exit(0)
