"""The record of a run with planned micro-batches: steps of each rank, losses, evaluations."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from common.runtime.group.process_group import Worker
from common.runtime.records.recorder import Recorder
from common.scheduling.loader import MicroBatch
from common.tables import MICRO_BATCH_COLUMNS
from common.training.divergence import require_finite
from common.training.micro_batches.config import MicroBatchConfig
from common.training.micro_batches.micro_batch_step import StepParts
from common.training.recording.memory_watch import PeakMemory
from common.training.scaling.timed_exchange import divided_exchange

LOSS_COLUMNS = ("step", "loss", "learning_rate")
EVALUATION_COLUMNS = ("rank", "step", "samples", "loss", "accuracy")


def step_columns(parts: StepParts, batch: MicroBatch) -> dict:
    """Returns the sizes of this rank's micro-batch and the parts of its step in ms, by column.

    ``exchange_time_ms`` is divided later, by ``split_exchange``.
    """
    count, longest = batch.input_ids.shape
    return {
        "local_batch": count,
        "max_seq_len_in_batch": longest,
        "padded_tokens": count * longest,
        "tokens": batch.tokens,
        "step_time_ms": parts.step_s * 1e3,
        "compute_time_ms": parts.compute_s * 1e3,
        "exchange_time_ms": parts.exchange_s * 1e3,
        "planning_time_ms": parts.planning_s * 1e3,
        "planning_work_ms": batch.work_s * 1e3,
    }


def split_exchange(rows: Sequence[Mapping]) -> list[dict]:
    """Returns the rows of one step, one per rank, each with its exchange divided."""
    exchanges_ms = [row["exchange_time_ms"] for row in rows]
    return [divided_exchange(row, exchanges_ms) for row in rows]


class MicroBatchLog:
    """The tables and lines of a run: each step of all ranks, and the evaluations.

    All ranks make it and add to it together. Steps are written outside of what is timed.

    ``eval_texts`` is the number of texts of the validation split.
    """

    def __init__(
        self, worker: Worker, recorder: Recorder, config: MicroBatchConfig, eval_texts: int
    ) -> None:
        self.worker, self.config, self.eval_texts = worker, config, eval_texts
        self._rows: list[dict] = []
        self._evaluations = recorder.stream("evaluations.csv", EVALUATION_COLUMNS)
        self._metrics, self._losses = [], None
        if recorder.run:
            self._metrics = [
                recorder.run.stream(f"metrics/rank{rank}.csv", MICRO_BATCH_COLUMNS)
                for rank in range(worker.world_size)
            ]
            self._losses = recorder.run.stream("losses.csv", LOSS_COLUMNS)
        self._peak = PeakMemory(worker.device)
        self._peak.start()

    def say(self, line: str) -> None:
        """Prints a line on rank 0."""
        if self.worker.is_main:
            print(line, flush=True)

    def add(self, step: int, lr: float, parts: StepParts, batch: MicroBatch) -> None:
        """Adds a step that has ended."""
        peak_bytes = self._peak.peak_bytes()  # None where it is not known
        row = {
            "step": step,
            **step_columns(parts, batch),
            "peak_mem_mb": None if peak_bytes is None else peak_bytes / 1e6,
            "throughput_samples_per_s": len(batch.labels) / parts.step_s,
            "throughput_tokens_per_s": batch.tokens / parts.step_s,
            "halvings": parts.halvings,
            "warmup": step < self.config.discard_steps,
        }
        self._rows.append(row | {"loss": parts.loss, "learning_rate": lr})
        steps_done = step + 1
        if steps_done % self.config.log_every == 0 or steps_done == self.config.steps:
            self._flush()
        self._peak.start()

    def end_span(
        self, span: range, train_s: float, evaluation_s: float, loss: float, accuracy: float
    ) -> None:
        """Writes the evaluation after the steps of ``span``, and prints a line."""
        row = {"step": span.stop, "samples": self.eval_texts, "loss": loss, "accuracy": accuracy}
        self._evaluations.write([row] if self.worker.is_main else [])
        self.say(f"after {span.stop} steps: accuracy {accuracy:.4f} on {self.eval_texts:,} texts")
        self._peak.start()

    def _flush(self) -> None:
        """Writes the rows added since the last call, and prints a line about the newest step."""
        steps = list(zip(*self.worker.gather(self._rows), strict=True))
        self._rows = []
        # Each rank's loss is its part of the global mean: the parts add up to it.
        losses = [sum(row["loss"] for row in ranks) for ranks in steps]
        if self._metrics:
            self._write(steps, losses)
        require_finite(losses, steps[0][0]["step"], "lower --lr, or take --precision fp32")

    def _write(self, steps: list[tuple[dict, ...]], losses: list[float]) -> None:
        """Writes the rows of all ranks, by step, with the step's loss."""
        for ranks, loss in zip(steps, losses, strict=True):
            of_all = {name: ranks[0][name] for name in ("step", "learning_rate")}
            self._losses.write([of_all | {"loss": loss}])
            for rank, row in enumerate(split_exchange(ranks)):
                metrics = {name: row[name] for name in MICRO_BATCH_COLUMNS if name != "rank"}
                self._metrics[rank].write([metrics | {"rank": rank}])
        slowest_ms = max(row["step_time_ms"] for row in ranks)
        self.say(
            f"step={ranks[0]['step']} | loss={loss:.4f} | lr={ranks[0]['learning_rate']:.2e} | "
            f"time={slowest_ms:.0f} ms"
        )
