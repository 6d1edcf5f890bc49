"""options.py: which arms there are on a device, and what their times say.

Ratios are checked on times made up, whose answer is known; one short run has real steps.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import ClassVar

import numpy as np
import pandas as pd
import pytest
import torch
from pretended_gpu import pretend_gpu
from students_interval import students_interval

from common.analysis.one_device.options import OptionsRun, open_options, ratios_text
from common.benchmarks.one_device import options
from common.benchmarks.one_device.option_arms import Arm, plan_arms
from common.benchmarks.one_device.options import Bench, OptionsBenchmark, main, visiting_order
from common.errors import UserError
from common.perfmodel.one_device.workload import Workload
from common.runtime.records.run_directory import read_environment

CPU = torch.device("cpu")
TINY = OptionsBenchmark(
    model="gpt2-pico",
    batch_size=1,
    seq_len=32,
    optimizer="sgd",  # torch needs seconds to import the machinery of AdamW
    arms=("sdpa", "tf32", "gradient_accumulation"),
    rounds=2,
    num_steps=2,
    warmup_steps=1,
    device="cpu",
    run_id="run",
)
PLAIN = Workload(model="gpt2-nano", batch_size=4, seq_len=64, attention="eager")


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Runs the baseline twice and two options, two rounds of two steps; returns the folder."""
    folder = tmp_path_factory.mktemp("runs")
    main(replace(TINY, output_dir=str(folder)))
    return folder / "run"


def test_every_arm_is_visited_in_every_round(finished: Path) -> None:
    assert read_environment(finished)["status"] == "complete"
    times = pd.read_csv(finished / "options-times.csv")
    counts = times.groupby(["arm", "round"]).size()
    arms = ["baseline", "baseline-again", "gradient_accumulation", "sdpa"]
    assert counts.to_dict() == {(arm, round_): 2 for arm in arms for round_ in (0, 1)}
    # Four passes per update are four batches' tokens.
    tokens = times.groupby("arm")["tokens"].unique().explode().to_dict()
    assert tokens == dict.fromkeys(arms, 32) | {"gradient_accumulation": 128}


def test_warm_up_and_preparation_are_kept_apart(finished: Path) -> None:
    warmup = pd.read_csv(finished / "options-warmup-times.csv")
    # The first step of all, with compilation, is on top of the warm-up.
    assert warmup.groupby("round").size().to_dict() == {-1: 4 * 2, 0: 4, 1: 4}
    arms = pd.read_csv(finished / "options-arms.csv").set_index("arm")
    first = warmup[(warmup["round"] == -1) & (warmup["iteration"] == 0)].set_index("arm")
    expected = first.loc["sdpa", "step_time_ms"] / 1e3
    assert arms.loc["sdpa", "first_step_s"] == pytest.approx(expected)


def test_long_steps_are_measured_without_warm_up(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(options, "LONG_STEP_S", 0.0)
    main(replace(TINY, arms=("sdpa",), rounds=1, output_dir=str(tmp_path)))
    warmup = pd.read_csv(tmp_path / "run" / "options-warmup-times.csv")
    assert set(warmup["round"]) == {-1}
    times = pd.read_csv(tmp_path / "run" / "options-times.csv")
    assert set(times.groupby("arm").size()) == {2}


def test_what_has_no_effect_here_is_in_the_table_and_not_measured(finished: Path) -> None:
    table = open_options(finished).table.set_index("arm")
    assert not table.loc["tf32", "measured"]
    assert table.loc["tf32", "reason"].startswith("no effect: tf32")
    assert pd.isna(table.loc["tf32", "ratio"])
    assert table.loc["baseline", "ratio"] == 1


class MadeUp(OptionsRun):
    """A run of which four rounds are enough."""

    conditions: ClassVar[dict] = {}


def made_up(ratios: dict[str, tuple[float, ...]]) -> MadeUp:
    """Makes two steps per visit; the machine is 1, 2, 4 … times slower from round to round."""
    times = pd.DataFrame(
        {
            "arm": arm,
            "round": round_,
            "iteration": iteration,
            "tokens": 100,
            "step_time_ms": 10 * 2**round_ / ratio,
        }
        for arm, by_round in ratios.items()
        for round_, ratio in enumerate(by_round)
        for iteration in (0, 1)
    )
    about = {"measured": True, "reason": "", "first_step_s": 1.0, "peak_allocated_mib": np.nan}
    return MadeUp(opened=None, times=times, arms=pd.DataFrame({"arm": [*ratios]}).assign(**about))


RATIOS = {
    "baseline": (1, 1, 1, 1),
    "baseline-again": (1.02, 0.97, 1.01, 1.01),
    "fast": (1.5, 1.4, 1.7, 1.5),
    "unclear": (1.1, 1.3, 1.2, 1.9),
    "slow": (0.5, 0.6, 0.55, 0.55),
    "all": (3.0, 2.0, 3.0, 3.0),
    "all-but-fast": (1.5, 1.6, 2.0, 1.8),
}


def test_ratios_are_taken_within_rounds() -> None:
    # The machine's own drift, by a factor of eight, is in none of them.
    table = made_up(RATIOS).table.set_index("arm")
    for arm, by_round in RATIOS.items():
        if arm == "baseline":
            continue
        measured = table.loc[arm, ["ratio", "ratio_low", "ratio_high"]].tolist()
        expected = students_interval(by_round, claims=len(RATIOS) - 1)
        assert measured == pytest.approx(expected), arm
    assert table.loc["baseline", ["ratio", "ratio_low", "ratio_high"]].tolist() == [1, 1, 1]


def test_what_an_option_adds_to_the_others_is_all_over_all_but_it() -> None:
    table = made_up(RATIOS).company
    assert table.index.tolist() == ["fast"]
    ratios = np.divide(RATIOS["all"], RATIOS["all-but-fast"])
    measured = table.loc["fast", ["ratio", "ratio_low", "ratio_high"]].tolist()
    assert measured == pytest.approx(students_interval(ratios, claims=1))


def test_a_ratio_on_one_side_in_every_round_may_be_noise() -> None:
    run = made_up(RATIOS)
    settled = {arm for arm, ratio in run.ratios.items() if ratio.is_settled}
    assert settled == {"fast", "slow", "all", "all-but-fast"}
    printed = ratios_text(run)
    rows = {line.split()[0]: line for line in printed.splitlines()[2:-2]}
    for arm in run.ratios:
        verdict = "settled" if arm in settled else "hidden by noise"
        assert rows[arm].endswith(verdict), arm
    assert printed.endswith("hidden by noise.")  # the control, in the last line
    of_one_round = replace(run, times=run.times[run.times["round"] == 0])
    assert not any(ratio.is_settled for ratio in of_one_round.ratios.values())


def names(arms: list[Arm]) -> set[str]:
    """Returns the names of the arms that are measured."""
    return {arm.name for arm in arms if not arm.reason}


def test_arms_on_a_cpu() -> None:
    arms = {arm.name: arm for arm in plan_arms(PLAIN, CPU)}
    fast = {"sdpa", "bfloat16", "compile", "fused"}
    slow = {"loss_chunks", "gradient_accumulation", "activation_checkpointing"}
    company = {"all", *(f"all-but-{name}" for name in fast)}
    assert names(list(arms.values())) == {"baseline", "baseline-again", *fast, *slow, *company}
    # A vocabulary of 8,192 needs no padding, and a processor has no launches to save.
    assert "8,192 tokens are a multiple" in arms["vocab_multiple"].reason
    assert "foreach" in arms["foreach"].reason
    assert "float16" not in arms
    assert arms["baseline"].workload == arms["baseline-again"].workload == PLAIN
    together = arms["all"].workload
    assert (together.attention, together.precision, together.compile) == ("sdpa", "bfloat16", True)
    assert together.optimizer_implementation == "fused"
    # All but one differs from all in that one only.
    assert arms["all-but-sdpa"].workload == replace(together, attention="eager")


def test_arms_on_an_old_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend_gpu(monkeypatch, (7, 0), bf16=False)
    arms = {arm.name: arm for arm in plan_arms(replace(PLAIN, model="gpt2"), torch.device("cuda"))}
    assert "bfloat16" not in arms
    assert arms["all"].workload.precision == "float16"
    assert arms["tf32"].reason == "no effect: TF32 needs an Ampere GPU or a later one"
    measured = names(list(arms.values()))
    assert {"foreach", "async_batches", "vocab_multiple", "all-but-float16"} <= measured


def test_tf32_is_of_use_alone_but_not_beside_16_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend_gpu(monkeypatch, (9, 0), bf16=True)
    arms = {arm.name: arm for arm in plan_arms(replace(PLAIN, model="gpt2"), torch.device("cuda"))}
    assert not arms["tf32"].reason
    assert arms["all-but-tf32"].reason.startswith("no effect: tf32")
    # Without 16 bits it is what remains, and on.
    assert arms["all-but-bfloat16"].workload.tf32
    assert arms["all-but-bfloat16"].workload.precision == "float32"


def test_without_a_compiler_the_others_are_measured(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CXX", raising=False)
    arms = {arm.name: arm for arm in plan_arms(PLAIN, CPU)}
    assert arms["compile"].reason.startswith("not available: compile: needs a C++ compiler")
    assert not any(arm.workload.compile for arm in arms.values())
    assert "all-but-compile" not in arms


def test_what_the_baseline_has_on_is_no_arm() -> None:
    arms = {arm.name: arm for arm in plan_arms(replace(PLAIN, attention="sdpa"), CPU)}
    assert arms["sdpa"].reason == "no effect: it is on in the baseline"


def test_the_baselines_double_is_half_a_round_away() -> None:
    arms = tuple(Arm(name, PLAIN) for name in ("baseline", "baseline-again", "a", "b", "c", "d"))
    order = [arm.name for arm in visiting_order(arms)]
    assert sorted(order) == sorted(arm.name for arm in arms)
    distance = order.index("baseline-again") - order.index("baseline")
    assert distance == len(order) // 2


def test_an_arm_that_runs_out_of_memory_is_dropped_with_its_reason(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    prepare = Bench._prepare

    def full(bench: Bench, arm: Arm) -> None:
        if arm.name == "sdpa":
            raise RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to …")
        prepare(bench, arm)

    monkeypatch.setattr(Bench, "_prepare", full)
    main(replace(TINY, rounds=1, num_steps=1, warmup_steps=0, output_dir=str(tmp_path)))
    arms = pd.read_csv(tmp_path / "run" / "options-arms.csv").set_index("arm")
    assert arms.loc["sdpa", "reason"] == "out of memory, beside the models of the other arms"
    assert set(pd.read_csv(tmp_path / "run" / "options-times.csv")["arm"]) == {
        *("baseline", "baseline-again", "gradient_accumulation")
    }


def test_arms_that_cannot_fit_together_are_refused(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(options, "available_memory_bytes", lambda: 2**20)
    with pytest.raises(UserError, match=r"4 arms of gpt2-pico keep .*choose fewer --arms"):
        main(replace(TINY, output_dir=str(tmp_path / "runs")))
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"arms": ("sdpq",)}, "unknown arm 'sdpq'; did you mean 'sdpa'"),
        ({"device": "tpu"}, "device 'tpu': legal are cpu and cuda"),
    ],
    ids=lambda value: str(value)[:24],
)
def test_settings_that_cannot_be_are_one_line(changes: dict, message: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=message) as caught:
        main(replace(TINY, output_dir=str(tmp_path / "runs"), **changes))
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "runs").exists()
