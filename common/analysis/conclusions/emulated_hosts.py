"""Conclusions of assignment 2: caps on emulated hosts."""

from __future__ import annotations

from collections.abc import Callable

from common.analysis.buckets import networks
from common.analysis.buckets.networks import NetworkRun
from common.analysis.conclusions.bucket_runs import at_end, networks_of, slower_than_best
from common.analysis.conclusions.conclusion import Look, Seen, above, counted, numbered
from common.errors import UserError
from common.judged import Verdict

LOOPBACK = "loopback"


def _on_slowest(look: Callable[[NetworkRun], Seen]) -> Look:
    return lambda run_dir: look(networks_of(run_dir).runs[0])


def _on_loopback(look: Callable[[NetworkRun], Seen]) -> Look:
    def on_last(run_dir: str) -> Seen:
        fastest_run = networks_of(run_dir).runs[-1]
        if fastest_run.name != LOOPBACK:
            raise UserError("the ranks were not on loopback")
        return look(fastest_run)

    return on_last


def _streams(run_dir: str) -> Seen:
    reached = networks.links(networks_of(run_dir))[networks.REACHED]
    return counted(bool((reached <= 1).all()), f"{reached.min():.1%} to {reached.max():.1%}")


def _single_slower(run: NetworkRun) -> Seen:
    return slower_than_best(run.accuracy(), -1)


def _off(run: NetworkRun) -> Seen:
    return above(run.accuracy().error, "{:.1%}")


def _over_default(run: NetworkRun) -> Seen:
    gain = run.gain_over_default(run.accuracy().predicted_best_mib)
    if gain.verdict is Verdict.NOT_MEASURED:
        raise UserError("the sweep has no steps with the default")
    return above(gain, "{:.1%}")


CONCLUSIONS = {
    "assignment2_emulated_hosts": numbered(
        [
            (1, "no stream is faster than its link", _streams),
            (2, "over loopback the smallest cap is slower than the best", at_end(0)),
            (
                2,
                "on the slowest link one bucket is slower than the best",
                _on_slowest(_single_slower),
            ),
            (2, "on the slowest link the chosen cap beats the default", _on_slowest(_over_default)),
            (2, "over loopback the error is told from noise", _on_loopback(_off)),
            (2, "on the slowest link the error is told from noise", _on_slowest(_off)),
        ]
    )
}
