"""Which rank of a job failed by itself, and of what, by exceptions and by torchrun's summary.

What only followed (a rank whose peer left, or that torchrun ended) is told apart from what came
first: by what it says, never by clocks of two hosts.
"""

from __future__ import annotations

import re
import signal
from collections.abc import Sequence

from common.diagnose.evidence.case import VALIDITY, Verdict
from common.diagnose.evidence.evidence import NotJudged
from common.diagnose.evidence.left_behind import LeftBehind
from common.diagnose.evidence.measured_surroundings import named_ranks
from common.traces.logs.job_output import Failure, JobOutput, Raised

NO_OUTPUT = "no output of ranks or torchrun that tells of a failure"
FOLLOWED = re.compile(
    r"[Cc]onnection (?:closed|reset) by|[Bb]roken pipe|communicator was aborted|ncclRemoteError"
    r"|remote process exited|Watchdog caught|Socket Timeout|failed to pass monitoredBarrier"
    r"|Timed out waiting|Application timeout caused|KeyboardInterrupt"
)
"""Errors of ranks whose peers left, or never came."""
USE_ALL = (
    "Use every parameter in the loss of each step, freeze those that have no part "
    "(requires_grad_(False)), or pass find_unused_parameters=True."
)
REMEDIES: tuple[tuple[str, str], ...] = (
    (
        r"OutOfMemory|CUDA out of memory|HIP out of memory",
        "Less memory on that rank: a smaller batch, activation checkpointing, shards (FSDP); "
        "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True where much is reserved and not used.",
    ),
    (
        r"DataLoader worker.*(?:Bus error|killed)|shared memory segment|/dev/shm",
        "A larger /dev/shm (docker run --shm-size=8g, an emptyDir of medium Memory), or fewer "
        "loader workers.",
    ),
    (r"finished reduction in the prior iteration", USE_ALL),
    (
        r"address already in use|EADDRINUSE",
        "Another port (--master-port, or --standalone), or end the job that still holds it.",
    ),
    (
        r"Duplicate GPU",
        "A GPU for each rank: torch.cuda.set_device(int(os.environ['LOCAL_RANK'])) before the "
        "process group is made, and no more ranks than GPUs.",
    ),
    (
        r"uncorrectable ECC|NVLink|hardware error|CUDA error: unspecified launch",
        "Take that GPU out (nvidia-smi -q -d ECC,ROW_REMAPPER; dmesg | grep Xid) and start again.",
    ),
    (
        r"illegal memory access|device-side assert",
        "Run that rank with CUDA_LAUNCH_BLOCKING=1: the traceback then names the operation; an "
        "index out of range (labels, token ids) is the usual one.",
    ),
)
MOST_SHOWN = 280
"""Characters of an exception that are shown."""
SIGNALS = {
    signal.SIGKILL: "Somebody killed it, most often the kernel for want of host memory: dmesg -T | "
    "grep -i kill, or the cgroup's memory.events; fewer loader workers, less kept in host memory.",
    signal.SIGBUS: "Shared memory ran out: a larger /dev/shm (docker run --shm-size=8g), or fewer "
    "loader workers.",
    signal.SIGSEGV: "A library crashed: python -X faulthandler on that rank shows where; versions "
    "of CUDA, NCCL and torch that belong together.",
    signal.SIGABRT: "Look above in that rank's output: an assertion, or a watchdog that ended it.",
}


def failed_rank(job: LeftBehind) -> Verdict | None:
    """Judges which rank failed by itself, and of what."""
    output = job.printed.output
    if not output.says_anything:
        raise NotJudged(NO_OUTPUT)
    raised = [error for error in output.raised if not _followed(error, output)]
    ended = [failure for failure in output.failures if _ended_by_itself(failure, output)]
    if not (raised or ended or output.out_of_memory):
        return None
    ranks = dict.fromkeys([*(f.rank for f in ended), *(e.rank for e in raised)])
    named = [rank for rank in ranks if rank is not None]
    sentences = [
        f"Slurm says that a task ran out of host memory {where}."
        for where in output.out_of_memory[:1]
    ]
    sentences += [_failure_sentence(failure) for failure in ended]
    sentences += [_raised_sentence(error) for error in _without_repeats(raised)]
    roots = [failure for failure in ended if failure.is_root]
    is_one = len(named) == 1
    followed = len(ended) < len(output.failures) or len(raised) < len(output.raised)
    reason = "the other ranks only lost their peer" if followed else "no other rank tells of one"
    who = ended[0].name if is_one and ended else named_ranks(named) if named else "a rank"
    return Verdict(
        cause="failed-rank",
        title=f"{who[0].lower()}{who[1:]} failed by {'itself' if len(named) < 2 else 'themselves'}",
        evidence=sentences,
        lost_share=None,
        confidence="high" if is_one else "medium",
        reason=reason if is_one else "which was first is not sure",
        change=_remedy(output, raised, next(iter([*roots, *ended]), None)),
        group=VALIDITY,
    )


def _followed(error: Raised, output: JobOutput) -> bool:
    """Returns True for an error that another cause explains, or another rank's end."""
    if re.search(r"Detected mismatch between collectives", error.text):
        return bool(output.mismatches)
    if re.search(r"finished reduction in the prior iteration", error.text):
        return bool(output.unused)
    return bool(FOLLOWED.search(error.text))


def _without_repeats(raised: Sequence[Raised]) -> list[Raised]:
    """Returns exceptions, of equal ones the first: all ranks may raise the same."""
    by_text: dict[str, Raised] = {}
    for error in raised:
        by_text.setdefault(f"{error.kind}{error.caller}", error)
    return list(by_text.values())


def _ended_by_itself(failure: Failure, output: JobOutput) -> bool:
    """Returns True if no other rank, no watchdog and no launcher ended a rank."""
    if failure.exit_code in (-signal.SIGTERM, -signal.SIGINT):
        return False
    of_rank = [e for e in output.raised if e.rank == failure.rank and failure.label == "rank"]
    if of_rank and all(_followed(error, output) for error in of_rank):
        return False
    waited = {timeout.rank for timeout in output.timeouts}
    if failure.exit_code == -signal.SIGABRT and failure.rank in waited:
        return False
    # A rank that exits with 1 and whose exception is not in the output may have lost its peer.
    killed = any(f.exit_code < 0 and f.exit_code != -signal.SIGTERM for f in output.failures)
    unexplained = failure.exit_code > 0 and not of_rank
    return not (unexplained and (killed or output.raised or output.timeouts or output.absent))


def _failure_sentence(failure: Failure) -> str:
    first = ", the first failure that torchrun saw" if failure.is_root else ""
    code = failure.exit_code
    how = f"by {signal.Signals(-code).name}" if _is_signal(code) else f"with exit code {code}"
    process = f" (process {failure.pid})" if failure.pid else ""
    name = f"{failure.name[0].upper()}{failure.name[1:]}"
    return f"{name}{process} ended {how}{first} {failure.where}."


def _is_signal(code: int) -> bool:
    return -code in {int(number) for number in signal.Signals}


def _raised_sentence(error: Raised) -> str:
    who = "A rank" if error.rank is None else f"Rank {error.rank}"
    caller = f" at {error.caller}" if error.caller else ""
    text = error.text.removesuffix(".")
    text = f"{text[:MOST_SHOWN]}…" if len(text) > MOST_SHOWN else text
    return f"{who} raised {text}{caller} {error.where}."


def _remedy(output: JobOutput, raised: Sequence[Raised], failure: Failure | None) -> str:
    if output.out_of_memory:
        return SIGNALS[signal.SIGKILL]
    for error in raised:
        for pattern, remedy in REMEDIES:
            if re.search(pattern, error.text):
                return remedy
    if not raised and failure is not None and _is_signal(failure.exit_code):
        number = signal.Signals(-failure.exit_code)
        return SIGNALS.get(number, f"Find out who sent {number.name} to that process.")
    if raised:
        return "Mend what the exception says; the other ranks' errors follow from it."
    return (
        "Decorate main with torch.distributed.elastic.multiprocessing.errors.record, so that the "
        "summary holds the traceback, or read that rank's own output (torchrun --log-dir, --tee 3)."
    )
