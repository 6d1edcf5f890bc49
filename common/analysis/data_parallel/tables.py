"""The tables of assignment 1's notebooks: rows and columns with the names and units of a reader.

The numbers come from the other modules of this package; nothing but ratios and differences is
computed here.
"""

from __future__ import annotations

import pandas as pd

from common.analysis.data_parallel.emulated_strategies import (
    EmulatedStrategies,
    prediction_accuracy,
)
from common.analysis.data_parallel.loss_curves import agreement, learned
from common.analysis.data_parallel.memory import PARTS, memory_table
from common.analysis.data_parallel.strategy_times import (
    StrategyTimes,
    above_noise,
    exchange_cost,
    over_fastest,
)
from common.analysis.data_parallel.traced_steps import overlap_table
from common.analysis.data_parallel.training_runs import Training, open_training, strategy_name
from common.analysis.runs import gpu_folder
from common.perfmodel.fsdp.communication import strategy_table
from common.perfmodel.one_device.architecture import GPT2Config

MIB = 2**20
NOISE_COLUMN = "can be told from noise"
BACKEND_NAMES = {"gloo": "gloo", "nccl": "NCCL"}
ANSWERS = {True: "yes", False: "no", None: "unknown: there is one curve"}


# Training runs


def batches_shown(training: Training) -> pd.DataFrame:
    """Returns how each compared run makes up the same global batch."""
    return pd.DataFrame(
        [
            {
                "strategy": name,
                "ranks": run.ranks,
                "micro-batches of a rank": run.accumulation,
                "sequences of a micro-batch": run.settings["micro_batch_size"],
                "sequences of a step": run.settings["global_batch_size"],
            }
            for name, run in zip(training.names(), training.compared, strict=True)
        ]
    )


def loss_facts(training: Training) -> dict[str, str]:
    """Returns whether rounding explains how far apart the loss curves are."""
    found = agreement(training)
    return {
        "equal up to rounding": ANSWERS[found.equal],
        "curves compared": str(found.curves),
        "precision": found.precision,
        "largest difference of any two": f"{found.largest_nats:.2g} nats",
        "at step": str(found.step),
        "rounding explains, over a short run, up to": f"{found.rounding_nats:g} nats",
    }


def losses_beside_gpu(training: Training) -> pd.DataFrame:
    """Returns how far DDP's losses are from one device's: of the run, and of two ranks on one GPU.

    Columns: device, ranks, backend, model, steps, and the largest difference of a step (nats).
    """
    of_strategy = {run.strategy: run for run in training.compared}
    pairs = [(of_strategy.get("single"), of_strategy.get("DDP"))]
    pairs.append(
        tuple(
            open_training(gpu_folder(f"assignment1/{name}")).compared[0]
            for name in ("one-rank", "two-ranks-one-gpu")
        )
    )
    return pd.DataFrame(
        [
            {
                "device": several.opened.device,
                "ranks": several.ranks,
                "backend": several.opened.environment["backend"],
                "model": several.settings["model"],
                "steps": len(several.loss),
                "largest difference (nats)": (several.loss - one.loss).abs().max(),
            }
            for one, several in pairs
            if one is not None and several is not None
        ]
    )


def full_shard_beside_gpu(training: Training) -> pd.DataFrame:
    """Returns a step of FULL_SHARD: of the run, and of one rank on a GPU.

    Columns: device, ranks, model, precision; step, the median without the tracer's, and the
    computation of traced steps (ms); peak as predicted and as measured (MiB; NaN where not).
    """
    on_gpu = open_training(gpu_folder("assignment1/train_fsdp"))
    rows = []
    for each in (training, on_gpu):
        overlap = overlap_table(zip(each.names(), each.compared, strict=True))
        for name, run in zip(each.names(), each.compared, strict=True):
            if run.strategy != "FULL_SHARD":
                continue
            memory = memory_table(each).set_index("name").loc[name]
            traced = overlap.set_index("name")["computation_ms"].reindex([name])
            rows.append(
                {
                    "device": run.opened.device,
                    "ranks": run.ranks,
                    "model": run.settings["model"],
                    "precision": run.settings["precision"],
                    "step (ms)": run.step_times_ms()["step_time_ms"].median(),
                    "computation (ms)": traced.iloc[0],
                    "predicted peak (MiB)": memory["predicted_bytes"] / MIB,
                    "measured peak (MiB)": memory["measured_bytes"] / MIB,
                }
            )
    return pd.DataFrame(rows)


def learning_facts(training: Training) -> dict[str, str]:
    """Returns how near the long run came to the entropy of its text."""
    run = training.learning
    found = learned(run)
    return {
        "run": f"{run}, {run.settings['model']}",
        "steps": f"{found.steps:,}",
        f"loss, mean of the last {found.averaged_steps} steps": f"{found.final_nats:.3f} nats",
        "entropy of the text": f"{found.entropy_nats:.3f} nats",
        "loss above the entropy": f"{found.above_entropy_nats:+.3f} nats",
        "unigram entropy": _or_dash(found.unigram_nats, "{:.3f} nats"),
        "learned, of what the order of the tokens is worth": _or_dash(found.share, "{:.0%}"),
    }


def memory_parts_shown(table: pd.DataFrame) -> pd.DataFrame:
    """Returns the parts of each run's predicted peak, in MiB.

    Args:
        table: of ``memory.memory_table``.
    """
    shown = table[[*PARTS, "predicted_bytes"]] / MIB
    shown = shown.rename(columns={"predicted_bytes": "predicted (MiB)"})
    shown.insert(0, "strategy", table["name"])
    return shown


def memory_shown(table: pd.DataFrame) -> pd.DataFrame:
    """Returns each run's predicted and measured peak, in MiB, against one device's and DDP's.

    Args:
        table: of ``memory.memory_table``.
    """
    return pd.DataFrame(
        {
            "strategy": table["name"],
            "predicted (MiB)": table["predicted_bytes"] / MIB,
            "measured (MiB)": table["measured_bytes"] / MIB,
            "error": table["error"],
            "least rank (MiB)": table["least_bytes"] / MIB,
            "over one device (MiB)": table["over_single_bytes"] / MIB,
            "of DDP's": table["share_of_ddp"],
        }
    )


def overlap_shown(table: pd.DataFrame) -> pd.DataFrame:
    """Returns the parts of a traced step, in ms.

    Args:
        table: of ``traced_steps.training_overlap``.
    """
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


def hidden_shown(table: pd.DataFrame) -> pd.DataFrame:
    """Returns the collectives of a traced step, their hidden share, and the price of tracing.

    Args:
        table: of ``traced_steps.training_overlap``.
    """
    return pd.DataFrame(
        {
            "strategy": table["name"],
            "collectives of a step": table["collectives"],
            "communication (ms)": table["communication_ms"],
            "hidden": table["hidden"].where(table["strategy"] != "single"),
            "traced step over other steps": table["slowdown"],
        }
    )


# Strategies


def times_shown(strategies: StrategyTimes, only: tuple[str, ...] = ()) -> pd.DataFrame:
    """Returns the time of a step and the speedup, by strategy and accumulation.

    Args:
        strategies: what was measured.
        only: the strategies to show; all by default.
    """
    table = strategies.summary(only)
    several = table["noise"].notna()  # of a single round, no range is known
    return pd.DataFrame(
        {
            "strategy": table["strategy"].map(strategy_name),
            "micro-batches": table["accumulation"],
            "step (ms)": table["step_ms"],
            "quartiles": _intervals(table["q25_ms"], table["q75_ms"], "{:,.0f}"),
            "range of rounds": table["noise"],
            "tokens/s": table["tokens_per_s"],
            "speedup": table["speedup"],
            "over the rounds": _intervals(
                table["speedup_low"].where(several), table["speedup_high"], "{:.2f}"
            ),
        }
    )


def exchange_shown(strategies: StrategyTimes) -> pd.DataFrame:
    """Returns DDP's step beside the same computation without communication, by accumulation."""
    table = exchange_cost(strategies)
    return pd.DataFrame(
        {
            "micro-batches": table["accumulation"],
            NOISE_COLUMN: table["above_noise"],
            "DDP (ms)": table["step_ms"],
            "no communication (ms)": table["local_ms"],
            "DDP takes longer by (ms)": table["added_ms"],
            "longer by": table["added_share"],
            "range of rounds": table["noise"],
        }
    )


def fastest_shown(strategies: StrategyTimes) -> pd.DataFrame:
    """Returns each exchanging strategy's step beside that of the fastest one, by accumulation."""
    table = over_fastest(strategies)
    return pd.DataFrame(
        {
            "strategy": table["strategy"],
            "micro-batches": table["accumulation"],
            NOISE_COLUMN: table["above_noise"],
            "longer than the fastest": table["over_fastest"],
            "step (ms)": table["step_ms"],
            "range of rounds": table["noise"],
        }
    )


def sent_shown(strategies: StrategyTimes) -> pd.DataFrame:
    """Returns the bytes that a rank sends in a step, in MB."""
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
    """Returns the bytes that a rank would send over gloo and over NCCL, in MB.

    Args:
        strategies: give the first model and the number of ranks.
        large: the second model.
    """
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
        for backend, label in BACKEND_NAMES.items():
            shown[f"{label} (MB)"] = wide[("sent_bytes", backend)].to_numpy() / 1e6
            shown[f"{label} over DDP"] = wide[("ratio_to_ddp", backend)].to_numpy()
        tables.append(shown.rename(columns={"accumulation": "micro-batches"}))
    return pd.concat(tables, ignore_index=True)


def emulated_shown(run: EmulatedStrategies) -> pd.DataFrame:
    """Returns predicted and measured steps on emulated hosts."""
    table = run.table()
    return pd.DataFrame(
        {
            "strategy": table["strategy"],
            "micro-batches": table["accumulation"],
            "error above noise": above_noise(table["error"], table["noise"]),
            "error": table["error"],
            "range of rounds": table["noise"],
            "predicted (ms)": table["predicted_ms"],
            "measured (ms)": table["measured_ms"],
        }
    )


def emulated_parts_shown(run: EmulatedStrategies) -> pd.DataFrame:
    """Returns the two parts of each predicted step on emulated hosts."""
    table = run.table()
    return pd.DataFrame(
        {
            "strategy": table["strategy"],
            "micro-batches": table["accumulation"],
            "computation (ms)": table["computation_ms"],
            "exposed communication (ms)": table["exposed_ms"],
            "exposed share": table["exposed_ms"] / table["predicted_ms"],
        }
    )


def emulated_facts(run: EmulatedStrategies) -> dict[str, str]:
    """Returns how well steps on emulated hosts were predicted, and which strategy is fastest."""
    found = prediction_accuracy(run)
    return {
        "network": run.network,
        "error, median of the strategies": f"{found.median_error:.0%}",
        "error at worst": f"{found.worst_error:+.0%} ({found.worst_strategy})",
        "medians of rounds differ by up to": _or_dash(found.noise, "{:.0%}"),
        "fastest by prediction": found.predicted_fastest,
        "fastest as measured": found.measured_fastest,
    }


def _intervals(low: pd.Series, high: pd.Series, form: str) -> list[str]:
    """Returns both ends of each interval, such as ``1.56–1.60``; a dash without the lower one."""
    return [
        "–" if pd.isna(start) else f"{form.format(start)}–{form.format(end)}"
        for start, end in zip(low, high, strict=True)
    ]


def _or_dash(value: float, form: str) -> str:
    """Returns the formatted value; a dash where it is unknown."""
    return "–" if pd.isna(value) else form.format(value)
