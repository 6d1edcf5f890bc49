"""The tables of assignment 1's notebooks: rows and columns with the names and units of a reader.

The numbers come from the other modules of this package; nothing but ratios and differences is
computed here.
"""

from __future__ import annotations

import pandas as pd

from common.analysis.data_parallel.loss_curves import learned
from common.analysis.data_parallel.strategies import StrategyTimes
from common.analysis.data_parallel.training_parts import PARTS, overlap_by_run, peak_memory
from common.analysis.data_parallel.training_runs import Training, open_training, strategy_name
from common.analysis.runs import gpu_folder
from common.analysis.show import interval_format, judged_format, mib
from common.perfmodel.fsdp.communication import strategy_table
from common.perfmodel.one_device.architecture import GPT2Config

NOISE_COLUMN = "can be told from noise"
INTERVAL = "95 % interval"
LARGE = "gpt2-large"
BACKEND_NAMES = {"gloo": "gloo", "nccl": "NCCL"}
ANSWERS = {True: "yes", False: "no", None: "unknown: there is one curve"}


WHOLE_MS = "{:,.0f}"
LOSSES = {
    "equal": ("equal up to rounding", ANSWERS),
    "curves": "curves compared",
    "precision": "precision",
    "largest_nats": ("largest difference of any two", "{:.2g} nats"),
    "step": "at step",
    "rounding_nats": ("rounding explains, over a short run, up to", "{:g} nats"),
}
"""Titles of ``loss_curves.agreement``."""
MEMORY_PARTS = {
    "name": "strategy",
    **{part: (part, mib) for part in PARTS},
    "predicted_bytes": "predicted (MiB)",
}
MEMORY = {
    "name": "strategy",
    "predicted_bytes": "predicted (MiB)",
    "measured_bytes": "measured (MiB)",
    "error": "error",
    "least_bytes": "least rank (MiB)",
    "over_single_bytes": "over one device (MiB)",
    "share_of_ddp": "of DDP's",
}
"""Titles of ``training_parts.peak_memory``."""
BESIDE_GPU = {
    **{name: name for name in ("device", "ranks", "model", "precision")},
    "step_ms": ("step (ms)", WHOLE_MS),
    "computation_ms": ("computation (ms)", WHOLE_MS),
    "predicted_bytes": ("predicted peak (MiB)", "{:,.0f}"),
    "measured_bytes": ("measured peak (MiB)", "{:,.0f}"),
}
"""Titles of ``full_shard_beside_gpu``."""
OVERLAP = {
    "name": "strategy",
    "step_ms": ("step", "{:,.1f}"),
    "computation_ms": ("computation", "{:,.1f}"),
    "communication_ms": ("communication", "{:,.1f}"),
    "overlap_ms": ("both at once", "{:,.1f}"),
    "exposed_communication_ms": ("exposed", "{:,.1f}"),
    "idle_ms": ("neither", "{:,.1f}"),
}
HIDDEN = {
    "name": "strategy",
    "collectives": "collectives of a step",
    "communication_ms": "communication (ms)",
    "hidden": "hidden",
    "judged": ("by steps, 95 %", judged_format("{:.0%}")),
    "slowdown": ("traced step over other steps", "{:.2f}"),
}
"""Titles of ``training_parts.overlap_by_run``, in ms."""
TIMES = {
    "strategy": ("strategy", strategy_name),
    "accumulation": "micro-batches",
    "step_ms": ("step (ms)", WHOLE_MS),
    ("q25_ms", "q75_ms"): ("quartiles", "{:,.0f}–{:,.0f}"),
    "tokens_per_s": "tokens/s",
    "speedup": "speedup",
    "judged": (INTERVAL, interval_format()),
    "verdict": "is it told from one device",
}
"""Titles of ``StrategyTimes.summary``."""
EXCHANGE = {
    "accumulation": "micro-batches",
    "above_noise": NOISE_COLUMN,
    "step_ms": ("DDP (ms)", WHOLE_MS),
    "local_ms": ("no communication (ms)", WHOLE_MS),
    "added_ms": ("DDP takes longer by (ms)", WHOLE_MS),
    "added_share": ("longer by", "{:+.0%}"),
    "judged": (INTERVAL, interval_format("{:+.0%}", less=1)),
    "second_gap": ("speedup lost to it, above that to slower passes", judged_format("{:+.2f}")),
    "share_falls": ("longer by less than with the fewest, by", judged_format("{:+.0%}")),
    "ms_fall": ("the same (ms)", judged_format("{:+.0f}")),
}
"""Titles of ``exchange_cost``."""
FASTEST = {
    "strategy": "strategy",
    "accumulation": "micro-batches",
    "fastest": "fastest",
    "above_noise": NOISE_COLUMN,
    "over_fastest": ("longer than the fastest", "{:+.0%}"),
    "judged": (INTERVAL, interval_format("{:+.0%}", less=1)),
    "step_ms": ("step (ms)", WHOLE_MS),
}
"""Titles of ``over_fastest``."""
SENT = {
    "strategy": "strategy",
    "accumulation": "micro-batches",
    "collectives": "collectives",
    "predicted_bytes": ("predicted (MB)", "{:,.2f}"),
    "measured_bytes": ("measured (MB)", "{:,.2f}"),
    "error": ("error", lambda error: f"{round(error, 4) + 0.0:+.2%}"),
    "ratio_to_ddp": "over DDP",
}
"""Titles of ``StrategyTimes.sent``: a rank's bytes in a step."""
EMULATED = {
    "strategy": "strategy",
    "accumulation": "micro-batches",
    "above_noise": "error above noise",
    "error": ("error", "{:+.0%}"),
    "judged": (INTERVAL, interval_format("{:+.0%}", less=1)),
    "predicted_ms": ("predicted (ms)", WHOLE_MS),
    "measured_ms": ("measured (ms)", WHOLE_MS),
}
EMULATED_PARTS = {
    "strategy": "strategy",
    "accumulation": "micro-batches",
    "computation_ms": ("computation (ms)", WHOLE_MS),
    "exposed_ms": ("exposed communication (ms)", WHOLE_MS),
    "exposed_share": "exposed share",
}
"""Titles of ``EmulatedStrategies.table``."""
ACCURACY = {
    "network": "network",
    "median_error": ("error, median of the strategies", "{:.0%}"),
    ("worst_error", "worst_strategy"): ("error at worst", "{:+.0%} ({})"),
    "clear": ("errors told from noise", lambda names: ", ".join(names) or "none"),
    "predicted_fastest": "fastest by prediction",
    "measured_fastest": "fastest as measured",
}
"""Titles of ``prediction_accuracy``."""


def batches(training: Training) -> pd.DataFrame:
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
            for name, run in training.named()
        ]
    )


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
                "largest difference (nats)": (several.loss - single.loss).abs().max(),
            }
            for single, several in pairs
            if single is not None and several is not None
        ]
    )


def full_shard_beside_gpu(training: Training) -> pd.DataFrame:
    """Returns a step of FULL_SHARD: of the run, and of one rank on a GPU.

    Columns: device, ranks, model, precision, step_ms (the median without the tracer's),
    computation_ms (of traced steps), predicted_bytes and measured_bytes (the peak, NaN where not).
    """
    on_gpu = open_training(gpu_folder("assignment1/train_fsdp"))
    rows = []
    for runs in (training, on_gpu):
        overlap, memory = overlap_by_run(runs), peak_memory(runs).set_index("name")
        for name, run in runs.named():
            if run.strategy != "FULL_SHARD":
                continue
            traced = overlap.set_index("name")["computation_ms"].reindex([name])
            rows.append(
                {
                    "device": run.opened.device,
                    "ranks": run.ranks,
                    "model": run.settings["model"],
                    "precision": run.settings["precision"],
                    "step_ms": run.step_times_ms()["step_time_ms"].median(),
                    "computation_ms": traced.iloc[0],
                }
                | memory.loc[name, ["predicted_bytes", "measured_bytes"]].to_dict()
            )
    return pd.DataFrame(rows)


def learning_facts(training: Training) -> dict[str, str]:
    """Returns how near the long run came to the entropy of its text."""
    run = training.learning
    loss = learned(run)
    return {
        "run": f"{run}, {run.settings['model']}",
        "steps": f"{loss.steps:,}",
        f"loss, mean of the last {loss.averaged_steps} steps": f"{loss.final_nats:.3f} nats",
        "entropy of the text": f"{loss.entropy_nats:.3f} nats",
        "loss above the entropy": f"{loss.above_entropy_nats:+.3f} nats",
        "unigram entropy": _or_dash(loss.unigram_nats, "{:.3f} nats"),
        "learned, of what the order of the tokens is worth": _or_dash(loss.share, "{:.0%}"),
    }


def sent_by_backend(strategies: StrategyTimes) -> pd.DataFrame:
    """Returns the bytes that a rank would send over gloo and over NCCL, in MB.

    Rows are of the run's model and of ``LARGE``, on as many ranks as the run's.
    """
    configs = {strategies.settings["model"]: strategies.config}
    configs.setdefault(LARGE, GPT2Config.named(LARGE))
    tables = []
    for name, config in configs.items():
        table = strategy_table(config, strategies.ranks)
        wide = table.pivot_table(
            index=["accumulation", "strategy"],
            columns="backend",
            values=["sent_bytes", "ratio_to_ddp"],
            sort=False,
        )
        sent = wide.index.to_frame(index=False)[["strategy", "accumulation"]]
        sent.insert(1, "model", name)
        for backend, label in BACKEND_NAMES.items():
            sent[f"{label} (MB)"] = wide[("sent_bytes", backend)].to_numpy() / 1e6
            sent[f"{label} over DDP"] = wide[("ratio_to_ddp", backend)].to_numpy()
        tables.append(sent.rename(columns={"accumulation": "micro-batches"}))
    return pd.concat(tables, ignore_index=True)


def _or_dash(value: float, form: str) -> str:
    """Returns the formatted value; a dash where it is unknown."""
    return "–" if pd.isna(value) else form.format(value)
