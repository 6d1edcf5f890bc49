"""Names of torch that are not public: without one, what needs it says so, and the rest works."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch
from refusals import problem
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.profiler import profile

from common.runtime import torch_internals

STAGER = "torch.distributed.checkpoint._state_dict_stager"
TRACKER = "torch.distributed._tools.mem_tracker"
BARE = DistributedDataParallel.__new__(DistributedDataParallel)
nn.Module.__init__(BARE)


@pytest.mark.parametrize(
    ("owner", "name", "use"),
    [
        (STAGER, "StateDictStager", lambda: torch_internals.stager(pin_memory=False)),
        (TRACKER, "MemTracker", torch_internals.memory_tracker),
        ("torch._subclasses", "FakeTensorMode", torch_internals.fake_tensors),
        ("torch.cuda", "_sleep", lambda: torch_internals.sleep_on_gpu(1)),
        ("torch", "_foreach_mul_", lambda: torch_internals.multiply([], torch.ones(()))),
        (None, "_get_ddp_logging_data", lambda: torch_internals.ddp_record(BARE)),
        (
            None,
            "_set_ddp_runtime_logging_sample_rate",
            lambda: torch_internals.record_every_step(BARE),
        ),
        (None, "_remove_autograd_hooks", lambda: torch_internals.remove_hooks(BARE)),
        (None, "profiler", lambda: torch_internals.memory_changes(profile())),
    ],
)
def test_a_name_that_has_moved_is_one_line_with_what_was_tried(monkeypatch, owner, name, use):
    if owner:
        __import__(owner)
        monkeypatch.delattr(sys.modules[owner], name)
    elif name != "profiler":  # which is there while a profiler runs
        monkeypatch.delattr(DistributedDataParallel, name)
    said = problem(use)
    for words in (name, torch.__version__, "torch 2.9 to 2.15"):
        assert words in said


@pytest.mark.slow
def test_training_is_imported_and_keeps_checkpoints_where_private_names_are_gone(tmp_path):
    script = f"""
import sys
import torch.distributed.checkpoint
del sys.modules[{STAGER!r}].StateDictStager
sys.modules[{TRACKER!r}] = None
from pathlib import Path
from torch import nn, optim
import common.benchmarks.one_device.memory_tracker, common.training.trainer
from common.errors import UserError
from common.runtime.group.process_group import process_group
from common.training.checkpoints.checkpoint import Checkpoints
with process_group("cpu") as worker:
    model = nn.Linear(2, 2)
    made = Checkpoints(Path({str(tmp_path)!r}), worker, 1)
    made.save(model, optim.SGD(model.parameters()), {{"step": 3}})
    print(made.newest_intact().step)
    try:
        Checkpoints(Path({str(tmp_path)!r}), worker, 1, asynchronous=True)
    except UserError as error:
        print(error)
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    step, line = (one for one in done.stdout.splitlines() if "[Gloo]" not in one)
    assert step == "3"
    assert STAGER in line
