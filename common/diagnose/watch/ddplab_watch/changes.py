"""Changes that are tried: which ones, by how a script exchanges and loads, and where it runs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.nn.parallel.distributed import DistributedDataParallel

from ddplab_watch import torch_internals

WARMUP, STEPS = 2, 3
"""Passes of a visit, untimed and timed. DDP makes its final buckets in the first pass."""
CAPS_MIB = (0.5, 2.0, 8.0, 32.0)
"""Caps that are tried below the size of all gradients, and one bucket for all."""
FIRST_CAP_MIB = 1.0
"""Cap of DDP's first bucket, where a script gives none."""
COMPRESSIONS = {
    "fp16_compress_hook": default_hooks.fp16_compress_hook,
    "bf16_compress_hook": default_hooks.bf16_compress_hook,
}
FEWEST_WORKERS, MOST_COUNTS = 4, 3
"""Workers that are tried even where a rank has fewer cores; how many numbers of them are."""
AS_IT_IS = "as it is"
AS_IT_LOADS = "as it loads"
"""The script as it is in the trials of loader workers, whose steps load batches."""


@dataclass(frozen=True)
class Change:
    """A change that is tried.

    Attributes:
        kind: name of the setting: ``bucket_cap_mb``, ``compression``, ``no_sync``, ``threads`` …
        name: the change as a line of Python or a word.
        arguments: arguments of DDP, where they differ from the script's.
        hook: the communication hook's name; None leaves the script's own.
        passes: forward and backward passes of a step; None leaves the script's own.
        last_only: exchange after a step's last pass only; None leaves it as it is.
        threads, cores: threads and cores of this process; None leaves them.
        workers: processes that load batches, each pass after one; None loads nothing.
    """

    kind: str
    name: str
    arguments: Mapping[str, Any] = field(default_factory=dict)
    hook: str | None = None
    passes: int | None = None
    last_only: bool | None = None
    threads: int | None = None
    cores: frozenset[int] | None = None
    workers: int | None = None

    @property
    def steps(self) -> tuple[int, int]:
        """Returns the steps of a visit: those of warm-up, and those that are timed.

        Workers that all begin together give their batches together, until they have lost step: so
        as many steps as there are workers make a warm-up, and twice as many a mean.
        """
        workers = self.workers or 0
        return max(WARMUP, workers), max(STEPS, 2 * workers)


@dataclass(frozen=True)
class AsItIs:
    """The way in which the script exchanges gradients.

    Attributes:
        facts: facts of the script's DDP (``torch_internals.ddp_facts``).
        passes: forward and backward passes of a step.
        last_only: gradients are exchanged after the last of them only.
    """

    facts: Mapping[str, Any]
    passes: int
    last_only: bool

    @property
    def arguments(self) -> dict[str, Any]:
        """Returns the arguments that DDP was made with, where they are not its defaults."""
        defaults = {"bucket_cap_mb": None, "broadcast_buffers": True}
        names = ("find_unused_parameters", "static_graph", "gradient_as_bucket_view", *defaults)
        arguments = {name: self.facts[name] for name in names}
        return {name: v for name, v in arguments.items() if v != defaults.get(name, False)}


def changes(now: AsItIs, gradient_bytes: int, unused: bool, ranks: Sequence[dict]) -> list[Change]:
    """Returns the changes to try: the same ones, in one order, on all ranks.

    Args:
        now: exchange of the script.
        gradient_bytes: bytes of all gradients.
        unused: some rank's pass leaves a parameter without a gradient.
        ranks: of each rank ``host``, the ``cores`` that it may use and those of its ``machine``,
            and ``threads``; this rank's says ``own``.
    """
    candidates = [Change(AS_IT_IS, AS_IT_IS)]
    total_mib, cap_now = gradient_bytes / 2**20, now.facts["bucket_cap_mb"]
    caps = [cap for cap in CAPS_MIB if cap < total_mib]
    if total_mib > (cap_now or FIRST_CAP_MIB):  # else they are in one bucket as it is
        caps.append(float(f"{total_mib * 1.01:.3g}"))
    candidates += [
        Change("bucket_cap_mb", f"bucket_cap_mb={cap:g}", {"bucket_cap_mb": cap})
        for cap in caps
        if cap != cap_now
    ]
    candidates += [
        Change("compression", name, hook=name)
        for name in COMPRESSIONS
        if not now.facts["comm_hook"].endswith(name)
    ]
    if not now.facts["gradient_as_bucket_view"]:
        name = "gradient_as_bucket_view"
        candidates.append(Change(name, f"{name}=True", {name: True}))
    if now.facts["find_unused_parameters"] and not unused:
        name = "find_unused_parameters"
        candidates.append(Change(name, f"{name}=False", {name: False}))
    if not now.facts["static_graph"]:
        # It knows unused parameters from its first pass, and searches no more.
        static = {"static_graph": True, "find_unused_parameters": False}
        candidates.append(Change("static_graph", "static_graph=True", static))
    if not now.last_only:
        passes = max(2, now.passes)
        name = f"no_sync() but for the last of {passes} passes"
        candidates.append(Change("no_sync", name, passes=passes, last_only=True))
    return candidates + _of_the_process(ranks)


def _of_the_process(ranks: Sequence[dict]) -> list[Change]:
    """Returns changes of threads and cores: those of ranks that share a host's cores.

    Ranks that were all given fewer cores than they are get some of the machine's.
    """
    this_rank = next(rank for rank in ranks if rank["own"])
    threads, cores = this_rank["threads"], this_rank["cores"]
    other_threads = other_cores = False
    for rank in ranks:
        beside = _beside(rank, ranks)
        has_enough = len(rank["cores"]) >= len(beside)
        pool = sorted(rank["cores"] if has_enough else rank["machine"])
        share = len(pool) // len(beside)
        if not share:
            continue
        other_threads |= has_enough and share != rank["threads"]
        other_cores |= len(beside) > 1
        if rank["own"]:
            position = [r["rank"] for r in beside].index(rank["rank"])
            threads = share if has_enough else threads
            cores = pool[position * share : (position + 1) * share]
    candidates = []
    if other_threads:
        candidates.append(Change("threads", "a thread for each core of a rank", threads=threads))
    if other_cores:
        name = "cores of its own for each rank"
        candidates.append(Change("affinity", name, cores=frozenset(cores)))
    return candidates


def worker_changes(now: int, most_now: int, ranks: Sequence[dict]) -> list[Change]:
    """Returns the numbers of loader workers to try, as changes; the first is the script as it is.

    ``now`` are this rank's workers, ``most_now`` the most of any; ``ranks`` as for ``changes``.
    """
    candidates = [Change("workers", AS_IT_LOADS, workers=now)]
    cores = min(len(rank["cores"]) // len(_beside(rank, ranks)) for rank in ranks)
    counts = worker_counts(most_now, cores)
    return candidates + [
        Change("workers", f"num_workers={count}", workers=count) for count in counts
    ]


def worker_counts(now: int, cores: int) -> list[int]:
    """Returns the numbers of workers to try: twice as many as now, and twice as many again.

    Workers may wait rather than compute, so a few more than a rank's own cores are tried.
    """
    counts = [max(1, 2 * now) * 2**doubled for doubled in range(MOST_COUNTS)]
    return [count for count in counts if count <= max(FEWEST_WORKERS, 2 * cores)] or counts[:1]


def _beside(rank: dict, ranks: Sequence[dict]) -> list[dict]:
    """Returns the ranks that share a rank's cores, itself among them."""
    return [r for r in ranks if r["host"] == rank["host"] and r["cores"] == rank["cores"]]


def exchange_of(ddp: DistributedDataParallel, passes: int, sent_bytes: int) -> AsItIs:
    """Returns how a script exchanges, from its DDP and what its last step was seen to send.

    Where no bucket was seen, ``sent_bytes`` is 0, and one exchange a step is taken for granted.
    """
    facts = torch_internals.ddp_facts(ddp)
    gradient_bytes = sum(p.nbytes for p in ddp.parameters() if p.requires_grad)
    last_only = passes > 1 and sent_bytes < 1.5 * gradient_bytes
    return AsItIs(facts, passes, last_only)
