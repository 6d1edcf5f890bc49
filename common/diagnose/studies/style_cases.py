"""Two sets of ``ddplab study scripts``, each of ten scripts in styles and with faults of their own.

The scripts are in ``tests/diagnose/styles``. A fault is part of a script's code, as a user would
write it. Most were reported in public: a script's docstring says where. All scripts of a set were
written, together with the cause that must be named first, before any of them had been diagnosed;
the authors of the eighth set were asked not to read the diagnosis.
"""

from __future__ import annotations

from common.diagnose.studies.script_cases import HEALTHY, Case
from common.runtime.paths import project_root

SEVENTH, EIGHTH = "seventh", "eighth"
STYLES = project_root() / "tests" / "diagnose" / "styles"
NO_FAULT = (("fault", "none"),)
"""The flag that removes a script's fault."""
CAUSES = {
    SEVENTH: {
        "references": {
            "decode": "data-loading",
            "reduce": "own-exchange",
            "evaluate": "evaluation-or-logging",
        },
        "pretraining": {
            "exchange": "needless-synchronisation",
            "anomaly": "left-on",
            "estimate": "evaluation-or-logging",
        },
        "callbacks": {
            "average": "evaluation-or-logging",
            "save": "evaluation-or-logging",
            "history": "growing-memory",
        },
        "hub_trainer": {
            "checkpointing": "needless-recomputation",
            "unused": "needless-search",
            "longest": "padding",
        },
        "two_towers": {
            "captions": "own-exchange",
            "tower": "unused-gradients",
            "grids": "slow-rank",
        },
        "recommender": {
            "table": "sparse-embedding",
            "collect": "garbage-collection",
            "lzma": "data-loading",
        },
        "translation": {
            "own_order": "unequal-lengths",
            "corpus": "padding",
            "everyone": "wrong-sampler",
        },
        "from_tutorial": {
            "average_gradients": "own-exchange",
            "threads": "oversubscribed-cores",
            "reopened": "epoch-start",
        },
        "monitored": {
            "events": "evaluation-or-logging",
            "statistics": "left-on",
            "norms": "slow-update",
        },
        "launched": {
            "buckets": "bucket-cap",
            "every": "needless-synchronisation",
            "metrics": "own-exchange",
        },
    },
    EIGHTH: {
        "denoising": {
            "samples": "evaluation-or-logging",
            "average": "evaluation-or-logging",
            "warps": "data-loading",
        },
        "speech": {"padding": "padding", "reverb": "data-loading", "anomaly": "left-on"},
        "actor_critic": {
            "each": "own-exchange",
            "metrics": "own-exchange",
            "memory": "garbage-collection",
        },
        "distillation": {
            "teacher": "beside-the-model",
            "saves": "evaluation-or-logging",
            "recompute": "needless-recomputation",
        },
        "detector": {
            "workers": "epoch-start",
            "crowd": "slow-rank",
            "threads": "oversubscribed-cores",
        },
        "molecules": {
            "alike": "unequal-lengths",
            "unsharded": "wrong-sampler",
            "buckets": "bucket-cap",
        },
        "shard_lm": {
            "norms": "own-exchange",
            "accum": "needless-synchronisation",
            "dispatch": "data-loading",
        },
        "sft_trainer": {
            "max_length": "padding",
            "histograms": "evaluation-or-logging",
            "lazy": "data-loading",
        },
        "forecasting": {
            "snapshots": "evaluation-or-logging",
            "buffers": "sent-buffers",
            "raw_ids": "sparse-embedding",
        },
        "masked": {
            "meters": "own-exchange",
            "accumulate": "needless-synchronisation",
            "loops": "slow-rank",
        },
    },
}
"""Set → script → fault → cause that must be named first."""
FLAGS = {"every": {"accumulation": 4, "width": 160}}
LINKS = {"exchange": "500mbit", "every": "500mbit"}
"""Flags and links of two emulated hosts, by fault, where a script's own and loopback do not show
it."""


def _case(which: str, script: str, fault: str, cause: str) -> Case:
    """Returns the case of a fault, or of a script without one."""
    flags = {"fault": fault, **FLAGS.get(fault, {})}
    is_healthy = cause == HEALTHY
    return Case(
        name=f"{cause}-{script}" + ("" if is_healthy else f"-{fault.replace('_', '-')}"),
        cause=cause,
        script=script,
        flags=tuple(flags.items()),
        rate=LINKS.get(fault, ""),
        held_out=True,
        remedy=() if is_healthy else NO_FAULT,
        later=which,
        folder=STYLES,
    )


STYLE_CASES = tuple(
    _case(which, script, fault, cause)
    for which, scripts in CAUSES.items()
    for script, faults in scripts.items()
    for fault, cause in [*faults.items(), ("none", HEALTHY)]
)
