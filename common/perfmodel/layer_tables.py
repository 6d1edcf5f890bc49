"""The course's ``layer-sizes.csv`` and ``layer-times.csv``, and the profile they make.

The two tables are matched by meaning (``Block 0`` and ``block_0 grad``); DDP buckets parameters,
so a layer's time is shared out over its tensors.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from common.csv_tables import numbers, read_table
from common.errors import UserError
from common.perfmodel.architectures.architecture import Layer
from common.perfmodel.ddp.profile import BackwardProfile
from common.perfmodel.one_device.architecture import GPT2Config

BYTES_PER_PARAMETER = 4  # gradients are float32, under autocast too


@dataclass(frozen=True)
class LayerTables:
    """The course's two layer tables, matched by meaning.

    ``layers`` in order of the model: name, parameters, time of the gradient in seconds (the
    median); ``notes`` say what was found wrong with the tables and how it was read.
    """

    layers: tuple[tuple[str, int, float], ...]
    embedding_parameters: int
    position_parameters: int
    lm_head_s: float
    embedding_s: float
    forward_s: float | None
    step_s: float | None
    notes: tuple[str, ...]
    source: str


def read_layer_tables(parameter_counts_path: Path | str, times_path: Path | str) -> LayerTables:
    """Reads each layer's parameters and median seconds from two tables in the course's columns.

    They are ``layer-sizes.csv`` (numbers of parameters) and ``layer-times.csv`` (seconds).

    Raises UserError where a layer of one table is not in the other.
    """
    size_table = read_table(parameter_counts_path, ["Name", "No. Params"])
    time_table = read_table(times_path, ["Name", "median"])
    counts = numbers(size_table, "No. Params", parameter_counts_path, above=0).astype(int)
    medians = numbers(time_table, "median", times_path, at_least=0)
    sizes = _by_layer(size_table["Name"], counts, parameter_counts_path)
    times = _by_layer(time_table["Name"], medians, times_path)
    notes = _check_rows(sizes, times, parameter_counts_path, times_path)
    blocks = sorted((k for k in sizes if k.startswith("block ")), key=lambda k: int(k[6:]))
    layers = [(name, int(sizes[name]), float(times[name])) for name in blocks]
    layers.append(("ln_f", int(sizes["ln_f"]), float(times["ln_f"])))
    return LayerTables(
        layers=tuple(layers),
        embedding_parameters=int(sizes["token embedding"]),
        position_parameters=int(sizes.get("position embedding", 0)),
        lm_head_s=float(times["lm_head"]),
        embedding_s=float(times.get("embedding", 0.0)),
        forward_s=times.get("forward"),
        step_s=times.get("step"),
        notes=tuple(notes),
        source=str(parameter_counts_path),
    )


def _by_layer(names: pd.Series, values: pd.Series, path: Path | str) -> dict:
    keys = [layer_key(name) for name in names]
    twice = sorted({key for key in keys if keys.count(key) > 1})
    if twice:
        raise UserError(f"{path}: {', '.join(twice)} is listed more than once")
    return dict(zip(keys, values, strict=True))


def layer_key(name: str) -> str:
    """Returns one name for a layer as any table calls it: ``Block 0`` and ``block_0 grad``."""
    text = str(name).strip().lower().removesuffix(" grad").replace("_", " ")
    block = re.fullmatch(r"(?:transformer )?(?:block|h|layer)[ .]?(\d+)", text)
    if block:
        return f"block {int(block[1])}"
    return {
        "lm head": "lm_head",
        "ln f": "ln_f",
        "layernorm final": "ln_f",
        "final layernorm": "ln_f",
        "wte": "token embedding",
        "wpe": "position embedding",
    }.get(text, text)


def _check_rows(sizes: dict, times: dict, sizes_path: Path | str, times_path: Path | str) -> list:
    notes = []
    for needed in ("token embedding", "ln_f"):
        if needed not in sizes:
            raise UserError(f"{sizes_path}: no row for the {needed}; has {', '.join(sizes)}")
    for needed in ("lm_head", "ln_f"):
        if needed not in times:
            raise UserError(f"{times_path}: no row {needed + ' grad'!r}")
    in_sizes = {name for name in sizes if name.startswith("block ")}
    in_times = {name for name in times if name.startswith("block ")}
    if in_sizes != in_times or not in_sizes:
        only = sorted(in_sizes ^ in_times) or ["no block at all"]
        raise UserError(
            f"rows do not match: {', '.join(only[:4])} in only one of {sizes_path} and {times_path}"
        )
    if "position embedding" not in sizes:
        notes.append(f"{sizes_path}: no row for the position embedding; taken as 0 parameters")
    if "lm_head" in sizes:
        if sizes["lm_head"] != sizes["token embedding"]:
            raise UserError(
                f"{sizes_path}: LM head has {sizes['lm_head']:,} parameters, the token embedding "
                f"{sizes['token embedding']:,}: untied models are not known here"
            )
        notes.append(
            f"{sizes_path}: LM head and token embedding are one tied weight of "
            f"{sizes['lm_head']:,} parameters, listed twice; it is counted once"
        )
    layer_sum = sum(v for k, v in times.items() if k not in ("backward", "forward", "step"))
    if "backward" in times and times["backward"] < 0.5 * layer_sum:
        notes.append(
            f"{times_path}: the row 'backward' ({times['backward'] * 1e6:.1f} µs) is no backward "
            f"time, the layers add up to {layer_sum * 1e3:.1f} ms; it is ignored"
        )
    return notes


def profile_from_layers(tables: LayerTables) -> BackwardProfile:
    """Makes a per-parameter profile of a GPT-2 from layer tables, with the assumptions this takes.

    DDP buckets parameters, not layers, so a block of width d is laid out in its 12d² + 13d
    parameters. The tied embedding is last.

    Raises UserError for a layer whose number of parameters is not that of a GPT-2's.
    """
    width = next(count for name, count, _ in tables.layers if name == "ln_f") // 2
    if width < 1:
        raise UserError(f"{tables.source}: ln_f has 1 parameter; a norm of width d has 2d")
    sizes = GPT2Config(
        vocab_size=tables.embedding_parameters // width,
        n_positions=max(1, tables.position_parameters // width),
        n_layer=len(tables.layers) - 1,
        n_head=1,
        n_embd=width,
    )
    embedding, *layers, head = sizes.architecture(seq_len=1).one_by_one()
    if not tables.position_parameters:
        embedding = replace(embedding, tensors=embedding.tensors[:1], forward_modules=())
    timed = [(embedding, tables.embedding_s)]
    for layer, (name, count, duration_s) in zip(layers, tables.layers, strict=True):
        if layer.elements != count:
            raise UserError(
                f"{tables.source}: {name} has {count:,} parameters; a GPT-2 of width {width} has "
                f"{layer.elements:,} there"
            )
        timed.append((layer, duration_s))
    profile = profile_of_layers([*timed, (head, tables.lm_head_s)])
    if tables.embedding_s:
        return profile
    no_row = (
        "the embeddings' own gradient takes no time (the tables have no row for it; the LM head's "
        "share of the tied weight is in its row)"
    )
    return replace(profile, assumptions=(*profile.assumptions, no_row))


def profile_of_layers(timed: Sequence[tuple[Layer, float]]) -> BackwardProfile:
    """Makes a per-parameter profile of (layer, seconds of its backward pass) in forward order.

    The parameters are taken to be registered in that order.
    """
    names: list[str] = []
    sizes: list[int] = []
    ready: list[float] = []
    places: list[int] = []
    now = 0.0
    first = sum(len(layer.tensors) for layer, _ in timed)
    blocks = sum(layer.is_block for layer, _ in timed)
    for layer, duration_s in reversed(timed):
        first -= len(layer.tensors)
        blocks -= layer.is_block
        for index, share in zip(layer.ready_places(), _shares(layer), strict=True):
            tensor = layer.tensors[index]
            names.append(f"blocks.{blocks}.{tensor.name}" if layer.is_block else tensor.name)
            sizes.append(tensor.elements * BYTES_PER_PARAMETER)
            ready.append(now + duration_s * share)
            places.append(first + index)
        now += duration_s
    return BackwardProfile(
        tuple(names),
        np.array(sizes, dtype=np.int64),
        np.array(ready),
        now,
        kinds=("float32",) * len(names),
        registration=tuple(places),
        assumptions=(
            "inside a block, time is shared out over its matrices by their size",
            "the tied embedding's gradient is final when the backward pass ends",
        ),
    )


def _shares(layer: Layer) -> NDArray:
    """Returns the share of a layer's time after which each of its gradients is ready.

    Matrices take parts by size, vectors alone equal ones; gradients of look-ups are ready together.
    """
    tensors = [layer.tensors[index] for index in layer.ready_places()]
    matrices = [tensor.elements if len(tensor.shape) > 1 else 0 for tensor in tensors]
    if not any(matrices):
        return np.arange(1, len(tensors) + 1) / max(1, len(tensors))
    if not layer.forward_flops:
        return np.ones(len(tensors))
    return np.cumsum(matrices) / sum(matrices)
