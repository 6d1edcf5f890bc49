"""Settings of a watch, and their way to other processes through the environment."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path

FOLDER, SETTINGS = "DDPLAB_WATCH", "DDPLAB_WATCH_OPTIONS"
"""Variables of the environment: the bundle's folder, and settings as ``window=30,probe=0``."""
JOB = "SLURM_JOB_ID"
"""Variable with the number of a job of Slurm's, which a requeued job keeps."""
DEFAULT_FOLDER = "ddplab-watch"


@dataclass(frozen=True)
class Options:
    """Settings of a watch. They must be the same on all ranks.

    Attributes:
        folder: folder of the bundle; made when the first step has ended.
        named: the folder was chosen for this run: all ranks have the same, and it must be unused.
            Otherwise they take rank 0's.
        warmup: steps before the window, which are recorded as warm-up.
        window: steps that are timed as they are.
        bucket_steps: steps after these in which gradients and buckets are watched, too.
        profile_steps: steps after these that torch.profiler records, for a model under FSDP or
            compiled in place.
        probe: afterwards, measure passes without exchange, and all-reduces by size.
        verify: after the probes, try changes of DDP and of the process on a copy of the model.
        to_end: afterwards, follow medians of steps to the end of the script, and begin a window
            anew after a change.
        anonymise: hash names of hosts, users and paths.
    """

    folder: str = DEFAULT_FOLDER
    warmup: int = 5
    window: int = 30
    bucket_steps: int = 10
    profile_steps: int = 3
    probe: bool = True
    verify: bool = False
    to_end: bool = False
    anonymise: bool = False
    named: bool = False

    def __post_init__(self) -> None:
        """Raises ValueError for too small a number, or ``verify`` without probes to follow."""
        for name, least in (
            ("warmup", 1),
            ("window", 1),
            ("bucket_steps", 0),
            ("profile_steps", 0),
        ):
            if getattr(self, name) < least:
                raise ValueError(f"{name} is {getattr(self, name)}; it must be at least {least}")
        if self.verify and not self.probe:
            raise ValueError("verify follows the probes; keep probe")

    @property
    def last_step(self) -> int:
        """Returns the number of steps after which the watch is over, but for those profiled."""
        return self.warmup + self.window + self.bucket_steps

    def to_environment(self) -> dict[str, str]:
        """Returns the variables that give another process the same settings."""
        values = {name: value for name, value in asdict(self).items() if name != "folder"}
        text = ",".join(f"{name}={int(value)}" for name, value in values.items())
        return {FOLDER: self.folder, SETTINGS: text}

    @classmethod
    def from_environment(cls, environment: Mapping[str, str] = os.environ) -> Options:
        """Reads the settings from the environment.

        Raises ValueError: an unknown setting, or one that is no whole number.
        """
        kinds = {field.name: type(field.default) for field in fields(cls)}
        settings: dict[str, int | bool] = {}
        for part in filter(None, environment.get(SETTINGS, "").split(",")):
            name, _, text = part.partition("=")
            if name not in kinds or name == "folder":
                legal = ", ".join(key for key in kinds if key != "folder")
                raise ValueError(f"{SETTINGS}: unknown setting {name!r}; known: {legal}")
            try:
                settings[name] = kinds[name](int(text))
            except ValueError:
                raise ValueError(f"{SETTINGS}: {name} is {text!r}; a whole number") from None
        folder = environment.get(FOLDER)
        settings.setdefault("named", bool(folder))
        return replace(cls(), folder=folder or job_folder(environment), **settings)


def job_folder(environment: Mapping[str, str] = os.environ) -> str:
    """Returns a folder named after this job.

    Ranks that one launcher started have its process in common; jobs have their number, which may
    be used again. What ranks on several hosts name otherwise, ``team.same_folder`` settles.
    """
    job = environment.get(JOB) or environment.get("TORCHELASTIC_RUN_ID")
    if job in (None, "", "none"):
        job = time.strftime("%Y%m%d-%H%M%S")
        if "RANK" in environment:
            job = f"{os.getppid()}-{_started(os.getppid())}"
    return str(Path(DEFAULT_FOLDER) / str(job))


def requeued_folder(folder: Path, record: str, environment: Mapping[str, str] = os.environ) -> Path:
    """Returns the folder that a job which Slurm has requeued writes into, below that of the job.

    Of any other job it is the folder itself. Each start has one of its own: ``requeue-1`` and on.

    Args:
        folder: folder of the job.
        record: name of the file that this rank, or any other, wrote there at the first start.
        environment: variables of the job.

    Raises FileExistsError: another job wrote it.
    """
    count = environment.get("SLURM_RESTART_COUNT", "")
    if count in ("", "0"):
        return folder
    try:
        with (folder / record).open(encoding="utf-8", errors="replace") as lines:
            job = json.loads(next(lines, ""))["variables"][JOB]
    except (OSError, ValueError, TypeError, KeyError):  # none, cut off, or of an older watch
        job = environment.get(JOB)
    if job != environment.get(JOB):
        raise FileExistsError(f"{folder / record} is of job {job}; give each job its own folder")
    return folder / f"requeue-{count}"


def _started(process: int) -> str:
    """Returns when a process started, in the kernel's ticks; of another system, nothing."""
    try:
        text = Path(f"/proc/{process}/stat").read_text()
    except OSError:
        return ""
    return text.rpartition(")")[2].split()[19]  # field 22 of proc(5); the name may hold spaces
