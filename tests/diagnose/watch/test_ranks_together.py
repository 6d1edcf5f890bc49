"""Ranks agree on what they do together, however late one of them comes."""

from __future__ import annotations

import threading
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from ddplab_watch import hooks, team
from ddplab_watch.batches import content_hashes


@pytest.fixture
def store() -> dist.HashStore:
    return dist.HashStore()


@pytest.mark.parametrize(("of_rank_1", "go_on"), [("a DDP", True), ("its inner model", False)])
def test_ranks_that_come_together_and_see_the_same_go_on(store, of_rank_1: str, go_on) -> None:
    found: dict[int, bool] = {}

    def come(rank: int, sees: str) -> None:
        found[rank] = team.all_are_here(store, "job", rank, 2, sees)

    other = threading.Thread(target=come, args=(1, of_rank_1))
    other.start()
    come(0, "a DDP")
    other.join()
    assert found == {0: go_on, 1: go_on}


@pytest.mark.parametrize("late", [0, 1])
def test_a_rank_that_comes_too_late_finds_what_was_decided(store, monkeypatch, late) -> None:
    # Rank 0 may evaluate for minutes before its update, when the other has gone on training.
    monkeypatch.setattr(team, "HERE", timedelta(seconds=0.2))
    early = 1 - late
    assert not team.all_are_here(store, "job", early, 2)
    assert not team.all_are_here(store, "job", late, 2)


def test_hosts_take_the_folder_that_rank_0_names(store, tmp_path: Path) -> None:
    # Each has a launcher of its own, after which its ranks would name the folder.
    first = team.same_folder(tmp_path / "11", store, 0, "rank0.jsonl")
    assert first == tmp_path / "11"
    assert team.same_folder(tmp_path / "22", store, 1, "rank1.jsonl") == first


def test_a_folder_that_was_used_is_not_used_again(store, tmp_path: Path) -> None:
    # As of a job that was started again under its old number.
    used = tmp_path / "job"
    used.mkdir()
    (used / "rank0.jsonl").touch()
    first = team.same_folder(used, store, 0, "rank0.jsonl")
    assert first != used
    assert first.parent == tmp_path
    assert team.same_folder(used, store, 1, "rank1.jsonl") == first


def test_ranks_that_were_started_anew_take_no_folder_of_the_start_before(
    store, tmp_path: Path, monkeypatch
) -> None:
    # torchrun's store outlives them.
    monkeypatch.setattr(team, "HERE", timedelta(seconds=0.1))
    team.same_folder(tmp_path / "0", store, 0, "rank0.jsonl")
    mine = tmp_path / "1"
    assert team.same_folder(mine, store, 1, "rank1.jsonl", "1") == mine
    chosen = team.same_folder(tmp_path / "2", store, 0, "rank0.jsonl", "1")
    assert team.same_folder(mine, store, 1, "rank1.jsonl", "1") == chosen == tmp_path / "2"


class OtherOptimizer:
    """Steps, and is none of torch's: wrappers of optimizers are such."""

    def __init__(self, weight: torch.Tensor) -> None:
        self.param_groups = [{"params": [weight]}]
        self.steps = 0

    def step(self) -> None:
        self.steps += 1


def test_a_scaler_steps_whatever_can_step() -> None:
    watched = hooks.Hooks()
    hooks.watch_updates(watched, lambda optimizer, skipped: None)
    try:
        weight = torch.ones(2, requires_grad=True)
        optimizer, scaler = OtherOptimizer(weight), torch.amp.GradScaler("cpu")
        scaler.scale(weight.sum()).backward()
        scaler.step(optimizer)
    finally:
        watched.remove()
    assert optimizer.steps == 1


def test_samples_of_equal_labels_or_beginnings_differ() -> None:
    images = torch.zeros(2, 400, 400)
    images[1, 300] = 1.0
    first, second = content_hashes((torch.tensor([3, 3]), images))
    assert first != second
    again = content_hashes((torch.tensor([3, 3]), images.flip(0)))
    assert again == [second, first]
    assert content_hashes({"names": ["a", "b"]}) is None
