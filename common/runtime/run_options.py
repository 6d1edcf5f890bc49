"""The settings that scripts share: device, backend, global batch, and where results go."""

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


def dividing_batch(wanted: int, at_once: int) -> int:
    """Returns the largest multiple of ``at_once`` up to ``wanted``; at least one of them.

    Args:
        wanted: samples of a step, over all ranks.
        at_once: samples that all ranks take in one forward pass: ranks × micro-batch.
    """
    return max(1, wanted // at_once) * at_once
