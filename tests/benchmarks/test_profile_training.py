"""profile_training.py: a real profile of gpt2-pico, and what operators cost.

The oracles: the ranges in the trace itself, torch's own FLOP counter on the same step, the closed
form of a GPT-2's matrix products, and costs of single operators worked out by hand.
"""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pandas as pd
import pytest
import torch
import torch.nn.functional as F
from torch.utils.flop_counter import FlopCounterMode

from common.analysis.one_device import profile_figures
from common.analysis.one_device.profile import open_profile
from common.benchmarks.one_device.operator_costs import count_costs
from common.perfmodel.one_device.workload import Workload
from common.training.step import build_model

SCRIPT = Path(__file__).resolve().parents[2] / "assignments" / "assignment0" / "profile_training.py"
STEPS = 3
BATCH, LENGTH, WIDTH, BLOCKS, VOCABULARY = 2, 32, 128, 2, 256
STEP = ("--model", "gpt2-pico", "--batch_size", BATCH, "--seq_len", LENGTH, "--optimizer", "sgd")
FEW = ("--wait_steps", 1, "--warmup_steps", 1, "--active_steps", STEPS, "--device", "cpu")


@pytest.fixture(scope="module")
def profiled(rank_server, tmp_path_factory):
    """Runs the script; returns the finished run and what it printed."""
    folder = tmp_path_factory.mktemp("profile")
    where = ("--output_dir", folder, "--run_id", "run")
    done = rank_server.run(SCRIPT, *STEP, *FEW, *where)
    assert done.exit_codes == [0], done.stderr
    return folder / "run", done.stdout[0]


@pytest.fixture(scope="module")
def run_dir(profiled):
    return profiled[0]


@pytest.fixture(scope="module")
def ranges(run_dir):
    """Reads the trace's named ranges: name, start and length in µs."""
    with gzip.open(run_dir / "trace.json.gz") as file:
        events = json.load(file)["traceEvents"]
    rows = [(e["name"], e["ts"], e["dur"]) for e in events if e.get("cat") == "user_annotation"]
    return pd.DataFrame(rows, columns=["name", "start_us", "time_us"]).sort_values("start_us")


@pytest.fixture(scope="module")
def roofline(run_dir):
    return pd.read_csv(run_dir / "roofline.csv")


def test_the_trace_opens_and_has_the_steps_and_their_phases(ranges):
    counts = ranges["name"].value_counts()
    assert counts[["data", "forward", "backward", "optimizer"]].tolist() == [STEPS] * 4
    assert ranges["name"].str.startswith("ProfilerStep#").sum() == STEPS


def test_the_categories_of_a_step_add_up_to_it(run_dir, ranges):
    steps_ms = ranges.loc[ranges["name"].str.startswith("ProfilerStep#"), "time_us"] / 1e3
    categories = pd.read_csv(run_dir / "profile-categories.csv")
    assert (categories["time_ms"] >= 0).all()
    found = categories.groupby("step")["time_ms"].sum()
    assert found.tolist() == pytest.approx(steps_ms.tolist(), abs=1e-3)


def test_the_phases_of_a_step_are_the_traces_ranges(run_dir, ranges):
    phases = pd.read_csv(run_dir / "profile-phases.csv").pivot(index="step", columns="phase")
    for name in ("data", "forward", "backward", "optimizer"):
        expected = ranges.loc[ranges["name"] == name, "time_us"] / 1e3
        assert phases["time_ms"][name].tolist() == pytest.approx(expected.tolist(), abs=1e-3)


def test_operators_and_categories_are_the_same_time(run_dir):
    keys = ["step", "phase", "category"]
    operators = pd.read_csv(run_dir / "profile-operators.csv").groupby(keys)["time_us"].sum() / 1e3
    categories = pd.read_csv(run_dir / "profile-categories.csv").set_index(keys)["time_ms"]
    assert operators.to_dict() == pytest.approx(categories.to_dict())


def test_every_operator_of_a_gpt2_is_of_a_known_kind(run_dir):
    operators = pd.read_csv(run_dir / "profile-operators.csv")
    assert operators.loc[operators["category"] == "other", "operator"].tolist() == []


def test_operations_are_torchs_count_and_those_of_matrix_products_the_closed_form(roofline):
    found = roofline.groupby("operator")["flops"].sum()
    model = build_model(Workload("gpt2-pico", BATCH, LENGTH), torch.device("cpu"))
    tokens = torch.zeros(BATCH, LENGTH, dtype=torch.int64)
    with FlopCounterMode(display=False) as counter:
        model(tokens, tokens).backward()
    counted = counter.get_flop_counts()["Global"]
    assert len(counted) == 4  # mm, addmm, and attention forward and backward
    for operator, flops in counted.items():
        assert found[str(operator).replace(".", "::")] == flops
    # Three products of 2 operations per weight and token: forward, and two in the backward pass.
    weights = BLOCKS * 12 * WIDTH**2 + VOCABULARY * WIDTH
    assert found["aten::mm"] + found["aten::addmm"] == 3 * 2 * weights * BATCH * LENGTH


def test_calls_in_the_profile_are_those_of_the_architecture(roofline):
    calls = roofline.groupby(["phase", "operator"])["calls"].sum()
    assert calls["forward", "aten::addmm"] == 4 * BLOCKS
    assert calls["forward", "aten::mm"] == 1  # the head has no bias
    assert calls["backward", "aten::mm"] == 2 * (4 * BLOCKS + 1)
    assert calls["forward", "aten::native_layer_norm"] == 2 * BLOCKS + 1
    assert calls["backward", "aten::gelu_backward"] == BLOCKS
    # SGD changes each parameter: 12 of a block, 2 embeddings, 2 of the last norm.
    assert calls["optimizer", "aten::add_"] == 12 * BLOCKS + 4


def test_as_many_steps_are_timed_without_the_profiler(run_dir):
    steps = pd.read_csv(run_dir / "profile-steps.csv")
    assert steps["profiled"].value_counts().to_dict() == {True: STEPS, False: STEPS}
    # Half of those without come before and half after, so that a drift favours neither.
    assert steps["profiled"].tolist() == [False] * 2 + [True] * STEPS + [False]


def test_the_summary_says_where_the_step_goes_and_where_the_trace_is(profiled):
    run_dir, printed = profiled
    for part in ("forward", "backward", "optimizer", "data", "matrix products", "bound by"):
        assert part in printed
    assert f"Trace saved: {run_dir / 'trace.json.gz'}" in printed
    assert "View at: https://ui.perfetto.dev" in printed
    peak = pd.read_csv(run_dir / "device-peak.csv")
    assert list(peak) == ["precision", "flops_per_s", "memory_bytes_per_s", "source", "device"]


def test_figures_show_every_phase_and_name_the_longest_operators(run_dir):
    run = open_profile(run_dir)
    parts = profile_figures.step_parts(run)
    shown = {label.get_text() for label in parts.axes[0].get_yticklabels()}
    assert {"forward", "backward"} <= shown
    assert "(ms)" in parts.axes[0].get_xlabel()
    axes = profile_figures.roofline(run).axes[0]
    assert axes.get_xscale() == axes.get_yscale() == "log"
    assert any(text.get_text().startswith("mm") for text in axes.texts)
    assert run.phase_costs()["share"].sum() == pytest.approx(1)
    assert run.categories()["share"].sum() == pytest.approx(1)


# Costs of single operators by hand: float32 has 4 bytes.
A, B = torch.ones(2, 3), torch.ones(3, 4)
TABLE, TOKENS = torch.ones(100, 8), torch.tensor([5, 7, 5])


@pytest.mark.parametrize(
    ("work", "operator", "flops", "moved_bytes"),
    [
        # 2 × 4 results of 3 multiplications and additions; 6 + 12 elements in and 8 out.
        (lambda: A @ B, "aten::mm", 48, 4 * (6 + 12 + 8)),
        (lambda: torch.addmm(torch.ones(4), A, B), "aten::addmm", 48, 4 * (4 + 6 + 12 + 8)),
        (lambda: A + A, "aten::add", 6, 4 * (6 + 6 + 6)),
        # In place: read both, write one.
        (lambda: torch.ones(6).add_(torch.ones(6)), "aten::add_", 6, 4 * (6 + 6 + 6)),
        (lambda: torch.ones(6).copy_(torch.ones(6)), "aten::copy_", 0, 4 * (6 + 6)),
        (lambda: torch.ones(6).zero_(), "aten::zero_", 0, 4 * 6),
        # What is broadcast is read once.
        (lambda: A + torch.ones(1).expand(3), "aten::add", 6, 4 * (6 + 1 + 6)),
        (lambda: A.to(torch.bfloat16), "aten::_to_copy", 0, 6 * (4 + 2)),
        (lambda: A.sum(), "aten::sum", 6, 4 * (6 + 1)),
        # Three rows of 8 are read and written, and three indices of 8 bytes.
        (lambda: F.embedding(TOKENS, TABLE), "aten::embedding", 0, 4 * 24 * 2 + 3 * 8),
        (lambda: torch.zeros_like(A), "aten::zeros_like", 0, 4 * 6),
    ],
)
def test_the_cost_of_an_operator_by_hand(work, operator, flops, moved_bytes):
    with count_costs() as costs:
        work()
    row = costs.table().set_index("operator").loc[operator]
    assert (row["calls"], row["flops"], row["bytes"]) == (1, flops, moved_bytes)


def test_views_cost_nothing():
    with count_costs() as costs:
        A.view(6).unsqueeze(0).expand(5, 6)[1:].transpose(0, 1).detach()
        torch.empty(1000)
    assert costs.table()["bytes"].sum() == 0


def test_fused_adamw_reads_four_tensors_of_a_parameters_size_and_writes_three():
    parameter, gradient, mean, square = (torch.ones(1000) for _ in range(4))
    hyper = {"lr": 1e-3, "beta1": 0.9, "beta2": 0.95, "weight_decay": 0.1, "eps": 1e-8}
    with count_costs() as costs:
        torch._fused_adamw_(
            *([parameter], [gradient], [mean], [square], [], [torch.tensor(1.0)]),
            **hyper,
            amsgrad=False,
            maximize=False,
        )
    row = costs.table().set_index("operator").loc["aten::_fused_adamw_"]
    assert row["bytes"] == 7 * 4 * 1000 + 4  # and the number of the step
