"""Runs of the original and of ours are read; what is wrong with them is one line each."""

import math
from pathlib import Path

import pandas as pd
import pytest
from text_run_support import TEXTS, write_original, write_text_run

from common.analysis.scaling.study_files import read_published, read_runs
from common.analysis.scaling.training_run import separate_jobs
from common.errors import UserError

ORIGINAL = Path(__file__).resolve().parents[3] / "shared" / "measured" / "text-scaling"
needs_original = pytest.mark.skipif(not ORIGINAL.is_dir(), reason="no ../shared/measured here")


def problems(root: Path) -> list[str]:
    return [str(problem) for problem in read_runs(root).problems]


@pytest.mark.parametrize(
    ("name", "size", "dataset"),
    [
        ("exp1_imdb_single_gpu_20ep", 1, "IMDB"),
        ("exp2_agnews_ddp_4gpu", 4, "AGNews"),
        ("a_imdb_1gpu_x", 1, "IMDB"),
        ("imdb_ddp_single_node_20ep", 4, "IMDB"),
        ("IMDB_ddp_8_gpus", 8, "IMDB"),
    ],
)
def test_world_size_and_data_come_from_the_name_and_are_marked_so(
    tmp_path: Path, name: str, size: int, dataset: str
) -> None:
    write_original(tmp_path / name, [2.0] * 20)
    [run] = read_runs(tmp_path).runs
    assert (run.identity.world_size, run.dataset) == (size, dataset)
    assert "world_size" in run.assumed
    # Nobody wrote down how many samples there were, nor in which precision.
    assert (run.identity.distinct_per_epoch, run.identity.precision) == (None, None)


@pytest.mark.parametrize(
    ("name", "missing"), [("exp9_imdb", "number of GPUs"), ("exp9_4gpu", "data set")]
)
def test_a_name_that_does_not_tell_is_one_line(tmp_path: Path, name: str, missing: str) -> None:
    write_original(tmp_path / name, [2.0, 2.0])
    write_original(tmp_path / "imdb_1gpu", [2.0, 2.0])
    read = read_runs(tmp_path)
    assert [run.name for run in read.runs] == ["imdb_1gpu"]
    [problem] = read.problems
    assert missing in problem.what
    assert problem.path.endswith(name)


def test_jobs_that_wrote_into_one_file_are_told_apart() -> None:
    # Two jobs write in turns; one had begun five epochs before the file was opened anew.
    late, early = range(6, 21), range(1, 21)
    written = [epoch for pair in zip(late, early, strict=False) for epoch in pair]
    written += list(early)[len(late) :]
    jobs = [[written[row] for row in job] for job in separate_jobs(written)]
    assert jobs == [list(early), list(late)]
    # One appended to another.
    assert separate_jobs([1, 2, 3, 1, 2, 3]) == [[0, 1, 2], [3, 4, 5]]


def test_missing_epochs_alone_do_not_make_a_second_job(tmp_path: Path) -> None:
    write_original(tmp_path / "imdb_1gpu", [2.0] * 4, epochs=[1, 2, 5, 6])
    read = read_runs(tmp_path)
    assert len(read.runs) == 1
    assert ["missing: 3, 4" in str(problem) for problem in read.problems] == [True]


def test_interleaved_jobs_are_named_and_warm_up_is_left_out_by_epoch_number(
    tmp_path: Path,
) -> None:
    epochs, times = [3, 1, 4, 2, 3, 4], [9.0, 5.0, 8.0, 1.0, 1.0, 1.0]
    write_original(tmp_path / "imdb_4gpu", times, epochs=epochs)
    read = read_runs(tmp_path)
    assert [run.name for run in read.runs] == ["imdb_4gpu#1", "imdb_4gpu#2"]
    # Times stay with the job that wrote them.
    assert [run.epochs["train_time_s"].to_list() for run in read.runs] == [[5, 1, 1, 1], [9, 8]]
    first, second = read.runs
    assert first.epoch_times_s(1).tolist() == [1.0, 1.0, 1.0]
    assert second.epoch_times_s(1).tolist() == [9.0, 8.0]  # its warm-up is lost anyway
    text = "; ".join(map(str, read.problems))
    assert "2 jobs wrote into one metrics.csv" in text
    assert "epochs 1 to 2 are lost" in text


def test_nan_losses_are_named_and_the_times_kept(tmp_path: Path) -> None:
    losses = [0.6, math.nan, math.nan]
    write_original(tmp_path / "imdb_1gpu", [3.0, 2.0, 2.0], losses=losses)
    read = read_runs(tmp_path)
    assert read.runs[0].epoch_times_s(1).tolist() == [2.0, 2.0]
    assert "train_loss is not a number from epoch 2 on" in str(read.problems[0])


def test_a_run_shorter_than_its_name_says_is_called_cut_off(tmp_path: Path) -> None:
    write_original(tmp_path / "exp1_imdb_1gpu_20ep", [2.0] * 7)
    assert "says 20 epochs, the last one there is 7" in problems(tmp_path)[0]


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        ("epoch,loss\n1,2\n", "no column 'train_loss'"),
        ("", "empty, without even a header"),
        ("epoch,train_loss,train_time,val_loss,val_acc\n", "no rows"),
        ("epoch,train_loss,train_time,val_loss,val_acc\n1,1,soon,1,1\n", "'soon' is not a number"),
        ("epoch,train_loss,train_time,val_loss,val_acc\n1,1,-4,1,1\n", "above 0"),
        ("epoch,train_loss,train_time,val_loss,val_acc\n1,1,,1,1\n", "blank is not a number"),
    ],
)
def test_a_broken_table_is_one_line_and_the_rest_is_read(
    tmp_path: Path, content: str, expected: str
) -> None:
    write_original(tmp_path / "imdb_1gpu", [2.0, 2.0])
    broken = tmp_path / "imdb_4gpu"
    broken.mkdir()
    (broken / "metrics.csv").write_text(content)
    read = read_runs(tmp_path)
    assert [run.name for run in read.runs] == ["imdb_1gpu"]
    [problem] = map(str, read.problems)
    assert expected in problem
    assert problem.count("imdb_4gpu") == 1
    assert "\n" not in problem


def test_a_root_without_runs(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no runs"):
        read_runs(tmp_path)
    with pytest.raises(UserError, match="no such folder"):
        read_runs(tmp_path / "nowhere")


def test_our_run_is_known_from_what_it_counted(tmp_path: Path) -> None:
    write_text_run(tmp_path / "two", 2, (7.0, 6.0, 6.5))
    read = read_runs(tmp_path)
    assert read.problems == []
    [run] = read.runs
    assert run.identity.world_size == 2
    assert run.identity.global_batch == 32
    assert run.identity.batch_per_rank == 16
    assert run.identity.distinct_per_epoch == run.identity.processed_per_epoch == TEXTS
    assert run.assumed == frozenset()
    # An epoch takes as long as its slowest rank.
    assert run.epochs["train_time_s"].tolist() == [7.0, 6.0, 6.5]


def test_a_run_that_broke_off_is_named_and_left_out(tmp_path: Path) -> None:
    write_text_run(tmp_path / "good")
    failed = write_text_run(
        tmp_path / "bad", environment={"status": "failed", "reason": "killed by the user"}
    )
    for path in failed.glob("*.csv"):  # as a run in progress has them
        path.rename(path.with_name(f"{path.name}.partial"))
    read = read_runs(tmp_path)
    assert [run.name for run in read.runs] == ["good"]
    [problem] = map(str, read.problems)
    assert "not complete (failed: killed by the user)" in problem


def test_fewer_epochs_than_asked_for_are_noted(tmp_path: Path) -> None:
    write_text_run(tmp_path / "short", settings={"epochs": 9})
    assert "config.yaml says 9 epochs, the last one there is 3" in problems(tmp_path)[0]


def test_rows_of_a_missing_rank_are_refused(tmp_path: Path) -> None:
    folder = write_text_run(tmp_path / "two", 2)
    table = pd.read_csv(folder / "epochs.csv")
    table[table["rank"] == 0].to_csv(folder / "epochs.csv", index=False)
    assert "rows of 1 of 2 ranks" in problems(tmp_path)[0]


def test_other_programs_runs_are_passed_over(tmp_path: Path) -> None:
    write_text_run(tmp_path / "text")
    other = tmp_path / "sweep"
    other.mkdir()
    (other / "environment.json").write_text('{"label": "assignment4-sweep", "status": "complete"}')
    (other / "steps.csv").write_text("rank\n0\n")
    read = read_runs(tmp_path)
    assert [run.name for run in read.runs] == ["text"]
    assert read.problems == []


@needs_original
def test_the_projects_own_tables_hold_the_published_epochs() -> None:
    original = {run.name: run for run in read_runs(ORIGINAL).runs}
    own = {run.name: run for run in read_published()}
    assert own.keys() == original.keys()
    for name, run in own.items():
        times = original[name].epochs["train_time_s"]
        assert run.epochs["train_time_s"].tolist() == pytest.approx(times.tolist(), abs=1e-4)
        assert run.stated == original[name].stated


@needs_original
def test_experiment_042_is_two_jobs() -> None:
    read = read_runs(ORIGINAL)
    spans = [
        (run.name, int(run.epochs["epoch"].min()), len(run.epochs))
        for run in read.runs
        if "042" in run.name
    ]
    name = "exp042_agnews_ddp_4gpu_20ep"
    assert spans == [(f"{name}#1", 1, 20), (f"{name}#2", 6, 15)]
    assert any("2 jobs wrote into one" in str(problem) for problem in read.problems)


def test_what_is_known_of_the_published_runs_is_not_said_of_others(tmp_path: Path) -> None:
    # Somebody's own experiment of the same name has other times.
    write_original(tmp_path / "exp042_agnews_ddp_4gpu_20ep", [2.0] * 35)
    [run] = read_runs(tmp_path).runs
    assert run.stated is None
