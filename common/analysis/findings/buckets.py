"""Finds the best bucket cap (assignment 2), its gain, and the error of the prediction.

All three are about the slowest network of the run: where communication takes long, the cap matters.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np

from common.analysis.buckets.choice import cap_or_ties, near_text
from common.analysis.buckets.measurements import CALIBRATED_BY, open_run
from common.analysis.buckets.networks import NetworkRun, measured_networks
from common.analysis.buckets.sweep import Accuracy
from common.analysis.findings.finding import Answer, Question, with_interval
from common.analysis.runs import Run
from common.judged import DISTURBED, Verdict
from common.runtime.records.run_directory import find_table


def best_cap(folder: Path) -> Answer:
    """Finds b* of the run's slowest network, and the measured best beside it."""
    network, run = slowest_network(folder)
    best = network.model.best_cap()
    accuracy = network.accuracy()
    return Answer(
        value=f"b* = {best.cap_mib:.3g} MiB",
        spread=f"within 1 %: {near_text(best)}; {_measured_best(accuracy)}; {network.scope}",
        run=run,
        doubt=_calibrated_while(network, folder),
    )


def _calibrated_while(network: NetworkRun, folder: Path) -> str:
    """Returns that the machine was disturbed while the prediction's samples were measured."""
    places = (network.folder.parent, folder)  # an emulated network has its own below the run's
    paths = (next(filter(None, (find_table(p, n) for p in places)), None) for n in CALIBRATED_BY)
    states = {Run(path.parent, folder).machine_state for path in paths if path}
    return "calibrated while the machine was disturbed" if DISTURBED in states else ""


def _measured_best(accuracy: Accuracy) -> str:
    """Returns which of the measured caps is best, as far as it can be told from noise."""
    count = len(accuracy.table)
    if accuracy.best is None:
        return "a single cap was measured"
    best, spread = accuracy.best, accuracy.worst_over_best
    if not best.lead.is_settled and "tied" in cap_or_ties(best):
        return f"of the {count} measured, {cap_or_ties(best)} ({best.lead.reason})"
    if not best.lead.is_settled:
        return f"the best of the {count} measured is {cap_or_ties(best)}"
    longest = f", the worst takes {spread.estimate:.2f} times as long" if spread.is_settled else ""
    return f"best of the {count} measured: {cap_or_ties(best)}{longest}"


def gain_over_default(folder: Path) -> Answer:
    """Finds how much shorter a backward pass is with the best cap than with DDP's default.

    Measured where the sweep has the default, at the measured cap that the model calls best; else
    predicted.
    """
    network, run = slowest_network(folder)
    chosen = network.accuracy().predicted_best_mib
    gain = network.gain_over_default(chosen)
    if gain.verdict is Verdict.NOT_MEASURED:
        default_s, best_s = network.model.backward_s(None), network.model.best_cap().total_s
        return Answer(
            value=f"{1 - best_s / default_s:.1%} of the backward pass",
            spread=f"the sweep has no steps with the default; {network.scope}",
            run=run,
        )
    return Answer(
        value=f"{gain.estimate:.1%} of the backward pass",
        spread=(
            f"{with_interval(gain, '{:.1%}')}; {chosen:g} MiB against 1 MiB, then 25; "
            f"{network.scope}"
        ),
        run=run,
        judged=gain,
        hidden="whether it gains anything",
    )


def error_of_prediction(folder: Path) -> Answer:
    """Finds the median error of the predicted backward passes beside the measurement's noise.

    Other networks of the run stand beside the slowest, with what following the prediction costs
    there.
    """
    network, run = slowest_network(folder)
    accuracy = network.accuracy()
    error = accuracy.error
    at_most = f", at most {error.interval.high:.1%}" if error.interval.is_told else ""
    is_known = not np.isnan(accuracy.noise_floor)
    noise = f"noise {accuracy.noise_floor:.1%}" if is_known else "noise not known: a single round"
    others = {other.name: other.accuracy() for other in measured_networks(open_run(folder))[1:]}
    elsewhere = "".join(
        f"; on {name}: {f'{at.median_error:.1%}' if at.error.is_settled else at.error.said}"
        for name, at in others.items()
    )
    beaten = [
        f"on {name} the cap that it chooses takes {at.regret.estimate:.0%} longer than another"
        for name, at in {network.name: accuracy, **others}.items()
        if at.regret.is_settled
    ]
    return Answer(
        value=f"{accuracy.median_error:.1%} in the median",
        spread=(
            f"{with_interval(error, '{:.1%}')}; {noise}; at most {accuracy.worst_error:.1%}, of "
            f"{len(accuracy.table)} bucketings; {network.scope}{elsewhere}"
        ),
        run=run,
        judged=error,
        hidden=f"the median error{at_most}",
        doubt="; ".join(beaten),
    )


def slowest_network(folder: Path) -> tuple[NetworkRun, Run]:
    """Returns the slowest network that the run measured: an emulated one, else its own."""
    network = measured_networks(open_run(folder))[0]
    return network, Run(network.folder, folder)


QUESTIONS = (
    Question(
        title="Best bucket cap",
        meaning=(
            "With bucket_cap_mb set to this the backward pass is predicted to be shortest; inside "
            "the range the cap hardly matters."
        ),
        anchor="assignment2_emulated_hosts-tb-on-each-network",
        find=best_cap,
    ),
    Question(
        title="Gain over DDP's default",
        priority=4,
        meaning=(
            "The default is a first bucket of 1 MiB and others of 25 MiB, whatever the network."
        ),
        anchor="assignment2_emulated_hosts-tb-on-each-network",
        find=gain_over_default,
    ),
    Question(
        title="Error of the prediction",
        priority=8,
        meaning=(
            "The prediction was made from parts measured apart; an error as small as the noise "
            "cannot be told from none."
        ),
        anchor="assignment2_part3_evaluation-bucket-size-against-time",
        find=error_of_prediction,
    ),
)
"""Questions of the first page to assignment 2."""
