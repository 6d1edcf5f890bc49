"""The tables of a run directory, made from what the ranks of a watched script wrote.

From there on a watched script is a run like any of this project's: ``evidence`` opens it and every
cause is judged from the same columns. Steps that not all ranks have are left out.
"""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pandas as pd

from common import tables
from common.analysis.step_parts import PLAIN, flags
from common.diagnose.evidence.bundle import Bundle
from common.diagnose.evidence.bundle_samples import samples_of
from common.diagnose.evidence.evidence import (
    ARMS,
    BUCKETS,
    COLUMNS,
    ELEMENTS,
    EXCHANGING,
    FACTS,
    PROBES,
    READY_TIMES,
    SAMPLES,
    STALLS,
    STEPS,
    SURROUNDING_COLUMNS,
    SURROUNDINGS,
)
from common.diagnose.evidence.measured_step import WIRES
from common.diagnose.evidence.measured_surroundings import number_of_cores
from common.errors import UserError
from common.machine_state import WITNESS
from common.perfmodel.scaling.step_model import LinearTime
from common.runtime.group.network import backend_name, describe_network
from common.runtime.machine.witness import LEAST_SPAN_S
from common.runtime.records.run_directory import write_atomically

TABLES_FOLDER = "tables"
HOOKS = {"fp16_compress_hook": "fp16", "bf16_compress_hook": "bf16"}
"""Communication hooks of PyTorch that compress, and what this project calls them."""
PASSES = ("forward_time_ms", "backward_time_ms")
LATER = ("between_time_ms", "buffers_time_ms")
"""Times that an earlier watch did not note: made up for, or left within the forward pass."""


def tables_of(bundle: Bundle) -> dict[str, pd.DataFrame]:
    """Makes the tables of a run directory, by file name, with the columns of ``common.tables``."""
    steps = _steps(bundle)
    arms = _arms(bundle, steps)
    probes, exchanging = _probes(bundle, steps), bundle.of("passes-exchanging")
    batch = int(arms["batch_per_rank"].iloc[0])
    probes, exchanging = of_usual_batch(probes, exchanging, steps, batch)
    as_written = (*COLUMNS, READY_TIMES, *WIRES.values())
    by_file = {name: bundle.of(name.removesuffix(".csv")) for name in as_written}
    by_file |= {
        ARMS: arms,
        STEPS: steps,
        FACTS: _facts(bundle),
        SAMPLES: samples_of(bundle),
        BUCKETS: _buckets(bundle),
        PROBES: probes,
        STALLS: _stalls(bundle),
        EXCHANGING: exchanging,
        # An earlier watch read less of them.
        SURROUNDINGS: bundle.of("surroundings").reindex(columns=SURROUNDING_COLUMNS),
        WITNESS: _witness(bundle),
    }
    return {name: table for name, table in by_file.items() if len(table)}


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
    what the others took longer was waiting. So it is where DDP sends buffers, a meeting of its own.
    """
    steps = _with_keys(bundle.of("steps"))
    complete = steps.groupby("step")["rank"].transform("nunique") == steps["rank"].nunique()
    steps = steps[complete].sort_values(["rank", "step"])
    if steps.empty:
        raise UserError(f"{bundle.folder}: no step is in the records of all ranks")
    if "between_time_ms" not in steps:  # of an earlier watch
        ended_s = steps.groupby("rank")["ended_s"].shift()
        steps["between_time_ms"] = (steps["began_s"] - ended_s) * 1e3
    steps["between_time_ms"] = pd.to_numeric(steps["between_time_ms"]).clip(lower=0)
    if "buffers_time_ms" not in steps:  # of an earlier watch: a part of the forward pass
        steps["buffers_time_ms"] = 0.0
    exchange, buffers = (
        pd.to_numeric(steps[name]) for name in ("exchange_time_ms", "buffers_time_ms")
    )
    steps["communication_time_ms"] = sum(
        met.groupby(steps["step"]).transform("min") for met in (exchange, buffers)
    )
    steps["waiting_time_ms"] = exchange + buffers - steps["communication_time_ms"]
    waited_ms = _waited_before_forward(steps)
    steps["data_time_ms"] -= waited_ms
    steps["waiting_time_ms"] += waited_ms
    # All that a pass takes beside the forward computation, sending DDP's buffers, too.
    steps["whole_backward_time_ms"] = steps["backward_time_ms"] + exchange.fillna(0) + buffers
    # Without buckets it is not known what of a backward pass was exchange.
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


def _witness(bundle: Bundle) -> pd.DataFrame:
    """Makes ``witness.csv``: who else had the cores, in each span that the ranks have counted.

    Only of machines all of whose cores the ranks may run on, and all of whose ranks are known:
    elsewhere it may have been on other cores.
    """
    rows = bundle.of("surroundings")
    if "interval_s" not in rows or len(bundle.about) < bundle.world_size:
        return pd.DataFrame()
    rows = rows.dropna(subset="interval_s")
    counted = ["interval_s", "interval_own_cores", "interval_busy_cores", "interval_stolen_cores"]
    numbers = rows[[*counted, "machine_cores"]].apply(pd.to_numeric, errors="coerce")
    turns = [rows["machine"].fillna(rows["host"]), rows.groupby("rank").cumcount()]
    span_s, used, busy, stolen, cores = (numbers[name] for name in numbers)
    used = used.groupby(turns).transform(lambda cores: cores.sum(skipna=False))
    may_run_on = rows["core_list"].fillna("").groupby(turns).transform(number_of_cores)
    are_sure = (may_run_on == cores) & (span_s >= LEAST_SPAN_S)
    shares = {
        "others_share": (busy - used) / cores,
        "steal_share": stolen / cores,
        "idle_share": 1 - (busy + stolen) / cores,
    }
    shares = {name: share.clip(0, 1).where(are_sure) for name, share in shares.items()}
    columns = {"stage": "watch", "round": turns[1] + 1, "witness_ms": np.nan, "span_s": span_s}
    spans = rows[["rank", "host", "load_1min"]].assign(**columns, **shares)
    if not are_sure.any():
        return pd.DataFrame()
    before = spans.drop_duplicates("rank").assign(round=0, **dict.fromkeys(shares, np.nan))
    return pd.concat([before, spans])[list(tables.WITNESS_COLUMNS)]


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
    backend = backend_name(first["backend"], first.get("process_group") or None)
    network = describe_network(backend, hosts, env=first["variables"])
    device = first["device_name"] or f"{first['cpu']} CPU"
    where = [f"{bundle.world_size} ranks", network or "", device]
    return {
        "status": "complete",
        "label": "watch",
        "start_time": str(first["started"]),
        "end_time": None,
        "host": first["host"],
        "command": first["command"],
        "packages": {"torch": first["torch"]},
        "python": first["python"],
        "backend": first["backend"],
        "process_group": first.get("process_group") or "",
        "device": first["device"],
        "device_name": device,
        "network": network,
        "world_size": bundle.world_size,
        "hosts": len(hosts),
        "hardware": ", ".join(part for part in where if part),
        "variables": first["variables"],
        "watch": str(first["version"]),
        "not_timed": [name for name in LATER if name not in bundle.of("steps")],
    }


def of_usual_batch(
    probes: pd.DataFrame, exchanging: pd.DataFrame, steps: pd.DataFrame, batch: int
) -> tuple[pd.DataFrame, pd.DataFrame]:
    """Scales passes to batches of the steps' mean size.

    A watch repeats one pass. Where batches differ in size, even the one closest to the mean may be
    far from it, and each rank has another one. A line through the passes' times over their elements
    says how much longer they would have been.

    Args:
        probes, exchanging: passes as the ranks wrote them; the second may be empty.
        steps: ``steps.csv``.
        batch: samples of a pass of mean size.

    Returns:
        both tables; unchanged where the sizes of batches are not known (of an earlier watch).
    """
    usual = _mean_elements(steps)
    if ELEMENTS not in probes or not usual or not (probes[ELEMENTS] > 0).all():
        return probes, exchanging
    rank_elements = probes["rank"].map(
        probes[probes["size"] == 1].groupby("rank")[ELEMENTS].median()
    )
    share = probes[ELEMENTS] / rank_elements
    scaled = {"batch_per_rank": (share * batch).round().clip(lower=1).astype(int)}
    several = probes[flags(probes["together"])]
    for column in PASSES:
        medians = several.groupby(["rank", ELEMENTS])[column].median()
        line = LinearTime.fit(medians.index.get_level_values(ELEMENTS), medians / 1e3)
        scaled[column] = probes[column] * line.time_s(share * usual) / line.time_s(probes[ELEMENTS])
        if len(exchanging):
            longer = line.time_s(usual) / line.time_s(exchanging[ELEMENTS])
            exchanging = exchanging.assign(**{column: exchanging[column] * longer})
    return probes.assign(**scaled), exchanging


def _mean_elements(steps: pd.DataFrame) -> float:
    """Returns the elements of a pass's batch in the steps that a run's speed is taken from."""
    if ELEMENTS not in steps:
        return 0.0
    measured = steps[~flags(steps["warmup"])]
    plain = measured[measured["kind"] == PLAIN]
    rows = plain if len(plain) else measured
    return float(rows[ELEMENTS].sum() / max(1, rows["micro_batches"].sum()))
