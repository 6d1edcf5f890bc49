"""Sentences that read their own numbers: time per step, bytes sent, emulated hosts."""

from __future__ import annotations

import pandas as pd

from common.analysis.assignment1 import strategy_name
from common.analysis.emulated_strategies import EmulatedStrategies
from common.analysis.strategy_times import EXCHANGING, StrategyTimes, micro_batches
from common.errors import UserError
from common.perfmodel.architecture import GPT2Config
from common.perfmodel.communication import strategy_table


def where_from(strategies: StrategyTimes) -> str:
    """Whose data these are, and how they were measured, as Markdown."""
    what = "{model}, micro-batch {micro_batch_size}, sequence {seq_len}, {precision}".format(
        **strategies.settings
    )
    if strategies.recorded:
        head = f"> **Recorded data, not yours.** {strategies.caption}. {what}."
    else:
        head = f"> Measured in this run: {strategies.caption}. {what}."
    if strategies.rotated:
        return f"{head} Strategies took turns."
    return (
        f"{head} These are the steps of training runs, one run after another: "
        "`compare_strategies.py` lets strategies take turns, so that a drift favours none."
    )


def times_shown(strategies: StrategyTimes, only: tuple[str, ...] = ()) -> pd.DataFrame:
    """The table of times for a reader."""
    table = strategies.summary()
    if only:
        table = table[table["strategy"].isin(only)]
    return pd.DataFrame(
        {
            "strategy": table["strategy"].map(strategy_name),
            "micro-batches": table["accumulation"],
            "step (ms)": table["step_ms"],
            "quartiles": [
                f"{row.q25_ms:,.0f}–{row.q75_ms:,.0f}" for row in table.itertuples(index=False)
            ],
            "range of rounds": table["noise"],
            "tokens/s": table["tokens_per_s"],
            "speedup": table["speedup"],
            "over the rounds": [_interval(row) for row in table.itertuples(index=False)],
        }
    )


def longer(more: float) -> str:
    """A step's time against another's: ``5% longer``, ``5% less``."""
    return f"{more:.0%} longer" if more >= 0 else f"{-more:.0%} less"


def _interval(row) -> str:
    if pd.isna(row.speedup_low) or pd.isna(row.noise):
        return "–"
    return f"{row.speedup_low:.2f}–{row.speedup_high:.2f}"


def speedup_sentence(strategies: StrategyTimes, strategy: str = "DDP") -> str:
    """What several ranks buy, and what they would buy without communication."""
    table = strategies.summary().set_index(["accumulation", "strategy"])
    parts = []
    for accumulation in strategies.accumulations:
        if (accumulation, strategy) not in table.index:
            continue
        row = table.loc[(accumulation, strategy)]
        if pd.isna(row["speedup"]):
            continue
        text = (
            f"with {micro_batches(accumulation)} a step "
            f"{strategy} is **{row['speedup']:.2f}** times as fast as one device"
        )
        if (accumulation, "local") in table.index:
            local = table.loc[(accumulation, "local"), "speedup"]
            text += f" ({local:.2f} times without any communication)"
        parts.append(text)
    if not parts:
        return f"There is no step of {strategy} beside one on one device: no speedup is known."
    joined = "; ".join(parts)
    return f"On {strategies.ranks} ranks, {joined}. " + _noise_text(strategies)


def _noise_text(strategies: StrategyTimes) -> str:
    noise = strategies.summary()["noise"].max()
    if pd.isna(noise):
        return "With a single round, how far to trust these is unknown."
    return (
        f"Medians of rounds differ by up to {noise:.0%}; what is less than that apart "
        "cannot be told apart."
    )


def accumulation_sentence(strategies: StrategyTimes, strategy: str = "DDP") -> str:
    """Whether the exchange weighs less when more micro-batches share it."""
    table = strategies.summary().set_index(["strategy", "accumulation"])
    few, many = strategies.accumulations[0], strategies.accumulations[-1]
    needed = [(name, count) for name in (strategy, "local") for count in (few, many)]
    if few == many or not all(key in table.index for key in needed):
        return f"Measured with {micro_batches(few)} a step only."
    over = {
        count: table.loc[(strategy, count), "step_ms"] / table.loc[("local", count), "step_ms"] - 1
        for count in (few, many)
    }
    text = (
        f"Beside the same computation without communication a step of {strategy} takes "
        f"{longer(over[few])} with {micro_batches(few)} and {longer(over[many])} with {many}. "
    )
    if 0 <= over[many] < over[few]:
        return text + "The exchange is paid once a step, whatever is computed in it."
    return text + (
        "Paid once a step, the exchange should weigh less with more micro-batches, and never less "
        "than nothing: noise is larger than the exchange here."
    )


def fastest_sentence(strategies: StrategyTimes) -> str:
    """Which strategy is fastest, and whether the others can be told apart from it."""
    table = strategies.summary()
    parts = []
    for accumulation, rows in table[table["strategy"].isin(EXCHANGING)].groupby("accumulation"):
        first, *others = rows.sort_values("step_ms").itertuples(index=False)
        noise = rows["noise"].max()
        text = f"With {micro_batches(accumulation)} a step **{first.strategy}** is fastest"
        for other in others:
            more = other.step_ms / first.step_ms - 1
            text += f", {other.strategy} takes {longer(more)}"
            text += " (within the noise)" if pd.notna(noise) and more <= noise else ""
        parts.append(text)
    return ". ".join(parts) + ". " + _noise_text(strategies)


def sent_sentence(strategies: StrategyTimes) -> str:
    """How well bytes are predicted, and what FULL_SHARD costs over DDP."""
    table = strategies.sent()
    known = table.dropna(subset="error")
    if known.empty:
        text = (
            f"How much a rank sent was not measured ({strategies.backend}): figures are predicted. "
        )
    else:
        worst = known["error"].abs().max()
        most = f"at most {worst:.2%}" if worst >= 1e-4 else "less than 0.01%"
        text = f"Predicted and measured bytes differ by **{most}**. "
    full = table[table["strategy"] == "FULL_SHARD"].dropna(subset="ratio_to_ddp")
    if full.empty:
        return text
    ratios = [
        f"{row.ratio_to_ddp:.2f} times as much with {micro_batches(row.accumulation)} a step"
        for row in full.itertuples(index=False)
    ]
    return text + (
        f"Against DDP a rank sends under FULL_SHARD {' and '.join(ratios)}: the blocks are "
        "gathered for every forward and every backward pass, the gradients exchanged once."
    )


def sent_shown(strategies: StrategyTimes) -> pd.DataFrame:
    """The table of bytes for a reader, in MB."""
    table = strategies.sent()
    return pd.DataFrame(
        {
            "strategy": table["strategy"],
            "micro-batches": table["accumulation"],
            "collectives": table["collectives"],
            "predicted (MB)": table["predicted_bytes"] / 1e6,
            "measured (MB)": table["measured_bytes"] / 1e6,
            "error": table["error"].round(4) + 0.0,  # no minus before a zero
            "over DDP": table["ratio_to_ddp"],
        }
    )


def backends_shown(strategies: StrategyTimes, large: str = "gpt2-large") -> pd.DataFrame:
    """What a rank would send over gloo and over NCCL, this model's and a large one's, in MB."""
    found = {strategies.settings["model"]: strategies.config}
    found.setdefault(large, GPT2Config.named(large))
    tables = []
    for name, config in found.items():
        table = strategy_table(config, strategies.ranks)
        wide = table.pivot_table(
            index=["accumulation", "strategy"],
            columns="backend",
            values=["sent_bytes", "ratio_to_ddp"],
            sort=False,
        )
        shown = wide.index.to_frame(index=False)[["strategy", "accumulation"]]
        shown.insert(1, "model", name)
        for backend in ("gloo", "nccl"):
            label = {"gloo": "gloo", "nccl": "NCCL"}[backend]
            shown[f"{label} (MB)"] = wide[("sent_bytes", backend)].to_numpy() / 1e6
            shown[f"{label} over DDP"] = wide[("ratio_to_ddp", backend)].to_numpy()
        tables.append(shown.rename(columns={"accumulation": "micro-batches"}))
    return pd.concat(tables, ignore_index=True)


def emulated_sentence(run: EmulatedStrategies) -> str:
    """How well steps on emulated hosts were predicted, and which strategy the network favours."""
    table = run.table()
    if table.empty:
        raise UserError(f"{run.measured.folder.name}: no steps of {', '.join(EXCHANGING)}")
    worst = table.loc[table["error"].abs().idxmax()]
    text = (
        f"On {run.network} the predicted step is off by **{table['error'].abs().median():.0%}** in "
        f"the median and by {worst['error']:+.0%} at worst ({worst['strategy']}). "
    )
    noise = table["noise"].max()
    if pd.notna(noise):
        text += f"Medians of rounds differ by up to {noise:.0%}. "
    chosen = table.loc[table["predicted_ms"].idxmin(), "strategy"]
    fastest = table.loc[table["measured_ms"].idxmin(), "strategy"]
    if len(table) > 1 and chosen == fastest:
        text += f"The strategy that is predicted to be fastest, {chosen}, is the measured one. "
    elif len(table) > 1:
        text += f"The model would choose {chosen}; {fastest} was measured to be fastest. "
    share = table["exposed_ms"] / table["predicted_ms"]
    return text + (
        f"Exposed communication is {share.min():.0%} to {share.max():.0%} of a predicted step."
    )


def emulated_shown(run: EmulatedStrategies) -> pd.DataFrame:
    """The table of emulated hosts for a reader."""
    table = run.table()
    return pd.DataFrame(
        {
            "strategy": table["strategy"],
            "micro-batches": table["accumulation"],
            "computation (ms)": table["computation_ms"],
            "exposed communication (ms)": table["exposed_ms"],
            "predicted (ms)": table["predicted_ms"],
            "measured (ms)": table["measured_ms"],
            "range of rounds": table["noise"],
            "error": table["error"],
        }
    )
