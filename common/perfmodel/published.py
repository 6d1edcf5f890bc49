"""Published measurements under ``data/``, each with its source, hardware, date and caveats."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import yaml
from numpy.typing import NDArray

from common.csv_tables import numbers, read_table
from common.errors import UserError
from common.perfmodel.collectives import MeasuredAllReduce
from common.perfmodel.ddp.profile import BackwardProfile
from common.perfmodel.layer_tables import LayerTables, profile_from_layers

DATA = Path(__file__).resolve().parents[2] / "data"
UMD_A100 = "umd-2x4-a100"
"""Published: gpt2-large on 2 × 4 A100."""
LAYERS = "layers.csv"
"""The table that a recorded system has, and other recordings have not."""


@dataclass(frozen=True)
class RecordedSystem:
    """A published system: its model's gradients, its network, and where they come from."""

    name: str
    profile: BackwardProfile
    all_reduce: MeasuredAllReduce
    all_reduce_std_s: NDArray
    world_size: int
    settings: dict
    caption: str
    caveats: tuple[str, ...]


def load_recorded(name: str, folder: Path = DATA) -> RecordedSystem:
    """Loads ``data/<name>``. Raises UserError where there is no such recording."""
    path = folder / name
    if not (path / LAYERS).is_file():
        names = sorted(table.parent.name for table in folder.glob(f"*/{LAYERS}"))
        raise UserError(f"no recorded system {name!r}; known: {', '.join(names)}")
    source = yaml.safe_load((path / "source.yaml").read_text())
    curve = read_table(path / "all-reduce.csv", ["size_bytes", "time_mean_ms", "time_std_ms"])
    times = numbers(curve, "time_mean_ms", path / "all-reduce.csv", above=0) / 1e3
    return RecordedSystem(
        name=name,
        profile=profile_from_layers(_layer_tables(path)),
        all_reduce=MeasuredAllReduce(curve["size_bytes"], times),
        all_reduce_std_s=curve["time_std_ms"].to_numpy() / 1e3,
        world_size=source["settings"]["world_size"],
        settings=source["settings"],
        caption=f"{source['hardware']}; {source['date']}; recorded: {source['source']}",
        caveats=tuple(source["caveats"]),
    )


def _layer_tables(path: Path) -> LayerTables:
    columns = ["layer", "parameters", "gradient_time_median_ms"]
    table = read_table(path / LAYERS, columns).set_index("layer")
    times_s = table["gradient_time_median_ms"] / 1e3
    layers = [name for name in table.index if name.startswith("block_")] + ["ln_f"]
    phases = read_table(path / "phases.csv", ["phase", "time_median_ms"]).set_index("phase")
    return LayerTables(
        layers=tuple(
            (name.replace("_", " ") if name != "ln_f" else name, int(count), float(times_s[name]))
            for name, count in table["parameters"][layers].items()
        ),
        embedding_parameters=int(table["parameters"]["token_embedding"]),
        position_parameters=int(table["parameters"]["position_embedding"]),
        lm_head_s=float(times_s["lm_head"]),
        embedding_s=0.0,
        forward_s=float(phases["time_median_ms"]["forward"]) / 1e3,
        step_s=float(phases["time_median_ms"]["step"]) / 1e3,
        notes=(),
        source=str(path / "layers.csv"),
    )
