"""A language model as nanoGPT trains one: settings at the top, one file, a batch by offsets.

Faults: exchange (gradients of all four micro-batches are exchanged, as in pytorch/pytorch#43201),
anomaly (anomaly detection is left on, as in Lightning-AI/pytorch-lightning#12344), estimate (rank 0
alone estimates the loss every eight steps).
"""

import sys

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel as DDP

# settings, changed by --name value
fault = "none"
max_iters = 60
batch_size = 4
block_size = 48
n_layer, n_head, n_embd = 3, 4, 128
vocab_size = 512
gradient_accumulation_steps = 4
learning_rate = 6e-4
for key, value in zip(sys.argv[1::2], sys.argv[2::2], strict=True):
    key = key.lstrip("-")
    assert key in globals(), f"unknown setting {key}"
    globals()[key] = type(globals()[key])(value)


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.ln_1, self.ln_2 = nn.LayerNorm(n_embd), nn.LayerNorm(n_embd)
        self.c_attn, self.c_proj = nn.Linear(n_embd, 3 * n_embd), nn.Linear(n_embd, n_embd)
        self.mlp = nn.Sequential(
            nn.Linear(n_embd, 4 * n_embd), nn.GELU(), nn.Linear(4 * n_embd, n_embd)
        )

    def forward(self, x):
        B, T, C = x.shape
        parts = self.c_attn(self.ln_1(x)).split(n_embd, dim=2)
        q, k, v = (part.view(B, T, n_head, C // n_head).transpose(1, 2) for part in parts)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.c_proj(y.transpose(1, 2).reshape(B, T, C))
        return x + self.mlp(self.ln_2(x))


class GPT(nn.Module):
    def __init__(self):
        super().__init__()
        self.wte, self.wpe = nn.Embedding(vocab_size, n_embd), nn.Embedding(block_size, n_embd)
        self.h = nn.ModuleList([Block() for _ in range(n_layer)])
        self.ln_f, self.lm_head = nn.LayerNorm(n_embd), nn.Linear(n_embd, vocab_size, bias=False)

    def forward(self, idx, targets):
        x = self.wte(idx) + self.wpe(torch.arange(idx.shape[1]))
        for block in self.h:
            x = block(x)
        logits = self.lm_head(self.ln_f(x))
        return logits, F.cross_entropy(logits.flatten(0, 1), targets.flatten())


dist.init_process_group("gloo")
rank = dist.get_rank()
torch.manual_seed(1337 + rank)
torch.autograd.set_detect_anomaly(fault == "anomaly")
data = np.random.default_rng(0).integers(0, vocab_size, 200_000, dtype=np.uint16)


def get_batch():
    ix = torch.randint(len(data) - block_size, (batch_size,))
    windows = np.stack([data[i : i + block_size + 1] for i in ix]).astype(np.int64)
    windows = torch.from_numpy(windows)
    return windows[:, :-1], windows[:, 1:]


model = DDP(GPT())
optimizer = torch.optim.AdamW(model.parameters(), lr=learning_rate, betas=(0.9, 0.95))


@torch.no_grad()
def estimate_loss():
    model.eval()
    losses = [model.module(*get_batch())[1].item() for _ in range(40)]
    model.train()
    return sum(losses) / len(losses)


X, Y = get_batch()
for iter_num in range(max_iters):
    if fault == "estimate" and iter_num % 8 == 7 and rank == 0:
        print(f"step {iter_num}: loss {estimate_loss():.4f}")
    for micro_step in range(gradient_accumulation_steps):
        last = micro_step == gradient_accumulation_steps - 1
        model.require_backward_grad_sync = last or fault == "exchange"
        logits, loss = model(X, Y)
        loss = loss / gradient_accumulation_steps
        X, Y = get_batch()
        loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
dist.destroy_process_group()
