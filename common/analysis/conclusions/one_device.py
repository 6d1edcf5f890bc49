"""Conclusions of assignment 0: memory, throughput and options, and the profile of a step."""

from __future__ import annotations

from functools import cache

import numpy as np

from common.analysis.conclusions.conclusion import Look, Seen, above, below, counted, numbered
from common.analysis.one_device import memory, options, profile, throughput
from common.analysis.one_device.profile_text import ABOVE_ROOF
from common.errors import UserError
from common.judged import Judged
from common.perfmodel.one_device.roofline import COMPUTE, MEMORY
from common.samples import Interval, paired_ratio, student
from common.traces.operator_categories import IDLE, MATRIX

FAST = (
    *("sdpa", "bfloat16", "float16", "tf32", "compile", "fused"),
    *("vocab_multiple", "async_batches"),
)
"""Options that the arm ``all`` turns on, of which a device has some."""

MIB = 2**20
STEPS = "steps of one process"

_memory_of = cache(memory.open_memory_run)
_profile_of = cache(profile.open_profile)
_throughput_of = cache(throughput.open_throughput)
_options_of = cache(options.open_options)


def _largest_at_peak(run_dir: str) -> Seen:
    first = _memory_of(run_dir).at_peak.iloc[0]
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
    return counted(holds, " → ".join(f"{peak:.1f}" for peak in peaks_gb) + " GB, predicted")


def _saved_by_sharding(run_dir: str) -> Seen:
    table = memory.sharded_peaks(_memory_of(run_dir).workload, [64]).set_index("strategy")
    share = table.at["FULL_SHARD", "peak_bytes"] / table.at["DDP", "peak_bytes"]
    return counted(share > 0.5, f"{share:.0%} of DDP's peak, predicted")


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
    """Judges the tokens/s of an arm over the plain step's."""
    rates = options.rates(_options_of(run_dir).opened.table(options.TIMES))
    if arm not in rates:
        raise UserError(f"{arm} was not measured")
    # The table shows all arms together.
    claims = len(rates.columns) - 1
    return Judged(paired_ratio(rates[arm], rates[options.BASELINE], claims=claims))


def _faster(arm: str) -> Look:
    return lambda run_dir: above(_option(arm, run_dir))


def _slower(arm: str) -> Look:
    return lambda run_dir: below(_option(arm, run_dir))


def _below_product(run_dir: str) -> Seen:
    rates = options.rates(_options_of(run_dir).opened.table(options.TIMES))
    single = [name for name in FAST if name in rates]
    if options.ALL not in rates:
        raise UserError("all together were not measured")
    gains = rates.div(rates[options.BASELINE], axis=0)
    product = gains[single].prod(axis=1, skipna=False)
    return below(Judged(paired_ratio(gains[options.ALL], product)))


def _within_fusion_bound(run_dir: str) -> Seen:
    bound = _profile_of(run_dir).most_fusing_gains
    gain = _option("compile", run_dir)
    return below(Judged(gain.interval, null=bound))


def _products_share(run_dir: str) -> Seen:
    return above(Judged(_shares(run_dir, "category", MATRIX), null=0.5, population=STEPS), "{:.0%}")


def _products_in_operations(run_dir: str) -> Seen:
    share = _profile_of(run_dir).flops_shares()[MATRIX]
    judged = Judged(_shares(run_dir, "category", MATRIX), null=share, population=STEPS)
    outcome = below(judged, "{:.0%}")
    return Seen(outcome.status, f"{outcome.number} of the time, {share:.0%} of the operations")


def _shares(run_dir: str, column: str, value: str) -> Interval:
    operators = _profile_of(run_dir).operators
    by_step = operators.groupby(["step", column])["time_us"].sum().unstack(fill_value=0.0)
    return student(by_step[value] / by_step.sum(axis=1))


def _backward_operations(run_dir: str) -> Seen:
    ratio = _profile_of(run_dir).phase_costs().at["backward", "flops_over_forward"]
    return counted(1.9 < ratio < 2.2, f"{ratio:.2f} times")


def _backward_time(run_dir: str) -> Seen:
    run = _profile_of(run_dir)
    by_step = run.operators.groupby(["step", "phase"])["time_us"].sum().unstack()
    null = run.phase_costs().at["backward", "flops_over_forward"]
    ratio = student(by_step["backward"] / by_step["forward"])
    return below(Judged(ratio, null=null, population=STEPS))


def _idle(run_dir: str) -> Seen:
    return below(Judged(_shares(run_dir, "category", IDLE), null=0.1, population=STEPS), "{:.1%}")


def _arithmetic_bound(run_dir: str) -> Seen:
    run = _profile_of(run_dir)
    if run.roof is None:
        raise UserError("the peaks of this device are not known")
    shares = run.main_operators().groupby("bound")["share"].sum()
    compute, traffic = shares.get(COMPUTE, 0.0), shares.get(MEMORY, 0.0)
    return counted(compute > traffic, f"{compute:.0%} against {traffic:.0%}")


def _above_roof(run_dir: str) -> Seen:
    run = _profile_of(run_dir)
    if run.roof is None:
        raise UserError("the peaks of this device are not known")
    table = run.main_operators()
    names = table.loc[table["share_of_roof"] > ABOVE_ROOF, "operator"]
    return counted(len(names) > 0, f"{len(names)} operators")


def _fusing(run_dir: str) -> Seen:
    gain = _profile_of(run_dir).most_fusing_gains
    return counted(gain < 2, f"{gain:.2f} times at most")


def _utilisation(run_dir: str) -> Seen:
    run = _throughput_of(run_dir)
    if run.peak_flops_per_s is None:
        raise UserError("the peak of this device is not known")
    share = run.flops_per_s / run.peak_flops_per_s
    return counted(0.5 < share <= 1, f"MFU {share:.0%}")


def _half_batch(run_dir: str) -> Seen:
    line = _line(run_dir)
    return counted(line.half_batch < 1, f"half of the ceiling at a batch of {line.half_batch:.2g}")


def _near_ceiling(run_dir: str) -> Seen:
    _line(run_dir)
    run = _throughput_of(run_dir)
    share = run.measured["tokens_per_s"].iloc[-1] / run.ceiling_tokens_per_s
    return counted(share > 0.9, f"{share:.0%} at batch {run.measured['batch_size'].iloc[-1]}")


def _off_the_line(run_dir: str) -> Seen:
    _line(run_dir)
    off = _throughput_of(run_dir).off_the_line
    return counted(off.abs().max() > 0.05, f"{max(off, key=abs):+.0%} at {off.abs().idxmax()}")


def _line(run_dir: str) -> throughput.Saturation:
    run = _throughput_of(run_dir)
    if run.saturation is None:
        raise UserError(run.no_line)
    return run.saturation


def _parameters_take_longer(run_dir: str) -> Seen:
    run = _throughput_of(run_dir)
    ratio = run.naive.years / run.by_operations.years - 1
    return counted(ratio > 0, f"{ratio:+.0%}")


CONCLUSIONS = {
    "assignment0_memory": (
        *numbered(
            [
                (2, "logits and loss are the largest part of the peak", _largest_at_peak),
                (2, "at the update less is in memory than at the peak", _peak_before_update),
                (2, "the prediction of the peak is within 1 %", _peak_predicted),
                (3, "head and loss keep more than a block", _head_above_block),
                (4, "more is reserved than allocated", _reserved_above_allocated),
                (5, "fused attention and the loss in pieces save most", _largest_savings),
                (5, "the loss in pieces makes the step slower", _slower("loss_chunks")),
                (5, "checkpointing makes the step slower", _slower("activation_checkpointing")),
            ]
        ),
        *numbered(
            [
                (6, "the median error of the study is below 0.01 %", _study_errors),
                (6, "large errors: one sequence, attention written out, too low", _study_outliers),
            ],
            of_run=False,
        ),
        *numbered([(7, "FULL_SHARD on 64 ranks keeps over half of the peak", _saved_by_sharding)]),
    ),
    "assignment0_profile": numbered(
        [
            (1, "matrix products take more than half of the step", _products_share),
            (1, "matrix products have a larger share of the operations", _products_in_operations),
            (2, "backward does about twice forward's operations", _backward_operations),
            (2, "its time is a smaller multiple of forward's", _backward_time),
            (3, "less than a tenth of the step is idle", _idle),
            (4, "arithmetic bounds more of the step than memory", _arithmetic_bound),
            (4, "some operators stand above the roof", _above_roof),
            (5, "fusing could not make the step twice as fast", _fusing),
            (5, "`torch.compile` stays below what fusing could gain", _within_fusion_bound),
        ]
    ),
    "assignment0_throughput": numbered(
        [
            (1, "the step reaches more than half of the peak", _utilisation),
            (2, "batch 1 spends most of its time on its sequence", _half_batch),
            (2, "the largest batch reaches nine tenths of the ceiling", _near_ceiling),
            (2, "a batch is more than 5 % off the line", _off_the_line),
            (3, "bfloat16 makes the step faster", _faster("bfloat16")),
            (3, "`compile` makes the step faster", _faster("compile")),
            (3, "four passes an update make the step faster", _faster("gradient_accumulation")),
            (3, "checkpointing makes the step slower", _slower("activation_checkpointing")),
            (3, "sdpa makes the step faster", _faster("sdpa")),
            (3, "the fused update makes the step faster", _faster("fused")),
            (3, "all together gain less than the product", _below_product),
            (4, "by parameters training takes longer", _parameters_take_longer),
        ]
    ),
}
