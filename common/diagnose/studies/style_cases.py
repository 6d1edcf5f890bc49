"""Two sets of ``ddplab study scripts``, each of scripts in styles and with faults of their own.

The scripts are in ``tests/diagnose/styles``. A fault is part of a script's code, as a user would
write it. Most were reported in public: a script's docstring says where. All scripts of a set were
written, together with the cause that must be named first, before any of them had been diagnosed;
their authors were asked not to read the diagnosis.
"""

from __future__ import annotations

from common.diagnose.studies.script_cases import HEALTHY, Case
from common.runtime.paths import project_root

EIGHTH, NINTH = "eighth", "ninth"
STYLES = project_root() / "tests" / "diagnose" / "styles"
NO_FAULT = (("fault", "none"),)
"""The flag that removes a script's fault."""
CAUSES = {
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
    NINTH: {
        "glue": {
            "double": "own-exchange",
            "accumulate": "needless-synchronisation",
            "multiple": "padding",
        },
        "adversarial": {
            "through": "unused-gradients",
            "samples": "evaluation-or-logging",
            "tidy": "garbage-collection",
        },
        "contrastive": {
            "augment": "data-loading",
            "keys": "beside-the-model",
            "seed": "wrong-sampler",
        },
        "knowledge": {
            "gathered": "sparse-embedding",
            "all_cores": "oversubscribed-cores",
            "rejection": "data-loading",
        },
        "mixture": {
            "nan_hunt": "left-on",
            "remat": "needless-recomputation",
            "cap": "bucket-cap",
        },
        "radiance": {
            "anomaly": "left-on",
            "render": "evaluation-or-logging",
            "depth": "slow-rank",
        },
        "segmentation": {"gzipped": "data-loading", "atlas": "sent-buffers"},
        "documents": {
            "lookup": "data-loading",
            "reservoir": "epoch-start",
            "early": "wrong-sampler",
        },
        "surrogate": {"collect": "garbage-collection", "broadcast": "own-exchange"},
        "trackers": {
            "dealt": "unequal-lengths",
            "edges": "padding",
            "rows": "evaluation-or-logging",
        },
        "video": {
            "shards": "slow-rank",
            "browse": "evaluation-or-logging",
            "rebalance": "epoch-start",
        },
    },
}
"""Set → script → fault → cause that must be named first."""


def _case(which: str, script: str, fault: str, cause: str) -> Case:
    """Returns the case of a fault, or of a script without one."""
    is_healthy = cause == HEALTHY
    return Case(
        name=f"{cause}-{script}" + ("" if is_healthy else f"-{fault.replace('_', '-')}"),
        cause=cause,
        script=script,
        flags=(("fault", fault),),
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
