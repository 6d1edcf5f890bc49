"""``ddplab diagnose --compare`` as a gate: statuses, refusals, what it writes and sends."""

from __future__ import annotations

import functools
import json
import sys
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from bundle_support import add_rows, change_rows, step_row, with_surroundings, write_bundle
from command_line import ddplab, refused
from ddplab_watch.change_points import Change

from common.cli.diagnose import split_script
from common.diagnose import opened
from common.diagnose.studies import gate_pairs
from common.errors import UserError
from common.runtime.stage_progress import StageProgress

STEPS = 30
Row = Callable[[dict], dict | None]
open_once = functools.cache(opened.open_diagnosis)


def bundle(
    folder: Path,
    slower: float = 1.0,
    seed: int = 0,
    change: Row = dict,
    steps: int = STEPS,
    **about: object,
) -> Path:
    """Writes a bundle of plain steps of about 100 ms, with 1 % of noise.

    ``change`` returns another row for each of the steps and facts, or None for none.
    """
    write_bundle(folder, **about)
    change_rows(folder, lambda row: None if row["table"] == "steps" else row)
    noise = np.random.default_rng(seed).normal(1, 0.01, steps)
    times = {"step_time_ms": 100, "forward_time_ms": 30, "backward_time_ms": 60}
    for rank in (0, 1):
        for step in range(steps):
            row = step_row(rank, 0) | {"step": step, "kind": "plain", "exchange_time_ms": None}
            row |= {"elements": 8 * 128, "between_time_ms": 1.0, "buffers_time_ms": 0.0}
            row |= {name: ms * slower * noise[step] for name, ms in times.items()}
            add_rows(folder, row, ranks=(rank,))
    change_rows(folder, change)
    return folder


@pytest.fixture(scope="module")
def made(tmp_path_factory) -> Callable[..., Path]:
    """Returns ``bundle``, which makes each once, in a folder of its own."""
    return functools.cache(lambda *how: bundle(tmp_path_factory.mktemp("made") / "b", *how))


@pytest.fixture(autouse=True)
def opened_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lets a bundle be diagnosed once, with which many are compared."""
    monkeypatch.setattr(opened, "open_diagnosis", open_once)


@pytest.mark.parametrize(
    ("slower", "limit", "status", "said"),
    [
        (1.20, 5, 1, "failed at 5 %"),
        (1.00, 5, 0, "passed at 5 %"),
        (1.05, 5, 3, "not settled at 5 %"),
        (0.80, 0, 0, "passed at 0 %"),
    ],
)
def test_a_gate_has_a_status_for_each_outcome(
    made, tmp_path: Path, slower: float, limit: float, status: int, said: str
) -> None:
    before, after = made(), made(slower, 1)
    result = tmp_path / "out.json"
    done = ddplab("diagnose", "--compare", before, after, "--fail-above", limit, "--json", result)
    assert done.status == status, done.stderr
    assert done.stdout.lower().startswith(said)
    content = json.loads(result.read_text())
    assert content["status"] == status
    assert bool(content["to_settle"]) == (status == 3)
    by_part = {row["part"]: row for row in content["rows"]}
    step_ms = slower * 100 + 1  # what lies between two steps stays
    assert by_part["step"]["change"] == pytest.approx(step_ms / 101 - 1, abs=0.02)
    assert by_part["forward"]["change"] == pytest.approx(30 * (slower - 1) / 101, abs=0.02)
    assert by_part["step"]["low"] < by_part["step"]["change"] < by_part["step"]["high"]
    percent = f"{by_part['step']['change']:+.1%}"
    assert (percent in done.stdout) == (by_part["step"]["verdict"] == "settled")


def test_what_too_few_steps_have_shown_is_told_by_no_number(tmp_path: Path) -> None:
    before = bundle(tmp_path / "a", change=brief(15))  # three blocks
    after = bundle(tmp_path / "b", 1.2, change=brief(15))
    result = tmp_path / "out.json"
    compared = ddplab("diagnose", "--compare", before, after, "--json", result)
    assert compared.stdout.startswith("No difference is settled, ")
    assert "%" not in compared.stdout
    assert compared.stdout.count("not settled: ") == len(json.loads(result.read_text())["rows"])
    assert {row["low"] for row in json.loads(result.read_text())["rows"]} == {None}
    gate = ddplab("diagnose", "--compare", before, after, "--fail-above", 5)
    assert gate.status == 3
    assert "At least 20 steps that count are needed" in gate.stdout.splitlines()[0]


def test_a_run_that_became_slower_while_it_went_on_does_not_pass(made, tmp_path: Path) -> None:
    before, after = made(), bundle(tmp_path / "b")
    noticed = Change(198, 0.0, 213, 1, "forward", 0.85, 11.0, 101.0)
    add_rows(after, {"table": "changes"} | asdict(noticed), ranks=(0,))
    result = tmp_path / "out.json"
    gate = ddplab("diagnose", "--compare", before, after, "--fail-above", 5, "--json", result)
    assert gate.status == 3
    first, second, *_ = gate.stdout.splitlines()
    assert "Runs that do not change while they go on would settle it" in first
    assert "since step 198 rank 1's forward pass takes" in second
    assert "the steps from there on are not compared" in second
    [change] = json.loads(result.read_text())["changes"]
    assert "rank 1's forward pass" in change


@pytest.mark.parametrize(
    ("cores", "status"),
    [
        ({"interval_own_cores": 0.97}, 1),
        ({"interval_own_cores": 0.6}, 3),  # others had the cores
        ({"interval_own_cores": 0.6, "core_list": "0"}, 1),  # perhaps on other cores
    ],
)
def test_the_machine_is_judged_as_a_diagnosis_judges_it(
    made, tmp_path: Path, cores: dict, status: int
) -> None:
    before, after = made(), bundle(tmp_path / "b", 1.2, seed=1)
    with_surroundings(after, **cores)
    gate = ddplab("diagnose", "--compare", before, after, "--fail-above", 5)
    assert gate.status == status, gate.stdout
    assert ("without other jobs" in gate.stdout) == (status == 3)


def test_a_pause_now_and_then_is_seen_in_the_mean(made, tmp_path: Path) -> None:
    def pausing(row: dict) -> dict:
        return row | {"between_time_ms": 100.0} if row.get("step", 1) % 5 == 0 else row

    before, after = made(), bundle(tmp_path / "b", change=pausing)
    compared = ddplab("diagnose", "--compare", before, after, "--fail-above", 5)
    assert compared.status == 1
    assert compared.stdout.startswith("Failed at 5 %: The mean step has changed by ")
    assert (
        "of the usual one no difference is settled, within noise" in compared.stdout.splitlines()[0]
    )


def test_four_runs_on_each_side_are_the_rounds(tmp_path: Path) -> None:
    """Runs that differ by more than their steps do settle nothing."""
    for side, speeds in {"a": (1.0, 1.3, 0.9, 1.2), "b": (1.4, 1.0, 1.3, 1.1)}.items():
        (tmp_path / side).mkdir()
        for number, speed in enumerate(speeds):
            bundle(tmp_path / side / f"{number}", speed, seed=number)
    done = ddplab("diagnose", "--compare", tmp_path / "a", tmp_path / "b", "--fail-above", 5)
    assert done.status == 3
    assert "more runs a side would settle 5 %" in done.stdout.splitlines()[0]
    one = ddplab("diagnose", "--compare", tmp_path / "a/0", tmp_path / "b/0", "--fail-above", 5)
    assert one.status == 1


def from_step(first: int, **values: object) -> Row:
    """Returns a change of steps from one on."""
    return lambda row: row | values if row.get("step", -1) >= first else row


LONGER, LONGER_LATER = from_step(0, elements=8 * 512), from_step(15, elements=8 * 512)


def other_model(row: dict) -> dict:
    return row | {"parameters": 7} if row["table"] == "facts" else row


def jumped(row: dict) -> dict:
    return row | {"step_time_ms": -3e6} if row.get("step") == 12 else row


def brief(steps: int) -> Row:
    """Returns a change after which there are so many steps."""
    return lambda row: None if row.get("step", 0) >= steps else row


@pytest.mark.parametrize(
    ("change", "about", "said"),
    [
        (LONGER, {}, "the number of elements in a batch differs (1024 and 4096)"),
        (LONGER_LATER, {}, "its batch changes at step 15, from 2048 to 8192 elements"),
        (dict, {"world_size": 4}, "the job's world_size differs (2 and 4)"),
        (other_model, {}, "parameters differs (1000 and 7)"),
        (from_step(0, samples=4), {}, "batch_per_rank differs (8 and 4)"),
        (from_step(15, samples=16), {}, "its batch changes at step 15, from 16 to 32 samples"),
        (jumped, {}, "its clock has jumped"),
        (brief(20), {}, "steps differs (0 to 29 and 0 to 19)"),
        (dict, {"device_name": "other"}, "device differs"),
    ],
)
def test_other_work_is_refused_in_a_line(
    made, tmp_path: Path, monkeypatch, change: Row, about: dict, said: str
) -> None:
    monkeypatch.setattr(opened, "examine_case", lambda case: None)  # no cause is looked at,
    monkeypatch.setattr(opened, "open_diagnosis", open_once.__wrapped__)  # and none is kept
    after = bundle(tmp_path / "b", change=change, **about)
    result = tmp_path / "out.json"
    words = ("--compare", made(), after, "--fail-above", "5", "--json", result)
    assert said in refused("diagnose", *words)
    assert not result.exists()


def test_what_an_older_watch_has_not_timed_is_left_out(tmp_path: Path) -> None:
    def older(row: dict) -> dict:
        return {name: value for name, value in row.items() if name != "buffers_time_ms"}

    before, after = bundle(tmp_path / "a", change=older), bundle(tmp_path / "b", 1.2)
    done = ddplab("diagnose", "--compare", before, after, "--fail-above", 5)
    assert done.status == 1
    parts = [line.split("  ")[0] for line in done.stdout.splitlines()]
    assert "backward, exchange" in parts
    assert "forward" not in parts


def test_numbers_reach_the_tracker_that_is_installed(made, tmp_path: Path, monkeypatch) -> None:
    (tmp_path / "mlflow.py").write_text(
        "import contextlib, json\n"
        "@contextlib.contextmanager\n"
        "def start_run(run_name):\n"
        "    yield\n"
        "def log_metrics(metrics):\n"
        f"    open({str(tmp_path / 'sent.json')!r}, 'w').write(json.dumps(metrics))\n"
        "def set_tags(tags):\n"
        f"    open({str(tmp_path / 'tags.json')!r}, 'w').write(json.dumps(tags))\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    done = ddplab("diagnose", "--compare", made(), made(1.2, 1), "--track")
    assert done.status == 0, done.stderr
    sent, tags = (json.loads((tmp_path / f"{name}.json").read_text()) for name in ("sent", "tags"))
    assert sent["step"] == pytest.approx(0.2, abs=0.02)
    # A change without verdict "settled" has its ends at most; mlflow takes no commas in names.
    assert tags["step/verdict"] == "settled"
    assert tags["data/verdict"] == "hidden by noise"
    assert "data" not in sent
    assert sent["data/low"] <= 0 <= sent["data/high"]
    assert not any("," in name for name in (*sent, *tags))
    sys.modules.pop("mlflow")  # for tests after this one, of whom none has it


def test_a_tracker_that_fails_leaves_the_gates_status(made, tmp_path: Path, monkeypatch) -> None:
    (tmp_path / "wandb.py").write_text("def init(name):\n    raise RuntimeError('no API key')\n")
    monkeypatch.syspath_prepend(tmp_path)
    words = ("--fail-above", 5, "--track")
    gate = ddplab("diagnose", "--compare", made(), made(1.0, 1), *words)
    sys.modules.pop("wandb")
    assert (gate.status, gate.stderr.strip()) == (0, "--track: not sent to wandb: no API key")
    assert gate.stdout.startswith("Passed at 5 %")


@pytest.mark.slow
def test_the_study_of_the_gate_counts_what_it_says_of_independent_steps(tmp_path: Path) -> None:
    path = bundle(tmp_path / "long", steps=480)
    study = gate_pairs.GateStudy((str(path),), rounds=4)
    run = gate_pairs.run_study(study, str(tmp_path / "studies"), StageProgress())
    pairs = pd.read_csv(run / "pairs.csv").set_index("slower_percent")
    outcomes = ["passed", "failed", "not settled"]
    assert (pairs[outcomes].sum(axis=1) == 4).all()
    # Steps differ by 1 %, and the mean of a side's 30 by a fifth of that.
    assert (pairs.loc[[20], "failed"] == 4).all()
    assert (pairs.loc[[0], "passed"] == 4).all()
    verdicts = pd.read_csv(run / "verdicts.csv")
    assert verdicts["held"].tolist() == [True, True, True]
    study = gate_pairs.GateStudy((str(bundle(tmp_path / "short")),))
    with pytest.raises(UserError, match="30 plain steps; pairs need at least 480"):
        gate_pairs.run_study(study, str(tmp_path / "none"), StageProgress())
    assert not (tmp_path / "none").exists()


def test_flags_may_follow_the_folders() -> None:
    ours, folders = split_script(["--compare", "a", "--json", "x", "b", "--fail-above", "5"])
    assert ours == ["--compare", "--json", "x", "--fail-above", "5"]
    assert folders == ["a", "b"]
