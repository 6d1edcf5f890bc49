"""The self-test: what passes, what fails with a remedy, and that it always ends in a table."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from common.benchmarks.selftest import CHECKS, Result, print_results, read_results
from common.runtime.paths import project_root

SCRIPT = project_root() / "common" / "benchmarks" / "selftest.py"


@pytest.mark.two_ranks
def test_a_folder_that_cannot_be_written_fails_with_its_remedy_and_the_rest_is_tried(
    rank_server, tmp_path: Path
) -> None:
    (tmp_path / "file").write_text("")
    results = tmp_path / "results"
    flags = ("--output_dir", tmp_path / "file", "--device", "cpu", "--results", results)
    done = rank_server.run(SCRIPT, *flags, ranks=2)
    assert done.exit_codes == [1, 1], "\n".join(done.stderr)
    found = {result.name: result for result in read_results(results)}
    assert list(found) == [check.name for check in CHECKS]  # none ended the others
    passed = {name for name, result in found.items() if result.outcome == "passed"}
    assert {"torch and driver", "placement", "all-reduce over all ranks"} <= passed
    failed = found["output folder"]
    assert failed.outcome == "failed"
    assert "OUTPUT_DIR" in failed.remedy
    # What writes fails on all ranks at once, and none is left waiting for another.
    for name in ("ddp_benchmark", "train_baseline", "train_ddp", "train_fsdp"):
        assert found[name].outcome == "failed"
    assert "output folder" in done.stdout[0]
    assert done.stdout[1] == ""  # rank 0 speaks


def test_messages_with_brackets_do_not_break_the_table(capsys: pytest.CaptureFixture) -> None:
    # as gloo words them; rich would take them for markup
    said = "[/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:547] Connection closed [rank0]"
    print_results([Result("all-reduce", "failed", said, "look [here]")])
    shown = "".join(capsys.readouterr().out.split())
    assert "pair.cc:547]Connection" in shown.replace("│", "").replace("all-reducefailed", "")


def test_the_last_word_on_a_check_counts(tmp_path: Path) -> None:
    path = tmp_path / "results"
    words = [("a", "failed", "ended the process"), ("a", "passed", "1 s"), ("b", "failed", "x")]
    path.write_text(
        "".join(
            json.dumps({"name": n, "outcome": o, "detail": d, "remedy": ""}) + "\n"
            for n, o, d in words
        )
    )
    found = [(result.name, result.outcome) for result in read_results(path)]
    assert found == [("a", "passed"), ("b", "failed")]
    assert read_results(tmp_path / "nothing") == []
