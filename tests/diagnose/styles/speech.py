"""A CTC recognizer of made-up speech, trained with callbacks on batches of like lengths.

Faults: buckets (each rank draws its own order of buckets, as before lhotse-speech/lhotse#1341),
padded (each batch is padded to the longest utterance of the corpus, as in
huggingface/transformers#3634), anomaly (anomaly detection, wanted in the first steps as CTC may
give NaN, stays on, as in Lightning-AI/pytorch-lightning#17359).
"""

import argparse
import random
from functools import partial
from itertools import chain, repeat

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader

MELS, VOCAB, DIM, BUCKETS, ROUNDS = 40, 30, 128, 6, 6
FRAMES = (40, 320)  # shortest and longest: their ratio sets the cost of "buckets" and "padded"
LAYERS = 4  # each operation of each layer is traced: the more layers, the more "anomaly" costs


def utter(utterances):
    generator, corpus = torch.Generator().manual_seed(4), []
    sounds = torch.randn(VOCAB, MELS, generator=generator)
    for n in range(utterances):
        frames = FRAMES[0] * (FRAMES[1] / FRAMES[0]) ** (n / utterances)
        tokens = torch.randint(1, VOCAB, (round(frames / 10),), generator=generator)
        durations = torch.randint(9, 12, tokens.shape, generator=generator)
        speech = sounds[tokens].repeat_interleave(durations, 0)
        corpus.append((speech + 0.5 * torch.randn(speech.shape, generator=generator), tokens))
    return corpus  # from the shortest to the longest


class BucketSampler:  # ranks share each bucket's batches, and the order of buckets, by epoch
    def __init__(self, utterances, batch_size, own_order):
        self.rank, self.ranks, self.epoch = dist.get_rank(), dist.get_world_size(), -1
        self.size, self.seed = batch_size * self.ranks, 1000 * self.rank if own_order else 0
        self.buckets = torch.arange(utterances).chunk(BUCKETS)

    def __iter__(self):
        self.epoch += 1
        rng, batches = random.Random(self.epoch), []
        for bucket in self.buckets:
            drawn = rng.sample(bucket.tolist(), len(bucket))
            for start in range(0, len(drawn), self.size):
                shared = sorted(drawn[start : start + self.size])
                batches.append(shared[self.rank :: self.ranks])
        random.Random(self.seed + self.epoch).shuffle(batches)
        return iter(batches)


def collate(utterances, width):
    speech, tokens = zip(*utterances, strict=True)
    lengths, counts = (torch.tensor([len(x) for x in xs]) for xs in (speech, tokens))
    frames = pad_sequence(speech, batch_first=True)
    frames = F.pad(frames, (0, 0, 0, max(0, width - frames.shape[1])))
    return frames, lengths, torch.cat(tokens), counts


class Recognizer(nn.Module):
    def __init__(self, longest):
        super().__init__()
        self.subsample = nn.Conv1d(MELS, DIM, 5, stride=2, padding=2)
        angles = torch.arange(longest)[:, None] / 1e4 ** torch.linspace(0, 1, DIM // 2)
        self.positions = torch.cat([angles.sin(), angles.cos()], 1)
        options = {"nhead": 4, "dropout": 0.0, "batch_first": True, "norm_first": True}
        layer = nn.TransformerEncoderLayer(DIM, dim_feedforward=4 * DIM, **options)
        self.encoder = nn.TransformerEncoder(layer, LAYERS, enable_nested_tensor=False)
        self.head = nn.Linear(DIM, VOCAB)

    def forward(self, frames, lengths):
        x = F.gelu(self.subsample(frames.transpose(1, 2))).transpose(1, 2)
        lengths, width = (lengths + 1) // 2, x.shape[1]
        padding = torch.arange(width) >= lengths[:, None]
        x = self.encoder(x + self.positions[:width], src_key_padding_mask=padding)
        return self.head(x).log_softmax(-1).transpose(0, 1), lengths


class NanGuard:
    def __init__(self, steps):
        self.steps = steps

    def on_step_begin(self, trainer):
        torch.autograd.set_detect_anomaly(trainer.step < self.steps)


class Trainer:
    def __init__(self, args, callbacks):
        torch.manual_seed(4)
        self.steps, self.callbacks = args.steps, callbacks
        corpus = utter(BUCKETS * ROUNDS * args.batch_size * dist.get_world_size())
        longest = max(len(speech) for speech, _ in corpus)
        self.sampler = BucketSampler(len(corpus), args.batch_size, args.fault == "buckets")
        pad = partial(collate, width=longest if args.fault == "padded" else 0)
        self.loader = DataLoader(corpus, batch_sampler=self.sampler, collate_fn=pad)
        self.model = nn.parallel.DistributedDataParallel(Recognizer(longest))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=5e-4, fused=True)

    def fit(self):
        batches = chain.from_iterable(repeat(self.loader))
        for self.step in range(self.steps):  # noqa: B020
            frames, lengths, tokens, counts = next(batches)
            for callback in self.callbacks:
                callback.on_step_begin(self)
            logps, lengths = self.model(frames, lengths)
            self.optimizer.zero_grad()
            F.ctc_loss(logps, tokens, lengths, counts, zero_infinity=True).backward()
            self.optimizer.step()


parser = argparse.ArgumentParser()
for flag, default in {"steps": 60, "batch-size": 6, "fault": "none"}.items():
    parser.add_argument(f"--{flag}", type=type(default), default=default)
args = parser.parse_args()
dist.init_process_group("gloo")
Trainer(args, [NanGuard(steps=args.steps if args.fault == "anomaly" else 2)]).fit()
dist.destroy_process_group()
