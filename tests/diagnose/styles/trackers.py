"""A tagger of words: an LSTM over sentences, in batches of like length, in plain functions.

Faults: dealt (batches of like length are dealt out to the ranks, each of another length, as in
lightseekorg/TorchSpec#13), edges (sentences are padded to the upper edge of their bucket, as in
facebookresearch/fairseq#5011), rows (after each update the norms of words' vectors are limited in
a loop, one row at a time).
"""

import argparse
import random

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

WORDS, TAGS, PAD, EDGES = 2000, 17, -100, (32, 64, 96)


def make_sentences(count):
    rng, sentences = random.Random(3), []
    for _ in range(count):
        length = min(max(int(rng.lognormvariate(3.0, 0.6)), 5), EDGES[-1])
        words = rng.choices(range(1, WORDS), k=length)
        tags = [(a + b) % TAGS for a, b in zip(words, [0, *words], strict=False)]
        sentences.append({"words": words, "tags": tags})
    return sentences


def batches(sentences, epoch, args):
    rng, rank, world = random.Random(epoch), dist.get_rank(), dist.get_world_size()
    pool = rng.sample(sentences, len(sentences))
    ordered = sorted(pool, key=lambda sentence: len(sentence["words"]))
    size = args.batch_size if args.fault == "dealt" else args.batch_size * world
    groups = [ordered[i : i + size] for i in range(0, len(ordered), size)]
    rng.shuffle(groups)
    return groups[rank::world] if args.fault == "dealt" else [g[rank::world] for g in groups]


def collate(batch, args):
    width = max(len(sentence["words"]) for sentence in batch)
    if args.fault == "edges":
        width = next(edge for edge in EDGES if edge >= width)
    words, tags = [], []
    for sentence in batch:
        missing = width - len(sentence["words"])
        words.append(sentence["words"] + [0] * missing)
        tags.append(sentence["tags"] + [PAD] * missing)
    return torch.tensor(words), torch.tensor(tags)


class Tagger(nn.Module):
    def __init__(self, dim=128, hidden=192):
        super().__init__()
        self.embed = nn.Embedding(WORDS, dim, padding_idx=0)
        self.lstm = nn.LSTM(dim, hidden, 2, batch_first=True, bidirectional=True)
        self.out = nn.Linear(2 * hidden, TAGS)

    def forward(self, words):
        return self.out(self.lstm(self.embed(words))[0])


@torch.no_grad()
def limit_norms(weight, words, args, most=12.0):
    if args.fault == "rows":
        for word in words.unique().tolist():
            weight[word].mul_(most / weight[word].norm().clamp(min=most))
    else:
        weight.copy_(weight.renorm(2, 0, most))


def train(model, sentences, args):
    params = list(model.parameters())
    optimizer = torch.optim.Adam(params, lr=2e-3, fused=True)
    step, epoch = 0, 0
    while step < args.steps:
        for batch in batches(sentences, epoch, args)[: args.steps - step]:
            words, tags = collate(batch, args)
            loss = F.cross_entropy(model(words).flatten(0, 1), tags.flatten(), ignore_index=PAD)
            model.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(params, 5.0)
            optimizer.step()
            limit_norms(model.module.embed.weight, words, args)
            step += 1
        epoch += 1
    if dist.get_rank() == 0:
        print(f"loss {loss.item():.3f} after {step} steps")


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--batch_size", type=int, default=24)
    parser.add_argument("--fault", type=str, default="none")
    args = parser.parse_args()
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    train(nn.parallel.DistributedDataParallel(Tagger()), make_sentences(2880), args)
    dist.destroy_process_group()
