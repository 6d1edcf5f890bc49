"""Causes in scripts that only a GPU can show, on tables made up for them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pandas as pd
import pytest
from scaling_evidence import MadeUp, as_watched, case_of, examined_for, judge
from test_causes_machine import GPU, HEALTHY, ON_GPU

from common.diagnose.all_causes import GPU_CAUSES
from common.diagnose.causes.settings import NOT_ON_A_GPU
from common.diagnose.diagnosis import diagnose_folder
from common.diagnose.evidence.case import MINOR, Verdict
from common.diagnose.evidence.evidence import SURROUNDING_COLUMNS, NotJudged


def write(folder: Path, run: MadeUp = ON_GPU, **facts: object) -> Path:
    """Writes a made-up run of a watched script, with further facts of all ranks."""
    every = dict.fromkeys(range(run.ranks), facts)
    return as_watched(replace(run, facts=every).write(folder), network="NCCL within one host")


def named(cause: str, folder: Path) -> Verdict:
    """Returns the verdict, after checking what holds for each."""
    verdict = judge(cause, folder)
    assert verdict is not None
    assert verdict.cause == cause
    assert verdict.group == MINOR
    assert NOT_ON_A_GPU in verdict.reason
    assert verdict.confidence in ("low", "medium")
    assert any(".csv]" in sentence for sentence in verdict.evidence)
    assert verdict.change.endswith(".")
    return verdict


def test_programs_of_this_project_are_not_judged_by_a_watch(tmp_path):
    found = diagnose_folder(ON_GPU.write(tmp_path / "run"))
    told = {*(verdict.cause for verdict in found.verdicts), *dict(found.not_judged)}
    assert not told & set(GPU_CAUSES)


# Norms that exchange.


def step_ms(run: MadeUp) -> float:
    """Returns a step without noise: data, passes, exchange and update."""
    passes = run.accumulation * (run.forward_ms + run.backward_ms)
    return run.data_ms + passes + run.communication_ms + run.optimizer_ms


@pytest.mark.parametrize("accumulation", [1, 4])
def test_two_small_all_reduces_a_norm_and_pass_are_what_norms_cost(accumulation, tmp_path):
    run = replace(ON_GPU, noise=0.0, accumulation=accumulation)
    verdict = named("synchronised-norms", write(tmp_path, run, synchronised_norms=20))
    # 0.2 ms latency and 4 B at 1e6 B/ms.
    expected = 2 * 20 * accumulation * (0.2 + 4e-6) / step_ms(run)
    assert verdict.lost_share == pytest.approx(expected)
    assert verdict.confidence == "medium"
    assert verdict.predicted_speedup == pytest.approx(verdict.speedup_now / (1 - expected))


def test_norms_are_told_by_their_number_where_no_all_reduce_was_measured(tmp_path):
    folder = write(tmp_path, synchronised_norms=20)
    (folder / "allreduce-samples.csv").unlink()
    verdict = named("synchronised-norms", folder)
    assert verdict.confidence == "low"
    assert verdict.lost_share == 0
    assert verdict.predicted_speedup is None
    assert len(verdict.evidence) == 1


def test_norms_are_ranked_by_what_they_cost_after_what_is_measured(tmp_path):
    run = replace(ON_GPU, data_ms=12.0)
    folder = write(tmp_path, run, synchronised_norms=60)
    found = examined_for(case_of(folder), "synchronised-norms", "data-loading")
    assert [each.cause for each in found.verdicts] == ["data-loading", "synchronised-norms"]


# Computation in 32 bits.

WIDE = {"gpu_capability": "9.0", "float32_matmul_precision": "highest"}


def with_surroundings(folder: Path, **changed: object) -> Path:
    rows = [HEALTHY | GPU | changed | {"rank": rank} for rank in range(2)]
    table = pd.DataFrame(rows, columns=list(SURROUNDING_COLUMNS))
    table.to_csv(folder / "surroundings.csv", index=False)
    return folder


def test_float32_on_tensor_cores_is_named_as_surely_as_the_gpu_is_busy(tmp_path):
    for busy, level in ((0.9, "medium"), (0.3, "low")):
        folder = with_surroundings(write(tmp_path / level, **WIDE), gpu_utilisation_share=busy)
        verdict = named("no-mixed-precision", folder)
        assert verdict.confidence == level
        assert "TF32 is off" in verdict.evidence[0]
        assert "torch.bfloat16" in verdict.change
        assert verdict.lost_share == 0
    assert named("no-mixed-precision", write(tmp_path / "alone", **WIDE)).confidence == "low"


def test_a_gpu_without_bfloat16_is_told_float16_and_a_scaler(tmp_path):
    verdict = named("no-mixed-precision", write(tmp_path, **WIDE | {"gpu_capability": "7.5"}))
    assert "torch.float16" in verdict.change
    assert "GradScaler" in verdict.change
    assert "TF32" not in verdict.evidence[0]


# Waits of the host.


def with_waits(
    folder: Path, *waits: tuple[int, str, str, str, float], a_step: float | None = None
) -> Path:
    """Adds waits as (rank, phase, place, call, number a step) to the last ten steps."""
    steps = pd.read_csv(folder / "steps.csv")
    each = pd.DataFrame(waits, columns=["rank", "phase", "place", "call", "waits"])
    by_rank = each.groupby("rank")["waits"].sum()
    usual = steps["rank"].map(by_rank).fillna(0) if a_step is None else a_step
    steps["host_waits"] = usual
    steps.loc[steps["step"] < 20, "host_waits"] = None
    steps.to_csv(folder / "steps.csv", index=False)
    if waits:
        each.assign(waits=each["waits"] * 10).to_csv(folder / "host-waits.csv", index=False)
    return folder


def test_waits_are_counted_by_step_and_told_by_line(tmp_path):
    waits = [
        (0, "forward", "model.py:7 forward", "", 4.0),
        (1, "forward", "model.py:7 forward", "", 4.0),
        (1, "between", "train.py:30 main", "logging.write", 1.0),
    ]
    verdict = named("host-waits", with_waits(write(tmp_path), *waits))
    assert verdict.evidence[0].startswith("Rank 1's host waits for its GPU 5 times a step, 4 of")
    assert verdict.evidence[1].startswith("4 a step in the forward phase at model.py:7 forward")
    assert verdict.evidence[2].startswith("1 a step in the between phase at train.py:30 main, in l")
    assert verdict.confidence == "medium"
    assert verdict.change.count("loss.detach()") == 1


def test_a_loss_that_is_read_each_step_is_said_with_little_confidence(tmp_path):
    read = (0, "between", "train.py:30 main", "", 1.0)
    assert named("host-waits", with_waits(write(tmp_path), read)).confidence == "low"


@pytest.mark.parametrize(
    ("waits", "a_step"),
    [
        ((), None),
        (((0, "copy", "train.py:12 main", "", 2.0),), None),
        (((0, "optimizer", "train.py:20 main", "torch.amp.grad_scaler.step", 1.0),), None),
        (((0, "between", "train.py:30 main", "", 0.2),), 0.0),  # logged now and then
        (((0, "between", "train.py:40 main", "", 30.0),), 0.0),  # an evaluation in one step
    ],
)
def test_waits_that_are_needed_or_rare_are_no_cause(waits, a_step, tmp_path):
    folder = with_waits(write(tmp_path), *waits, a_step=a_step)
    assert judge("host-waits", folder) is None


def test_on_a_cpu_no_waits_have_to_be_counted(tmp_path):
    assert judge("host-waits", write(tmp_path, MadeUp())) is None


# Copies of batches.

COPY = (0, "copy", "train.py:12 main", "", 2.0)


@pytest.mark.parametrize(
    ("pinned", "waits", "level", "said"),
    [
        (False, None, "low", "are not pinned"),  # nobody counted
        (False, (), "low", "are not pinned"),
        (False, (COPY,), "medium", "waits for 2 copies a step"),
        (True, (COPY,), "low", "are pinned"),
    ],
)
def test_copies_that_the_host_waits_for_are_named(pinned, waits, level, said, tmp_path):
    folder = write(tmp_path, pin_memory=pinned, batches_on_host=True)
    if waits is not None:
        with_waits(folder, *waits)
    verdict = named("unpinned-copies", folder)
    assert said in verdict.evidence[0]
    assert verdict.confidence == level
    assert "non_blocking=True" in verdict.change
    assert ("pin_memory=True" in verdict.change) != pinned


# No cause.

NORMS, COPIES = {"synchronised_norms": 20}, {"pin_memory": False, "batches_on_host": True}


@pytest.mark.parametrize(
    ("cause", "run", "facts"),
    [
        ("synchronised-norms", ON_GPU, {"synchronised_norms": 0}),
        ("synchronised-norms", replace(ON_GPU, latency_ms=0.001), NORMS),
        ("synchronised-norms", replace(ON_GPU, ranks=1), NORMS),
        ("no-mixed-precision", ON_GPU, WIDE | {"compute_dtype": "bfloat16"}),
        ("no-mixed-precision", ON_GPU, WIDE | {"gradient_dtype": "bfloat16"}),
        ("no-mixed-precision", ON_GPU, WIDE | {"gpu_capability": "6.1"}),
        # Passes are less than half of the step.
        ("no-mixed-precision", replace(ON_GPU, data_ms=60.0), WIDE),
        ("no-mixed-precision", MadeUp(), WIDE),
        ("unpinned-copies", ON_GPU, COPIES | {"pin_memory": True}),
        ("unpinned-copies", ON_GPU, COPIES | {"batches_on_host": False}),
        ("unpinned-copies", MadeUp(), COPIES),
    ],
)
def test_what_is_right_or_would_not_pay_is_no_cause(cause, run, facts, tmp_path):
    assert judge(cause, with_waits(write(tmp_path, run, **facts))) is None


@pytest.mark.parametrize(
    ("cause", "said"),
    [
        ("synchronised-norms", "no synchronised_norms"),
        ("host-waits", "no host_waits"),
        ("unpinned-copies", "no DataLoader"),
    ],
)
def test_what_nobody_looked_at_is_not_judged(cause, said, tmp_path):
    with pytest.raises(NotJudged, match=said):
        judge(cause, write(tmp_path))
