"""Causes that are judged from what a job left behind: traces, NCCL's log, flight recorders."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pandas as pd

from common.diagnose.causes.communication import EXPOSED_SHARE
from common.diagnose.causes.ranks import SLOW_RATIO, SLOWEST_OFTEN
from common.diagnose.causes.settings import Signal, of_signals
from common.diagnose.evidence.case import VALIDITY, Verdict, confidence, percent
from common.diagnose.evidence.evidence import NotJudged, standard_error
from common.diagnose.evidence.left_behind import LeftBehind
from common.diagnose.evidence.measured_surroundings import named_ranks
from common.runtime.wording import counted
from common.traces.flight_recorder import Call, Stop, stops
from common.traces.nccl_log import MOST_WARNINGS
from common.traces.step_operations import GATHER, SCATTER

IDLE_SHARE = 0.2
"""With a fifth of the step idle, no kernel can make it more than a fifth faster."""


def hang(left: LeftBehind) -> Verdict | None:
    """Judges whether ranks wait for each other in a collective that not all of them called."""
    if not left.dumps:
        raise NotJudged("no flight recorder's dump (TORCH_FR_BUFFER_SIZE=2000, and a timeout)")
    found = stops(left.dumps)
    if not found:
        return None
    stop = min(found, key=lambda each: not (each.behind or each.mismatched or each.silent))
    late = [*stop.behind, *stop.mismatched, *stop.silent]
    title, change = (
        "all ranks hang in one collective",
        ("Look at the network and the devices; py-spy dump --pid shows where a process is."),
    )
    if late:
        title = f"{named_ranks(late)} did not come to a collective"
        change = (
            "Look at what they do instead: a branch on the rank, an exception, data that end "
            "earlier than the others'."
        )
    is_sure = bool(stop.behind or stop.mismatched)
    return Verdict(
        cause="hang",
        title=title[0].lower() + title[1:],
        evidence=tuple(_stop_sentences(stop)),
        lost_share=None,
        confidence="high" if is_sure else "medium",
        reason="collectives are counted" if is_sure else "no rank with a record is behind",
        change=change,
        group=VALIDITY,
    )


def _stop_sentences(stop: Stop) -> Iterator[str]:
    """Yields sentences on who waits in which collective, and where the others are."""
    if stop.waiting:
        call = next(iter(stop.waiting.values()))
        yield (
            f"{named_ranks(list(stop.waiting))}: in collective {stop.number} of group "
            f"{stop.group}, {_called(call)}."
        )
    for rank, call in stop.behind.items():
        if call is None:
            yield f"Rank {rank} has called none."
        else:
            state = "ended" if call.is_done else "is still in"
            yield (
                f"Rank {rank} {state} collective {call.number}, {_called(call)}, and has called "
                "none since."
            )
    for rank, call in stop.mismatched.items():
        yield f"Rank {rank} called something else: {_called(call)}."
    if stop.silent:
        yield f"{named_ranks(list(stop.silent))}: no dump; ended, or stuck outside of PyTorch."


def _called(call: Call) -> str:
    return f"{call.what}, called at {call.caller}" if call.caller else call.what


def slow_rank(left: LeftBehind) -> Verdict | None:
    """Judges whether one rank keeps the others waiting, step after step.

    What a rank does by itself is its step less its exposed communication, which holds the wait for
    others; so the rank that keeps the others waiting is the one that communicates least.
    """
    own = left.by_step("step_ms") - left.by_step("exposed_communication_ms")
    if own.shape[1] < 2:
        raise NotJudged("a trace of one rank has no other to be slower than")
    slowest = int(own.median().idxmax())
    others = own.drop(columns=slowest).median(axis=1)
    ratios = own[slowest] / others
    ratio, often = float(ratios.median()), float((own.idxmax(axis=1) == slowest).mean())
    if ratio < SLOW_RATIO or often < SLOWEST_OFTEN:
        return None
    step_ms = float(left.slowest_ms.median())
    over = {}
    for name, column in (("computation", "computation_ms"), ("idle", "idle_ms")):
        medians = left.by_step(column).median()
        over[name] = float(medians[slowest] - medians.drop(slowest).median())
    part = max(over, key=over.get)
    level, reason = confidence(ratio, SLOW_RATIO, standard_error(ratios), len(ratios))
    look = (
        "The device (clocks, temperature, other jobs), or more work for this rank."
        if part == "computation"
        else "Its loader, its Python between launches, logging or checkpoints on this rank alone."
    )
    return Verdict(
        cause="slow-rank",
        title=f"rank {slowest} keeps the others waiting",
        evidence=(
            f"Rank {slowest} takes {own[slowest].median():.3g} ms of a step for itself, the others "
            f"{others.median():.3g} ms: {ratio:.2f} times as long, and the longest in "
            f"{percent(often)} of {len(ratios)} steps.",
            f"It is {part}: {over[part]:.3g} ms more than the others'.",
        ),
        lost_share=min(0.99, float((own[slowest] - others).median()) / step_ms),
        confidence=level,
        reason=f"its time over the others': {reason}",
        change=f"Look at: {look[0].lower()}{look[1:]}",
    )


def exposed_communication(left: LeftBehind) -> Verdict | None:
    """Judges whether communication that nothing hides takes much of a step.

    The rank that comes last waits for nobody: the shortest exposed communication of a step is what
    the exchange itself takes.
    """
    exposed = left.by_step("exposed_communication_ms")
    shares = exposed.min(axis=1) / left.slowest_ms
    share, whole = float(shares.median()), left.by_step("communication_ms").min(axis=1).median()
    if exposed.shape[1] < 2 and not share:
        raise NotJudged("a trace of one rank that exchanges nothing")
    if share < EXPOSED_SHARE:
        return None
    level, reason = confidence(share, EXPOSED_SHARE, standard_error(shares), len(shares))
    operations = _operations(left, rank=int(exposed.median().idxmin()))
    return Verdict(
        cause="exposed-communication",
        title="communication that nothing hides takes much of a step",
        evidence=(
            f"Collectives take {whole:.3g} ms of a step on the rank that communicates least, "
            f"{exposed.min(axis=1).median():.3g} ms of it while nothing is computed: "
            f"{percent(share)} of the step.",
            *_operation_sentences(operations),
        ),
        lost_share=share,
        confidence=level,
        reason=f"share of the step: {reason}",
        change=_less_exposed(operations),
    )


def profiled_step(left: LeftBehind) -> str:
    """Returns where a step's time goes in the traces, as a sentence without its full stop."""
    step_ms = left.slowest_ms.median()
    parts = {
        "computation": "computation_ms",
        "exposed communication": "exposed_communication_ms",
        "idle": "idle_ms",
    }
    shares = ", ".join(
        f"{name} {percent(left.by_step(column).mean(axis=1).median() / step_ms)}"
        for name, column in parts.items()
    )
    return f"A step of {step_ms:.3g} ms under the profiler: {shares}"


def _operations(left: LeftBehind, rank: int) -> pd.DataFrame:
    """Returns the median step's communication by operation on one rank, the most exposed first.

    Columns: calls, communication_ms, exposed_ms. A step without an operation has none of it.
    """
    own = left.operations[left.operations["rank"] == rank]
    steps = left.steps.loc[left.steps["rank"] == rank, "step"]
    columns = ["calls", "communication_ms", "exposed_ms"]
    medians = {
        name: rows.set_index("step")[columns].reindex(steps).fillna(0).median()
        for name, rows in own.groupby("operation")
    }
    return pd.DataFrame(medians, index=columns).T.sort_values("exposed_ms", ascending=False)


def _operation_sentences(operations: pd.DataFrame) -> Iterator[str]:
    """Yields a sentence on what the communication consists of."""
    parts = [
        f"{counted(row['calls'], name)} {row['communication_ms']:.3g}"
        f" ms ({row['exposed_ms']:.3g} exposed)"
        for name, row in operations.iterrows()
    ]
    if parts:
        yield f"In a step there: {', '.join(parts)}."


def _less_exposed(operations: pd.DataFrame) -> str:
    """Returns what hides or shortens the exchange: of shards where gradients are scattered."""
    if SCATTER not in operations.index:
        return (
            "More work for each exchange (accumulation inside no_sync(), a larger batch), fewer "
            "bytes (bf16 gradients), or a faster network; ddplab diagnose --verify on the script "
            "says what each would gain."
        )
    if operations.index[0] == GATHER:
        return (
            "Gather earlier or less: fully_shard() on each block, so that one is gathered while "
            "the one before computes; reshard_after_forward=False, which keeps the parameters and "
            "gathers once a step; MixedPrecisionPolicy(param_dtype=torch.bfloat16), which halves "
            "the bytes; DDP, where the model fits; or a larger batch."
        )
    return (
        "Scatter less: accumulation with set_requires_gradient_sync(False) on all but the last "
        "micro-batch; MixedPrecisionPolicy(reduce_dtype=torch.bfloat16), which halves the bytes; "
        "or a larger batch."
    )


def idle_device(left: LeftBehind) -> Verdict | None:
    """Judges whether a GPU waits for its host for much of a step."""
    idle = left.by_step("idle_ms")
    if not left.on_device:
        raise NotJudged("on a CPU, idle time holds Python and the profiler itself")
    shares = idle.min(axis=1) / left.slowest_ms
    share = float(shares.median())
    if share < IDLE_SHARE:
        return None
    level, reason = confidence(share, IDLE_SHARE, standard_error(shares), len(shares))
    return Verdict(
        cause="idle-device",
        title="the GPU waits for its host",
        evidence=(
            f"On every rank the device neither computes nor communicates for at least "
            f"{percent(share)} of a step.",
        ),
        lost_share=share,
        confidence=level,
        reason=f"share of the step: {reason}; the profiler itself slows the host",
        change="Look for a slow loader, .item() and other waits for the device, and many small "
        "kernels (torch.compile, larger batches).",
    )


def nccl_connections(left: LeftBehind) -> Verdict | None:
    """Judges whether NCCL connects ranks by slower ways than it could, and what it warned of."""
    if left.log is None:
        raise NotJudged("no log of NCCL (NCCL_DEBUG=INFO)")
    log, found = left.log, []
    shared = log.pairs("SHM", one_host=True)
    if shared:
        found.append(
            Signal(
                f"{len(shared)} pairs of GPUs of one host exchange through host memory "
                f"(via SHM), such as ranks {shared[0][0]} and {shared[0][1]}.",
                "let them copy directly: nvidia-smi topo -m shows how they are connected; unset "
                "NCCL_P2P_DISABLE and NCCL_P2P_LEVEL, turn off ACS",
                "medium",
            )
        )
    if inside := log.pairs("NET", one_host=True):
        found.append(
            Signal(
                f"{len(inside)} pairs of GPUs of one host exchange over the network, such as ranks "
                f"{inside[0][0]} and {inside[0][1]}.",
                "unset NCCL_P2P_DISABLE and NCCL_SHM_DISABLE; a larger /dev/shm for containers",
                "high",
            )
        )
    if sockets := log.pairs("NET/Socket", one_host=False):
        why = "; NCCL found no InfiniBand" if log.no_infiniband else ""
        found.append(
            Signal(
                f"{len(sockets)} pairs of ranks of two hosts exchange over sockets (NET/Socket)"
                f"{why}.",
                "use InfiniBand or RoCE where there is some (ibstat; the container needs "
                "/dev/infiniband), or the fastest interface: NCCL_SOCKET_IFNAME",
                "medium",
            )
        )
    for warning, count in log.warnings.most_common(MOST_WARNINGS):
        found.append(Signal(f"NCCL warned {count} times: {warning}.", "look it up", "low"))
    return of_signals("nccl-connections", "NCCL connects ranks by slow ways, or warns", found)


CAUSES: dict[str, Callable[[LeftBehind], Verdict | None]] = {
    "hang": hang,
    "slow-rank": slow_rank,
    "exposed-communication": exposed_communication,
    "idle-device": idle_device,
    "nccl-connections": nccl_connections,
}
