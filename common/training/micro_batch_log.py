"""The record of each step and rank of a run: ``metrics/rank<r>.csv`` and ``losses.csv``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from common.runtime.process_group import Worker
from common.runtime.recorder import Recorder
from common.scheduling.loader import MicroBatch
from common.tables import MICRO_BATCH_COLUMNS
from common.training.micro_batch_step import StepParts

LOSS_COLUMNS = ("step", "loss", "learning_rate")


def batch_facts(batch: MicroBatch) -> dict:
    """Returns the sizes of a rank's micro-batch, by column."""
    count, longest = batch.input_ids.shape
    return {
        "local_batch": count,
        "max_seq_len_in_batch": longest,
        "padded_tokens": count * longest,
        "tokens": batch.tokens,
    }


def part_facts(parts: StepParts, batch: MicroBatch) -> dict:
    """Returns the parts of a step on this rank in ms, by column.

    ``exchange_time_ms`` is divided later, by ``split_exchange``.
    """
    return {
        "step_time_ms": parts.step_s * 1e3,
        "compute_time_ms": parts.compute_s * 1e3,
        "exchange_time_ms": parts.exchange_s * 1e3,
        "planning_time_ms": parts.planning_s * 1e3,
        "planning_work_ms": batch.work_s * 1e3,
    }


def split_exchange(rows: Sequence[Mapping]) -> list[dict]:
    """Returns the rows of one step, one per rank, with the exchange divided into its two parts.

    The straggler, which comes last to the exchange, waits for nobody. So the shortest exchange of
    all ranks is communication, and what the others took longer was waiting.
    """
    communication_ms = min(row["exchange_time_ms"] for row in rows)
    divided = []
    for row in rows:
        rest = {name: value for name, value in row.items() if name != "exchange_time_ms"}
        waiting_ms = row["exchange_time_ms"] - communication_ms
        parts = {"communication_time_ms": communication_ms, "waiting_time_ms": waiting_ms}
        divided.append(rest | parts)
    return divided


class MicroBatchLog:
    """The rows of this rank's steps; ``flush`` writes those of all ranks, outside timed steps."""

    def __init__(self, worker: Worker, recorder: Recorder, discard_steps: int) -> None:
        self.worker, self.discard_steps = worker, discard_steps
        self._rows: list[dict] = []
        self._metrics, self._losses = [], None
        if recorder.run:
            self._metrics = [
                recorder.run.stream(f"metrics/rank{rank}.csv", MICRO_BATCH_COLUMNS)
                for rank in range(worker.world_size)
            ]
            self._losses = recorder.run.stream("losses.csv", LOSS_COLUMNS)

    def add(
        self, step: int, batch: MicroBatch, parts: StepParts, peak_bytes: int | None, lr: float
    ) -> None:
        """Adds a step that has ended; ``peak_bytes`` is None where it is not known."""
        row = {
            "step": step,
            **batch_facts(batch),
            **part_facts(parts, batch),
            "peak_mem_mb": None if peak_bytes is None else peak_bytes / 1e6,
            "throughput_samples_per_s": len(batch.labels) / parts.step_s,
            "throughput_tokens_per_s": batch.tokens / parts.step_s,
            "halvings": parts.halvings,
            "warmup": step < self.discard_steps,
        }
        self._rows.append(row | {"loss": parts.loss, "learning_rate": lr})

    def flush(self) -> dict | None:
        """Writes the rows added since the last call; all ranks call it.

        Returns:
            on rank 0 the newest step's number, global mean loss and slowest rank's time in ms; None
            on other ranks, and if nothing was added.
        """
        gathered = self.worker.gather(self._rows)
        self._rows = []
        if not self._metrics or not gathered[0]:
            return None
        for ranks in zip(*gathered, strict=True):
            # Each rank's loss is its part of the global mean: the parts add up to it.
            loss = sum(row["loss"] for row in ranks)
            of_all = {name: ranks[0][name] for name in ("step", "learning_rate")}
            self._losses.write([of_all | {"loss": loss}])
            for rank, row in enumerate(split_exchange(ranks)):
                own = {name: row[name] for name in MICRO_BATCH_COLUMNS if name != "rank"}
                self._metrics[rank].write([own | {"rank": rank}])
        slowest = max(ranks, key=lambda row: row["step_time_ms"])
        return {"step": slowest["step"], "loss": loss, "step_time_ms": slowest["step_time_ms"]}
