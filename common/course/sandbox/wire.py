"""Calls between a check and a student's code, which run in different processes.

Only data cross: numbers, text, lists, dictionaries, arrays, tensors, tables. They travel as JSON
and raw bytes, and nothing is unpickled. What is no data stays where it is, and the other side gets
a number for it: a ``Remote``, whose attributes and calls are requests. Either side may call while
it is being called, so that a check can hand a function to a student's.
"""

from __future__ import annotations

import json
import math
import socket
import struct
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

LARGEST_BYTES, TEXT_BYTES, BUFFERS = 2**26, 2**22, 2**14
"""Most bytes of a message and of its JSON (which takes many times its size when it is parsed), and
most buffers; a message with more is not read."""
HEAD = struct.Struct("<QI")
"""Bytes of the JSON, and number of buffers behind it."""
PLAIN = (bool, int, float, str)
ARRAY_KINDS = "biufU"
"""Kinds of NumPy arrays that may cross: truth values, integers, floats, text."""


class Raised(Exception):
    """An exception of the other side: its class, a colon, its message."""


class Ended(Exception):
    """The other side has ended, gives no answer in time, or talks nonsense."""


class Remote:
    """An object of the other side; its attributes and calls are requests."""

    def __init__(self, peer: Peer, number: int, kind: str) -> None:
        self.__dict__.update(_peer=peer, _number=number, _kind=kind)

    def __getattr__(self, name: str) -> Any:
        # Copy, pickle and the like ask for the first; a check's functions have no others.
        if name.startswith("__") or self._peer.modules is not None:
            raise AttributeError(name)
        return self._peer.request(["get", self._number, name])

    def __call__(self, *arguments: Any, **keywords: Any) -> Any:
        return self._peer.request(["call", self._number, arguments, keywords])

    def __repr__(self) -> str:
        return f"<{self._kind} of the other side>"


class Peer:
    """One end of a connection.

    Args:
        connection: stream socket to the other side.
        modules: makes a module of its name; None where the other side may ask for none, nor for
            attributes: it may then call only the functions that it was given.
    """

    def __init__(
        self, connection: socket.socket, modules: Callable[[str], Any] | None = None
    ) -> None:
        self.connection = connection
        self.modules = modules
        self.kept: list[Any] = []

    def module(self, name: str) -> Remote:
        """Returns a module of the other side."""
        return self.request(["module", name])

    def request(self, wanted: list) -> Any:
        """Sends a request and returns its answer; serves the other side's until it has come.

        Raises:
            Raised: the other side raised an exception.
            Ended: there is no answer.
        """
        self.send(wanted)
        while True:
            try:
                message = self.receive()
            except Ended:
                self.connection.close()  # so that nobody waits here again
                raise
            if message[0] == "value":
                return message[1]
            if message[0] == "raised":
                raise Raised(str(message[1]))
            self.answer(message)

    def serve(self) -> None:
        """Answers requests until the other side has gone."""
        while True:
            try:
                message = self.receive()
            except Ended:
                return
            self.answer(message)

    def answer(self, message: list) -> None:
        """Does what is asked for, and sends what came of it."""
        try:
            answer = ["value", self.do(*message)]
        except Ended:
            raise
        except Raised as error:  # of a function of the other side: as it was
            answer = ["raised", str(error)]
        except BaseException as error:  # whatever a student's code raises, SystemExit, too
            if self.modules is None and not isinstance(error, Exception):
                self.connection.close()  # the check's time is up, which is not for the student
                raise
            answer = ["raised", f"{type(error).__name__}: {error}"]
        self.send(answer)

    def do(self, what: str, *details: Any) -> Any:
        """Does one request."""
        if what == "call":
            number, arguments, keywords = details
            return self.kept[number](*arguments, **keywords)
        if self.modules is None:
            raise PermissionError(f"{what} is not answered here")
        if what == "module":
            return self.modules(details[0])
        return getattr(self.kept[details[0]], details[1])

    def send(self, message: list) -> None:
        """Sends a message. Raises Ended where nobody takes it."""
        buffers: list[bytes] = []
        text = json.dumps(self.pack(message, buffers)).encode()
        sizes = b"".join(struct.pack("<Q", len(buffer)) for buffer in buffers)
        try:
            self.connection.sendall(HEAD.pack(len(text), len(buffers)) + sizes + text)
            for buffer in buffers:
                self.connection.sendall(buffer)
        except OSError as error:
            raise Ended(why_broken(error)) from None

    def receive(self) -> list:
        """Returns the next message. Raises Ended where none comes, or none that can be read."""
        length, count = HEAD.unpack(self.read(HEAD.size))
        if length > TEXT_BYTES or count > BUFFERS:
            raise Ended("a message is too large")
        sizes = struct.unpack(f"<{count}Q", self.read(8 * count))
        if length + sum(sizes) > LARGEST_BYTES:
            raise Ended("a message is too large")
        text = self.read(length)
        buffers = [self.read(size) for size in sizes]
        try:
            message = self.unpack(json.loads(text), buffers)
        except Exception:  # whatever JSON, NumPy, torch and pandas say of somebody's bytes
            raise Ended("a message cannot be read") from None
        if not isinstance(message, list) or not message or not isinstance(message[0], str):
            raise Ended("a message is none")
        return message

    def read(self, count: int) -> bytes:
        """Reads so many bytes."""
        parts, missing = [], count
        while missing:
            try:
                part = self.connection.recv(min(missing, 2**20))
            except OSError as error:
                raise Ended(why_broken(error)) from None
            if not part:
                raise Ended("its process has ended")
            parts.append(part)
            missing -= len(part)
        return b"".join(parts)

    def pack(self, value: Any, buffers: list[bytes]) -> Any:
        """Returns what JSON can hold of a value; appends the bytes of its arrays."""
        if value is None or type(value) in PLAIN:
            return value
        if isinstance(value, list | tuple):
            kind = "list" if isinstance(value, list) else "tuple"
            return {kind: [self.pack(item, buffers) for item in value]}
        if isinstance(value, Mapping):
            items = [[self.pack(part, buffers) for part in item] for item in value.items()]
            return {"dict": items}
        if isinstance(value, Remote):
            return {"yours": value._number}
        if isinstance(value, Path):
            return {"path": str(value)}
        if isinstance(value, bytes):
            buffers.append(value)
            return {"bytes": len(buffers) - 1}
        if isinstance(value, np.generic):
            return self.pack(value.item(), buffers)
        if isinstance(value, np.ndarray) and value.dtype.kind in ARRAY_KINDS:
            buffers.append(np.ascontiguousarray(value).tobytes())
            return {"array": [value.dtype.str, list(value.shape), len(buffers) - 1]}
        if is_a(value, "torch", "Tensor"):
            return pack_tensor(value, buffers)
        if is_a(value, "pandas", "DataFrame"):
            columns = [[str(name), value[name].to_numpy()] for name in value]
            columns = [[n, c if c.dtype.kind in ARRAY_KINDS else list(c)] for n, c in columns]
            return {"table": self.pack(columns, buffers)}
        for kind in PLAIN:  # a class of somebody's own is what it is made of
            if isinstance(value, kind):
                return kind(value)
        self.kept.append(value)
        return {"mine": [len(self.kept) - 1, type(value).__name__]}

    def unpack(self, packed: Any, buffers: list[bytes | None]) -> Any:
        """Returns the value that ``pack`` was given; takes each buffer away that it has read."""
        if packed is None or type(packed) in PLAIN:
            return packed
        [(kind, content)] = packed.items()
        if kind in ("list", "tuple"):
            items = [self.unpack(item, buffers) for item in content]
            return items if kind == "list" else tuple(items)
        if kind == "dict":
            return {self.unpack(k, buffers): self.unpack(v, buffers) for k, v in content}
        if kind == "yours":
            return self.kept[content]
        if kind == "mine":
            return Remote(self, int(content[0]), str(content[1]))
        if kind == "path":
            return Path(content)
        if kind == "bytes":
            return taken(buffers, content)
        if kind == "array":
            return unpack_array(*content, buffers)
        if kind == "tensor":
            return unpack_tensor(*content, buffers)
        if kind == "table":
            return table_of(self.unpack(content, buffers))
        raise ValueError(kind)


def why_broken(error: OSError) -> str:
    """Returns why a connection broke, in words."""
    return "no answer in time" if isinstance(error, TimeoutError) else "its process has ended"


def is_a(value: Any, package: str, name: str) -> bool:
    """Returns True for an instance of a package's class, without importing the package."""
    classes = type(value).__mro__
    return any(kind.__name__ == name and kind.__module__.startswith(package) for kind in classes)


def taken(buffers: list[bytes | None], index: int) -> bytes:
    """Returns a buffer, once: a short message cannot name a long one again and again."""
    buffer, buffers[index] = buffers[index], None
    if buffer is None:
        raise ValueError(index)
    return buffer


def table_of(columns: list) -> Any:
    """Returns a table of columns that are as long as they were sent."""
    import pandas as pd

    if any(not isinstance(column, list) and np.ndim(column) != 1 for _, column in columns):
        raise ValueError("of a single value pandas makes a whole column")
    return pd.DataFrame(dict(columns))


def unpack_array(
    dtype: str, shape: list[int], index: int, buffers: list[bytes | None]
) -> np.ndarray:
    """Returns an array of its own memory."""
    kind = np.dtype(dtype)
    if kind.kind not in ARRAY_KINDS:
        raise ValueError(dtype)
    return np.frombuffer(taken(buffers, index), kind).reshape(shape).copy()


def pack_tensor(tensor: Any, buffers: list[bytes]) -> dict:
    """Packs a tensor of any dtype by its bytes."""
    import torch

    flat = tensor.detach().cpu().contiguous().flatten()
    buffers.append(flat.view(torch.uint8).numpy().tobytes() if flat.numel() else b"")
    dtype = str(tensor.dtype).removeprefix("torch.")
    return {"tensor": [dtype, list(tensor.shape), len(buffers) - 1]}


def unpack_tensor(dtype: str, shape: list[int], index: int, buffers: list[bytes | None]) -> Any:
    """Returns a tensor of its own memory."""
    import torch

    kind = getattr(torch, dtype)
    if not isinstance(kind, torch.dtype):
        raise ValueError(dtype)
    buffer = taken(buffers, index)
    if buffer:
        return torch.frombuffer(bytearray(buffer), dtype=kind).reshape(shape)
    if math.prod(shape):
        raise ValueError("elements without bytes would be whatever this process's memory held")
    return torch.empty(shape, dtype=kind)
