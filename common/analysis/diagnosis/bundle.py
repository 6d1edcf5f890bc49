"""Bundles of ``ddplab-watch``: what its ranks wrote, made into the tables of a run directory.

From there on a watched script is a run like any of this project's: ``evidence`` opens it and every
cause is judged from the same columns. Rows that a rank did not write before it ended are missing,
and steps that not all ranks have are left out.
"""

from __future__ import annotations

import json
import tarfile
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from tempfile import mkdtemp

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from common import tables
from common.analysis.diagnosis.evidence import (
    ARMS,
    BESIDE,
    BUCKETS,
    COSTS,
    FACTS,
    HOST_WAITS,
    PLACEMENT,
    PROBES,
    READY_TIMES,
    SAMPLES,
    STACKS,
    STALLS,
    STEPS,
    SURROUNDINGS,
    TRACE_OPERATIONS,
    TRACE_STEPS,
    TRIALS,
)
from common.analysis.diagnosis.left_behind import read_traces
from common.analysis.diagnosis.measured_step import WIRES
from common.errors import UserError
from common.runtime.network import describe_network
from common.runtime.run_directory import write_atomically
from common.runtime.samples import sample_rows

FORMAT = 1
"""The newest format that is known here (``ddplab_watch.record.FORMAT``)."""
TABLES_FOLDER = "tables"
HOOKS = {"fp16_compress_hook": "fp16", "bf16_compress_hook": "bf16"}
"""Communication hooks of PyTorch that compress, and what this project calls them."""


@dataclass(frozen=True, eq=False)
class Bundle:
    """Holds the records that the ranks of a watched script wrote.

    Attributes:
        folder: where their files lie.
        about: a row per rank: who it was.
        rows: by table, the rows of all ranks with a column ``rank``.
        notes: what is not in it, in sentences.
    """

    folder: Path
    about: pd.DataFrame
    rows: Mapping[str, pd.DataFrame]
    notes: tuple[str, ...]

    def of(self, table: str) -> pd.DataFrame:
        """Returns the rows of a table; an empty one where no rank wrote any."""
        return self.rows.get(table, pd.DataFrame({"rank": []}))

    @property
    def script(self) -> str:
        """Returns the name of what was run."""
        return Path(str(self.about["command"].iloc[0][0])).name

    @property
    def world_size(self) -> int:
        """Returns the number of ranks of the job."""
        return int(self.about["world_size"].max())


def is_bundle(path: Path) -> bool:
    """Returns True for a folder with a rank's file in it, or a packed one."""
    return path.name.endswith(".tar.gz") or any(path.glob("rank*.jsonl"))


def read_bundle(path: Path | str) -> Bundle:
    """Reads a bundle: a folder, or one that was packed as ``.tar.gz``.

    Raises:
        UserError: it is none, it is from a later version, or no rank has written a step.
    """
    folder = _unpacked(Path(path)) if str(path).endswith(".tar.gz") else Path(path)
    files = sorted(folder.glob("rank*.jsonl"), key=lambda file: int(file.stem.removeprefix("rank")))
    if not files:
        raise UserError(f"{path}: no bundle; it has no rank0.jsonl")
    notes: list[str] = []
    by_table: dict[str, list[dict]] = {}
    for file in files:
        for row in _lines(file, notes):
            by_table.setdefault(row.pop("table"), []).append(
                {"rank": int(file.stem.removeprefix("rank"))} | row
            )
    if "about" not in by_table:
        raise UserError(f"{path}: no rank says who it was; the files were cut off at their start")
    about = pd.DataFrame(by_table.pop("about"))
    if (newest := int(about["format"].max())) > FORMAT:
        raise UserError(
            f"{path}: of format {newest}, written by ddplab-watch {about['version'].max()}; this "
            f"ddplab reads formats up to {FORMAT}: take a newer one"
        )
    rows = {name: pd.DataFrame(found) for name, found in by_table.items()}
    if "steps" not in rows:
        raise UserError(f"{path}: no step was seen; {_why_none(rows)}")
    traces = read_traces(sorted(folder.glob("rank*-trace.json.gz")))
    rows |= {"trace-steps": traces.steps, "trace-operations": traces.operations}
    bundle = Bundle(folder, about, rows, ())
    return Bundle(folder, about, rows, (*notes, *traces.notes, *_notes(bundle)))


def _unpacked(path: Path) -> Path:
    try:
        with tarfile.open(path) as archive:
            into = Path(mkdtemp(prefix="ddplab-bundle-"))
            archive.extractall(into, filter="data")
    except (OSError, tarfile.TarError, EOFError) as error:
        # tarfile tells, line by line, of each way that it tried.
        why = (str(error).splitlines() or [type(error).__name__])[0]
        raise UserError(f"{path}: cannot be unpacked ({why})") from None
    found = next(into.rglob("rank*.jsonl"), None)
    return found.parent if found else into


def _lines(file: Path, notes: list[str]) -> list[dict]:
    """Reads a rank's rows; a last line that was cut off is left out, and noted."""
    rows = []
    try:
        text = file.read_text(encoding="utf-8", errors="replace")
    except OSError as error:
        raise UserError(f"{file}: {error.strerror}") from None
    for number, line in enumerate(text.splitlines(), 1):
        try:
            row = json.loads(line)
            rows.append({"table": str(row["table"])} | row)
        except (ValueError, TypeError, KeyError):
            notes.append(f"{file.name}: line {number} cannot be read; it was cut off.")
    return rows


def _why_none(rows: Mapping[str, pd.DataFrame]) -> str:
    for table in ("unseen", "end"):
        if table in rows:
            return f"the ranks say: {rows[table].iloc[0].drop('rank').to_dict()}"
    return "the script ended, or is still in its first steps"


def _notes(bundle: Bundle) -> list[str]:
    """Returns what is missing: ranks, what could not be seen, and how the watch ended."""
    notes = []
    ranks = set(bundle.about["rank"])
    if missing := sorted(set(range(bundle.world_size)) - ranks):
        notes.append(
            f"Of {bundle.world_size} ranks there is no record of {', '.join(map(str, missing))}: "
            "on other hosts, or ended before their first step."
        )
    unseen = bundle.of("unseen")
    if len(unseen):
        for (what, why), rows in unseen.groupby(["what", "why"]):
            notes.append(f"Not seen on {_ranks(rows['rank'])}: {what} ({why}).")
    ended = set(bundle.of("end")["rank"])
    if cut := sorted(ranks - ended):
        notes.append(f"The record of {_ranks(cut)} breaks off: it was killed, or it still runs.")
    elif (bundle.of("end")["status"] == "ended").any():
        notes.append("The script ended before the watch did: fewer steps than asked for.")
    elif (bundle.of("end")["status"] == "interrupted").any():
        notes.append("The script ended by an exception, or by Ctrl-C, before the watch did.")
    return notes


def _ranks(ranks: object) -> str:
    found = sorted(set(map(int, ranks)))
    return f"rank{'s' if len(found) > 1 else ''} {', '.join(map(str, found))}"


def tables_of(bundle: Bundle) -> dict[str, pd.DataFrame]:
    """Makes the tables of a run directory, by file name, with the columns of ``common.tables``."""
    steps = _steps(bundle)
    found = {
        ARMS: _arms(bundle, steps),
        STEPS: steps,
        FACTS: _facts(bundle),
        PLACEMENT: bundle.of("placement"),
        SAMPLES: _samples(bundle),
        BUCKETS: _buckets(bundle),
        PROBES: _probes(bundle, steps),
        COSTS: bundle.of("costs"),
        READY_TIMES: bundle.of("gradient-ready-times"),
        **{name: bundle.of(name.removesuffix(".csv")) for name in WIRES.values()},
        STACKS: bundle.of("stacks"),
        STALLS: _stalls(bundle),
        HOST_WAITS: bundle.of("host-waits"),
        BESIDE: bundle.of("passes-beside"),
        TRACE_STEPS: bundle.of("trace-steps"),
        TRACE_OPERATIONS: bundle.of("trace-operations"),
        SURROUNDINGS: bundle.of("surroundings"),
        TRIALS: bundle.of("trials"),
    }
    return {name: table for name, table in found.items() if len(table)}


def _with_keys(table: pd.DataFrame) -> pd.DataFrame:
    return table.assign(arm=0, round=0) if len(table) else table


def _buckets(bundle: Bundle) -> pd.DataFrame:
    """Makes ``buckets.csv``: those of a step's last backward pass, numbered from 0.

    Times count from the start of that pass. Where earlier micro-batches exchanged gradients, too,
    their buckets were ready before it.
    """
    buckets = _with_keys(bundle.of("buckets"))
    if buckets.empty:
        return buckets
    last = buckets[buckets["ready_time_ms"] >= 0].sort_values(["rank", "step", "bucket"])
    return last.assign(bucket=last.groupby(["rank", "step"]).cumcount())


def _steps(bundle: Bundle) -> pd.DataFrame:
    """Makes ``steps.csv``: those that all ranks have, the exchange divided as in a benchmark.

    The rank that comes last waits for nobody: the shortest exchange of a step is communication, and
    what the others took longer was waiting.
    """
    steps = _with_keys(bundle.of("steps"))
    complete = steps.groupby("step")["rank"].transform("nunique") == steps["rank"].nunique()
    steps = steps[complete].sort_values(["rank", "step"])
    if steps.empty:
        raise UserError(f"{bundle.folder}: no step is in the records of all ranks")
    if "between_time_ms" not in steps:  # of an earlier watch
        steps["between_time_ms"] = (
            steps["began_s"] - steps.groupby("rank")["ended_s"].shift()
        ) * 1e3
    steps["between_time_ms"] = pd.to_numeric(steps["between_time_ms"]).clip(lower=0)
    exchange = pd.to_numeric(steps["exchange_time_ms"])
    steps["communication_time_ms"] = exchange.groupby(steps["step"]).transform("min")
    steps["waiting_time_ms"] = exchange - steps["communication_time_ms"]
    waited_ms = _waited_before_forward(steps)
    steps["data_time_ms"] -= waited_ms
    steps["waiting_time_ms"] += waited_ms
    # Without buckets it is not known what of a backward pass was exchange.
    steps["whole_backward_time_ms"] = steps["backward_time_ms"] + exchange.fillna(0)
    steps["backward_time_ms"] = steps["backward_time_ms"].where(exchange.notna())
    # The epoch of a step is the ranks' last: one that is ahead has begun a new one.
    steps["epoch"] = steps.groupby("step")["epoch"].transform("max")
    extra = [column for column in steps if column not in tables.STEP_COLUMNS]
    return steps[[*tables.STEP_COLUMNS, *extra]].drop(columns=["began_s", "ended_s"])


def _waited_before_forward(steps: pd.DataFrame) -> pd.Series:
    """Computes the ms of ``data_time_ms`` in which a rank waited for one that was late.

    Between fetching a batch and the forward pass a program may call a collective, as Hugging Face's
    Trainer does to count tokens. There a rank waits for the one that came last: through its update,
    what follows that, and its own fetch. So what it takes longer there than the quickest rank is
    waiting, as far as another rank was late by that much.
    """
    if "fetch_time_ms" not in steps:
        return pd.Series(0.0, steps.index)
    by_rank, by_step = steps.groupby("rank"), steps["step"]
    fetch_ms = pd.to_numeric(steps["fetch_time_ms"])
    late_ms = by_rank["optimizer_time_ms"].shift() + steps["between_time_ms"] + fetch_ms
    behind_ms = late_ms.groupby(by_step).transform("max") - late_ms
    after_ms = (steps["data_time_ms"] - fetch_ms).clip(lower=0)
    longer_ms = after_ms - after_ms.groupby(by_step).transform("min")
    return np.minimum(longer_ms, behind_ms).fillna(0.0).clip(lower=0)


def _arms(bundle: Bundle, steps: pd.DataFrame) -> pd.DataFrame:
    """Makes the only row of ``arms.csv``, from what was seen of the steps."""
    measured = steps[~steps["warmup"]] if (~steps["warmup"]).any() else steps
    passes = max(1, int(measured["micro_batches"].median()))
    batch = int((measured["samples"] / measured["micro_batches"].clip(lower=1)).median())
    facts = _facts(bundle)
    hook = str(facts["comm_hook"].iloc[0]) if "comm_hook" in facts else ""
    cap = facts["bucket_cap_mb"].iloc[0] if "bucket_cap_mb" in facts else None
    row = {
        "arm": 0,
        "regime": "",
        "world_size": bundle.world_size,
        "batch_per_rank": batch,
        "global_batch": bundle.world_size * passes * batch,
        "accumulation": passes,
        "compression": HOOKS.get(hook, "none"),
        "bucket_cap_mb": cap,
        "precision": str(facts["compute_dtype"].iloc[0]) if len(facts) else "",
        "change": "none",
    }
    return pd.DataFrame([row])[list(tables.ARM_COLUMNS)]


def _facts(bundle: Bundle) -> pd.DataFrame:
    """Makes ``facts.csv``; the watch does not look at the shape of a sample."""
    facts = bundle.of("facts")
    return facts.assign(input_shape="") if len(facts) else facts


def _probes(bundle: Bundle, steps: pd.DataFrame) -> pd.DataFrame:
    """Makes ``probes.csv``. The update is the step's own: the probes leave the weights alone."""
    probes = bundle.of("probes")
    if probes.empty:
        return probes
    update_ms = steps.groupby("rank")["optimizer_time_ms"].median()
    return probes.assign(arm=0, optimizer_time_ms=probes["rank"].map(update_ms))


def _samples(bundle: Bundle) -> pd.DataFrame:
    """Makes ``samples.csv``: of each epoch, which samples reached which rank."""
    identities, facts = bundle.of("identities"), bundle.of("facts")
    known = pd.to_numeric(facts["data_samples"], errors="coerce") if len(facts) else pd.Series([])
    size = int(known.max()) if known.notna().any() else None
    if identities.empty:
        return pd.DataFrame()
    by_epoch: dict[int, list[NDArray]] = {}
    for epoch, group in identities.groupby("epoch"):
        if group["rank"].nunique() == bundle.about["rank"].nunique():
            by_rank = {int(row["rank"]): np.array(row["samples"]) for _, row in group.iterrows()}
            by_epoch[int(epoch)] = [by_rank[rank] for rank in sorted(by_rank)]
    orders = _orders(by_epoch)
    rows = [
        row | {"order": orders.get((epoch, row["rank"]))}
        for epoch, everyone in by_epoch.items()
        for row in sample_rows(everyone, arm=0, epoch=epoch, data_samples=size)
    ]
    is_hashed = "is_hashed" in identities and identities["is_hashed"].fillna(False).any()
    return pd.DataFrame(rows).assign(is_hashed=bool(is_hashed))


def _orders(by_epoch: dict[int, list[NDArray]]) -> dict[tuple[int, int], str]:
    """Returns a checksum of each rank's order in an epoch, by (epoch, rank).

    The window begins in the middle of its first epoch, and ends in that of its last. So the first
    has none, and the others' are of as many samples as each of them has. Samples in ascending order
    were not to be shuffled: they have none.
    """
    orders: dict[tuple[int, int], str] = {}
    for rank in range(max(map(len, by_epoch.values()), default=0)):
        begun = {epoch: by_epoch[epoch][rank] for epoch in sorted(by_epoch)[1:]}
        length = min(map(len, begun.values()), default=0)
        for epoch, ids in begun.items():
            if length > 1 and not (np.diff(ids[:length]) > 0).all():
                orders[epoch, rank] = f"{zlib.crc32(ids[:length].tobytes()):08x}"
    return orders


def _stalls(bundle: Bundle) -> pd.DataFrame:
    """Makes ``stalls.csv``: steps that did not end for long, with the stack of then."""
    stalled = bundle.of("stalled")
    if stalled.empty:
        return stalled
    resumed, end = bundle.of("resumed"), bundle.of("end")
    last = resumed.groupby("rank")["step"].max().to_dict() if len(resumed) else {}
    # A script that came to its own end did go on, if only to what follows its last step.
    over = set(end.loc[end["status"] != "interrupted", "rank"]) if len(end) else set()
    return stalled.assign(
        stack=["\n".join(lines) for lines in stalled["stack"]],
        resumed=[
            rank in over or last.get(rank, -1) > step
            for rank, step in zip(stalled["rank"], stalled["step"], strict=True)
        ],
    )


def write_run(bundle: Bundle, folder: Path) -> Path:
    """Writes the tables into a run directory; returns it.

    Raises:
        UserError: the folder cannot be written.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for name, table in tables_of(bundle).items():
            write_atomically(folder / name, table.to_csv(index=False))
        record = json.dumps(_environment(bundle), indent=1)
        write_atomically(folder / "environment.json", record)
    except OSError as error:
        raise UserError(f"{folder}: {error.strerror}; the bundle's tables go there") from None
    return folder


def _environment(bundle: Bundle) -> dict[str, object]:
    """Returns the environment record: what the ranks wrote of theirs, in this project's words."""
    about, first = bundle.about, bundle.about.iloc[0]
    hosts = about.groupby("host").size().tolist()
    network = describe_network(first["backend"], hosts, env=first["variables"])
    device = first["device_name"] or f"{first['cpu']} CPU"
    where = [f"{bundle.world_size} ranks", network or "", device]
    return {
        "status": "complete",
        "label": "watch",
        "start_time": str(first["started"]),
        "end_time": None,
        "host": first["host"],
        "pid": int(first["process"]),
        "command": first["command"],
        "packages": {"torch": first["torch"]},
        "python": first["python"],
        "backend": first["backend"],
        "device": first["device"],
        "device_name": device,
        "network": network,
        "world_size": bundle.world_size,
        "hosts": len(hosts),
        "hardware": ", ".join(part for part in where if part),
        "variables": first["variables"],
    }
