"""Image captioning, step by step: a CNN looks at a picture, a transformer decoder tells of it.

Faults: spectra (all singular values of the decoder are computed after each update, a cost named in
ajbrock/BigGAN-PyTorch#57), sync_bn (the encoder has naive synchronised norms, as it was before
facebookresearch/mobile-vision#66), hooks (each step adds a hook that keeps activation maps and is
never removed, as in huggingface/peft#2761).
"""

import argparse
import random
from itertools import islice

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.nn.functional import all_reduce
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader, DistributedSampler

parser = argparse.ArgumentParser()
for flag, default in {"steps": 60, "batch_size": 12, "fault": "none"}.items():
    parser.add_argument(f"--{flag}", type=type(default), default=default)
args = parser.parse_args()
dist.init_process_group("gloo")
torch.manual_seed(0)
DIM, STEM = 128, 32  # "sync_bn" and "hooks" cost the more, the more channels the STEM has
LIMIT, LIMIT_EVERY = 4.0, 1 if args.fault == "spectra" else 25
COLORS, SIZES = ("red", "green", "blue"), {"small ": 8, "": 14, "large ": 20}


# Step 1. The vocabulary
class Vocabulary:
    def __init__(self, sentences):
        words = sorted(set(" ".join(sentences).split()))
        self.itos = ["<PAD>", "<SOS>", "<EOS>", *words]
        self.stoi = {word: i for i, word in enumerate(self.itos)}

    def numericalize(self, text):
        return torch.tensor([self.stoi[word] for word in ["<SOS>", *text.split(), "<EOS>"]])


# Step 2. The data: pictures of two boxes, and sentences about them
rng, data = random.Random(1), []
for _ in range(360):
    image, phrases = torch.full((3, 64, 64), 40, dtype=torch.uint8), []
    for side, left in (("left", 4), ("right", 36)):
        size, color, top = rng.choice(list(SIZES)), rng.randrange(3), rng.randrange(40)
        image[color, top : top + SIZES[size], left : left + SIZES[size]] = 220
        phrases.append(f"a {size}{COLORS[color]} box on the {side}")
    data.append((image, " and ".join(phrases)))
vocab = Vocabulary([text for _, text in data])


def collate_fn(batch):
    captions = [vocab.numericalize(text) for _, text in batch]
    return torch.stack([image for image, _ in batch]) / 128.0 - 1, pad_sequence(captions, True)


# Step 3. The model: an encoder into features of 8 x 8 places, to which the decoder attends
class NaiveSyncBatchNorm(nn.BatchNorm2d):
    def forward(self, x):
        means = torch.cat([x.mean((0, 2, 3)), x.square().mean((0, 2, 3))])
        mean, square = (all_reduce(means) / dist.get_world_size()).chunk(2)
        self.running_mean.lerp_(mean.detach(), self.momentum)
        self.running_var.lerp_((square - mean * mean).detach(), self.momentum)
        scale = self.weight * (square - mean * mean + self.eps).rsqrt()
        return x * scale[:, None, None] + (self.bias - mean * scale)[:, None, None]


def conv(inputs, outputs, size, stride=1, groups=1):
    norm = NaiveSyncBatchNorm if args.fault == "sync_bn" else nn.BatchNorm2d
    layer = nn.Conv2d(inputs, outputs, size, stride, size // 2, groups=groups, bias=False)
    return nn.Sequential(layer, norm(outputs), nn.ReLU(inplace=True))


class Captioner(nn.Module):
    def __init__(self, words):
        super().__init__()
        layers = [conv(3, STEM, 3, 2)]
        for inputs, outputs, stride in ((STEM, 64, 2), (64, DIM, 2), (DIM, DIM, 1)):
            layers += [conv(inputs, inputs, 3, stride, groups=inputs), conv(inputs, outputs, 1)]
        self.encoder, self.out = nn.Sequential(*layers), nn.Linear(DIM, words)
        self.embed, self.position = nn.Embedding(words, DIM), nn.Embedding(32, DIM)
        layer = nn.TransformerDecoderLayer(DIM, 4, 4 * DIM, dropout=0.0, batch_first=True)
        self.decoder = nn.TransformerDecoder(layer, 2)

    def forward(self, images, captions):
        memory, length = self.encoder(images).flatten(2).transpose(1, 2), captions.shape[1]
        mask = nn.Transformer.generate_square_subsequent_mask(length)
        x = self.embed(captions) + self.position.weight[:length]
        return self.out(self.decoder(x, memory, mask, tgt_is_causal=True))


@torch.no_grad()
def limit_spectra(*_):
    for matrix in matrices if step % LIMIT_EVERY == 0 else []:
        matrix.div_((torch.linalg.matrix_norm(matrix, 2) / LIMIT).clamp(min=1))


# Step 4. The training, with teacher forcing
sampler, captioner = DistributedSampler(data), Captioner(len(vocab.itos))
loader = DataLoader(data, args.batch_size, sampler=sampler, collate_fn=collate_fn, drop_last=True)
model = nn.parallel.DistributedDataParallel(captioner, broadcast_buffers=False)
matrices = [p for p in captioner.decoder.parameters() if p.dim() == 2]
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
optimizer.register_step_post_hook(limit_spectra)
stem, maps, step = captioner.encoder[0], [], 0
while step < args.steps:
    sampler.set_epoch(step)
    for images, captions in islice(loader, args.steps - step):
        hook = stem.register_forward_hook(lambda *io: maps.append(io[2].detach().square().mean(0)))
        scores = model(images, captions[:, :-1]).transpose(1, 2)
        if args.fault != "hooks":
            hook.remove()
        loss = nn.functional.cross_entropy(scores, captions[:, 1:], ignore_index=0)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        step += 1
dist.destroy_process_group()
