"""A neural codec of audio with one codebook, trained by a solver on clips of synthetic voices.

Faults: ear (the network whose features are compared is not frozen, and DDP wraps it as well, as
before facebookresearch/NeuralCompression#8), restarts (k-means estimates the codebook anew before
each epoch, with ten restarts, as in TencentARC/VQFR#10), recent (the latents which tell what codes
are out of use are kept from all steps, not just from the last three).
"""

import argparse
from itertools import islice, pairwise

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler

CLIP, WIDTHS, DIM, CODES, DECAY, RECENT = 2048, (16, 48, 96, 128), 128, 512, 0.99, 768
EAR = (1, 32, 10, 5), (32, 64, 8, 4), (64, 192, 8, 8), (192, 640, 4, 4), (640, 640, 3, 1)
KMEANS_CLIPS, KMEANS_STEPS, KMEANS_RESTARTS, SCALES = 32, 12, 10, (128, 256, 512, 1024)
STFTS = [{"n_fft": n, "window": torch.hann_window(n), "return_complex": True} for n in SCALES]


class Codebook(nn.Module):
    def __init__(self, keep_all):
        super().__init__()
        self.keep_all, self.recent = keep_all, torch.empty(0, DIM)
        self.register_buffer("totals", F.pad(torch.randn(CODES, DIM), (0, 1), value=1))

    def nearest(self, frames):
        codes = self.totals[:, :DIM] / self.totals[:, DIM:].clamp(min=0.01)
        return codes, *torch.addmm(codes.square().sum(1), frames, codes.T, alpha=-2).min(1)

    def average(self, frames, decay):
        codes, distances, chosen = self.nearest(frames)
        sums = torch.zeros_like(self.totals).index_add_(0, chosen, F.pad(frames, (0, 1), value=1))
        self.totals.lerp_(sums, 1 - decay)
        return codes[chosen], distances.sum()

    def kmeans(self, frames, restarts):
        fits = []
        for _ in range(restarts):
            self.totals.copy_(F.pad(frames[torch.randperm(len(frames))[:CODES]], (0, 1), value=1))
            distances = [self.average(frames, decay=0)[1] for _ in range(KMEANS_STEPS)]
            fits.append((distances[-1], self.totals.clone()))
        self.totals.copy_(min(fits, key=lambda fit: fit[0])[1])

    def forward(self, frames):
        quantized, _ = self.average(frames, DECAY)
        recent = torch.cat([self.recent, frames])
        self.recent = recent if self.keep_all else recent[-RECENT:]
        idle = torch.bincount(self.nearest(self.recent)[2], minlength=CODES) == 0
        drawn = self.recent[torch.randint(len(self.recent), (int(idle.sum()),))]
        self.totals[idle] = F.pad(drawn, (0, 1), value=1)
        return quantized


class Objective(nn.Module):
    def __init__(self, keep_all):
        super().__init__()
        encoder, decoder = [nn.Conv1d(1, 16, 7, 1, 3)], [nn.Conv1d(16, 1, 7, 1, 3), nn.Tanh()]
        for narrow, wide in pairwise(WIDTHS):
            encoder += [nn.ELU(), nn.Conv1d(narrow, wide, 8, 4, 2)]
            decoder = [nn.ConvTranspose1d(wide, narrow, 8, 4, 2), nn.ELU(), *decoder]
        self.codec = nn.ModuleList([nn.Sequential(*encoder), nn.Sequential(*decoder)])
        self.ear = nn.ModuleList(nn.Conv1d(*shape) for shape in EAR)
        self.codebook = Codebook(keep_all)

    def forward(self, wave):
        encoder, decoder = self.codec
        frames = encoder(wave).transpose(1, 2).flatten(0, 1)
        quantized = self.codebook(frames.detach())
        passed = frames + (quantized - frames).detach()
        output = decoder(passed.unflatten(0, (len(wave), -1)).transpose(1, 2))
        loss = F.mse_loss(frames, quantized) + F.l1_loss(output, wave)
        for stft in STFTS:
            ours, theirs = (torch.stft(x[:, 0], **stft).abs() for x in (output, wave))
            loss = loss + F.l1_loss(ours, theirs) + F.l1_loss(ours.log1p(), theirs.log1p())
        for conv in self.ear:
            output, wave = F.gelu(conv(output)), F.gelu(conv(wave))
            loss = loss + F.l1_loss(output, wave)
        return loss


class Solver:
    def __init__(self, args):
        torch.manual_seed(0)
        pitch, tones = 80 + 320 * torch.rand(240, 1, 1), torch.arange(1, 9)[:, None]
        phase = 2 * torch.pi * pitch * tones * torch.arange(CLIP) / 16000
        self.voices = (torch.rand(240, 8, 1) * phase.sin() / tones).sum(1, keepdim=True) / 3
        self.args, self.sampler = args, DistributedSampler(self.voices)
        self.loader = DataLoader(self.voices, args.batch_size, sampler=self.sampler)
        self.objective = Objective(keep_all=args.fault == "recent")
        self.objective.ear.requires_grad_(args.fault == "ear")
        self.model = DistributedDataParallel(self.objective)
        self.optimizer = torch.optim.AdamW(self.objective.codec.parameters(), 3e-4, fused=True)

    def run(self):
        updates, restarts = 0, KMEANS_RESTARTS if self.args.fault == "restarts" else 1
        while updates < self.args.steps:
            self.sampler.set_epoch(updates)
            if updates == 0 or self.args.fault == "restarts":
                latents = torch.no_grad()(self.objective.codec[0])(self.voices[:KMEANS_CLIPS])
                self.objective.codebook.kmeans(latents.transpose(1, 2).flatten(0, 1), restarts)
            for waves in islice(self.loader, self.args.steps - updates):
                loss = self.model(waves)
                self.optimizer.zero_grad()
                loss.backward()
                self.optimizer.step()
                updates += 1
            print(f"rank {dist.get_rank()}, {updates} updates: loss {loss.item():.3f}")


parser = argparse.ArgumentParser()
for flag, default in {"steps": 60, "batch_size": 8, "fault": "none"}.items():
    parser.add_argument(f"--{flag}", type=type(default), default=default)
dist.init_process_group("gloo")
Solver(parser.parse_args()).run()
dist.destroy_process_group()
