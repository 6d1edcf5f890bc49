"""Conclusions of assignment 2, part 1: the model of DDP's backward pass."""

from __future__ import annotations

import numpy as np

from common.analysis.conclusions.bucket_runs import run_of
from common.analysis.conclusions.conclusion import Seen, counted, numbered
from common.errors import UserError
from common.perfmodel.collectives import as_alpha_beta
from common.perfmodel.ddp.closed_form import closed_form


def _embedding_last(run_dir: str) -> Seen:
    profile = run_of(run_dir).profile
    share = profile.sizes_bytes[-1] / profile.total_bytes
    return counted("wte" in profile.names[-1], f"{profile.names[-1]}, {share:.0%} of the bytes")


def _passes(run_dir: str) -> tuple:
    """Returns the predicted passes with small buckets, medium ones and a single one."""
    run = run_of(run_dir)
    caps = (run.gradient_mib / 26, run.gradient_mib / 3, max(64, 2 * run.gradient_mib))
    return tuple(map(run.model.at_cap, caps))


def _one_bucket_shortest(run_dir: str) -> Seen:
    totals_ms = [view.total_s * 1e3 for view in _passes(run_dir)]
    number = ", ".join(f"{total_ms:.1f}" for total_ms in totals_ms)
    return counted(totals_ms[-1] == min(totals_ms), f"{number} ms, predicted")


def _one_bucket_exposes(run_dir: str) -> Seen:
    exposed_ms = [view.exposed_communication_s * 1e3 for view in _passes(run_dir)]
    number = ", ".join(f"{exposed:.1f}" for exposed in exposed_ms)
    return counted(exposed_ms[-1] == max(exposed_ms), f"{number} ms, predicted")


def _computation_slowed(run_dir: str) -> Seen:
    small, _, single = (v.total_s - v.exposed_communication_s for v in _passes(run_dir))
    number = f"{small * 1e3:.1f} against {single * 1e3:.1f} ms, predicted"
    return counted(small > single, number)


def _compute_bound(run_dir: str) -> Seen:
    run = run_of(run_dir)
    line = as_alpha_beta(run.all_reduce.curve)
    compute_ns = closed_form(run.profile, line).seconds_per_byte * 1e9
    send_ns = 1e9 / line.bandwidth_bytes_per_s
    return counted(compute_ns > send_ns, f"{compute_ns:.2f} against {send_ns:.2f} ns")


def _layers_decide(run_dir: str) -> Seen:
    run = run_of(run_dir)
    by_hand = closed_form(run.profile, as_alpha_beta(run.all_reduce.curve))
    smallest_mib = run.gradient_mib / by_hand.layers
    best_mib = by_hand.best_bucket_bytes() / 2**20
    return counted(np.isclose(best_mib, smallest_mib), f"B/L is {smallest_mib:.2f} MiB")


def _hiding_saves_nothing(run_dir: str) -> Seen:
    run = run_of(run_dir)
    if not run.costs.lost_compute:
        raise UserError("this run did not measure contention")
    sizes, lost_s = map(np.array, run.costs.lost_compute)
    longer = lost_s / run.all_reduce.curve.time_s(sizes) - 1
    return counted(bool((longer > 0).all()), f"takes {longer.min():+.0%} to {longer.max():+.0%}")


CONCLUSIONS = {
    "assignment2_part1_model": numbered(
        [
            (1, "the last gradient is the token embedding's", _embedding_last),
            (2, "a single bucket exposes the most", _one_bucket_exposes),
            (2, "small buckets make computation longer", _computation_slowed),
            (2, "a single bucket has the shortest pass", _one_bucket_shortest),
            (3, "a byte takes longer to compute than to send", _compute_bound),
            (3, "b* by hand is limited by B/L", _layers_decide),
            (4, "hiding an all-reduce takes more than it saves", _hiding_saves_nothing),
        ]
    )
}
