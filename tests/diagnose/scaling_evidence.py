"""Runs made up table by table, so that a test knows what is in them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from unittest import mock

import numpy as np
import pandas as pd

from common.diagnose import diagnosis
from common.diagnose.all_causes import CAUSES, OF_SCRIPTS
from common.diagnose.diagnosis import Diagnosis, examine_case
from common.diagnose.evidence.case import Case, Verdict
from common.diagnose.evidence.evidence import open_evidence

MIB = 2**20
WRITTEN: dict[str, dict[str, str]] = {}
"""The files of each run that was made up: many tests begin with the same one."""


def every(**counts: int) -> pd.DataFrame:
    """Returns a row for each combination of numbers from 0 on, the last changing first."""
    ranges = [range(count) for count in counts.values()]
    return pd.MultiIndex.from_product(ranges, names=counts).to_frame(index=False)


@dataclass(frozen=True)
class MadeUp:
    """A healthy run on two ranks, unless told otherwise. Times in ms.

    A model of four gradients of 1 MiB each, in buckets of 2 MiB. All-reduces take
    ``latency_ms`` + size / ``bandwidth`` (bytes per ms).
    """

    ranks: int = 2
    batch: int = 32
    accumulation: int = 1
    steps: int = 30
    forward_ms: float = 10.0
    backward_ms: float = 20.0
    optimizer_ms: float = 1.0
    data_ms: float = 0.2
    between_ms: float = 0.3
    communication_ms: float = 2.0
    exchanges: int = 1
    noise: float = 0.02
    latency_ms: float = 0.2
    bandwidth: float = 1e6
    buckets: tuple[int, ...] = (2 * MIB, 2 * MIB)
    together: float = 1.1
    slow: Mapping[int, float] = field(default_factory=dict)
    """Factor on a rank's computation."""
    tokens: float = 0.0
    """Spread of padded tokens from step to step, which computation follows."""
    early: Mapping[int, float] = field(default_factory=dict)
    """Factor on a step's computation."""
    samples: Mapping[str, object] | None = None
    facts: Mapping[int, Mapping[str, object]] = field(default_factory=dict)
    placement: Mapping[str, object] = field(default_factory=dict)
    hosts: tuple[str, ...] = ("here", "here")
    fixed_share: float = 0.2
    """Of a pass at this batch, what does not depend on the batch."""
    seed: int = 0

    def write(self, folder: Path) -> Path:
        """Writes all tables into a new folder."""
        folder.mkdir(parents=True, exist_ok=True)
        if (key := repr(self)) not in WRITTEN:
            WRITTEN[key] = self._texts()
        for name, text in WRITTEN[key].items():
            (folder / name).write_text(text)
        return folder

    def _texts(self) -> dict[str, str]:
        """Returns the text of each file of the run."""
        environment = {"status": "complete", "network": "TCP over loopback", "world_size": 2}
        tables = {
            "arms.csv": self._arms(),
            "steps.csv": self._steps(),
            "placement.csv": self._placement(),
            "facts.csv": self._facts(),
            "probes.csv": self._probes(),
            "gradient-ready-times.csv": self._ready(),
        }
        if self.ranks > 1:
            tables["buckets.csv"] = self._buckets()
            tables["allreduce-samples.csv"] = self._all_reduces()
        if self.samples is not None:
            tables["samples.csv"] = self._samples()
        texts = {name: pd.DataFrame(rows).to_csv(index=False) for name, rows in tables.items()}
        return texts | {"environment.json": json.dumps(environment)}

    def _arms(self) -> list[dict]:
        return [
            {
                "arm": 0,
                "regime": "",
                "world_size": self.ranks,
                "batch_per_rank": self.batch,
                "accumulation": self.accumulation,
                "global_batch": self.ranks * self.batch * self.accumulation,
                "compression": "none",
                "bucket_cap_mb": None,
                "precision": "float32",
                "change": "none",
            }
        ]

    def _steps(self) -> list[dict]:
        random = np.random.default_rng(self.seed)
        rows = []
        for step in range(self.steps):
            lengths = 1 + self.tokens * random.uniform(-1, 1, self.ranks)
            jitter = np.exp(self.noise * random.standard_normal((3, self.ranks)))
            passes = self.accumulation * np.array(
                [self.slow.get(rank, 1.0) * self.early.get(step, 1.0) for rank in range(self.ranks)]
            )
            forward = self.forward_ms * lengths * passes * jitter[0]
            backward = self.backward_ms * lengths * passes * jitter[1]
            ready = self.data_ms + forward + backward
            exchange = self.communication_ms * self.exchanges * jitter[2].min()
            exchange *= self.ranks > 1
            waiting = ready.max() - ready
            total = ready.max() + exchange + self.optimizer_ms
            for rank in range(self.ranks):
                rows.append(
                    {
                        "rank": rank,
                        "arm": 0,
                        "kind": "timed",
                        "round": 0,
                        "epoch": 0,
                        "step": step,
                        "warmup": False,
                        "samples": self.batch * self.accumulation,
                        "tokens": round(lengths[rank] * 1000),
                        "padded_tokens": round(lengths[rank] * 1000),
                        "longest": 100,
                        "micro_batches": self.accumulation,
                        "exchanged_bytes": self.exchanges * sum(self.buckets),
                        "step_time_ms": total,
                        "data_time_ms": self.data_ms,
                        "forward_time_ms": forward[rank],
                        "backward_time_ms": backward[rank],
                        "waiting_time_ms": waiting[rank],
                        "communication_time_ms": exchange,
                        "optimizer_time_ms": self.optimizer_ms,
                        "between_time_ms": self.between_ms if step else None,
                        "cpu_time_ms": total,
                    }
                )
        return rows

    def _buckets(self) -> pd.DataFrame:
        places = every(rank=self.ranks, step=3, bucket=len(self.buckets))
        sizes = places["bucket"].map(dict(enumerate(self.buckets)))
        return places.assign(arm=0, round=0, size_bytes=sizes, ready_time_ms=5.0, done_time_ms=6.0)

    def _placement(self) -> list[dict]:
        row = {"device": "cpu", "cores": 2, "core_list": "0 1", "threads": 1}
        return [
            row
            | {"rank": rank, "local_rank": rank, "identity": "cores 0 1", "host": self.hosts[rank]}
            | self.placement
            for rank in range(self.ranks)
        ]

    def _facts(self) -> list[dict]:
        row = {
            "parameters": MIB,
            "gradient_bytes": 4 * MIB,
            "gradient_dtype": "float32",
            "compute_dtype": "float32",
            "input_shape": "128",
            "model": "m",
            "data": "d",
            "data_samples": 1000,
        }
        return [{"rank": r} | row | self.facts.get(r, {}) for r in range(self.ranks)]

    def _probes(self) -> pd.DataFrame:
        random = np.random.default_rng(self.seed + 1)
        parts = []
        for batch, together in (
            (self.batch // 2, True),
            (self.batch, True),
            (self.batch * 2, True),
            (self.batch, False),
        ):
            places = every(rank=self.ranks, repeat=5)
            share = self.fixed_share + (1 - self.fixed_share) * batch / self.batch
            share /= 1 if together else self.together
            share = share * np.exp(self.noise * random.standard_normal(len(places)))
            parts.append(
                places.assign(
                    arm=0,
                    batch_per_rank=batch,
                    together=together,
                    forward_time_ms=self.forward_ms * share,
                    backward_time_ms=self.backward_ms * share,
                    optimizer_time_ms=self.optimizer_ms,
                )
            )
        return pd.concat(parts)

    def _ready(self) -> pd.DataFrame:
        places = every(rank=self.ranks, iteration=3, ready_index=4)
        number = 3 - places["ready_index"]
        return places.assign(
            parameter="p" + number.astype(str),
            registration_index=number,
            dtype="float32",
            size_bytes=MIB,
            ready_time_ms=self.backward_ms * (places["ready_index"] + 1) / 4,
        )

    def _all_reduces(self) -> pd.DataFrame:
        places = every(size=4, round=3, rank=self.ranks)
        sizes = places.pop("size").map(dict(enumerate((4, MIB // 16, MIB, 4 * MIB))))
        return places.assign(
            mode="sequential",
            total_elements=sizes // 4,
            total_bytes=sizes,
            in_flight=1,
            iteration=0,
            time_ms=self.latency_ms + sizes / self.bandwidth,
        )

    def _samples(self) -> list[dict]:
        row = {"arm": 0, "processed": 500, "distinct": 500, "shared": 0, "distinct_all_ranks": 1000}
        row |= {"data_samples": 1000}
        return [
            row | {"epoch": epoch, "rank": rank, "order": f"{epoch}-{rank}"} | self.samples
            for epoch in range(2)
            for rank in range(self.ranks)
        ]


def as_watched(folder: Path, **environment: object) -> Path:
    """Lets a run be one of a watched script; returns its folder."""
    path = folder / "environment.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"label": "watch"} | environment))
    return folder


def change_table(folder: Path, name: str = "steps.csv", **columns: object) -> Path:
    """Replaces columns of a run's table, by numbers or functions of it; returns the folder."""
    pd.read_csv(folder / name).assign(**columns).to_csv(folder / name, index=False)
    return folder


def case_of(folder: Path, baseline: Path | None = None) -> Case:
    """Opens a run, and one on one rank beside it."""
    return Case(open_evidence(folder), baseline and open_evidence(baseline))


def verdicts_on(run: Path | Case) -> dict[str, Verdict]:
    """Returns the verdicts on a run by cause, the main one first."""
    case = run if isinstance(run, Case) else case_of(run)
    return {verdict.cause: verdict for verdict in examine_case(case).verdicts}


def examined_for(case: Case, *causes: str) -> Diagnosis:
    """Examines a case for a few causes alone, which is much quicker."""
    known = {cause for key in (*CAUSES, *OF_SCRIPTS) for cause in key.split(", ")}
    assert known >= {*causes}  # or nobody would look for it
    judges = {
        name: {key: judge for key, judge in of.items() if {*key.split(", ")} & {*causes}}
        for name, of in (("CAUSES", CAUSES), ("OF_SCRIPTS", OF_SCRIPTS))
    }
    with mock.patch.multiple(diagnosis, **judges):
        return examine_case(case)


def verdict_on(run: Path | Case, cause: str) -> Verdict | None:
    """Returns the verdict on a cause where no other is looked for."""
    case = run if isinstance(run, Case) else case_of(run)
    return next((v for v in examined_for(case, cause).verdicts if v.cause == cause), None)


def judge(cause: str, folder: Path) -> Verdict | None:
    """Returns what the judge of a script's cause says; raises NotJudged as it does."""
    return OF_SCRIPTS[cause](case_of(folder))


def made_verdict(cause: str, lost_share: float, confidence: str = "high") -> Verdict:
    """Returns a verdict of few words."""
    words = dict.fromkeys(("title", "reason", "change"), "")
    return Verdict(cause=cause, evidence=(), lost_share=lost_share, confidence=confidence, **words)
