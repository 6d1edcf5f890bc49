"""Which process group NCCL gets, which NCCL is loaded, and the live test of overlap; no GPU needed.

The oracles are torch's own registry of backends, the text in the file of the library, and a process
group whose get_future() is known to block or not.
"""

from __future__ import annotations

import json
import mmap
import re
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from common.errors import RunFailed
from common.runtime.group import nccl
from common.runtime.group.network import GROUP_CHOICE
from common.runtime.group.overlap_probe import try_group
from common.runtime.machine.gpus import build_versions

HERE = Path(__file__).parent
REGISTERED = """
import torch.distributed as dist
dist.Backend._ensure_backend_registered("nccl")
print(dist.Backend._plugins["NCCL"].creator_fn.__name__)
"""
OLD, NEW = "_create_nccl_process_group", "_create_nccl2_process_group"


@pytest.mark.skipif(
    not hasattr(dist, "ProcessGroupNCCL2"), reason="this torch has one process group over NCCL"
)
@pytest.mark.parametrize(
    ("ours", "chosen", "creator"), [(False, None, NEW), (True, None, OLD), (True, "1", NEW)]
)
def test_runs_over_nccl_get_the_old_group_unless_the_user_chose(
    rank_server, tmp_path, ours, chosen, creator
):
    script, flags = HERE / "pretended_gpus_worker.py", ("--how", "registered")
    if not ours:
        script, flags = tmp_path / "registered.py", ()
        script.write_text(REGISTERED)
    done = rank_server.succeed(script, *flags, variables={GROUP_CHOICE: chosen} if chosen else None)
    assert done.stdout[0].splitlines()[0] == creator


@pytest.mark.parametrize(
    ("found", "chosen", "lines"),
    [
        ("ProcessGroupNCCL2", "0", 1),  # used before in this process, or the old one is gone
        ("ProcessGroupNCCL2", "1", 0),  # as the user wants it
        ("ProcessGroupNCCL", "0", 0),
        (nccl.UNKNOWN_GROUP, "0", 0),
    ],
)
def test_a_choice_without_effect_is_told_in_a_line(caplog, found, chosen, lines):
    nccl.warn_of_group(found, {GROUP_CHOICE: chosen})
    assert [found in record.getMessage() for record in caplog.records] == [True] * lines


def test_the_live_test_tells_a_get_future_that_blocks_from_one_that_does_not(rank_server):
    done = rank_server.succeed(HERE / "slow_group_worker.py")
    found = json.loads(done.stdout[0])
    assert found == {"group": "SlowGroup", "False": False, "True": True}


@pytest.mark.slow
def test_a_live_test_that_fails_says_why(monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    with pytest.raises(RunFailed, match="device cuda"):
        try_group()


def test_the_class_of_a_group_is_known_also_inside_a_wrapper(monkeypatch):
    wrapped = SimpleNamespace(wrapped_pg=dist.HashStore())
    for backend in (wrapped, wrapped.wrapped_pg):
        group = SimpleNamespace(_get_backend=lambda _, backend=backend: backend)
        monkeypatch.setattr(dist, "group", SimpleNamespace(WORLD=group))
        assert nccl.group_class(torch.device("cpu")) == "HashStore"
    monkeypatch.setattr(dist, "group", SimpleNamespace(WORLD=object()))  # the name has moved
    assert nccl.group_class(torch.device("cpu")) == nccl.UNKNOWN_GROUP


def test_the_loaded_nccl_is_the_one_whose_file_is_mapped():
    maps = Path("/proc/self/maps")
    mapped = maps.read_text().splitlines() if maps.exists() else []
    files = {line.split(maxsplit=5)[5] for line in mapped if "/libnccl.so" in line}
    if not files:
        assert nccl.loaded_version() is None or dist.is_nccl_available()
        pytest.skip("no libnccl of its own in this process")
    versions = []
    for library in files:  # two with LD_PRELOAD
        with open(library, "rb") as file:
            text = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
            found = re.search(rb"NCCL version (\d+)\.(\d+)\.(\d+) compiled", text)
        versions.append(tuple(map(int, found.groups())))
    assert nccl.loaded_version() in versions


def test_a_record_has_the_loaded_nccl_and_the_built_where_they_differ(monkeypatch):
    monkeypatch.setattr(torch.cuda.nccl, "version", lambda: (2, 29, 3))
    monkeypatch.setattr(torch._C, "_nccl_version", None, raising=False)
    for loaded, found in (
        ((2, 30, 7), {"nccl": "2.30.7", "build_nccl": "2.29.3"}),
        ((2, 29, 3), {"nccl": "2.29.3"}),
        (None, {"nccl": "2.29.3"}),  # not to be had: the best that is known
    ):
        monkeypatch.setattr(nccl, "loaded_version", lambda loaded=loaded: loaded)
        assert build_versions() == {"build_cuda": torch.version.cuda} | found
    monkeypatch.delattr(torch._C, "_nccl_version")  # a build for CPUs
    assert build_versions()["nccl"] is None


@pytest.mark.parametrize(
    ("chosen", "loaded", "shares"),
    [
        ("1", (2, 30, 7), True),
        ("1", (3, 0, 1), True),
        ("1", (2, 29, 9), False),
        ("1", None, False),
        ("0", (2, 30, 7), False),
        (None, (2, 30, 7), False),
    ],
)
def test_ranks_share_a_gpu_where_nccl_is_new_enough_and_told_to(
    monkeypatch, chosen, loaded, shares
):
    monkeypatch.setattr(nccl, "loaded_version", lambda: loaded)
    assert nccl.shares_gpus({} if chosen is None else {nccl.SHARING: chosen}) is shares
