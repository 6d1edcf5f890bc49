"""``ddplab study survival``: does training survive what kills it?

Three parts, each a table of raw results in one run directory. A rank is killed by SIGKILL at a
random moment, often while a checkpoint is written or an old one deleted, and the same command is
given again (``trials.csv``). The newest checkpoint is damaged, and the run resumed
(``damage.csv``). Ranks are killed under ``torchrun --max-restarts`` (``restarts.csv``). Each time
the losses must be those of an undisturbed run, bit for bit. ``verdicts.csv`` holds all of it
against what was promised. Nothing is measured by time.
"""

from __future__ import annotations

import random
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import pandas as pd

from common.data.markov_text import synthetic_shards
from common.errors import RunFailed, UserError
from common.exercises.checkpoint_commit import OLD, PARTIAL, finished_checkpoints
from common.runtime.machine.environment import describe_environment
from common.runtime.records.study import say_tables, study_run
from common.runtime.stage_progress import StageProgress
from common.settings import NonNegative, Positive, Settings, SomeOf
from common.studies.damaged_checkpoints import resume_from_damaged
from common.studies.killed_runs import (
    RANKS,
    Launched,
    Training,
    equal_losses,
    kill,
    launched,
    run_to_the_end,
    unreadable,
)
from common.training.config import DDP_STRATEGIES, MY_FSDP

STRATEGIES = (*DDP_STRATEGIES, "FULL_SHARD", "SHARD_GRAD_OP", MY_FSDP)
SAVING, DELETING, ANY_MOMENT = "saving", "deleting", ""
AIMS = (SAVING, ANY_MOMENT, DELETING, ANY_MOMENT, SAVING)
"""Aims of the trials in turn: three of five at a checkpoint that is being written or deleted."""
MOST_DELAY_S = 0.08
"""Upper bound on the time between the aimed-at moment and the kill: as long as writing a
checkpoint takes."""
MAX_RESTARTS = 3
DATA_TOKENS = 200_000
JUDGED = (
    *("killed_rank", "processes_left", "unreadable_checkpoints", "newest_checkpoint"),
    *("resumed_from_step", "losses_equal", "unfinished_at_end"),
)
"""Columns of ``trials.csv`` that promises are held against."""


@dataclass(frozen=True)
class SurvivalStudy(Settings):
    """Settings of the study: the training, and how often it is disturbed."""

    trials: Annotated[int, NonNegative] = 30
    """Runs that are killed at a random moment."""
    restarts: Annotated[int, NonNegative] = 3
    """Launches with --max-restarts in which a rank is killed twice."""
    damage: bool = True
    """Also damage checkpoints and resume from them."""
    strategies: Annotated[tuple[str, ...], SomeOf(STRATEGIES, "strategy")] = ("DDP", "FULL_SHARD")
    """Strategies of the trials and launches, in turn."""
    num_steps: int = 30
    """Steps of each run."""
    save_every: Annotated[int, Positive] = 3
    """Steps between checkpoints."""
    seed: Annotated[int, NonNegative] = 0
    """Seed of the moments and ranks that are drawn."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.num_steps < 6 * self.save_every:
            raise UserError(
                f"num_steps {self.num_steps}: at least 6 × save_every, {6 * self.save_every}, so "
                "that there are checkpoints to kill and to resume from"
            )

    def training(self, strategy: str, folder: Path, data: Path, **settings: object) -> Training:
        """Returns a run of gpt2-pico that takes seconds and records each step when it is done."""
        common = {
            "data": str(data),
            "model": "gpt2-pico",
            "seq_len": 64,
            "lr": 0.003,
            "global_batch_size": 16,
            "micro_batch_size": 4,
            "num_steps": self.num_steps,
            "save_every": self.save_every,
            "log_every": 1,
            "device": "cpu",
        }
        return Training(strategy, common | settings, folder)


SETTINGS = SurvivalStudy


def run_study(study: SurvivalStudy, output_dir: str, progress: StageProgress) -> Path:
    """Runs all three parts and judges them; returns the run directory."""
    environment = describe_environment("gloo", "cpu", RANKS)
    with study_run("survival", study, output_dir, progress, environment) as run:
        runs = (run.path / "runs").absolute()
        data = synthetic_shards(runs / "tokens", DATA_TOKENS)
        references = {}
        with progress.stage("undisturbed runs"):
            for strategy in study.strategies:
                folder = runs / f"reference-{strategy}"
                keep = {"keep_checkpoints": study.num_steps}
                references[strategy] = study.training(strategy, folder, data, **keep)
                run_to_the_end(references[strategy])
        tables = {}

        def write(name: str, table: pd.DataFrame) -> None:
            tables[name] = table
            run.write_table(f"{name}.csv", table)

        write("trials", pd.DataFrame())
        for rows in try_kills(study, references, runs, data, progress):
            write("trials", pd.DataFrame(rows))  # whole after each
        if study.damage:
            write("damage", try_damage(references, runs, progress))
        write("restarts", try_restarts(study, references, runs, data, progress))
        verdicts = judge(tables["trials"], tables.get("damage"), tables["restarts"])
        run.write_table("verdicts.csv", verdicts)
    filled = [table for table in tables.values() if len(table)]
    say_tables(progress, *filled, verdicts, float_format=None)
    return run.path


def try_kills(
    study: SurvivalStudy,
    references: dict[str, Training],
    runs: Path,
    data: Path,
    progress: StageProgress,
) -> Iterator[list[dict]]:
    """Runs the trials, with synchronous and asynchronous checkpoints in turn.

    Yields after each the rows of all so far: trial, strategy, asynchronous, and ``one_trial``'s.
    """
    rows = []
    with progress.stage(f"{study.trials} runs in which a rank is killed") as update:
        for number in range(study.trials):
            strategy = study.strategies[number % len(study.strategies)]
            asynchronous = number // len(study.strategies) % 2 == 1
            training = study.training(
                strategy=strategy,
                folder=runs / f"trial-{number}",
                data=data,
                async_checkpoints="on" if asynchronous else "off",
            )
            chance = random.Random(f"{study.seed} {number}")
            row = {"trial": number, "strategy": strategy, "asynchronous": asynchronous}
            row |= one_trial(
                study, training, references[strategy], AIMS[number % len(AIMS)], chance
            )
            rows.append(row)
            update(f"{number + 1} of {study.trials}; losses equal: {row['losses_equal']}")
            yield rows


def one_trial(
    study: SurvivalStudy, training: Training, reference: Training, aim: str, chance: random.Random
) -> dict:
    """Starts a training, kills a rank, looks at what is left and runs the command again to its end.

    Returns what was seen, by column of ``trials.csv``. A training that hangs or cannot go on is a
    failed trial: ``failed`` says why, its losses are not equal, and what was not seen is missing.
    """
    row: dict[str, object] = {"failed": "", "losses_equal": False}
    row |= {"aimed_at_saving": bool(aim), "aimed_at": aim}
    try:
        with launched(training) as run:
            row["killed_rank"] = kill_at(run, study, aim, chance)
            row["exit_status"] = run.wait()
            row["processes_left"] = run.processes_left()
        checkpoints = finished_checkpoints(training.checkpoint_dir)
        row |= {
            "killed_after_step": training.steps_done(1),
            "left_unfinished": " ".join(sorted(training.being_changed())),
            "checkpoints_found": len(checkpoints),
            "unreadable_checkpoints": len(unreadable(training.checkpoint_dir)),
            "newest_checkpoint": int(checkpoints[0].name.rpartition("-")[2]) if checkpoints else 0,
        }
        run_to_the_end(training)
        return row | {
            "resumed_from_step": training.resumed_step(2),
            "losses_equal": equal_losses(training.rows(), reference.rows()),
            "unfinished_at_end": len(training.being_changed()),
        }
    except RunFailed as error:
        return row | {"failed": str(error)}


def kill_at(run: Launched, study: SurvivalStudy, aim: str, chance: random.Random) -> int | None:
    """Kills a random rank at a random moment; returns the rank, or None if the run ended before.

    Rank 0 deletes old checkpoints: with that aim it is the rank that is killed.
    """
    every = study.save_every
    # With an aim, one of the saves is drawn: not one of the last two, and for a deletion none of
    # the first two, which leave nothing to delete. The run is watched from the step after the save
    # before. Without an aim any step is drawn but the last four.
    saves = study.num_steps // every - 2
    last_step = study.num_steps - 4
    step = every * chance.randint(3 if aim == DELETING else 1, saves) if aim else None
    begin = step - every + 1 if step else chance.randint(1, last_step)
    rank = 0 if aim == DELETING else chance.randrange(RANKS)
    delay_s = 0 if aim == DELETING else chance.uniform(0, MOST_DELAY_S)
    if not run.wait_for_step(1):
        return None
    process = run.workers().get(rank)
    prefix = {SAVING: (f"{PARTIAL}{step or 0:08d}",), DELETING: (OLD,)}.get(aim)
    reached = run.wait_for_step(begin) and (
        not prefix or run.wait_until(lambda: run.training.being_changed(prefix))
    )
    if not reached or process is None:
        return None
    time.sleep(delay_s)
    return rank if kill(process) else None


def try_damage(
    references: dict[str, Training], runs: Path, progress: StageProgress
) -> pd.DataFrame:
    """Resumes after every kind of damage under every strategy; returns a row for each."""
    tables = []
    with progress.stage("damaged checkpoints") as update:
        for strategy, reference in references.items():
            update(strategy)
            tables.append(resume_from_damaged(reference, runs / f"damaged-{strategy}"))
    return pd.concat(tables)


def try_restarts(
    study: SurvivalStudy,
    references: dict[str, Training],
    runs: Path,
    data: Path,
    progress: StageProgress,
) -> pd.DataFrame:
    """Launches trainings whose ranks torchrun restarts after each of two kills; a row for each."""
    rows = []
    third = study.num_steps // 3
    with progress.stage(f"{study.restarts} launches that restart by themselves") as update:
        for number in range(study.restarts):
            strategy = study.strategies[number % len(study.strategies)]
            training = study.training(strategy, runs / f"restarts-{number}", data)
            chance = random.Random(f"{study.seed} restarts {number}")
            kills, status, processes_left = 0, None, None  # of a launch that hangs
            with suppress(RunFailed), launched(training, MAX_RESTARTS) as run:
                for attempt in (1, 2):
                    step = attempt * third - chance.randrange(third)
                    run.wait_for_step(step, attempt)
                    process = run.workers().get(chance.randrange(RANKS))
                    kills += bool(process and kill(process))
                status, processes_left = run.wait(), run.processes_left()
            rows.append(
                {
                    "launch": number,
                    "strategy": strategy,
                    "kills": kills,
                    "restarts": len(training.attempts) - 1,
                    "exit_status": status,
                    "losses_equal": equal_losses(training.rows(), references[strategy].rows()),
                    "processes_left": processes_left,
                }
            )
            update(f"{number + 1} of {study.restarts}")
    return pd.DataFrame(rows)


def judge(
    trials: pd.DataFrame | None, damage: pd.DataFrame | None, restarts: pd.DataFrame | None
) -> pd.DataFrame:
    """Counts the cases in which each promise held; returns a row per promise.

    Columns: promise, found (cases in which it held), of (all cases) and held. A part that was not
    run is None.
    """
    rows: list[tuple[str, int, int]] = []  # promise, found, expected

    def all_of(promise: str, held: pd.Series) -> None:
        rows.append((promise, int(held.sum()), len(held)))

    if trials is not None and len(trials):
        # Trials that failed lack what was not looked at, and where all failed so does the table.
        trials = trials.reindex(columns=[*dict.fromkeys([*trials, *JUDGED])])
        all_of("a rank was killed before the run was done", trials["killed_rank"].notna())
        all_of("no process was left", trials["processes_left"] == 0)
        all_of("every checkpoint left was readable", trials["unreadable_checkpoints"] == 0)
        newest = trials["resumed_from_step"] == trials["newest_checkpoint"]
        all_of("the newest checkpoint was resumed from", newest)
        all_of("losses equal the undisturbed run's bit for bit", trials["losses_equal"])
        all_of("nothing unfinished was left in the end", trials["unfinished_at_end"] == 0)
    if damage is not None:
        all_of("damage was named: which checkpoint, which file and how", damage["named"])
        before = damage["resumed_from_step"] == damage["expected_step"]
        all_of("the checkpoint before the damaged one was resumed from", before)
        all_of("losses equal, from there on", damage["losses_equal"])
    if restarts is not None and len(restarts):
        restarted = (restarts["exit_status"] == 0) & (restarts["restarts"] == restarts["kills"])
        all_of(
            "a launch with --max-restarts went on by itself", restarted & (restarts["kills"] == 2)
        )
        all_of("losses equal over its restarts", restarts["losses_equal"])
        all_of("no process was left of it", restarts["processes_left"] == 0)
    table = pd.DataFrame(rows, columns=["promise", "found", "of"])
    return table.assign(held=table["found"] == table["of"])
