"""The cases of ``ddplab study scripts``: which fault is planted in which script.

Each cause is planted in two scripts; thresholds were set on the first, and the second was held out.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from common.cluster.emulated import EmulatedCluster
from common.perfmodel.scaling.step_model import StepSettings
from common.runtime.paths import project_root

RANKS = 2
HEALTHY = "healthy"
PROPOSED = "as proposed"
"""Value of a remedy's flag, or strength of what is planted instead of the fault: what the diagnosis
of the run with the fault proposes."""
BUCKET_CAP = "bucket-cap"
PLANTED = project_root() / "common" / "studies" / "planted_faults.py"
SCRIPTS = project_root() / "assignments" / "assignment4" / "scripts"


@dataclass(frozen=True)
class Case:
    """One script with one fault.

    Attributes:
        name: of its folder.
        cause: what must be named first; ``healthy`` for none.
        script: of ``SCRIPTS``.
        fault: for ``planted_faults``.
        flags: of the script.
        rate: of the links of two emulated hosts; empty for ranks of this machine.
        held_out: whether it was not looked at when thresholds were set.
        remedy: flags of the run without the fault, where it is no planted one; one of them may be
            PROPOSED.
        instead: what is planted in the run without the fault.
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
            settings: those of the step that it proposes. Without any, or with the same batch, there
                is no run without a batch that is too small; and a bucket cap is DDP's default.
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
        given = [word for name, value in flags.items() for word in (f"--{name}", str(value))]
        fault = self.instead if removed else self.fault
        script = str(SCRIPTS / f"{self.script}.py")
        return [str(PLANTED), fault, script, *given]


def _pair(cause: str, *two: tuple, rates: tuple[str, str] = ("", "")) -> Iterator[Case]:
    """Yields the cases of a cause: (script, fault, flags, remedy), the second held out."""
    for (script, fault, *settings), rate, held in zip(two, rates, (False, True), strict=True):
        flags, remedy = (tuple(each.items()) for each in (*settings, {}, {})[:2])
        name = f"{cause}-{script}{'-held-out' if held else ''}"
        if fault != HEALTHY:
            name = f"{cause}-{fault.partition('=')[0]}-{script}"
        instead = f"{BUCKET_CAP}={PROPOSED}" if fault.startswith(BUCKET_CAP) else HEALTHY
        yield Case(name, cause, script, fault, flags, rate, held, remedy, instead)


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
        ("plain", HEALTHY, {"batch_size": 96}, {"batch_size": PROPOSED}),
        ("streaming", HEALTHY, {"batch_size": 5}, {"batch_size": PROPOSED}),
        rates=("1gbit", "1gbit"),
    ),
    *_pair(
        "model-too-small",
        ("plain", HEALTHY, {"width": 8, "batch_size": 32}, {"batch_size": PROPOSED}),
        (
            "accumulating",
            HEALTHY,
            {"channels": 1, "accumulation": 1, "batch_size": 1},
            {"batch_size": PROPOSED},
        ),
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
)
