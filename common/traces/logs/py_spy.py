"""Reads what ``py-spy dump --pid`` prints: where the threads of a process are."""

from __future__ import annotations

import re
from dataclasses import dataclass, field

from common.traces.flight_recorder import LIBRARIES
from common.traces.logs.text_lines import Line

PROCESS = re.compile(r"^Process (\d+): (.*)$")
THREAD = re.compile(r'^Thread (?:0x)?[0-9A-Fa-f]+ \((\w+(?:\+gil)?)\)(?:: "(.*)")?')
FRAME = re.compile(r"^    (\S.*?) \((.+?)(?::(\d+))?\)$")
RANK = re.compile(r"--?(?:node[_-])?(?:local[_-])?rank[= ](\d+)")
EXCHANGE = ("torch/distributed/", "torch/nn/parallel/distributed.py", "_fsdp", "deepspeed/comm")
BACKWARD = ("torch/autograd/",)
LOADER = ("torch/utils/data/",)
DEVICE = ("torch/cuda/",)


@dataclass(frozen=True)
class Frame:
    """A function that a thread is in."""

    function: str
    file: str
    number: str

    @property
    def text(self) -> str:
        """Returns file, line and function."""
        return f"{self.file}{f':{self.number}' if self.number else ''} ({self.function})"


@dataclass(frozen=True)
class Stack:
    """The main thread of a process, from its innermost frame outwards."""

    pid: int
    rank: int | None
    frames: list[Frame]
    where: str

    @property
    def name(self) -> str:
        """Returns the process as messages call it."""
        return f"process {self.pid}" if self.rank is None else f"rank {self.rank}"

    @property
    def caller(self) -> Frame | None:
        """Returns the innermost frame of the user's code."""
        users = (f for f in self.frames if not any(part in f.file for part in LIBRARIES))
        return next(users, None)

    @property
    def activity(self) -> str:
        """Returns what the thread is in: exchange, device, backward, loader or code."""
        for frame in self.frames:
            for name, parts in (
                ("exchange", EXCHANGE),
                ("device", DEVICE),
                ("backward", BACKWARD),
                ("loader", LOADER),
            ):
                if any(part in frame.file for part in parts):
                    return name
        return "code"


@dataclass
class PySpy:
    """A reader of lines."""

    stacks: list[Stack] = field(default_factory=list)
    _process: tuple[int, int | None, str] | None = None
    _thread: str = ""

    def take(self, line: Line) -> bool:
        """Takes a line; returns True if it is one of these."""
        if line.number == 1:
            self._process, self._thread = None, ""
        if match := PROCESS.match(line.text):
            named = RANK.search(match[2])
            rank = int(named[1]) if named else line.rank
            self._process, self._thread = (int(match[1]), rank, line.where), ""
            return True
        if self._process is None:
            return False
        if match := THREAD.match(line.text):
            pid, rank, where = self._process
            self._thread = match[2] or "MainThread"
            if self._thread == "MainThread" and not any(
                stack.pid == pid and stack.where == where for stack in self.stacks
            ):
                self.stacks.append(Stack(pid, rank, [], where))
            else:
                self._thread = "another"
            return True
        if (match := FRAME.match(line.text)) and self._thread:
            if self._thread == "MainThread":
                self.stacks[-1].frames.append(Frame(match[1], match[2], match[3] or ""))
            return True
        return line.text.startswith(("Python v", "        "))
