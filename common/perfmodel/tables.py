"""Read measured tables: this project's own, and the course's CSVs as they are.

Every reader refuses a table that cannot be right with one line that names the file.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pandas as pd

from common.errors import UserError
from common.perfmodel.collectives import MeasuredAllReduce
from common.perfmodel.profile import BackwardProfile, DdpCosts

BYTES_PER_PARAMETER = 4  # gradients are float32, under autocast too


def read_table(path: Path | str, columns: Sequence[str]) -> pd.DataFrame:
    """A CSV with at least these columns and one row. Raises UserError naming what is wrong."""
    path = Path(path)
    try:
        table = pd.read_csv(path)
    except FileNotFoundError:
        raise UserError(f"{path}: no such file") from None
    except pd.errors.EmptyDataError:
        raise UserError(f"{path}: empty, without even a header") from None
    except (pd.errors.ParserError, UnicodeDecodeError, OSError) as error:
        raise UserError(f"{path}: not a CSV table ({str(error).strip()})") from None
    table.columns = [str(column).strip() for column in table.columns]
    missing = [column for column in columns if column not in table.columns]
    if missing:
        raise UserError(
            f"{path}: no column {', '.join(map(repr, missing))}; has {', '.join(table.columns)}"
        )
    if table.empty:
        raise UserError(f"{path}: no rows")
    return table


def numbers(
    table: pd.DataFrame,
    column: str,
    path: Path | str,
    *,
    above: float | None = None,
    at_least: float | None = None,
) -> pd.Series:
    """A column as finite numbers within a bound; UserError names the first row that is not."""
    values = pd.to_numeric(table[column], errors="coerce")
    bad = ~np.isfinite(values)
    bound = ""
    if above is not None:
        bad, bound = bad | ~(values > above), f" above {above:g}"
    elif at_least is not None:
        bad, bound = bad | ~(values >= at_least), f" of at least {at_least:g}"
    if bad.any():
        row = int(bad.idxmax())
        found = table[column][row]
        shown = "blank" if pd.isna(found) else f"'{found}'"
        raise UserError(
            f"{path}: line {row + 2}, column '{column}': {shown} is not a number{bound}"
        )
    return values


@dataclass(frozen=True)
class AllReduceTable:
    """A measured all-reduce curve and the number of ranks it was measured on."""

    curve: MeasuredAllReduce
    world_size: int | None
    source: str


def read_all_reduce(path: Path | str, mode: str = "sequential") -> AllReduceTable:
    """Read ``allreduce-times.csv`` (seconds) or this project's raw ``allreduce-samples.csv``.

    From raw samples a point is the median over samples of the slowest rank, in the given mode
    (``sequential``, one after another as buckets are reduced, or ``in_flight``, many at once).
    """
    table = read_table(path, [])
    if "time_ms" in table.columns:
        table = read_table(path, ["mode", "total_bytes", "rank", "time_ms", "round", "iteration"])
        for column in ("time_ms", "total_bytes"):
            table[column] = numbers(table, column, path, above=0)
        table["rank"] = numbers(table, "rank", path, at_least=0)
        chosen = table[table["mode"] == mode]
        if chosen.empty:
            raise UserError(f"{path}: no samples of mode {mode!r}; has {set(table['mode'])}")
        slowest = chosen.groupby(["total_bytes", "round", "iteration"])["time_ms"].max()
        medians = slowest.groupby("total_bytes").median()
        sizes, times = medians.index.to_numpy(float), medians.to_numpy() / 1e3
        world_size = int(table["rank"].max()) + 1
    else:
        table = read_table(path, ["world_size", "total_bytes", "average_time"])
        sizes = numbers(table, "total_bytes", path, above=0).to_numpy(float)
        times = numbers(table, "average_time", path, above=0).to_numpy(float)
        sizes_of_world = set(numbers(table, "world_size", path, above=0))
        if len(sizes_of_world) > 1:
            raise UserError(f"{path}: several world sizes {sorted(map(int, sizes_of_world))}")
        world_size = int(sizes_of_world.pop())
    try:
        return AllReduceTable(MeasuredAllReduce(sizes, times), world_size, str(path))
    except UserError as error:
        raise UserError(f"{path}: {error}") from None


def read_ready_times(path: Path | str) -> BackwardProfile:
    """The profile from raw ``gradient-ready-times.csv``: median of the slowest rank's times.

    The order is that in which gradients came on rank 0, which is the one DDP goes by
    (``ready_index``; in a table without it, the order of the times).
    """
    columns = ["rank", "iteration", "parameter", "registration_index", "dtype", "size_bytes"]
    table = read_table(path, [*columns, "ready_time_ms"])
    for column in ("ready_time_ms", "size_bytes"):
        table[column] = numbers(table, column, path, above=0)
    for column in ("registration_index", "rank"):
        table[column] = numbers(table, column, path, at_least=0).astype(int)
    if table[["parameter", "dtype"]].isna().any(axis=None):
        raise UserError(f"{path}: every row needs a parameter and a dtype")
    keys = ["parameter", "registration_index", "dtype", "size_bytes"]
    slowest = table.groupby([*keys, "iteration"], sort=False)["ready_time_ms"].max()
    medians = slowest.groupby(keys, sort=False).median().reset_index()
    medians["order"] = medians["ready_time_ms"]
    if "ready_index" in table.columns:
        table["ready_index"] = numbers(table, "ready_index", path, at_least=0)
        on_first = table[table["rank"] == 0].groupby("parameter")["ready_index"].median()
        medians["order"] = medians["parameter"].map(on_first)
    ordered = medians.sort_values("order", kind="stable")
    ready = np.maximum.accumulate(ordered["ready_time_ms"].to_numpy()) / 1e3
    return BackwardProfile(
        names=tuple(ordered["parameter"]),
        sizes_bytes=ordered["size_bytes"].to_numpy(np.int64),
        ready_s=ready,
        backward_s=float(ready[-1]),
        kinds=tuple(ordered["dtype"]),
        registration=tuple(ordered["registration_index"]),
    )


def read_costs(path: Path | str) -> DdpCosts:
    """DDP's bookkeeping and contention from raw ``overlap-times.csv``.

    - Bookkeeping is what DDP over one rank adds to the backward pass; of its copies in (with
      division) and out each is given half.
    - The computation lost to an all-reduce of some size is what paced all-reduces add to the
      backward pass, divided by their number.
    - Beside all-reduces without pause the backward pass takes t. Meanwhile they did what alone
      takes (their time alone) − (what was left of them after t); the ratio of t to that is
      communication_slowdown.

    Differences are taken within a round and their median over rounds, so that drift cancels.
    """
    columns = ["arm", "message_bytes", "messages", "round", "iteration", "backward_time_ms"]
    table = read_table(path, [*columns, "all_reduce_time_ms", "gradient_bytes"])
    for column in ("message_bytes", "messages", "backward_time_ms", "all_reduce_time_ms"):
        table[column] = numbers(table, column, path, at_least=0)
    numbers(table, "gradient_bytes", path, above=0)
    numbers(table[table["arm"] == "paced"], "messages", path, above=0)
    missing = {"local", "bookkeeping", "paced", "continuous", "all_reduce"} - set(table["arm"])
    if missing:
        raise UserError(f"{path}: no samples of {', '.join(sorted(missing))}")
    keys = ["arm", "message_bytes", "messages", "round"]
    times = ["backward_time_ms", "all_reduce_time_ms"]
    slowest = table.groupby([*keys, "iteration"])[times].max() / 1e3
    slowest.columns = ["backward_s", "all_reduce_s"]
    by_round = slowest.groupby(keys).median().reset_index()
    local = by_round[by_round["arm"] == "local"].set_index("round")["backward_s"]

    def added(arm: pd.DataFrame) -> float:
        own = arm.set_index("round")["backward_s"]
        return max(0.0, float((own - local).median()))

    bookkeeping = added(by_round[by_round["arm"] == "bookkeeping"])
    per_byte = bookkeeping / 2 / float(table["gradient_bytes"].iloc[0])
    paced = by_round[by_round["arm"] == "paced"].groupby(["message_bytes", "messages"])
    lost = sorted((size, added(rows) / count) for (size, count), rows in paced)
    sizes, seconds = zip(*lost, strict=True)
    return DdpCosts(
        copy_in_s_per_byte=per_byte,
        copy_out_s_per_byte=per_byte,
        communication_slowdown=_communication_slowdown(by_round, path),
        lost_compute=(tuple(map(float, sizes)), tuple(np.maximum.accumulate(seconds).tolist())),
    )


def _communication_slowdown(by_round: pd.DataFrame, path: Path | str) -> float:
    medians = by_round.groupby(["arm", "message_bytes"])[["backward_s", "all_reduce_s"]].median()
    slowdowns = []
    for size, both in medians.loc["continuous"].iterrows():
        if ("all_reduce", size) not in medians.index:
            raise UserError(f"{path}: no all_reduce samples of {size:.0f} bytes, as continuous has")
        alone = medians.loc[("all_reduce", size), "all_reduce_s"]
        beside = both["backward_s"]
        left = both["all_reduce_s"] - beside
        if alone > left:
            slowdowns.append(max(1.0, beside / (alone - left)))
    return float(np.median(slowdowns or [1.0]))


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
    """Read ``layer-sizes.csv`` and ``layer-times.csv`` in the course's columns.

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
    """One name for a layer, whichever table it stands in: ``Block 0`` and ``block_0 grad``."""
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
    """A per-parameter profile from layer tables, with the assumptions this takes.

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
        weights = np.array([size if size > 4 * width else 0 for _, size in parts], dtype=float)
        if not weights.any():
            weights = np.ones(len(parts))
        for (part, size), done in zip(parts, np.cumsum(weights) / weights.sum(), strict=True):
            names.append(f"{layer}.{part}".replace("block ", "blocks."))
            sizes.append(size * BYTES_PER_PARAMETER)
            ready.append(now + duration * float(done))
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
    """Parameters of a GPT-2 block of width d, in gradient-ready order."""
    return [
        *(("mlp.c_proj.bias", d), ("mlp.c_proj.weight", 4 * d * d)),
        *(("mlp.c_fc.bias", 4 * d), ("mlp.c_fc.weight", 4 * d * d)),
        *(("ln_2.weight", d), ("ln_2.bias", d)),
        *(("attn.c_proj.bias", d), ("attn.c_proj.weight", d * d)),
        *(("attn.c_attn.bias", 3 * d), ("attn.c_attn.weight", 3 * d * d)),
        *(("ln_1.weight", d), ("ln_1.bias", d)),
    ]


def _registration(names: list[str]) -> tuple[int, ...]:
    """Places in ``GPT2.parameters()``: wte, wpe, blocks, ln_f; in a block ln_1, attn, ln_2, mlp."""
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
