"""What the explorer computes of any model on a cluster, against the command that it names."""

from __future__ import annotations

import csv
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from command_line import ROOT, answered

from common.cli.prediction.asked_model import asked_model
from common.explore.chosen_model import MODEL_VARIABLE, ChosenModel, named_model, write_model
from common.explore.clusters.cluster_job import (
    MEMORY_PARTS,
    STEP_PARTS,
    JobSettings,
    job_line,
    memory_part,
    view_job,
)
from common.explore.clusters.cluster_tab import ClusterTab


@pytest.mark.parametrize(
    "changed",
    [
        {"strategy": "FULL_SHARD", "gpus": 8, "checkpointing": "block", "batch_size": 4},
        {"strategy": "DDP", "gpus": 128, "accumulation": 4, "precision": "float32"},
    ],
    ids=str,
)
def test_step_and_memory_are_those_of_the_command(changed: dict, tmp_path: Path) -> None:
    model, settings = named_model("llama-3.2-1b"), JobSettings("h100-ib", **changed)
    view = view_job(model, settings)
    words = shlex.split(job_line(model, settings))[3:]
    answered(*words, "--csv", str(tmp_path / "all.csv"))
    rows = csv.DictReader((tmp_path / "all.csv").read_text().splitlines())
    [row] = [row for row in rows if row["scaling"] == "weak"]
    shown = view.on(settings.gpus)
    for column in ("step_s", "step_low_s", "efficiency", *STEP_PARTS.values()):
        assert shown[column] == pytest.approx(float(row[column]), rel=1e-9), column
    printed = answered(*(word for word in words if word not in ("--cluster", "h100-ib")))
    [peak] = re.findall(r"^ *peak +([\d.]+)", printed, re.MULTILINE)
    assert view.memory.peak_bytes / 1e9 == pytest.approx(float(peak), abs=6e-4)
    parts = [memory_part(view.memory.peak.components, part) for part in MEMORY_PARTS]
    assert sum(parts) == view.memory.peak_bytes
    other = view_job(model, JobSettings("h100-ib", **(changed | {"gpus": 16})), view)
    assert other.steps is view.steps


@pytest.mark.slow  # in kind: tests/tuning/test_user_model.py, tests/test_architecture.py
def test_a_followed_module_reaches_a_page_that_has_no_torch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "lines.py").write_text(
        "import torch\n"
        "def make():\n"
        "    module = torch.nn.Linear(48, 7)\n"
        "    return module, torch.randn(2, 48), lambda module, batch: module(batch).sum()\n"
    )
    monkeypatch.chdir(tmp_path)
    write_model(ChosenModel("lines:make", *asked_model("lines:make", None)), tmp_path / "model")
    code = """
import sys
from common.explore.chosen_model import given_model
from common.explore.clusters.cluster_tab import ClusterTab
tab = ClusterTab(given_model())
print(given_model().architecture.num_parameters, len(tab.figures["step"].data[0].x))
print("torch" in sys.modules, tab.command.line)
"""
    variables = os.environ | {MODEL_VARIABLE: str(tmp_path / "model")}
    command = [sys.executable, "-c", code]
    done = subprocess.run(
        command, cwd=ROOT, env=variables, capture_output=True, text=True, check=True
    )
    assert done.stdout.startswith("343 15\nFalse uv run ddplab predict --model lines:make ")


def test_what_cannot_be_predicted_is_said_in_place_of_figures() -> None:
    tab = ClusterTab()
    assert tab.message.widget.value.strip() == ""
    tab.choices["cluster"].value = "v100-dgx1"
    assert "no peak of V100-SXM2-16GB in bfloat16" in tab.message.widget.value
    assert not any(len(trace.x) for trace in tab.figures["memory"].data)
    tab.choices["precision"].value = "float16"
    assert tab.message.widget.value.strip() == ""
    assert len(tab.figures["memory"].data[0].x) > 5
