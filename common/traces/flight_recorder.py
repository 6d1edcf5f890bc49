"""Reads PyTorch's flight recorder: which collective each rank came to, and who never came.

A rank of a job that hangs dumps its last collectives (``TORCH_FR_BUFFER_SIZE`` or
``TORCH_NCCL_TRACE_BUFFER_SIZE``, and a watchdog's timeout), as a pickle or, through the debug
server, as JSON. The collectives of a process group are numbered, alike on all ranks, so that the
rank whose last number is behind is the one that the others wait for.
"""

from __future__ import annotations

import io
import json
import pickle
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from common.errors import UserError

LIBRARIES = ("site-packages", "dist-packages", "lib/python", "torch/", "<")
"""Parts of the file names of frames that are no user's code."""
COMPLETED = "completed"
MOST_BYTES = 2**30
AT_END = re.compile(r"(\d+)(?:\.[A-Za-z]+)*$")
OF_A_TRACE = (b"schemaVersion", b"traceEvents")
"""A profiler's trace has one of these at its beginning, and names process groups, too."""


@dataclass(frozen=True)
class Call:
    """A collective that a rank has called.

    Attributes:
        number: number of the collective in its group, from 1 on.
        name: such as ``nccl:all_reduce``.
        sizes: sizes of the input tensors.
        is_done: the rank saw its end.
        caller: file, line and function that called it; empty where no stack was kept.
        where: place of the line that tells of it, where it is no dump's.
    """

    number: int
    name: str
    sizes: str
    is_done: bool
    caller: str
    where: str = ""

    @property
    def what(self) -> str:
        """Returns the collective and its sizes."""
        return f"{self.name} {self.sizes}".strip()


@dataclass(frozen=True)
class Dump:
    """The record of one rank.

    Attributes:
        rank: rank in the job, from the file's name.
        groups: name of a process group → its ranks; empty where the dump does not say.
        calls: name of a process group → number → collective.
    """

    rank: int
    groups: Mapping[str, tuple[int, ...]]
    calls: Mapping[str, Mapping[int, Call]]

    def members(self, group: str) -> tuple[int, ...]:
        """Returns the ranks of a group; empty where the dump does not say.

        Over gloo the only group may have no name where its ranks are listed.
        """
        only = next(iter(self.groups.values())) if len(self.groups) == 1 else ()
        return self.groups.get(group, only)


@dataclass(frozen=True)
class Stop:
    """The place at which the ranks of a group stopped.

    Attributes:
        number: number of the collective that some ranks wait in.
        waiting: rank → that collective.
        behind: rank → the last collective that it called before; None where it called none.
        mismatched: ranks that called something else under that number.
        silent: ranks without a record.
    """

    group: str
    number: int
    waiting: Mapping[int, Call]
    behind: Mapping[int, Call | None]
    mismatched: Mapping[int, Call]
    silent: tuple[int, ...]


class _Plain(pickle.Unpickler):
    """Reads numbers, text, lists and dictionaries; a dump has nothing else."""

    def find_class(self, module: str, name: str) -> Any:
        """Refuses every class and function."""
        raise pickle.UnpicklingError(f"it holds {module}.{name}")


def is_dump(head: bytes) -> bool:
    """Returns True for a file that begins as a flight recorder's dump does."""
    if head.lstrip()[:1] not in (b"{", b"\x80") or any(mark in head for mark in OF_A_TRACE):
        return False
    return b"pg_config" in head or (b"entries" in head and b"version" in head)


def read_dump(path: Path) -> Dump:
    """Reads the dump of one rank.

    Raises UserError for a file that is none, holds more than plain data, or is not named by a rank.
    """
    suffix = AT_END.search(path.name)
    if suffix is None:
        raise UserError(f"{path}: no rank at the end of its name, as in nccl_trace_rank_0")
    try:
        if path.stat().st_size > MOST_BYTES:
            raise UserError(f"{path}: a flight recorder's dump of more than {MOST_BYTES >> 20} MiB")
        octets = path.read_bytes()
        text = octets.lstrip()[:1] == b"{"
        content = json.loads(octets) if text else _Plain(io.BytesIO(octets)).load()
        groups = {
            str(name): _ranks(group.get("ranks", ""))
            for name, group in (content.get("pg_config") or {}).items()
        }
        calls: dict[str, dict[int, Call]] = {}
        for entry in content.get("entries") or []:
            if not entry.get("is_p2p", False):
                call = _call(entry)
                calls.setdefault(str(entry["process_group"][0]), {})[call.number] = call
    except OSError as error:
        raise UserError(f"{path}: {error.strerror}") from None
    except (ValueError, KeyError, TypeError, AttributeError, EOFError, IndexError) as error:
        raise UserError(f"{path}: not a flight recorder's dump ({error})") from None
    except pickle.UnpicklingError as error:
        raise UserError(f"{path}: not a flight recorder's dump: {error}") from None
    return Dump(int(suffix.group(1)), groups, calls)


def _ranks(text: object) -> tuple[int, ...]:
    """Returns the ranks of a group, which a dump writes as a list or as its text."""
    return tuple(int(number) for number in re.findall(r"\d+", str(text)))


def _call(entry: Mapping[str, Any]) -> Call:
    sizes = " ".join(str(size) for size in entry.get("input_sizes") or [])
    return Call(
        number=int(entry["collective_seq_id"]),
        name=str(entry.get("profiling_name", "")),
        sizes=sizes,
        # Over gloo the state is not kept up to date; what has ended is retired.
        is_done=str(entry.get("state", "")).lower() == COMPLETED or bool(entry.get("retired")),
        caller=_caller(entry.get("frames") or []),
    )


def _caller(frames: Sequence[Mapping[str, Any]]) -> str:
    """Returns the innermost frame of the user's code."""
    for frame in frames:
        file = str(frame.get("filename", ""))
        if file and not any(part in file for part in LIBRARIES):
            return f"{file}:{frame.get('line', '?')} ({frame.get('name', '?')})"
    return ""


def stops(dumps: Sequence[Dump]) -> list[Stop]:
    """Returns where each group stopped; empty where every rank ended all that it had begun."""
    names = sorted({name for dump in dumps for name in dump.calls})
    stopped = []
    for name in names:
        members = next((ranks for dump in dumps if (ranks := dump.members(name))), None)
        by_rank = {dump.rank: dump.calls.get(name, {}) for dump in dumps}
        if members is None:
            members = tuple(sorted(rank for rank, calls in by_rank.items() if calls))
        if stop := _stop(name, members, by_rank):
            stopped.append(stop)
    return stopped


def _stop(
    name: str, members: Sequence[int], by_rank: Mapping[int, Mapping[int, Call]]
) -> Stop | None:
    """Returns where a group stopped: at the first collective that not all its ranks ended."""
    present = {rank: by_rank[rank] for rank in members if rank in by_rank}
    # A recorder keeps the last calls only: what is older than its oldest is not known.
    oldest = max((min(calls) for calls in present.values() if calls), default=0)
    newest = max((max(calls) for calls in present.values() if calls), default=0)
    for number in range(oldest, newest + 1):
        issued = {rank: calls[number] for rank, calls in present.items() if number in calls}
        behind = {
            rank: calls[max(calls)] if calls else None
            for rank, calls in present.items()
            if number not in calls
        }
        if not behind and all(call.is_done for call in issued.values()):
            continue
        kinds = [call.what for call in issued.values()]
        usual = max(dict.fromkeys(kinds), key=kinds.count, default="")  # of equals the first
        return Stop(
            group=name,
            number=number,
            waiting={rank: call for rank, call in issued.items() if call.what == usual},
            behind=behind,
            mismatched={rank: call for rank, call in issued.items() if call.what != usual},
            silent=tuple(rank for rank in members if rank not in by_rank),
        )
    return None
