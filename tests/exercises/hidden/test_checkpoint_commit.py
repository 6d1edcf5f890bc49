"""A1.6: power cuts between any two file operations, and every kind of damage."""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import commit_worker
import pytest

from common.exercises import checkpoint_commit as commit

WORKER = Path(commit_worker.__file__)
EXERCISE = Path(commit.__file__)
CONTENTS = {1: [b"one" * 50], 2: [b"two" * 50], 3: [b"three" * 50, b"three again" * 50]}
MOST_OPERATIONS = 200


def check_power_cuts(exercise: Path, folder: Path) -> None:
    """Check that whatever is found after a cut is whole, and never older than what was there."""
    solution = commit_worker.exercise(str(exercise))
    newest_before = 1
    for dies_at in range(1, MOST_OPERATIONS):
        shutil.rmtree(folder, ignore_errors=True)
        commit_worker.write(commit, folder, 1, *CONTENTS[1])
        command = [sys.executable, str(WORKER), str(exercise), str(folder), str(dies_at)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=60)
        assert done.returncode in (0, 9), done.stderr
        found = solution.newest_whole(folder)
        assert found is not None, f"nothing is left after operation {dies_at}"
        step = int(found.name.rpartition("-")[2])
        assert step >= newest_before, f"step {step} after operation {dies_at}"
        assert (found / "weights.bin").read_bytes() in CONTENTS[step]
        for finished in commit.finished_checkpoints(folder):  # none looks whole and is not
            assert commit.check_checkpoint(finished)["step"] > 0
        if step == 2:  # from here on only step 3 is newer; replacing it may take it away again
            newest_before = 2
        if done.stdout == "done\n":
            assert step == 3
            assert [path.name for path in folder.iterdir()] == ["step-00000001", "step-00000003"]
            return
    raise AssertionError("it goes on and on")


def test_a_power_cut_leaves_the_newest_whole_checkpoint(tmp_path: Path) -> None:
    check_power_cuts(EXERCISE, tmp_path / "checkpoints")


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def add(path: Path) -> None:
    path.write_bytes(path.read_bytes() + b"x")


def truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


def swap(path: Path) -> None:
    path.unlink()
    path.mkdir()


@pytest.mark.parametrize("name", ["weights.bin", "manifest.json"])
@pytest.mark.parametrize("harm", [flip, add, truncate, swap, Path.unlink])
def test_damage_is_found_and_the_one_before_is_taken(
    tmp_path: Path, name: str, harm: Callable[[Path], None]
) -> None:
    older, newer = (commit_worker.write(commit, tmp_path, step, b"abc" * 99) for step in (4, 12))
    assert commit.newest_whole(tmp_path) == newer
    harm(newer / name)
    with pytest.raises(commit.Damaged, match=name):
        commit.check_checkpoint(newer)
    assert commit.newest_whole(tmp_path) == older
    harm(older / name)
    assert commit.newest_whole(tmp_path) is None


def test_damage_is_found_in_files_of_the_same_size(tmp_path: Path) -> None:
    older, newer = (commit_worker.write(commit, tmp_path, step, b"abc" * 99) for step in (4, 12))
    flip(newer / "weights.bin")
    assert commit.newest_whole(tmp_path) == older


def test_a_digit_of_the_manifest_is_not_taken_for_another(tmp_path: Path) -> None:
    path = commit_worker.write(commit, tmp_path, 7, b"abc") / "manifest.json"
    path.write_text(path.read_text().replace("7", "8"))
    with pytest.raises(commit.Damaged):
        commit.read_manifest(path.parent)


def test_ranks_read_their_part_of_the_files(tmp_path: Path) -> None:
    partial = commit.start_checkpoint(tmp_path, 5)
    names = [f"part-{number}" for number in range(5)]
    for name in names:
        (partial / name).write_bytes(name.encode())
    files = {name: commit.describe_file(partial / name) for name in names}
    path = commit.commit_checkpoint(partial, {"step": 5}, files)
    (path / "part-3").write_bytes(b"other!")
    found = []
    for rank in range(3):
        try:
            commit.check_checkpoint(path, rank, 3)
        except commit.Damaged:
            found.append(rank)
    assert len(found) == 1
    assert commit.newest_whole(tmp_path) is None


def test_nothing_is_found_where_nothing_is(tmp_path: Path) -> None:
    assert commit.newest_whole(tmp_path) is None
    assert commit.newest_whole(tmp_path / "missing") is None
    (tmp_path / "step-abc").mkdir()
    commit.start_checkpoint(tmp_path, 3)
    assert commit.newest_whole(tmp_path) is None
