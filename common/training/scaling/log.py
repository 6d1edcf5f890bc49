"""The record of a scaling run's steps: the tables of ``common.tables``.

Rows are kept on their rank and written together, outside of what is timed. The exchange of a step
is divided into communication and waiting on writing, when that of all its ranks is known.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass

import numpy as np
import torch
from ddplab_watch.placement import placement

from common import tables as columns
from common.perfmodel.ddp.step import BUCKET_VIEW
from common.runtime.group.process_group import Worker
from common.runtime.records.recorder import Recorder, gather_rows
from common.runtime.records.samples import sample_rows
from common.training.scaling.data_parallel_step import Batch, DataParallelStep, StepTimes
from common.training.scaling.timed_exchange import divided_exchange

PARTS = {
    "step_time_ms": "step_s",
    "data_time_ms": "data_s",
    "forward_time_ms": "forward_s",
    "backward_time_ms": "backward_s",
    "optimizer_time_ms": "optimizer_s",
    "cpu_time_ms": "cpu_s",
}
"""Maps columns of ``steps.csv`` to the fields of ``StepTimes``."""
BUCKET_STEPS = 8
"""Number of measured steps of each arm and round whose buckets are written."""


@dataclass(frozen=True)
class StepKey:
    """The columns of STEP_COLUMNS that tell a step from others.

    ``round``: of a sweep's rounds; ``epoch``: of a training run's.
    """

    step: int
    arm: int = 0
    kind: str = "timed"
    round: int = 0
    epoch: int = 0
    warmup: bool = False


class ScalingLog:
    """Steps, buckets and samples of the ranks. All ranks make it and write together.

    Args:
        arms: rows of ARM_COLUMNS, the same on all ranks.
    """

    def __init__(self, worker: Worker, recorder: Recorder, arms: Sequence[Mapping]) -> None:
        self.worker, self.arms = worker, list(arms)
        self._rows: list[dict] = []
        self._buckets: list[dict] = []
        self._identities: list[np.ndarray] = []
        self._ended_s: float | None = None
        self._streams = {}
        if recorder.run:
            tables = {
                "arms.csv": columns.ARM_COLUMNS,
                "steps.csv": columns.STEP_COLUMNS,
                "buckets.csv": columns.BUCKET_COLUMNS,
                "samples.csv": columns.SAMPLE_COLUMNS,
                "facts.csv": columns.WRITTEN_FACT_COLUMNS,
                "placement.csv": columns.PLACEMENT_COLUMNS,
            }
            self._streams = {name: recorder.run.stream(name, of) for name, of in tables.items()}
            self._streams["arms.csv"].write(arms)
        local_rank = {"local_rank": worker.ranks.local_rank}
        self._write("placement.csv", [placement(worker.device) | local_rank])

    def add(
        self, times: StepTimes, batches: Sequence[Batch], key: StepKey, *, counted: bool = True
    ) -> None:
        """Adds a step that has ended.

        Args:
            counted: the samples count as the epoch's.
        """
        if counted:
            self._identities += [batch.identities for batch in batches]
        between_s = None if self._ended_s is None else times.began_s - self._ended_s
        self._ended_s = times.began_s + times.step_s
        row = {name: _ms(getattr(times, part)) for name, part in PARTS.items()}
        self._rows.append(
            row
            | asdict(key)
            | {
                "samples": sum(len(batch.identities) for batch in batches),
                "tokens": sum(batch.tokens for batch in batches),
                "padded_tokens": sum(batch.padded_tokens for batch in batches),
                "longest": max(batch.longest for batch in batches),
                "micro_batches": len(batches),
                "exchanged_bytes": times.exchanged_bytes,
                "exchange_time_ms": _ms(times.exchange_s),
                "between_time_ms": _ms(between_s),
            }
        )
        visit_rows = (r for r in self._rows if r["arm"] == key.arm and r["round"] == key.round)
        if not key.warmup and sum(not r["warmup"] for r in visit_rows) <= BUCKET_STEPS:
            self._buckets += [
                {
                    "arm": key.arm,
                    "round": key.round,
                    "step": key.step,
                    "bucket": index,
                    "size_bytes": bucket.size_bytes,
                    "ready_time_ms": bucket.ready_s * 1e3,
                    "done_time_ms": bucket.done_s * 1e3,
                }
                for index, bucket in enumerate(times.buckets)
            ]

    def pause(self) -> None:
        """Leaves ``between_time_ms`` of the next step blank, as of the first in an epoch or arm."""
        self._ended_s = None

    def write(self) -> list[dict]:
        """Writes the steps and buckets added since the last call; all ranks call it.

        Returns the rows of steps of all ranks.
        """
        # The exchange times of all ranks, by step; a step whose buckets nobody watched has none.
        gathered = self.worker.gather(self._rows)
        exchange: dict[tuple, list[float]] = {}
        for row in (row for rows in gathered for row in rows):
            if row["exchange_time_ms"] is not None:
                exchange.setdefault(_key(row), []).append(row["exchange_time_ms"])
        divided = [divided_exchange(row, exchange.get(_key(row))) for row in self._rows]
        steps = self._write("steps.csv", divided)
        self._write("buckets.csv", self._buckets)
        self._rows, self._buckets = [], []
        return steps

    def end_epoch(self, epoch: int, data_samples: int | None = None, arm: int = 0) -> None:
        """Counts the samples of an epoch and writes samples.csv; all ranks call it.

        Args:
            data_samples: size of the data set, None where it is endless.
            arm: the arm that processed them; its ranks have rows.
        """
        identities = np.concatenate([np.empty(0, np.int64), *self._identities])
        self._identities = []
        everyone = self.worker.gather(identities)
        if not self._streams:
            return
        everyone = everyone[: self.arms[arm]["world_size"]]
        rows = sample_rows(everyone, arm=arm, epoch=epoch, data_samples=data_samples)
        self._streams["samples.csv"].write(rows)

    def facts(
        self,
        step: DataParallelStep,
        batch: Batch,
        *,
        model: str,
        data: str,
        data_samples: int | None = None,
        longest: int | None = None,
    ) -> None:
        """Writes facts.csv: what ran, as seen in a first pass; all ranks call it.

        Args:
            batch: a micro-batch, for the shape of a sample.
            data_samples: size of the data set, None where it is endless.
            longest: tokens of the data's longest sample, where samples differ in length.
        """
        parameters = list(step.model.parameters())
        shape = (longest,) if longest else tuple(batch.inputs[0].shape[1:]) if batch.inputs else ()
        row = {
            "parameters": sum(parameter.numel() for parameter in parameters),
            "gradient_bytes": sum(parameter.nbytes for parameter in parameters),
            "gradient_dtype": " ".join(sorted({_name(p.dtype) for p in parameters})),
            "compute_dtype": _name(step.output_dtype),
            "input_shape": "x".join(map(str, shape)),
            "model": model,
            "data": data,
            "data_samples": data_samples,
            BUCKET_VIEW: getattr(step.ddp, BUCKET_VIEW, False),  # of a step on one rank: no DDP
        }
        self._write("facts.csv", [row])

    def _write(self, name: str, rows: Sequence[Mapping]) -> list[dict]:
        gathered = gather_rows(self.worker, rows)
        if self._streams:
            self._streams[name].write(gathered)
        return gathered


def single_arm(
    ranks: int, batch_size: int, options: object, regime: str = "", change: str = "none"
) -> dict[str, object]:
    """Makes the row of ARM_COLUMNS of a run with one arm.

    ``options`` are a step's; ``batch_size`` is the number of samples of a rank's micro-batch.
    """
    return {
        "arm": 0,
        "regime": regime,
        "world_size": ranks,
        "batch_per_rank": batch_size,
        "global_batch": ranks * options.accumulation * batch_size,
        "accumulation": options.accumulation,
        "compression": options.compression,
        "bucket_cap_mb": options.bucket_cap_mb,
        "precision": options.precision,
        "change": change,
    }


def _key(row: Mapping) -> tuple:
    return row["arm"], row["kind"], row["round"], row["epoch"], row["step"]


def _ms(seconds: float | None) -> float | None:
    return None if seconds is None else seconds * 1e3


def _name(dtype: torch.dtype | None) -> str:
    return str(dtype).removeprefix("torch.")
