"""A run directory that rank 0 opens for all ranks, which then add their samples to it."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from functools import cached_property
from pathlib import Path
from typing import Any

import pandas as pd

from common.errors import UserError
from common.judged import FIRST_PAGE_ROUNDS, QUIET
from common.machine_state import RUN, WITNESS, MachineState, judge_machine
from common.runtime.group.process_group import Worker, process_group
from common.runtime.machine.environment import RankGroup, describe_environment
from common.runtime.machine.placement import own_placement
from common.runtime.machine.witness import LEAST_SPAN_S, Reading, read_machine, witness_rows
from common.runtime.processes.ranks import current_ranks
from common.runtime.progress import Progress
from common.runtime.records.run_directory import RunDirectory, SampleStream
from common.samples import Item, rotated, widest
from common.settings import RoundOptions
from common.tables import WITNESS_COLUMNS


class Recorder:
    """The writer of all ranks' measurements: rank 0 writes, the others only send theirs."""

    def __init__(self, worker: Worker, run: RunDirectory | None, hosts: Sequence[str] = ()) -> None:
        self.worker = worker
        self.run = run
        self._hosts = list(hosts)
        self._witness = run.stream(WITNESS, WITNESS_COLUMNS) if run else None
        self._readings: list[Reading] = []
        self._witnessed: list[dict] = []

    @cached_property
    def folder(self) -> Path:
        """Returns the run directory on every rank; the first use is a broadcast, by all ranks."""
        return self.worker.broadcast(self.run.path if self.run else None)

    def stream(self, name: str, columns: Sequence[str]) -> RankStream:
        """Opens a table of raw samples that every rank adds to."""
        return RankStream(self.worker, self.run.stream(name, columns) if self.run else None)

    def rounds(
        self,
        items: Collection[Item],
        plan: RoundOptions | int,
        *,
        stage: str,
        times: Callable[[], pd.DataFrame] | None = None,
        progress: Progress | None = None,
        first: int = 0,
    ) -> Iterator[tuple[int, Item]]:
        """Yields ``(round_, item)`` for whole rounds in rotated order; all ranks call it.

        Before every round and after the last the machine is witnessed. Where the plan has a budget,
        rank 0 decides after each round whether another one follows. It looks at how wide the
        intervals are and never at what they say, so that no order is made by going on.

        Args:
            items: visited once a round, each.
            plan: how many rounds; a number for exactly so many.
            stage: name of the loop, for the witness.
            times: returns what was measured so far, on rank 0: a row per round, a column per arm
                (``samples.per_round``). Without it a plan's budget means nothing.
            progress: is told of the visits of each further round.
            first: the first round's number, below 0 where rounds of warm-up come before.
        """
        least = plan.rounds if isinstance(plan, RoundOptions) else plan
        began, round_ = time.monotonic(), first
        while True:
            self.witness(stage, round_)
            if round_ >= least:
                if times is None or not plan.budget_s:
                    return
                spent_s = time.monotonic() - began
                is_next = self.worker.is_main and goes_on(plan, spent_s, round_, times)
                if not self.worker.broadcast(is_next):
                    return
                if progress:
                    progress.total += len(items)
            for item in rotated(items, round_):
                yield round_, item
            round_ += 1

    def witness(self, stage: str = RUN, round_: int | None = None) -> None:
        """Writes a row of each rank to witness.csv; all ranks call it, outside of what is timed.

        A run that is not made of rounds has them numbered: 0 at its beginning.
        """
        readings = self.worker.gather(read_machine())
        if self._witness is None:
            return
        if round_ is None:
            round_ = sum(row["stage"] == stage for row in self._witnessed) // len(readings)
        keys = {"stage": stage, "round": round_}
        rows = [keys | row for row in witness_rows(self._readings, readings, self._hosts)]
        self.take_witness(rows)
        if not self._readings or rows[0]["span_s"] >= LEAST_SPAN_S:
            self._readings = readings

    def take_witness(self, rows: list[dict]) -> None:
        """Writes rows of witness.csv, also those of a run that this one goes on with."""
        if self._witness:
            self._witness.write(rows)
            self._witnessed += rows

    def machine(self) -> MachineState:
        """Judges the machine as it was up to now; on rank 0, which has the rows of all."""
        return judge_machine(pd.DataFrame(self._witnessed))

    def end(self) -> None:
        """Witnesses the run's end, notes the machine's state and says it if it is not quiet."""
        self.witness()
        if self.run:
            judged = self.machine()
            self.run.environment |= {"machine_state": judged.state, "machine_reason": judged.reason}
            if judged.state != QUIET:
                print(f"The machine was {judged}")


def goes_on(
    plan: RoundOptions, spent_s: float, rounds: int, times: Callable[[], pd.DataFrame]
) -> bool:
    """Returns True if another round is to follow these: there is time, and intervals are wide."""
    if spent_s >= plan.budget_s:
        return False
    return rounds < FIRST_PAGE_ROUNDS or widest(times()) > plan.half_width


class RankStream:
    """A CSV of samples; ``write`` gathers the rows of all ranks, so all ranks must call it."""

    def __init__(self, worker: Worker, sink: SampleStream | None) -> None:
        self.worker = worker
        self.sink = sink
        self._rows: list[dict] = []

    def write(self, rows: list[dict]) -> None:
        """Appends the rows of every rank, in rank order, each with its ``rank``."""
        gathered = gather_rows(self.worker, rows)
        if self.sink is not None:
            self.sink.write(gathered)
            self._rows += gathered

    def table(self) -> pd.DataFrame:
        """Returns all rows written so far on rank 0, and an empty table on other ranks."""
        return pd.DataFrame(self._rows)


def gather_rows(worker: Worker, rows: Sequence[Mapping]) -> list[dict]:
    """Gathers the rows of all ranks, in rank order, each with its ``rank``; the same on all."""
    gathered = worker.gather(list(rows))
    return [{"rank": rank, **row} for rank, ranked in enumerate(gathered) for row in ranked]


@contextmanager
def single_device(
    program: str, device: str | None, *, starts_children: bool = False
) -> Iterator[Worker]:
    """Yields the worker of a program that measures one device: alone, and without a backend.

    A program that only ``starts_children`` leaves the GPU to them: in exclusive compute mode it
    would keep them out.

    Raises:
        UserError: the program was started on several ranks.
    """
    ranks = current_ranks().world_size
    if ranks > 1:
        raise UserError(
            f"{program} is for one device, and was started on {ranks} ranks; start it with "
            "python, or with torchrun --nproc_per_node=1"
        )
    with process_group(device, backend="gloo", claim_gpu=not starts_children) as worker:
        yield dataclasses.replace(worker, backend="")  # nothing is communicated


@contextmanager
def record_run(
    settings: Any,
    label: str,
    worker: Worker,
    *,
    recorded_settings: Mapping[str, object] | None = None,
    notes: Sequence[str] = (),
    network: str | None = None,
) -> Iterator[Recorder]:
    """Opens the run directory named by ``settings.output_dir`` and ``settings.run_id``.

    The run ends as complete, failed or interrupted, as the block does.

    Args:
        settings: dataclass that is written to ``config.yaml``.
        recorded_settings: values in ``config.yaml`` for settings that mean nothing in this run.
        notes: texts that every caption of the run must have.
        network: name of the network between the ranks, where only the program knows it.

    Raises:
        UserError: the folder cannot be written; on every rank, so that none waits for rank 0.
    """
    run, backend = None, worker.backend or None
    rank_hosts = worker.gather(own_placement().host)
    with worker.mistakes_shared():
        if worker.is_main:
            used = {"device": worker.device.type, "backend": backend}
            group = RankGroup(
                hosts=rank_hosts,
                ranks_per_gpu=worker.ranks_per_gpu,
                network=network,
                process_group=worker.group_class if backend else None,
            )
            run = RunDirectory.create(
                settings.output_dir,
                label,
                dataclasses.asdict(settings) | used | dict(recorded_settings or {}),
                describe_environment(
                    backend,
                    worker.device.type,
                    worker.world_size,
                    ", ".join(filter(None, notes)),
                    group=group,
                ),
                settings.run_id or None,
            )
    with run or nullcontext():
        recorder = Recorder(worker, run, rank_hosts)
        recorder.witness()
        yield recorder
        recorder.end()
