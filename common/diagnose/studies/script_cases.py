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
TENTH, ELEVENTH = "tenth", "eleventh"
STYLES = project_root() / "tests" / "diagnose" / "styles"
CAUSES = {
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
    ELEVENTH: {
        "detector": {
            "mosaic": "data-loading",
            "sizes": "unequal-lengths",
            "stages": "unused-gradients",
        },
        "distill": {
            "sync_dist": "own-exchange",
            "unfrozen": "unused-gradients",
            "reload": "epoch-start",
        },
        "flow": {
            "averages": "heavy-update",
            "samples": "evaluation-or-logging",
            "checkpoints": "needless-recomputation",
        },
        "gnn_forces": {
            "twice": "needless-recomputation",
            "collect": "garbage-collection",
            "validate": "evaluation-or-logging",
        },
        "graph": {"dense": "sparse-embedding", "halves": "slow-rank", "trace": "growing-memory"},
        "llama_sharded": {
            "scatter": "needless-synchronisation",
            "subspace": "heavy-update",
            "collector": "garbage-collection",
        },
        "meta": {
            "each_batch": "needless-synchronisation",
            "cycled": "wrong-sampler",
            "titles": "beside-the-model",
        },
        "replay": {
            "sync_norms": "synchronised-norms",
            "unfrozen": "unused-gradients",
            "percentile": "heavy-update",
        },
        "speech": {"buckets": "unequal-lengths", "padded": "padding", "anomaly": "left-on"},
        "translate": {"buckets": "bucket-cap", "segment": "data-loading", "max_length": "padding"},
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
