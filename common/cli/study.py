"""``ddplab study``: evidence that takes longer than a test."""

from __future__ import annotations

import importlib
from dataclasses import dataclass, replace
from typing import Annotated, Literal

import tyro

from common.cli.help import Subcommands
from common.errors import UserError

STUDIES = {
    "memory": ("studies.memory", "predicted against tracked", 25),
    "models": ("studies.model_steps", "steps of transformers' models on one device", 2),
    "survival": ("studies.survival", "killed runs, damaged checkpoints", 15),
    "diagnosis": ("diagnose.studies.planted", "planted faults and what is named", 30),
    "scripts": ("diagnose.studies.watched_scripts", "ddplab diagnose on scripts of others", 140),
    "onsets": ("diagnose.studies.onsets", "diagnose --to_end on faults that begin in a run", 180),
    "gate": ("diagnose.studies.gate_pairs", "diagnose --compare on equal and slower pairs", 15),
    "accuracy": ("studies.accuracy.accuracy", "predicted steps on unseen bucketings", 140),
    "exchange": ("studies.exchange.exchange", "T(b) over an exchange of known duration", 12),
    "steps": ("studies.whole_steps", "whole steps of DDP and FSDP between hosts", 20),
    "traces": ("studies.traces.traces", "changes predicted from traces, then made", 23),
    "tune": ("studies.tune_check", "recommended caps against exhaustive sweeps", 90),
    "plan": ("studies.plan_truth", "chosen plans against every plan, and their memory", 130),
    "public": ("studies.public.public", "published multi-GPU rows, predicted and scored", 2),
    "cs336": ("course.studies.cs336", "the exercises under another course's tests", 2),
    "grading": ("course.studies.grading", "the same points ten times, mistakes found", 90),
}
"""Study → its module below common, what it shows, and minutes on two cores. The module has
``run_study``, and ``SETTINGS``, which makes its settings; one with ``closing_line`` has that said
last."""


@dataclass(frozen=True)
class Study:
    """Run a study. ddplab study --help lists them, with what each shows and how long it takes."""

    what: Annotated[Literal[tuple(STUDIES)], tyro.conf.Positional]
    """Study to run."""
    output_dir: str = "outputs/studies"
    """Folder that the study's run directory is made in."""
    continues: str = ""
    """Run directory of an accuracy, exchange, grading, onsets, plan, scripts, traces or tune study
    that was cut: what is complete stays."""
    assignments: tuple[int, ...] = ()
    """For grading alone: assignments that it grades; by default all."""
    only: tuple[str, ...] = ()
    """Cases or causes to run, for diagnosis, exchange, models, onsets, plan, scripts and tune; for
    grading gradings or kinds of them (such as reference), class, or kinds of hand-ins, then one
    each. By default all cases (of scripts, those of its newest set)."""
    rounds: int | None = None
    """Rounds of each case, for a study that has rounds; by default the study's own number."""
    tests: str = ""
    """For cs336 alone: folder of a clone of Stanford CS336's assignment 2; its tests run on the
    exercises' solutions."""
    table: tuple[str, ...] = ()
    """For public: tables of published rows, or folders with training.csv and collectives.csv. For
    gate: bundles whose own steps are paired, each bundle by itself, in place of a run that it
    would make."""

    def run(self) -> None:
        """Runs the study and says where the results are."""
        from common.runtime.stage_progress import StageProgress

        module_name, *_ = STUDIES[self.what]
        try:
            module = importlib.import_module(f"common.{module_name}")
        except ModuleNotFoundError as error:
            if not (error.name or "").startswith("common."):
                raise
            raise UserError(f"study {self.what} is not in a student's tree") from None
        if self.rounds is not None and self.rounds < 1:
            raise UserError(f"--rounds {self.rounds}: at least 1")
        settings = module.SETTINGS()
        refusals = {
            "continues": "cannot be continued",
            "only": "runs all of its cases",
            "rounds": "has no rounds to choose",
            "tests": "has no tests of others",
            "assignments": "is not of assignments",
            "table": "reads no published rows",
        }
        for option, why_not in refusals.items():
            if (value := getattr(self, option)) in (None, "", ()):
                continue
            if not hasattr(settings, option):
                raise UserError(f"--{option}: study {self.what} {why_not}")
            settings = replace(settings, **{option: value})
        progress = StageProgress()
        path = module.run_study(settings, self.output_dir, progress)
        progress.say(f"Done in {progress.elapsed_s:.0f} s: {path}")
        if hasattr(module, "closing_line"):
            progress.say(module.closing_line(path))


SUBCOMMANDS = Subcommands(
    about="What the project's claims rest on, measured anew on this machine.",
    groups={
        "What it shows, and minutes on two cores": {
            name: (Study, f"{shows}; {minutes}") for name, (_, shows, minutes) in STUDIES.items()
        },
    },
    noun="study",
)
