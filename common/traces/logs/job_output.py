"""Reads what ranks and torchrun write when a job fails: watchdogs, exceptions, elastic's summary.

The lines are those of PyTorch 2.0 and later: NCCL's watchdog (``ProcessGroupNCCL.cpp``), its report
of ranks out of step (``TraceUtils.h``), gloo's monitored barrier, what
``TORCH_DISTRIBUTED_DEBUG=DETAIL`` compares (``ProcessGroupWrapper.cpp``), DDP's reducer, and
``torch.distributed.elastic``.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field, replace

from common.traces.flight_recorder import LIBRARIES
from common.traces.logs.text_lines import Line

MEMBER = r"\[(?:PG (?P<group>[^\]]*?) )?Rank (?P<rank>\d+)\]"
TIMEOUT = re.compile(
    MEMBER + r":? Watchdog caught collective operation timeout: "
    r"Work\w+\((?P<work>(?:[^()]|\(ms\))*)(?P<end>\))?"
)
FIELD = re.compile(r"(\w+)(?:\(ms\))?=([^,)]+)")
PROGRESS = re.compile(
    MEMBER + r".*?[Ll]ast enqueued (?:NCCL )?work: (?P<enqueued>-?\d+),"
    r" last completed (?:NCCL )?work: (?P<completed>-?\d+)"
)
GROUP_NAME = re.compile(r"\(([^)]*)\)")
LAGGING = re.compile(r"ranks? \[([\d, ]+)\] (?:are|is) the lagging")
FINISHED = re.compile(r"\[([\d, ]+)\] finished collective #(\d+), but didn't join")
BARRIER = re.compile(
    r"\[Rank (\d+)\]:? Ranks? ([\d, ]+) failed to pass monitoredBarrier in (\d+) ms"
)
MISMATCH = re.compile(
    r"Detected mismatch between collectives on ranks\. Rank (\d+) is running "
    r"(?:collective|inconsistent collective): (.*?), but Rank (\d+) is running "
    r"(?:collective|inconsistent collective): (.*?)(?:\.Collectives differ.*)?$"
)
PRINT = re.compile(r"(\w+)=(\[[^\]]*\]|[^,()\[\]]+)")
EXIT = re.compile(r"exitcode\s*: (-?\d+) \(pid: (\d+)\)")
FAILED_AT_ONCE = re.compile(r"failed \(exitcode: (-?\d+)\) local_rank: (\d+) \(pid: (\d+)\)")
WORLD = re.compile(
    r"(?:global_world_sizes=\[(\d+)|\bWORLD_SIZE[=:] ?(\d+)\b|\bnranks (\d+)\b)", re.I
)
FRAME = re.compile(r'\s+File "([^"]+)", line (\d+), in (\S+)')
RAISED = re.compile(
    r"([A-Za-z_][\w.]*(?:Error|Exception|Interrupt|Exit|Failure|Timeout|Killed))(?::\s*(.*))?$"
)
LOCAL = "local rank"
SLURM = re.compile(
    r"srun: error: (\S+): tasks? (\d+)[\d,-]*: (Out Of Memory|Segmentation fault|Bus error)"
)
SLURM_SIGNALS = {"Out Of Memory": -9, "Segmentation fault": -11, "Bus error": -7}
MOST_OF_NCCL = 3
"""Lines after the first of an error of NCCL that say what it is."""
OF_TORCHRUN = ("ChildFailedError", "SignalException")
UNUSED = re.compile(
    r"Parameter(?P<what>s| indices) which did not receive grad for rank (?P<rank>\d+): "
    r"(?P<names>.*)"
)
NEEDLESS = "find_unused_parameters=True was specified in DDP constructor, but did not find any"
HINT = re.compile(
    "atchdog|enqueued|lagging|didn't join|monitoredBarrier|Detected mismatch|did not receive grad"
    "|did not find any|world_size|WORLD_SIZE|nranks|Traceback"
    "|oom_kill|oom-kill|srun: error|Root Cause|Failures:|failed \\(exit"
)
"""Lines with none of these are no report's, where none has begun before."""


@dataclass(frozen=True)
class Timeout:
    """A collective that a rank waited in until its watchdog gave up.

    Attributes:
        rank: rank of the job where a label names it, or of the group.
        group: name of the process group; empty where the line does not say.
        number: sequence number of the collective in its group.
        operation: such as ``ALLREDUCE``.
        elements: number of elements that went in; empty where the line does not say.
        limit_s: limit of the watchdog; 0 where the line was cut off.
        where: place of the line.
    """

    rank: int
    group: str
    number: int
    operation: str
    elements: str
    limit_s: float
    where: str


@dataclass(frozen=True)
class Progress:
    """The last collectives that a rank began and ended in a group."""

    rank: int
    group: str
    enqueued: int
    completed: int
    where: str


@dataclass(frozen=True)
class Mismatch:
    """Two ranks that call different collectives at once: rank → what it calls."""

    calls: dict[int, str]
    where: str


@dataclass(frozen=True)
class Failure:
    """A rank that ended with an error, by torchrun's summary, or by the line before it.

    ``label`` says what its number is: of the job, on its host, or of a task of Slurm's.
    """

    rank: int
    host: str
    exit_code: int
    pid: int
    is_root: bool
    where: str
    label: str = "rank"

    @property
    def name(self) -> str:
        """Returns the rank and its host as messages call it."""
        return f"{self.label} {self.rank}" + (f" on {self.host}" if self.host else "")


@dataclass(frozen=True)
class Raised:
    """An exception that ended a rank; ``rank`` is None where no label names it."""

    rank: int | None
    kind: str
    message: str
    caller: str
    where: str

    @property
    def text(self) -> str:
        """Returns the exception as Python prints it."""
        return f"{self.kind}: {self.message}" if self.message else self.kind


@dataclass
class JobOutput:
    """What a job's output says of its failure; a reader of lines.

    Attributes:
        timeouts: collectives that watchdogs gave up, the first line of each.
        progress: last collectives of ranks.
        absent: rank → (what it did not come to, place of the line), by PyTorch's own reports.
        mismatches: different collectives called at once.
        failures: ranks by torchrun's summary.
        raised: exceptions.
        unused: rank → (parameters without a gradient, place of the line).
        out_of_memory: places where Slurm says that a cgroup ran out of memory.
        needless_search: places where DDP says that no parameter is unused.
        world_size: most ranks that a line tells of; 0 where none does.
    """

    timeouts: list[Timeout] = field(default_factory=list)
    progress: list[Progress] = field(default_factory=list)
    absent: dict[int, tuple[str, str]] = field(default_factory=dict)
    mismatches: list[Mismatch] = field(default_factory=list)
    failures: list[Failure] = field(default_factory=list)
    raised: list[Raised] = field(default_factory=list)
    unused: dict[int, tuple[str, str]] = field(default_factory=dict)
    needless_search: list[str] = field(default_factory=list)
    out_of_memory: list[str] = field(default_factory=list)
    world_size: int = 0
    _block: dict[str, str] = field(default_factory=dict)
    _in_summary: bool = False
    _more_of_nccl: int = 0
    _is_root: bool = False
    _frames: dict[int | None, list[tuple[str, str, str]]] = field(default_factory=dict)

    @property
    def says_anything(self) -> bool:
        """Returns True if anything was read that a verdict may come from."""
        lists = (self.timeouts, self.absent, self.mismatches, self.failures, self.raised)
        return any((*lists, self.progress, self.unused, self.needless_search, self.out_of_memory))

    def take(self, line: Line) -> bool:
        """Takes a line; returns True if it is one of these."""
        if line.number == 1:
            self._block, self._frames = {}, {}
            self._in_summary, self._more_of_nccl = False, 0
        text = line.text
        if self._more_of_nccl and line.rank == self.raised[-1].rank:
            return self._go_on(text)
        if not (self._frames or self._in_summary or HINT.search(text)):
            return False
        if match := WORLD.search(text):
            self.world_size = max(self.world_size, int(match[1] or match[2] or match[3]))
        taken = self._take_exception(line) | self._take_hang(line)
        if "did not receive grad" in text and (match := UNUSED.search(text)):
            self._take_unused(match, line)
            return True
        if NEEDLESS in text:
            self.needless_search.append(line.where)
            return True
        if "oom_kill event" in text or "oom-kill event" in text:
            self.out_of_memory.append(line.where)
            return True
        if match := SLURM.search(text):
            code = SLURM_SIGNALS[match[3]]
            self.failures.append(
                Failure(int(match[2]), match[1], code, 0, False, line.where, "task")
            )
            return True
        return self._take_summary(line) or taken

    def _take_hang(self, line: Line) -> bool:
        taken = False
        for match in TIMEOUT.finditer(line.text):
            taken = True
            self._add_timeout(match, line)
        if match := PROGRESS.search(line.text):
            taken = True
            rank = int(match["rank"]) if line.rank is None else line.rank
            numbers = int(match["enqueued"]), int(match["completed"])
            self.progress.append(Progress(rank, _group(match), *numbers, line.where))
        if match := MISMATCH.search(line.text):
            taken = True
            calls = {int(match[i]): _fingerprint(match[i + 1]) for i in (1, 3)}
            self.mismatches.append(Mismatch(calls, line.where))
        if match := LAGGING.search(line.text):
            taken |= self._miss(match[1], "joined no collective", line)
        if match := FINISHED.search(line.text):
            taken |= self._miss(match[1], f"did not join collective {int(match[2]) + 1}", line)
        if match := BARRIER.search(line.text):
            limit = f"{int(match[3]) / 1e3:g} s"
            taken |= self._miss(match[2], f"did not pass a monitored barrier in {limit}", line)
        return taken

    def _add_timeout(self, match: re.Match, line: Line) -> None:
        fields = dict(FIELD.findall(match["work"]))
        if not fields.get("SeqNum", "").isdigit():
            return
        timeout = Timeout(
            rank=int(match["rank"]) if line.rank is None else line.rank,
            group=_group(match),
            number=int(fields["SeqNum"]),
            operation=fields.get("OpType", "a collective"),
            elements=fields.get("NumelIn", ""),
            limit_s=float(fields.get("Timeout", 0)) / 1e3 if match["end"] else 0.0,
            where=line.where,
        )
        key = (timeout.rank, timeout.number, timeout.operation, timeout.elements)
        before = {(t.rank, t.number, t.operation, t.elements) for t in self.timeouts}
        if key not in before:  # the line is repeated by the exception that ends the process
            self.timeouts.append(timeout)

    def _miss(self, ranks: str, what: str, line: Line) -> bool:
        for rank in re.findall(r"\d+", ranks):
            self.absent.setdefault(int(rank), (what, line.where))
        return True

    def _take_unused(self, match: re.Match, line: Line) -> None:
        names = match["names"].strip()
        if match["what"] == " indices":
            names = f"parameters number {names}"
        self.unused.setdefault(int(match["rank"]), (names[:300], line.where))

    def _take_exception(self, line: Line) -> bool:
        text, frames = line.text, self._frames.get(line.rank)
        if text.startswith("Traceback (most recent call last)"):
            self._frames[line.rank] = []
            return True
        if frames is None:
            return False
        if match := FRAME.match(text):
            frames.append((match[1], match[2], match[3]))
        elif text[:1].isspace():
            return True
        elif match := RAISED.match(text):
            del self._frames[line.rank]
            kind = match[1].rpartition(".")[2]
            if kind in OF_TORCHRUN:
                return False
            users = [f for f in frames if not any(part in f[0] for part in LIBRARIES)]
            caller = "{}:{} ({})".format(*users[-1]) if users else ""
            self.raised.append(Raised(line.rank, kind, match[2] or "", caller, line.where))
            self._more_of_nccl = MOST_OF_NCCL if "NCCL error in" in text else 0
        else:
            return False
        return True

    def _go_on(self, text: str) -> bool:
        """Adds a line to an error of NCCL, which says in its last lines what it is."""
        self._more_of_nccl -= 1
        error = self.raised[-1]
        self.raised[-1] = replace(error, message=f"{error.message} {text.strip()}")
        return True

    def _take_summary(self, line: Line) -> bool:
        text = line.text.strip()
        if text == "Failures:" or text.startswith("Root Cause (first observed failure)"):
            self._is_root, self._block = text != "Failures:", {}
            self._in_summary = True
            return True
        if match := FAILED_AT_ONCE.search(text):  # all that there is where the summary was cut off
            code, rank, pid = map(int, match.groups())
            self.failures.append(Failure(rank, "", code, pid, True, line.where, LOCAL))
            return True
        if not self._in_summary:
            return False
        if match := EXIT.match(text):
            self._add_failure(int(match[1]), int(match[2]), line)
            return True
        key, _, value = (part.strip() for part in text.partition(":"))
        if key in ("time", "host", "rank"):
            self._block[key] = value
        return key in ("time", "host", "rank", "error_file", "traceback")

    def _add_failure(self, code: int, pid: int, line: Line) -> None:
        rank = re.match(r"\d+", self._block.get("rank", ""))
        if rank is None:
            return
        self.failures = [f for f in self.failures if (f.label, f.pid) != (LOCAL, pid)]
        host = self._block.get("host", "")
        self.failures.append(Failure(int(rank[0]), host, code, pid, self._is_root, line.where))


def _group(match: re.Match) -> str:
    """Returns the name of a group: its description where that says more than its number."""
    text = match["group"] or ""
    name = GROUP_NAME.search(text)
    if name and name[1] not in ("", "default_pg"):
        return name[1]
    number = re.search(r"\d+", text)
    return number[0] if number else ""


def _fingerprint(text: str) -> str:
    """Returns a collective as ``TORCH_DISTRIBUTED_DEBUG=DETAIL`` describes it, in few words."""
    fields = dict(PRINT.findall(text))
    number = fields.get("SequenceNumber", "")
    parts = [
        fields.get("OpType", text[:60]),
        fields.get("TensorShape", ""),
        fields.get("TensorDtypes", ""),
        f"(number {number})" if number else "",
    ]
    return " ".join(part for part in parts if part)
