"""A plan's printed lines of Python and the step that is measured, each beside one rank's step."""

from __future__ import annotations

import json
from pathlib import Path

import pandas as pd
import pytest

from common.planning.space import STRATEGIES, Plan
from common.tuning.visit_plan import FEWEST_FINAL

JOB = Path(__file__).parents[2] / "common" / "tuning" / "plans" / "job.py"
FEW_ROUNDS = Path(__file__).with_name("few_rounds_worker.py")
WORKER = Path(__file__).parent / "plan_models.py"
BLOCK_BYTES = 4 * (2 * 128 * 512 + 512 + 128 + 2 * 128)
"""Bytes of a block of ``plan_models.large``: two products with biases, and a norm."""
SHARDED = ("SHARD_GRAD_OP", "FULL_SHARD")
pytestmark = pytest.mark.two_ranks


def planned(rank_server, folder: Path, function: str, *flags: object) -> tuple[dict, str]:
    """Plans a FUNCTION of ``plan_models`` on two ranks; returns the answer and what is printed."""
    target = ("--function", f"plan_models:{function}", "--folder", WORKER.parent, "--device", "cpu")
    flags = ("--tune_seconds", 0, *flags, "--output_dir", folder, "--run_id", "run")
    done = rank_server.run(FEW_ROUNDS, JOB, *target, *flags, ranks=2)
    assert done.exit_codes == [0, 0], done.stderr[0]
    answer = json.loads((folder / "run" / "plan.json").read_text(), parse_constant=pytest.fail)
    return answer, done.stdout[0]


@pytest.mark.slow
def test_a_batch_that_no_ranks_split_is_refused_and_a_budget_below_the_weights_answered(
    rank_server, tmp_path
):
    flags = ("--function", "plan_models:make", "--folder", WORKER.parent, "--device", "cpu")
    flags += ("--memory_bytes", "1e9", "--global_batch", 7, "--output_dir", tmp_path / "no")
    done = rank_server.run(JOB, *flags, ranks=2)
    assert done.exit_codes == [2, 2]
    assert "7 samples: 2 ranks cannot split it evenly; 8 is the nearest" in done.stderr[0]
    assert not (tmp_path / "no").exists()
    flags = (*flags[:6], "--memory_bytes", 20e3, "--train_steps", 5, "--run_id", "run")
    done = rank_server.run(JOB, *flags, "--output_dir", tmp_path, ranks=2)
    assert done.exit_codes == [2, 2]
    assert "nothing fits, so nothing is trained" in done.stderr[0]
    answer, printed = json.loads((tmp_path / "run" / "plan.json").read_text()), done.stdout[0]
    assert answer["strategy"] is answer["python"] is None
    assert answer["budget_bytes"] == 20_000
    assert "Nothing fits: the smallest plan (" in printed
    assert any("would do" in line for line in answer["nothing_fits"])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("function", "left_out"),
    [
        ("unusual", ""),  # buffers, a list that grows with each call, a compiled block
        ("no_common_dimension", ""),
        ("tied", "is shared between two of its units"),
        ("pooled", "micro-batches of size 1 were left out: ValueError: Expected more than"),
    ],
)
def test_unusual_modules_are_planned_as_far_as_they_can_be(
    rank_server, tmp_path, function, left_out
):
    flags = ["--memory_bytes", "1e9", "--strategies", "DDP", "FULL_SHARD", "--no-verify"]
    flags += ["--checkpointing", "none"] if function != "unusual" else []
    answer, printed = planned(rank_server, tmp_path, function, *flags)
    plans = (answer, *answer["rejected"])
    strategies = {"DDP"} if function == "tied" else {"DDP", "FULL_SHARD"}
    assert {plan["strategy"] for plan in plans} == strategies
    assert [left_out in line for line in answer["left_out"]] == [True] * bool(left_out)
    assert left_out in printed
    # A batch without a common dimension is one sample, and two of `pooled` are the fewest.
    sizes = {"no_common_dimension": {1}, "pooled": {2, 4}}.get(function, {1, 2, 4})
    assert {plan["micro_batch"] for plan in plans} <= sizes
    assert min(sizes) in {plan["micro_batch"] for plan in plans}


@pytest.mark.slow
def test_one_rank_is_timed_while_the_others_wait(rank_server, tmp_path):
    flags = ("--memory_bytes", "1e9", "--strategies", "single", "DDP", "--no-verify")
    planned(rank_server, tmp_path, "make", *flags, "--checkpointing", "none", "block")
    parts = pd.read_csv(tmp_path / "run" / "plan-parts.csv")
    passes, alone = (parts[parts["arm"] == f"{arm} float32"] for arm in ("passes none", "one rank"))
    assert set(passes["rank"]) == {0, 1}
    assert set(alone["rank"]) == {0}
    assert set(alone["samples"]) == {passes["samples"].max()}
    # A row for both passes, where those of all ranks have one each at two sizes.
    assert 8 * len(alone) == len(passes)


@pytest.mark.slow
def test_a_named_plan_that_does_not_fit_is_run_once(rank_server, tmp_path):
    flags = ("--memory_bytes", "15e6", "--global_batch", 16, "--strategies", "DDP")
    flags += ("--checkpointing", "none", "--mine", "DDP", "micro_batch=8", "checkpointing=none")
    answer, printed = planned(rank_server, tmp_path, "large", *flags)
    mine = answer["verified"][-1]
    assert (mine["mine"], mine["was_refused"], mine["rounds"]) == (True, True, 1)
    assert mine["peak_bytes"] > 15e6 > answer["peak_bytes"]
    assert "was refused, and took" in printed


@pytest.mark.slow
def test_fsdp_is_planned_on_the_batch_as_it_is_and_that_no_time_is_left_to_tune_it_is_said(
    rank_server, tmp_path
):
    flags = ("--memory_bytes", "1e9", "--strategies", *SHARDED, "--checkpointing", "none")
    flags += ("--keeps_batch", "--tune_seconds", 0.01)
    answer, printed = planned(rank_server, tmp_path, "make", *flags)
    plans = (answer, *answer["rejected"])
    assert {(p["micro_batch"], p["accumulation"], p["checkpointing"]) for p in plans} == {
        (4, 1, "none")
    }
    assert {(plan["strategy"], plan["blocks_per_unit"]) for plan in plans} == {
        (strategy, blocks) for strategy in SHARDED for blocks in (1, 2, 3)
    }
    assert len(answer["verified"]) == 3
    assert "Tuned: nothing, as the fewest visits" in printed
    assert answer["tuned"]["took_s"] == 0
    assert {plan["rounds"] for plan in answer["tuned"]["tried"]} == {0}
    assert not (tmp_path / "run" / "tune-visits.csv").exists()


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [2, 4])
def test_lines_and_measured_step_do_what_one_rank_does_with_the_whole_batch(rank_server, ranks):
    if ranks == 4:
        plans = [Plan("HYBRID_SHARD", 2, 2, kind) for kind in ("none", "block")]
        plans.append(Plan("HYBRID_SHARD", 2, precision="bfloat16"))
        plans += [Plan("HYBRID_SHARD", 2, 2, prefetch=ahead) for ahead in (0, 2)]
    else:
        plans = [Plan(strategy, 2, count) for strategy in STRATEGIES[:5] for count in (1, 3)]
        plans += [Plan("DDP", 2, 2, "block"), Plan("ZERO1", 2, 2, "selective")]
        plans += [Plan(name, 2, 1, precision="bfloat16") for name in ("DDP", "FULL_SHARD")]
        plans += [Plan(name, 2, 3, "selective", blocks_per_unit=2) for name in SHARDED]
        plans += [Plan(name, 2, 3, reduces_each=True) for name in SHARDED]
        plans += [Plan("FULL_SHARD", 2, 1, "block", blocks_per_unit=3)]
        plans += [Plan("FULL_SHARD", 2, 2, kind, prefetch=2) for kind in ("none", "block")]
        plans += [Plan(name, 2, 2, blocks_per_unit=2, prefetch=2) for name in SHARDED]
        plans += [Plan("FULL_SHARD", 2, 2, prefetch=0), Plan("SHARD_GRAD_OP", 2, prefetch=2)]
        plans += [Plan("DDP", 2, 2, bucket_cap_mib=0.01)]
    done = rank_server.run(WORKER, "Blocks", *map(repr, plans), ranks=ranks)
    assert done.exit_codes == [0] * ranks, done.stderr[0]


@pytest.mark.slow
def test_units_that_are_gathered_ahead_take_the_memory_that_is_predicted(rank_server):
    worker = Path(__file__).with_name("peaks_worker.py")
    plans = [Plan("FULL_SHARD", 2, prefetch=ahead) for ahead in (0, 1, 2)]
    done = rank_server.run(worker, *map(repr, plans), ranks=2)
    assert done.exit_codes == [0, 0], done.stderr[0]
    peaks = [line["peak"] for line in done.lines()]
    assert peaks[0] < peaks[1] < peaks[2]
    for line in done.lines():
        assert line["predicted"] == pytest.approx(line["peak"], rel=0.03)


@pytest.mark.slow
def test_units_larger_than_their_activations_take_the_memory_that_is_predicted(rank_server):
    # Each of these has its peak at another moment: a gather of a last unit that is smaller, of the
    # first one with others ahead, the end of a unit's backward pass, a block in the middle.
    worker = Path(__file__).with_name("peaks_worker.py")
    plans = [Plan("FULL_SHARD", 2, 2, blocks_per_unit=4)]
    plans += [Plan("FULL_SHARD", 2, blocks_per_unit=2, prefetch=2)]
    plans += [Plan("FULL_SHARD", 2, 1, "block", blocks_per_unit=size) for size in (4, 6)]
    plans += [Plan(name, 2, 2, blocks_per_unit=3, reduces_each=True) for name in SHARDED]
    plans += [Plan(name, 2, 2, reduces_each=True) for name in SHARDED]
    done = rank_server.run(worker, *map(repr, plans), ranks=2)
    assert done.exit_codes == [0, 0], done.stderr[0]
    for plan, line in zip(plans, done.lines(), strict=True):
        assert line["predicted"] == pytest.approx(line["peak"], rel=0.01), plan


@pytest.mark.slow
def test_measuring_holds_one_model_and_its_states(rank_server, tmp_path):
    # AdamW's states, weights and gradients are 16 bytes a parameter. FSDP over one rank holds
    # gathered weights and gradients beside its own, messages are as large as the model, and a
    # rank's libraries take some 100 MB. Models that lived from round to round took 71 bytes.
    worker = Path(__file__).with_name("measured_memory_worker.py")
    strategies = ["FULL_SHARD", "SHARD_GRAD_OP", "ZERO1"]
    done = rank_server.run(worker, tmp_path, "1e9", *strategies, ranks=2)
    assert done.exit_codes == [0, 0], done.stderr[0]
    measured = json.loads(done.stdout[0].splitlines()[0])
    assert measured["strategies"] == strategies
    assert measured["taken"] < 45 * measured["parameters"]


@pytest.mark.slow
def test_a_model_is_planned_and_verified_peaks_are_those_predicted(rank_server, tmp_path):
    flags = ("--global_batch", 16, "--memory_bytes", "1e9", "--strategies", "DDP", "FULL_SHARD")
    flags += ("--checkpointing", "none", "block", "--train_steps", 20)
    flags += ("--mine", "DDP", "micro_batch=4", "checkpointing=none")
    answer, printed = planned(rank_server, tmp_path, "large", *flags)
    run = tmp_path / "run"
    assert (run / "plan.txt").read_text() in printed
    assert answer["strategy"] in ("DDP", "FULL_SHARD")
    assert answer["micro_batch"] * answer["accumulation"] == 8
    keys = [name for name in Plan.__dataclass_fields__ if name != "bucket_cap_mib"]
    predicted = {
        tuple(plan[key] for key in keys): plan["peak_bytes"]
        for plan in (answer, *answer["rejected"])
    }
    peaks = pd.read_csv(run / "plan-peaks.csv").groupby("plan")["peak_bytes"].max()
    assert len(peaks) == len(answer["verified"]) >= 2
    for plan in answer["verified"]:
        peak = predicted[tuple(plan[key] for key in keys)]
        assert plan["peak_bytes"] in set(peaks)
        # Under FSDP up to a unit more is predicted than is taken, and never less.
        unit = BLOCK_BYTES * plan["blocks_per_unit"] if plan["strategy"] == "FULL_SHARD" else 0
        assert 0.97 * plan["peak_bytes"] <= peak <= 1.03 * plan["peak_bytes"] + unit
        if plan["rounds"] >= 4:
            assert plan["step_low_s"] < plan["step_s"] < plan["step_high_s"]
        else:
            assert plan["step_low_s"] is None
    trained = pd.read_csv(run / "plan-training.csv").pivot(index="iteration", columns="rank")
    losses = trained["loss"]
    assert losses.shape == (20, 2)
    assert (losses[0] != losses[1]).all()  # ranks have samples of their own
    assert losses.iloc[-1].mean() < losses.iloc[0].mean() - 0.1
    compile("\n".join(answer["python"]), "plan.json", "exec")
    # The best two have rounds of their own, of which the second one's share is.
    rounds = [plan["rounds"] for plan in answer["verified"] if not plan["was_refused"]]
    assert rounds[:2] == [FEWEST_FINAL, FEWEST_FINAL]
    assert [plan["slower"] is not None for plan in answer["verified"][:2]] == [False, True]
    [mine] = [plan for plan in answer["verified"] if plan["mine"]]
    assert (mine["strategy"], mine["micro_batch"]) == ("DDP", 4)
    assert mine["rounds"] == FEWEST_FINAL
    assert "Yours, DDP, 2 × 4 samples, float32" in printed
    table = pd.read_csv(run / "plan-verified.csv")
    assert table["taken"].sum() == 1
    assert list(table["strategy"]) == [plan["strategy"] for plan in answer["verified"]]
    of_best = [(plan["strategy"], plan["checkpointing"]) for plan in answer["verified"][:2]]
    taken = of_best[:1] if answer["verdict"] == "settled" else of_best
    assert (answer["strategy"], answer["checkpointing"]) in taken
    assert answer["choice"] in printed


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["DDP", "FULL_SHARD"])
def test_settings_of_the_verified_plan_are_tried_and_the_best_has_rounds_of_its_own(
    rank_server, tmp_path, strategy
):
    flags = ("--memory_bytes", "1e9", "--strategies", strategy, "--checkpointing", "none")
    flags += ("--keeps_batch", "--tune_seconds", 300, "--mine", strategy, "blocks_per_unit=1")
    if strategy == "FULL_SHARD":
        flags += ("--options", "bfloat16")
    answer, printed = planned(rank_server, tmp_path, "make", *flags)
    tuned = answer["tuned"]
    assert "Tuned: of " in printed
    # Of what was verified one is taken, whichever of its settings is.
    assert [sum(plan[key] for plan in answer["verified"]) for key in ("taken", "mine")] == [1, 1]
    assert printed.index("Yours, ") < printed.index("Tuned: of ")
    assert tuned["allowed_s"] == 300
    assert all(tuned["taken"][key] == answer[key] for key in tuned["taken"])
    ran = [plan for plan in tuned["tried"] if plan["rounds"]]
    assert len(ran) >= 2
    assert ran[0]["rounds"] >= FEWEST_FINAL
    assert ran[0]["peak_bytes"] <= answer["budget_bytes"]
    # Every visit of the table is of a plan that was tried, or the verified one.
    visits = pd.read_csv(tmp_path / "run" / "tune-visits.csv")
    options = [plan for plan in tuned["options"] if plan["rounds"]]
    assert visits["plan"].nunique() == 1 + len(ran) + len(options)
    fields = {"DDP": "bucket_cap_mib", "FULL_SHARD": "prefetch"}
    values = {plan[fields[strategy]] for plan in (*tuned["tried"], tuned["base"])}
    assert len(values) >= 3
    if strategy == "FULL_SHARD":
        assert values == {0, 1, 2}
        assert {plan["precision"] for plan in tuned["tried"]} == {"float32"}
        assert answer["precision"] == "float32"
        assert {plan["precision"] for plan in tuned["options"]} <= {"bfloat16"}
