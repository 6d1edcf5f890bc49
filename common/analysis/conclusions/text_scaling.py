"""Conclusions of assignment 4: published runs of text training, and one's own."""

from __future__ import annotations

from functools import cache

import pandas as pd

from common.analysis.conclusions.conclusion import (
    TABLES,
    Look,
    Seen,
    above,
    below,
    counted,
    published,
)
from common.analysis.scaling import text_tables
from common.analysis.scaling.study import Compared
from common.analysis.scaling.text_study import (
    epoch_times_together_and_alone,
    one_of,
    open_text_study,
    rows_as_written,
)
from common.diagnose.changes import Changes, find_changes, open_changes
from common.diagnose.evidence.evidence import choose_run
from common.errors import UserError
from common.judged import Judged

EXPERIMENT = "exp042_agnews_ddp_4gpu_20ep"

_text = cache(open_text_study)


# Text: the published study.


def _published(data: str, model: str = "small", ranks: int = 4) -> Compared:
    return one_of(_text("").published[data], model, ranks)


def _same_while_both(_: str) -> Seen:
    times_s = epoch_times_together_and_alone(rows_as_written(EXPERIMENT))
    together, alone = (of_rows.mean() for of_rows in times_s)
    return published(abs(together / alone - 1) < 0.05, f"{together:.1f} and {alone:.1f} s")


def _worth(data: str) -> pd.Series:
    table = text_tables.equal_losses(_published(data, ranks=1), _published(data))
    return table["worth"]


def _split(_: str) -> Seen:
    worth = _worth("IMDB")
    return published(worth.max() < 1, f"{worth.min():.1f} to {worth.max():.1f} epochs")


def _not_split(_: str) -> Seen:
    worth = _worth("AGNews")
    return published(worth.min() > 1, f"{worth.min():.1f} to {worth.max():.1f} epochs")


def _per_sample(_: str) -> Seen:
    return above(_published("AGNews").per_sample.judged)


def _added_apart(_: str) -> Seen:
    table = text_tables.added_to_steps(_text(""))
    added = table[table["model"] == "small"].set_index("data")["added_ms"]
    number = f"{added['AGNews']:.1f} against {added['IMDB']:.1f} ms"
    return published(added["AGNews"] > 2 * added["IMDB"], number)


def _slower_to_result(_: str) -> Seen:
    row = text_tables.times_to_accuracy([(_published("IMDB"), 0.76)]).iloc[0]
    number = f"{row['alone_s']:.0f} s on one, {row['several_s']:.0f} on four"
    return published(row["ratio"] < 1, number)


def _target_decides(_: str) -> Seen:
    small = _published("AGNews")
    ratios = text_tables.times_to_accuracy([(small, 0.88), (small, 0.89)])["ratio"]
    return published(ratios.min() < 1 < ratios.max(), " and ".join(f"{r:.2f}" for r in ratios))


# Text: one's own runs.


def _own(run_dir: str) -> Compared:
    cases = _text(run_dir).local_on_several
    if not cases:
        raise UserError(_text(run_dir).left_out or "no runs on several ranks")
    return cases[0]


def _one_pass(run_dir: str) -> Seen:
    identity = _own(run_dir).configuration.identity
    computed, different = identity.processed_per_epoch, identity.distinct_per_epoch
    return counted(abs(computed / different - 1) < 0.01, f"{computed:,} and {different:,}")


def _own_speedup(run_dir: str) -> Judged:
    case = _own(run_dir)
    if case.speedup is None:
        raise UserError(case.reason)
    return case.speedup.judged


def _own_faster(run_dir: str) -> Seen:
    return above(_own_speedup(run_dir))


def _first_cause(run_dir: str) -> Seen:
    _own(run_dir)
    lines = text_tables.diagnosis_text(_text(run_dir)).splitlines()
    first = next((line for line in lines if line.startswith("1. ")), "no cause")
    return counted("unequal" in first or "padding" in first, first.removeprefix("1. "))


def _changes(run_dir: str) -> Changes:
    folders = find_changes(choose_run(run_dir, find_changes))
    if not folders:
        raise UserError("no proposed change was run")
    return open_changes(folders[-1])


def _change(start: str) -> Look:
    """Says whether a change raises the speedup over that without one, as its section judges it."""

    def look(run_dir: str) -> Seen:
        changes = _changes(run_dir)
        return above(changes.told[_named(changes, start)])

    return look


def _named(changes: Changes, start: str) -> str:
    names = [name for name in changes.told if str(name).startswith(start)]
    if not names:
        raise UserError(f"no change of {start} was run")
    return names[0]


def _still_slower(run_dir: str) -> Seen:
    changes = _changes(run_dir)
    judged = changes.table.set_index("change")["judged"]
    return below(judged[_named(changes, "compression")])


CONCLUSIONS = {
    "assignment4_text_scaling": [
        (2, "an epoch took as long while both jobs ran", _same_while_both, TABLES),
        (3, "on IMDB an epoch on four GPUs is worth less than one", _split, TABLES),
        (3, "on AG News it is worth more: data were not split", _not_split, TABLES),
        (4, "per sample four GPUs are faster on AG News, too", _per_sample, TABLES),
        (5, "four GPUs add over twice as much to a step there", _added_apart, TABLES),
        (6, "76 % on IMDB takes longer on four GPUs", _slower_to_result, TABLES),
        (6, "on AG News the target decides which is faster", _target_decides, TABLES),
        (7, "an epoch is one pass over the data", _one_pass),
        (7, "several ranks are faster than one", _own_faster),
        (9, "the first cause is texts of unequal length", _first_cause),
        (10, "accumulation raises the speedup", _change("accumulation")),
        (10, "a 16-bit exchange raises the speedup", _change("compression")),
        (10, "with a 16-bit exchange several ranks are slower than one", _still_slower),
    ],
}
