"""Models and loops of other kinds, watched: they compute the same, and their records are true."""

from __future__ import annotations

import gc
import weakref
from pathlib import Path

import pytest
import torch
from ddplab_watch import hooks
from ddplab_watch.calls import Calls
from ddplab_watch.feed import Feed
from ddplab_watch.marks import HostClock
from ddplab_watch.steps import Loop
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from watch_support import SHORT, rows_of, run_loop

from common.diagnose.evidence.bundle import read_bundle
from common.diagnose.evidence.bundle_tables import tables_of

STEPS = sum(SHORT.values())


@pytest.fixture
def ranks(rank_server):
    return rank_server.run


def watched_as_unwatched(ranks, folder: Path, *flags: object, count: int = 2) -> Path:
    """Runs the loop both ways and compares to the last bit; returns the watched one's folder."""
    plain, watched = folder / "plain", folder / "watched"
    plain.mkdir()
    watched.mkdir()
    expected = run_loop(ranks, plain, *flags, count=count)
    found = run_loop(ranks, watched, *flags, count=count, watch={})
    for before, after in zip(expected, found, strict=True):
        for name in ("losses", "parameters", "buffers", "random", "indices"):
            assert before[name] == after[name], name
    return watched


def test_a_model_that_gathers_in_its_pass_is_not_probed_alone(ranks, tmp_path: Path) -> None:
    # As contrastive learning does. A rank by itself would wait for the others, who wait for it.
    watched = watched_as_unwatched(ranks, tmp_path, "--gathers", 1)
    assert "the model exchanges inside of a pass" in str(rows_of(watched, 0, "unseen"))
    assert not rows_of(watched, 0, "probes")
    assert rows_of(watched, 0, "allreduce-samples")


def test_buckets_may_be_made_anew_while_they_are_watched(ranks, tmp_path: Path) -> None:
    # DDP does so after its first exchange, which is here in the first step with watched buckets.
    first = 1 + SHORT["warmup"] + SHORT["window"]
    watched = watched_as_unwatched(ranks, tmp_path, "--local_steps", first)
    steps = [row["step"] for row in rows_of(watched, 0, "steps") if row["exchanged_bytes"]]
    assert len(steps) == SHORT["bucket_steps"]


def test_probes_put_back_all_that_a_pass_moves(ranks, tmp_path: Path) -> None:
    # Weights that follow others, in their storage or a new one, a buffer made anew, a counter.
    watched = watched_as_unwatched(ranks, tmp_path, "--averages", 1)
    assert rows_of(watched, 0, "probes")


def test_passes_that_fail_on_one_rank_end_the_probes_on_all(ranks, tmp_path: Path) -> None:
    # The training takes 21 passes and the probes come after 10; rank 1 fails in the midst of them.
    watched = watched_as_unwatched(ranks, tmp_path, "--passes_of_rank_1", 21)
    for rank, why in ((0, "failed on another rank"), (1, "out of memory")):
        assert why in str(rows_of(watched, rank, "unseen"))
        assert rows_of(watched, rank, "end")[0]["status"] == "complete"


def test_a_compiled_model_is_not_compiled_again_for_other_batches(ranks, tmp_path: Path) -> None:
    watched = watched_as_unwatched(ranks, tmp_path, "--compiled_inside", 1)
    assert {row["batch_per_rank"] for row in rows_of(watched, 0, "probes")} == {8}


@pytest.mark.parametrize("flag", ["--checkpointed", "--two_losses"])
def test_backward_passes_of_one_forward_pass_are_one(ranks, tmp_path: Path, flag: str) -> None:
    # Reentrant checkpointing has a backward pass for each part inside of the backward pass.
    watched = watched_as_unwatched(ranks, tmp_path, flag, 1, count=1)
    steps = rows_of(watched, 0, "steps")
    assert {(row["micro_batches"], row["samples"]) for row in steps} == {(1, 8)}
    for row in steps:
        parts = ("data", "buffers", "forward", "backward", "exchange", "optimizer")
        whole = sum(row[f"{part}_time_ms"] or 0.0 for part in parts)
        assert whole == pytest.approx(row["step_time_ms"], rel=1e-6)


def test_a_loop_that_loads_ahead_has_its_forward_passes_in_its_steps(ranks, tmp_path: Path) -> None:
    watched = watched_as_unwatched(
        ranks, tmp_path, "--loads_ahead", 1, "--slow_rank_s", 0.1, count=2
    )
    for row in rows_of(watched, 1, "steps")[1:]:
        assert row["forward_time_ms"] > 100
        assert row["step_time_ms"] > row["forward_time_ms"]
        assert row["between_time_ms"] < 100  # the pass is no part of it


def test_waiting_for_ddps_buffers_is_no_forward_pass(ranks, tmp_path: Path) -> None:
    # Rank 0 sends BatchNorm's buffers when it has updated; rank 1 has long called its model.
    watched = watched_as_unwatched(ranks, tmp_path, "--slow_update_s", 0.1)
    steps = tables_of(read_bundle(watched / "bundle"))["steps.csv"]
    timed = steps[(steps["kind"] == "timed") & (steps["step"] > 0)]
    medians = timed.groupby("rank")[["forward_time_ms", "waiting_time_ms"]].median()
    assert medians["waiting_time_ms"][1] > 100 * 2 / 3
    assert medians["waiting_time_ms"][0] < medians["waiting_time_ms"][1] / 2
    assert medians["forward_time_ms"].max() < medians["waiting_time_ms"][1] / 2


def test_a_thread_that_loads_ahead_makes_nobody_wait(ranks, tmp_path: Path) -> None:
    words = ("--loads_in_thread", 1, "--slow_data_s", 0.01)
    watched = watched_as_unwatched(ranks, tmp_path, *words, count=1)
    assert "a thread that does not train loads it" in str(rows_of(watched, 0, "unseen"))
    for row in rows_of(watched, 0, "steps"):
        assert (row["samples"], row["data_time_ms"]) == (8, 0.0)


def test_a_model_is_found_among_objects_hidden_from_the_collector(ranks, tmp_path: Path) -> None:
    watched = watched_as_unwatched(ranks, tmp_path, "--hides_objects", 1, count=1)
    assert {row["samples"] for row in rows_of(watched, 0, "steps")} == {8}


def test_loaders_made_anew_begin_a_new_epoch(ranks, tmp_path: Path) -> None:
    words = ("--new_loaders", 1, "--samples", 64, "--evaluate", 3)  # four batches a rank
    watched = watched_as_unwatched(ranks, tmp_path, *words)
    samples = tables_of(read_bundle(watched / "bundle"))["samples.csv"]
    assert (samples["processed"] == samples["distinct"]).all()
    assert samples["epoch"].nunique() >= 3


@pytest.mark.parametrize(("set_epoch", "orders"), [(0, 1), (1, 2)])
def test_the_order_of_epochs_is_compared_from_their_beginnings(
    ranks, tmp_path: Path, set_epoch: int, orders: int
) -> None:
    # The window begins in the middle of an epoch, and ends in that of another one.
    words = ("--samples", 64, "--set_epoch", set_epoch, "--steps", 14)
    run_loop(ranks, tmp_path, *words, watch={})
    samples = tables_of(read_bundle(tmp_path / "bundle"))["samples.csv"]
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
