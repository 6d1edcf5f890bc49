"""``ddplab tune`` as a user types it: refusals that need no rank, and the command inside a job."""

from __future__ import annotations

from unittest import mock

import pytest
from command_line import ROOT, refused


def refused_to_tune(*arguments: object) -> str:
    """Returns the one line of a refusal."""
    return refused("tune", *arguments, progress=True)


def test_what_needs_no_rank_is_refused_before_any_is_started(tmp_path):
    with mock.patch("common.tuning.launched.launch", side_effect=AssertionError("started")):
        assert "FUNCTION" in refused_to_tune()
        assert "is not MODULE:FUNCTION" in refused_to_tune("my_model")
        assert "not a file" in refused_to_tune("my_model.py:make")
        assert "--nproc 1" in refused_to_tune("my_model:make", "--nproc", 1)
        assert "--nproc 1" in refused_to_tune("my_model:make", "--nproc", 1, "--fsdp")
        assert "--run-id has no effect" in refused_to_tune("a:b", "--fsdp", "--run-id", "x")
        assert "--share has no effect" in refused_to_tune("a:b", "--fsdp", "--share", 0.1)
        assert "no module 'nowhere'" in refused_to_tune("nowhere:make", "--fsdp", "--device", "cpu")
        assert "a: no or yes" in refused_to_tune("a:b", "--fsdp", "--changes-training", "a")
        assert "with --fsdp only" in refused_to_tune("a:b", "--changes-training", "yes")
        assert "share is 0" in refused_to_tune("my_model:make", "--share", 0)
        assert "no module 'nowhere_to_be_found'" in refused_to_tune("nowhere_to_be_found:make")
        assert "no module 'nowhere_to_be_found'" in refused_to_tune(
            "nowhere_to_be_found:make", "--output-dir", ""
        )
        blocked = tmp_path / "file"
        blocked.touch()
        assert "output folder" in refused_to_tune("json:dumps", "--output_dir", blocked / "below")


@pytest.mark.two_ranks
def test_inside_a_job_its_ranks_are_used_and_one_of_them_refuses(rank_server, tmp_path):
    done = rank_server.run(
        ROOT / "common" / "cli" / "main.py",
        *("tune", "nowhere_to_be_found:make", "--device", "cpu", "--output_dir", tmp_path / "out"),
        ranks=2,
    )
    assert done.exit_codes == [2, 2]
    assert "no module 'nowhere_to_be_found'" in done.error_line
    assert not (tmp_path / "out").exists()
