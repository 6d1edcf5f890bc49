"""Causes in what all ranks do beside their model, from made-up runs whose answer is known."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import fields, replace
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from scaling_evidence import MIB, MadeUp, as_watched, case_of, change_table, verdict_on, verdicts_on

from common.diagnose.all_causes import OF_SCRIPTS
from common.diagnose.causes.beside import beside_the_model
from common.diagnose.causes.over_steps import growing_memory, reserved_memory, unequal_memory
from common.diagnose.diagnosis import examine_case
from common.diagnose.evidence.case import Case, Verdict
from common.diagnose.evidence.evidence import ALL_REDUCE, NotJudged
from common.diagnose.frameworks import ACCELERATE, TRAINER
from common.tables import STACK_COLUMNS


def watched(
    folder: Path,
    run: MadeUp = MadeUp(noise=0.001),  # noqa: B008  # frozen
    looks: tuple[tuple, ...] = (),
    costs: tuple[tuple, ...] = (),
    **columns: object,
) -> Case:
    """Writes a made-up run as one of a watched script, with columns of its steps, and opens it.

    Args:
        folder: folder to write into.
        run: what is made up.
        looks: phase, line, call and number of looks of each rank.
        costs: cost, bytes and ms.
        columns: column of ``steps.csv`` → a number, or a function of that table.
    """
    as_watched(run.write(folder))
    backward = ["backward_time_ms", "communication_time_ms", "waiting_time_ms"]
    change_table(
        folder,
        fetch_time_ms=lambda steps: steps["data_time_ms"],
        evaluation_time_ms=0.0,
        whole_backward_time_ms=lambda steps: steps[backward].sum(axis=1),
    )
    change_table(folder, **columns)
    rows = [(rank, *look) for look in looks for rank in range(run.ranks)]
    pd.DataFrame(rows, columns=STACK_COLUMNS).to_csv(folder / "stacks.csv", index=False)
    table = pd.DataFrame(costs, columns=["cost", "size_bytes", "time_ms"])
    table.assign(rank=0, repeat=0).to_csv(folder / "costs.csv", index=False)
    return case_of(folder)


def with_facts(**facts: object) -> dict[int, Mapping[str, object]]:
    return dict.fromkeys((0, 1), facts)


UPDATES = MadeUp(noise=0.001, optimizer_ms=12.0, facts=with_facts(wrapper="DDP"))
"""Steps of 44.2 ms, and 0.3 ms between them."""
ALONE = MadeUp(noise=0.001, optimizer_ms=12.0, facts=with_facts(wrapper=""))


@pytest.mark.parametrize(
    ("run", "call", "title", "change"),
    [
        (UPDATES, "distributed_c10d.barrier", "every rank calls barrier in each", "barrier out"),
        (UPDATES, "distributed_c10d.all_gather_object", "calls all_gather_object", "one tensor"),
        (ALONE, "distributed_c10d.all_reduce", "exchanges gradients by itself", "DistributedData"),
    ],
)
def test_a_scripts_own_exchange_is_named_with_its_line(tmp_path, run, call, title, change) -> None:
    looks = (
        ("optimizer", "/my/train.py:31 step", f"torch.distributed.{call}", 75),
        ("optimizer", "/my/train.py:40 main", "torch.optim.sgd.step", 25),
    )
    verdict = verdict_on(watched(tmp_path / "run", run, looks), "own-exchange")
    assert title in verdict.title
    assert "(train.py:31)" in verdict.title
    assert change in verdict.change
    # 9 of 44.5 ms; one all-reduce of all gradients takes 4.4 ms of them.
    kept_ms = 0.2 + 4 * MIB / 1e6 if run is ALONE else 0.0
    assert verdict.lost_share == pytest.approx((9 - kept_ms) / 44.5, rel=0.03)


def test_an_exchange_of_its_own_may_be_needed_where_none_was_timed(tmp_path: Path) -> None:
    looks = (("optimizer", "/my/train.py:31 main", "torch.distributed.all_reduce", 100),)
    levels = []
    for name in ("timed", "not"):
        case = watched(tmp_path / name, ALONE, looks)
        if name == "not":
            (tmp_path / name / ALL_REDUCE).unlink()
        levels.append(verdict_on(case, "own-exchange").confidence)
    assert levels == ["high", "low"]


@pytest.mark.parametrize(
    ("line", "facts", "cause"),
    [
        (47, {"norm_lines": "/my/train.py:40-50;/my/other.py:1-9"}, "synchronised-norms"),
        (51, {"norm_lines": "/my/train.py:40-50;/my/other.py:1-60"}, "own-exchange"),
        (47, {"norm_lines": math.nan}, "own-exchange"),
        (47, {}, "own-exchange"),
    ],
)
def test_norms_of_the_script_that_exchange_have_the_time_of_both_passes(
    tmp_path: Path, line: int, facts: dict, cause: str
) -> None:
    collectives = "torch.distributed.nn.functional"
    looks = (
        ("forward", f"/my/train.py:{line} forward", f"{collectives}.all_reduce", 3),
        ("forward", "/my/train.py:51 forward", "torch.distributed.distributed_c10d.barrier", 1),
        ("forward", "/my/train.py:80 main", "", 6),
        ("backward", "/my/train.py:90 main", f"{collectives}.backward", 1),
        ("backward", "/my/train.py:90 main", "torch._tensor.backward", 1),
    )
    run = replace(UPDATES, facts=with_facts(wrapper="DDP", synchronised_norms=0, **facts))
    case = watched(tmp_path / "run", run, looks, forward_time_ms=10.0, whole_backward_time_ms=20.0)
    [verdict] = [verdict for verdict in judged_of(case) if verdict is not None]
    assert verdict.cause == cause
    assert f"(train.py:{line})" in verdict.title
    step_ms = case.run.measured["step_time_ms"].mean() + case.run.measured["between_time_ms"].mean()
    assert verdict.lost_share == pytest.approx((0.4 * 10 + 0.5 * 20) / step_ms, rel=0.01)


def judged_of(case: Case) -> list[Verdict | None]:
    return [OF_SCRIPTS[cause](case) for cause in ("synchronised-norms", "own-exchange")]


@pytest.mark.parametrize(("waits", "is_slow"), [((75, 0), True), ((40, 35), False)])
def test_a_slow_rank_is_seen_behind_an_exchange_of_the_scripts_own(
    tmp_path: Path, waits: tuple[int, int], is_slow: bool
) -> None:
    """Forward passes of 60 ms end together in a gather, where rank 0 is found most of the time."""
    folder = as_watched(MadeUp(noise=0.001).write(tmp_path / "run"))
    change_table(
        folder,
        step_time_ms=lambda steps: steps["step_time_ms"] - steps["forward_time_ms"] + 60,
        forward_time_ms=60.0,
    )
    gather = "torch.distributed.distributed_c10d.all_gather"
    rows = [
        (rank, "forward", f"/my/train.py:{line} main", call, samples)
        for rank, waiting in enumerate(waits)
        for line, call, samples in ((31, gather, waiting), (32, "", 100 - waiting))
    ]
    pd.DataFrame(rows, columns=STACK_COLUMNS).to_csv(folder / "stacks.csv", index=False)
    verdict = verdict_on(folder, "slow-rank")
    assert (verdict is not None) == is_slow
    if is_slow:
        step_ms = case_of(folder).run.slowest_ms.median()
        assert verdict.title == "rank 1's forward pass is slow (train.py:32)"
        assert verdict.lost_share == pytest.approx(45 / step_ms, rel=0.02)


@pytest.mark.parametrize(
    ("call", "causes"),
    [
        ("torch.distributed.distributed_c10d.barrier", {"own-exchange": 0.9 * 12 / 45.5}),
        ("torch.nn.modules.module._wrapped_call_impl", {}),
        ("torch.nn.functional.grid_sample", {"data-loading": 12.2 / 45.2}),
    ],
    ids=["a barrier", "a teacher", "images that are turned"],
)
def test_loading_is_what_prepares_a_batch(tmp_path: Path, call: str, causes: dict) -> None:
    """Of 12 ms from a fetch to the forward pass nine tenths are in a call."""
    looks = (
        ("copy", "/my/train.py:31 main", call, 90),
        ("copy", "/my/train.py:32 main", "", 10),
    )
    times = {"data_time_ms": 12.2, "fetch_time_ms": 0.2, "step_time_ms": 45.2}
    seen = verdicts_on(watched(tmp_path / "run", looks=looks, **times))
    both = ("own-exchange", "data-loading")
    shares = {name: seen[name].lost_share for name in both if name in seen}
    assert shares == pytest.approx(causes, rel=0.01)


def test_what_another_model_takes_before_the_pass_is_a_hint(tmp_path: Path) -> None:
    """As a reference that scores each batch: 12 ms of 45.2, nine tenths of them in it."""
    call = "torch.nn.modules.module._wrapped_call_impl"
    looks = (("copy", "/my/a.py:31 main", call, 90), ("copy", "/my/a.py:32 main", "", 10))
    times = {"data_time_ms": 12.0, "fetch_time_ms": 0.0, "step_time_ms": 45.0}
    verdict = verdict_on(watched(tmp_path / "run", looks=looks, **times), "beside-the-model")
    assert verdict.title == "other modules run for 10.8 ms before the model's own pass (a.py:31)"
    assert verdict.confidence == "low"
    assert verdict.lost_share == pytest.approx(10.8 / 45.3, rel=0.01)


@pytest.mark.parametrize(("call", "is_handed"), [("scatter", True), ("broadcast", False)])
def test_samples_that_one_rank_hands_on_are_not_those_of_every_loader(
    tmp_path: Path, call: str, is_handed: bool
) -> None:
    called = f"torch.distributed.distributed_c10d.{call}"
    looks = (("copy", "/my/train.py:31 main", called, 5), ("copy", "/my/train.py:32 main", "", 5))
    same = MadeUp(samples={"processed": 1000, "distinct": 1000, "shared": 1000})
    case = watched(tmp_path / "run", same, looks=looks)
    assert ("wrong-sampler" in verdicts_on(case)) != is_handed


def test_barriers_of_accelerate_between_steps_are_no_other_work(tmp_path: Path) -> None:
    looks = (
        ("between", "/my/train.py:31 main", "accelerate.accelerator.wait_for_everyone", 50),
        ("between", "/my/train.py:32 main", "accelerate.accelerator.gather_for_metrics", 40),
        ("between", "/my/train.py:33 main", "", 10),
    )
    causes = verdicts_on(watched(tmp_path / "run", looks=looks, between_time_ms=10.0))
    assert causes["own-exchange"].title.endswith("wait_for_everyone in each step (train.py:31)")
    assert causes["own-exchange"].change.startswith("Leave the barrier out")
    assert "evaluation-or-logging" not in causes


def test_a_loader_that_starts_between_steps_is_no_other_work(tmp_path) -> None:
    looks = (("between", "/my/train.py:31 main", "torch.utils.data.dataloader.__iter__", 100),)
    assert not verdicts_on(watched(tmp_path / "run", looks=looks, between_time_ms=10.0))


@pytest.mark.parametrize(
    ("name", "cause"),
    [("main", "needless-recomputation"), ("evaluate", "evaluation-or-logging")],
)
def test_a_pass_without_gradients_in_each_step_is_a_second_one(tmp_path, name, cause) -> None:
    """Unless the function that makes it is there to judge the model."""
    looks = (("evaluation", f"/my/train.py:31 {name}", "", 80),)
    times = {"between_time_ms": 16.5, "evaluation_time_ms": 15.0}
    causes = verdicts_on(watched(tmp_path / "run", looks=looks, **times))
    assert [*causes] == [cause]
    assert "train.py:31" in causes[cause].title
    assert causes[cause].lost_share == pytest.approx(16.5 / 49.7, rel=0.02)


@pytest.mark.parametrize("epoch_of", [10, 1000])
def test_work_between_steps_that_comes_with_epochs_is_their_beginning(tmp_path, epoch_of) -> None:
    """100 ms before each tenth step of 33.2 ms."""
    case = watched(
        tmp_path / "run",
        looks=(("between", "/my/train.py:31 search", "torch.functional.cdist", 80),),
        epoch=lambda steps: steps["step"] // epoch_of,
        between_time_ms=lambda steps: 0.3 + 100.0 * steps["step"].isin([10, 20]),
    )
    cause = "epoch-start" if epoch_of == 10 else "evaluation-or-logging"
    [(found, verdict)] = verdicts_on(case).items()
    assert found == cause
    assert "train.py:31" in verdict.title
    if cause == "epoch-start":
        assert "every 10 steps an epoch begins, with 100 ms of other work" in verdict.title
        assert verdict.lost_share == pytest.approx(100 / (332 + 100), rel=0.02)


@pytest.mark.parametrize(("optimizer_ms", "is_named"), [(3.0, True), (1.5, False)])
def test_work_of_a_scripts_own_before_its_update_is_named_from_a_twentieth_on(
    tmp_path, optimizer_ms: float, is_named: bool
) -> None:
    looks = (("optimizer", "/my/train.py:31 average", "", 100),)
    case = watched(tmp_path / "run", MadeUp(noise=0.001, optimizer_ms=optimizer_ms), looks)
    assert (verdict_on(case, "heavy-update") is not None) == is_named


@pytest.mark.parametrize(
    ("call", "facts", "title", "saved_ms"),
    [
        ("", {}, "before its update (train.py:31)", 12.0),
        ("torch.optim.adamw.step", {}, "the update takes long on every rank", 12 - 1.75),
        ("torch.optim.adamw.step", {"is_fused": True}, "", 0),
        ("torch.optim.lbfgs.step", {"optimizer": "LBFGS"}, "", 0),
    ],
)
def test_an_update_that_all_ranks_take_long_for_is_named(
    tmp_path, call: str, facts: dict, title: str, saved_ms: float
) -> None:
    run = MadeUp(
        noise=0.001,
        optimizer_ms=12.0,
        facts=with_facts(**{"optimizer": "AdamW", "is_fused": False} | facts),
    )
    looks = (("optimizer", "/my/train.py:31 step", call, 100),)
    case = watched(tmp_path / "run", run, looks, costs=(("copy", 4 * MIB, 1.0),))
    verdict = verdict_on(case, "heavy-update")
    assert (verdict is None) == (not title)
    if title:
        assert title in verdict.title
        assert "It takes 12 ms, 27 % of a step" in verdict.evidence[0]
        assert verdict.lost_share == pytest.approx(saved_ms / 44.5, rel=0.03)
        assert verdict.confidence == "medium"


def test_an_exchange_of_a_library_is_no_update(tmp_path: Path) -> None:
    """Of 12 ms before and in the update 9 are an exchange, and 3 are too few to be named."""
    run = MadeUp(optimizer_ms=12.0, facts=with_facts(optimizer="AdamW", is_fused=False))
    looks = (
        ("optimizer", "/my/train.py:31 main", "accelerate.accelerator.reduce", 75),
        ("optimizer", "/my/train.py:32 main", "accelerate.optimizer.step", 25),
    )
    causes = verdicts_on(watched(tmp_path / "run", run, looks, costs=(("copy", 4 * MIB, 1.0),)))
    assert "own-exchange" in causes
    assert "heavy-update" not in causes


def test_an_update_that_was_looked_at_on_one_rank_alone_is_none_of_every_rank(tmp_path) -> None:
    run = MadeUp(optimizer_ms=12.0, facts=with_facts(optimizer="AdamW", is_fused=False))
    looks = (("optimizer", "/my/train.py:31 step", "torch.optim.adamw.step", 100),)
    folder = watched(tmp_path / "run", run, looks, costs=(("copy", 4 * MIB, 1.0),)).run.folder
    stacks = pd.read_csv(folder / "stacks.csv")
    stacks[stacks["rank"] == 0].to_csv(folder / "stacks.csv", index=False)
    assert verdict_on(folder, "heavy-update") is None


@pytest.mark.parametrize(("longer_ms", "speed"), [(0, 1.0), (15, 1.0), (0, 1.4)])
def test_a_pass_that_is_longer_in_the_training_is_named(tmp_path, longer_ms, speed) -> None:
    """Of a machine that was slower during the training, both passes are.

    The backward pass takes 22 ms with its exchange for 20 alone, a tenth more; so may the machine.
    """
    case = watched(
        tmp_path / "run",
        looks=(
            ("forward", "/my/train.py:31 train", "", 60),
            ("forward", "/a.py:1 forward", "", 40),
        ),
        forward_time_ms=lambda steps: speed * steps["forward_time_ms"] + longer_ms,
        backward_time_ms=lambda steps: speed * steps["backward_time_ms"],
        whole_backward_time_ms=lambda steps: speed * steps["backward_time_ms"] + 2,
        step_time_ms=lambda steps: speed * 30 + 3.2 + longer_ms,
    )
    verdict = verdict_on(case, "beside-the-model")
    assert (verdict is None) == (not longer_ms)
    if verdict:
        assert "forward passes take 14 ms longer" in verdict.title
        assert "(train.py:31)" in verdict.title
        assert verdict.lost_share == pytest.approx(14 / 48.2, rel=0.02)


@pytest.mark.parametrize(
    ("longer_ms", "title", "level"),
    [
        (0, "other modules run for 15 ms between the model's pass and backward()", "low"),
        (20, "backward passes take 20 ms longer in the training than the model alone", "high"),
    ],
    ids=["a teacher", "a teacher with gradients"],
)
def test_other_modules_before_the_backward_pass_may_be_needed(
    tmp_path: Path, longer_ms: float, title: str, level: str
) -> None:
    """Of 25 ms from the model's call to backward() 15 are in another module."""
    module = "torch.nn.modules.module._wrapped_call_impl"
    looks = [("forward", "/my/train.py:30 main", module, 40)]
    looks += [("loss", "/my/train.py:31 main", module, 60)]
    looks += [("backward", "/my/train.py:32 main", "torch._tensor.backward", 100)]
    case = watched(
        tmp_path / "run",
        looks=tuple(looks),
        forward_time_ms=lambda steps: steps["forward_time_ms"] + 15,
        whole_backward_time_ms=lambda steps: steps["backward_time_ms"] + 2 + longer_ms,
        step_time_ms=48.2 + longer_ms,
    )
    times = {"forward_time_ms": 10.0, "backward_time_ms": 20.0, "exchange_time_ms": 2.0}
    passes = pd.DataFrame({"rank": [0, 1], "repeat": 0, "iteration": 0, "elements": 64} | times)
    passes.to_csv(case.run.folder / "passes-exchanging.csv", index=False)
    verdict = verdict_on(case.run.folder, "beside-the-model")
    assert verdict.title.startswith(title)
    assert verdict.confidence == level


def test_derivatives_of_the_models_outputs_may_be_the_method(tmp_path: Path) -> None:
    """The loss takes 15 ms for them, and the backward pass, which goes through them, 20 more."""
    looks = [("loss", "/my/train.py:31 main", "torch.autograd.__init__.grad", 60)]
    looks += [("forward", "/my/train.py:30 main", "torch.nn.modules.module._call_impl", 40)]
    case = watched(
        tmp_path / "run",
        looks=tuple(looks),
        forward_time_ms=lambda steps: steps["forward_time_ms"] + 15,
        whole_backward_time_ms=lambda steps: steps["backward_time_ms"] + 22,
        step_time_ms=68.2,
    )
    verdict = verdict_on(case, "beside-the-model")
    assert verdict.title.startswith("derivatives of its outputs make")
    assert verdict.confidence == "low"


@pytest.mark.parametrize(("alone", "in_step"), [(24, 32), (32, 30)])
def test_without_passes_of_the_same_batch_nothing_is_compared(tmp_path, alone, in_step) -> None:
    folder = watched(tmp_path / "run").run.folder
    probed = {
        "batch_per_rank": lambda table: table["batch_per_rank"].where(table["together"], alone)
    }
    change_table(folder, "probes.csv", **probed)
    change_table(folder, "arms.csv", batch_per_rank=in_step)
    with pytest.raises(NotJudged, match="own batches"):
        beside_the_model(case_of(folder))


@pytest.mark.parametrize(("late_ms", "workers"), [(300.0, 2), (300.0, 0), (10.0, 2)])
def test_what_comes_once_an_epoch_is_named_with_its_period(tmp_path, late_ms, workers) -> None:
    """Each tenth step begins an epoch; a median knows nothing of it."""
    facts = with_facts(loader_workers=workers, persistent_workers=False)
    case = watched(
        tmp_path / "run",
        MadeUp(noise=0.001, facts=facts),
        epoch=lambda steps: steps["step"] // 10,
        data_time_ms=lambda steps: 0.2 + late_ms * (steps["step"] % 10 == 0),
        step_time_ms=lambda steps: 33.2 + late_ms * (steps["step"] % 10 == 0),
    )
    verdict = verdict_on(case, "epoch-start")
    assert (verdict is None) == (late_ms < 100)
    if verdict:
        assert "every 10 steps an epoch begins" in verdict.title
        assert ("workers start anew" in verdict.title) == (workers > 0)
        assert verdict.lost_share == pytest.approx(300 / (332 + 300), rel=0.02)
        assert verdict.predicted_speedup == pytest.approx(case.speedup_now, rel=0.02)


@pytest.mark.parametrize(("slower", "is_named"), [(("forward",), True), (("all",), False)])
def test_a_phase_that_takes_longer_with_each_step_is_named(tmp_path, slower, is_named) -> None:
    """Forward passes of 10 ms take 0.3 ms longer with each of 30 steps; or the machine slows."""
    longer = {"forward_time_ms": lambda steps: steps["forward_time_ms"] + 0.3 * steps["step"]}
    if not is_named:
        names = ("data", "forward", "backward", "optimizer")
        longer = {
            f"{name}_time_ms": lambda steps, n=name: (
                steps[f"{n}_time_ms"] * (1 + 0.02 * steps["step"])
            )
            for name in names
        }
    parts = ["data_time_ms", "forward_time_ms", "backward_time_ms", "optimizer_time_ms"]
    looks = (("forward", "/my/train.py:31 forward", "", 80),)
    folder = watched(tmp_path / "run", looks=looks, **longer).run.folder
    change_table(folder, step_time_ms=lambda steps: steps[parts].sum(axis=1) + 2)
    case = case_of(folder)
    verdict = verdict_on(case, "growing-memory")
    assert (verdict is not None) == is_named
    if verdict:
        assert "forward phase takes 0.3 ms longer with each step (train.py:31)" in verdict.title
        assert verdict.lost_share == pytest.approx(0.3 * 14.5 / (33.2 + 0.3 * 14.5), rel=0.05)


def test_a_rank_with_larger_graphs_is_slow_and_the_one_with_small_ones_is_not(tmp_path) -> None:
    """Rank 0 has thrice the nodes; a pass takes 5 ms and 1 ms for each 100 of them."""
    random = np.random.default_rng(0)

    def nodes(steps: pd.DataFrame) -> pd.Series:
        return (1500 - 1000 * steps["rank"]) * random.uniform(0.9, 1.1, len(steps))

    folder = watched(tmp_path / "run", samples=nodes, padded_tokens=nodes).run.folder
    change_table(folder, padded_tokens=lambda steps: steps["samples"])
    change_table(folder, forward_time_ms=lambda steps: 5 + steps["samples"] / 100)
    verdict = verdict_on(folder, "slow-rank")
    title = r"rank 0 has 1[45]\d\d samples in each step, the others [45]\d\d"
    assert re.match(title, verdict.title)
    # With equal graphs each rank would take 5 ms less.
    step_ms = case_of(folder).run.slowest_ms.median()
    assert verdict.lost_share == pytest.approx(5 / step_ms, rel=0.1)


@pytest.mark.parametrize("sharded", [0, 4])
def test_images_of_unequal_sizes_are_told_by_their_elements(tmp_path: Path, sharded: int) -> None:
    """Ranks draw one of three sizes each; under FSDP all passes last as long as the largest."""
    random = np.random.default_rng(0)
    drawn = random.choice([1.0, 4.0, 7.0], (30, 2))

    def size(steps: pd.DataFrame) -> pd.Series:
        return pd.Series(drawn[steps["step"], steps["rank"]], steps.index)

    def forward(steps: pd.DataFrame) -> pd.Series:
        own = 8 * size(steps)
        return own.groupby(steps["step"]).transform("max") if sharded else own

    facts = with_facts(sharded_modules=sharded)
    case = watched(
        tmp_path / "run",
        MadeUp(noise=0.001, facts=facts),
        padded_tokens=32,
        elements=lambda steps: 1000 * size(steps),
        forward_time_ms=forward,
        backward_time_ms=0.0,
        whole_backward_time_ms=2.0,
        step_time_ms=lambda steps: 5.2 + (8 * size(steps)).groupby(steps["step"]).transform("max"),
    )
    verdict = verdict_on(case, "unequal-lengths")
    assert "batches of unequal size: ranks wait for the largest" in verdict.title
    saved_ms = 8 * (drawn.max(axis=1) - drawn.mean(axis=1))
    steps_ms = 5.2 + 8 * drawn.max(axis=1)
    assert verdict.lost_share == pytest.approx(saved_ms.sum() / steps_ms.sum(), rel=0.25)


@pytest.mark.parametrize(
    ("judge", "column", "mebibytes", "cause"),
    [
        (growing_memory, "resident_bytes", lambda rows: 400 + 1.5 * rows["step"], "growing"),
        (growing_memory, "resident_bytes", lambda rows: 400 + 2 * rows["step"].clip(upper=15), ""),
        (unequal_memory, "resident_bytes", lambda rows: 400 + 300 * rows["rank"], "imbalance"),
        (unequal_memory, "resident_bytes", lambda rows: 400 + 50 * rows["rank"], ""),
        (reserved_memory, "reserved_bytes", lambda rows: 5000 + 0 * rows["rank"], "reserved"),
        (reserved_memory, "reserved_bytes", lambda rows: 2500 + 0 * rows["rank"], ""),
    ],
)
def test_memory_is_named_by_what_holds_it(tmp_path, judge, column, mebibytes, cause) -> None:
    held = {"allocated_bytes": 0.0, "resident_bytes": 400.0 * MIB}
    if column == "reserved_bytes":
        held["allocated_bytes"] = 2000.0 * MIB
    verdict = judge(watched(tmp_path / "run", **held | {column: lambda r: MIB * mebibytes(r)}))
    assert (verdict is None) == (not cause)
    assert verdict is None or cause in verdict.cause


def test_a_change_names_arguments_that_the_framework_has() -> None:
    accelerate, transformers = (pytest.importorskip(n) for n in ("accelerate", "transformers"))
    arguments = {field.name for field in fields(transformers.TrainingArguments)}
    words = " ".join(words for _, words in TRAINER).replace(r"ddp_\1", "ddp_broadcast_buffers")
    named = set(re.findall(r"(\w+)=", words))
    assert len(named) > 8
    assert named <= arguments
    words = " ".join(words for _, words in ACCELERATE)
    named = set(re.findall(r"[(, ](\w+)=", words))
    assert named >= {"kwargs_handlers", "mixed_precision", "gradient_accumulation_steps"}
    assert named <= set(accelerate.Accelerator.__init__.__code__.co_varnames)


@pytest.mark.parametrize(("dtype", "argument"), [("bfloat16", "bf16"), ("float16", "fp16")])
def test_a_precision_has_its_name_in_each_framework(dtype: str, argument: str) -> None:
    change = f"with torch.autocast('cuda', torch.{dtype}) around the forward pass and the loss"
    for table, said in ((TRAINER, f"({argument}=True)"), (ACCELERATE, f"='{argument}')")):
        [words] = [words for pattern, words in table if re.fullmatch(pattern, change)]
        assert words.endswith(said)


@pytest.mark.parametrize("framework", ["Trainer", "accelerate", ""])
def test_a_change_is_said_in_the_words_of_who_trains(tmp_path, framework: str) -> None:
    facts = with_facts(framework=framework, buffers_bytes=MIB)
    case = watched(tmp_path / "run", MadeUp(noise=0.001, facts=facts), buffers_time_ms=5.0)
    change = verdict_on(case, "sent-buffers").change
    words = {
        "Trainer": "TrainingArguments(ddp_broadcast_buffers=False)",
        "accelerate": "DistributedDataParallelKwargs(broadcast_buffers=False)",
        "": "DistributedDataParallel(model, broadcast_buffers=False)",
    }
    assert words[framework] in change
    assert ("forward_sync_buffers" in change) == (not framework)


def test_a_script_that_freezes_in_turns_what_it_trains_is_diagnosed(tmp_path: Path) -> None:
    """As its first step is written, nothing has a gradient; that is no reason to fail."""
    case = watched(tmp_path / "run", MadeUp(noise=0.001, facts=with_facts(gradient_bytes=0)))
    (case.run.folder / "buckets.csv").unlink()
    change_table(case.run.folder, micro_batches=2)
    causes = dict(examine_case(case_of(case.run.folder)).not_judged)
    assert "no parameter with a gradient" in causes["needless-synchronisation"]
