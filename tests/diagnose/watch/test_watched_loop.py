"""A watched training computes what an unwatched one does, and what is recorded of it is true."""

from __future__ import annotations

import ast
import zlib
from pathlib import Path

import pytest
import torch
from watch_support import EXCHANGES_EVERY_PASS, LOOP, SHORT, assert_parts_add_up, rows_of

from common.diagnose.evidence.bundle import read_bundle
from common.diagnose.evidence.bundle_tables import tables_of

STEPS = sum(SHORT.values())


@pytest.mark.slow  # in kind: the plain loop below, and that of test_trials.py, whose workers wait
@pytest.mark.parametrize(("count", "verify"), [(1, 0), (3, 1)])
def test_losses_weights_and_random_numbers_are_the_same_to_the_last_bit(
    compared_run, count: int, verify: int
) -> None:
    folder = compared_run(only_watched=("--short_trials", 1), count=count, verify=verify)
    assert rows_of(folder, 0, "probes")  # the probes did run, in the middle of it
    assert bool(rows_of(folder, 0, "trials")) == bool(verify)
    assert rows_of(folder, 0, "end")[0]["status"] == "complete"


@pytest.fixture
def one_run(loop_run) -> tuple[Path, list[dict]]:
    """A plain loop on two ranks, on a GPU that is pretended, for which its forward passes wait."""
    return loop_run("--host_waits", 3)


def test_a_plain_loop_on_two_ranks_computes_the_same_and_shows_no_wait(compared_run) -> None:
    folder = compared_run(only_watched=("--host_waits", 3))
    assert rows_of(folder, 0, "probes")
    assert rows_of(folder, 0, "end")[0]["status"] == "complete"
    assert not list((folder / "bundle").glob("*trace*"))  # nothing is hidden from hooks


def test_waits_of_the_host_are_counted_in_some_steps(one_run) -> None:
    folder, _ = one_run
    steps = rows_of(folder, 0, "steps")
    assert [row.get("host_waits") for row in steps] == [None] * 6 + [3] * 3
    [row] = rows_of(folder, 0, "host-waits")
    assert row["waits"] == 9
    assert row["phase"] == "forward"
    assert "loop.py" in row["place"]
    tables = tables_of(read_bundle(folder / "bundle"))
    assert tables["host-waits.csv"]["waits"].tolist() == [9, 9]  # of two ranks


def test_each_step_is_recorded_once_and_its_parts_add_up(one_run) -> None:
    folder, _ = one_run
    for rank in (0, 1):
        steps = rows_of(folder, rank, "steps")
        assert [row["step"] for row in steps] == list(range(STEPS))
        assert [row["kind"] for row in steps] == ["plain"] * 6 + ["timed"] * 3
        assert [row["warmup"] for row in steps] == [True] * 2 + [False] * 7
        assert {row["samples"] for row in steps} == {8}
        assert_parts_add_up(steps)


def test_samples_are_those_that_the_sampler_gave(one_run) -> None:
    folder, found = one_run
    torch.manual_seed(3)
    data = torch.randn(480, 32), torch.randint(0, 10, (480,))
    for rank in (0, 1):
        [row] = rows_of(folder, rank, "identities")
        # The first update is not recorded, nor are the samples of the warm-up.
        first = (1 + SHORT["warmup"]) * 8
        assert row["samples"] == found[rank]["indices"][0][first : first + 7 * 8]
        assert sorted(index for index, *_ in row["checksums"]) == sorted(row["samples"])
        for index, *sums in row["checksums"]:
            assert sums == [zlib.crc32(part[index].numpy().tobytes()) & 0xFF for part in data]


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


@pytest.mark.parametrize(
    ("flags", "settings", "times"),
    [(("--no_sync", 1), {"to_end": 1}, 1), (EXCHANGES_EVERY_PASS, {"verify": 1}, 3)],
    ids=["last only", "every pass"],
)
def test_micro_batches_and_their_exchanges_are_counted(
    loop_run, flags: tuple, settings: dict, times: int
) -> None:
    folder, _ = loop_run("--accumulation", 3, *flags, **settings)
    [facts] = rows_of(folder, 0, "facts")
    timed = [row for row in rows_of(folder, 0, "steps") if row["kind"] == "timed"]
    assert {row["micro_batches"] for row in timed} == {3}
    assert {row["exchanged_bytes"] for row in timed} == {times * facts["gradient_bytes"]}


def test_a_watch_to_the_end_has_blocks_of_the_steps_after_the_window(loop_run) -> None:
    flags = ("--slow_rank_s", 0.07)  # for each of the three passes: blocks of three steps
    folder, _ = loop_run("--accumulation", 3, "--no_sync", 1, *flags, to_end=1)
    assert [row["step"] for row in rows_of(folder, 0, "steps")] == list(range(9))
    first_and_last = [(row["first"], row["last"]) for row in rows_of(folder, 0, "blocks")]
    assert first_and_last == [(9, 11), (12, 14), (15, 17)]
    assert rows_of(folder, 0, "end")[0]["status"] == "complete"


def test_ddps_map_of_used_parameters_is_no_bucket(loop_run) -> None:
    folder, found = loop_run("--accumulation", 3, *EXCHANGES_EVERY_PASS, verify=1)
    buckets = rows_of(folder, 0, "buckets")
    sizes = [row["size_bytes"] for row in buckets if row["step"] == STEPS - 1]
    assert sizes == 3 * [int(size) for size in found[0]["buckets"].split(",")]


def test_hooks_and_norms_that_exchange_are_left_alone_and_no_rank_passes_alone(
    compared_run,
) -> None:
    # A rank that probed a pass alone would wait in its norm for the others.
    folder = compared_run("--hook", 1, "--synchronised_norm", 1)
    [facts] = rows_of(folder, 0, "facts")
    assert facts["synchronised_norms"] == 1
    tree = ast.parse(LOOP.read_text()).body
    classes = {node.name: node for node in tree if isinstance(node, ast.ClassDef)}
    forward = classes["ExchangingNorm"].body[1]
    assert facts["norm_lines"] == f"{LOOP}:{forward.lineno}-{forward.end_lineno}"
    unseen = str(rows_of(folder, 0, "unseen"))
    assert "hook of its own" in unseen
    assert "SyncBatchNorm exchanges inside of a pass" in unseen
    assert not rows_of(folder, 0, "probes")
    assert rows_of(folder, 0, "allreduce-samples")  # by which their exchanges are judged


def test_a_rank_without_a_watch_keeps_the_others_from_probing(compared_run) -> None:
    # Its training's all-reduces would meet those of the others' probes.
    folder = compared_run(only_watched=("--unwatched_rank", 1))
    assert "not every rank is watched" in str(rows_of(folder, 0, "unseen"))
    assert not rows_of(folder, 0, "allreduce-samples")


def test_a_short_script_leaves_what_was_seen(loop_run) -> None:
    folder, _ = loop_run("--steps", 5, "--autocast_inside", 1, count=1)
    assert rows_of(folder, 0, "about")
    assert not rows_of(folder, 0, "probes")


@pytest.mark.parametrize(
    ("flags", "count", "dtype"),
    [(("--host_waits", 3), 2, "float32"), (("--steps", 5, "--autocast_inside", 1), 1, "bfloat16")],
)
def test_a_model_that_computes_in_16_bits_and_returns_32_is_known(
    loop_run, flags: tuple, count: int, dtype: str
) -> None:
    folder, _ = loop_run(*flags, count=count)
    [facts] = rows_of(folder, 0, "facts")
    assert facts["compute_dtype"] == dtype
    assert facts["gradient_dtype"] == "float32"
    assert facts["pin_memory"] is False
    assert facts["batches_on_host"] is True
    assert facts["gpu_capability"] == ""
