"""Sentences that read their own numbers: loss curves, learning, memory, and overlap."""

from __future__ import annotations

import pandas as pd

from common.analysis.assignment1 import Training, caption_of, ranks_text
from common.analysis.loss_curves import LAST_SHARE, final_loss, largest_difference
from common.analysis.training_memory import PARTS

MIB = 2**20
APART = 0.01
"""Ranks that differ by more in memory are worth a word."""
SAME_NATS = {"float32": 1e-3, "float64": 1e-9}
"""Differences that rounding explains over a short run, by precision."""
ROUGH_NATS = 0.05
"""The same with fewer digits."""


def mib_text(size_bytes: float) -> str:
    """A size in MiB, with a digit after the point where it is small."""
    size = size_bytes / MIB
    return f"{size:,.1f} MiB" if size < 100 else f"{size:,.0f} MiB"


def loss_sentence(training: Training) -> str:
    """How far apart the curves are, and whether that is rounding."""
    if len(training.compared) < 2:
        return f"There is one run only ({training.compared[0]}): nothing to compare it with."
    difference, step = largest_difference(training)
    settings = training.compared[0].settings
    precision = "TensorFloat-32" if settings.get("tf32") else settings["precision"]
    allowed = SAME_NATS.get(precision, ROUGH_NATS)
    curves = f"{len(training.compared)} curves"
    if difference == 0:
        return f"The {curves} are equal to the last digit at every step."
    text = f"At no step do any two of the {curves} differ by more than **{difference:.2g} nats** "
    text += f"(step {step}). "
    if difference <= allowed:
        return text + (
            f"That is rounding: sums of {precision} numbers taken in another order, carried on "
            "from step to step."
        )
    return text + (
        f"**That is more than rounding in {precision} explains** (about {allowed:g} nats in a "
        "short run): these runs did not compute the same thing."
    )


def where_learned(training: Training) -> str:
    """Whose long run this is, as Markdown; for ``open_learning``'s."""
    caption = caption_of(training.learning.environment, training.folder)
    if training.recorded:
        return (
            f"> **Recorded data, not yours.** {caption}. "
            "`uv run ddplab run assignment1` trains for long here."
        )
    return f"> Measured in this run: {caption}."


def learning_sentence(training: Training) -> str:
    """How near the long run came to the entropy, and how much of what is to be learned that is."""
    run = training.learning
    mean, count = final_loss(run)
    floor = run.entropy_nats
    over = mean - floor
    text = (
        f"{run}, {run.settings['model']}: over the last {count} of {len(run.loss)} steps "
        f"({LAST_SHARE:.0%}) the loss is {mean:.3f} nats on average, **{over:+.3f} nats** from the "
        f"text's entropy of {floor:.3f}. "
    )
    unigram = run.settings.get("unigram_entropy_nats")
    if unigram is None:
        return text
    learned = (unigram - mean) / (unigram - floor)
    if learned < 0:
        return text + "That is worse than knowing how often each token comes."
    return text + (
        f"Of the {unigram - floor:.2f} nats that the order of the tokens is worth, the model "
        f"has learned {learned:.0%}."
    )


def memory_sentence(table: pd.DataFrame) -> str:
    """How good the prediction is, and what sharding saves."""
    both = table.dropna(subset=["predicted_bytes", "measured_bytes"])
    if both.empty:
        return (
            "No run measured its memory to the byte: on a CPU `--measure_memory` does, on a GPU "
            "the allocator tells by itself."
        )
    worst = both.loc[both["error"].abs().idxmax()]
    text = (
        f"Against the rank that needs most, the prediction is off by "
        f"{both['error'].abs().median():.1%} in the median and by {worst['error']:+.1%} at worst "
        f"({worst['name']}). "
    )
    apart = both["measured_bytes"] / both["least_bytes"] - 1
    if apart.max() > APART:
        widest = both.loc[apart.idxmax()]
        least = round(widest["predicted_bytes"] / widest["least_bytes"] - 1, 3) + 0.0
        text += (
            f"Ranks of a run differ by up to {apart.max():.0%} ({widest['name']}); against the one "
            f"that needs least it is {least:+.1%} there. "
        )
    ddp = both[both["strategy"] == "DDP"]
    sharded = both[both["strategy"].isin(["FULL_SHARD", "SHARD_GRAD_OP"])]
    if ddp.empty or sharded.empty:
        return text
    against = ddp.loc[ddp["ranks"].idxmax()]
    shares = [
        f"{row.name_} needs {row.measured_bytes / against['measured_bytes']:.0%}"
        for row in sharded.rename(columns={"name": "name_"}).itertuples()
    ]
    return text + (
        f"Of the {mib_text(against['measured_bytes'])} that a rank needs under DDP, "
        f"{' and '.join(shares)}."
    )


def memory_shown(table: pd.DataFrame) -> pd.DataFrame:
    """The table for a reader, in MiB."""
    columns = [*PARTS, "predicted_bytes", "least_bytes", "measured_bytes"]
    shown = table[columns] / MIB
    names = {"predicted_bytes": "predicted (MiB)", "measured_bytes": "measured (MiB)"}
    names["least_bytes"] = "least rank (MiB)"
    shown = shown.rename(columns=names)
    shown.insert(0, "strategy", table["name"])
    return shown.assign(error=table["error"])


def ddp_memory_sentence(table: pd.DataFrame) -> str:
    """What DDP adds to the memory of one device."""
    found = table.dropna(subset="measured_bytes").drop_duplicates("strategy", keep="last")
    by_strategy = found.set_index("strategy")
    if not {"single", "DDP"} <= set(by_strategy.index):
        return "Memory was not measured on one device and under DDP."
    one, ddp = by_strategy.loc["single"], by_strategy.loc["DDP"]
    more = ddp["measured_bytes"] - one["measured_bytes"]
    direction = "more" if more >= 0 else "less"
    return (
        f"A rank needs {mib_text(ddp['measured_bytes'])} at the peak of a step, one device alone "
        f"{mib_text(one['measured_bytes'])}: **{mib_text(abs(more))} {direction}**. "
        f"By prediction its buckets take {mib_text(ddp['communication'])}."
    )


def overlap_sentence(table: pd.DataFrame, training: Training) -> str:
    """How much of the communication was hidden, and how slow traced steps are."""
    several = table[(table["strategy"] != "single") & (table["communication_ms"] > 0)]
    if several.empty:
        return "No traced run communicated."
    parts = [
        f"{row.name_} hides {row.hidden:.0%} of {row.communication_ms:,.0f} ms"
        for row in several.rename(columns={"name": "name_"}).itertuples()
    ]
    text = f"Of its communication {'; '.join(parts)}. "
    ratios = []
    for name, run in zip(training.names(), training.compared, strict=True):
        plain = run.step_times_ms()["step_time_ms"]
        traced = table.loc[table["name"] == name, "step_ms"]
        if len(plain) and len(traced):
            ratios.append(traced.iloc[0] / plain.median())
    if not ratios:
        return text + "All steps were traced, which makes them slower than others."
    return text + (
        "Shares are of traced steps, and tracing has a price: these took "
        f"up to {max(ratios):.2f} times as long as the same runs' other steps."
    )


def overlap_shown(table: pd.DataFrame) -> pd.DataFrame:
    """The table for a reader, in ms."""
    names = {
        "name": "strategy",
        "step_ms": "step",
        "computation_ms": "computation",
        "communication_ms": "communication",
        "overlap_ms": "both at once",
        "exposed_communication_ms": "exposed",
        "idle_ms": "neither",
    }
    return table[list(names)].rename(columns=names)


def collectives_sentence(table: pd.DataFrame) -> str:
    """What a traced step of each strategy asked for."""
    parts = [
        f"{row.collectives} under {row.strategy}"
        for row in table.itertuples(index=False)
        if row.strategy != "single"
    ]
    return f"A step asked for {'; '.join(parts)}." if parts else "No traced run communicated."


def batch_sentence(training: Training) -> str:
    """How the same global batch came about under each number of ranks."""
    parts = [
        f"{run.settings['micro_batch_size']} × {run.accumulation} × {ranks_text(run.ranks)} "
        f"({name})"
        for name, run in zip(training.names(), training.compared, strict=True)
    ]
    total = training.compared[0].settings["global_batch_size"]
    return f"Here {total} sequences a step are made of micro-batches as: {', '.join(parts)}."
