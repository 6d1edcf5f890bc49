"""The cases of ``ddplab study scripts``: two sets of scripts, each with faults of its own.

The scripts are in ``tests/diagnose/styles``. A fault is part of a script's code, as a user would
write it. Most were reported in public: a script's docstring says where. All scripts of a set were
written, together with the cause that must be named first, before any of them had been diagnosed;
their authors were asked not to read the diagnosis.
"""

from __future__ import annotations

from dataclasses import dataclass

from common.runtime.paths import project_root

RANKS = 2
HEALTHY, NO_FAULT = "healthy", "none"
NINTH, TENTH = "ninth", "tenth"
STYLES = project_root() / "tests" / "diagnose" / "styles"
CAUSES = {
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
    TENTH: {
        "captions": {
            "spectra": "heavy-update",
            "sync_bn": "synchronised-norms",
            "hooks": "growing-memory",
        },
        "codec": {
            "ear": "unused-gradients",
            "restarts": "epoch-start",
            "recent": "growing-memory",
        },
        "episodes": {
            "sync": "synchronised-norms",
            "ways": "unequal-lengths",
            "svd": "heavy-update",
        },
        "physics": {
            "late": "needless-synchronisation",
            "roots": "heavy-update",
            "search": "epoch-start",
        },
        "points": {"fps": "data-loading", "balance": "wrong-sampler", "guards": "left-on"},
        "preference": {
            "unfrozen": "unused-gradients",
            "online": "beside-the-model",
            "watch": "left-on",
        },
        "tabular": {"audit": "own-exchange", "penalty": "sparse-embedding", "guard": "left-on"},
        "two_tower": {
            "cached": "needless-recomputation",
            "frozen": "unused-gradients",
            "counts": "sent-buffers",
        },
        "vit_sharded": {
            "scales": "unequal-lengths",
            "frozen": "unused-gradients",
            "probe": "left-on",
        },
        "weather": {
            "leads": "unequal-lengths",
            "scores": "evaluation-or-logging",
            "archive": "growing-memory",
        },
    },
}
"""Set → script → fault → cause that must be named first."""


@dataclass(frozen=True)
class Case:
    """One script with one of its faults, or without.

    Attributes:
        set_name: set of cases that it belongs to.
        script: name of a script in ``STYLES``.
        fault: value of the script's flag.
        cause: cause that must be named first; ``healthy`` for none.
    """

    set_name: str
    script: str
    fault: str = NO_FAULT
    cause: str = HEALTHY

    @property
    def name(self) -> str:
        """Returns the name of the case's folder."""
        fault = () if self.fault == NO_FAULT else (self.fault.replace("_", "-"),)
        return "-".join((self.cause, self.script, *fault))

    @property
    def labels(self) -> set[str]:
        """Returns the words by which ``--only`` finds it."""
        return {self.name, self.cause, self.script, self.set_name}

    @property
    def variants(self) -> tuple[bool, ...]:
        """Returns whether the fault is removed, for each of the watched runs."""
        return (False,) if self.fault == NO_FAULT else (False, True)

    def bundle(self, removed: bool, number: int = 0) -> str:
        """Returns the name of a watched run's folder, in the round of that number."""
        name = f"{self.name}-removed" if removed else self.name
        return f"{name}-round-{number}" if number else name

    def words(self, removed: bool) -> list[str]:
        """Returns the script and its arguments."""
        return [str(STYLES / f"{self.script}.py"), "--fault", NO_FAULT if removed else self.fault]


CASES = tuple(
    Case(set_name, script, fault, cause)
    for set_name, scripts in CAUSES.items()
    for script, faults in scripts.items()
    for fault, cause in (*faults.items(), (NO_FAULT, HEALTHY))
)
