"""What the thread of the watch sees of the thread that trains."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import FrameType

import pandas as pd
import pytest
import torch
import torch.distributed as dist
from bundle_support import write_bundle
from ddplab_watch import stacks
from ddplab_watch.record import Record
from torch.distributed.nn.functional import all_reduce

from common.diagnose.causes.script import hang
from common.diagnose.evidence.bundle import read_bundle
from common.diagnose.evidence.bundle_tables import write_run
from common.diagnose.evidence.case import Case
from common.diagnose.evidence.evidence import open_evidence


def wait_here(seconds: float) -> None:
    time.sleep(seconds)


@pytest.fixture
def record(tmp_path: Path) -> Record:
    return Record(tmp_path / "bundle" / "rank0.jsonl")


def rows(record: Record, table: str) -> list[dict]:
    found = [json.loads(line) for line in record.path.read_text().splitlines()]
    return [row for row in found if row["table"] == table]


@pytest.fixture
def alone_group() -> Iterator[None]:
    """Makes a process group of this process alone."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def look(record: Record, seconds: float) -> None:
    """Records samples of a thread that waits between two steps."""
    looking = stacks.Stacks(record, lambda: "between", lambda: (0, 0.0))
    looking.counting = True
    looking.start()
    wait_here(seconds)
    looking.flush()
    looking.stop()


def test_a_phase_is_found_at_the_line_that_takes_it(record: Record) -> None:
    look(record, 0.6)
    table = pd.DataFrame(rows(record, "stacks"))
    most = table.loc[table["samples"].idxmax()]
    assert "test_stacks.py" in most["place"]
    assert most["place"].endswith("wait_here")
    assert most["phase"] == "between"


def test_a_step_that_does_not_end_is_noted_with_its_stack(record: Record, monkeypatch) -> None:
    monkeypatch.setattr(stacks, "STALLED_S", 0.2)
    record.add("about")
    record.write()
    done = [3]
    looking = stacks.Stacks(record, lambda: "forward", lambda: (done[0], 0.001))
    looking.counting = True
    looking.start()
    for noted, step in (("stalled", 3), ("resumed", 4)):
        done[0] = step
        while not rows(record, noted):
            wait_here(0.1)
            record.write()
    looking.stop()
    [stalled] = rows(record, "stalled")
    assert stalled["step"] == 3
    assert any("wait_here" in line for line in stalled["stack"])
    assert rows(record, "resumed")[0]["seconds"] > 0.2


def test_an_exchange_in_a_backward_pass_is_told_from_the_pass(record: Record, alone_group) -> None:
    """A norm that averages over ranks waits in both passes; one line calls all of the second."""
    looking = stacks.Stacks(record, lambda: "backward", lambda: (0, 0.0))
    seen = []

    def at_call(frame: FrameType, event: str, _: object) -> None:
        if event == "call" and frame.f_code is dist.all_reduce.__wrapped__.__code__:
            seen.append(looking.named(frame))

    value = torch.ones(3, requires_grad=True)
    sys.setprofile(at_call)
    try:
        all_reduce(value).sum().backward()
    finally:
        sys.setprofile(None)
    (forward, call), (backward, call_in_backward) = seen
    assert forward == backward
    assert call == "torch.distributed.nn.functional.all_reduce"
    assert call_in_backward == "torch.distributed.nn.functional.backward"


def test_names_can_be_hashed(tmp_path: Path) -> None:
    record = Record(tmp_path / "rank0.jsonl", anonymise=True)
    look(record, 0.3)
    assert "test_stacks" not in record.path.read_text()


def test_the_rank_that_does_not_wait_for_others_is_named(tmp_path: Path) -> None:
    folder = write_bundle(tmp_path / "b")
    ends = {
        0: [
            "torch/distributed/distributed_c10d.py:9 all_reduce: work.wait()",
            "train.py:7 train: ",
        ],
        1: ["train.py:31 augment: while True", "train.py:7 train: "],
    }
    for rank, stack in ends.items():
        row = {"table": "stalled", "step": 1, "seconds": 60.0, "phase": "backward", "unix_s": 1.0}
        path = folder / f"rank{rank}.jsonl"
        lines = [each for each in path.read_text().splitlines() if '"table": "end"' not in each]
        path.write_text("\n".join([*lines, json.dumps(row | {"stack": stack})]) + "\n")
    run = open_evidence(write_run(read_bundle(folder), tmp_path / "tables"))
    found = hang(Case(run))
    assert found.title == "rank 1 does not go on, and the others wait for it"
    assert any("train.py:31 augment" in sentence for sentence in found.evidence)
    assert found.confidence == "high"
