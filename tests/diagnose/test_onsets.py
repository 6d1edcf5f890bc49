"""The study of faults that begin in a run: what it counts, and one case for real."""

from __future__ import annotations

import random
from pathlib import Path

import pandas as pd
import pytest
from ddplab_watch.change_points import Change
from ddplab_watch.step_blocks import BLOCK_S, MEASURED

from common.diagnose.studies import onsets
from common.diagnose.studies.onsets import CASES, STRETCH, Onset, OnsetStudy, drawn_alarms, judge
from common.errors import UserError
from common.runtime.stage_progress import StageProgress

ONSET = Onset("plain", "slow-forward=8", (1,), ("forward",))


def change(rank: int | None, phase: str, why: str = "") -> Change:
    return Change(720, 1e9, 740, rank, phase, 20.0, 28.0, 40.0, why)


@pytest.mark.parametrize(
    ("noticed", "is_named"),
    [
        (change(1, "forward"), True),
        (change(0, "forward"), False),
        (change(1, "update"), False),
        (change(None, "backward", ", and rank 1 is the slowest in 90% of the steps"), True),
        (change(0, "update", ", and rank 1 is the slowest in 90% of the steps"), False),
        (change(None, "backward", ", and rank 0 is the slowest in 90% of the steps"), False),
    ],
)
def test_a_change_names_a_fault_by_rank_and_phase(noticed: Change, is_named: bool) -> None:
    assert ONSET.is_named_by(noticed) == is_named


def blocks(seed: int, slower: float) -> pd.DataFrame:
    """Makes two ranks' blocks of 40 minutes, all of whose times are longer by a factor."""
    draw, rows = random.Random(seed), []
    for number in range(600):
        for rank in (0, 1):
            of = {name: 20 * slower * draw.gauss(1, 0.02) for name in MEASURED}
            of |= {"memory": 1e9, "elements": 64, "alone_ms": "[60.0]"}
            at = {"first": 100 * number, "last": 100 * number + 99, "unix_s": number * BLOCK_S}
            rows.append({"case": f"quiet-{slower}", "rank": rank} | at | of)
    return pd.DataFrame(rows)


def test_hours_of_blocks_have_alarms_where_runs_differ_and_hardly_any_where_not(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(onsets, "HOURS", 1)
    monkeypatch.setattr(onsets, "DRAWS", 1)
    quiet = blocks(0, 1.0)
    assert drawn_alarms(quiet)["alarms"].mean() <= 1
    monkeypatch.setattr(onsets, "DRAWS", 2)
    # A run that is half as fast again: stretches of both follow each other.
    assert drawn_alarms(pd.concat([quiet, blocks(1, 1.5)]))["alarms"].sum() > 0
    assert len(drawn_alarms(pd.DataFrame({"case": []}))) == 0
    assert len(drawn_alarms(quiet[quiet["first"] < 100 * (STRETCH - 1)])) == 0


def test_promises_are_counted_case_by_case() -> None:
    """Of four faults one comes late, one has another rank's name, one has an alarm before it."""
    rows = [
        ("slow-link", 28, 2.0, True, 0, 0.001),
        ("slow-link", 900, 80.0, True, 0, 0.004),
        ("slow-data", 400, 20.0, False, 1, 0.002),
        ("slow-data", None, None, False, 0, 0.001),
        ("quiet", None, None, False, 2, 0.009),
    ]
    columns = ["planted", "delay_steps", "delay_s", "is_named", "alarms_before", "hooks_share"]
    drawn = pd.DataFrame({"alarms": [0, 1]})
    found = judge(pd.DataFrame(rows, columns=columns), drawn).set_index("promise")["found"]
    assert found["share of onsets noticed in time"] == 0.5
    assert found["share of onsets noticed in time, by rank and phase"] == 0.25
    assert found["alarms before an onset"] == 1
    assert found["alarms in quiet runs"] == 2
    assert found["alarms in ten hours of drawn blocks"] == 0.5
    assert found["median share of time in hooks"] == 0.002
    onsets_alone = judge(pd.DataFrame(rows[:-1], columns=columns), drawn[:0])
    assert not onsets_alone["promise"].str.contains("quiet|drawn").any()
    quiet_alone = judge(pd.DataFrame(rows[-1:], columns=columns), drawn)
    assert not quiet_alone["promise"].str.contains("onset|notice|adds").any()


def test_a_watch_adds_what_pairs_of_runs_differ_by() -> None:
    """Each pair's watched run takes 1 % longer, whatever the machine's speed in its round."""
    pairs = pd.DataFrame({"planted": "paired", "unwatched_ms": [20.0, 25.0, 22.0, 40.0]})
    pairs = pairs.assign(watched_ms=pairs["unwatched_ms"] * 1.01, hooks_share=0.003)
    pairs = pairs.assign(alarms_before=5, delay_steps=None, delay_s=None, is_named=False)
    promises = judge(pairs, pd.DataFrame(columns=["alarms"])).set_index("promise")["found"]
    for end in ("estimate", "low", "high"):
        assert promises[f"share that a watch adds to a step, {end}"] == pytest.approx(0.01)
    assert not promises.index.str.contains("onset|quiet").any()


def test_there_are_thirty_onsets_of_ten_kinds_and_others_are_refused() -> None:
    faults = [case for case in CASES if case.cause not in onsets.WITHOUT_FAULT]
    assert len(faults) == 30
    assert len({case.cause for case in faults}) == 10
    assert len({case.name for case in CASES}) == len(CASES)
    assert {case.cause for case in OnsetStudy(only=("slow-link",)).cases()} == {"slow-link"}
    with pytest.raises(UserError, match="unknown case 'x'"):
        OnsetStudy(only=("x",))


@pytest.mark.slow
@pytest.mark.alone
@pytest.mark.timeout(300)
def test_a_fault_that_begins_in_a_run_is_noticed_and_what_is_there_is_not_run_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(onsets, "BEFORE", 700)
    monkeypatch.setattr(onsets, "AFTER", 400)
    monkeypatch.setattr(onsets, "PAIRED_STEPS", 260)
    case = Onset("plain", "slow-forward=50", (1,), ("forward",))
    monkeypatch.setattr(onsets, "CASES", (case, Onset("plain", onsets.PAIRED)))
    path = onsets.run_study(OnsetStudy(), str(tmp_path), StageProgress())
    row, pair = pd.read_csv(path / "cases.csv").to_dict("records")
    assert pair["watched_ms"] > 0 < pair["unwatched_ms"]
    assert (path / "runs" / "plain-paired").is_dir()
    assert not (path / "runs" / "plain-paired-unwatched").exists()
    assert (row["rank"], row["phase"], row["is_named"]) == (1, "forward", True)
    assert 0 < row["delay_s"] <= 60
    assert 0 < row["hooks_share"] < 0.5
    again = onsets.run_study(OnsetStudy(continues=str(path)), str(tmp_path), StageProgress())
    assert (again / "cases.csv").read_text() == (path / "cases.csv").read_text()
    assert not any((again / "runs").iterdir())
