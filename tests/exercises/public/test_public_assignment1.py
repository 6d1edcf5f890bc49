"""Assignment 1: two ranks train as one process does, and checkpoints are found again."""

from __future__ import annotations

from pathlib import Path

import pytest

from common.exercises import checkpoint_commit as commit

WORKER = Path(__file__).with_name("ranks_worker.py")


@pytest.mark.two_ranks
@pytest.mark.parametrize("check", ["A1.1", "A1.2 naive", "A1.2 flat", "A1.3", "A1.4", "A1.5"])
def test_on_two_ranks(rank_server, check: str) -> None:
    done = rank_server.run(WORKER, check, ranks=2)
    assert done.exit_codes == [0, 0], "\n".join(done.stderr)


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
