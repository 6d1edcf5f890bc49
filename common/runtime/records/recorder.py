"""A run directory that rank 0 opens for all ranks, which then add their samples to it."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from typing import Any

import pandas as pd

from common.errors import UserError
from common.runtime.group.process_group import Worker, process_group
from common.runtime.machine.environment import RankGroup, describe_environment
from common.runtime.machine.placement import own_placement
from common.runtime.processes.ranks import current_ranks
from common.runtime.records.run_directory import RunDirectory, SampleStream


class Recorder:
    """The writer of all ranks' measurements: rank 0 writes, the others only send theirs."""

    def __init__(self, worker: Worker, run: RunDirectory | None) -> None:
        self.worker = worker
        self.run = run

    @cached_property
    def folder(self) -> Path:
        """Returns the run directory on every rank; the first use is a broadcast, by all ranks."""
        return self.worker.broadcast(self.run.path if self.run else None)

    def stream(self, name: str, columns: Sequence[str]) -> RankStream:
        """Opens a table of raw samples that every rank adds to."""
        return RankStream(self.worker, self.run.stream(name, columns) if self.run else None)


class RankStream:
    """A CSV of samples; ``write`` gathers the rows of all ranks, so all ranks must call it."""

    def __init__(self, worker: Worker, sink: SampleStream | None) -> None:
        self.worker = worker
        self.sink = sink
        self._rows: list[dict] = []

    def write(self, rows: list[dict]) -> None:
        """Appends the rows of every rank, in rank order, each with its ``rank``."""
        gathered = self.worker.gather(rows)
        if self.sink is not None:
            ranked = [
                {"rank": rank, **row}
                for rank, rank_rows in enumerate(gathered)
                for row in rank_rows
            ]
            self.sink.write(ranked)
            self._rows += ranked

    def table(self) -> pd.DataFrame:
        """Returns all rows written so far on rank 0, and an empty table on other ranks."""
        return pd.DataFrame(self._rows)


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
    run, refusal = None, None
    rank_hosts = worker.gather(own_placement().host)
    if worker.is_main:
        try:
            run = RunDirectory.create(
                settings.output_dir,
                label,
                dataclasses.asdict(settings)
                | {"device": worker.device.type, "backend": worker.backend or None}
                | dict(recorded_settings or {}),
                describe_environment(
                    worker.backend or None,
                    worker.device.type,
                    worker.world_size,
                    ", ".join(filter(None, notes)),
                    group=RankGroup(
                        hosts=rank_hosts,
                        ranks_per_gpu=worker.ranks_per_gpu,
                        network=network,
                        process_group=worker.group_class if worker.backend else None,
                    ),
                ),
                settings.run_id or None,
            )
        except UserError as error:
            refusal = str(error)
    refusal = worker.broadcast(refusal)
    if refusal:
        raise UserError(refusal)
    if run is None:
        yield Recorder(worker, None)
        return
    with run:
        yield Recorder(worker, run)


def require_positive(settings: Any, *names: str) -> None:
    """Raises UserError for the first of the named settings that is not finite and above zero."""
    for name in names:
        value = getattr(settings, name)
        if not 0 < value < float("inf"):
            raise UserError(f"{name} is {value}; it must be above 0 and finite")


def require_not_negative(settings: Any, *names: str) -> None:
    """Raises UserError for the first of the named settings that is not finite, or below zero."""
    for name in names:
        value = getattr(settings, name)
        if not 0 <= value < float("inf"):
            raise UserError(f"{name} is {value}; it must be at least 0 and finite")
