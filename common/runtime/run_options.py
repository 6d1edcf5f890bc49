"""The settings that scripts share: the device, the ranks' backend, and where results go."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class RunOptions:
    """The folder of a run's results, and its id."""

    output_dir: str = "outputs"
    run_id: str = ""
    """Name of the run directory below output_dir; made up by default."""


@dataclass(frozen=True, kw_only=True)
class DeviceOptions(RunOptions):
    """The device of a script, and where its results go."""

    device: str | None = None
    """cpu or cuda; by default CUDA where it is."""


@dataclass(frozen=True, kw_only=True)
class RankOptions(DeviceOptions):
    """The device and the backend of a script's ranks, and where its results go."""

    backend: str | None = None
    """nccl or gloo; by default NCCL on CUDA and gloo on the CPU."""
