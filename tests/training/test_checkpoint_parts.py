"""What a rank keeps in memory for a checkpoint, and the thread that writes it."""

from __future__ import annotations

import json
import threading
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

from common.runtime import torch_internals
from common.runtime.group.process_group import process_group
from common.training.checkpoints import checkpoint
from common.training.checkpoints.checkpoint import Checkpoints

WORKER = Path(__file__).with_name("checkpoint_parts_worker.py")
STRATEGIES = ("DDP", "HYBRID_SHARD")


@pytest.fixture(scope="module")
def four_ranks(rank_server, tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("parts")
    rank_server.succeed(WORKER, folder, ranks=4)
    return folder


def tensors(nested: dict, prefix: str = "") -> dict[str, Tensor]:
    found = {}
    for name, value in nested.items():
        if isinstance(value, dict):
            found |= tensors(value, f"{prefix}{name}/")
        elif isinstance(value, Tensor):
            found[f"{prefix}{name}"] = value
    return found


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_ranks_keep_the_states_once_among_them_and_the_checkpoint_is_whole(four_ranks, strategy):
    expected = tensors(torch.load(four_ranks / f"{strategy}.pt"))
    kept = json.loads((four_ranks / f"{strategy}.json").read_text())
    total = sum(tensor.nbytes for tensor in expected.values())
    assert sum(kept) == total
    # No rank has much more than its quarter: that of GPT-2's largest tensors, the embeddings.
    largest = max(tensor.nbytes for tensor in expected.values())
    assert max(kept) <= total / 4 + largest
    whole = four_ranks / f"{strategy}-read.pt"
    dcp_to_torch_save(four_ranks / strategy / "step-00000001", whole)
    found = tensors(torch.load(whole, weights_only=False))
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in expected)


def test_on_a_gpu_the_writing_thread_is_on_its_own_device_before_it_writes(tmp_path, monkeypatch):
    events = []

    def note(what: object) -> None:
        events.append((what, threading.current_thread()))

    def start(*arguments: object) -> Path:
        note("write")
        return start_checkpoint(*arguments)

    start_checkpoint = checkpoint.start_checkpoint
    monkeypatch.setattr(checkpoint, "start_checkpoint", start)
    monkeypatch.setattr(torch.cuda, "set_device", note)
    stager = torch_internals.stager  # which warns of pinned memory without a GPU
    monkeypatch.setattr(torch_internals, "stager", lambda _: stager(pin_memory=False))
    model = nn.Linear(3, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    gpu = torch.device("cuda", 1)
    with process_group("cpu") as worker:
        checkpoints = Checkpoints(tmp_path, replace(worker, device=gpu), 1, asynchronous=True)
        checkpoints.save(model, optimizer, {"step": 1}, wait=True)
    (first, writer), (second, same) = events
    assert (first, second) == (gpu, "write")
    assert writer is same
    assert writer is not threading.main_thread()
