"""Reads the tables of a run as evidence, and nothing that says what was done to it.

Settings are not read. A cause is judged by what was timed, counted or seen; ``arms.csv`` says which
steps belong together and what a change would start from.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

import numpy as np
import pandas as pd
from ddplab_watch import surroundings

from common import tables
from common.analysis.runs import OfRun, Run, complete_runs, given_folder, recorded_assignment
from common.analysis.step_parts import STEP, TIMED, StepParts, decompose, flags
from common.analysis.sweep_speedups import step_times_by_round, unwatched_steps
from common.csv_tables import read_table
from common.diagnose.evidence.bucket_waits import NOT_WAITING, BucketWaits, bucket_waits
from common.errors import UserError
from common.runtime.group.network import UNKNOWN_GROUP
from common.runtime.paths import project_root, relative_to_project
from common.samples import slowest_rank

ASSIGNMENT = "assignment4"
ARMS, STEPS, BUCKETS = "arms.csv", "steps.csv", "buckets.csv"
SAMPLES, PLACEMENT, FACTS = "samples.csv", "placement.csv", "facts.csv"
PROBES, COSTS, EPOCHS = "probes.csv", "costs.csv", "epochs.csv"
STACKS, STALLS, SURROUNDINGS = "stacks.csv", "stalls.csv", "surroundings.csv"
TRIALS, HOST_WAITS, EXCHANGING = "trials.csv", "host-waits.csv", "passes-exchanging.csv"
LEAN_PASSES = "lean-passes.csv"
TRACE_STEPS, TRACE_OPERATIONS = "trace-steps.csv", "trace-operations.csv"
"""Tables that only watched scripts have."""
READY_TIMES, ALL_REDUCE = "gradient-ready-times.csv", "allreduce-samples.csv"
SURROUNDING_COLUMNS = ("rank", "host", *surroundings.COLUMNS)
COLUMNS = {
    ARMS: tables.ARM_COLUMNS,
    STEPS: tables.STEP_COLUMNS,
    BUCKETS: tables.BUCKET_COLUMNS,
    SAMPLES: tables.SAMPLE_COLUMNS,
    PLACEMENT: tables.PLACEMENT_COLUMNS,
    FACTS: tables.FACT_COLUMNS,
    PROBES: tables.PROBE_COLUMNS,
    COSTS: tables.COST_COLUMNS,
    EPOCHS: tables.EPOCH_COLUMNS,
    STACKS: tables.STACK_COLUMNS,
    STALLS: tables.STALL_COLUMNS,
    SURROUNDINGS: SURROUNDING_COLUMNS,
    TRIALS: tables.TRIAL_COLUMNS,
    HOST_WAITS: tables.HOST_WAIT_COLUMNS,
    EXCHANGING: tables.EXCHANGING_COLUMNS,
    LEAN_PASSES: tables.LEAN_PASS_COLUMNS,
    TRACE_STEPS: tables.TRACE_STEP_COLUMNS,
    TRACE_OPERATIONS: tables.TRACE_OPERATION_COLUMNS,
}
NEEDED = (ARMS, STEPS)
ELEMENTS = "elements"
"""Column of the steps and the probes of watched scripts: the size of their batches."""
ALIKE = 1.2
"""Batches whose sizes differ by less take equally long, within a machine's noise."""


class NotJudged(Exception):
    """A cause cannot be judged; the message says what is missing."""


@dataclass(frozen=True, eq=False)
class Evidence(OfRun):
    """One arm of a run.

    Attributes:
        opened: the run; of its environment record only what it ran on is looked at: network,
            process group, torch's version, number of ranks.
        arm: the row of ``arms.csv``.
        tables: file name → table that was found; of tables with arms, this arm's rows.
        all_arms: file name → table with the rows of every arm, as it was read.
        waits: waits of backward passes for each bucket, where there are; ``tables`` count them as
            exchange.
    """

    arm: pd.Series
    tables: Mapping[str, pd.DataFrame]
    all_arms: Mapping[str, pd.DataFrame]
    waits: BucketWaits | None = None

    @property
    def name(self) -> str:
        """Returns the folder as a user would type it."""
        return relative_to_project(self.folder)

    @property
    def world_size(self) -> int:
        """Returns the number of ranks that wrote steps."""
        return int(self.tables[STEPS]["rank"].nunique())

    @property
    def emulated(self) -> bool:
        """Returns True if the hosts share one machine."""
        return "emulated" in str(self.opened.environment.get("network", ""))

    @property
    def torch(self) -> str:
        """Returns torch's version; empty where it was not recorded."""
        return str(self.opened.environment.get("packages", {}).get("torch", ""))

    @property
    def process_group(self) -> str:
        """Returns the class that sends gradients, such as ProcessGroupNCCL; empty if not known.

        Earlier records have the backend only, which meant one class before torch 2.15.
        """
        environment = self.opened.environment
        if recorded := environment.get("process_group"):
            return "" if recorded == UNKNOWN_GROUP else str(recorded)
        classes = dict(zip(("gloo", "nccl"), NOT_WAITING, strict=True))
        numbers = self.torch.split("+")[0].split(".")[:2]
        version = [int(number) for number in numbers if number.isdecimal()]
        if environment.get("backend") == "nccl" and not [0] < version < [2, 15]:
            return ""
        return classes.get(environment.get("backend"), "")

    @property
    def watched(self) -> bool:
        """Returns True for somebody's own script, whose flags are not this project's."""
        return self.opened.environment.get("label") == "watch"

    def file(self, name: str) -> str:
        """Returns the words in which a sentence on another run names a table of this one."""
        return f"[{name} of {self.name}]"

    def need(self, name: str) -> pd.DataFrame:
        """Returns a table; raises NotJudged where it is missing or has no rows."""
        if name not in self.tables:
            raise NotJudged(f"no {name} in {self.name}")
        if self.tables[name].empty:
            raise NotJudged(f"{name} in {self.name} has no rows of arm {self.arm['arm']}")
        return self.tables[name]

    def rows(self, name: str) -> pd.DataFrame:
        """Returns a table; one without rows where the run has none."""
        return self.tables.get(name, pd.DataFrame(columns=list(COLUMNS[name])))

    @property
    def gradient_bytes(self) -> float:
        """Returns the bytes of the model's gradients; raises NotJudged where they are not known."""
        size = float(self.need(FACTS)["gradient_bytes"].max())
        if not size > 0:
            raise NotJudged(f"{FACTS} in {self.name} knows no parameter with a gradient")
        return size

    @property
    def sharded(self) -> bool:
        """Returns True for a script whose model is sharded: its passes exchange parameters."""
        facts = self.rows(FACTS)
        return "sharded_modules" in facts and bool((facts["sharded_modules"] > 0).any())

    @property
    def loader_workers(self) -> float:
        """Returns the most worker processes of a rank's loader; nan where nobody counted them."""
        facts = self.rows(FACTS)
        if "loader_workers" not in facts:
            return float("nan")
        return float(pd.to_numeric(facts["loader_workers"], errors="coerce").max())

    @property
    def own_passes(self) -> pd.DataFrame:
        """Returns the probes of all ranks at once with batches of the script's own size."""
        probes = self.rows(PROBES)
        return probes[flags(probes["together"]) & (probes["batch_per_rank"] == self.batch_per_rank)]

    @cached_property
    def measured(self) -> pd.DataFrame:
        """Returns the steps that are no warm-up, of all kinds."""
        steps = self.tables[STEPS]
        return steps[~flags(steps["warmup"])].fillna(dict.fromkeys(STEP, 0))

    @cached_property
    def timed(self) -> pd.DataFrame:
        """Returns those measured in parts; raises NotJudged where there are none."""
        timed = self.measured[self.measured["kind"] == TIMED]
        if timed.empty:
            raise NotJudged(f"{STEPS} in {self.name} has no steps measured in parts")
        return timed

    def by_step(self, column: str) -> pd.DataFrame:
        """Returns a column of the steps that have it: a row per step, a column per rank.

        A benchmark's plain steps have no parts, and only their timed ones count. A watched script's
        plain steps are the same steps, and have those parts that can be seen without DDP's buckets.
        """
        if column not in self._by_step:
            rows = (self.measured if self.watched else self.timed).dropna(subset=column)
            by_step = rows.groupby([*STEP, "rank"])[column].mean().unstack().dropna()
            self._by_step[column] = by_step
        return self._by_step[column]

    @cached_property
    def _by_step(self) -> dict[str, pd.DataFrame]:
        """Keeps what ``by_step`` has returned: causes ask for the same columns again and again."""
        return {}

    @cached_property
    def slowest_ms(self) -> pd.Series:
        """Returns the slowest rank's time of each step that ``by_step`` has."""
        return self.by_step("step_time_ms").max(axis=1)

    @cached_property
    def parts(self) -> StepParts:
        """Returns the mean step in parts; raises NotJudged where no step was measured in parts."""
        if self.timed.empty:
            raise NotJudged(f"{STEPS} in {self.name} has no steps measured in parts")
        parts = decompose(self.tables[STEPS], int(self.arm["arm"]), self.tables.get(BUCKETS))
        return replace(parts, hidden_communication_ms=0.0) if self.waits else parts

    @cached_property
    def unwatched(self) -> pd.DataFrame:
        """Returns the measured rows that the run's speed is taken from (``unwatched_steps``)."""
        return unwatched_steps(self.measured)

    @cached_property
    def step_times_ms(self) -> pd.Series:
        """Returns the slowest rank's time of each unwatched step, in the order of the run."""
        return slowest_rank(self.unwatched, "step_time_ms", by=STEP)

    @cached_property
    def mixed(self) -> bool:
        """Returns True for a script whose steps differ in the size of their batches.

        No median step stands for all of them then: means do.
        """
        if not self.watched:
            return False
        column = ELEMENTS if ELEMENTS in self.measured else "padded_tokens"
        sizes = self.by_step(column).mean(axis=1)
        return bool(sizes.quantile(0.95) > ALIKE * sizes.quantile(0.05))

    def usual(self, column: str) -> pd.Series:
        """Returns a column of the usual step, by rank; of mixed steps the mean unwatched one's."""
        if self.mixed:
            return self.unwatched.groupby("rank")[column].mean()
        return self.by_step(column).median()

    @cached_property
    def step_ms(self) -> float:
        """Returns the median over rounds of a round's median step, as a sweep's speedups do.

        Of mixed steps it is the mean.
        """
        if self.mixed:
            return float(self.step_times_ms.mean())
        return float(step_times_by_round(self.measured)[self.arm["arm"]].median())

    @cached_property
    def noise(self) -> float:
        """Returns the standard error of ``step_ms``, as a share of it."""
        if self.mixed:
            return float(self.step_times_ms.sem()) / self.step_ms
        return standard_error(self.step_times_ms) / self.step_ms

    @property
    def samples_per_step(self) -> float:
        """Returns the samples that all ranks together take in the step of ``step_ms``."""
        samples = self.unwatched.groupby(STEP)["samples"].sum()
        return float(samples.mean() if self.mixed else samples.median())

    @property
    def throughput(self) -> float:
        """Returns the samples of all ranks per second, at the usual unwatched step."""
        return self.samples_per_step / self.step_ms * 1e3

    @property
    def batch_per_rank(self) -> int:
        return int(self.arm["batch_per_rank"])

    @property
    def accumulation(self) -> int:
        return int(self.arm["accumulation"])

    def of_arm(self, arm: int) -> Evidence:
        """Returns the evidence of another arm of the same run; no file is read again.

        Raises UserError for no such arm, or no measured step in it.
        """
        return evidence_of(self.opened, self.all_arms, arm)

    def of_round(self, round_: int) -> Evidence:
        """Returns the evidence of one round's steps; what was measured apart stays."""
        tables = dict(self.tables)
        for name in {STEPS, BUCKETS} & set(tables):
            tables[name] = tables[name][tables[name]["round"].fillna(0) == round_]
        return replace(self, tables=tables)


def standard_error(values: Sequence[float] | pd.Series) -> float:
    """Returns the standard error of the median of values that may have outliers, or be missing.

    Of n normal values the median's is 1.2533 σ/√n (√(π/2) times that of the mean), and σ is
    1.4826 times the median absolute deviation, which a few hiccups leave as it is.
    """
    array = np.asarray(values, dtype=float)
    array = array[np.isfinite(array)]
    if not len(array):
        return float("nan")
    deviation = np.median(np.abs(array - np.median(array)))
    return float(1.2533 * 1.4826 * deviation / np.sqrt(len(array)))


def open_evidence(folder: Path | str, arm: int | None = None) -> Evidence:
    """Opens the evidence of one arm of a run.

    Args:
        folder: run directory, complete or not.
        arm: number in ``arms.csv``; by default that with most ranks and no change, the first of
            several.

    Raises:
        UserError: no such folder, no ``arms.csv`` or ``steps.csv``, a table of another schema, no
            such arm, or no measured step in it.
    """
    folder = given_folder(folder)
    for name in NEEDED:
        if not (folder / name).is_file():
            raise UserError(
                f"{relative_to_project(folder)}: no {name}; a diagnosis needs a complete run of "
                "assignment 4 (benchmark.py or train_text.py)"
            )
    return evidence_of(Run(folder, folder), read_tables(folder, (ARMS,)), arm)


def read_tables(folder: Path, with_rows: Sequence[str]) -> dict[str, pd.DataFrame]:
    """Reads the tables of a run, each once, by file name.

    Args:
        folder: run directory; tables that ``with_rows`` does not name may be missing.
        with_rows: names of tables that must be there and have rows.

    Raises UserError for a table of another schema, or one that is missing or empty and must not be.
    """
    return {
        name: _read(folder / name, of_table, must_have_rows=name in with_rows)
        for name, of_table in COLUMNS.items()
        if name in with_rows or (folder / name).is_file()
    }


def evidence_of(
    opened: Run, all_arms: Mapping[str, pd.DataFrame], arm: int | None = None
) -> Evidence:
    """Returns the evidence of one arm from tables that were read.

    Args:
        opened: the run.
        all_arms: tables of the run, as ``read_tables`` returns them.
        arm: number of the arm, or None as for ``open_evidence``.

    Raises UserError for no such arm, or no measured step in it.
    """
    row = _choose(all_arms[ARMS], arm, opened.folder)
    tables = dict(all_arms)
    for name, table in all_arms.items():
        if "arm" in table.columns and name != ARMS:
            arm_rows = table[table["arm"] == row["arm"]]
            # Probes of another arm serve as well: times are per sample, all-reduces per byte.
            tables[name] = table if arm_rows.empty and name == PROBES else arm_rows
    evidence = Evidence(opened, row, tables, all_arms)
    if evidence.measured.empty:
        raise UserError(
            f"{relative_to_project(opened.folder / STEPS)}: arm {row['arm']} has no step after its "
            "warm-up"
        )
    waits = bucket_waits(
        tables[STEPS],
        tables.get(BUCKETS),
        tables.get(PROBES),
        evidence.process_group,
        evidence.batch_per_rank,
    )
    if waits is None:
        return evidence
    counted = tables | {STEPS: waits.counted_as_exchange(tables[STEPS])}
    return replace(evidence, tables=counted, waits=waits)


def baseline_arm(evidence: Evidence) -> int | None:
    """Returns the arm of the same run that shows the same on one rank; None where there is none."""
    arms = evidence.tables[ARMS].astype({"regime": object, "change": object})
    arms = arms.fillna({"regime": "", "change": "none"})
    arm = arms[arms["arm"] == evidence.arm["arm"]].iloc[0]
    batch = "global_batch" if arm["regime"] == "strong" else "batch_per_rank"
    same = (arms[["regime", "change", batch]] == arm[["regime", "change", batch]]).all(axis=1)
    candidates = arms[same & (arms["world_size"] == 1)]
    return int(candidates["arm"].iloc[0]) if len(candidates) else None


def _choose(arms: pd.DataFrame, arm: int | None, folder: Path) -> pd.Series:
    if arm is not None:
        rows = arms[arms["arm"] == arm]
        if rows.empty:
            raise UserError(
                f"{relative_to_project(folder)}: no arm {arm}; {ARMS} has "
                f"{', '.join(map(str, arms['arm']))}"
            )
        return rows.iloc[0]
    unchanged = arms[arms["change"].fillna("none") == "none"]
    candidates = unchanged if len(unchanged) else arms
    return candidates.loc[candidates["world_size"].idxmax()]


def _read(path: Path, of_table: Sequence[str], *, must_have_rows: bool) -> pd.DataFrame:
    """Reads a table of this schema; one with a header alone is a table without rows."""
    try:
        return read_table(path, of_table)
    except UserError as error:
        if "no rows" in str(error) and not must_have_rows:
            return pd.DataFrame(columns=list(of_table))
        raise


def choose_run(run_dir: str | Path | None, holds: Callable[[Path], object]) -> Path:
    """Returns the folder that is named, else the newest complete run's, else the recorded one.

    Args:
        run_dir: run directory, or a folder of such; empty for none.
        holds: returns something true for a run that has what is looked for.

    Raises UserError where the folder that is named is none.
    """
    if run_dir:
        return given_folder(run_dir)
    complete = complete_runs(
        project_root() / "outputs" / ASSIGNMENT, "environment.json", places=("*/",)
    )
    newest = next((run.folder for run in reversed(complete) if holds(run.folder)), None)
    return newest or recorded_assignment(ASSIGNMENT)
