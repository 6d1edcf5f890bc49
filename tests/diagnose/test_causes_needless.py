"""Causes in work that need not be, from tables whose answer is known, and in a real run."""

from __future__ import annotations

import json
from pathlib import Path

import pandas as pd
import pytest
from bundle_support import add_rows, opened, with_values, write_bundle
from command_line import ddplab
from scaling_evidence import verdict_on

SCRIPT = """
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

torch.autograd.set_detect_anomaly(True)
torch.manual_seed(0)


class Twice(nn.Module):
    def __init__(self):
        super().__init__()
        layers = [nn.Sequential(nn.Linear(96, 96), nn.Tanh()) for _ in range(8)]
        self.layers = nn.Sequential(*layers)
        self.table = nn.Parameter(torch.zeros(4000, 96))

    def forward(self, values):
        values = values + self.table[: len(values)]
        return checkpoint(self.layers, values, use_reentrant=False)


body = Twice()
model = nn.Sequential(nn.Linear(96, 96), body, nn.Linear(96, 4))
seen = []


def note(*tensors):
    seen.append(tensors[-1].detach().square().sum().item())


for module in model.modules():
    module.register_forward_hook(note)
for parameter in model.parameters():
    parameter.register_hook(note)
optimizer = torch.optim.SGD(model[2].parameters(), lr=0.1)
for _ in range(50):
    model(torch.randn(32, 96)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
"""


def bundle_with(tmp_path: Path, without: str, lean_ms: float, **noted: float) -> Path:
    """Writes a bundle of which passes of 8 ms take ``lean_ms`` without something."""
    folder = write_bundle(tmp_path / "b")
    rows = [
        {"table": "lean-passes", "without": without, "unused_bytes": 0}
        | {"lean": lean, "repeat": repeat, "forward_time_ms": 1.0}
        | {"backward_time_ms": (lean_ms if lean else 8.0) - 1 + 0.01 * repeat}
        | noted
        for repeat in range(5)
        for lean in (False, True)
    ]
    add_rows(folder, *rows)
    return folder


KEPT = {"needed_bytes": 2**30, "free_bytes": 2**32}
THREADS = {"threads": 8, "fair_threads": 1, "cores": 2}
SPARSE = {"unused_bytes": 3000, "touched_rows": 5, "rows": 700}
EXCHANGE, UPDATE = 0.75 * 1.5, 0.75 * 1.0


@pytest.mark.parametrize(
    ("without", "noted", "cause", "title", "beside_ms"),
    [
        ("anomaly detection", {}, "left-on", "4 times as long with anomaly", 0),
        ("hooks", {"hooks": 12}, "left-on", "4 times as long with 12 hooks", 0),
        ("a profiler", {}, "left-on", "4 times as long with a profiler", 0),
        ("activation checkpointing", KEPT, "needless-recomputation", "computed twice", 0),
        ("too many threads", THREADS, "oversubscribed-cores", "8 threads, more than the 2", 0),
        ("unused gradients", {"unused_bytes": 3000}, "unused-gradients", "75 % of", EXCHANGE),
        ("untouched embeddings", SPARSE, "sparse-embedding", "5 of 700 rows", EXCHANGE + UPDATE),
    ],
)
def test_needless_work_costs_what_passes_take_longer(
    tmp_path: Path, without: str, noted: dict, cause: str, title: str, beside_ms: float
) -> None:
    """Passes of 8 ms of steps of 10 ms and an exchange (mean 3, the shorter 1.5), update 1 ms."""
    lean_ms = 8.0 if beside_ms == EXCHANGE else 2.0  # passes need not be shorter, too
    verdict = verdict_on(opened(bundle_with(tmp_path, without, lean_ms, **noted)), cause)
    assert title in verdict.title
    saved_ms = 8 - lean_ms + beside_ms
    assert verdict.lost_share == pytest.approx(saved_ms / 14.5, rel=0.05)


def test_passes_of_a_sharded_model_hold_their_exchange(tmp_path: Path) -> None:
    """Nothing tells buckets under FSDP: forward pass and all that follows it, 12.5 of 14.5 ms."""
    folder = bundle_with(tmp_path, "unused gradients", 6.0, unused_bytes=3000)
    with_values(folder, "facts", wrapper="FSDP", sharded_modules=3)
    with_values(folder, "steps", kind="plain", exchange_time_ms=None)
    case = opened(folder)
    verdict = verdict_on(case, "unused-gradients")
    passes_ms = case.run.by_step("forward_time_ms") + case.run.by_step("whole_backward_time_ms")
    share = float((passes_ms.mean(axis=1) / case.run.slowest_ms).median())
    assert "pass with their exchange take" in verdict.evidence[0]
    assert verdict.lost_share == pytest.approx(share * 0.25, rel=0.05)
    assert verdict.predicted_speedup is None  # of one rank nothing is known
    assert verdict.gain == pytest.approx(1 / (1 - verdict.lost_share))


def test_what_costs_nothing_is_no_needless_work(tmp_path: Path) -> None:
    case = opened(bundle_with(tmp_path, "a profiler", 8.0))
    assert verdict_on(case, "left-on") is None


def test_activations_that_do_not_fit_are_rightly_computed_twice(tmp_path: Path) -> None:
    """Two ranks of one machine would each take 3 of 4 GiB."""
    folder = bundle_with(tmp_path, "activation checkpointing", 2.0, **KEPT | {"needed_bytes": 3e9})
    assert verdict_on(opened(folder), "needless-recomputation") is None


def test_buffers_sent_before_each_pass_are_a_cause(tmp_path: Path) -> None:
    """Rank 1 comes 2 ms later and waits for nobody: 4 ms of 16 are the sending."""
    folder = write_bundle(tmp_path / "b")
    with_values(folder, "facts", broadcast_buffers=True, buffers_bytes=1 << 20)
    for rank in (0, 1):
        times_ms = {"buffers_time_ms": 6.0 - 2 * rank, "step_time_ms": 16.0}
        with_values(folder, "steps", (rank,), **times_ms)
    verdict = verdict_on(opened(folder), "sent-buffers")
    assert "1 MiB of buffers" in verdict.title
    assert verdict.lost_share == pytest.approx(0.25)


@pytest.mark.slow
def test_a_watched_script_shows_what_was_left_on_and_what_is_not_updated(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    done = ddplab("diagnose", "--bundle", tmp_path / "b", script)
    assert done.status == 0, done.stderr
    lean = pd.read_csv(tmp_path / "b" / "tables" / "lean-passes.csv")
    assert set(lean["without"]) == {
        *("anomaly detection", "unused gradients", "hooks", "activation checkpointing"),
        "untouched embeddings",
    }
    unused_bytes = lean.groupby("without")["unused_bytes"].max()
    table_bytes = 4000 * 96 * 4
    assert unused_bytes["unused gradients"] == 9 * (96 * 96 + 96) * 4 + table_bytes
    assert unused_bytes["untouched embeddings"] == table_bytes
    assert lean["touched_rows"].max() == 32
    [hooks] = lean["hooks"].dropna().unique()
    assert (
        hooks == 3 * 8 + 2 + 3 + 21
    )  # of layers and what holds them, of the others, of parameters
    backward_ms = lean.groupby(["without", "lean"])["backward_time_ms"].median()
    assert backward_ms["unused gradients", True] < backward_ms["unused gradients", False] / 2
    assert lean["needed_bytes"].max() > 8 * 32 * 96 * 4  # outputs of eight layers, at least
    verdicts = json.loads((tmp_path / "b" / "diagnosis.json").read_text())["verdicts"]
    assert "left-on" in {verdict["cause"] for verdict in verdicts}
