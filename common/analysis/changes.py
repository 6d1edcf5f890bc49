"""Changes that a diagnosis proposed, made: predicted speedup against achieved.

Read from a run of ``verify_changes.py``: what was predicted before anything was run
(``proposals.csv``), and the arms of each change on one rank and on all.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pandas as pd
from matplotlib.figure import Figure

from common.analysis.comparable import difference
from common.analysis.diagnosis import diagnosis_lines
from common.analysis.opened_run import given_folder, recorded_assignment
from common.analysis.plots import BLUE, GREY, ORANGE, figure
from common.analysis.sweep_speedups import NO_CHANGE, sweep_speedups
from common.analysis.tables import Table
from common.perfmodel.tables import read_table
from common.runtime.paths import project_root, relative_to_project
from common.runtime.run_directory import read_environment

PROPOSALS, SWEEP = "proposals.csv", "assignment4-sweep"
PREDICTED = (
    *("change", "regime", "world_size", "global_batch", "global_batch_changed"),
    *("predicted_speedup", "predicted_efficiency"),
)
GOOD_EFFICIENCY = 0.8
CLOSE = 0.10
"""A prediction this close to what was achieved is called right."""


@dataclass(frozen=True, eq=False)
class Changes:
    """A run of ``verify_changes.py``.

    ``table`` has a row per change, the first without one: change, world_size, global_batch,
    global_batch_changed, predicted_speedup, speedup, speedup_low, speedup_high, efficiency, step_ms
    (of all ranks), error (predicted over achieved speedup, minus 1), gain_error (the same of the
    speedups over those without a change: what a machine that has become slower or faster since the
    sweep does to both sides alike is not in it).
    """

    table: pd.DataFrame
    caption: str
    model: str

    @property
    def ranks(self) -> int:
        return int(self.table["world_size"].iloc[0])


@dataclass(frozen=True, eq=False)
class ChangesLab:
    """What a run says of proposed changes: the diagnosis they follow from, and what they brought.

    ``changes`` is None, and ``left_out`` says why, where there is no such run.
    """

    changes: Changes | None
    diagnosis: tuple[str, ...]
    left_out: str = ""

    def diagnosis_text(self) -> str:
        """The diagnosis of the sweep that the changes start from, as Markdown."""
        return "\n".join(["```text", *self.diagnosis, "```"]) if self.diagnosis else self.left_out

    def sentence(self) -> str:
        """What the changes brought, as Markdown."""
        return changes_sentence(self.changes) if self.changes else ""

    def table(self) -> Table | None:
        """A row per change."""
        return changes_table(self.changes) if self.changes else None

    def figure(self) -> Figure | None:
        """Predicted and achieved speedup by change."""
        return changes_figure(self.changes) if self.changes else None


def open_changes_lab(run_dir: str | Path | None = None) -> ChangesLab:
    """The changes verified in a run directory or below it, the last where there are several.

    By default the newest complete run below outputs/assignment4 that has some, or else recorded
    ones. Raises UserError for no such directory.
    """
    folder = given_folder(run_dir) if run_dir else _newest()
    found = find_changes(folder)
    if not found:
        return ChangesLab(None, (), "No proposed change was run here (no proposals.csv).")
    changes = open_changes(found[-1])
    return ChangesLab(changes, tuple(_diagnosis(found[-1], changes)))


def _newest() -> Path:
    runs = {
        path: read_environment(path).get("start_time", "")
        for path in (project_root() / "outputs" / "assignment4").glob("*")
        if find_changes(path) and read_environment(path)["status"] == "complete"
    }
    return max(runs, key=runs.__getitem__, default=recorded_assignment("assignment4"))


def _diagnosis(folder: Path, changes: Changes) -> list[str]:
    """Of the sweep beside the run, on the same device and network, at the changes' first arm."""
    before, own = changes.table.iloc[0], read_environment(folder)
    for path in sorted(folder.parent.glob("*/arms.csv")):
        arms = pd.read_csv(path)
        fits = arms[
            (arms["world_size"] == before["world_size"])
            & (arms["global_batch"] == before["global_batch"])
            & (arms["regime"] == before["regime"])
        ]
        its = read_environment(path.parent)
        if its.get("label") != SWEEP or difference([("sweep", its), ("changes", own)]):
            continue
        if len(fits):
            return diagnosis_lines(path.parent, arm=int(fits["arm"].iloc[0]))
    return []


def find_changes(folder: Path) -> list[Path]:
    """The runs of ``verify_changes.py`` in a folder or in those below it, that are complete."""
    found = [
        *folder.glob(PROPOSALS),
        *folder.glob(f"*/{PROPOSALS}"),
        *folder.glob(f"*/*/{PROPOSALS}"),
    ]
    return sorted(
        path.parent for path in found if read_environment(path.parent)["status"] == "complete"
    )


def open_changes(folder: Path) -> Changes:
    """The changes of a run. Raises UserError where a table is missing or another one."""
    proposals = read_table(folder / PROPOSALS, PREDICTED)
    arms = read_table(folder / "arms.csv", ("arm", "change", "world_size"))
    steps = read_table(folder / "steps.csv", ("arm", "kind", "step_time_ms"))
    achieved = sweep_speedups(arms, steps)
    achieved = achieved[achieved["world_size"] > 1].set_index("change")
    columns = ["speedup", "speedup_low", "speedup_high", "efficiency", "step_ms"]
    table = proposals[list(PREDICTED)].join(achieved[columns], on="change")
    table["error"] = table["predicted_speedup"] / table["speedup"] - 1
    table["gain_error"] = (1 + table["error"]) / (1 + table["error"].iloc[0]) - 1
    environment = read_environment(folder)
    facts = read_table(folder / "facts.csv", ("model",))
    caption = (
        f"{environment['hardware']}; {environment['start_time'][:10]}; "
        f"{relative_to_project(folder)}"
    )
    return Changes(table, caption, str(facts["model"].iloc[0]))


def changes_table(changes: Changes) -> Table:
    """A row per change: predicted and achieved speedup, and what it does to the global batch."""
    shown = changes.table.assign(
        interval=[
            "–" if np.isnan(low) else f"{low:.2f} to {high:.2f}"
            for low, high in changes.table[["speedup_low", "speedup_high"]].to_numpy()
        ],
        batch=[
            f"{batch} ({'changed' if changed else 'as before'})"
            for batch, changed in changes.table[["global_batch", "global_batch_changed"]].to_numpy()
        ],
    )
    columns = {
        "change": "change",
        "batch": "global batch",
        "predicted_speedup": "predicted speedup",
        "speedup": "achieved",
        "interval": "95 % interval",
        "error": "error",
        "gain_error": "error of the gain",
        "efficiency": "efficiency",
    }
    shown = shown[list(columns)].rename(columns=columns)
    forms = {"predicted speedup": "{:.2f}", "achieved": "{:.2f}"}
    forms |= {"error": "{:+.1%}", "error of the gain": "{:+.1%}", "efficiency": "{:.0%}"}
    return Table(shown, forms)


def changes_figure(changes: Changes) -> Figure:
    """Bars of predicted and achieved speedup by change, with the ideal and the 80 % line."""
    table, ranks = changes.table, changes.ranks
    places = np.arange(len(table))
    with figure(changes.caption, figsize=(7.2, 0.55 * len(table) + 1.6)) as (fig, axes):
        axes.barh(places - 0.19, table["predicted_speedup"], 0.36, color=BLUE, label="predicted")
        bars = {"xerr": _error_bars(table), "error_kw": {"lw": 1, "capsize": 3}}
        axes.barh(places + 0.19, table["speedup"], 0.36, color=ORANGE, label="achieved", **bars)
        axes.axvline(ranks, color=GREY, ls="--", lw=1, label="ideal")
        axes.axvline(GOOD_EFFICIENCY * ranks, color=GREY, ls=":", lw=1.2, label="80 % of it")
        axes.axvline(1, color=GREY, lw=0.8)
        axes.set_yticks(places, ["as it was" if c == NO_CHANGE else c for c in table["change"]])
        axes.invert_yaxis()
        axes.set_xlabel(f"speedup of {ranks} ranks over one with the same change")
        axes.legend(fontsize=8, ncols=4, loc="lower left", bbox_to_anchor=(0, 1))
    return fig


def _error_bars(table: pd.DataFrame) -> np.ndarray:
    middle = table["speedup"].to_numpy()
    low, high = table["speedup_low"].to_numpy(), table["speedup_high"].to_numpy()
    return np.nan_to_num(np.clip([middle - low, high - middle], 0, None))


def changes_sentence(changes: Changes) -> str:
    """What the changes brought, as Markdown."""
    table, ranks = changes.table, changes.ranks
    before, after = table.iloc[0], table.iloc[1:]
    text = (
        f"Measured again as it was, {ranks} ranks are **{before['speedup']:.2f} times** as fast as "
        f"one (predicted {before['predicted_speedup']:.2f}). "
    )
    if after.empty:
        return text + "The model proposes no change that would help by more than the noise."
    best = after.loc[after["efficiency"].idxmax()]
    right, gains = (int((after[c].abs() <= CLOSE).sum()) for c in ("error", "gain_error"))
    worst = after.loc[after["gain_error"].abs().idxmax()]
    text += (
        f"{best['change']} brings {best['speedup']:.2f}, an efficiency of {best['efficiency']:.0%}"
    )
    if best["global_batch_changed"]:
        text += f", with a global batch of {best['global_batch']:,} instead of "
        text += f"{before['global_batch']:,}: look at the accuracy, too"
    text += (
        f". Of {len(after)} speedups predicted before anything was run {right} are within "
        f"{CLOSE:.0%} of the achieved; beside the unchanged step of the same run {gains} are, and "
        f"the largest error is {worst['gain_error']:+.1%} ({worst['change']})."
    )
    good = after[after["efficiency"] >= GOOD_EFFICIENCY]
    if good.empty:
        text += " None of them brings the efficiency to 80 %."
    return text
