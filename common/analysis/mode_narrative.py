"""Sentences that read their own numbers: modes compared, waiting, costs, slow and many ranks."""

from __future__ import annotations

import pandas as pd

from common.analysis.assignment3 import MicroBatchLab
from common.analysis.micro_batches import mode_name
from common.analysis.mode_comparison import CONTROL, STATIC, ModeComparison
from common.analysis.mode_simulation import (
    CLOSE,
    NOT_TOLD,
    Simulation,
    slow_steps,
    slow_summary,
)
from common.analysis.planned_costs import Fit, calibration_errors, fit_costs, fixed_share

PAYS_FROM = 0.95
"""A step at least this long, over static's, is not called a gain."""


def modes_shown(comparison: ModeComparison) -> pd.DataFrame:
    """The table of modes that share the global batches, for a reader."""
    table = comparison.summary.reset_index()
    return pd.DataFrame(
        {
            "mode": table["mode"].map(mode_name),
            "mean step (ms)": table["mean_ms"],
            "P95 (ms)": table["p95_ms"],
            "mean": table["ratio"],
            "P95": table["p95_ratio"],
            "median": table["paired_median"],
            "computed": table["compute_ratio"],
            "promised": table["padded_ratio"],
            "plan (ms)": table["planning_ms"],
            "waiting": table["waiting"],
        }
    )


def modes_sentence(comparison: ModeComparison) -> str:
    """Which mode is fastest on the same global batches, and whether that can be told."""
    table = comparison.summary.drop(STATIC)
    steps = len(comparison.ratios())
    if table.empty:
        return "Only static was measured."
    first, *others = table.sort_values("ratio").itertuples()
    near = [row for row in others if row.ratio_low <= first.ratio_high]
    fastest = "static" if first.ratio_low > 1 else mode_name(first.Index)
    subject = f"The next, {mode_name(first.Index)}," if fastest == STATIC else "It"
    text = (
        f"On the same {steps} global batches **{fastest}** has the shortest steps. {subject} takes "
        f"{first.ratio:.2f} of static's in the mean ({first.ratio_low:.2f} to "
        f"{first.ratio_high:.2f}), {first.p95_ratio:.2f} in the P95"
    )
    if first.ratio_low <= 1 <= first.ratio_high:
        text += ", not to be told apart from static"
    if near:
        text += ", not to be told apart from " + _list([mode_name(row.Index) for row in near])
    text += (
        f". Two halves of static's own steps differ by {comparison.noise_floor:.0%}, since batches "
        "do: hence the ratios batch by batch. "
    )
    return text + _promise(table.loc["dynamic"]) if "dynamic" in table.index else text


def _promise(dynamic: pd.Series) -> str:
    text = (
        f"For dynamic the plan promises {dynamic['padded_ratio']:.2f} in padded tokens; "
        f"the slowest rank's computation takes {dynamic['compute_ratio']:.2f}, its whole step "
        f"{dynamic['ratio']:.2f}. "
    )
    gain, promise = abs(1 - dynamic["compute_ratio"]), abs(1 - dynamic["padded_ratio"])
    if gain < promise - 0.02:
        return text + "Computation changes by less than padded tokens do: a part is constant."
    if gain > promise + 0.02:
        return text + "Computation changes by more than padded tokens do: cost grows faster."
    return text + "Computation changes as padded tokens do."


def datasets_shown(lab: MicroBatchLab) -> pd.DataFrame:
    """Dynamic over static on each data set that was compared."""
    rows = []
    for comparison in (lab.comparison, *lab.others):
        if "dynamic" not in comparison.summary.index:
            continue
        row = comparison.summary.loc["dynamic"]
        rows.append(
            {
                "data": comparison.dataset,
                "steps": len(comparison.ratios()),
                "promised": row["padded_ratio"],
                "computation": row["compute_ratio"],
                "step": row["ratio"],
                "95 % interval": f"{row['ratio_low']:.2f}–{row['ratio_high']:.2f}",
                "P95": row["p95_ratio"],
            }
        )
    return pd.DataFrame(rows)


def datasets_sentence(lab: MicroBatchLab) -> str:
    """On which of the compared data sets dynamic pays."""
    if not lab.others:
        return "Modes were compared on one data set only in this run."
    table = datasets_shown(lab)
    pays = table[table["step"] < PAYS_FROM]["data"].tolist()
    not_so = table[table["step"] >= PAYS_FROM]["data"].tolist()
    text = f"Dynamic pays on {_list(pays)}" if pays else "Dynamic pays on none of them"
    return text + (f", not on {_list(not_so)}." if not_so else ".")


def own_batches_sentence(comparison: ModeComparison) -> str:
    """What modes with batches of their own take per text."""
    if not comparison.own_batch_modes:
        return "Modes that make up batches of their own were not measured."
    table = comparison.per_sample
    parts = [
        f"{mode_name(mode)} takes {table.loc[mode, 'ratio']:.2f} of static's time per text "
        f"({table.loc[mode, 'ratio_low']:.2f} to {table.loc[mode, 'ratio_high']:.2f})"
        for mode in comparison.own_batch_modes
    ]
    text = "; ".join(parts)
    text = text[0].upper() + text[1:]
    if "dynamic" in table.index:
        text += f". Dynamic, on unchanged batches: {table.loc['dynamic', 'ratio']:.2f}"
    return text + ". Their steps train on other texts at once, so this is no like-for-like gain."


def waiting_sentence(comparison: ModeComparison) -> str:
    """What ranks wait in static, dynamic, and where there is nothing to balance."""
    shares = comparison.waiting
    text = f"Under static ranks wait **{shares[STATIC]:.1%}** of their time"
    if "dynamic" in shares:
        text += f", under dynamic **{shares['dynamic']:.1%}**"
    if CONTROL not in shares:
        return text + ". How much they would wait with texts of equal length was not measured."
    text += (
        f". With texts of equal length, where every plan is balanced, they wait "
        f"{shares[CONTROL]:.1%}: that much is the machine's own unsteadiness. "
    )
    if "dynamic" in shares:
        points = (shares["dynamic"] - shares[CONTROL]) * 100
        direction = "more" if points >= 0 else "less"
        text += f"Dynamic is {abs(points):.1f} percentage points {direction} than that."
    return text


def calibration_sentence(predicted: pd.DataFrame | None, fixed_share: float | None) -> str:
    """How well a fitted cost tells the time of a pass."""
    if predicted is None:
        return "Costs were not calibrated in this run."
    table = calibration_errors(predicted)
    ranks = ", ".join(
        f"rank {row.rank:.0f} {row.median_error:.1%} (at worst {row.worst_error:.0%})"
        for row in table.itertuples(index=False)
    )
    return (
        f"The fitted cost is off by, in the median: {ranks}. The constant c₀ is "
        f"**{fixed_share:.0%}** of what the bottleneck rank of a static step computes: that part "
        "no plan can make shorter."
    )


def slow_sentence(comparison: ModeComparison) -> str:
    """Whether the slowed rank was found, and what it costs."""
    table = comparison.slow_rank
    if table is None or table.empty:
        return "No rank was slowed on purpose in this run."
    found = slow_summary(table)
    text = (
        f"Rank {found.rank} was slowed by a factor of {found.factor:g}. Beside the other ranks it "
        f"is estimated at {found.estimate:.2f} in the end"
    )
    told = "of one whose plan was told which rank is slow (medians)"
    if found.found_at is None:
        text += (
            f"; the estimate did not come to stay within {CLOSE:.0%} of the truth. A step took "
            f"{found.after:.2f} {told}. "
        )
    elif pd.isna(found.before):
        text += f". A step took {found.after:.2f} {told}. "
    else:
        text += (
            f"; from step **{found.found_at}** on it is within {CLOSE:.0%} of the truth. Before, a "
            f"step took {found.before:.2f} {told}, afterwards **{found.after:.2f}**. "
        )
    if NOT_TOLD in set(table["mode"]):
        unaware = slow_steps(table, NOT_TOLD).median()
        text += f"Dynamic with a cost that knows nothing of it: {unaware:.2f}."
    return text


def simulation_sentence(simulation: Simulation | None) -> str:
    """How far modes are from the lower bound on most ranks."""
    if simulation is None:
        return "Larger numbers of ranks were not simulated in this run."
    table = simulation.summary()
    few, most = table["world_size"].min(), table["world_size"].max()
    own = table[table["same_batch"] & ~table["mode"].str.startswith("packed")]
    parts = []
    for dataset in simulation.datasets:
        rows = own[own["dataset"] == dataset].pivot(
            index="mode", columns="world_size", values="ratio"
        )
        best = rows[most].idxmin()
        parts.append(
            f"{dataset}: static {rows.loc[STATIC, most]:.2f} ({rows.loc[STATIC, few]:.2f} on "
            f"{few:,.0f}), {mode_name(best)} **{rows.loc[best, most]:.2f}** "
            f"({rows.loc[best, few]:.2f})"
        )
    return (
        f"On {most:,.0f} ranks the bottleneck is, over a bound that no partition of the batch can "
        f"get below, of static and of the best mode that pads: {'; '.join(parts)}."
    )


def planning_sentence(simulation: Simulation | None) -> str:
    """How long a plan takes, by size."""
    if simulation is None or simulation.planning is None:
        return "How long planning takes was not measured apart in this run."
    keys = ["world_size", "global_batch"]
    worst = simulation.planning.groupby([*keys, "cost"])["time_ms"].median().groupby(keys).max()
    parts = [
        f"{batch:,.0f} texts on {ranks:,.0f} ranks in {time_ms:.2f} ms"
        for (ranks, batch), time_ms in worst.items()
    ]
    return (
        f"Plans, each in the median and with the cost that takes longest: {_list(parts)}. A plan "
        "is made beside the step before, on every rank, from the same seed: nothing is exchanged."
    )


def pays_sentence(ratios: pd.DataFrame, fixed_share: float | None = None) -> str:
    """Where dynamic does not pay, by padded tokens and by the constant of the cost.

    Args:
        ratios: by data set (index) and ranks (columns), as ``promised_ratios`` gives them.
        fixed_share: the part of a static step that no text changes, where it was measured.
    """
    few = ratios.columns[0]
    best, worst = ratios[few].idxmin(), ratios[few].idxmax()
    text = (
        f"On {few} ranks dynamic promises most on {best} ({ratios.loc[best, few]:.2f} of static's "
        f"bottleneck) and least on **{worst}** ({ratios.loc[worst, few]:.2f}). "
    )
    if ratios.loc[worst, few] >= 0.9:
        text += "Its lengths leave little to balance. "
    if fixed_share is None:
        return text
    left = {share: share + (1 - share) * ratios.loc[best, few] for share in (fixed_share, 0.8)}
    return text + (
        f"Here c₀ is {fixed_share:.0%} of a static step, which turns {ratios.loc[best, few]:.2f} "
        f"into {left[fixed_share]:.2f}; on a device where launching kernels takes 80 % of a step, "
        f"whatever is in it, {left[0.8]:.2f} is left."
    )


def _list(names: list[str]) -> str:
    return " and ".join(filter(None, [", ".join(names[:-1]), names[-1]]))


def measured_points(lab: MicroBatchLab, fit: Fit) -> dict[str, tuple[float, float]]:
    """By the data set whose lengths the texts have: the share of c₀, and dynamic over static.

    Both are of computation, where costs were calibrated; ``fit`` as in ``fit_costs``.
    """
    points = {}
    for comparison in (lab.comparison, *lab.others):
        if comparison.calibration is None or "dynamic" not in comparison.summary.index:
            continue
        share = fixed_share(comparison, fit_costs(comparison.calibration, fit))
        points[comparison.like] = share, float(comparison.summary.loc["dynamic", "compute_ratio"])
    return points
