"""A recogniser of speech, trained with CTC on spectrograms of mixed lengths by a recipe class.

Faults: padding (utterances are padded to the longest of the data set, as in
lhotse-speech/lhotse#115), reverb (only rank 1 adds reverberation to its features), anomaly
(autograd's anomaly detection was left on after debugging, as in
Lightning-AI/pytorch-lightning#17359).
"""

import argparse
from itertools import chain, islice, repeat

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader, RandomSampler

MELS, TOKENS = 80, 40


def synthetic_corpus(size=600):
    generator = torch.Generator().manual_seed(21)
    voices = torch.randn(TOKENS, MELS, generator=generator)
    lengths = 60 + (torch.rand(size, generator=generator) ** 3 * 200).long()
    corpus = []
    for frames in lengths.tolist():
        tokens = torch.randint(1, TOKENS, (frames // 12,), generator=generator)
        spoken = voices[tokens.repeat_interleave(12)]
        spoken = F.pad(spoken, (0, 0, 0, frames - len(spoken)))
        corpus.append((spoken + 0.3 * torch.randn(frames, MELS, generator=generator), tokens))
    return sorted(corpus, key=lambda utterance: len(utterance[0]))


class Recogniser(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.conv1 = nn.Conv1d(MELS, width, 5, stride=2, padding=2)
        self.conv2 = nn.Conv1d(width, width, 5, stride=2, padding=2)
        self.rnn = nn.GRU(width, width, batch_first=True)
        self.head = nn.Linear(width, TOKENS)

    def forward(self, features):
        hidden = F.gelu(self.conv2(F.gelu(self.conv1(features.transpose(1, 2)))))
        return self.head(self.rnn(hidden.transpose(1, 2))[0]).log_softmax(-1)


class Recipe:
    def __init__(self, options):
        self.steps, self.fault, self.rank = options.steps, options.fault, dist.get_rank()
        torch.manual_seed(5)
        corpus, span = synthetic_corpus(), options.batch_size * dist.get_world_size()
        self.longest = len(corpus[-1][0])
        self.buckets = [corpus[i : i + span] for i in range(0, len(corpus) - span + 1, span)]
        self.model = DistributedDataParallel(Recogniser(options.width))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=5e-4)
        torch.autograd.set_detect_anomaly(self.fault == "anomaly")

    def collate(self, bucket):
        spectrograms, tokens = zip(*bucket[self.rank :: dist.get_world_size()], strict=True)
        features = pad_sequence(spectrograms, batch_first=True)
        if self.fault == "padding":
            features = F.pad(features, (0, 0, 0, self.longest - features.shape[1]))
        frames = torch.tensor([len(spectrogram) for spectrogram in spectrograms])
        return features, frames, torch.cat(tokens), torch.tensor([len(row) for row in tokens])

    def compute_features(self, features):
        if self.fault == "reverb" and self.rank == 1:
            bands = torch.arange(float(MELS))
            leak = torch.exp(-(bands[:, None] - bands).abs())[:, :, None]
            room = leak * torch.exp((torch.arange(160.0) - 159) / 40) * torch.rand(MELS, MELS, 160)
            room /= room.sum((1, 2), keepdim=True)
            wet = F.conv1d(F.pad(features.transpose(1, 2), (159, 0)), room)
            features = 0.5 * features + 0.5 * wet.transpose(1, 2)
        start = torch.randint(0, MELS - 10, ()).item()
        features[:, :, start : start + 10] = 0
        return features

    def fit_batch(self, features, frames, tokens, counts):
        predictions = self.model(self.compute_features(features))
        steps = (frames + 3) // 4
        loss = F.ctc_loss(predictions.transpose(0, 1), tokens, steps, counts, zero_infinity=True)
        self.optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(self.model.parameters(), 5.0)
        self.optimizer.step()

    def fit(self):
        shuffled = RandomSampler(self.buckets, generator=torch.Generator().manual_seed(8))
        loader = DataLoader(self.buckets, None, sampler=shuffled, collate_fn=self.collate)
        batches = chain.from_iterable(repeat(loader))
        for batch in islice(batches, self.steps):
            self.fit_batch(*batch)


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--batch_size", type=int, default=12)
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--fault", type=str, default="none")
    dist.init_process_group("gloo")
    Recipe(parser.parse_args()).fit()
    dist.destroy_process_group()
