"""A class's measurements pooled: known truths, coverage, false alarms, and what is not pooled."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import yaml
from command_line import answered, ddplab, error_line
from scipy import stats

from common.course.pooling.estimates import ADDED, RATIO, REGRET, SAVED, Estimate, regret
from common.course.pooling.hand_ins import LeftOut, find_hand_ins
from common.course.pooling.page import page
from common.course.pooling.pool import Pool, pool_folders, pooled, pooled_of
from common.course.submission import HandedIn, pack
from common.errors import UserError
from common.judged import Judged
from common.runtime.paths import project_root
from common.samples import Interval, student

DATA = project_root() / "data"
SPEEDUP = "speedup of DDP over one device, 1 micro-batch, 2 ranks"
ADDED_BY_DDP = "added by DDP's exchange, 1 micro-batch, 2 ranks"
SETTINGS = {
    "model": "gpt2-nano",
    "micro_batch_size": 4,
    "seq_len": 64,
    "precision": "float32",
    "bucket_cap_mb": 4.0,
}


def write_student(
    folder: Path,
    times_ms: Mapping[str, Sequence[float]],
    started: str = "2026-01-02T03:04:05+00:00",
    stage: str = "compare_strategies",
    environment: Mapping[str, object] = {},
    **settings: object,
) -> Path:
    """Writes a student's run: strategy → time of each round."""
    record = {
        "label": "laptop",
        "status": "complete",
        "start_time": started,
        "hardware": f"the machine of {folder.name}",
        "world_size": 2,
        "backend": "gloo",
        "network": "TCP over loopback",
        "interconnect": {},
    }
    rows = [
        {
            "strategy": strategy,
            "accumulation": 1,
            "round": round_,
            "iteration": iteration,
            "rank": rank,
            "step_time_ms": time_ms + iteration + rank / 2,  # the median step is 1.5 ms longer
            "sent_bytes": 0,
        }
        for strategy, rounds in times_ms.items()
        for round_, time_ms in enumerate(rounds)
        for iteration in range(3)
        for rank in range(2)
    ]
    (folder / stage).mkdir(parents=True)
    (folder / "environment.json").write_text(json.dumps(record))
    stage_record = record | {"label": "compare_strategies"} | dict(environment)
    (folder / stage / "environment.json").write_text(json.dumps(stage_record))
    (folder / stage / "config.yaml").write_text(yaml.safe_dump(SETTINGS | settings))
    pd.DataFrame(rows).to_csv(folder / stage / "strategy-times.csv", index=False)
    return folder


def write_class(
    folder: Path, speedups: Mapping[str, float], rounds: int = 4, noise: float = 0.02
) -> Path:
    """Writes a student for each speedup, with noise of its own in every round."""
    draws = np.random.default_rng(0)
    for name, speedup in speedups.items():
        single = 100 * np.exp(draws.normal(0, noise, rounds))
        ddp = 100 / speedup * np.exp(draws.normal(0, noise, rounds))
        write_student(folder / name, {"single": single - 1.5, "DDP": ddp - 1.5})
    return folder


def estimate(
    ratio: float, quantity: str = "q", wording: str = RATIO, rounds: int = 2, **settings: object
) -> Estimate:
    """Returns an estimate with an interval of ±5 %."""
    interval = Interval(ratio, ratio * 0.95, ratio * 1.05, rounds=rounds)
    return Estimate(1, quantity, wording, Judged(interval), settings, "stage", {}, f"{ratio!r}")


def a_class(ratios: Sequence[float], **known: object) -> dict[str, Estimate]:
    return {f"s-{number}": estimate(ratio, **known) for number, ratio in enumerate(ratios)}


def measured(logs: Sequence[float], quantity: str) -> Estimate:
    """Returns an estimate from the logarithms of its rounds' ratios."""
    ratio = Judged(student(logs).map(np.exp))
    return Estimate(1, quantity, RATIO, ratio, {}, "stage", {}, str(logs))


def row_of(pool: Pool, quantity: str) -> pd.Series:
    return pool.quantities.set_index("quantity").loc[quantity]


def test_a_student_counts_once_and_the_interval_is_students_over_their_logarithms(
    tmp_path: Path,
) -> None:
    # Speedups of 2, 1 and 4 in every round, whatever the number of rounds: their geometric mean.
    write_student(tmp_path / "doe-jane", {"single": [98.5] * 2, "DDP": [48.5] * 2})
    write_student(tmp_path / "roe-max", {"single": [98.5] * 9, "DDP": [98.5] * 9})
    write_student(tmp_path / "poe-kim", {"single": [98.5], "DDP": [23.5]})
    pool = pool_folders([tmp_path])
    row = row_of(pool, SPEEDUP)
    off = stats.t.ppf(0.975, 2) * np.log(2) / np.sqrt(3)
    assert row["value"] == pytest.approx(2)
    assert row["low"] == pytest.approx(2 * np.exp(-off))
    assert row["high"] == pytest.approx(2 * np.exp(off))
    assert row["students"] == 3
    assert row["verdict"] == "not settled: 1 more student"
    assert (row["above"], row["below"]) == (2, 0)
    students = pool.students.set_index("student")
    assert students["rounds"].to_dict() == {"doe-jane": 2, "roe-max": 9, "poe-kim": 1}
    assert students["hardware"]["poe-kim"] == "the machine of poe-kim"
    assert np.isnan(students["low"]["poe-kim"])
    assert not pool.left_out


def test_the_exchange_is_a_share_of_the_same_computation_without_it(tmp_path: Path) -> None:
    for name, ddp in {"doe-jane": 108.5, "roe-max": 118.5}.items():
        write_student(tmp_path / name, {"local": [98.5] * 4, "DDP": [ddp] * 4})
    row = row_of(pool_folders([tmp_path]), ADDED_BY_DDP)
    assert row["value"] == pytest.approx(np.sqrt(1.1 * 1.2) - 1)
    assert row["low"] < 0.1 < 0.2 < row["high"]


def test_a_share_that_is_saved_keeps_its_ends_in_order() -> None:
    row = pooled(a_class([0.8, 0.9], wording=SAVED)).row()
    assert row["value"] == pytest.approx(1 - np.sqrt(0.72))
    assert row["low"] < row["value"] < row["high"]
    assert (row["above"], row["below"]) == (2, 0)  # both save something


def test_the_interval_holds_the_truth_in_95_of_100_classes() -> None:
    draws, truth, holds = np.random.default_rng(1), np.log(1.2), 0
    for _ in range(500):
        interval = pooled(a_class(np.exp(draws.normal(truth, 0.2, 6)))).ratio.interval
        holds += interval.low <= 1.2 <= interval.high
    assert 0.925 <= holds / 500 <= 0.975


def test_where_nothing_differs_at_most_one_page_in_twenty_raises_an_alarm() -> None:
    # Four quantities of eight students on equal machines, some with a single round, some with many:
    # their own numbers are not equally good.
    draws = np.random.default_rng(2)
    settled = differing = 0
    for _ in range(100):
        kept = {
            quantity: {
                f"s-{number}": measured(draws.normal(0, 0.1, rounds), quantity)
                for number, rounds in enumerate(draws.choice((1, 2, 8), 8))
            }
            for quantity in "abcd"
        }
        quantities = pooled_of(kept, [])
        settled += any(quantity.ratio.is_settled for quantity in quantities)
        differing += any(quantity.differing for quantity in quantities)
    assert settled / 100 <= 0.093  # 0.05 and two standard errors
    assert differing / 100 <= 0.093


def test_half_a_class_finds_the_opposite_order_and_together_they_tell() -> None:
    # A gain of 3 % under noise of 10 % a student: 38 % of them would name the other order.
    draws = np.random.default_rng(3)
    ratios = np.exp(draws.normal(np.log(1.03), 0.1, 400))
    result = pooled(a_class(ratios))
    assert result.ratio.is_settled
    expected = stats.norm.cdf(-np.log(1.03) / 0.1)
    assert len(result.opposite) / 400 == pytest.approx(expected, abs=0.06)
    # Of too few students nobody can be on the wrong side, as there is no side.
    assert pooled(a_class(ratios[:2])).opposite is None


def test_a_student_who_differs_is_named_and_does_not_hide_behind_the_own_number() -> None:
    draws = np.random.default_rng(4)
    ratios = np.exp(draws.normal(0.3, 0.05, 9))
    ratios[5] = np.exp(0.3 + 10 * 0.05)
    result = pooled(a_class(ratios), comparisons=9)
    assert result.differing == ["s-5"]
    others = np.delete(np.log(ratios), 5)
    off = stats.t.ppf(1 - 0.025 / 9, 7) * others.std(ddof=1) * np.sqrt(1 + 1 / 8)
    expected = result.expected["s-5"]
    assert expected.low == pytest.approx(np.exp(others.mean() - off))
    assert expected.high == pytest.approx(np.exp(others.mean() + off))
    # Of two students either one is as odd as the other.
    assert pooled(a_class([1.0, 9.0])).differing == []


def test_a_regret_needs_more_than_luck() -> None:
    # Seven equal caps: the fastest of all rounds is so by luck, and leaves the others a regret.
    draws, logs, alarms, naive = np.random.default_rng(5), [], 0, []
    for _ in range(100):
        rounds = pd.DataFrame(np.exp(draws.normal(0, 0.05, (6, 7))))
        ratio = regret(rounds, 3)
        logs.append(np.log(ratio.estimate))
        alarms += Judged(ratio).is_settled
        means = np.log(rounds).mean()
        naive.append(means[3] - means.min())
    assert abs(np.mean(logs)) < 3 * np.std(logs) / np.sqrt(100)
    assert alarms / 100 <= 0.09
    assert np.mean(naive) > 0.02
    # A cap that costs 20 % is found out, and 20 % is what it costs.
    costs = np.exp(draws.normal(0, 0.01, (6, 7)))
    costs[:, 3] *= 1.2
    ratio = regret(pd.DataFrame(costs), 3)
    assert ratio.estimate == pytest.approx(1.2, abs=0.03)
    assert Judged(ratio).is_settled
    assert np.isnan(regret(pd.DataFrame([[1.0, 2.0]]), 1).estimate)


def test_a_class_has_no_regret_below_none() -> None:
    # Seven caps 1 % apart under noise of 3 %; all 20 students chose the true best of them. In
    # single rounds another one looks best, so each student's estimate is a little below 1.
    draws, costs = np.random.default_rng(6), np.log(1 + 0.01 * np.arange(7))
    below: dict[str, int] = {}
    for _ in range(5):
        rounds = np.exp(costs + draws.normal(0, 0.03, (20, 6, 7)))
        ratios = [Judged(regret(pd.DataFrame(table), 0)) for table in rounds]
        for quantity in (REGRET, "another"):
            students = {
                f"s-{n}": Estimate(2, quantity, ADDED, ratio, {}, "stage", {}, "")
                for n, ratio in enumerate(ratios)
            }
            ratio = pooled(students).ratio
            assert ratio.interval.low < 1
            below[quantity] = below.get(quantity, 0) + ratio.is_settled
    assert below[REGRET] == 0 < below["another"]


def test_other_settings_are_not_pooled_with_the_rest(tmp_path: Path) -> None:
    write_class(tmp_path, {"a-a": 1.5, "b-b": 1.6, "c-c": 1.4})
    write_student(tmp_path / "d-d", {"single": [98.5] * 4, "DDP": [9.5] * 4}, model="gpt2")
    write_student(
        tmp_path / "e-e", {"single": [98.5] * 4, "DDP": [8.5] * 4}, environment={"backend": "nccl"}
    )
    pool = pool_folders([tmp_path])
    assert row_of(pool, SPEEDUP)["students"] == 3
    reasons = {line.student: line.reason for line in pool.left_out}
    assert reasons == {
        "d-d": "other settings: model is gpt2, in the class gpt2-nano",
        "e-e": "other settings: backend is nccl, in the class gloo",
    }


def test_the_same_measurement_of_two_students_counts_once(tmp_path: Path) -> None:
    write_class(tmp_path, {"a-a": 1.5, "b-b": 1.6})
    shutil.copytree(tmp_path / "a-a", tmp_path / "c-c")
    # One who changed a digit keeps the record of the process that measured.
    marked = {"host": "h", "process": "7:8:9:h"}
    write_student(tmp_path / "d-d", {"single": [98.5], "DDP": [48.5]}, environment=marked)
    write_student(tmp_path / "e-e", {"single": [98.5], "DDP": [47.5]}, environment=marked)
    pool = pool_folders([tmp_path])
    assert list(pool.students["student"]) == ["a-a", "b-b", "d-d"]
    assert {line.student: line.reason for line in pool.left_out} == {
        "c-c": "the same measurement as a-a's: counted once",
        "e-e": "the same measurement as d-d's: counted once",
    }


def test_of_a_students_runs_the_newest_counts(tmp_path: Path) -> None:
    times = {"single": [98.5] * 4, "DDP": [48.5] * 4}
    later = {"single": [98.5] * 4, "DDP": [23.5] * 4}
    runs = tmp_path / "doe-jane" / "outputs" / "assignment1"
    write_student(runs / "20260102-030405-laptop-0a1b2c3d", times, "2026-01-02T00:00:00+00:00")
    write_student(runs / "20260103-030405-laptop-0a1b2c3e", later, "2026-01-03T00:00:00+00:00")
    pool = pool_folders([tmp_path])
    assert row_of(pool, SPEEDUP)["value"] == pytest.approx(4)
    [line] = pool.left_out
    assert (line.student, line.reason) == (
        "doe-jane",
        "an earlier run of the same student: the newest counts",
    )
    # Of an earlier run that another student has, too, theirs counts.
    shutil.copytree(sorted(runs.iterdir())[0], tmp_path / "roe-max")
    pool = pool_folders([tmp_path])
    assert dict(pool.students.set_index("student")["value"]) == pytest.approx(
        {"doe-jane": 4, "roe-max": 2}
    )
    # A run that is named by itself is a unit by itself.
    assert len(pool_folders(sorted(runs.iterdir())).students) == 2


def hand_in(folder: Path, of: HandedIn, run: Path | None) -> Path:
    """Packs a run directory as ``ddplab handin`` does."""
    files = {"exercises/a.py": b"", "answers.yaml": b""}
    for path in sorted(run.rglob("*")) if run else ():
        if path.is_file():
            files[f"run/{path.relative_to(run)}"] = path.read_bytes()
    path = folder / f"{of.stem}.tar.gz"
    pack(path, of, files)
    return path


@pytest.mark.usefixtures("read_here")
def test_hand_ins_are_read_packed_and_unpacked_and_count_once_if_downloaded_twice(
    tmp_path: Path,
) -> None:
    runs, class_ = tmp_path / "runs", tmp_path / "class"
    (class_ / "late").mkdir(parents=True)
    write_class(runs, {"a-a": 1.5, "b-b": 1.6, "c-c": 1.7})
    path = hand_in(class_, HandedIn("doe-jane", 1, 2), runs / "a-a")
    shutil.copy(path, class_ / f"{path.name.removesuffix('.tar.gz')} (1).tar.gz")
    shutil.copy(path, class_ / "late")
    hand_in(class_ / "late", HandedIn("roe-max", 1, 2), runs / "b-b")
    shutil.copytree(runs / "c-c", class_ / "poe-kim-assign1-part2" / "run")
    pool = pool_folders([class_, class_ / "late", path], assignment=1)
    assert sorted(pool.students["student"]) == ["doe-jane", "poe-kim", "roe-max"]
    assert [(line.student, line.reason) for line in pool.left_out] == [
        ("doe-jane", "the same measurement as doe-jane's: counted once")
    ]


@pytest.mark.usefixtures("read_here")
def test_two_people_of_one_name_are_two_students(tmp_path: Path) -> None:
    runs, class_ = tmp_path / "runs", tmp_path / "class"
    write_class(runs, {name: 1.5 + n / 10 for n, name in enumerate("abcd")})
    people = [("s1", ""), ("S1", "jane@x.org"), ("s2", ""), ("", "")]
    for run, (id_, email) in zip("abcd", people, strict=True):
        (class_ / run).mkdir(parents=True)
        hand_in(class_ / run, HandedIn("doe-jane", 1, 2, email, id_), runs / run)
    # Of one person the name is enough.
    assert list(pool_folders([class_ / "a", class_ / "b"]).students["student"]) == ["doe-jane"]
    pool = pool_folders([class_])
    assert set(pool.students["student"]) == {"doe-jane (s1)", "doe-jane (s2)"}
    reasons = {line.student: line.reason for line in pool.left_out}
    assert reasons.pop("doe-jane (s1)") == "an earlier run of the same student: the newest counts"
    assert "several are called doe-jane" in reasons.pop("doe-jane")
    assert not reasons


@pytest.mark.usefixtures("read_here")
@pytest.mark.parametrize(
    ("people", "students"),
    [
        # (assignment, id, e-mail) of each hand-in of Jane Doe's
        ([(1, "", "jane@x.org"), (2, "", ""), (3, "", "jane@y.org")], {"doe-jane"}),
        (
            [(1, "", "j@x.org"), (1, "s1", ""), (1, "s2", "")],
            {"doe-jane (s1)", "doe-jane (s2)", "left out"},
        ),
    ],
    ids=["other assignments", "of either"],
)
def test_namesakes_of_one_assignment_are_told_apart(tmp_path: Path, people, students) -> None:
    for number, (assignment, id_, email) in enumerate(people):
        (tmp_path / str(number)).mkdir()
        of = HandedIn("doe-jane", assignment, 2 * (assignment == 1), email, id_)
        hand_in(tmp_path / str(number), of, None)
    left_out: list[LeftOut] = []
    hand_ins = find_hand_ins([tmp_path], left_out)
    assert {h.student for h in hand_ins} | {"left out" for _ in left_out} == students
    assert len(hand_ins) + len(left_out) == len(people)


def test_what_cannot_be_pooled_is_said_by_name_and_reason(tmp_path: Path) -> None:
    runs, class_ = tmp_path / "runs", tmp_path / "class"
    class_.mkdir()
    write_class(runs, {"a-a": 1.5, "b-b": 1.6})
    write_class(class_, {"good-one": 1.5, "good-two": 1.6})
    hand_in(class_, HandedIn("part-one", 1, 1), None)
    hand_in(class_, HandedIn("wrong-name", 2), runs / "a-a")
    (class_ / "cut-off-assign1-part2.tar.gz").write_bytes(b"\x1f\x8b")
    (class_ / "mine.zip").write_bytes(b"")
    (class_ / "grades.csv").write_text("a\n")
    (class_ / "empty").mkdir()
    tables = {"bad-table": "a,b\n1,2\n", "no-table": "", "text-only": "x\n", "wide": "a," * 300_000}
    for name, table in tables.items():
        write_student(class_ / name, {"single": [98.5], "DDP": [48.5]})
        (class_ / name / "compare_strategies" / "strategy-times.csv").write_text(table)
    write_student(class_ / "not-done", {"single": [1.0]}, environment={"status": "failed"})
    write_student(class_ / "below-zero", {"single": [98.5], "DDP": [-98.5]})
    odd = write_student(class_ / "odd-record", {"single": [98.5], "DDP": [8.5]})
    (odd / "compare_strategies" / "environment.json").write_text("[]")
    deep = write_student(class_ / "deep", {"single": [98.5], "DDP": [8.5]})
    (deep / "compare_strategies" / "environment.json").write_text("[" * 900_000)
    pool = pool_folders([class_])
    assert row_of(pool, SPEEDUP)["students"] == 2
    reasons = {line.student: line.reason for line in pool.left_out}
    expected = {
        "part-one": "no run in it",
        "wrong-name": "a run of assignment 1, not 2",
        "cut-off": "no whole tarball",
        "mine.zip": "no whole tarball",
        "empty": "no run in it",
        "bad-table": "no column 'strategy'",
        "no-table": "empty",
        "text-only": "no column",
        "not-done": "not complete",
        "below-zero": "no round has times above 0",
        "odd-record": "not complete",
        "wide": "compare_strategies/strategy-times.csv:1: a line of more than 256 KiB",
        "deep": "compare_strategies/environment.json: no JSON",
    }
    assert set(reasons) == set(expected)
    text = page(pool)
    for name, words in expected.items():
        assert words in reasons[name], name
        assert name in text


NAMES = ("Anna O'Neil", "d'Arc, Jeanne", "José de la Cruz", "Ng-Smith (2)", "von  Neumann")


def test_people_are_called_what_their_folders_are_called(tmp_path: Path) -> None:
    class_ = write_class(tmp_path / "my class", dict.fromkeys(NAMES, 1.5))
    output = tmp_path / "the instructor's pool"
    answered("course", "pool", class_, "--output", output)
    students = pd.read_csv(output / "students.csv")["student"]
    assert sorted(students) == sorted(NAMES)
    assert "| Anna O'Neil " in (output / "pool.md").read_text()
    assert not pd.read_csv(output / "left-out.csv").size
    # A pool that lies among the hand-ins is none of them.
    shutil.copytree(output, class_ / "pool")
    again = pool_folders([class_])
    assert [(line.student, line.reason) for line in again.left_out] == [("pool", "no run in it")]
    assert len(again.students) == len(NAMES)


def test_what_is_no_students_is_a_row_with_its_reason(tmp_path: Path) -> None:
    class_ = write_class(tmp_path / "class", {"a-a": 1.5, "b-b": 1.6})
    (class_ / "website" / "data").mkdir(parents=True)
    (class_ / "website" / "environment.json").write_text('{"name": "web"}')
    (class_ / "website" / "data" / "steps.csv").write_text("a,b\n1,2\n")
    (class_ / "gone").symlink_to(tmp_path / "nowhere")
    (class_ / "round").symlink_to(class_ / "round")
    os.mkfifo(class_ / "pipe")
    for name, kept in (("cut-row", -9), ("cut-number", -1)):
        write_student(class_ / name, {"single": [98.5] * 4, "DDP": [48.5] * 4})
        table = class_ / name / "compare_strategies" / "strategy-times.csv"
        table.write_text(table.read_text()[:kept])
    pool = pool_folders([class_])
    assert sorted(pool.students["student"]) == ["a-a", "b-b"]
    cut = "compare_strategies/strategy-times.csv:49: cut off within a row"
    assert {line.student: line.reason for line in pool.left_out} == {
        "website": "it measured nothing that is pooled",
        "gone": "No such file or directory",
        "round": "Too many levels of symbolic links",
        "pipe": "Not a directory",
        "cut-row": cut,
        "cut-number": cut,
    }


def test_students_of_one_round_are_students(tmp_path: Path) -> None:
    class_ = write_class(tmp_path / "class", dict.fromkeys("abcde", 1.5), rounds=1)
    pool = pool_folders([class_])
    assert row_of(pool, SPEEDUP)["verdict"] == "settled"
    assert set(pool.students["verdict"]) == {"not settled: 3 more rounds"}


@pytest.mark.usefixtures("read_here")
def test_words_of_a_hand_in_stay_words(tmp_path: Path) -> None:
    class_ = write_class(tmp_path / "class", {"a-a": 1.5, "b-b": 1.6, "[red]c-c": 9.0})
    write_student(
        tmp_path / "runs" / "d-d", {"single": [98.5], "DDP": [48.5]}, model="\x1b[31mred\nline"
    )
    hand_in(class_, HandedIn("doe-jane", 1, 2), tmp_path / "runs" / "d-d")
    (tmp_path / "runs" / "d-d" / "compare_strategies" / "strategy-times.csv").write_text("a\n1\n")
    hand_in(class_, HandedIn("roe-max", 1, 2), tmp_path / "runs" / "d-d")
    printed = answered("course", "pool", class_, "--output", tmp_path / "pool")
    assert "\x1b" not in printed
    assert "roe-max, roe-max-assign1-part2.tar.gz: strategy-times.csv cannot be used: " in printed
    assert "used: compare_strategies/strategy-times.csv: no column" in printed  # as it is in there
    assert "doe-jane" in printed


@pytest.mark.usefixtures("read_here")
def test_an_assignment_leaves_hand_ins_of_others_out(tmp_path: Path) -> None:
    runs, class_ = tmp_path / "runs", tmp_path / "class"
    class_.mkdir()
    write_class(runs, {"a-a": 1.5, "b-b": 1.6})
    hand_in(class_, HandedIn("doe-jane", 1, 2), runs / "a-a")
    hand_in(class_, HandedIn("roe-max", 2), runs / "b-b")
    pool = pool_folders([class_], assignment=1)
    assert [(line.student, line.reason) for line in pool.left_out] == [
        ("roe-max", "of assignment 2, not 1")
    ]
    row = row_of(pool, SPEEDUP)
    assert row["verdict"] == "not settled: 3 more students"
    assert np.isnan(row["low"])
    with pytest.raises(UserError, match="nothing to pool: doe-jane"):
        pool_folders([class_ / "doe-jane-assign1-part2.tar.gz"], assignment=3)


def test_a_file_that_is_no_hand_in_is_named_once(tmp_path: Path) -> None:
    (tmp_path / "README.md").write_text("a class")
    with pytest.raises(UserError) as refusal:
        pool_folders([tmp_path / "README.md"])
    assert str(refusal.value).count("README.md") == 1


def test_recorded_runs_are_two_students(tmp_path: Path) -> None:
    recorded = DATA / "epyc-2-cores"
    for name in ("doe-jane", "roe-max"):
        shutil.copytree(recorded / "assignment2", tmp_path / name)
    table = tmp_path / "roe-max" / "ddp_benchmark" / "ddp-times.csv"
    times = pd.read_csv(table)
    is_default = times["bucket_cap_mib"].isna()
    times.loc[is_default, "backward_time_ms"] *= 1.1
    times.to_csv(table, index=False)
    pool = pool_folders([tmp_path])
    gain = pool.students[
        pool.students["quantity"] == "gain of the model's cap over DDP's default, 2 ranks"
    ].set_index("student")["value"]
    # The default takes a tenth longer: 1 − gain is divided by 1.1, to the last digit.
    assert 1 - gain["roe-max"] == pytest.approx((1 - gain["doe-jane"]) / 1.1)
    same = [line for line in pool.left_out if line.student == "roe-max"]
    assert same  # the emulated networks' tables are doe-jane's
    assert all("doe-jane's: counted once" in line.reason for line in same)


def test_recorded_runs_of_all_assignments_have_their_quantities(tmp_path: Path) -> None:
    folders = [DATA / "epyc-2-cores" / f"assignment{number}" for number in (1, 3)]
    pool = pool_folders([*folders, DATA / "xeon-2-cores" / "assignment4"])
    quantities = pool.quantities.set_index("quantity")
    assert set(quantities["assignment"]) == {1, 3, 4}
    assert set(quantities["verdict"]) == {"not settled: 3 more students"}
    modes = pd.read_csv(DATA / "epyc-2-cores/assignment3/compare_modes/mode-times.csv")
    steps = modes.groupby(["mode", "step"])["step_time_ms"].max()
    ratio = steps["dynamic"].mean() / steps["static"].mean()
    assert quantities["value"]["step of dynamic over static, sst2, 2 ranks"] == pytest.approx(ratio)
    assert quantities["value"]["speedup, text training, 2 ranks"] == pytest.approx(1.34, abs=0.01)
    assert set(pool.students["student"]) == {"epyc-2-cores", "xeon-2-cores"}


def test_the_command_writes_tables_figures_and_a_page(tmp_path: Path) -> None:
    output = tmp_path / "pool"
    write_class(tmp_path / "class", {f"s-{n}": 1.5 + n / 50 for n in range(8)})
    (output).mkdir()
    (output / "forest-09-an-earlier-one.png").write_bytes(b"")
    (output / "mine.txt").write_text("kept")
    printed = answered("course", "pool", tmp_path / "class", "--output", output)
    assert "settled" in printed
    names = sorted(path.name for path in output.iterdir())
    assert names == [
        "forest-01-speedup-of-ddp-over-one-device-1-micro-batch-2-ranks.png",
        "left-out.csv",
        "mine.txt",
        "pool.csv",
        "pool.md",
        "students.csv",
    ]
    table = pd.read_csv(output / "students.csv")
    logs = np.log(table["value"])
    row = pd.read_csv(output / "pool.csv").iloc[0]
    assert row["value"] == pytest.approx(np.exp(student(logs).estimate))
    assert "| s-3 " in (output / "pool.md").read_text()


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ((), "no folder was given"),
        (("nowhere",), "nowhere: no such folder or hand-in"),
        (("{empty}",), "nothing to pool: empty: no run in it"),
        (("{foreign}",), "nothing to pool: foreign: it measured nothing that is pooled"),
        (("{cut}",), "nothing to pool: cut: compare_strategies/strategy-times.csv:13: cut off"),
        (("{empty}", "--assignment", "0"), "--assignment 0: nothing of it is pooled"),
        (("{class}", "--output", "{file}"), "Not a directory"),
    ],
)
def test_a_mistake_gets_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arguments: tuple[str, ...], words: str
) -> None:
    for name in ("empty", "foreign"):
        (tmp_path / name).mkdir()
    (tmp_path / "file").write_text("")
    (tmp_path / "foreign" / "environment.json").write_text('{"name": "web"}')
    write_class(tmp_path / "class", {"a-a": 1.5, "b-b": 1.6})
    run = write_student(tmp_path / "cut", {"single": [98.5], "DDP": [48.5]})
    table = run / "compare_strategies" / "strategy-times.csv"
    table.write_text(table.read_text().rstrip())
    names = {name: str(tmp_path / name) for name in ("empty", "foreign", "cut", "class")}
    names["file"] = str(tmp_path / "file" / "below")
    monkeypatch.chdir(tmp_path)
    before = sorted(tmp_path.rglob("*"))
    line = error_line(ddplab("course", "pool", *(word.format(**names) for word in arguments)))
    assert words in line
    assert sorted(tmp_path.rglob("*")) == before  # nothing half-written
