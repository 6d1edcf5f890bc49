"""Conclusions of assignment 4: speedups of two ranks, published runs and one's own."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import numpy as np
import pandas as pd

from common.analysis.conclusions.conclusion import (
    Look,
    Seen,
    above,
    below,
    counted,
    numbered,
    unsettled,
)
from common.analysis.runs import Run
from common.analysis.scaling import text_tables
from common.analysis.scaling.study import Compared
from common.analysis.scaling.sweep_run import ScalingLab, Series, SweepRun, open_assignment4
from common.analysis.scaling.text_study import one_of, open_text_study, rows_as_written
from common.analysis.scaling.training_run import STRONG, WEAK
from common.analysis.sweep_speedups import step_times_by_round
from common.diagnose.changes import find_changes
from common.diagnose.evidence.evidence import choose_run
from common.errors import UserError
from common.judged import Judged, compared, fastest
from common.perfmodel.scaling.published_mlp import Explanation, explain_published
from common.samples import LEAST_ROUNDS, Interval, paired_ratio, student

GOOD = 0.8
EXPERIMENT = "exp042_agnews_ddp_4gpu_20ep"

_lab = cache(open_assignment4)
_text = cache(open_text_study)
_published_pair = cache(explain_published)


def _sweep(run_dir: str) -> SweepRun:
    return _lab(run_dir).sweep


def _replay(run_dir: str) -> SweepRun:
    lab: ScalingLab = _lab(run_dir)
    if lab.left_out or lab.replay is None:
        raise UserError(lab.left_out or "no replay in this run")
    return lab.replay


# The synthetic model.


def _ends(run_dir: str, regime: str = WEAK) -> tuple[Series, Series]:
    """Returns the series of the smallest and of the largest batch."""
    series = [arms for arms in _sweep(run_dir).series if arms.regime == regime]
    if not series:
        raise UserError(f"no series of {regime} scaling")
    return series[0], series[-1]


def _parts(run_dir: str) -> pd.DataFrame:
    """Returns the parts of weak scaling's steps by batch per rank and number of ranks."""
    parts = _sweep(run_dir).parts
    table = parts[parts["regime"] == WEAK].set_index(["batch_per_rank", "world_size"])
    if table.empty:
        raise UserError("no arms of weak scaling")
    return table


def _contention(run_dir: str) -> Seen:
    table = _parts(run_dir)
    largest = table.loc[table.index.get_level_values(0).max()]
    passes_ms = largest["forward_ms"] + largest["backward_ms"]
    ratio = passes_ms.iloc[-1] / passes_ms.iloc[0]
    return counted(ratio > 1.05, f"{ratio:.2f} times")


def _share_of_communication(run_dir: str) -> Seen:
    table = _parts(run_dir)
    most = table.xs(table.index.get_level_values(1).max(), level=1).sort_index()
    shares = most["communication_ms"] / most["sum_ms"]
    number = ", ".join(f"{share:.0%} with {batch}" for batch, share in shares.items())
    return counted(shares.iloc[0] > shares.iloc[-1], number)


def _speedup(series: Series) -> Judged:
    """Returns the speedup of the most ranks, as its section judges it."""
    return series.table["judged"].iloc[-1]


def _largest_weak(run_dir: str) -> Seen:
    return above(_speedup(_ends(run_dir)[1]))


def _smallest_weak(run_dir: str) -> Seen:
    return below(_speedup(_ends(run_dir)[0]))


def _smallest_strong(run_dir: str) -> Seen:
    return below(_speedup(_ends(run_dir, STRONG)[0]))


def _none_good(run_dir: str) -> Seen:
    several = _sweep(run_dir).speedups
    several = several[several["world_size"] > 1]
    best = several["efficiency"].max()
    return counted(best < GOOD, f"at most {best:.0%}")


def _hidden(run_dir: str) -> pd.DataFrame:
    table = _sweep(run_dir).exchanges
    if table.empty:
        raise UserError("buckets were not watched")
    table = table.assign(hidden=1 - table["exposed_ratio"] / table["total_ratio"])
    return table.groupby("batch_per_rank")[["hidden", "total_ratio"]].agg(["min", "max"])


def _more_hidden(run_dir: str) -> Seen:
    hidden = _hidden(run_dir)["hidden"]
    number = ", ".join(f"{r['min']:.0%}–{r['max']:.0%} with {b}" for b, r in hidden.iterrows())
    return counted(hidden["min"].iloc[-1] > hidden["max"].iloc[0], number)


def _falls_less(run_dir: str) -> Seen:
    ratios = _hidden(run_dir)["total_ratio"].mean(axis=1)
    fall, batches = ratios.iloc[0] / ratios.iloc[-1], ratios.index[-1] / ratios.index[0]
    return counted(1 < fall < batches, f"by {fall:.1f} for {batches:.0f}")


def _errors(run: SweepRun) -> pd.DataFrame:
    if run.errors is None:
        raise UserError(run.predictions[1])
    return run.errors


def _correction_worse(run_dir: str) -> Seen:
    errors = _errors(_sweep(run_dir))
    others = errors[~errors["reference"].astype(bool)]
    if others.empty:
        raise UserError("no arm but the one that was fitted to")
    plain, adjusted = (others[name].abs().median() for name in ("error", "adjusted_error"))
    return counted(adjusted > plain, f"{plain:.0%} → {adjusted:.0%} in the median")


def _no_law(run_dir: str) -> Seen:
    fitted = [law for arms in _replay(run_dir).series for law in arms.laws[0]]
    if not fitted:
        raise UserError("no law was fitted")
    number = ", ".join(f"{law.law.name} {law.largest_error:.0%}" for law in fitted)
    return counted(not any(law.describes_points for law in fitted), number)


def _falls_again(run_dir: str) -> Seen:
    [series, *_more] = _replay(run_dir).series
    times = pd.DataFrame(1 / series.rounds, columns=series.table["world_size"])
    best, most = fastest(times), times.columns[-1]
    if best is None or best.arm == most:
        return counted(False, f"{most:.0f} hosts are the fastest")
    return above(compared(times, best.arm, claims=1)[most])


def _too_short(run_dir: str) -> Seen:
    replay = _replay(run_dir)
    predicted_ms = _errors(replay).set_index("arm")["predicted_step_ms"]
    rounds = step_times_by_round(replay.steps)
    longest = (predicted_ms / rounds[predicted_ms.index]).max(axis=1)
    return below(Judged(student(np.log(longest)).map(np.exp)))


def _half_waits(run_dir: str) -> Seen:
    row = _replay(run_dir).parts.sort_values("world_size").iloc[-1]
    share = (row["waiting_ms"] + row["communication_ms"]) / row["sum_ms"]
    return counted(share > 0.5, f"{share:.0%} on {row['world_size']} hosts")


def _possible(look: Callable[[Explanation], tuple[bool, str]]) -> Look:
    return lambda _: counted(*look(_published_pair()))


def _bandwidth(pair: Explanation) -> tuple[bool, str]:
    return pair.share_of_pcie < 1, f"{pair.share_of_pcie:.0%} of PCIe's"


def _slowdown(pair: Explanation) -> tuple[bool, str]:
    return 1 < pair.slowdown < 1.4, f"{pair.slowdown - 1:.0%}"


def _one_unknown(pair: Explanation) -> tuple[bool, str]:
    error = pair.at_mean_slowdown[1]
    return error < 0.01, f"off by at most {error:.1%}"


# Text: the published study.


def _published(data: str, model: str = "small", ranks: int = 4) -> Compared:
    return one_of(_text("").published[data], model, ranks)


def _same_while_both(_: str) -> Seen:
    rows = rows_as_written(EXPERIMENT)
    end = rows.groupby("job")["row"].max().min()
    together, alone = (
        rows.loc[m, "train_time_s"].mean() for m in (rows.row <= end, rows.row > end)
    )
    return counted(abs(together / alone - 1) < 0.05, f"{together:.1f} and {alone:.1f} s")


def _worth(data: str) -> pd.Series:
    table = text_tables.equal_losses(_published(data, ranks=1), _published(data))
    return table["worth"]


def _split(_: str) -> Seen:
    worth = _worth("IMDB")
    return counted(worth.max() < 1, f"{worth.min():.1f} to {worth.max():.1f} epochs")


def _not_split(_: str) -> Seen:
    worth = _worth("AGNews")
    return counted(worth.min() > 1, f"{worth.min():.1f} to {worth.max():.1f} epochs")


def _per_sample(_: str) -> Seen:
    ratio = _published("AGNews").per_sample
    return counted(ratio.low > 1, f"{ratio.value:.2f} ({ratio.low:.2f} to {ratio.high:.2f})")


def _added_apart(_: str) -> Seen:
    table = text_tables.added_to_steps(_text(""))
    added = table[table["model"] == "small"].set_index("data")["added_ms"]
    number = f"{added['AGNews']:.1f} against {added['IMDB']:.1f} ms"
    return counted(added["AGNews"] > 2 * added["IMDB"], number)


def _slower_to_result(_: str) -> Seen:
    row = text_tables.times_to_accuracy([(_published("IMDB"), 0.76)]).iloc[0]
    number = f"{row['alone_s']:.0f} s on one, {row['several_s']:.0f} on four"
    return counted(row["ratio"] < 1, number)


def _target_decides(_: str) -> Seen:
    small = _published("AGNews")
    ratios = text_tables.times_to_accuracy([(small, 0.88), (small, 0.89)])["ratio"]
    return counted(ratios.min() < 1 < ratios.max(), " and ".join(f"{r:.2f}" for r in ratios))


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
    # Epochs of single runs are no repetitions; they are what there is, and do not count as rounds.
    runs = min(len(case.base.runs), len(case.configuration.runs))
    ratio = case.speedup
    return Judged(Interval(ratio.value, ratio.low, ratio.high, rounds=runs))


def _own_faster(run_dir: str) -> Seen:
    return above(_own_speedup(run_dir))


def _growth(run_dir: str) -> pd.Series:
    table = text_tables.growth(_text(run_dir))
    if table.empty:
        raise UserError("no runs on one rank and on several with steps in parts")
    return table.iloc[0]


def _grows_most(run_dir: str) -> Seen:
    row = _growth(run_dir)
    number = f"{row['largest']}, {row[row['largest']]:+.1f} ms, {row['share']:.0%} of the step"
    return _once(run_dir, row["largest"] == "communication", number)


def _shorter_step(run_dir: str) -> Seen:
    change_ms = _growth(run_dir)["step_ms"]
    return _once(run_dir, change_ms < 0, f"{change_ms:+.1f} ms")


def _once(run_dir: str, holds: bool, number: str) -> Seen:
    """Returns what runs say that may have been made once: a single run of either says nothing."""
    rounds = _own_speedup(run_dir).rounds
    return (
        counted(holds, number) if rounds >= LEAST_ROUNDS else unsettled(f"{number}, {rounds} run")
    )


def _first_cause(run_dir: str) -> Seen:
    _own(run_dir)
    lines = text_tables.diagnosis_text(_text(run_dir)).splitlines()
    first = next((line for line in lines if line.startswith("1. ")), "no cause")
    return counted("unequal" in first or "padding" in first, first.removeprefix("1. "))


def _changes(run_dir: str) -> pd.DataFrame:
    """Returns the speedup over one rank with the same change: a row per round, a column each."""
    folders = find_changes(choose_run(run_dir, find_changes))
    if not folders:
        raise UserError("no proposed change was run")
    run = Run(folders[-1], folders[-1])
    arms, rounds = run.table("arms.csv"), step_times_by_round(run.table("steps.csv"))
    rates = arms.set_index("arm")["global_batch"] / rounds
    speedups = {}
    for change, rows in arms.fillna({"change": "none"}).groupby("change", sort=False):
        rows = rows.sort_values("world_size")
        speedups[change] = rates[rows["arm"].iloc[-1]] / rates[rows["arm"].iloc[0]]
    return pd.DataFrame(speedups)


def _change(start: str) -> Look:
    """Says whether a change raises the speedup over that without one."""

    def look(run_dir: str) -> Seen:
        speedups = _changes(run_dir)
        return above(Judged(paired_ratio(speedups[_named(speedups, start)], speedups["none"])))

    return look


def _named(speedups: pd.DataFrame, start: str) -> str:
    names = [name for name in speedups.columns if name.startswith(start)]
    if not names:
        raise UserError(f"no change of {start} was run")
    return names[0]


def _still_slower(run_dir: str) -> Seen:
    speedups = _changes(run_dir)
    ratio = speedups[_named(speedups, "compression")]
    return below(Judged(student(np.log(ratio)).map(np.exp)))


CONCLUSIONS = {
    "assignment4_synthetic_scaling": (
        *numbered(
            [
                (1, "passes take longer on several ranks", _contention),
                (1, "with a smaller batch communication's share grows", _share_of_communication),
                (2, "weak scaling, largest batch: faster than one rank", _largest_weak),
                (2, "weak scaling, smallest batch: slower than one rank", _smallest_weak),
                (2, "strong scaling, smallest batch: slower than one rank", _smallest_strong),
                (2, "no series reaches 80 %", _none_good),
                (3, "more is hidden with the larger batch", _more_hidden),
                (3, "all-reduces over computation fall less than batches grow", _falls_less),
                (4, "the correction makes the other arms' predictions worse", _correction_worse),
                (5, "no law describes the points", _no_law),
                (5, "the most hosts are slower than the best number", _falls_again),
                (6, "all steps of the replay are predicted too short", _too_short),
                (6, "on the most hosts ranks wait or send for half of the step", _half_waits),
            ]
        ),
        *numbered(
            [
                (7, "the bandwidth is one that PCIe can carry", _possible(_bandwidth)),
                (7, "the slowdown is one that others measured", _possible(_slowdown)),
                (7, "with others' mean one unknown explains both steps", _possible(_one_unknown)),
            ],
            of_run=False,
        ),
    ),
    "assignment4_text_scaling": (
        *numbered(
            [
                (2, "an epoch took as long while both jobs ran", _same_while_both),
                (3, "on IMDB an epoch on four GPUs is worth less than one", _split),
                (3, "on AG News it is worth more: data were not split", _not_split),
                (4, "per sample four GPUs are faster on AG News, too", _per_sample),
                (5, "four GPUs add over twice as much to a step there", _added_apart),
                (6, "76 % on IMDB takes longer on four GPUs", _slower_to_result),
                (6, "on AG News the target decides which is faster", _target_decides),
            ],
            of_run=False,
        ),
        *numbered(
            [
                (7, "an epoch is one pass over the data", _one_pass),
                (7, "several ranks are faster than one", _own_faster),
                (8, "communication grows most", _grows_most),
                (8, "the step becomes shorter", _shorter_step),
                (9, "the first cause is texts of unequal length", _first_cause),
                (10, "accumulation raises the speedup", _change("accumulation")),
                (10, "a 16-bit exchange raises the speedup", _change("compression")),
                (10, "with a 16-bit exchange several ranks are slower than one", _still_slower),
            ]
        ),
    ),
}
"""Conclusions by notebook."""
