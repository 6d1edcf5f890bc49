"""A translator of sentences: recurrent, with a batch sampler and a collate function of its own.

Faults: own_order (each rank takes buckets of lengths in an order of its own), corpus (each batch is
padded to the corpus' longest sentence, as in huggingface/transformers#3634), everyone (each rank
has all sentences, as in innnky/so-vits-svc#70).
"""

import random
from argparse import ArgumentParser

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Dataset, Sampler


class Corpus(Dataset):
    def __init__(self, count, short):
        rng = random.Random(7)
        self.sentences = []
        for _ in range(count):
            length = rng.randint(10, 14) if short else 6 + int(50 * rng.random() ** 3)
            self.sentences.append([rng.randrange(2, 600) for _ in range(length)])

    def __len__(self):
        return len(self.sentences)

    def __getitem__(self, index):
        return index, torch.tensor(self.sentences[index])


class Buckets(Sampler):
    """Gives each rank its batch of a bucket of sentences that are about equally long."""

    def __init__(self, corpus, size, rank, world, fault):
        self.corpus, self.size, self.rank, self.world = corpus, size, rank, world
        self.everyone, self.own_order, self.epoch = fault == "everyone", fault == "own_order", 0

    def __iter__(self):
        order = list(range(len(self.corpus)))
        random.Random(self.epoch).shuffle(order)
        order.sort(key=lambda index: len(self.corpus.sentences[index]))
        count = self.size * (1 if self.everyone else self.world)
        buckets = [order[i : i + count] for i in range(0, len(order) - count + 1, count)]
        random.Random(self.epoch + self.own_order * 1000 * self.rank).shuffle(buckets)
        for bucket in buckets:
            yield bucket if self.everyone else bucket[self.rank :: self.world]


class Translator(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.source, self.target = nn.Embedding(600, width), nn.Embedding(600, width)
        self.encoder = nn.GRU(width, width, batch_first=True)
        self.decoder = nn.GRU(width, width, batch_first=True)
        self.out = nn.Linear(width, 600)

    def forward(self, ids):
        _, state = self.encoder(self.source(ids))
        states, _ = self.decoder(self.target(ids), state)
        return self.out(states)


parser = ArgumentParser()
parser.add_argument("--steps", type=int, default=60)
parser.add_argument("--batch_size", type=int, default=24)
parser.add_argument("--width", type=int, default=128)
parser.add_argument("--fault", default="none")
opt = parser.parse_args()
dist.init_process_group("gloo")
torch.manual_seed(0)
corpus = Corpus(4800, short=opt.fault in ("corpus", "everyone"))
longest = max(map(len, corpus.sentences))
if opt.fault == "corpus":
    longest = 40  # of the corpus that the model was first trained on


def collate(items):
    width = longest if opt.fault == "corpus" else max(len(ids) for _, ids in items)
    return torch.stack([nn.functional.pad(ids, (0, width - len(ids))) for _, ids in items])


world, rank = dist.get_world_size(), dist.get_rank()
sampler = Buckets(corpus, opt.batch_size, rank, world, opt.fault)
loader = DataLoader(corpus, batch_sampler=sampler, collate_fn=collate)
translator = DDP(Translator(opt.width))
optim = torch.optim.Adam(translator.parameters(), lr=2e-3)
steps = 0
while steps < opt.steps:
    sampler.epoch += 1
    for ids in loader:
        logits = translator(ids)
        loss = nn.functional.cross_entropy(logits.transpose(1, 2), ids, ignore_index=0)
        optim.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(translator.parameters(), 5.0)
        optim.step()
        steps += 1
        if steps >= opt.steps:
            break
dist.destroy_process_group()
