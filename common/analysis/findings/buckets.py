"""Finds the best bucket cap (assignment 2), its gain, and the error of the prediction.

All three are about the slowest network of the run: where communication takes long, the cap matters.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np

from common.analysis.buckets.choice import near_text
from common.analysis.buckets.measurements import open_run
from common.analysis.buckets.networks import NetworkRun, measured_networks
from common.analysis.buckets.sweep import Accuracy
from common.analysis.findings.finding import (
    MEASURED,
    PREDICTED,
    Answer,
    Question,
    hidden_by_noise,
)
from common.analysis.runs import Run
from common.perfmodel.buckets import DdpOptions
from common.perfmodel.ddp.bucketings import profile_buckets
from common.runtime.wording import counted


def best_cap(folder: Path) -> Answer:
    """Finds b* of the run's slowest network, and the measured best beside it."""
    network, run = slowest_network(folder)
    best = network.model.best_cap()
    accuracy = network.accuracy()
    return Answer(
        value=f"b* = {best.cap_mib:.3g} MiB",
        spread=f"within 1 %: {near_text(best)}; {_measured_best(accuracy)}; {network.name}",
        kind=PREDICTED,
        runs=(run,),
    )


def _measured_best(accuracy: Accuracy) -> str:
    """Returns which of the measured caps is best, as far as it can be told from noise."""
    times = accuracy.table["measured_ms"]
    worst = times.max() / times.min()
    which = hidden_by_noise(f"which of the {len(times)} measured caps is best")
    if np.isnan(accuracy.noise_floor):
        return f"{which} (a single round)"
    if worst - 1 <= accuracy.noise_floor:
        return which
    best_mib, chosen_mib = accuracy.measured_best_mib, accuracy.predicted_best_mib
    verdict = f"best of the {len(times)} measured: {best_mib:g} MiB"
    if best_mib != chosen_mib and not accuracy.regret_is_clear:
        verdict = f"of the {len(times)} measured, {chosen_mib:g} MiB is not told from the best"
    return f"{verdict}, the worst takes {worst:.2f} times as long"


def gain_over_default(folder: Path) -> Answer:
    """Finds how much shorter a backward pass is with the best cap than with DDP's default.

    Measured where the sweep has the default, at the measured cap that the model calls best; else
    predicted.
    """
    network, run = slowest_network(folder)
    chosen = network.accuracy().predicted_best_mib
    gains = network.sweep.gains_over_default(chosen)
    if not gains:
        default_s, best_s = network.model.backward_s(None), network.model.best_cap().total_s
        return Answer(
            value=f"{1 - best_s / default_s:.1%} of the backward pass",
            spread=f"the sweep has no steps with the default; {_of_default(network)}",
            kind=PREDICTED,
            runs=(run,),
        )
    low, high, single = min(gains), max(gains), len(gains) == 1
    rounds = "a single round" if single else f"{low:.1%} to {high:.1%} over {len(gains)} rounds"
    return Answer(
        value=f"{np.median(gains):.1%} of the backward pass",
        spread=f"{rounds}; {chosen:g} MiB against 1 MiB, then 25; {_of_default(network)}",
        kind=MEASURED,
        runs=(run,),
        hidden="whether it gains anything" if single or low <= 0 <= high else "",
    )


def _of_default(network: NetworkRun) -> str:
    """Returns the buckets that DDP's default makes of the run's gradients, and the network."""
    profile = network.model.profile
    buckets = counted(len(profile_buckets(profile, DdpOptions(None))), "bucket")
    return f"the default makes {buckets} of {profile.total_bytes / 2**20:.0f} MiB; {network.name}"


def error_of_prediction(folder: Path) -> Answer:
    """Finds the median error of the predicted backward passes beside the measurement's noise."""
    network, run = slowest_network(folder)
    accuracy = network.accuracy()
    if np.isnan(accuracy.noise_floor):
        noise, hidden = "noise not known: a single round", ""
    else:
        noise = f"noise {accuracy.noise_floor:.1%}"
        above = accuracy.median_error > accuracy.noise_floor
        hidden = "" if above else "the median error"
    return Answer(
        value=f"{accuracy.median_error:.1%} in the median",
        spread=(
            f"{noise}; at most {accuracy.worst_error:.1%}, of {len(accuracy.table)} bucketings; "
            f"{network.name}"
        ),
        kind=MEASURED,
        runs=(run,),
        hidden=hidden,
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
        meaning=(
            "The default is a first bucket of 1 MiB and others of 25 MiB, whatever the network."
        ),
        anchor="assignment2_emulated_hosts-tb-on-each-network",
        find=gain_over_default,
    ),
    Question(
        title="Error of the prediction",
        meaning=(
            "The prediction was made from parts measured apart; an error as small as the noise "
            "cannot be told from none."
        ),
        anchor="assignment2_part3_evaluation-bucket-size-against-time",
        find=error_of_prediction,
    ),
)
"""Questions of the first page to assignment 2."""
