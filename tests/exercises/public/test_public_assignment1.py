"""Assignment 1, in one process: checkpoints are found again. ``test_public_ranks.py`` has more."""

from __future__ import annotations

from pathlib import Path

import pytest

from common.exercises import checkpoint_commit as commit


def test_a1_6_what_was_committed_is_found(tmp_path: Path) -> None:
    paths = []
    for step in (1, 2):
        partial = commit.start_checkpoint(tmp_path, step)
        (partial / "weights.bin").write_bytes(b"abc" * step)
        files = {"weights.bin": commit.describe_file(partial / "weights.bin")}
        paths.append(commit.commit_checkpoint(partial, {"step": step}, files))
    assert commit.newest_whole(tmp_path) == paths[1]
    assert commit.check_checkpoint(paths[1]) == {"step": 2}
    (paths[1] / "weights.bin").write_bytes(b"ab")
    assert commit.newest_whole(tmp_path) == paths[0]


def test_a1_6_what_was_removed_is_gone_and_a_changed_byte_is_found(tmp_path: Path) -> None:
    partial = commit.start_checkpoint(tmp_path, 3)
    (partial / "weights.bin").write_bytes(b"abc")
    record = commit.describe_file(partial / "weights.bin")
    path = commit.commit_checkpoint(partial, {"step": 3}, {"weights.bin": record})
    facts, files = commit.read_manifest(path)
    assert (facts, files) == ({"step": 3}, {"weights.bin": record})
    (path / "weights.bin").write_bytes(b"abd")
    with pytest.raises(commit.Damaged, match=r"weights\.bin"):
        commit.check_file(path / "weights.bin", record)
    assert commit.newest_whole(tmp_path) is None
    commit.remove_checkpoint(path)
    assert not list(tmp_path.iterdir()), "what remains of a checkpoint that was removed"
