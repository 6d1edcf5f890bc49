"""Under a limit an allocation fails and the process lives; available is the least of all limits."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import psutil
import pytest
import torch

from common.errors import UserError
from common.runtime.machine.memory_limit import (
    available_memory_bytes,
    is_out_of_memory,
    limit_memory,
)

linux = pytest.mark.skipif(sys.platform != "linux", reason="only Linux limits a process's memory")


def python(code: str) -> str:
    """Returns what a process of its own prints: a limit cannot be taken back."""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return done.stdout.strip()


@linux
def test_an_allocation_beyond_the_limit_fails_and_the_process_lives() -> None:
    # Two thirds of the limit fit, twice; together they do not.
    code = """
from common.runtime.machine.memory_limit import is_out_of_memory, limit_memory
limit_memory(300 << 20)
first = bytearray(200 << 20)
try:
    second = bytearray(200 << 20)
except MemoryError as error:
    print("refused", is_out_of_memory(error))
del first
print(len(bytearray(200 << 20)) >> 20)
"""
    assert python(code).split() == ["refused", "True", "200"]


@linux
def test_a_limit_below_what_is_held_is_a_mistake() -> None:
    with pytest.raises(UserError, match=r"memory_limit_gib 0\.0098: .* alone take .* GiB; give"):
        limit_memory(10 << 20)


@linux
def test_the_peak_is_this_process_own_and_can_begin_anew() -> None:
    # The parent holds more than the child ever does; getrusage would give the child its figure.
    code = """
import subprocess, sys
ballast = b"x" * (300 << 20)
child = '''
from common.runtime.machine.memory_limit import peak_resident_bytes, reset_peak_resident
block = b"x" * (100 << 20)
before = peak_resident_bytes() >> 20
del block
reset_peak_resident()
print(before, peak_resident_bytes() >> 20)
'''
subprocess.run([sys.executable, "-c", child], check=True)
"""
    before, after = map(int, python(code).split())
    assert 100 <= before < 300
    assert after < before - 90


@pytest.mark.parametrize(
    "error",
    [
        MemoryError(),
        torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB."),
        RuntimeError("CUDA error: out of memory"),
        RuntimeError(
            "[enforce fail at alloc_cpu.cpp:127] err == 0. DefaultCPUAllocator: can't allocate "
            "memory: you tried to allocate 16777216 bytes."
        ),
        RuntimeError("DefaultCPUAllocator: not enough memory: you tried to allocate 8 bytes."),
        OSError(12, "Cannot allocate memory"),
    ],
    ids=lambda error: str(error)[:30],
)
def test_memory_errors_are_recognised(error: Exception) -> None:
    assert is_out_of_memory(error)


@pytest.mark.parametrize(
    "error",
    [RuntimeError("mat1 and mat2 shapes cannot be multiplied"), ValueError("out of memory")],
)
def test_other_errors_are_not(error: Exception) -> None:
    assert not is_out_of_memory(error)


@linux
def test_torch_fails_as_recognised() -> None:
    # The real message of this torch: more than any machine has.
    with pytest.raises(RuntimeError) as caught:
        torch.empty(2**60, dtype=torch.uint8)
    assert is_out_of_memory(caught.value)


def test_without_a_cgroup_it_is_what_the_system_has(tmp_path: Path) -> None:
    assert 0 < available_memory_bytes(tmp_path) <= psutil.virtual_memory().total


GIB = 2**30
MIB = 2**20


def groups(root: Path, own: str, files: dict[str, dict[str, object]]) -> Path:
    """Makes the lines of a process's own groups, and files of folders below their mount."""
    (root / "proc/self").mkdir(parents=True)
    (root / "proc/self/cgroup").write_text(own)
    for folder, contents in files.items():
        (root / "sys/fs/cgroup" / folder).mkdir(parents=True, exist_ok=True)
        for name, content in contents.items():
            (root / "sys/fs/cgroup" / folder / name).write_text(f"{content}\n")
    return root


def test_a_limit_of_a_group_above_counts(tmp_path: Path) -> None:
    # cgroup v2: the job has 64 MiB of which 40 are used, 10 of them droppable; the step has none.
    stat = f"anon 5\ninactive_file {10 * MIB}\nactive_file 7"
    job = {"memory.max": 64 * MIB, "memory.current": 40 * MIB, "memory.stat": stat}
    files = {"job": job, "job/step": job | {"memory.max": "max"}}
    assert available_memory_bytes(groups(tmp_path, "0::/job/step\n", files)) == (64 - 40 + 10) * MIB


def test_version_1_and_a_container_that_sees_its_group_as_the_root(tmp_path: Path) -> None:
    # The path is the host's and is not there; the limit is at the mount's root.
    own = "9:name=systemd:/\n4:cpu,memory:/docker/abc\n0::/\n"
    stat = f"cache 1\ntotal_inactive_file {2 * MIB}"
    limit = {"memory.limit_in_bytes": 32 * MIB, "memory.usage_in_bytes": 12 * MIB}
    root = groups(tmp_path, own, {"memory": limit | {"memory.stat": stat}})
    assert available_memory_bytes(root) == (32 - 12 + 2) * MIB


def test_version_1_writes_a_huge_number_where_there_is_no_limit(tmp_path: Path) -> None:
    none = {"memory.limit_in_bytes": 2**63 - 4096, "memory.usage_in_bytes": 0, "memory.stat": ""}
    root = groups(tmp_path, "4:memory:/\n", {"memory": none})
    assert available_memory_bytes(root) <= psutil.virtual_memory().total
