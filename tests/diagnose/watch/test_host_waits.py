"""Waits of the host for its GPU are counted by their line, and a script notices nothing of it."""

from __future__ import annotations

import ctypes
import functools
import sys
import warnings
from pathlib import Path
from types import FrameType

import pytest
import torch
from ddplab_watch import host_waits
from ddplab_watch.record import Record
from ddplab_watch.stacks import Stacks

WAITS = b"called a synchronizing CUDA operation (Triggered internally at CUDAFunctions.cpp:1.)"
PROTOTYPE = b"Synchronization debug mode is a prototype feature and does not yet detect all"


warn = ctypes.PyDLL(None).PyErr_WarnEx
warn.argtypes = (ctypes.py_object, ctypes.c_char_p, ctypes.c_ssize_t)
warn_of_wait = functools.partial(warn, UserWarning, WAITS, 1)
"""Warns as torch does from C++: the warning is of the innermost line of Python."""


@pytest.fixture
def modes(monkeypatch: pytest.MonkeyPatch) -> list:
    """Pretends a GPU; returns the modes that were set, which warn once as torch does."""
    found: list = ["default"]

    def set_mode(mode: str) -> None:
        if len(found) == 1:
            warn(UserWarning, PROTOTYPE, 1)
        found.append(mode)

    monkeypatch.setattr(torch.cuda, "get_sync_debug_mode", lambda: int(found[-1] == "warn"))
    monkeypatch.setattr(torch.cuda, "set_sync_debug_mode", set_mode)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device=None: device)
    return found


def counting(phase: str = "forward", named=None) -> host_waits.HostWaits:
    def line(frame: FrameType) -> tuple[str, str]:
        return frame.f_code.co_name, ""

    waits = host_waits.HostWaits(lambda: phase, named or line)
    waits.install()
    return waits


def read_a_loss() -> None:
    warn_of_wait()


def test_waits_are_counted_by_phase_and_line(modes) -> None:
    waits = counting()
    read_a_loss()
    read_a_loss()
    assert waits.taken() == 2
    torch.cuda.synchronize()
    assert waits.taken() == 1
    waits.remove()
    read = ("forward", "read_a_loss", "")
    here = sys._getframe().f_code.co_name
    assert waits.places == {read: 2, ("forward", here, "torch.cuda.synchronize"): 1}
    assert modes == ["default", "warn", "default"]


def test_the_line_is_the_scripts_and_the_call_the_librarys(modes, tmp_path: Path) -> None:
    library = tmp_path / "lib" / "python3" / "site-packages" / "lightly.py"
    library.parent.mkdir(parents=True)
    library.write_text("def logged(operator):\n    operator()\n")
    scope: dict = {}
    exec(compile(library.read_text(), str(library), "exec"), scope)
    record = Record(tmp_path / "rank0.jsonl")
    waits = counting(named=Stacks(record, lambda: "", lambda: (0, 0.0)).named)
    script = compile("logged(operator)\n", str(tmp_path / "train.py"), "exec")
    exec(script, {"logged": scope["logged"], "operator": warn_of_wait})
    waits.remove()
    [((_, place, call), count)] = waits.places.items()
    assert place.startswith(f"{tmp_path / 'train.py'}:1")
    assert call == "lightly.logged"
    assert count == 1


def test_other_warnings_come_through_and_once(modes) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("default")
        shown: list = []
        warnings.showwarning = lambda message, *_: shown.append(str(message))

        def deprecated() -> None:
            warnings.warn("old", DeprecationWarning, stacklevel=1)

        deprecated()
        waits = counting()
        deprecated()  # shown before, and not again
        warnings.warn("its own", UserWarning, stacklevel=1)
        read_a_loss()
        waits.remove()
        deprecated()
    assert shown == ["old", "its own"]


def test_a_script_that_makes_errors_of_warnings_goes_on(modes) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        waits = counting()
        read_a_loss()
        waits.remove()
        assert waits.taken() == 1
        assert host_waits.ALWAYS not in warnings.filters
        with pytest.raises(UserWarning):
            warnings.warn("its own", UserWarning, stacklevel=1)


def test_a_context_that_outlives_the_watch_leaves_nothing_that_counts(modes) -> None:
    waits = counting()
    with warnings.catch_warnings(record=True):
        waits.remove()
    assert not waits.places
    read = warnings.showwarning
    with pytest.warns(UserWarning, match="its own"):
        warnings.warn("its own", UserWarning, stacklevel=1)
    assert warnings.showwarning is read


def test_a_mode_of_the_scripts_own_is_left_alone(modes) -> None:
    modes.append("warn")
    waits = counting()
    waits.remove()
    assert "by itself" in waits.unseen
    assert modes == ["default", "warn"]
