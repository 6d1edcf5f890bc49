"""Conclusions of assignment 4: speedups of a synthetic model, on ranks and emulated hosts."""

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
)
from common.analysis.scaling.sweep_run import ScalingLab, Series, SweepRun, open_assignment4
from common.analysis.scaling.training_run import STRONG, WEAK
from common.analysis.sweep_speedups import step_times_by_round
from common.errors import UserError
from common.judged import Judged, compared, fastest
from common.perfmodel.scaling.published_mlp import Explanation, explain_published
from common.samples import student

GOOD = 0.8

_lab = cache(open_assignment4)
_published_pair = cache(explain_published)


def _sweep(run_dir: str) -> SweepRun:
    return _lab(run_dir).sweep


def _replay(run_dir: str) -> SweepRun:
    lab: ScalingLab = _lab(run_dir)
    if lab.left_out or lab.replay is None:
        raise UserError(lab.left_out or "no replay in this run")
    return lab.replay


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
}
