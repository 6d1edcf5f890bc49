"""Sentences that read their own numbers, for the notebook of throughput and options."""

from __future__ import annotations

import pandas as pd

from common.analysis.assignment0_throughput import OptionsRun, ThroughputRun
from common.analysis.option_ratios import AGAIN, ALL, BASELINE, WITHOUT, clear
from common.analysis.throughput_text import (
    MEMORY,
    TARGET_DAYS,
    days_text,
    rate_text,
    significant,
    utilisation_text,
)
from common.perfmodel.architecture import GPT2Config
from common.perfmodel.extrapolation import ONE_TRILLION
from common.perfmodel.flops import matrix_parameters, training_flops_per_token


def batch_table(run: ThroughputRun) -> pd.DataFrame:
    """The sweep with MFU and memory, for a table."""
    column, _ = MEMORY[run.settings["device"]]
    memory = "memory (MiB)"
    table = run.batches[["batch_size", "status", "tokens_per_s", column]]
    table = table.rename(columns={"batch_size": "batch", "status": "result", column: memory})
    if run.peak_flops_per_s:
        mfu = run.batches["tokens_per_s"] * run.flops_per_token / run.peak_flops_per_s
        table.insert(3, "MFU", mfu)
    return table.rename(columns={"tokens_per_s": "tokens/s"})


def utilisation_sentence(run: ThroughputRun) -> str:
    """From tokens per second to operations per second, to their share of the peak."""
    flops_per_s = run.tokens_per_s * run.flops_per_token
    return (
        f"At batch {run.batch_size} this run did {run.tokens_per_s:,.0f} tokens/s (median step). A "
        f"token of {run.title} at this length takes {run.flops_per_token:.3g} operations, "
        f"so that is {rate_text(flops_per_s)}. "
        f"**{utilisation_text(flops_per_s, run.peak_flops_per_s, run.peak, run.device)}**."
    )


def saturation_sentence(run: ThroughputRun) -> str:
    """Where the curve bends, and why."""
    best = run.measured.loc[run.measured["tokens_per_s"].idxmax()]
    ended = [f"{row.batch_size} ({row.status})" for row in run.ended.itertuples()]
    rate = best["tokens_per_s"]
    text = f"The fastest batch here is {best['batch_size']:.0f}, at {rate:,.0f} tokens/s. "
    line = run.saturation
    if line and line.per_sequence_s > 0:
        text += (
            f"A step costs about {line.fixed_s * 1e3:.3g} ms whatever its size, and "
            f"{line.per_sequence_s * 1e3:.3g} ms for each sequence; from a batch of "
            f"{line.half_batch:.2g} on, more than half of the time is spent on sequences. "
        )
    return text + (f"Without a result: batch {', '.join(ended)}." if ended else "All batches fit.")


def options_sentence(run: OptionsRun) -> str:
    """The largest gain, what all of them give, and what cannot be told from nothing."""
    table = run.table[run.table["measured"]].set_index("arm")
    singles = table.drop([name for name in (BASELINE, AGAIN, ALL) if name in table.index])
    singles = singles[~singles.index.str.startswith(WITHOUT)]
    if singles.empty:
        return "No option was measured alone."
    best = singles["ratio"].idxmax()
    text = f"Alone, **{best}** gives most: {singles.loc[best, 'ratio']:.2f} times the baseline. "
    if ALL in table.index:
        text += f"All the fast ones together give **{table.loc[ALL, 'ratio']:.2f}** times. "
    text += f"Measured twice, the baseline differs by {run.noise_floor:.1%} in the median round. "
    unclear = singles.index[~clear(singles, run.noise_floor)]
    if unclear.empty:
        return text + "Every option is on the same side of 1 in all rounds, and beyond that."
    return text + f"No more than that, or not in every round, differs: {', '.join(unclear)}."


def options_table(run: OptionsRun) -> pd.DataFrame:
    """All arms: tokens per second, ratio and its range, the first step, memory on a GPU."""
    table = run.table
    spread = [
        f"{low:.2f}–{high:.2f}" if pd.notna(low) else "–"
        for low, high in zip(table["ratio_low"], table["ratio_high"], strict=True)
    ]
    shown = pd.DataFrame(
        {
            "arm": table["arm"],
            "tokens/s": table["tokens_per_s"],
            "ratio": table["ratio"],
            "range": spread,
            "first step (s)": table["first_step_s"],
        }
    )
    if table["peak_allocated_mib"].notna().any():
        shown["peak (MiB)"] = table["peak_allocated_mib"]
    return shown.assign(**{"not measured because": table["reason"].fillna("")})


def extrapolation_table(run: ThroughputRun) -> pd.DataFrame:
    """Both extrapolations, side by side."""
    ways = {"by parameters (the course's)": run.naive, "by operations": run.by_operations}
    return pd.DataFrame(
        [
            {
                "way": way,
                "tokens/s of 1T parameters": significant(large.tokens_per_s),
                "10T tokens on one device": days_text(large),
                f"devices for {TARGET_DAYS} days": f"{large.devices_for(TARGET_DAYS):,}",
            }
            for way, large in ways.items()
        ]
    )


def extrapolation_sentence(run: ThroughputRun) -> str:
    """Why the two differ: attention's share, which falls as a model grows wider."""

    def share(config: GPT2Config, length: int) -> float:
        return 1 - 6 * matrix_parameters(config) / training_flops_per_token(config, length)

    small = share(run.config, run.settings["seq_len"])
    large = share(ONE_TRILLION, ONE_TRILLION.n_positions)
    difference = run.naive.days / run.by_operations.days - 1
    direction = "longer" if difference > 0 else "shorter"
    return (
        f"The naive way comes out {abs(difference):.0%} {direction}. "
        f"Attention is {small:.0%} of {run.title}'s operations at this length and "
        f"{large:.1%} of the large model's, whose width grew far more than its context; position "
        "embeddings, which count as parameters, take no operations."
    )
