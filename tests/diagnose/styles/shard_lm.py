"""A small decoder language model under FSDP2, with micro-batches whose gradients are accumulated.

Faults: norms (the norm of each parameter's whole gradient is logged in each step, one exchange for
each, as in NVIDIA-NeMo/Automodel#2875), accum (gradients are reduced after each micro-batch, as in
NVIDIA/cosmos-framework#161), dispatch (rank 0 tokenizes the texts of all ranks in each step).
"""

import argparse
import random

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader, DistributedSampler

SEQ_LEN, VOCAB, DIM, HEADS, LAYERS = 64, 384, 160, 4, 4


class Tokenizer:
    def __init__(self, words):
        pieces = sorted({word[:size] for word in words for size in (2, 3, 4)})
        self.ids = {piece: i for i, piece in enumerate([*"abcdefghijklmnop", *pieces][:VOCAB])}

    def encode(self, text):
        ids = []
        for word in text.split():
            while word:
                size = next(n for n in range(len(word), 0, -1) if word[:n] in self.ids)
                ids.append(self.ids[word[:size]])
                word = word[size:]
        return torch.tensor(ids[: SEQ_LEN + 1])


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm1, self.norm2 = nn.RMSNorm(DIM), nn.RMSNorm(DIM)
        self.qkv, self.out = nn.Linear(DIM, 3 * DIM), nn.Linear(DIM, DIM)
        self.mlp = nn.Sequential(nn.Linear(DIM, 4 * DIM), nn.SiLU(), nn.Linear(4 * DIM, DIM))

    def forward(self, x):
        q, k, v = self.qkv(self.norm1(x)).unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).flatten(2))
        return x + self.mlp(self.norm2(x))


class Trainer:
    def __init__(self, args):
        self.args, self.rank, self.world = args, dist.get_rank(), dist.get_world_size()
        rng = random.Random(torch.manual_seed(5).initial_seed())
        words = ["".join(rng.choices("abcdefghijklmnop", k=rng.randint(4, 9))) for _ in range(250)]
        texts = [" ".join(rng.choices(words, k=360)) for _ in range(480)]
        self.tokenizer, size = Tokenizer(words), args.batch_size
        if args.fault == "dispatch":
            self.loader = DataLoader(texts, size * self.world, shuffle=True, drop_last=True)
        else:
            data = [self.tokenizer.encode(text) for text in texts]
            self.loader = DataLoader(data, size, sampler=DistributedSampler(data), drop_last=True)
        blocks = [Block() for _ in range(LAYERS)]
        ends = nn.Embedding(VOCAB, DIM), nn.Linear(DIM, VOCAB)
        self.model = nn.Sequential(ends[0], *blocks, nn.RMSNorm(DIM), ends[1])
        for module in [*blocks, self.model]:
            fully_shard(module, reshard_after_forward=False)
        self.optimizer, self.norms = torch.optim.AdamW(self.model.parameters(), lr=1e-3), []

    def scatter(self, texts):
        parts, mine = None, torch.empty(self.args.batch_size, SEQ_LEN + 1, dtype=torch.long)
        if self.rank == 0:
            parts = torch.stack([self.tokenizer.encode(text) for text in texts]).split(len(mine))
        dist.scatter(mine, parts and list(parts))
        return mine

    def train_step(self, batch):
        micro_batches = batch.chunk(self.args.accumulate)
        for index, tokens in enumerate(micro_batches, 1):
            if self.args.fault != "accum":
                self.model.set_requires_gradient_sync(index == len(micro_batches))
                self.model.set_reshard_after_backward(index == len(micro_batches))
            logits = self.model(tokens[:, :-1]).flatten(0, 1)
            (F.cross_entropy(logits, tokens[:, 1:].flatten()) / len(micro_batches)).backward()
        if self.args.fault == "norms":
            self.norms.append([p.grad.full_tensor().norm() for p in self.model.parameters()])
        self.optimizer.step()
        self.optimizer.zero_grad()

    def train(self):
        for step in range(self.args.steps):
            if step % len(self.loader) == 0:
                batches = iter(self.loader)
            batch = next(batches)
            self.train_step(self.scatter(batch) if self.args.fault == "dispatch" else batch)


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--batch_size", type=int, default=8)
    parser.add_argument("--accumulate", type=int, default=4)
    parser.add_argument("--fault", type=str, default="none")
    dist.init_process_group("gloo")
    Trainer(parser.parse_args()).train()
    dist.destroy_process_group()
