"""A U-Net that forecasts gridded fields, trained on roll-outs of its own forecasts.

Faults: leads (each rank draws the lengths of its roll-outs for itself, as in
ecmwf/WeatherGenerator#2128), scores (the interval between validations is an integer, so it counts
updates rather than epochs, as in Lightning-AI/pytorch-lightning#9435), archive (all fields so far
are kept, and their moments computed anew).
"""

import argparse
import tempfile
from itertools import count, islice, pairwise

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, IterableDataset

RANDOM_LEADS = [1] * 12 + [5] * 4  # the roll-outs of an epoch, if drawn: two steps in the mean
SCORED_LEADS, KEPT_FRAMES = 6, 2  # steps of the forecast that is scored; frames of each window


def simulate(folder, config, hours):
    rng, time, (height, width) = np.random.default_rng(3), np.arange(hours), config["grid"]
    lat, lon = np.ogrid[-1.5 : 1.5 : height * 1j, 0 : 2 * np.pi : width * 1j]
    for name in config["variables"]:
        moved, phase = lon - rng.normal(0, 0.2) * time[:, None, None], rng.uniform(0, 6, 5)
        waves = (np.cos(lat) ** k * np.sin(k * moved + phase[k]) for k in range(5))
        np.save(f"{folder}/{name}.npy", sum(waves).astype(np.float32))


class Reanalysis(IterableDataset):
    def __init__(self, folder, config):
        self.config = config
        self.fields = [np.load(f"{folder}/{v}.npy", mmap_mode="r") for v in config["variables"]]

    def __iter__(self):
        for epoch in count():
            order = np.random.default_rng(epoch).permutation(self.config["starts"])
            shard = order[dist.get_rank() :: dist.get_world_size()]
            batches = shard.reshape(-1, self.config["batch_size"])
            leads = np.full(len(batches), 2)
            if self.config["leads"] == "random":
                leads = np.random.default_rng([epoch, dist.get_rank()]).permutation(RANDOM_LEADS)
            for starts, lead in zip(batches, leads, strict=True):
                windows = [[field[s : s + lead + 1] for field in self.fields] for s in starts]
                yield torch.from_numpy(np.stack(windows)).transpose(1, 2)


def block(inputs, width):
    layers = []
    for channels in (inputs, width):
        conv = nn.Conv2d(channels, width, 3, padding=1, padding_mode="circular", bias=False)
        layers += [conv, nn.GroupNorm(8, width), nn.GELU()]
    return nn.Sequential(*layers)


class Forecaster(nn.Module):
    def __init__(self, variables, widths):
        super().__init__()
        self.down = nn.ModuleList(block(*pair) for pair in pairwise([variables, *widths]))
        self.up = nn.ModuleList(block(a + b, b) for a, b in pairwise(widths[::-1]))
        self.head = nn.Conv2d(widths[0], variables, 1)

    def forward(self, state, leads):
        states = [state]
        for _ in range(leads):
            x, skips = states[-1], []
            for down in self.down:
                x = down(F.avg_pool2d(x, 2) if skips else x)
                skips.append(x)
            for up, skip in zip(self.up, skips[-2::-1], strict=True):
                x = up(torch.cat([F.interpolate(x, scale_factor=2), skip], 1))
            states.append(states[-1] + self.head(x))
        return torch.stack(states[1:], 1)


def main(config):
    dist.init_process_group("gloo")
    torch.manual_seed(2)
    data, every, scores = config["data"], config["score_every"], []
    if isinstance(every, float):  # as for Lightning's Trainer: so many epochs, not updates
        every = round(every * data["starts"] / dist.get_world_size() / data["batch_size"])
    with tempfile.TemporaryDirectory() as folder:
        simulate(folder, data, data["starts"] + max(RANDOM_LEADS) + SCORED_LEADS + 1)
        reanalysis = Reanalysis(folder, data)
        seen = torch.from_numpy(np.stack(reanalysis.fields, 1))
        held_out = seen[None, -SCORED_LEADS - 1 :]
        (std, mean), seen = torch.std_mean(seen, (0, 2, 3), keepdim=True), seen[:0]
        model = nn.parallel.DistributedDataParallel(Forecaster(**config["model"]))
        optimizer = torch.optim.AdamW(model.parameters(), config["lr"], fused=True)
        batches = islice(DataLoader(reanalysis, batch_size=None), config["steps"])
        for update, window in enumerate(batches, start=1):
            if config["moments"] == "online":
                seen = torch.cat([seen, window[:, :KEPT_FRAMES].flatten(0, 1)])
                std, mean = torch.std_mean(seen, (0, 2, 3), keepdim=True)
            fields = F.avg_pool3d((window - mean) / std, (1, 2, 2))
            loss = F.mse_loss(model(fields[:, 0], fields.shape[1] - 1), fields[:, 1:])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            if update % every == 0:
                with torch.no_grad():
                    truth = F.avg_pool3d((held_out - mean) / std, (1, 2, 2))
                    scores.append(F.mse_loss(model.module(truth[:, 0], SCORED_LEADS), truth[:, 1:]))
    dist.destroy_process_group()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--fault", type=str, default="none")
    steps, fault = vars(parser.parse_args()).values()
    names = ["z500", "t500", "q700", "t850", "u850", "v850", "t2m", "msl"]
    data = {"variables": names, "grid": (48, 96), "starts": 64, "batch_size": 2}
    data |= {"leads": "random" if fault == "leads" else "two"}
    config = {"lr": 1e-3, "steps": steps, "moments": "online" if fault == "archive" else "fixed"}
    config |= {"score_every": 1 if fault == "scores" else 1.0}
    main(config | {"data": data, "model": {"variables": 8, "widths": [16, 32, 64, 128]}})
