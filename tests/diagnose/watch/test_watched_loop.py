"""A watched training computes what an unwatched one does, and what is recorded of it is true."""

from __future__ import annotations

from pathlib import Path

import pytest
from watch_support import SHORT, rows_of, run_loop

from common.diagnose.evidence.bundle import read_bundle
from common.diagnose.evidence.bundle_tables import tables_of

STEPS = sum(SHORT.values())


@pytest.fixture
def ranks(rank_server):
    return rank_server.run


@pytest.mark.parametrize(("count", "verify"), [(1, 0), (2, 0), (3, 0), (2, 1), (3, 1)])
def test_losses_weights_and_random_numbers_are_the_same_to_the_last_bit(
    ranks, tmp_path: Path, count: int, verify: int
) -> None:
    plain, watched = tmp_path / "plain", tmp_path / "watched"
    plain.mkdir()
    watched.mkdir()
    expected = run_loop(ranks, plain, count=count)
    found = run_loop(ranks, watched, count=count, watch={"verify": verify})
    for before, after in zip(expected, found, strict=True):
        for name in ("losses", "parameters", "buffers", "random", "indices"):
            assert before[name] == after[name], name
    assert rows_of(watched, 0, "probes")  # the probes did run, in the middle of it
    assert bool(rows_of(watched, 0, "trials")) == bool(verify)
    assert rows_of(watched, 0, "end")[0]["status"] == "complete"


@pytest.fixture(scope="module")
def one_run(rank_server, tmp_path_factory) -> tuple[Path, list[dict]]:
    folder = tmp_path_factory.mktemp("one-run")
    return folder, run_loop(rank_server.run, folder, "--evaluate", 4, watch={})


def test_each_step_is_recorded_once_and_its_parts_add_up(one_run) -> None:
    folder, _ = one_run
    for rank in (0, 1):
        steps = rows_of(folder, rank, "steps")
        assert [row["step"] for row in steps] == list(range(STEPS))
        assert [row["kind"] for row in steps] == ["plain"] * 6 + ["timed"] * 3
        assert [row["warmup"] for row in steps] == [True] * 2 + [False] * 7
        assert {row["samples"] for row in steps} == {8}
        for row in steps:
            parts = ("data", "buffers", "forward", "backward", "exchange", "optimizer")
            whole = sum(row[f"{part}_time_ms"] or 0.0 for part in parts)
            assert whole == pytest.approx(row["step_time_ms"], rel=1e-6)


def test_samples_are_those_that_the_sampler_gave(one_run) -> None:
    folder, found = one_run
    for rank in (0, 1):
        [row] = rows_of(folder, rank, "identities")
        # The first update is not recorded, nor are the samples of the warm-up.
        first = (1 + SHORT["warmup"]) * 8
        assert row["samples"] == found[rank]["indices"][0][first : first + 7 * 8]


def test_buckets_are_those_of_ddp(one_run) -> None:
    folder, found = one_run
    buckets = rows_of(folder, 0, "buckets")
    sizes = [row["size_bytes"] for row in buckets if row["step"] == STEPS - 1]
    assert sizes == [int(size) for size in found[0]["buckets"].split(",")]
    for row in buckets:
        assert row["ready_time_ms"] <= row["done_time_ms"]
    [facts] = rows_of(folder, 0, "facts")
    steps = rows_of(folder, 0, "steps")
    assert {row["exchanged_bytes"] for row in steps[-3:]} == {facts["gradient_bytes"]}


def test_ddps_map_of_used_parameters_is_no_bucket(rank_server, tmp_path: Path) -> None:
    found = run_loop(rank_server.run, tmp_path, "--find_unused", 1, watch={"probe": 0})
    buckets = rows_of(tmp_path, 0, "buckets")
    sizes = [row["size_bytes"] for row in buckets if row["step"] == STEPS - 1]
    assert sizes == [int(size) for size in found[0]["buckets"].split(",")]


def test_gradients_of_the_probes_are_the_models_parameters(one_run) -> None:
    folder, _ = one_run
    rows = rows_of(folder, 1, "gradient-ready-times")
    names = {row["parameter"] for row in rows}
    assert names == {f"layers.{n}.{w}" for n in (0, 1, 4) for w in ("weight", "bias")}
    order = sorted((row for row in rows if row["iteration"] == 0), key=lambda r: r["ready_index"])
    times = [row["ready_time_ms"] for row in order]
    assert times == sorted(times)
    wide, narrow = (
        {row["total_bytes"] for row in rows_of(folder, 1, f"allreduce-samples{kind}")}
        for kind in ("", "-bfloat16")
    )
    assert max(wide) == 2 * max(narrow) == 4 * 2890  # of all gradients
    assert len(rows_of(folder, 1, "passes-exchanging")) == 5 * 3
    probes = rows_of(folder, 1, "probes")
    assert {(row["batch_per_rank"], row["together"]) for row in probes} >= {(8, True), (4, True)}


def test_evaluation_is_no_part_of_a_step(one_run) -> None:
    folder, _ = one_run
    steps = rows_of(folder, 0, "steps")
    evaluated = [row["step"] for row in steps if row["evaluation_time_ms"] > 0]
    # Evaluated after updates 4 and 8, the first of which is not recorded as a step; the evaluation
    # belongs to the step that follows.
    assert evaluated == [3, 7]


@pytest.mark.parametrize(("no_sync", "times"), [(1, 1), (0, 3)])
def test_micro_batches_and_their_exchanges_are_counted(
    ranks, tmp_path: Path, no_sync: int, times: int
) -> None:
    run_loop(ranks, tmp_path, "--accumulation", 3, "--no_sync", no_sync, watch={})
    [facts] = rows_of(tmp_path, 0, "facts")
    timed = [row for row in rows_of(tmp_path, 0, "steps") if row["kind"] == "timed"]
    assert {row["micro_batches"] for row in timed} == {3}
    assert {row["exchanged_bytes"] for row in timed} == {times * facts["gradient_bytes"]}


def test_a_communication_hook_of_the_scripts_own_is_left_alone(ranks, tmp_path: Path) -> None:
    plain, watched = tmp_path / "plain", tmp_path / "watched"
    plain.mkdir()
    watched.mkdir()
    expected = run_loop(ranks, plain, "--hook", 1)
    found = run_loop(ranks, watched, "--hook", 1, watch={})
    assert [each["losses"] for each in expected] == [each["losses"] for each in found]
    assert "hook of its own" in str(rows_of(watched, 0, "unseen"))


def test_norms_that_exchange_are_counted_and_no_rank_passes_alone(ranks, tmp_path: Path) -> None:
    # A rank that probed a pass alone would wait in its norm for the others.
    plain, watched = tmp_path / "plain", tmp_path / "watched"
    plain.mkdir()
    watched.mkdir()
    expected = run_loop(ranks, plain, "--synchronised_norm", 1)
    found = run_loop(ranks, watched, "--synchronised_norm", 1, watch={})
    for before, after in zip(expected, found, strict=True):
        assert before["losses"] == after["losses"]
        assert before["buffers"] == after["buffers"]
    assert rows_of(watched, 0, "facts")[0]["synchronised_norms"] == 1
    assert "SyncBatchNorm exchanges inside of a pass" in str(rows_of(watched, 0, "unseen"))
    assert not rows_of(watched, 0, "probes")
    assert rows_of(watched, 0, "allreduce-samples")  # by which their exchanges are judged


def test_a_rank_without_a_watch_keeps_the_others_from_probing(ranks, tmp_path: Path) -> None:
    # Its training's all-reduces would meet those of the others' probes.
    plain, watched = tmp_path / "plain", tmp_path / "watched"
    plain.mkdir()
    watched.mkdir()
    expected = run_loop(ranks, plain)
    found = run_loop(ranks, watched, "--unwatched_rank", 1, watch={})
    assert [each["losses"] for each in expected] == [each["losses"] for each in found]
    assert "not every rank is watched" in str(rows_of(watched, 0, "unseen"))
    assert not rows_of(watched, 0, "allreduce-samples")


def test_a_short_script_leaves_what_was_seen(ranks, tmp_path: Path) -> None:
    run_loop(ranks, tmp_path, "--steps", 5, watch={})
    lines = (tmp_path / "bundle" / "rank0.jsonl").read_text()
    assert '"about"' in lines
    assert not rows_of(tmp_path, 0, "probes")


def test_waits_of_the_host_are_counted_in_some_steps_and_never_shown(ranks, tmp_path: Path) -> None:
    plain, watched = tmp_path / "plain", tmp_path / "watched"
    plain.mkdir()
    watched.mkdir()
    expected = run_loop(ranks, plain)
    found = run_loop(ranks, watched, "--host_waits", 3, watch={})
    assert [each["losses"] for each in expected] == [each["losses"] for each in found]
    steps = rows_of(watched, 0, "steps")
    assert [row.get("host_waits") for row in steps] == [None] * 6 + [3] * 3
    [row] = rows_of(watched, 0, "host-waits")
    assert row["waits"] == 9
    assert row["phase"] == "forward"
    assert "loop.py" in row["place"]
    tables = tables_of(read_bundle(watched / "bundle"))
    assert tables["host-waits.csv"]["waits"].tolist() == [9, 9]  # of two ranks


@pytest.mark.parametrize(("enabled", "dtype"), [(0, "float32"), (1, "bfloat16")])
def test_a_model_that_computes_in_16_bits_and_returns_32_is_known(
    ranks, tmp_path: Path, enabled: int, dtype: str
) -> None:
    run_loop(ranks, tmp_path, "--autocast_inside", enabled, "--steps", 5, count=1, watch={})
    [facts] = rows_of(tmp_path, 0, "facts")
    assert facts["compute_dtype"] == dtype
    assert facts["gradient_dtype"] == "float32"
    assert facts["pin_memory"] is False
    assert facts["batches_on_host"] is True
    assert facts["gpu_capability"] == ""
