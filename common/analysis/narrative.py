"""Sentences that read their own numbers, for the notebooks of assignment 2."""

from __future__ import annotations

import math
from collections.abc import Sequence

import pandas as pd

from common.analysis.assignment2 import Assignment2Run
from common.analysis.emulated import LINK_RATES, Networks, links
from common.analysis.sweep import Accuracy
from common.perfmodel.search import BestCap
from common.runtime.socket_bytes import PAYLOAD_SHARE

MOST_INTERVALS = 4
"""So many intervals of caps are listed one by one."""
TOUCHING = 1.01
"""Intervals that are not further apart are told as one."""
ABOVE_LINK = 1.005
"""A stream that is faster than its link's payload by more than this was measured wrongly."""


def where_from(run: Assignment2Run) -> str:
    """Whose data these are; says so where they are recorded."""
    what = "{model}, batch {batch_size}, sequence {max_seq_len}, {dtype}".format(**run.settings)
    if run.recorded:
        return (
            f"> **Recorded data, not yours.** {run.caption}. {what}. "
            "`uv run ddplab run assignment2` measures here."
        )
    return f"> Measured in this run: {run.caption}. {what}."


def interval_text(best: BestCap) -> str:
    """All caps within 1 % of the best, as text; of many intervals their number and the ends."""
    near = [best.near_mib[0]]
    for low, high in best.near_mib[1:]:
        if low > near[-1][1] * TOUCHING:
            near.append((low, high))
        else:
            near[-1] = (near[-1][0], high)
    if len(near) > MOST_INTERVALS:
        return f"{_interval(near[0][0], near[-1][1], best)} MiB, in {len(near)} intervals"
    return _joined([_interval(low, high, best) for low, high in near]) + " MiB"


def _interval(low: float, high: float, best: BestCap) -> str:
    """From one cap to another; every cap above the largest searched one gives the single bucket."""
    last = best.candidates[-1]
    without_end = last.num_buckets == 1 and high >= last.high_mib
    if low < 0.001:
        return "any" if without_end else f"up to {high:.3g}"
    return f"{low:.3g} and more" if without_end else f"{low:.3g} to {high:.3g}"


def _joined(parts: Sequence[str]) -> str:
    return parts[0] if len(parts) == 1 else ", ".join(parts[:-1]) + f", or {parts[-1]}"


def accuracy_text(accuracy: Accuracy) -> str:
    """How good the prediction was, beside what could be told apart at all."""
    off = (
        f"The predicted backward time is off by **{accuracy.median_error:.1%}** in the median and "
        f"{accuracy.worst_error:.1%} at worst"
    )
    if math.isnan(accuracy.noise_floor):
        return f"{off}; with a single round the noise floor is unknown."
    within = accuracy.median_error <= accuracy.noise_floor
    verdict = (
        "no more than two halves of the same measurement differ from each other"
        if within
        else f"{accuracy.median_error / accuracy.noise_floor:.1f} times what two halves of the "
        "same measurement differ by"
    )
    return f"{off}; the noise floor is {accuracy.noise_floor:.1%}. The median error is {verdict}."


def choice_text(accuracy: Accuracy, best: BestCap | None = None) -> str:
    """What following the prediction would have cost, among the measured caps.

    With ``best``, the search over all caps, it says where none of the measured ones is as good.
    """
    chosen = accuracy.predicted_best_mib
    if chosen == accuracy.measured_best_mib:
        text = f"Of the measured caps {chosen:g} MiB is predicted to be the fastest, and it was."
    else:
        told_apart = (
            "less than the noise: the two cannot be told apart"
            if accuracy.regret <= accuracy.noise_floor
            else "more than the noise"
        )
        text = (
            f"Of the measured caps the model would choose {chosen:g} MiB, the measurement "
            f"{accuracy.measured_best_mib:g} MiB. Following the model costs "
            f"**{accuracy.regret:.1%}** (the regret), {told_apart}."
        )
    if best is None or best.matched_by(accuracy.table["bucket_cap_mib"]):
        return text
    shorter = 1 - best.total_s / best.predicted_s(chosen)
    return (
        f"{text} Of all caps the model would choose {best.cap_mib:.3g} MiB, predicted to be "
        f"{shorter:.1%} faster than {chosen:g} MiB; its buckets were not measured, so its regret "
        "is not known."
    )


def responsible_term(run: Assignment2Run, accuracy: Accuracy) -> str:
    """By how much the prediction differs, and which term is responsible.

    The backward pass without DDP was measured among the rounds of the sweep, so the error splits
    into computation (its profile came from another benchmark) and all the rest.
    """
    gap_ms = (accuracy.table["predicted_ms"] - accuracy.table["measured_ms"]).mean()
    compute_ms = (run.profile.backward_s - run.local_s) * 1e3
    rest = accuracy.table["predicted_ms"] - accuracy.table["measured_ms"] - compute_ms
    worst = accuracy.table.loc[rest.abs().idxmax()]
    larger = "computation" if abs(compute_ms) > rest.abs().median() else "communication"
    reason = {
        "computation": "the machine was not equally fast in both benchmarks, which no model of "
        "communication can know",
        "communication": "the all-reduces, what they take from computation, and DDP's copies are "
        "where the model is off",
    }[larger]
    return (
        f"On average over the caps the prediction is {abs(gap_ms):.1f} ms too "
        f"{'long' if gap_ms > 0 else 'short'}. Computation: the backward pass alone took "
        f"{run.profile.backward_s * 1e3:.1f} ms where its gradients were timed and "
        f"{run.local_s * 1e3:.1f} ms among the rounds of the sweep, which is {compute_ms:+.1f} ms. "
        f"Communication, and what it does to computation: what is left is "
        f"{rest.median():+.1f} ms in the median, and most at {worst['bucket_cap_mib']:g} MiB "
        f"({rest.loc[worst.name]:+.1f} ms). The larger part is **{larger}**: {reason}."
    )


def spread_text(accuracy: Accuracy) -> str:
    """How much the choice of the cap matters at all on this system."""
    times = accuracy.table["measured_ms"]
    worst = accuracy.table.loc[times.idxmax()]
    return (
        f"From the best cap to the worst ({worst['bucket_cap_mib']:g} MiB, "
        f"{worst['num_buckets']:.0f} buckets) the measured backward pass grows by "
        f"{times.max() / times.min() - 1:.0%}."
    )


def where_networks_from(networks: Networks) -> str:
    """Whose data these are, and why there are none of the reader's own where that is so."""
    names = " and ".join(run.name for run in networks.runs if not run.links.empty)
    if networks.left_out:
        return (
            f"> **Recorded data, not yours** ({names}): {networks.left_out}. "
            "`uv run ddplab doctor` says whether this machine can emulate hosts."
        )
    if networks.recorded:
        return (
            f"> **Recorded data, not yours** ({names}). `uv run ddplab run assignment2` "
            "measures here."
        )
    return f"> Measured in this run: {names}."


def links_text(networks: Networks) -> str:
    """What a stream reached of its link's payload, and by how much the probe itself is wrong."""
    table = links(networks)
    rate, *found = LINK_RATES
    reached = table[found].div(table[rate] * PAYLOAD_SHARE, axis=0)
    least, most = reached.min().min(), reached.max().max()
    text = f"Streams reached {least:.1%} to {most:.1%} of the payload that their links can carry."
    if most <= ABOVE_LINK:
        return text
    return (
        f"{text} No stream is faster than its link: the probe of this run counted bytes when it "
        "read them, and a probe that was held up reads late what came in before. So these figures "
        f"are known to {most - 1:.0%}. Newer runs take the kernel's count."
    )


def networks_text(networks: Networks) -> str:
    """How much the cap matters on the slowest network and over loopback, and where it is best."""
    slowest, loopback = networks.runs[0].accuracy(), networks.runs[-1].accuracy()

    def grows(accuracy: Accuracy) -> str:
        times = accuracy.table["measured_ms"]
        return f"{times.max() / times.min() - 1:.0%}"

    return (
        f"On {networks.runs[0].name} the worst cap costs {grows(slowest)} over the best, "
        f"{slowest.measured_best_mib:g} MiB; over loopback {grows(loopback)} over "
        f"{loopback.measured_best_mib:g} MiB. On {networks.runs[0].name} the prediction is off by "
        f"{slowest.median_error:.1%} in the median, beside a noise floor of "
        f"{slowest.noise_floor:.1%}. Regrets are of the measured cap that is predicted to be the "
        "fastest (filled stars)."
    )


def moves_text(table: pd.DataFrame, low: float, high: float) -> str:
    """How b* moves by hand and in the simulation when each quantity grows from one factor to
    another; ``table`` is that of ``whatif.best_caps``."""
    by_hand, moved, stays = [], [], []
    for quantity, rows in table.groupby("quantity", sort=False):
        ends = rows.set_index("factor").loc[[low, high]]
        by_hand.append(f"{quantity} {_moved(*ends['closed_form_mib'])}")
        before, after = ends["best_mib"]
        if f"{before:.3g}" == f"{after:.3g}":
            stays.append(quantity)
        else:
            moved.append(f"{quantity} {_moved(before, after)}")
    times = f"{high / low:g} times as much of a quantity"
    text = f"By hand, {times} moves $b^*$ so: {'; '.join(by_hand)}. "
    if moved:
        text += f"In the simulation: {'; '.join(moved)}. "
    if stays:
        at = table.loc[table["factor"] == low, "best_mib"].iloc[0]
        text += f"There $b^*$ stays at {at:.3g} MiB whatever the {_joined(stays)}. "
    return text


def _moved(before: float, after: float) -> str:
    return f"from {before:.3g} to {after:.3g} MiB"
