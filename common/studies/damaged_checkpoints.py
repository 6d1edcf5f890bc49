"""Damages checkpoints on purpose: does a run name the damage and resume from the one before?

Started by torchrun, this file is also the program that resumes from each of them, one run after
another in one process group: starting the ranks anew would take longer than all of it.
"""

from __future__ import annotations

import re
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import pandas as pd
import yaml

from common.cluster.launch import launch
from common.errors import RunFailed, UserError
from common.exercises.checkpoint_commit import MANIFEST, finished_checkpoints
from common.runtime.group.process_group import process_group
from common.runtime.records.run_directory import read_environment
from common.runtime.script import parse_settings, run_script
from common.studies.killed_runs import RANKS, Training, equal_losses, read_steps
from common.training.config import config_of
from common.training.trainer import train

FILES = ("__1_0.distcp", ".metadata", "random-0.pt", MANIFEST)
TRUNCATED, FLIPPED, MISSING, DIGIT = "truncated", "flipped byte", "missing", "changed digit"
CASES = (
    *((name, way) for name in FILES for way in (TRUNCATED, FLIPPED, MISSING)),
    (MANIFEST, DIGIT),
)


def damage(path: Path, way: str) -> None:
    """Damages a file in one of four ways.

    Cuts half of it off, flips a bit in its middle, deletes it or, in a manifest, changes a digit
    of the step.
    """
    content = path.read_bytes()
    middle = len(content) // 2
    if way == MISSING:
        path.unlink()
    elif way == TRUNCATED:
        path.write_bytes(content[:middle])
    elif way == FLIPPED:
        path.write_bytes(content[:middle] + bytes([content[middle] ^ 1]) + content[middle + 1 :])
    else:
        step = re.search(rb'step\\": (\d)', content).start(1)
        digit = b"%d" % ((int(content[step : step + 1]) + 1) % 10)
        path.write_bytes(content[:step] + digit + content[step + 1 :])


def expected_words(name: str, way: str) -> str:
    """Returns a regular expression for the words in which a run must report the damage."""
    if way == MISSING:
        return re.escape(f"{name} is missing")
    if way == TRUNCATED and name != MANIFEST:
        return rf"{re.escape(name)} has [\d,]+ of [\d,]+ bytes"
    return re.escape(f"{name} has been changed")


def resume_from_damaged(reference: Training, folder: Path) -> pd.DataFrame:
    """Resumes from copies of two checkpoints of a finished run, the newer of which is damaged.

    Returns:
        One row per case: strategy, file, way, said (the line that reports the damage), named
        (whether that line is right), expected_step, resumed_from_step, losses_equal (whether
        the losses from there on are those of the reference bit for bit) and failed (why the ranks
        ended before this case's run was complete; empty where it is).
    """
    good = finished_checkpoints(reference.checkpoint_dir)
    newer, older = good[len(good) // 2 - 1 : len(good) // 2 + 1]
    cases = {f"case-{number:02d}": case for number, case in enumerate(CASES)}
    for case, (name, way) in cases.items():
        for path in (older, newer):
            shutil.copytree(path, folder / "checkpoints" / case / path.name)
        damage(folder / "checkpoints" / case / newer.name / name, way)
    settings = folder / "settings.yaml"
    settings.write_text(yaml.safe_dump(dict(reference.settings)))
    arguments = ["--folder", str(folder), "--strategy", reference.strategy]
    failed = ""
    try:
        launch(Path(__file__), arguments, RANKS, folder / "log")
    except (RunFailed, UserError) as error:
        failed = str(error)

    messages = _said_by_case((folder / "log").read_text())
    expected = int(older.name.rpartition("-")[2])
    undisturbed = read_steps(reference.attempts[0])
    rows = []
    for case, (name, way) in cases.items():
        run = folder / "runs" / case
        config = run / "config.yaml"
        resumed = None
        if config.is_file():  # the ranks came to this case
            resumed = yaml.safe_load(config.read_text())["resumed_from_step"]
        line = messages.get(case, "")
        named = re.search(rf"{newer.name} is damaged: {expected_words(name, way)}$", line)
        rows.append(
            {
                "strategy": reference.strategy,
                "file": name,
                "way": way,
                "said": line,
                "named": bool(named),
                "expected_step": expected,
                "resumed_from_step": resumed,
                "losses_equal": equal_losses(read_steps(run), undisturbed, expected),
                "failed": "" if read_environment(run)["status"] == "complete" else failed,
            }
        )
    return pd.DataFrame(rows)


def _said_by_case(log: str) -> Mapping[str, str]:
    """Maps each case to the line that names its damaged checkpoint, without the path before it."""
    messages: dict[str, str] = {}
    for part in log.split("case: ")[1:]:
        lines = [line for line in part.splitlines() if " is damaged: " in line]
        messages[part.split(maxsplit=1)[0]] = "; ".join(line.rpartition("/")[2] for line in lines)
    return messages


@dataclass(frozen=True)
class ResumeCases:
    """Resume from every checkpoint folder below FOLDER/checkpoints, one after another."""

    folder: str
    strategy: str


def resume_cases(cases: ResumeCases) -> None:
    """Runs a training from every folder of checkpoints; rank 0 prints which one comes."""
    folder = Path(cases.folder)
    kind = type(config_of(cases.strategy))
    with process_group("cpu") as worker:
        for path in sorted((folder / "checkpoints").iterdir()):
            if worker.is_main:
                print(f"case: {path.name}", flush=True)
            flags = ["--checkpoint_dir", str(path), "--run_id", path.name, "--no-profile"]
            flags += ["--output_dir", str(folder / "runs"), "--strategy", cases.strategy]
            settings = ["--config", str(folder / "settings.yaml"), *flags]
            train(parse_settings(kind, settings, "train"))


if __name__ == "__main__":
    run_script(resume_cases, ResumeCases)
