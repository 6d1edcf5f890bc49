"""A short profile of steps whose passes hooks cannot see into: under FSDP, or compiled in place.

torch.profiler writes down operators, collectives and kernels of a few steps, without stacks and
shapes. Of its trace only what a diagnosis reads goes into the bundle: names and times of operators,
kernels, and the ranges that torch itself opens. The host's name and the script's own ranges do not.
"""

from __future__ import annotations

import gzip
import json
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import profiler

from ddplab_watch import torch_internals
from ddplab_watch.hooks import Hooks

STEP = "ProfilerStep#"
"""The name that torch.profiler itself gives to a step's range."""
KEPT = ("cpu_op", "cuda_runtime", "cuda_driver", "kernel", "gpu_memcpy", "gpu_memset")
RANGES = (STEP, "gloo:", "nccl:", "FSDP::", "Optimizer.", "DistributedDataParallel")
"""Beginnings of the ranges that are kept: torch's own."""
ARGUMENTS = (
    "correlation",
    "stream",
    "Collective name",
    "In msg nelems",
    "Out msg nelems",
    "dtype",
    "Group size",
)
MOST_BYTES = 2**29


class ShortProfile:
    """Profiles steps from ``start`` to ``write``, unless the script profiles itself.

    Args:
        device: device of the model.
    """

    def __init__(self, device: torch.device) -> None:
        self.unseen = ""
        """Reason why nothing is profiled; empty while it is."""
        self._device = device
        self._profile: Any = None
        self._range: Any = None
        self._hooks = Hooks()
        self._is_starting = False

    def start(self) -> None:
        """Begins to profile; the steps before the first ``begin_step`` are for warming up."""
        if torch_internals.is_profiling():
            self.unseen = "the script profiles itself"
            return
        activities = [profiler.ProfilerActivity.CPU]
        if self._device.type == "cuda":
            activities.append(profiler.ProfilerActivity.CUDA)
        self._profile = profiler.profile(activities=activities)
        torch_internals.watch_profilers(self._hooks.replace, self._give_way)
        self._is_starting = True
        try:
            with torch_internals.silent_profiler():
                self._profile.start()
        except RuntimeError as error:
            self._profile, self.unseen = None, str(error).splitlines()[0]
            self._hooks.remove()
        finally:
            self._is_starting = False

    def _give_way(self) -> None:
        """Ends the profile as another one begins: torch has one at a time."""
        if not self._is_starting:
            self.give_up("the script began to profile itself")

    def begin_step(self, number: int) -> None:
        """Begins a step; the one before has ended."""
        self._end_step()
        if self._profile is not None:
            self._range = profiler.record_function(f"{STEP}{number}")
            self._range.__enter__()

    def _end_step(self) -> None:
        if self._range is not None:
            self._range.__exit__(None, None, None)
            self._range = None

    def write(self, path: Path, rank: int) -> None:
        """Ends the profile and writes its trace; says in ``unseen`` why not.

        Args:
            path: path of the file, ``.json.gz``.
            rank: rank of this process.
        """
        profile = self._stopped()
        if profile is None:
            return
        try:
            with tempfile.TemporaryDirectory(prefix="ddplab-watch-") as folder:
                export = Path(folder) / "trace.json"
                profile.export_chrome_trace(str(export))
                size = export.stat().st_size
                if size > MOST_BYTES:
                    self.unseen = f"a trace of {size / 2**20:.0f} MiB"
                    return
                records = json.loads(export.read_bytes())["traceEvents"]
            events = list(kept(records))
            trace = {"schemaVersion": 1, "distributedInfo": {"rank": rank}, "traceEvents": events}
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(gzip.compress(json.dumps(trace).encode(), compresslevel=6))
        except (OSError, ValueError, KeyError) as error:
            self.unseen = f"its trace: {error}"

    def give_up(self, why: str) -> None:
        """Ends the profile, and keeps nothing of it."""
        if self._stopped() is not None:
            self.unseen = why

    def _stopped(self) -> Any:
        """Stops the profile; returns it, or None where there is none any more."""
        self._end_step()
        profile, self._profile = self._profile, None
        self._hooks.remove()
        try:
            if profile is not None:
                profile.stop()
        except RuntimeError as error:
            profile, self.unseen = None, str(error).splitlines()[0]
        return profile


def kept(records: list[dict]) -> Iterator[dict]:
    """Yields of a trace's records what a diagnosis reads, from the first step on."""
    steps = [record["ts"] for record in records if record["name"].startswith(STEP)]
    first = min(steps, default=0.0)
    for record in records:
        name, kind = record["name"], record.get("cat")
        is_torchs = kind in KEPT or (kind == "user_annotation" and name.startswith(RANGES))
        if "dur" in record and is_torchs and record["ts"] >= first:
            arguments = record.get("args", {})
            details = {key: arguments[key] for key in ARGUMENTS if key in arguments}
            event = {key: record[key] for key in ("ph", "cat", "name", "pid", "tid", "ts", "dur")}
            yield event | {"args": details}
