"""Sentences that read their own numbers, for the notebooks of assignment 2."""

from __future__ import annotations

import math

from common.analysis.assignment2 import Assignment2Run
from common.analysis.emulated import Networks
from common.analysis.sweep import Accuracy
from common.perfmodel.search import BestCap
from common.perfmodel.whatif import near_interval


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
    """The caps within 1 % of the best, as text."""
    low, high = near_interval(best)
    return f"up to {high:.3g} MiB" if low < 0.001 else f"{low:.3g} to {high:.3g} MiB"


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


def choice_text(accuracy: Accuracy) -> str:
    """What following the prediction would have cost."""
    if accuracy.predicted_best_mib == accuracy.measured_best_mib:
        return f"The predicted best cap, {accuracy.predicted_best_mib:g} MiB, is the measured one."
    told_apart = (
        "less than the noise: the two cannot be told apart"
        if accuracy.regret <= accuracy.noise_floor
        else "more than the noise"
    )
    return (
        f"The model would choose {accuracy.predicted_best_mib:g} MiB, the measurement "
        f"{accuracy.measured_best_mib:g} MiB. Following the model costs **{accuracy.regret:.1%}** "
        f"(the regret), {told_apart}."
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
        f"{slowest.noise_floor:.1%}."
    )
