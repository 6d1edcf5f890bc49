"""Conclusions of assignment 0: memory, throughput and options, and the profile of a step."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import numpy as np

from common.analysis.conclusions.conclusion import (
    TABLES,
    Look,
    Seen,
    above,
    below,
    by_prediction,
    counted,
    every,
    opposite,
    unsettled,
)
from common.analysis.one_device import memory, options, profile, throughput
from common.errors import UserError
from common.judged import Judged
from common.traces.operator_categories import MATRIX

MIB = 2**20

_memory_of = cache(memory.open_memory_run)
_profile_of = cache(profile.open_profile)
_throughput_of = cache(throughput.open_throughput)
_options_of = cache(options.open_options)


def _largest_at_peak(run_dir: str) -> Seen:
    first = _memory_of(run_dir).at_predicted_peak.iloc[0]
    return counted(
        first["component"] == "logits and loss", f"{first['component']}, {first['share']:.0%}"
    )


def _peak_before_update(run_dir: str) -> Seen:
    by_moment = _memory_of(run_dir).moments.groupby("moment")["predicted_bytes"].sum() / MIB
    at_update, peak = by_moment["update"], by_moment.max()
    return counted(at_update < peak, f"{at_update:,.0f} of {peak:,.0f} MiB")


def _peak_predicted(run_dir: str) -> Seen:
    error = _memory_of(run_dir).error
    return counted(abs(error) < 0.01, f"{abs(error):.2%} off")


def _head_above_block(run_dir: str) -> Seen:
    kept = _memory_of(run_dir).layers.set_index("layer")["predicted_bytes"]
    ratio = kept["head and loss"] / kept["block 0"]
    return counted(ratio > 1, f"as much as {ratio:.1f} blocks")


def _reserved_above_allocated(run_dir: str) -> Seen:
    run = _memory_of(run_dir)
    if run.reserved_bytes is None:
        raise UserError("a CPU's allocator does not tell")
    return counted(
        run.reserved_bytes > run.seen_bytes,
        f"{run.reserved_bytes / MIB:,.0f} of {run.seen_bytes / MIB:,.0f} MiB",
    )


def _largest_savings(run_dir: str) -> Seen:
    ways = memory.ways_to_fit(_memory_of(run_dir).workload, [64])
    peaks_gb = np.array([peak for [peak] in ways.values()]) / 1e9
    attention, precision, pieces, checkpointing = -np.diff(peaks_gb)
    holds = min(attention, pieces) > max(precision, checkpointing)
    return by_prediction(holds, " → ".join(f"{peak:.1f}" for peak in peaks_gb) + " GB")


def _saved_by_sharding(run_dir: str) -> Seen:
    table = memory.sharded_peaks(_memory_of(run_dir).workload, [64]).set_index("strategy")
    share = table.at["FULL_SHARD", "peak_bytes"] / table.at["DDP", "peak_bytes"]
    return by_prediction(share > 0.5, f"{share:.0%} of DDP's peak")


def _study_errors(_: str) -> Seen:
    errors = memory.open_study()[0]["error"].abs()
    return counted(errors.median() < 1e-4, f"{errors.median():.4%} of {len(errors)} cases")


def _study_outliers(_: str) -> Seen:
    study, _source = memory.open_study()
    worst = study[study["error"].abs() > 0.002]
    alike = (worst["batch_size"] == 1) & (worst["attention"] == "eager")
    alike &= ~worst["activation_checkpointing"] & (worst["error"] < 0)
    span = f"{worst['error'].min():+.1%} to {worst['error'].max():+.1%}"
    return counted(bool(alike.all()), f"{len(worst)} cases, {span}")


def _option(arm: str, run_dir: str) -> Judged:
    """Returns the tokens/s of an arm over the plain step's, as their section judges them."""
    ratios = _options_of(run_dir).ratios
    if arm not in ratios:
        raise UserError(f"{arm} was not measured")
    return ratios[arm]


def _faster(arm: str) -> Look:
    return lambda run_dir: above(_option(arm, run_dir))


def _slower(arm: str) -> Look:
    return lambda run_dir: below(_option(arm, run_dir))


def _below_product(run_dir: str) -> Seen:
    judged = _options_of(run_dir).over_product
    if judged is None:
        raise UserError("all together were not measured")
    return below(judged)


def _within_fusion_bound(run_dir: str) -> Seen:
    bound = _profile_of(run_dir).most_fusing_gains.estimate
    return below(replace(_option("compile", run_dir), null=bound))


def _products_share(run_dir: str) -> Seen:
    return above(replace(_profile_of(run_dir).share_of(MATRIX), null=0.5), "{:.1%}")


def _products_in_operations(run_dir: str) -> Seen:
    run = _profile_of(run_dir)
    share = run.flops_shares()[MATRIX]
    outcome = below(replace(run.share_of(MATRIX), null=share), "{:.1%}")
    return replace(outcome, number=f"{outcome.number} of the time, {share:.1%} of the operations")


def _backward_operations(run_dir: str) -> Seen:
    ratio = _profile_of(run_dir).phase_costs().at["backward", "flops_over_forward"]
    return counted(1.9 < ratio < 2.2, f"{ratio:.2f} times")


def _backward_time(run_dir: str) -> Seen:
    run = _profile_of(run_dir)
    null = run.phase_costs().at["backward", "flops_over_forward"]
    return below(replace(run.backward_over_forward, null=null))


def _idle(run_dir: str) -> Seen:
    return below(replace(_profile_of(run_dir).idle_share, null=0.1), "{:.1%}")


def _arithmetic_bound(run_dir: str) -> Seen:
    more_ms = _profile_of(run_dir).more_arithmetic_ms
    if more_ms is None:
        raise UserError("the peaks of this device are not known")
    return above(more_ms, "{:+.0f} ms")


def _above_roof(run_dir: str) -> Seen:
    shares = _profile_of(run_dir).shares_of_roof
    if not shares:
        raise UserError("no operator is in every step of a device whose peaks are known")
    highest = sorted(shares.values(), key=lambda share: -share.estimate)
    return opposite(every([below(share, "{:.0%}") for share in highest]))


def _fusing(run_dir: str) -> Seen:
    return below(replace(_profile_of(run_dir).most_fusing_gains, null=2.0))


def _utilisation(run_dir: str) -> Seen:
    run = _throughput_of(run_dir)
    if run.peak_flops_per_s is None:
        raise UserError("the peak of this device is not known")
    share = run.speed.interval.map(lambda rate: rate * run.flops_per_token / run.peak_flops_per_s)
    outcome = above(replace(run.speed, interval=share, null=0.5), "{:.0%}")
    if share.estimate > 1:
        return unsettled(f"{outcome.number}, more than the measured peak")
    return outcome


def _parameters_take_longer(run_dir: str) -> Seen:
    run = _throughput_of(run_dir)
    ratio = run.naive.years / run.by_operations.years - 1
    return counted(ratio > 0, f"{ratio:+.0%}")


CONCLUSIONS = {
    "assignment0_memory": [
        (2, "logits and loss are the largest part of the peak", _largest_at_peak),
        (2, "at the update less is in memory than at the peak", _peak_before_update),
        (2, "the prediction of the peak is within 1 %", _peak_predicted),
        (3, "head and loss keep more than a block", _head_above_block),
        (4, "more is reserved than allocated", _reserved_above_allocated),
        (5, "fused attention and the loss in pieces save most", _largest_savings),
        (5, "the loss in pieces makes the step slower", _slower("loss_chunks")),
        (5, "checkpointing makes the step slower", _slower("activation_checkpointing")),
        (6, "the median error of the study is below 0.01 %", _study_errors, TABLES),
        (
            6,
            "large errors: one sequence, attention written out, too low",
            _study_outliers,
            TABLES,
        ),
        (7, "FULL_SHARD on 64 ranks keeps over half of the peak", _saved_by_sharding),
    ],
    "assignment0_profile": [
        (1, "matrix products take more than half of the step", _products_share),
        (1, "matrix products have a larger share of the operations", _products_in_operations),
        (2, "backward does about twice forward's operations", _backward_operations),
        (2, "its time is a smaller multiple of forward's", _backward_time),
        (3, "less than a tenth of the step is idle", _idle),
        (4, "arithmetic bounds more of the step than memory", _arithmetic_bound),
        (4, "some operators stand above the roof", _above_roof),
        (5, "fusing could not make the step twice as fast", _fusing),
        (5, "`torch.compile` stays below what fusing could gain", _within_fusion_bound),
    ],
    "assignment0_throughput": [
        (1, "the step reaches more than half of the peak", _utilisation),
        (3, "bfloat16 makes the step faster", _faster("bfloat16")),
        (3, "`compile` makes the step faster", _faster("compile")),
        (3, "four passes an update make the step faster", _faster("gradient_accumulation")),
        (3, "checkpointing makes the step slower", _slower("activation_checkpointing")),
        (3, "sdpa makes the step faster", _faster("sdpa")),
        (3, "the fused update makes the step faster", _faster("fused")),
        (3, "all together gain less than the product", _below_product),
        (4, "by parameters training takes longer", _parameters_take_longer),
    ],
}
