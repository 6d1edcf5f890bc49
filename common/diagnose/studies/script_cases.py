"""The cases of ``ddplab study scripts``: which fault is planted in which script.

Each cause is planted in two scripts; thresholds were set on the first, and the second was held out.
What was seen in the second changed the diagnosis, too. So there are later sets, ``fresh``,
``fourth`` and ``fifth``: other scripts or other numbers, each written before any of its cases had
run. The ``sixth`` is of faults that all ranks share, written before any of their causes was.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from common.cluster.emulated import EmulatedCluster
from common.perfmodel.scaling.step_model import StepSettings
from common.runtime.paths import project_root

RANKS = 2
HEALTHY = "healthy"
PROPOSED = "as proposed"
"""Value of a remedy's flag, or strength of what is planted instead of the fault: what the diagnosis
of the run with the fault proposes."""
BUCKET_CAP = "bucket-cap"
FRESH, FOURTH, FIFTH, SIXTH = "fresh", "fourth", "fifth", "sixth"
"""Sets of cases that were written after the diagnosis had changed for those before."""
PLANTED = project_root() / "common" / "diagnose" / "studies" / "planted_faults.py"
SCRIPTS = project_root() / "assignments" / "assignment4" / "scripts"


def words_of(fault: str, script: Path, flags: Mapping[str, object]) -> list[str]:
    """Returns a program that plants a fault in a script, and its arguments."""
    arguments = [word for name, value in flags.items() for word in (f"--{name}", str(value))]
    return [str(PLANTED), fault, str(script), *arguments]


@dataclass(frozen=True)
class Case:
    """One script with one fault.

    Attributes:
        name: name of the case's folder.
        cause: cause that must be named first; ``healthy`` for none.
        script: name of a script in ``folder``.
        fault: argument of ``planted_faults``.
        flags: flags of the script.
        rate: rate of the links of two emulated hosts; empty for ranks of this machine.
        held_out: whether it was not looked at when thresholds were set.
        remedy: flags of the run without the fault, where it is no planted one; one of them may be
            PROPOSED.
        instead: fault of the run without this one, such as another bucket cap.
        later: the later set that it belongs to; empty for the first two.
        folder: folder of the script.
    """

    name: str
    cause: str
    script: str
    fault: str = HEALTHY
    flags: tuple[tuple[str, object], ...] = ()
    rate: str = ""
    held_out: bool = False
    remedy: tuple[tuple[str, object], ...] = ()
    instead: str = HEALTHY
    later: str = ""
    folder: Path = SCRIPTS

    @property
    def labels(self) -> set[str]:
        """Returns the words by which ``--only`` finds it."""
        labels = {self.name, self.cause, self.script}
        return labels | {self.later} if self.later else labels

    @property
    def is_removed(self) -> bool:
        """Returns True if there is a run without the fault to compare with."""
        return self.fault != HEALTHY or bool(self.remedy)

    @property
    def changes_batch(self) -> bool:
        """Returns True if the remedy is another batch, which changes one rank's speed as well."""
        return "batch_size" in dict(self.remedy)

    @property
    def hosts(self) -> EmulatedCluster | None:
        """Returns the hosts that it runs on; None for ranks of this machine."""
        return EmulatedCluster.of(RANKS, [self.rate]) if self.rate else None

    @property
    def planted_or_not(self) -> tuple[bool, ...]:
        """Returns whether the fault is removed, for each of the watched runs."""
        return (False, True) if self.is_removed else (False,)

    @property
    def takes_proposal(self) -> bool:
        """Returns True if the remedy is not known before the run with the fault was diagnosed."""
        return PROPOSED in dict(self.remedy).values() or self.instead.endswith(PROPOSED)

    def with_proposal(self, settings: StepSettings | None) -> Case:
        """Returns the case with the remedy that a diagnosis proposes.

        Args:
            settings: settings of the step that it proposes. Without any, or with the same batch,
                there is no run without a batch that is too small; a bucket cap is DDP's default.
        """
        if self.instead.endswith(PROPOSED):
            cap = settings.bucket_cap_mb if settings else None
            planted = HEALTHY if cap is None else f"{BUCKET_CAP}={cap:g}"
            return replace(self, instead=HEALTHY if planted == self.fault else planted)
        now = dict(self.flags)["batch_size"]
        batch = settings.batch_per_rank if settings else now
        return replace(self, remedy=(("batch_size", batch),) if batch != now else ())

    def bundle(self, removed: bool, number: int = 0) -> str:
        """Returns the name of a watched run's folder, in the round of that number."""
        name = f"{self.name}-removed" if removed else self.name
        if removed and self.changes_batch:
            name = f"{self.name}-batch-{dict(self.remedy)['batch_size']}"
        if removed and self.instead != HEALTHY:
            name = f"{self.name}-{self.instead.replace('=', '-')}"
        return f"{name}-round-{number}" if number else name

    def words(self, removed: bool) -> list[str]:
        """Returns the program that is watched: the planting, the fault, the script."""
        flags = dict(self.flags) | (dict(self.remedy) if removed else {})
        fault = self.instead if removed else self.fault
        return words_of(fault, self.folder / f"{self.script}.py", flags)


def _instead_of(fault: str) -> str:
    """Returns what is planted in the run without a fault: for a bucket cap the proposed one."""
    return f"{BUCKET_CAP}={PROPOSED}" if fault.startswith(BUCKET_CAP) else HEALTHY


def _remedy_of(cause: str) -> tuple[tuple[str, object], ...]:
    """Returns the flags of the run without a batch or a model that is too small."""
    return (("batch_size", PROPOSED),) if cause in ("batch-too-small", "model-too-small") else ()


def _pair(cause: str, *two: tuple, rates: tuple[str, str] = ("", "")) -> Iterator[Case]:
    """Yields the cases of a cause: (script, fault, flags), the second held out."""
    for (script, fault, *flags), rate, held in zip(two, rates, (False, True), strict=True):
        name = f"{cause}-{script}{'-held-out' if held else ''}"
        if fault != HEALTHY:
            name = f"{cause}-{fault.partition('=')[0]}-{script}"
        options, remedy = tuple(dict(*flags).items()), _remedy_of(cause)
        yield Case(name, cause, script, fault, options, rate, held, remedy, _instead_of(fault))


def _later(
    which: str, cause: str, script: str, fault: str = HEALTHY, *, rate: str = "", **flags: object
) -> Case:
    """Returns a case of a later set; ``flags`` are the script's."""
    planted = () if fault == HEALTHY else (fault.partition("=")[0],)
    return Case(
        name="-".join((cause, *planted, script, which)),
        cause=cause,
        script=script,
        fault=fault,
        flags=tuple(flags.items()),
        rate=rate,
        held_out=True,
        remedy=_remedy_of(cause),
        instead=_instead_of(fault),
        later=which,
    )


_fresh, _fourth, _fifth, _sixth = (
    partial(_later, which) for which in (FRESH, FOURTH, FIFTH, SIXTH)
)

CASES = (
    *_pair("wrong-sampler", ("plain", "missing-sampler"), ("accumulating", "overlapping-sampler")),
    *_pair("slow-rank", ("plain", "slow-forward=25"), ("trainer", "slow-forward=30")),
    *_pair("slow-rank", ("accumulating", "slow-backward=20"), ("streaming", "slow-backward=30")),
    *_pair("data-loading", ("plain", "slow-loader=25"), ("accelerated", "slow-loader=30")),
    *_pair("data-loading", ("accumulating", "slow-data=15"), ("accelerated", "slow-data=18")),
    *_pair("slow-update", ("plain", "slow-update=20"), ("trainer", "slow-update=30")),
    *_pair(
        "evaluation-or-logging",
        ("plain", "lone-checkpoint=60"),
        ("accelerated", "lone-checkpoint=100"),
    ),
    *_pair(
        "needless-synchronisation",
        ("accumulating", "always-synchronised", {"accumulation": 4, "channels": 48}),
        ("accelerated", "always-synchronised", {"accumulation": 4, "width": 160}),
        rates=("500mbit", "500mbit"),
    ),
    *_pair(
        "bucket-cap",
        ("trainer", "bucket-cap=1000", {"batch_size": 8}),
        ("streaming", "bucket-cap=0.002", {"width": 96, "batch_size": 4}),
        rates=("1gbit", ""),
    ),
    *_pair("needless-search", ("plain", "unused-search"), ("streaming", "unused-search")),
    *_pair("garbage-collection", ("plain", "garbage=500"), ("streaming", "garbage=600")),
    *_pair("growing-memory", ("plain", "growing-memory=30"), ("accelerated", "growing-memory=25")),
    *_pair("oversubscribed-cores", ("plain", "one-core"), ("trainer", "many-threads=3")),
    *_pair(
        "unequal-lengths",
        ("trainer", HEALTHY, {"uneven": 1, "batch_size": 4}),
        ("trainer", HEALTHY, {"uneven": 1, "batch_size": 5, "tokens": 80}),
    ),
    *_pair(
        "batch-too-small",
        ("plain", HEALTHY, {"batch_size": 96}),
        ("streaming", HEALTHY, {"batch_size": 5}),
        rates=("1gbit", "1gbit"),
    ),
    *_pair(
        "model-too-small",
        ("plain", HEALTHY, {"width": 8, "batch_size": 32}),
        ("accumulating", HEALTHY, {"channels": 1, "accumulation": 1, "batch_size": 1}),
        rates=("", "1gbit"),  # over loopback its exchange is less than a fifth of the step
    ),
    *_pair(
        "network-too-slow",
        ("plain", HEALTHY, {"batch_size": 32}),
        ("streaming", HEALTHY, {"batch_size": 3}),
        rates=("50mbit", "50mbit"),
    ),
    Case("healthy-plain", HEALTHY, "plain"),
    Case("healthy-plain-wide", HEALTHY, "plain", flags=(("width", 1200),), held_out=True),
    Case("healthy-plain-hosts", HEALTHY, "plain", flags=(("batch_size", 1024),), rate="5gbit"),
    Case("healthy-accumulating", HEALTHY, "accumulating"),
    Case(
        name="healthy-accumulating-one",
        cause=HEALTHY,
        script="accumulating",
        flags=(("accumulation", 1), ("batch_size", 128)),
        held_out=True,
    ),
    Case("healthy-trainer", HEALTHY, "trainer"),
    Case("healthy-trainer-long", HEALTHY, "trainer", flags=(("tokens", 160),), held_out=True),
    Case("healthy-accelerated", HEALTHY, "accelerated"),
    Case(
        "healthy-accelerated-wide", HEALTHY, "accelerated", flags=(("width", 224),), held_out=True
    ),
    Case("healthy-streaming", HEALTHY, "streaming"),
    Case("healthy-streaming-long", HEALTHY, "streaming", flags=(("tokens", 80),), held_out=True),
    Case("healthy-sharded", HEALTHY, "sharded"),
    Case("healthy-sharded-wide", HEALTHY, "sharded", flags=(("width", 640),), held_out=True),
    _fresh("wrong-sampler", "accumulating", "missing-sampler"),
    _fresh("slow-rank", "accumulating", "slow-forward=15"),
    _fresh("slow-rank", "accelerated", "slow-forward=20"),
    _fresh("slow-rank", "plain", "slow-backward=30"),
    _fresh("slow-rank", "accelerated", "slow-backward=25"),
    _fresh("data-loading", "streaming", "slow-loader=25"),
    _fresh("data-loading", "accumulating", "slow-loader=10"),
    _fresh("data-loading", "plain", "slow-data=20"),
    _fresh("data-loading", "trainer", "slow-data=30"),
    _fresh("slow-update", "accumulating", "slow-update=15"),
    _fresh("slow-update", "streaming", "slow-update=25"),
    _fresh("evaluation-or-logging", "streaming", "lone-checkpoint=80"),
    _fresh("evaluation-or-logging", "trainer", "lone-checkpoint=120"),
    _fresh(
        cause="needless-synchronisation",
        script="accelerated",
        fault="always-synchronised",
        rate="500mbit",
        accumulation=3,
        width=192,
    ),
    _fresh("bucket-cap", "streaming", "bucket-cap=0.001", width=64, batch_size=3, tokens=32),
    _fresh("needless-search", "accelerated", "unused-search"),
    _fresh("garbage-collection", "accelerated", "garbage=500"),
    _fresh("growing-memory", "streaming", "growing-memory=20"),
    _fresh("oversubscribed-cores", "accelerated", "one-core"),
    _fresh("unequal-lengths", "trainer", uneven=1, batch_size=6, tokens=96),
    _fresh(
        "batch-too-small", "accumulating", rate="1gbit", accumulation=1, batch_size=8, channels=48
    ),
    _fresh("model-too-small", "plain", rate="1gbit", width=16, batch_size=64),
    _fresh(
        cause="network-too-slow",
        script="accumulating",
        rate="50mbit",
        accumulation=1,
        batch_size=32,
        channels=48,
    ),
    _fresh(HEALTHY, "plain", width=700),
    _fresh(HEALTHY, "accumulating", accumulation=4),
    _fresh(HEALTHY, "accelerated", width=192),
    _fresh(HEALTHY, "streaming", rate="5gbit", batch_size=48),
    # accelerate divides batches without torch's sampler, so that it cannot be left out there.
    _fourth("wrong-sampler", "plain", "overlapping-sampler=0.4"),
    _fourth("slow-rank", "plain", "slow-forward=18"),
    _fourth("slow-rank", "streaming", "slow-forward=20"),
    _fourth("slow-rank", "trainer", "slow-backward=25"),
    _fourth("slow-rank", "accumulating", "slow-backward=12"),
    _fourth("data-loading", "plain", "slow-loader=18"),
    _fourth("data-loading", "trainer", "slow-loader=30"),
    _fourth("data-loading", "streaming", "slow-data=20"),
    _fourth("data-loading", "accelerated", "slow-data=25"),
    _fourth("slow-update", "plain", "slow-update=30"),
    _fourth("slow-update", "accelerated", "slow-update=25"),
    _fourth("evaluation-or-logging", "plain", "lone-checkpoint=90"),
    _fourth("evaluation-or-logging", "accumulating", "lone-checkpoint=50"),
    _fourth(
        cause="needless-synchronisation",
        script="accumulating",
        fault="always-synchronised",
        rate="500mbit",
        accumulation=3,
        channels=40,
    ),
    _fourth("bucket-cap", "trainer", "bucket-cap=0.001", batch_size=2, tokens=32),
    _fourth("needless-search", "accumulating", "unused-search"),
    _fourth("garbage-collection", "trainer", "garbage=400"),
    _fourth("growing-memory", "plain", "growing-memory=20"),
    _fourth("oversubscribed-cores", "streaming", "one-core"),
    _fourth("oversubscribed-cores", "plain", "many-threads=3"),
    _fourth("unequal-lengths", "trainer", uneven=1, batch_size=5, tokens=112),
    _fourth("batch-too-small", "streaming", rate="1gbit", width=96, batch_size=4, tokens=64),
    _fourth(
        "model-too-small", "accumulating", rate="1gbit", channels=2, accumulation=1, batch_size=2
    ),
    _fourth("network-too-slow", "accelerated", rate="50mbit", batch_size=8),
    _fourth(HEALTHY, "plain", width=1000),
    _fourth(HEALTHY, "trainer", tokens=128),
    _fourth(HEALTHY, "accelerated", batch_size=96),
    _fourth(HEALTHY, "streaming", tokens=56),
    _fifth("wrong-sampler", "accumulating", "overlapping-sampler=0.6", channels=32),
    _fifth("wrong-sampler", "plain", "missing-sampler", width=1100),
    _fifth("slow-rank", "plain", "slow-forward=35", batch_size=384),
    _fifth("slow-rank", "accelerated", "slow-forward=30"),
    _fifth("slow-rank", "streaming", "slow-backward=18"),
    _fifth("slow-rank", "accumulating", "slow-backward=25", accumulation=3),
    _fifth("data-loading", "accelerated", "slow-loader=20"),
    _fifth("data-loading", "streaming", "slow-loader=35"),
    _fifth("data-loading", "accumulating", "slow-data=20"),
    _fifth("data-loading", "trainer", "slow-data=40", tokens=80),
    _fifth("slow-update", "streaming", "slow-update=18"),
    _fifth("slow-update", "trainer", "slow-update=40"),
    _fifth("evaluation-or-logging", "accelerated", "lone-checkpoint=70"),
    _fifth("evaluation-or-logging", "streaming", "lone-checkpoint=120"),
    _fifth(
        cause="needless-synchronisation",
        script="accelerated",
        fault="always-synchronised",
        rate="500mbit",
        accumulation=4,
        width=224,
    ),
    _fifth("bucket-cap", "streaming", "bucket-cap=0.0015", width=80, batch_size=4, tokens=40),
    _fifth("needless-search", "streaming", "unused-search", batch_size=6),
    _fifth("garbage-collection", "plain", "garbage=300"),
    _fifth("growing-memory", "accumulating", "growing-memory=15"),
    _fifth("oversubscribed-cores", "accelerated", "one-core", width=192),
    _fifth("oversubscribed-cores", "trainer", "many-threads=4"),
    _fifth("unequal-lengths", "trainer", uneven=1, batch_size=7, tokens=72),
    _fifth("batch-too-small", "plain", rate="1gbit", width=768, batch_size=128),
    _fifth("model-too-small", "plain", rate="1gbit", width=12, batch_size=40),
    _fifth("network-too-slow", "streaming", rate="40mbit", batch_size=4, tokens=40),
    _fifth(HEALTHY, "plain", width=1100, batch_size=448),
    _fifth(HEALTHY, "accumulating", accumulation=3),
    _fifth(HEALTHY, "trainer", tokens=112),
    _fifth(HEALTHY, "accelerated", batch_size=48),
    _fifth(HEALTHY, "streaming", batch_size=16),
    _fifth(HEALTHY, "sharded", width=448),
    # TORCH_DISTRIBUTED_DEBUG=DETAIL ends torch 2.15's DDP over gloo by a signal, so none plants it.
    _sixth("left-on", "streaming", "tracker"),
    _sixth("left-on", "accelerated", "profiler"),
    _sixth("needless-recomputation", "streaming", "recomputation"),
    _sixth("sparse-embedding", "streaming", "dense-embedding"),
    _sixth("epoch-start", "plain", "new-workers"),
    _sixth("epoch-start", "accelerated", "cold-cache", batch_size=256),
    _sixth("own-exchange", "streaming", "own-exchange", batch_size=6),
    _sixth("own-exchange", "accelerated", "shared-metrics"),
    _sixth("own-exchange", "plain", "shared-metrics=20"),
    _sixth("oversubscribed-cores", "accumulating", "many-threads=8"),
    _sixth("heavy-update", "trainer", "averaged-weights"),
    _sixth("heavy-update", "plain", "averaged-weights=6"),
    _sixth("beside-the-model", "accelerated", "slow-metrics"),
    _sixth("growing-memory", "streaming", "growing-memory=1.5"),
    _sixth("bucket-cap", "trainer", "bucket-cap=0.001", batch_size=4, tokens=32),
    _sixth("memory-imbalance", "accumulating", "lone-memory"),
    _sixth(HEALTHY, "plain", width=640),
    _sixth(HEALTHY, "accumulating", channels=32),
    _sixth(HEALTHY, "trainer", tokens=96),
    _sixth(HEALTHY, "accelerated", width=160),
    _sixth(HEALTHY, "streaming", batch_size=20),
)
