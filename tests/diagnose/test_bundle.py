"""Bundles: what is read of them, and what is refused."""

from __future__ import annotations

import gzip
import tarfile
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from bundle_support import (
    add_rows,
    change_rows,
    opened,
    step_row,
    with_surroundings,
    with_values,
    write_bundle,
)

from common.diagnose.all_causes import CAUSES
from common.diagnose.causes.over_steps import unequal_lengths
from common.diagnose.causes.ranks import slow_rank
from common.diagnose.causes.validity import mixed_configurations, wrong_sampler
from common.diagnose.diagnosis import examine_case
from common.diagnose.evidence.bundle import Bundle, is_bundle, read_bundle
from common.diagnose.evidence.bundle_tables import tables_of
from common.diagnose.evidence.evidence import NotJudged
from common.errors import UserError


def test_the_exchange_is_divided_into_communication_and_waiting(tmp_path: Path) -> None:
    steps = tables_of(read_bundle(write_bundle(tmp_path / "b")))["steps.csv"]
    found = steps.set_index(["rank", "step"])
    # The shortest exchange of a step is communication; the rest of the others' was waiting.
    assert found["communication_time_ms"].to_dict() == {
        (0, 0): 1.0, (0, 1): 2.0, (1, 0): 1.0, (1, 1): 2.0,
    }  # fmt: skip
    assert found["waiting_time_ms"].to_dict() == {
        (0, 0): 4.0, (0, 1): 0.0, (1, 0): 0.0, (1, 1): 2.0,
    }  # fmt: skip
    assert found["between_time_ms"][0, 1] == pytest.approx(750.0)
    assert pd.isna(found["between_time_ms"][0, 0])


def test_its_tables_open_as_a_run(tmp_path: Path) -> None:
    evidence = opened(write_bundle(tmp_path / "b")).run
    assert evidence.watched
    assert evidence.world_size == 2
    assert evidence.batch_per_rank == 8
    assert evidence.step_ms == pytest.approx((15.0 + 14.0) / 2)  # the slower rank of each step
    assert evidence.opened.environment["network"] == "TCP over loopback"


def test_a_line_that_was_cut_off_is_noted_and_left_out(tmp_path: Path) -> None:
    folder = write_bundle(tmp_path / "b")
    file = folder / "rank1.jsonl"
    file.write_text(file.read_text()[:-30])
    bundle = read_bundle(folder)
    assert any("rank1.jsonl: line 5" in note for note in bundle.notes)
    assert any("rank 1 breaks off" in note for note in bundle.notes)
    assert len(tables_of(bundle)["steps.csv"]) == 4


def test_ranks_without_a_record_are_named(tmp_path: Path) -> None:
    bundle = read_bundle(write_bundle(tmp_path / "b", world_size=4))
    assert any("no record of 2, 3" in note for note in bundle.notes)


def test_an_error_is_told_by_its_first_sentence(tmp_path: Path) -> None:
    folder = write_bundle(tmp_path / "b")
    for rank in (0, 1):
        why = f"RuntimeError: the graph has changed. Parameters of rank {rank}:\n0 1 2"
        add_rows(folder, {"table": "unseen", "what": "a change", "why": why}, ranks=(rank,))
    told = "Not seen on ranks 0, 1: a change (RuntimeError: the graph has changed)."
    assert told in read_bundle(folder).notes


@pytest.mark.parametrize("is_packed", [False, True])
def test_a_resumed_job_is_judged_by_its_first_start_with_a_step(
    tmp_path: Path, is_packed: bool
) -> None:
    path = folder = write_bundle(tmp_path / "b", world_size=3)  # so many ranks tell it apart
    write_bundle(folder / "restart-1", world_size=2)
    write_bundle(folder / "restart-10", world_size=5)
    for rank in (0, 1):  # both were killed
        file = folder / f"rank{rank}.jsonl"
        file.write_text("".join(file.read_text().splitlines(keepends=True)[:-1]))

    def read() -> Bundle:
        if is_packed:
            with tarfile.open(tmp_path / "b.tar.gz", "w:gz") as archive:
                archive.add(folder, "b")
        return read_bundle(tmp_path / "b.tar.gz" if is_packed else path)

    first = read()
    assert first.world_size == 3
    notes = " ".join(first.notes)
    assert "the record in b, not in restart-1, restart-10." in notes
    assert "it was killed; the job was resumed." in notes
    for file in folder.glob("rank*.jsonl"):  # it had not come to a step
        file.write_text(file.read_text().splitlines(keepends=True)[0])
    second = read()
    assert second.world_size == 2
    assert any("the record in restart-1, not in b, restart-10." in note for note in second.notes)
    for file in folder.glob("rank*.jsonl"):  # nor to an update
        file.unlink()
    assert read().world_size == 2
    assert is_bundle(folder)


@pytest.mark.parametrize(
    ("spoil", "said"),
    [
        (lambda text: None, "no bundle"),
        (lambda text: "{", "no rank says who it was"),
        (lambda text: text.replace('"format": 1', '"format": 2'), "take a newer one"),
        (lambda text: "\n".join(text.splitlines()[:2]), "no step was seen"),
    ],
)
def test_what_is_none_is_refused_in_a_line(tmp_path: Path, spoil, said: str) -> None:
    folder = write_bundle(tmp_path / "b")
    for file in folder.iterdir():
        text = spoil(file.read_text())
        file.unlink()
        if text is not None:
            file.write_text(text)
    with pytest.raises(UserError, match=said) as raised:
        read_bundle(folder)
    assert len(str(raised.value).splitlines()) == 1


def test_other_files_named_after_ranks_are_left_alone(tmp_path: Path) -> None:
    folder = write_bundle(tmp_path / "b")
    before = tables_of(read_bundle(folder))["steps.csv"]
    (folder / "rank-loss.jsonl").write_text("{}")
    (folder / "rank_notes.jsonl").write_text("of somebody else")
    assert tables_of(read_bundle(folder))["steps.csv"].equals(before)
    for file in folder.glob("rank[0-9]*.jsonl"):
        file.unlink()
    assert not is_bundle(folder)
    with pytest.raises(UserError, match="no bundle; it has no rank0"):
        read_bundle(folder)


@pytest.mark.parametrize(("update_ms", "waited_ms"), [(41.0, 37.0), (11.0, 10.0), (1.0, 0.0)])
def test_waiting_for_a_late_update_is_no_time_for_data(
    tmp_path: Path, update_ms: float, waited_ms: float
) -> None:
    bundle = write_bundle(tmp_path / "b")
    # A collective after the fetch lets rank 1 wait as far as rank 0 is late; the rest is its own.
    with_values(bundle, "steps", (0,), fetch_time_ms=0.5, optimizer_time_ms=update_ms)
    with_values(bundle, "steps", (1,), fetch_time_ms=0.5, data_time_ms=38.0)
    steps = tables_of(read_bundle(bundle))["steps.csv"].set_index(["rank", "step"])
    assert steps["data_time_ms"].to_dict() == {
        (0, 0): 1.0,
        (0, 1): 1.0,
        (1, 0): 38.0,  # it is not known what came before
        (1, 1): 38.0 - waited_ms,
    }
    assert steps.loc[(1, 1), "waiting_time_ms"] == 2.0 + waited_ms


def test_buckets_are_those_of_the_last_backward_pass(tmp_path: Path) -> None:
    bundle = write_bundle(tmp_path / "b")
    rows = [
        {"table": "buckets", "step": step, "bucket": index, "size_bytes": 1000 * (index % 2 + 1)}
        | {"ready_time_ms": 10.0 * index - 20.0, "done_time_ms": 10.0 * index - 15.0}
        for step in (0, 1)
        for index in range(4)  # two micro-batches, of two buckets each
    ]
    add_rows(bundle, *rows)
    buckets = tables_of(read_bundle(bundle))["buckets.csv"]
    found = buckets.groupby(["rank", "step"])[["bucket", "size_bytes"]].agg(list)
    assert found["bucket"].tolist() == [[0, 1]] * 4
    assert found["size_bytes"].tolist() == [[1000, 2000]] * 4


@pytest.mark.parametrize(
    ("changed", "state"),
    [
        ({"interval_own_cores": 0.6}, "disturbed"),
        ({"interval_own_cores": 0.97}, "quiet"),
        ({"interval_own_cores": 0.6, "interval_busy_cores": 1.3}, "quiet"),  # there is room
        ({"interval_own_cores": 0.9, "interval_stolen_cores": 0.2}, "disturbed"),
        ({"interval_own_cores": 0.6, "core_list": "0"}, "not witnessed"),  # perhaps on others
        ({"interval_own_cores": 0.6, "interval_s": 0.2}, "not witnessed"),
        ({"interval_own_cores": None}, "quiet"),
    ],
)
def test_other_work_on_the_ranks_cores_is_seen_and_leaves_hints(
    tmp_path: Path, changed, state: str
) -> None:
    folder = write_bundle(tmp_path / "b")
    with_values(folder, "steps", data_time_ms=6.0)
    with_surroundings(folder, **changed)
    case = opened(folder)
    assert case.run.opened.machine_state == state
    if [*changed] == ["interval_own_cores"]:  # what is said is the same for each state
        diagnosis = examine_case(case)
        assert ("hint" in diagnosis.summary) == (state == "disturbed")
        [loading] = [verdict for verdict in diagnosis.verdicts if verdict.cause == "data-loading"]
        assert ("other work had the cores" in loading.reason) == (state == "disturbed")


@pytest.mark.parametrize(
    ("status", "resumed_at", "goes_on"),
    [
        ("ended", None, True),
        ("interrupted", None, False),
        ("interrupted", 3, False),
        ("interrupted", 9, True),
    ],
)
def test_a_stall_is_over_if_a_later_step_came_or_the_script_ended_by_itself(
    tmp_path: Path, status: str, resumed_at: int | None, goes_on: bool
) -> None:
    # A stall after step 8; a rank may have gone on after an earlier one, which says nothing of it.
    folder = write_bundle(tmp_path / "b")
    with_values(folder, "end", status=status)
    rows = [{"table": "stalled", "step": 8, "seconds": 60.0, "phase": "data", "stack": ["a"]}]
    if resumed_at is not None:
        rows.append({"table": "resumed", "step": resumed_at, "seconds": 61.0})
    add_rows(folder, *rows, ranks=(1,))
    assert tables_of(read_bundle(folder))["stalls.csv"]["resumed"].tolist() == [goes_on]


def test_steps_whose_samples_are_not_known_name_no_rank(tmp_path: Path) -> None:
    # A model that is called with an object of its own kind: samples are 0.
    folder = write_bundle(tmp_path / "b")
    with_values(folder, "steps", samples=0, tokens=0, padded_tokens=0)
    case = opened(folder)
    for cause in (slow_rank, unequal_lengths):
        with pytest.raises(NotJudged, match="samples"):
            cause(case)
    assert case.speedup_now is None


@pytest.mark.parametrize(("of_rank_1", "differs"), [((4, 4), True), ((4, 16), False)])
def test_batches_of_no_fixed_number_are_not_compared(
    tmp_path: Path, of_rank_1: tuple[int, int], differs: bool
) -> None:
    # Rank 0 takes 8 samples in both steps. Rank 1 takes fewer, or what a budget of tokens makes.
    folder = write_bundle(tmp_path / "b")

    def other(row: dict) -> dict:
        return row | {"samples": of_rank_1[row["step"]]} if row["table"] == "steps" else row

    change_rows(folder, other, ranks=(1,))
    found = mixed_configurations(opened(folder))
    assert bool(found and "samples of a step" in str(found.evidence)) == differs


@pytest.mark.parametrize("others", [4, 7])
def test_a_rank_is_slow_for_its_larger_batches(tmp_path: Path, others: int) -> None:
    # Rank 0 takes 16 ms for 8 samples, rank 1 takes 8 ms for 4: with 6 each, both take 12 of 40.
    # Where rank 1 takes 8 ms for 7, rank 0 is slow for another reason, too.
    folder = write_bundle(tmp_path / "b")
    with_values(folder, "steps", step_time_ms=40.0)
    with_values(folder, "steps", (0,), forward_time_ms=6.0, backward_time_ms=10.0)
    with_values(folder, "steps", (1,), samples=others)
    case = opened(folder)
    verdict = CAUSES["slow-rank"](case)
    if others == 7:
        assert "samples" not in verdict.title
        assert "samples of a step differ" in str(mixed_configurations(case).evidence)
        return
    assert verdict.title == "rank 0 has 8 samples in each step, the others 4"
    assert verdict.lost_share == pytest.approx(4 / 40)
    assert mixed_configurations(case) is None


def slow_bundle(tmp_path: Path, waits_ms: float, sending_ms: float | None) -> Path:
    """Writes a bundle whose rank 1 sleeps 20 ms in a pass that takes 8 ms by itself.

    Passes that send their gradients take ``sending_ms``; None where they were not measured.
    """
    folder = write_bundle(tmp_path / "b")
    with_values(folder, "steps", step_time_ms=40.0)
    with_values(folder, "steps", (1,), forward_time_ms=23.0, exchange_time_ms=waits_ms)
    passed = {"repeat": 0, "forward_time_ms": 3.0, "backward_time_ms": 5.0}
    probe = {"table": "probes", "batch_per_rank": 8} | passed
    add_rows(folder, probe | {"together": True}, probe | {"together": False})
    if sending_ms is not None:
        sent = {"table": "passes-exchanging", "iteration": 0}
        add_rows(folder, passed | sent | {"exchange_time_ms": sending_ms - 8.0})
    return folder


@pytest.mark.parametrize("waits_ms", [0.0, 15.0])
@pytest.mark.parametrize(("sending_ms", "then_ms"), [(11.0, 11.0), (8.0, 8.0), (None, 8.0)])
def test_equal_ranks_send_while_all_of_them_compute(
    tmp_path: Path, sending_ms: float | None, then_ms: float, waits_ms: float
) -> None:
    # Rank 1 sleeps 20 ms in a pass of 8 ms; its exchange is hidden, as the other's core is free.
    # Where all compute, a pass that sends its gradients takes longer than one that does not.
    folder = slow_bundle(tmp_path, waits_ms, sending_ms)
    if waits_ms:  # for another reason: it is no time that the rank itself would save
        then_ms = 8.0
    found = slow_rank(opened(folder))
    assert found.title == "rank 1's forward pass is slow"
    assert found.lost_share == pytest.approx((28.0 - then_ms) / 40.0)
    assert ("Once no rank is late" in str(found.evidence)) == (then_ms > 8.0)


def test_a_rank_is_not_slow_if_all_are_as_slow_once_nobody_waits(tmp_path: Path) -> None:
    assert slow_rank(opened(slow_bundle(tmp_path, waits_ms=0.0, sending_ms=27.5))) is None


@pytest.mark.parametrize(("update_ms", "saved_ms"), [(2.0, 20.0), (12.0, 10.0), (30.0, None)])
def test_a_slow_pass_beside_a_longer_update_of_another_rank_costs_the_difference(
    tmp_path: Path, update_ms: float, saved_ms: float | None
) -> None:
    # Rank 1 sleeps 20 ms in its forward pass and updates for 2 ms.
    folder = slow_bundle(tmp_path, waits_ms=0.0, sending_ms=None)
    with_values(folder, "steps", (0,), optimizer_time_ms=update_ms)
    with_values(folder, "steps", (1,), optimizer_time_ms=2.0)
    found = slow_rank(opened(folder))
    assert (found and found.lost_share) == (saved_ms and pytest.approx(saved_ms / 40.0))


def test_passes_that_only_the_slow_rank_has_written_tell_nothing(tmp_path: Path) -> None:
    folder = slow_bundle(tmp_path, waits_ms=0.0, sending_ms=None)
    sent = {"forward_time_ms": 3.0, "backward_time_ms": 5.0, "exchange_time_ms": 19.5}
    row = {"table": "passes-exchanging", "repeat": 0, "iteration": 0} | sent
    add_rows(folder, row, ranks=(1,))
    found = slow_rank(opened(folder))
    assert found.lost_share == pytest.approx(20.0 / 40.0)
    assert "Once no rank is late" not in str(found.evidence)


@pytest.mark.parametrize(("plain_ms", "is_slow"), [(40.0, True), (20.0, False)])
def test_what_slows_the_watched_steps_alone_is_no_slow_rank(
    tmp_path: Path, plain_ms: float, is_slow: bool
) -> None:
    # Rank 1 takes 20 ms longer in the steps whose buckets are watched; plain steps show whether it
    # always does.
    folder = write_bundle(tmp_path / "b")
    with_values(folder, "steps", step_time_ms=40.0)
    with_values(folder, "steps", (1,), forward_time_ms=23.0)
    plain = {"kind": "plain", "exchange_time_ms": None, "step_time_ms": plain_ms}
    for rank in (0, 1):
        rows = [step_row(rank, 0) | plain | {"step": step} for step in (2, 3)]
        add_rows(folder, *rows, ranks=(rank,))
    assert bool(slow_rank(opened(folder))) == is_slow


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"\x1f\x8b\x08\x00broken",
        gzip.compress(b"x" * 9999, mtime=0)[:10] + b"\xff" * 99,
    ],
)
def test_what_is_no_archive_is_told_in_one_line(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "bad.tar.gz").write_bytes(content)
    with pytest.raises(UserError, match="cannot be unpacked") as told:
        read_bundle(tmp_path / "bad.tar.gz")
    assert "\n" not in str(told.value)


def test_a_folder_of_two_jobs_is_refused(tmp_path: Path) -> None:
    folder = write_bundle(tmp_path / "b")
    write_bundle(tmp_path / "more", world_size=4)
    for rank in (0, 1):
        (tmp_path / "more" / f"rank{rank}.jsonl").rename(folder / f"rank{rank + 2}.jsonl")
    with pytest.raises(UserError, match="of jobs of 2 and 4 ranks; give each job a folder"):
        read_bundle(folder)


@pytest.mark.parametrize("passes", [1, 3])
@pytest.mark.parametrize("divided", [True, False])
def test_a_stream_that_goes_through_its_data_again_is_judged_by_its_first_pass(
    tmp_path: Path, divided: bool, passes: int
) -> None:
    """Ranks that divide each pass anew meet each other's samples in later passes."""
    bundle = write_bundle(tmp_path / "bundle")
    with_values(bundle, "facts", data_samples=None)
    for rank in (0, 1):
        orders = [np.random.default_rng(number).permutation(600) for number in range(passes)]
        samples = [order[rank::2] if divided else order for order in orders]
        row = {"table": "identities", "epoch": 0, "is_hashed": True, "by_weight": False}
        add_rows(bundle, row | {"samples": np.concatenate(samples).tolist()}, ranks=(rank,))
    verdict = wrong_sampler(opened(bundle))
    assert (verdict is None) == divided
