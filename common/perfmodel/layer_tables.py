"""The course's ``layer-sizes.csv`` and ``layer-times.csv``, and the profile they make.

The two tables are matched by meaning (``Block 0`` and ``block_0 grad``); DDP buckets parameters,
so a layer's time is shared out over its tensors.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pandas as pd

from common.csv_tables import numbers, read_table
from common.errors import UserError
from common.perfmodel.ddp.profile import BackwardProfile

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


def read_layer_tables(sizes_path: Path | str, times_path: Path | str) -> LayerTables:
    """Reads ``layer-sizes.csv`` and ``layer-times.csv`` in the course's columns.

    Raises UserError where a layer of one table is not in the other.
    """
    size_table = read_table(sizes_path, ["Name", "No. Params"])
    time_table = read_table(times_path, ["Name", "median"])
    counts = numbers(size_table, "No. Params", sizes_path, above=0).astype(int)
    medians = numbers(time_table, "median", times_path, at_least=0)
    sizes = _by_layer(size_table["Name"], counts, sizes_path)
    times = _by_layer(time_table["Name"], medians, times_path)
    notes = _check_rows(sizes, times, sizes_path, times_path)
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
        source=str(sizes_path),
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


def _check_rows(sizes: dict, times: dict, sizes_path, times_path) -> list[str]:
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
    """Makes a per-parameter profile from layer tables, with the assumptions this takes.

    DDP buckets parameters, not layers. A block of GPT-2 of width d has 12d² + 13d parameters; its
    tensors are laid out in their order of readiness, and the layer's time is shared out by their
    matrix products (the MLP and attention matrices by their sizes). The tied embedding is last.
    """
    width = next(count for name, count, _ in tables.layers if name == "ln_f") // 2
    names: list[str] = []
    sizes: list[int] = []
    ready: list[float] = []
    now = tables.lm_head_s
    for layer, count, duration in reversed(tables.layers):
        parts = [("weight", width), ("bias", width)] if layer == "ln_f" else _block_parts(width)
        if sum(size for _, size in parts) != count:
            raise UserError(
                f"{tables.source}: {layer} has {count:,} parameters; a GPT-2 of width {width} has "
                f"{sum(size for _, size in parts):,} there"
            )
        # Only matrices take a part of the layer's time, by their size: a bias has at most 4 · width
        # elements. A layer without a matrix (ln_f) shares its time out evenly.
        weights = np.array([size if size > 4 * width else 0 for _, size in parts], dtype=float)
        if not weights.any():
            weights = np.ones(len(parts))
        for (part, size), share in zip(parts, np.cumsum(weights) / weights.sum(), strict=True):
            names.append(f"{layer}.{part}".replace("block ", "blocks."))
            sizes.append(size * BYTES_PER_PARAMETER)
            ready.append(now + duration * float(share))
        now += duration
    end = now + tables.embedding_s
    for name, count in (("wpe", tables.position_parameters), ("wte", tables.embedding_parameters)):
        if count:
            names.append(f"{name}.weight")
            sizes.append(count * BYTES_PER_PARAMETER)
            ready.append(end)
    assumptions = [
        "inside a block, time is shared out over its matrices by their size",
        "the tied embedding's gradient is final when the backward pass ends",
    ]
    if not tables.embedding_s:
        assumptions.append(
            "the embeddings' own gradient takes no time (the tables have no row for it; the LM "
            "head's share of the tied weight is in its row)"
        )
    return BackwardProfile(
        tuple(names),
        np.array(sizes, dtype=np.int64),
        np.array(ready),
        end,
        kinds=("float32",) * len(names),
        registration=_registration(names),
        assumptions=tuple(assumptions),
    )


def _block_parts(d: int) -> list[tuple[str, int]]:
    """Returns (name, elements) of a GPT-2 block of width d, in gradient-ready order."""
    return [
        ("mlp.c_proj.bias", d),
        ("mlp.c_proj.weight", 4 * d * d),
        ("mlp.c_fc.bias", 4 * d),
        ("mlp.c_fc.weight", 4 * d * d),
        ("ln_2.weight", d),
        ("ln_2.bias", d),
        ("attn.c_proj.bias", d),
        ("attn.c_proj.weight", d * d),
        ("attn.c_attn.bias", 3 * d),
        ("attn.c_attn.weight", 3 * d * d),
        ("ln_1.weight", d),
        ("ln_1.bias", d),
    ]


def _registration(names: list[str]) -> tuple[int, ...]:
    """Returns each parameter's place in ``GPT2.parameters()``.

    The order there: wte, wpe, blocks, ln_f; in a block ln_1, attn, ln_2, mlp.
    """
    inner = ["ln_1", "attn.c_attn", "attn.c_proj", "ln_2", "mlp.c_fc", "mlp.c_proj"]

    def place(name: str) -> tuple:
        module, kind = name.rsplit(".", 1)
        is_bias = kind == "bias"
        if module in ("wte", "wpe"):
            return (0, 0 if module == "wte" else 1, 0, is_bias)
        if module == "ln_f":
            return (2, 0, 0, is_bias)
        _, index, part = module.split(".", 2)
        return (1, int(index), inner.index(part), is_bias)

    order = sorted(range(len(names)), key=lambda i: place(names[i]))
    places = [0] * len(names)
    for position, index in enumerate(order):
        places[index] = position
    return tuple(places)
