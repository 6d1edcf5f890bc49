"""Models and loops of other kinds, watched: they compute the same, and their records are true."""

from __future__ import annotations

import gc
import weakref
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from ddplab_watch import hooks
from ddplab_watch.buckets import WatchedGroup
from ddplab_watch.calls import Calls
from ddplab_watch.feed import Feed
from ddplab_watch.marks import HostClock
from ddplab_watch.options import Options
from ddplab_watch.session import Session
from ddplab_watch.steps import Loop
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint
from watch_support import SHORT, assert_parts_add_up, rows_of

from common.diagnose.evidence.bundle import read_bundle
from common.diagnose.evidence.bundle_tables import tables_of


def test_a_model_that_gathers_in_its_pass_is_not_probed_alone(compared_run) -> None:
    # As contrastive learning does. A rank by itself would wait for the others, who wait for it.
    folder = compared_run("--gathers", 1, "--left_on", 1)
    assert "the model exchanges inside of a pass" in str(rows_of(folder, 0, "unseen"))
    for rank in (0, 1):  # both run such passes together, with and without what is left on
        lean = {row["without"] for row in rows_of(folder, rank, "lean-passes")}
        assert lean == {"hooks", "unused gradients"}
    assert not rows_of(folder, 0, "probes")
    assert rows_of(folder, 0, "allreduce-samples")


def test_buckets_may_be_made_anew_while_they_are_watched(compared_run) -> None:
    # DDP does so after its first exchange, which is here in the first step with watched buckets.
    first = 1 + SHORT["warmup"] + SHORT["window"]
    folder = compared_run("--local_steps", first, probe=0)
    steps = [row["step"] for row in rows_of(folder, 0, "steps") if row["exchanged_bytes"]]
    assert len(steps) == SHORT["bucket_steps"]


def test_probes_put_back_all_that_a_pass_moves(compared_run) -> None:
    # Weights that follow others, in their storage or a new one, a buffer made anew, a counter.
    folder = compared_run("--averages", 1)
    assert rows_of(folder, 0, "probes")


def test_passes_that_fail_on_one_rank_end_the_probes_on_all(compared_run) -> None:
    # The training takes 20 passes and the probes come after 10; rank 1 fails in the midst of them.
    folder = compared_run(only_watched=("--passes_of_rank_1", 21))
    for rank, why in ((0, "failed on another rank"), (1, "out of memory")):
        assert why in str(rows_of(folder, rank, "unseen"))
        assert rows_of(folder, rank, "end")[0]["status"] == "complete"


@pytest.mark.parametrize("count", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_a_compiled_model_is_not_compiled_again_for_other_batches(compared_run, count: int) -> None:
    folder = compared_run("--compiled_inside", 1, count=count)
    assert {row["batch_per_rank"] for row in rows_of(folder, 0, "probes")} == {8}


@pytest.mark.parametrize(
    ("flag", "settings"), [("--checkpointed", {"verify": 1}), ("--two_losses", {})]
)
def test_backward_passes_of_one_forward_pass_are_one(
    compared_run, flag: str, settings: dict
) -> None:
    # Reentrant checkpointing has a backward pass for each part inside of the backward pass.
    folder = compared_run(flag, 1, count=1, **settings)
    steps = rows_of(folder, 0, "steps")
    assert {(row["micro_batches"], row["samples"]) for row in steps} == {(1, 8)}
    assert_parts_add_up(steps)
    without = {row["without"] for row in rows_of(folder, 0, "lean-passes")}
    assert without == ({"activation checkpointing"} if flag == "--checkpointed" else set())


def test_a_script_whose_own_class_has_the_name_of_ddp_is_probed_without_it(compared_run) -> None:
    folder = compared_run("--own_exchange", 1)
    assert rows_of(folder, 0, "facts")[0]["wrapper"] == ""
    assert rows_of(folder, 0, "probes")
    assert rows_of(folder, 0, "end")[0]["status"] == "complete"


def test_of_several_models_none_is_probed_alone(compared_run) -> None:
    folder = compared_run("--opponent", 1)
    assert "the script trains several models" in str(rows_of(folder, 0, "unseen"))
    assert not rows_of(folder, 0, "probes")


def test_an_epoch_ends_with_its_last_step_though_nothing_is_fetched_in_it(loop_run) -> None:
    flags = ("--loads_ahead", 1, "--samples", 64, "--steps", 14)
    folder, _ = loop_run(*flags, probe=0)
    # Four steps are an epoch, and the first update of all is not recorded.
    assert [row["epoch"] for row in rows_of(folder, 0, "steps")] == [0, 0, 0, *[1] * 4, 2, 2]


def test_a_loop_that_loads_ahead_has_its_forward_passes_in_its_steps(loop_run) -> None:
    flags = ("--loads_ahead", 1, "--slow_rank_s", 0.1, "--steps", 12)
    folder, _ = loop_run(*flags, probe=0)
    steps = rows_of(folder, 1, "steps")[1:]
    for row in steps:
        assert row["forward_time_ms"] > 100
        assert row["step_time_ms"] > row["forward_time_ms"]
    # A pass is no part of what is between; on a busy machine that, too, may take long at times.
    assert min(row["between_time_ms"] for row in steps) < 100


@pytest.mark.slow
def test_looks_tell_the_model_from_what_comes_before_backward(loop_run) -> None:
    folder, _ = loop_run("--slow_loss_s", 0.1, "--slow_rank_s", 0.1, "--steps", 12, probe=0)
    looks = [rows_of(folder, rank, "stacks") for rank in (0, 1)]
    loss, model = (
        [sum(row["samples"] for row in rows if row["phase"] == phase) for rows in looks]
        for phase in ("loss", "forward")
    )
    assert min(loss) > 10
    assert model[1] > loss[1] / 2
    assert model[0] < loss[0] / 2


def test_waiting_for_ddps_buffers_is_no_forward_pass(loop_run) -> None:
    # Rank 0 sends BatchNorm's buffers when it has updated; rank 1 has long called its model.
    folder, _ = loop_run("--slow_update_s", 0.2, "--steps", 12, probe=0)
    steps = tables_of(read_bundle(folder / "bundle"))["steps.csv"]
    timed = steps[(steps["kind"] == "timed") & (steps["step"] > 0)]
    medians = timed.groupby("rank")[["forward_time_ms", "waiting_time_ms"]].median()
    assert medians["waiting_time_ms"][1] > 200 * 2 / 3
    assert medians["waiting_time_ms"][0] < medians["waiting_time_ms"][1] / 2
    assert medians["forward_time_ms"].max() < medians["waiting_time_ms"][1] / 2


def test_a_thread_that_loads_ahead_makes_nobody_wait_and_a_hidden_model_is_found(
    compared_run,
) -> None:
    # Hidden from the collector, as all objects of the script are.
    flags = ("--hides_objects", 1, "--loads_in_thread", 1, "--slow_data_s", 0.01)
    folder = compared_run(*flags, count=1)
    assert "a thread that does not train loads it" in str(rows_of(folder, 0, "unseen"))
    for row in rows_of(folder, 0, "steps"):
        assert (row["data_time_ms"], row["samples"]) == (0.0, 8)


@pytest.fixture
def short_epochs(loop_run) -> Path:
    """A loop that makes loaders anew, for epochs of four batches a rank, and evaluates."""
    flags = ("--new_loaders", 1, "--samples", 64, "--evaluate", 3, "--steps", 14)
    return loop_run(*flags, probe=0)[0]


def test_loaders_made_anew_begin_a_new_epoch(short_epochs) -> None:
    samples = tables_of(read_bundle(short_epochs / "bundle"))["samples.csv"]
    assert (samples["processed"] == samples["distinct"]).all()
    assert samples["epoch"].nunique() >= 3


def test_evaluation_is_no_part_of_a_step(short_epochs) -> None:
    steps = rows_of(short_epochs, 0, "steps")
    evaluated = [row["step"] for row in steps if row["evaluation_time_ms"] > 0]
    # Evaluated after updates 3, 6 and 9, the first of all not being recorded as a step; the
    # evaluation belongs to the step that follows.
    assert evaluated == [2, 5, 8]


def test_an_order_that_stays_the_same_is_seen_from_the_beginnings_of_epochs(
    loop_run, short_epochs
) -> None:
    # The window begins in the middle of an epoch, and ends in that of another one.
    same, _ = loop_run("--samples", 64, "--set_epoch", 0, "--steps", 14, probe=0)
    for folder, orders in ((same, 1), (short_epochs, 2)):
        samples = tables_of(read_bundle(folder / "bundle"))["samples.csv"]
        known = samples.dropna(subset=["order"]).groupby("rank")["order"]
        assert known.size().tolist() == [2, 2]
        assert known.nunique().tolist() == [orders, orders]


class Wrapped(DistributedDataParallel):
    """DDP without a process group."""

    def __init__(self, module: nn.Module) -> None:
        nn.Module.__init__(self)
        self.module = module


def test_the_batch_that_is_kept_is_the_one_that_ddp_has_moved() -> None:
    model = Wrapped(nn.Linear(2, 2))
    loop = Loop(HostClock(), lambda: 0.0, lambda: 0.0)
    always = {"is_near_end": lambda: True, "is_last": lambda: True}
    calls = Calls(loop, torch.device("cpu"), Feed(), **always)
    given, moved, evaluated = (torch.full((4, 2), float(value)) for value in range(3))
    calls.began(model, (given,), {})
    calls.began(model.module, (moved,), {})
    calls.ended(model.module, moved)
    calls.ended(model, moved)
    with torch.no_grad():
        calls.began(model, (evaluated,), {})
        calls.began(model.module, (evaluated,), {})
        calls.ended(model.module, evaluated)
        calls.ended(model, evaluated)
    kept = calls.take()
    assert kept.args[0] is moved


@pytest.mark.parametrize("trained", [True, False])
def test_a_model_in_its_other_mode_is_evaluated_with_gradients_too(trained: bool) -> None:
    """As where forces are gradients of an energy; a model may be trained in either mode."""
    model, loop = nn.Linear(2, 2).train(trained), Loop(HostClock(), lambda: 0.0, lambda: 0.0)
    never = {"is_near_end": lambda: False, "is_last": lambda: False}
    calls = Calls(loop, torch.device("cpu"), Feed(), **never)
    for _ in range(2):
        calls.began(model, (torch.ones(4, 2),), {})
        calls.ended(model, model(torch.ones(4, 2)))
        loop.backward_began()
        loop.backward_ended()
        loop.update_ended(0)
        calls.began(model.eval(), (torch.ones(8, 2),), {})
        calls.ended(model, model(torch.ones(8, 2)))
        model.train(trained)
    assert loop.segment.evaluated == trained
    assert len(loop.segment.passes) == (not trained)
    assert sum(part.samples for part in loop.step.passes) == (4 if trained else 12)


def test_sparse_gradients_of_an_embedding_are_a_bucket_like_dense_ones() -> None:
    sent: torch.futures.Future = torch.futures.Future()
    sent.set_result(None)
    work = SimpleNamespace(get_future=lambda: sent)
    inner = SimpleNamespace(rank=lambda: 0, size=lambda: 1, allreduce=lambda tensors: work)
    group = WatchedGroup(inner, HostClock())
    assert group.allreduce([torch.eye(4).to_sparse()]) is work
    [bucket] = group.taken()
    assert (bucket.size_bytes, bucket.done is not None) == (64, True)


def test_a_pass_that_checkpointing_computes_anew_is_none() -> None:
    model, loop = nn.Linear(2, 2), Loop(HostClock(), lambda: 0.0, lambda: 0.0)
    never = {"is_near_end": lambda: False, "is_last": lambda: False}
    calls = Calls(loop, torch.device("cpu"), Feed(), **never)
    kept = hooks.Hooks()
    hooks.watch_forward(kept, model, calls.began, calls.ended)
    hooks.watch_backward(kept, loop.backward_began, loop.backward_ended)
    try:
        for step in range(3):
            hidden = checkpoint(model, torch.ones(4, 2, requires_grad=True), use_reentrant=False)
            hidden.relu().sum().backward()
            loop.update_ended(0)
            [one] = loop.step.passes
            assert (one.samples, one.ended is not None) == (4, True), step
    finally:
        kept.remove()


def test_a_watch_keeps_no_model_that_the_script_lets_go_of(tmp_path: Path) -> None:
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters())
    session = Session(optimizer, Options(folder=str(tmp_path / "bundle"), named=True), Feed())
    session.begin(hooks.Hooks(), lambda function: function)
    assert session.roots == [model]
    session.facts()
    seen = weakref.ref(model)
    del model, optimizer
    gc.collect()
    assert seen() is None
    assert session.roots == []
    session.end("ended")


@pytest.mark.parametrize("is_frozen_itself", [False, True])
def test_finding_a_model_keeps_no_later_one_from_the_collector(is_frozen_itself: bool) -> None:
    try:
        earlier = nn.Linear(2, 2)
        gc.freeze()  # as a script does before it forks workers
        model = earlier if is_frozen_itself else nn.Linear(2, 2)
        if not is_frozen_itself:
            model.__dict__["itself"] = model  # a cycle, as DDP lies in
        assert hooks.roots_of(model.parameters()) == [model]
        seen = weakref.ref(model)
        del model, earlier
        gc.collect()
        assert seen() is None
    finally:
        gc.unfreeze()
        gc.freeze()
