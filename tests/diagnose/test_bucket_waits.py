"""Backward passes that wait for each bucket, as under torch 2.15's group for NCCL."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from scaling_evidence import MIB, MadeUp, change_table, verdict_on, verdicts_on

from common.diagnose.evidence.evidence import open_evidence

SENT_MS = 4.0
"""Of each bucket; a gradient of 1 MiB is ready every 5 ms."""
NCCL2 = {"process_group": "ProcessGroupNCCL2", "backend": "nccl"}


def run_of(
    folder: Path, environment: dict, *, buckets: int = 4, waits: bool = True, taken: float = 1.0
) -> Path:
    """Writes a run whose passes wait for all buckets but the last, or only seem to.

    They are longer by ``taken`` times the exchange of these buckets.
    """
    MadeUp(
        buckets=(4 * MIB // buckets,) * buckets, latency_ms=0.0, bandwidth=MIB / SENT_MS,
        communication_ms=4 / buckets * SENT_MS, noise=0.002, placement={"device": "cuda:0"},
        hosts=("one", "other"),
    ).write(folder)  # fmt: skip
    record = {"status": "complete", "network": "NCCL", "packages": {"torch": "2.15.0+cu132"}}
    (folder / "environment.json").write_text(json.dumps(record | environment))
    each_ms, sent_ms = 20.0 / buckets, SENT_MS * 4 / buckets
    later_ms = each_ms + (sent_ms if waits else 0.0)
    change_table(
        folder,
        "buckets.csv",
        ready_time_ms=lambda marks: each_ms + marks["bucket"] * later_ms,
        # The other rank is late by as much for each bucket, which is no communication.
        done_time_ms=lambda marks: marks["ready_time_ms"] + sent_ms,
    )
    if waits or taken != 1.0:
        longer_ms = taken * (buckets - 1) * sent_ms
        change_table(
            folder,
            step_time_ms=lambda steps: steps["step_time_ms"] + longer_ms,
            backward_time_ms=lambda steps: steps["backward_time_ms"] + longer_ms,
        )
    return folder


def test_passes_that_wait_for_each_bucket_are_named_with_their_group(tmp_path: Path) -> None:
    """10 ms forward, 20 backward, 12 of waits, 4 of the last bucket, 1.2 besides: 12 of 47 ms."""
    folder = run_of(tmp_path / "run", NCCL2)
    [verdict] = verdicts_on(folder).values()
    assert verdict.cause == "no-overlap"
    assert verdict.lost_share == pytest.approx(12 / 47.2, abs=0.02)
    assert verdict.confidence == "high"
    assert "TORCH_DIST_USE_NCCL2=0" in verdict.change
    assert any("ProcessGroupNCCL2 of torch 2.15.0" in sentence for sentence in verdict.evidence)
    parts = open_evidence(folder).parts
    assert parts.parts_ms["backward"] == pytest.approx(20, rel=0.02)
    assert parts.parts_ms["communication"] == pytest.approx(16, rel=0.02)
    assert parts.hidden_communication_ms == 0


@pytest.mark.parametrize(
    "environment",
    [{"process_group": "OwnGroup"}, {"backend": "nccl"}],
    ids=["another class", "earlier record"],
)
def test_without_a_class_known_to_wait_it_is_less_sure(tmp_path: Path, environment: dict) -> None:
    verdict = verdict_on(run_of(tmp_path / "run", environment), "no-overlap")
    assert verdict.confidence == "medium"
    assert "get_future" in verdict.reason
    assert ("TORCH_DIST_USE_NCCL2" in verdict.change) == ("backend" in environment)


def test_a_class_known_to_wait_needs_no_probes(tmp_path: Path) -> None:
    folder = run_of(tmp_path / "run", NCCL2)
    (folder / "probes.csv").unlink()
    assert verdict_on(folder, "no-overlap") is not None
    (folder / "environment.json").write_text("{}")
    assert verdict_on(folder, "no-overlap") is None


def test_a_late_rank_is_waited_for_and_no_communication(tmp_path: Path) -> None:
    folder = run_of(tmp_path / "run", NCCL2)
    change_table(  # 3 ms of each bucket, in a pass of 15 ms by itself
        folder,
        "buckets.csv",
        ready_time_ms=lambda marks: marks["ready_time_ms"] - 3.0 * (marks["rank"] == 0),
    )
    by_rank = open_evidence(folder).parts.by_rank.set_index("rank")
    assert by_rank["communication_ms"].tolist() == pytest.approx([16, 16], rel=0.02)
    assert by_rank["waiting_ms"][0] - by_rank["waiting_ms"][1] == pytest.approx(9, abs=0.5)
    assert by_rank["backward_ms"][1] - by_rank["backward_ms"][0] == pytest.approx(9, abs=0.5)


@pytest.mark.parametrize(
    ("environment", "options"),
    [
        (NCCL2, {"buckets": 1}),
        ({"process_group": "OwnGroup"}, {"waits": False}),  # back before the next is ready
        # On an H200 exchanges took half of their time from the passes beside them.
        ({"process_group": "OwnGroup"}, {"waits": False, "taken": 0.52}),
        (NCCL2, {"waits": False}),
        ({"process_group": "ProcessGroupNCCL"}, {}),
        ({"backend": "nccl", "packages": {"torch": "2.11.0+cu130"}}, {}),
        ({"backend": "gloo"}, {}),
    ],
)
def test_it_is_not_named_where_nothing_waits_or_something_else_does(
    tmp_path: Path, environment: dict, options: dict
) -> None:
    folder = run_of(tmp_path / "run", environment, **options)
    assert verdict_on(folder, "no-overlap") is None
    assert open_evidence(folder).waits is None


def test_a_cap_that_needs_overlap_says_so(tmp_path: Path) -> None:
    """One bucket of 16 ms after a pass of 20: smaller ones would hide, in a group that overlaps."""
    changes = []
    for name in ("ProcessGroupNCCL", "ProcessGroupNCCL2"):
        folder = run_of(tmp_path / name, {"process_group": name}, buckets=1)
        changes.append(verdict_on(folder, "bucket-cap").change)
    assert ["TORCH_DIST_USE_NCCL2" in change for change in changes] == [False, True]
