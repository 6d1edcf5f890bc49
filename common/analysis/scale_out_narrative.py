"""Sentences that read their own numbers, for the notebook of thousands of GPUs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import pandas as pd

from common.perfmodel.architecture import GPT2Config
from common.perfmodel.published_sweep import (
    SweepExplained,
    deviation_by_bandwidth,
    least_bandwidth_gb_per_s,
)
from common.perfmodel.scale_out import STRATEGIES, ScaleOut, stated_assumptions

SWEEP_CAPTION = (
    "2 × A100-80GB, NVLink, NCCL, float32, batch 16 per GPU, sequence 512; published by "
    "github.com/schemmy/exp-llm (2026), averages of 200 steps. Predicted: NCCL's model of two GPUs "
    "of an A100 node; one MFU per model is fitted."
)
PROFILED_SHARE = 0.0441
"""Communication in the profile of GPT-2 124M at batch 16 (data/bucket-sweeps-published)."""


def assumptions_text(predicted: ScaleOut) -> str:
    """Everything assumed, as a list."""
    return "\n".join(f"- {sentence}" for sentence in stated_assumptions(predicted))


def network_text(accuracy: pd.DataFrame) -> str:
    """How far the model of NCCL is off where it was fitted to nothing, by published table."""
    rows = accuracy[accuracy["model"] == "analytic"]
    parts = [f"{row.mean_error:.0%} on {row.table}" for row in rows.itertuples()]
    return (
        f"Without a fit the mean error above 1 MiB is {', '.join(parts)}: small on the table its "
        "ramp comes from, and far off where the network's kind or the harness is not what it "
        "assumes. The predictions below rest on this column, not on the fits, which is why their "
        "bands let a collective run at half the model's speed. Who has a table of the cluster "
        "should fit it (`common.perfmodel.nccl_fit`)."
    )


def best_caps_text(predictions: Mapping[str, ScaleOut]) -> str:
    """Where b* goes with the number of GPUs, and what DDP's default costs."""
    sentences, directions = [], []
    for name, predicted in predictions.items():
        rows = predicted.rows("weak", "DDP").dropna(subset="bucket_cap_mib")
        first, last = rows.iloc[0], rows.iloc[-1]
        grows = last.bucket_cap_mib > first.bucket_cap_mib
        same = last.bucket_cap_mib == first.bucket_cap_mib
        directions.append("stays" if same else "grows" if grows else "falls")
        sentences.append(
            f"**{name}**: {first.bucket_cap_mib:,.0f} MiB on {first.gpus:,} GPUs, "
            f"{last.bucket_cap_mib:,.0f} on {last.gpus:,}, where DDP's default costs "
            f"{last.default_step_s / last.step_s - 1:.1%}"
        )
    counted = " and ".join(
        f"{way} on {directions.count(way)}"
        for way in ("grows", "stays", "falls")
        if way in directions
    )
    work = next(iter(predictions.values())).workload
    return (
        f"Under weak scaling ({work.model}, {work.batch_size} sequences of {work.seq_len} tokens "
        f"per GPU, {work.precision}) b* {counted} of {len(predictions)} kinds of clusters, from "
        "the fewest GPUs to the most: on " + "; on ".join(sentences) + "."
    )


def outgrown_text(predictions: Mapping[str, ScaleOut], least: float = 0.05) -> str:
    """From which number of GPUs on DDP's default costs more than ``least`` under strong scaling."""
    sentences = []
    for name, predicted in predictions.items():
        rows = predicted.rows("strong", "DDP").dropna(subset="bucket_cap_mib")
        costly = rows[rows["default_step_s"] / rows["step_s"] - 1 > least]
        if costly.empty:
            sentences.append(f"on {name} it never does")
            continue
        last = rows.iloc[-1]
        sentences.append(
            f"on {name} from {costly['gpus'].min():,} GPUs on (on {last.gpus:,} the step takes "
            f"{last.default_step_s / last.step_s:.1f} times the best)"
        )
    return f"DDP's default costs more than {least:.0%}: {'; '.join(sentences)}."


def efficiency_text(predicted: ScaleOut) -> str:
    """Efficiency on the most GPUs, by strategy, and what the largest loss is."""
    sentences = []
    for strategy in STRATEGIES:
        row = predicted.rows("weak", strategy).iloc[-1]
        losses = {
            "waiting for the slowest GPU": row.straggler_s,
            "exposed communication": row.exposed_s,
            "computation slowed by communication": row.slowed_s,
            "copies": row.copies_s,
        }
        largest = max(losses, key=losses.get)
        sentences.append(
            f"**{strategy}** reaches {row.efficiency:.0%} (band {row.efficiency_low:.0%} to "
            f"{row.efficiency_high:.0%}); most of the rest is {largest}, "
            f"{losses[largest] / row.step_s:.0%} of the step"
        )
    gpus = predicted.rows("weak", "DDP")["gpus"].max()
    return f"On {gpus:,} GPUs, weak scaling: " + "; ".join(sentences) + "."


def halving_text(predicted: ScaleOut) -> str:
    """The number of GPUs up to which strong scaling keeps half of a GPU's work."""
    parts = []
    for strategy in STRATEGIES:
        rows = predicted.rows("strong", strategy)
        good = rows[rows["efficiency"] >= 0.5]
        reach = f"{good['gpus'].max():,} GPUs" if len(good) else "none of these numbers of GPUs"
        parts.append(f"{strategy} up to {reach}")
    return (
        f"With a global batch of {predicted.global_batch_size:,} sequences more than half of what "
        f"is paid for computes: {', '.join(parts)}."
    )


def flat_text(found: Sequence[SweepExplained]) -> str:
    """Why the published curve is flat."""
    parts = [
        f"**{one.model}**: measured {one.spread('measured_ms'):.2%} from the fastest to the "
        f"slowest cap, predicted {one.spread('predicted_ms'):.2%}, no step off by more than "
        f"{one.worst_deviation:.1%}; all all-reduces together take {one.all_reduces_ms:.1f} ms of "
        f"{one.table['measured_ms'].mean():,.0f}, {one.communication_share:.1%} of the step"
        for one in found
    ]
    return (
        f"{'; '.join(parts)}. Even with everything in one bucket, and nothing hidden, no more than "
        "that share can be lost, and with many buckets most of it is hidden: there is nothing for "
        "a cap to win."
    )


def link_text(found: SweepExplained) -> str:
    """What a flat curve says about the link, and about the published share of communication."""
    least = least_bandwidth_gb_per_s(found.model)
    gradient_bytes = 4 * GPT2Config.named(found.model).num_parameters()
    slow = gradient_bytes / (PROFILED_SHARE * found.table["measured_ms"].mean() / 1e3) / 1e9
    there = deviation_by_bandwidth(found.model, [slow]).iloc[0]
    return (
        f"The author's profiler has {PROFILED_SHARE:.1%} of its time in communication. If that "
        f"were the all-reduces alone, the link would carry {slow:.0f} GB/s, and the caps of "
        f"{found.model} would differ by {there['predicted_spread']:.1%}. They do not: to keep "
        f"every step within 1 % the link must carry at least {least:.0f} GB/s, as NVLink does and "
        "PCIe does not. So most of that share is something else: the profile counts nested events "
        "more than once, and an all-reduce's kernel also waits for the other GPU."
    )


def efficiency_table(found: pd.DataFrame) -> pd.DataFrame:
    """Published and predicted efficiency of two GPUs, with titles and without units to guess."""
    names = {
        "batch_per_gpu": "batch per GPU",
        "mfu": "MFU of one GPU",
        "measured_efficiency": "published",
        "predicted_efficiency": "predicted",
        "without_stragglers": "without stragglers",
    }
    return found.rename(columns=names)
