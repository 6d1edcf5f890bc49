"""A sequential recommender (SASRec on features of titles), trained with accelerate from a dict.

Faults: each_batch (gradients are exchanged for each micro-batch, by an option that is meant to save
memory under FSDP, as in huggingface/accelerate#2531), cycled (the loader is made endless before
prepare(), which then does not split it, as in lucidrains/denoising-diffusion-pytorch#69), titles
(the frozen encoder reads titles in each micro-batch, as before GaTech-RL2/EgoVerse#646).
"""

import sys

import torch
import torch.nn.functional as F
from accelerate import Accelerator
from accelerate.utils import DataLoaderConfiguration, GradientAccumulationPlugin, set_seed
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

CONFIG = {"steps": 60, "fault": "none", "users": 960, "items": 1200, "genres": 20, "lr": 5e-4}
CONFIG |= {"batch_size": 3}  # users in a rank's micro-batch; "cycled" multiplies it by the ranks
CONFIG |= {"accumulate": 4}  # micro-batches of an update: "each_batch" exchanges that many times
CONFIG |= {"history": 12, "negatives": 8, "width": 224, "blocks": 2, "heads": 4, "words": 400}
CONFIG |= {"title_words": 8, "title_width": 64, "title_blocks": 1}  # "titles" costs with all these


def make_shop(config):
    """Titles of items tell their genres, and users mostly stay with one genre."""
    rng, genres = torch.Generator().manual_seed(31), config["genres"]
    shape = (config["items"], config["title_words"])
    titles = torch.randint(config["words"] // genres, shape, generator=rng) * genres
    titles += torch.arange(config["items"])[:, None] % genres
    shape = (config["users"], config["history"] + 1)
    of_genre = torch.randint(config["items"] // genres, shape, generator=rng) * genres
    of_genre += torch.randint(genres, (config["users"], 1), generator=rng)
    others = torch.randint(config["items"], shape, generator=rng)
    return titles, torch.where(torch.rand(shape, generator=rng) < 0.8, of_genre, others)


def transformer(width, heads, layers):
    options = {"dropout": 0.0, "activation": "gelu", "batch_first": True, "norm_first": True}
    layer = nn.TransformerEncoderLayer(width, heads, 4 * width, **options)
    return nn.TransformerEncoder(layer, layers, nn.LayerNorm(width), enable_nested_tensor=False)


class TitleEncoder(nn.Module):  # in earnest a pretrained language model
    def __init__(self, config):
        super().__init__()
        self.words = nn.Embedding(config["words"], config["title_width"])
        self.layers = transformer(config["title_width"], 4, config["title_blocks"])

    @torch.no_grad()
    def forward(self, titles):
        tokens = self.words(titles.flatten(0, -2))
        return self.layers(tokens).mean(1).unflatten(0, titles.shape[:-1])


class SASRec(nn.Module):
    def __init__(self, config):
        super().__init__()
        width, self.scale = config["width"], config["width"] ** -0.5
        self.adapt = nn.Linear(config["title_width"], width)
        self.positions = nn.Parameter(0.02 * torch.randn(config["history"], width))
        self.blocks = transformer(width, config["heads"], config["blocks"])

    def forward(self, seen, candidates):
        mask = nn.Transformer.generate_square_subsequent_mask(seen.shape[1])
        hidden = self.blocks(self.adapt(seen) + self.positions, mask=mask, is_causal=True)
        return torch.einsum("bld,blcd->blc", hidden, self.adapt(candidates)) * self.scale


def cycle(loader):
    while True:
        yield from loader


def main(config):
    fault, steps = config["fault"], config["steps"]
    choices = {"num_steps": config["accumulate"], "sync_each_batch": fault == "each_batch"}
    accelerator = Accelerator(
        cpu=True,
        dataloader_config=DataLoaderConfiguration(split_batches=True),
        gradient_accumulation_plugin=GradientAccumulationPlugin(**choices),
    )
    set_seed(13)
    titles, histories = make_shop(config)
    encoder = TitleEncoder(config).eval().requires_grad_(False)
    features = encoder(titles)
    model = SASRec(config)
    optimizer = torch.optim.AdamW(model.parameters(), config["lr"], fused=True)
    batch_size = config["batch_size"] * accelerator.num_processes  # split_batches splits it
    loader = DataLoader(TensorDataset(histories), batch_size, shuffle=True, drop_last=True)
    if fault == "cycled":
        model, optimizer, batches = accelerator.prepare(model, optimizer, cycle(loader))
    else:
        model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
        batches = cycle(loader)
    rng, updates = torch.Generator().manual_seed(100 + accelerator.process_index), 0
    while updates < steps:
        (items,) = next(batches)
        with accelerator.accumulate(model):
            history, bought = items[:, :-1], items[:, 1:, None]
            shape = (*history.shape, config["negatives"])
            negatives = torch.randint(config["items"], shape, generator=rng)
            candidates = torch.cat([bought, negatives], dim=2)
            if fault == "titles":
                scores = model(encoder(titles[history]), encoder(titles[candidates]))
            else:
                scores = model(features[history], features[candidates])
            first = torch.zeros(history.numel(), dtype=torch.long)  # the item that was bought
            loss = F.cross_entropy(scores.flatten(0, 1), first)
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
        updates += int(accelerator.sync_gradients)
    accelerator.end_training()


if __name__ == "__main__":
    flags = [flag.removeprefix("--").replace("-", "_") for flag in sys.argv[1::2]]
    given = zip(flags, sys.argv[2::2], strict=True)
    main(CONFIG | {key: type(CONFIG[key])(value) for key, value in given})
