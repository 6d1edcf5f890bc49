"""Changes that a diagnosis proposed, made: predicted speedup against achieved.

Read from a run of ``verify_changes.py``: what was predicted before anything was run
(``proposals.csv``), and the arms of each change on one rank and on all.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from common.analysis.comparable import difference
from common.analysis.runs import Run, caption_of, complete_runs
from common.analysis.show import Table, facts, interval_format, show
from common.analysis.style import BLUE, GOOD_EFFICIENCY, GREY, ORANGE, figure
from common.analysis.sweep_speedups import NO_CHANGE, error_bars, speedups_by_round, sweep_speedups
from common.csv_tables import read_table
from common.diagnose.diagnosis import diagnosis_lines
from common.diagnose.evidence.evidence import choose_run
from common.judged import (
    DISTURBED,
    FIRST_PAGE_ROUNDS,
    NOT_WITNESSED,
    Fastest,
    Judged,
    compared,
    fastest,
)
from common.runtime.wording import counted

PROPOSALS, SWEEP = "proposals.csv", "assignment4-sweep"
PREDICTED = (
    "change",
    "regime",
    "world_size",
    "global_batch",
    "global_batch_changed",
    "predicted_speedup",
    "predicted_efficiency",
)
CHANGES = {
    "change": "change",
    "told": "told from no change",
    ("global_batch", "global_batch_changed"): (
        "global batch",
        lambda batch, changed: f"{batch} ({'changed' if changed else 'as before'})",
    ),
    "predicted_speedup": "predicted speedup",
    "speedup": "achieved",
    "judged": ("95 % interval", interval_format()),
    "error": "error",
    "gain_error": ("error of the gain", "{:+.1%}"),
    "efficiency": ("efficiency", "{:.0%}"),
}
"""Titles of a table of ``Changes``; the second column says first whether a change did something."""
CLOSE = 0.10
"""A prediction this close to what was achieved is called right."""


@dataclass(frozen=True, eq=False)
class Changes:
    """A run of ``verify_changes.py``.

    ``table`` has a row per change, the first without one: change, world_size, global_batch,
    global_batch_changed, predicted_speedup, speedup, speedup_low, speedup_high, efficiency, step_ms
    (of all ranks), judged (the speedup as it may be said), error (predicted over achieved speedup,
    minus 1), gain_error (the same of the speedups over those without a change: what a machine that
    has become slower or faster since the sweep does to both sides alike is not in it).

    Attributes:
        rounds: speedups over one rank under the same change: a row per round, a column per change.
        scope, machine: what was measured, and the state of the machine (``Judged``).
    """

    table: pd.DataFrame
    caption: str
    model: str
    rounds: pd.DataFrame
    scope: str = ""
    machine: str = NOT_WITNESSED

    @property
    def ranks(self) -> int:
        """Returns the number of ranks of the run."""
        return int(self.table["world_size"].iloc[0])

    @cached_property
    def told(self) -> dict[str, Judged]:
        """Judges each change's speedup over that of the configuration as it was.

        Both are over one rank; all four arms of a pair are of the same round.
        """
        return compared(self.rounds, NO_CHANGE, **self.conditions)

    @cached_property
    def best(self) -> Fastest | None:
        """Returns the configuration of the greatest speedup, the unchanged one among them."""
        return fastest(1 / self.rounds, **self.conditions)

    @property
    def lead(self) -> Judged | None:
        """Returns the lead of ``best`` over its closest rival."""
        return self.best and self.best.lead

    @property
    def conditions(self) -> dict[str, object]:
        """Returns scope, state of the machine and least rounds, as ``Judged`` takes them."""
        return {
            "scope": self.scope,
            "machine": self.machine,
            "least_rounds": FIRST_PAGE_ROUNDS,
        }


@dataclass(frozen=True, eq=False)
class ChangesLab:
    """Shows the proposed changes of a run: the diagnosis they follow from, and what they brought.

    ``changes`` is None, and ``left_out`` says why, where there is no such run.
    """

    changes: Changes | None
    diagnosis: tuple[str, ...]
    left_out: str = ""

    def diagnosis_text(self) -> str:
        """Returns the diagnosis of the sweep that the changes start from, as Markdown."""
        return "\n".join(["```text", *self.diagnosis, "```"]) if self.diagnosis else self.left_out

    def facts(self) -> Table | None:
        """Returns how many predictions were right and how many changes suffice, as a table."""
        return facts(changes_facts(self.changes)) if self.changes else None

    def table(self) -> Table | None:
        """Returns a row per change."""
        return self.changes and show(judged_changes(self.changes), CHANGES)

    def figure(self) -> Figure | None:
        """Draws predicted and achieved speedup by change."""
        return changes_figure(self.changes) if self.changes else None


def open_changes_lab(run_dir: str | Path | None = None) -> ChangesLab:
    """Opens the changes verified in a run directory or below it, the newest of several.

    By default the newest complete run below outputs/assignment4 that has some, or else recorded
    ones. Raises UserError for no such directory.
    """
    folders = find_changes(choose_run(run_dir, find_changes))
    if not folders:
        return ChangesLab(None, (), "No proposed change was run here (no proposals.csv).")
    changes = open_changes(folders[-1])
    sweep = sweep_before(folders[-1], changes)
    diagnosis = diagnosis_lines(sweep[0].folder, arm=sweep[1]) if sweep else ()
    return ChangesLab(changes, tuple(diagnosis))


def sweep_before(folder: Path, changes: Changes) -> tuple[Run, int] | None:
    """Returns the sweep beside a run of changes, and the arm of it that the changes start from.

    That is one of the same program on the same device and network; None where there is no such.
    """
    before, environment = changes.table.iloc[0], Run(folder, folder).environment
    for run in complete_runs(folder.parent, "arms.csv", places=("*/",)):
        its = run.environment
        if its.get("label") != SWEEP or difference([("sweep", its), ("changes", environment)]):
            continue
        arms = run.table("arms.csv")
        fits = arms[
            (arms["world_size"] == before["world_size"])
            & (arms["global_batch"] == before["global_batch"])
            & (arms["regime"] == before["regime"])
        ]
        if len(fits):
            return run, int(fits["arm"].iloc[0])
    return None


def find_changes(folder: Path) -> list[Path]:
    """Finds the complete runs of ``verify_changes.py`` in a folder or below it, oldest first."""
    runs = complete_runs(folder, PROPOSALS, places=("", "*/", "*/*/"))
    return [run.folder for run in runs]


def open_changes(folder: Path) -> Changes:
    """Opens the changes of a run. Raises UserError where a table is missing or another one."""
    proposals = read_table(folder / PROPOSALS, PREDICTED)
    arms = read_table(folder / "arms.csv", ("arm", "change", "world_size"))
    steps = read_table(folder / "steps.csv", ("arm", "kind", "step_time_ms"))
    opened = Run(folder, folder)
    achieved = sweep_speedups(arms, steps, opened.machine_state)
    achieved = achieved[achieved["world_size"] > 1].set_index("change")
    rounds = speedups_by_round(arms, steps)
    names = {arm: change for change, arm in achieved["arm"].items() if arm in rounds}
    rounds = rounds[[*names]].rename(columns=names)
    columns = ["speedup", "speedup_low", "speedup_high", "efficiency", "step_ms", "judged"]
    table = proposals[list(PREDICTED)].join(achieved[columns], on="change")
    table["error"] = table["predicted_speedup"] / table["speedup"] - 1
    table["gain_error"] = (1 + table["error"]) / (1 + table["error"].iloc[0]) - 1
    model = read_table(folder / "facts.csv", ("model",))["model"].iloc[0]
    caption = caption_of(opened.environment, folder)
    ranks = counted(int(table["world_size"].iloc[0]), "rank")
    scope = f"{model}; {ranks}, {opened.environment.get('network') or 'loopback'}"
    return Changes(table, caption, str(model), rounds, scope, opened.machine_state)


def changes_facts(changes: Changes) -> dict[str, str]:
    """Counts the predictions that were right and the changes that suffice, for ``show.facts``."""
    after = changes.table.iloc[1:]
    if after.empty:
        return {"changes proposed": "none that would help by more than the noise"}
    count = len(after)
    right = int((after["error"].abs() <= CLOSE).sum())
    gains_right = int((after["gain_error"].abs() <= CLOSE).sum())
    good = int((after["efficiency"] >= GOOD_EFFICIENCY).sum())
    worst = after.loc[after["gain_error"].abs().idxmax()]
    return {
        "the change that helps most": best_or_tied(changes),
        "changes proposed and run": f"{count}",
        f"predicted speedups within {CLOSE:.0%} of the achieved": f"{right} of {count}",
        "the same, relative to the unchanged step of this run": f"{gains_right} of {count}",
        "largest error of a gain": f"{worst['gain_error']:+.1%} ({worst['change']})",
        f"changes that reach {GOOD_EFFICIENCY:.0%} of the ideal": f"{good} of {count}",
    }


def best_or_tied(changes: Changes) -> str:
    """Returns the change whose speedup is told from all others, or which are tied."""
    best, lead = changes.best, changes.lead
    if best is None:
        return "not measured"
    if lead.machine == DISTURBED or lead.rounds < lead.least_rounds:
        return f"{lead.verdict}, {lead.reason}"
    names = ["no change" if change == NO_CHANGE else str(change) for change in best.tied]
    return f"{' and '.join(names)} are tied" if len(names) > 1 else names[0]


def judged_changes(changes: Changes) -> pd.DataFrame:
    """Returns the table of changes with a column, told: the verdict on each against no change."""
    words = {change: str(told.said) for change, told in changes.told.items()}
    return changes.table.assign(told=changes.table["change"].map(words).fillna("–"))


def changes_figure(changes: Changes) -> Figure:
    """Draws bars of predicted and achieved speedup by change, with the ideal and the 80 % line."""
    table, ranks = changes.table, changes.ranks
    with figure(changes.caption, figsize=(7.2, 0.55 * len(table) + 1.6)) as (fig, axes):
        speedup_bars(axes, table)
        axes.axvline(ranks, color=GREY, ls="--", lw=1, label="ideal")
        axes.axvline(GOOD_EFFICIENCY * ranks, color=GREY, ls=":", lw=1.2, label="80 % of it")
        axes.axvline(1, color=GREY, lw=0.8)
        axes.set_xlabel(f"speedup of {ranks} ranks over one with the same change")
        axes.legend(fontsize=8, ncols=4, loc="lower left", bbox_to_anchor=(0, 1))
    return fig


def speedup_bars(axes: Axes, table: pd.DataFrame) -> list[str]:
    """Draws each change's predicted and achieved speedup; returns the changes' names.

    ``table`` is that of ``Changes``.
    """
    names = ["as it was" if change == NO_CHANGE else change for change in table["change"]]
    places = np.arange(len(table))
    axes.barh(places - 0.19, table["predicted_speedup"], 0.36, color=BLUE, label="predicted")
    axes.barh(
        places + 0.19,
        table["speedup"],
        0.36,
        color=ORANGE,
        label="achieved",
        xerr=error_bars(table),
        error_kw={"lw": 1, "capsize": 3},
    )
    axes.set_yticks(places, names)
    axes.invert_yaxis()
    return names
