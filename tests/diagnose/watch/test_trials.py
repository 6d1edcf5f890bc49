"""Changes that are tried on a copy of a watched model: which ones, and how they are recorded."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from ddplab_watch import loading
from ddplab_watch.changes import (
    AS_IT_IS,
    AS_IT_LOADS,
    STEPS,
    AsItIs,
    Change,
    changes,
    worker_counts,
)
from ddplab_watch.options import Options
from ddplab_watch.trials import ROUNDS
from watch_support import EXCHANGES_EVERY_PASS, SCRIPTS, SHORT_ROUNDS, rows_of, run_ranks

FACTS = {
    "bucket_cap_mb": None,
    "find_unused_parameters": False,
    "static_graph": False,
    "gradient_as_bucket_view": True,
    "broadcast_buffers": True,
    "comm_hook": "",
}
PLAIN = AsItIs(FACTS, passes=1, last_only=False)


def rank(number: int, cores: range, threads: int, host: str = "a", machine: int = 1) -> dict:
    places = {"host": host, "cores": list(cores), "machine": list(range(machine))}
    return {"rank": number, "threads": threads, "own": number == 0} | places


APART = [rank(0, range(0, 1), 1), rank(1, range(1, 2), 1)]


def having(**facts: object) -> AsItIs:
    """Returns a plain script but for these facts of its DDP."""
    return replace(PLAIN, facts=FACTS | facts)


def tries(now: AsItIs = PLAIN, mib: float = 16.0, unused: bool = False, ranks=APART) -> list[str]:
    """Returns names and kinds of the changes that are tried."""
    found = changes(now, int(mib * 2**20), unused, ranks)
    return [change.name for change in found] + [change.kind for change in found]


def test_caps_are_those_below_all_gradients_and_one_bucket_for_all() -> None:
    found = [name for name in tries() if name.startswith("bucket_cap_mb=")]
    assert found == [f"bucket_cap_mb={cap}" for cap in ("0.5", "2", "8", "16.2")]
    own = having(bucket_cap_mb=8.0)
    assert "bucket_cap_mb=8" not in tries(own)
    assert "bucket_cap_mb" not in tries(mib=0.4)  # DDP has one bucket for them as it is
    assert "bucket_cap_mb=0.404" in tries(having(bucket_cap_mb=0.1), mib=0.4)


def test_a_search_is_left_out_only_where_every_parameter_has_a_gradient() -> None:
    searching = having(find_unused_parameters=True)
    assert "find_unused_parameters=False" in tries(searching)
    assert "find_unused_parameters=False" not in tries(searching, unused=True)
    assert "find_unused_parameters=False" not in tries()


def test_accumulation_is_tried_where_every_pass_exchanges() -> None:
    assert any("last of 2 passes" in name for name in tries())
    assert any("last of 4 passes" in name for name in tries(AsItIs(FACTS, 4, last_only=False)))
    assert "no_sync" not in tries(AsItIs(FACTS, 4, last_only=True))


def test_what_a_script_has_is_not_tried() -> None:
    found = tries(having(static_graph=True, comm_hook="fp16_compress_hook"))
    assert "static_graph=True" not in found
    assert "fp16_compress_hook" not in found
    assert "bf16_compress_hook" in found
    assert "gradient_as_bucket_view=True" not in found
    assert found[0] == AS_IT_IS


def by_kind(ranks: list[dict]) -> dict[str, Change]:
    return {change.kind: change for change in changes(PLAIN, 2**24, False, ranks)}


def test_ranks_that_share_cores_get_some_each() -> None:
    shared = [rank(0, range(4), 4), rank(1, range(4), 4), rank(2, range(4), 1, host="b")]
    found = by_kind(shared)
    assert found["affinity"].cores == {0, 1}
    assert found["threads"].threads == 2
    mine = [each | {"own": each["rank"] == 1} for each in shared]
    found = by_kind(mine)
    assert found["affinity"].cores == {2, 3}
    # A rank by itself keeps its cores, and tries the same changes as the others.
    alone = [each | {"own": each["rank"] == 2} for each in shared]
    found = by_kind(alone)
    assert found["affinity"].cores == set(range(4))
    assert found["threads"].threads == 4
    assert not {"affinity", "threads"} & set(tries())
    # Two ranks on one core cannot have one each, unless the machine has more.
    one = [rank(0, range(1), 1), rank(1, range(1), 1)]
    assert "affinity" not in tries(ranks=one)
    pinned = [each | {"machine": [0, 1]} for each in one]
    found = by_kind(pinned)
    assert found["affinity"].cores == {0}
    assert "threads" not in found


@pytest.fixture
def tried(loop_run) -> tuple[Path, list[dict]]:
    """Micro-batches all of which exchange, and wait for their data: every change is tried."""
    return loop_run("--accumulation", 3, *EXCHANGES_EVERY_PASS, verify=1)


def test_each_change_is_run_as_often_as_the_script_as_it_is(tried) -> None:
    folder, _ = tried
    for number in (0, 1):
        rows = [row for row in rows_of(folder, number, "trials") if row["kind"] != "workers"]
        kinds = {row["kind"] for row in rows}
        assert {AS_IT_IS, "bucket_cap_mb", "compression", "no_sync"} <= kinds
        assert {"find_unused_parameters", "static_graph"} <= kinds
        for setting in {row["setting"] for row in rows}:
            own = [row for row in rows if row["setting"] == setting]
            assert len(own) == SHORT_ROUNDS * STEPS
            assert {row["passes"] for row in own} == {3}
            # No place in the round is its own.
            assert len({row["order"] for row in own}) == SHORT_ROUNDS
            assert all(row["step_time_ms"] > 0 for row in own)
    assert not [row for row in rows_of(folder, 0, "unseen") if "change" in row["what"]]


def test_a_copy_that_fails_on_one_rank_is_tried_on_none(compared_run) -> None:
    folder = compared_run(only_watched=("--copies_of_rank_1_fail", 1), verify=1)
    for number, why in enumerate(("it failed on another rank", "RuntimeError: out of memory")):
        unseen = rows_of(folder, number, "unseen")
        assert [row["why"] for row in unseen if "changes" in row["what"]] == [why]
        assert rows_of(folder, number, "end")
        assert not rows_of(folder, number, "trials")


def test_a_pass_that_fails_on_one_rank_leaves_the_training_as_it_is_and_its_memory(
    compared_run,
) -> None:
    # Each reading finds less free memory, too.
    flags = ("--failing_pass", 3, "--shrinking_memory", 1)
    failing = compared_run(only_watched=flags, verify=1)
    for number, why in enumerate(("it failed on another rank", "RuntimeError: out of memory")):
        unseen = rows_of(failing, number, "unseen")
        assert [row["why"] for row in unseen if AS_IT_IS in row["what"]] == [why]
        # Of 32 parts, one is gone at each reading: 31 before the rounds, of which three quarters
        # are to be left, and 25 after two of them. A round took 2. These are of other changes.
        assert {row["round"] for row in rows_of(failing, number, "trials")} == {0, 1}
        [row] = [row for row in unseen if "after 2 rounds" in row["what"]]
        assert "memory" in row["why"]


def test_whatever_fails_on_one_rank_the_others_get_what_they_wait_for(
    rank_server, tmp_path: Path
) -> None:
    """Each case of owed.py: a step with a failing pass, and one after it with another DDP."""
    by_rank = run_ranks(rank_server.run, tmp_path, SCRIPTS / "owed.py", tmp_path)
    for number, told in enumerate(by_rank):
        assert len(told) == 12
        for case, (why, difference) in told.items():
            assert why == ("out of memory" if number else ""), case
            assert difference < 1e-6, case  # of the gradients after it from those without DDP


def test_numbers_of_workers_double_up_to_twice_the_cores() -> None:
    assert worker_counts(0, cores=1) == [1, 2, 4]
    assert worker_counts(2, cores=1) == [4]
    assert worker_counts(2, cores=8) == [4, 8, 16]
    assert worker_counts(4, cores=1) == [8]  # one number at least


@pytest.mark.parametrize(
    ("workers", "rounds"),
    [(0, SHORT_ROUNDS), pytest.param(1, ROUNDS, marks=pytest.mark.slow)],
)
def test_workers_are_tried_where_a_rank_waits_for_its_data(
    compared_run, workers: int, rounds: int
) -> None:
    flags = ("--accumulation", 3, *EXCHANGES_EVERY_PASS)
    if workers:
        flags = ("--slow_data_s", 0.06, "--own_noise", 1, "--workers", workers)
    # The data set draws random numbers of its own: trials must not draw from the script's.
    folder = compared_run(*flags, verify=1)
    for number in (0, 1):
        rows = [row for row in rows_of(folder, number, "trials") if row["kind"] == "workers"]
        times = {
            setting: [row["step_time_ms"] for row in rows if row["setting"] == setting]
            for setting in {row["setting"] for row in rows}
        }
        twice = 2 * max(1, workers)
        assert {AS_IT_LOADS, f"num_workers={twice}"} <= set(times)
        assert {len(own) for own in times.values()} == {rounds}
        # A batch takes 60 ms, and the workers load several at once. Of two rounds other tests may
        # make one longer.
        assert min(times[f"num_workers={twice}"]) < min(times[AS_IT_LOADS])
    assert not [row for row in rows_of(folder, 0, "unseen") if "workers" in row["what"]]


def test_a_large_data_set_is_not_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loading, "MOST_COPIED_BYTES", 10_000)
    small = loading.copied({"values": torch.arange(100.0), "words": ["a"]})
    assert torch.equal(small["values"], torch.arange(100.0))
    for large in (torch.zeros(10_000), torch.zeros(10_000)[:1], b"0" * 10_001, ["text" * 3_000]):
        with pytest.raises(RuntimeError, match="takes more than"):
            loading.copied(large)


@pytest.mark.parametrize("kind", ["iterable", "none"])
def test_batches_without_indices_are_not_loaded_again(kind: str) -> None:
    class Stream(torch.utils.data.IterableDataset):
        def __iter__(self):
            return iter(range(4))

    iterator = iter(torch.utils.data.DataLoader(Stream())) if kind == "iterable" else None
    with pytest.raises(RuntimeError, match=r"no indices|no DataLoader"):
        loading.Loading.of(iterator, [])


def test_single_samples_are_asked_for_as_the_script_does() -> None:
    """Loads without batching (``batch_size=None``), whose sampler gives single indices."""
    data = [torch.full((2,), float(index)) for index in range(6)]
    iterator = iter(torch.utils.data.DataLoader(data, batch_size=None))
    next(iterator)
    own = loading.Loading.of(iterator, [3, 1])
    for workers in (0, 1):
        assert [batch[0].item() for batch in own.fetches(workers, 3)] == [3.0, 1.0, 3.0]


def test_without_an_exchange_there_is_nothing_to_try(loop_run) -> None:
    folder, _ = loop_run("--checkpointed", 1, count=1, verify=1)
    assert "nothing is exchanged" in str(rows_of(folder, 0, "unseen"))


def test_trials_follow_the_probes() -> None:
    with pytest.raises(ValueError, match="verify follows the probes"):
        Options(verify=True, probe=False)
