"""The study of survival at its smallest: one rank killed for real, and verdicts that can fail."""

from __future__ import annotations

import json
from contextlib import nullcontext
from pathlib import Path

import pandas as pd
import pytest

from common.errors import RunFailed, UserError
from common.exercises.checkpoint_commit import (
    Damaged,
    commit_checkpoint,
    describe_file,
    read_manifest,
    start_checkpoint,
)
from common.runtime.records.run_directory import read_environment
from common.runtime.stage_progress import StageProgress
from common.studies import damaged_checkpoints, survival
from common.studies.damaged_checkpoints import (
    CASES,
    DIGIT,
    FILES,
    FLIPPED,
    MISSING,
    TRUNCATED,
    damage,
)
from common.studies.killed_runs import Training, equal_losses, read_steps, unreadable
from common.studies.survival import SurvivalStudy

TRIAL = {
    **{"trial": 0, "killed_rank": 1, "unreadable_checkpoints": 0, "newest_checkpoint": 6},
    **{"resumed_from_step": 6, "losses_equal": True, "processes_left": 0, "unfinished_at_end": 0},
}
RESTART = {"kills": 2, "restarts": 2, "exit_status": 0, "losses_equal": True, "processes_left": 0}


@pytest.mark.slow
@pytest.mark.two_ranks
@pytest.mark.timeout(300)
def test_a_killed_run_goes_on_with_the_losses_of_one_that_was_not(
    tmp_path, rank_server, monkeypatch
):
    # torchrun starts the run that is killed. The two others, which take as long to start each,
    # are the same script with the same flags on ranks that start at once.
    def run_to_the_end(training: Training) -> None:
        command = training.command()
        script = next(index for index, word in enumerate(command) if word.endswith(".py"))
        done = rank_server.run(Path(command[script]), *command[script + 1 :], ranks=2)
        assert done.exit_codes == [0, 0], "\n".join(done.stderr)

    monkeypatch.setattr(survival, "run_to_the_end", run_to_the_end)
    study = SurvivalStudy(
        trials=1, restarts=0, damage=False, strategies=("DDP",), num_steps=18, seed=1
    )
    path = survival.run_study(study, str(tmp_path), StageProgress())
    [trial] = pd.read_csv(path / "trials.csv").to_dict("records")
    assert trial["killed_rank"] in (0, 1)
    assert trial["exit_status"] == 1
    assert 0 < trial["killed_after_step"] < 18
    assert trial["resumed_from_step"] == trial["newest_checkpoint"] <= trial["killed_after_step"]
    assert trial["losses_equal"]
    verdicts = pd.read_csv(path / "verdicts.csv")
    assert len(verdicts) == 6
    assert verdicts["held"].all()
    assert read_environment(path)["status"] == "complete"


def test_a_training_that_hangs_is_a_failed_trial_and_each_trial_is_written(tmp_path, monkeypatch):
    ends = iter([RunFailed("it does not end"), KeyboardInterrupt()])

    class Hanging:
        def wait(self) -> int:
            raise next(ends)

    monkeypatch.setattr(survival, "run_to_the_end", lambda training: None)
    monkeypatch.setattr(survival, "launched", lambda training: nullcontext(Hanging()))
    monkeypatch.setattr(survival, "kill_at", lambda *arguments: 1)
    study = SurvivalStudy(trials=2, restarts=0, damage=False)
    with pytest.raises(KeyboardInterrupt):
        survival.run_study(study, str(tmp_path), StageProgress())
    [trials] = tmp_path.glob("*/trials.csv")
    [trial] = pd.read_csv(trials).to_dict("records")
    assert (trial["failed"], trial["killed_rank"]) == ("it does not end", 1)
    verdicts = survival.judge(pd.DataFrame([trial]), None, None)
    assert verdicts["found"].tolist() == [1, 0, 0, 0, 0, 0]  # but for the kill nothing held
    assert verdicts["of"].tolist() == [1] * 6


def test_cases_that_ranks_did_not_finish_before_they_died_are_failed(tmp_path, monkeypatch):
    def launch(script: Path, arguments: list[str], ranks: int, log: Path) -> None:
        log.write_text("case: case-00\ncase: case-01\n")
        for case, status in (("case-00", "complete"), ("case-01", "failed")):
            run = log.parent / "runs" / case
            run.mkdir(parents=True)
            (run / "environment.json").write_text(json.dumps({"status": status}))
            (run / "config.yaml").write_text("resumed_from_step: 1\n")
        raise RunFailed("rank 1 died")

    reference = Training("DDP", {}, tmp_path)
    for step in (1, 2):
        partial = start_checkpoint(reference.checkpoint_dir, step)
        for name in FILES[:-1]:
            (partial / name).write_bytes(bytes(range(99)))
        files = {name: describe_file(partial / name) for name in FILES[:-1]}
        commit_checkpoint(partial, {"step": step}, files)
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "config.yaml").write_text("{}")
    STEPS.to_csv(tmp_path / "run" / "training-steps.csv", index=False)
    monkeypatch.setattr(damaged_checkpoints, "launch", launch)
    table = damaged_checkpoints.resume_from_damaged(reference, tmp_path / "damaged")
    assert table["failed"].tolist() == ["", *["rank 1 died"] * (len(CASES) - 1)]
    verdicts = survival.judge(None, table, None)
    assert verdicts["found"].tolist() == [0, 2, 0]
    assert set(verdicts["of"]) == {len(CASES)}


@pytest.mark.parametrize(
    ("changed", "promise"),
    [
        ({"killed_rank": None}, "a rank was killed"),
        ({"processes_left": 1}, "no process was left"),
        ({"unreadable_checkpoints": 1}, "every checkpoint left was readable"),
        ({"resumed_from_step": 3}, "the newest checkpoint"),
        ({"losses_equal": False}, "losses equal"),
        ({"unfinished_at_end": 1}, "nothing unfinished"),
    ],
)
def test_one_bad_trial_breaks_its_promise_and_no_other(changed, promise):
    trials = pd.DataFrame([TRIAL, TRIAL | changed])
    verdicts = survival.judge(trials, None, pd.DataFrame())
    assert verdicts["of"].tolist() == [2] * 6
    [broken] = verdicts[~verdicts["held"]].to_dict("records")
    assert broken["promise"].startswith(promise)
    assert broken["found"] == 1


@pytest.mark.parametrize(
    "changed", [{"exit_status": 1}, {"restarts": 1}, {"kills": 1, "restarts": 1}]
)
def test_a_launch_that_does_not_end_by_itself_breaks_its_promise(changed):
    verdicts = survival.judge(None, None, pd.DataFrame([RESTART, RESTART | changed]))
    assert verdicts["held"].tolist() == [False, True, True]


STEPS = pd.DataFrame(
    [(step, rank, 1 / (step + 3), 0.1) for step in range(3) for rank in range(2)],
    columns=["step", "rank", "loss", "gradient_norm"],
)


def test_losses_are_equal_if_every_row_of_every_attempt_is():
    twice = pd.concat([STEPS[:4], STEPS[2:]])
    assert equal_losses(twice, STEPS)
    assert equal_losses(STEPS[2:], STEPS, first=1)
    assert not equal_losses(STEPS[:-1], STEPS)  # a rank's last step is missing
    off = STEPS.copy()
    off.loc[5, "loss"] += 2**-54  # the last bit
    assert not equal_losses(off, STEPS)
    assert not equal_losses(pd.concat([STEPS, off[5:]]), STEPS)  # also of a step computed twice


def test_a_row_that_was_cut_off_in_mid_write_is_left_out(tmp_path):
    text = "step,rank,loss,gradient_norm,x\n0,0,0.1,0.30000000000000004,\n0,1,0.1,0.3,\n1,0,0."
    (tmp_path / "training-steps.csv.partial").write_text(text)
    rows = read_steps(tmp_path)
    assert rows["rank"].tolist() == [0, 1]
    assert rows["gradient_norm"].tolist() == [0.30000000000000004, 0.3]
    assert read_steps(tmp_path / "nothing").empty


@pytest.mark.parametrize("way", [TRUNCATED, FLIPPED, MISSING, DIGIT])
def test_each_kind_of_damage_makes_a_checkpoint_unreadable(tmp_path, way):
    partial = start_checkpoint(tmp_path, 3)
    (partial / "random-0.pt").write_bytes(bytes(range(99)))
    files = {"random-0.pt": describe_file(partial / "random-0.pt")}
    path = commit_checkpoint(partial, {"step": 3}, files)
    assert unreadable(tmp_path) == []
    if way == DIGIT:
        damage(path / "manifest.json", way)
        with pytest.raises(Damaged, match="changed"):
            read_manifest(path)
    else:
        damage(path / "random-0.pt", way)
    assert len(unreadable(tmp_path)) == 1


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"num_steps": 17}, "at least 6 × save_every, 18"),
        ({"trials": -1}, "trials is -1"),
        ({"save_every": 0}, "save_every is 0"),
        ({"strategies": ("FULLSHARD",)}, "did you mean 'FULL_SHARD'"),
        ({"strategies": ()}, "strategies is empty; give one or more of DDP"),
    ],
)
def test_bad_settings_get_one_line(settings, message):
    with pytest.raises(UserError, match=message):
        SurvivalStudy(**settings)
