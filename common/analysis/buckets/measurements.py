"""The measurements of one run of assignment 2, or recorded ones, ready for its notebooks."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np
import pandas as pd

from common.analysis.buckets.sweep import KEYS, BucketSweep, read_sweep
from common.analysis.comparable import Measured, require_same, require_same_settings
from common.analysis.runs import Run, choose_folder, is_recorded, origin
from common.csv_tables import read_table
from common.errors import UserError
from common.judged import Judged
from common.perfmodel.calibration import Calibration, read_calibration
from common.perfmodel.ddp.profile import BackwardProfile, DdpCosts
from common.perfmodel.ddp.step import BUCKET_VIEW
from common.perfmodel.model import DdpModel
from common.perfmodel.tables import AllReduceTable, read_all_reduce, read_ready_times
from common.runtime.paths import relative_to_project
from common.runtime.records.run_directory import find_table
from common.samples import Interval, slowest_rank, student

WRITTEN_BY = {
    "gradient-ready-times.csv": "train_benchmark",
    "allreduce-samples.csv": "allreduce_benchmark",
    "allreduce-chunk-samples.csv": "allreduce_chunk_benchmark",
    "overlap-times.csv": "overlap_benchmark",
    "ddp-times.csv": "ddp_benchmark",
    "local-times.csv": "ddp_benchmark",
    "ddp-overlap-times.csv": "ddp_benchmark",
}
"""The label of the run that a table is taken from: other assignments write some of them too."""
CALIBRATED_BY = ("gradient-ready-times.csv", "allreduce-samples.csv", "overlap-times.csv")
TRAINING = ("model", "batch_size", "max_seq_len", "dtype", "compile")
REPLAYED = ("replay", "replay_factor", "replay_time_factor", "added_latency_ms")
COMPARED = (*TRAINING, *REPLAYED, BUCKET_VIEW, "backend", "device")
WITHOUT_COMMUNICATION = ("gradient-ready-times.csv",)
COMMAND = "uv run ddplab run assignment2"


@dataclass(frozen=True)
class Assignment2Run:
    """Holds the measurements of one run.

    Attributes:
        caption: hardware, date and source, for every figure.
        settings: model, batch_size, max_seq_len, dtype, gradient_as_bucket_view (of DDP's steps;
            not in older runs), backend and device.
        profile: gradients of the backward pass, without communication.
        all_reduce: the measured curve, calls one after another.
        sweep: DDP over bucket caps.
        local_s: the backward pass without DDP, measured among the rounds of the sweep.
        exposed_ms: exposed communication of each step, by DDP's own record (``exposed_steps``).
        all_reduce_samples, chunk_samples: raw tables.
    """

    run_dir: Path
    recorded: bool
    caption: str
    settings: dict
    profile: BackwardProfile
    all_reduce: AllReduceTable
    sweep: BucketSweep
    local_s: float
    exposed_ms: pd.Series
    all_reduce_samples: pd.DataFrame
    chunk_samples: pd.DataFrame

    @property
    def origin(self) -> str:
        """Returns whose data these are, as Markdown."""
        what = "{model}, batch {batch_size}, sequence {max_seq_len}, {dtype}".format(
            **self.settings
        )
        return origin(f"{self.caption}. {what}", self.recorded, COMMAND)

    @cached_property
    def model(self) -> DdpModel:
        """Returns what predicts this run's backward passes and steps."""
        return self.calibration.model()

    @cached_property
    def calibration(self) -> Calibration:
        """Returns all samples that the model is made of."""
        paths = (path_of(self.run_dir, name) for name in CALIBRATED_BY)
        return calibration_of(self.settings, *paths)

    @property
    def costs(self) -> DdpCosts:
        """Returns DDP's bookkeeping and contention."""
        return self.calibration.overlap.costs()

    @property
    def copies(self) -> Judged:
        """Judges the ms that DDP over one rank, which sends nothing, adds to the backward pass."""
        folder = path_of(self.run_dir, "overlap-times.csv").parent
        added_ms = self.calibration.overlap.bookkeeping_s * 1e3
        return Judged(student(added_ms), null=0.0, machine=Run(folder, folder).machine_state)

    @property
    def local_over_timed(self) -> Judged:
        """Judges the pass without DDP among the sweep's rounds over that of the profile.

        The profile was made in one visit: of that side there is no repetition.
        """
        ratio = self.local_s / self.profile.backward_s
        return Judged(Interval(ratio, np.nan, np.nan, rounds=1), **self.conditions)

    @property
    def conditions(self) -> dict[str, str]:
        """Returns the state of the machine during the sweep, as ``Judged`` takes it."""
        return {"machine": self.sweep.machine}

    @property
    def gradient_mib(self) -> float:
        """Returns B in MiB."""
        return self.profile.total_bytes / 2**20


def open_run(run_dir: str | Path | None = None) -> Assignment2Run:
    """Opens a run directory; by default the newest complete run, or else recorded measurements.

    Raises UserError where a table is missing, or where the benchmarks of the run measured
    different models, batches, precisions or numbers of ranks, which must not be compared.
    """
    folder = choose_folder(run_dir, "assignment2", tuple(WRITTEN_BY))
    paths = {name: path_of(folder, name) for name in WRITTEN_BY}
    settings = check_comparable(paths.values())
    all_reduce = read_all_reduce(paths["allreduce-samples.csv"])
    sweep = read_sweep(paths["ddp-times.csv"])
    if all_reduce.world_size != sweep.world_size:
        raise UserError(
            f"{relative_to_project(folder)}: all-reduces were measured on {all_reduce.world_size} "
            f"ranks, DDP on {sweep.world_size}; they cannot be compared"
        )
    profile = read_ready_times(paths["gradient-ready-times.csv"])
    sweep.check_buckets(profile)
    return Assignment2Run(
        run_dir=folder,
        recorded=is_recorded(folder),
        caption=Run(paths["ddp-times.csv"].parent, folder).caption,
        settings=settings,
        profile=profile,
        all_reduce=all_reduce,
        sweep=sweep,
        local_s=local_backward_s(paths["local-times.csv"]),
        exposed_ms=exposed_steps(paths["ddp-overlap-times.csv"]),
        all_reduce_samples=pd.read_csv(paths["allreduce-samples.csv"]),
        chunk_samples=pd.read_csv(paths["allreduce-chunk-samples.csv"]),
    )


def calibration_of(settings: Mapping, ready: Path, all_reduces: Path, overlap: Path) -> Calibration:
    """Reads the samples of a prediction from tables of runs with these settings."""
    return read_calibration(
        ready,
        all_reduces,
        overlap,
        backend=settings.get("backend"),
        added_latency_s=added_latency_s(settings),
        gradient_as_bucket_view=bool(settings.get(BUCKET_VIEW)),
    )


def added_latency_s(settings: Mapping) -> float:
    """Returns the latency that DDP's runs added to every bucket, from their settings.

    Raises UserError for what is no number of milliseconds.
    """
    latency_ms = settings.get("added_latency_ms", 0.0)
    if not (isinstance(latency_ms, int | float) and 0 <= latency_ms < float("inf")):
        raise UserError(
            f"config.yaml: added_latency_ms {latency_ms!r} is no number of at least 0 ms"
        )
    return latency_ms / 1e3


def path_of(folder: Path, name: str) -> Path:
    """Returns the path of one of ``WRITTEN_BY``'s tables; UserError where no run has it."""
    path = find_table(folder, name, WRITTEN_BY[name])
    if path is None:
        raise UserError(f"{relative_to_project(folder)}: no complete run with {name}")
    return path


def check_comparable(tables: Iterable[Path]) -> dict:
    """Returns the settings that the runs of all these tables share.

    Raises UserError naming one that differs: model, batch, sequence, precision, what is replayed
    and by what factors, the latency added to buckets, DDP's gradient_as_bucket_view, backend or
    device (a model's long and short name are one), the number of ranks, the GPU or CPU, or the
    network. Tables without a run's ``config.yaml`` beside them say nothing.
    """
    compared: list[tuple[str, dict]] = []
    measured: list[Measured] = []
    for path in tables:
        run = Run(path.parent, path.parent)
        if run.has("config.yaml"):
            measured.append((path.name, run.environment))
            compared.append((path.name, _compared_settings(run)))
    titles = {key: key for key in (*COMPARED, "world_size")}
    require_same_settings(compared, titles, unknown_agrees=True)
    require_same(measured, alone=WITHOUT_COMMUNICATION)
    shared: dict = {}
    for _, settings in compared:
        shared = settings | shared
    return shared


def _compared_settings(run: Run) -> dict:
    """Returns what a benchmark's runs must agree in; a model's long and short name are one."""
    settings = {key: run.settings[key] for key in COMPARED if run.settings.get(key) is not None}
    settings["world_size"] = run.environment.get("world_size")
    settings["backend"] = run.environment.get("backend")  # settings may leave it to the device
    name = settings.get("model")
    if name and not name.startswith(("gpt2", "replay of ")):
        settings["model"] = f"gpt2-{name}"
    return {key: value for key, value in settings.items() if value is not None}


def exposed_steps(path: Path | str) -> pd.Series:
    """Reads each step's exposed communication in ms from DDP's record, ``ddp-overlap-times.csv``.

    Communication minus its overlap with computation: from a rank's last gradient until all buckets
    are reduced and copied back. A rank whose computation ends early waits in there for the others;
    the one with the least waits for nobody, so a step's is the least over ranks. Index: ``KEYS``.
    """
    times = ["communication_time_ms", "overlap_time_ms"]
    table = read_table(path, [*KEYS, "rank", *times])
    exposed = table["communication_time_ms"] - table["overlap_time_ms"]
    return exposed.groupby([table[key] for key in KEYS]).min()


def local_backward_s(path: Path | str) -> float:
    """Reads the median backward time (s) without DDP in a sweep's rounds (``local-times.csv``)."""
    table = read_table(path, ["round", "iteration", "rank", "backward_time_ms"])
    steps_ms = slowest_rank(table, "backward_time_ms", by=["round", "iteration"])
    return float(steps_ms.median()) / 1e3
