"""``ddplab predict --cluster`` as a user types it: what it prints, how fast, what it refuses."""

from __future__ import annotations

import resource
import shlex
import subprocess
import sys
from pathlib import Path

import pandas as pd
import pytest
from command_line import ROOT, answered, refused

HANDOUT = "ddplab predict --model gpt2-large --cluster h100-ib --gpus 8..16384"
QUESTION = ("--model", "gpt2", "--cluster", "h100-ib", "--gpus", "8,64")


def predict(*arguments: object) -> str:
    """Returns what ``ddplab predict`` prints."""
    return answered("predict", *arguments)


def test_the_command_of_the_handout_answers_within_seconds() -> None:
    tool, *flags = shlex.split(HANDOUT)
    command = [Path(sys.executable).with_name(tool), *flags]
    began = resource.getrusage(resource.RUSAGE_CHILDREN)
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60)
    ended = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert done.returncode == 0, done.stderr
    for word in ("DDP at b*, weak", "DDP at b*, strong", "FSDP, weak", "FSDP, strong", "16,384"):
        assert word in done.stdout
    for word in ("predicted, not measured", "assumed: passes", "no congestion", "straggler"):
        assert word in done.stdout
    # Of the processor, so that whatever else runs on it adds nothing: 2 s, and twice that where
    # Python has to compile.
    assert ended.ru_utime + ended.ru_stime - began.ru_utime - began.ru_stime < 5


def test_assumptions_are_adjustable_and_shown() -> None:
    said = predict(
        *(*QUESTION, "--mfu", 0.5, "--overlap-slowdown", 1.1, 1.05, 1.3, "--draws", 20),
        *("--straggler-distribution", "exponential", "--global-batch-size", 32),
    )
    for word in ("50% of", "1.1 (1.05 to 1.3)", "20 draws", "exponential", "32 sequences"):
        assert word in said
    assert "strong scaling stops before 64 GPUs" in said


def test_every_column_can_be_written_to_a_file(tmp_path: Path) -> None:
    predict(*QUESTION, "--csv", tmp_path / "found.csv")
    table = pd.read_csv(tmp_path / "found.csv")
    assert set(table["strategy"]) == {"DDP", "SHARD_GRAD_OP", "FULL_SHARD"}
    assert set(table["gpus"]) == {8, 64}
    assert "bucket_cap_mib" in table


def test_measured_all_reduces_are_certain_on_their_own_number_of_gpus(tmp_path: Path) -> None:
    table = tmp_path / "allreduce.csv"
    rows = "".join(f"8,{size},{1e-4 + size / 1e11}\n" for size in (2**10, 2**20, 2**30))
    table.write_text(f"world_size,total_bytes,average_time\n{rows}")
    flags = (*QUESTION, "--allreduce", table, "--draws", 20)
    assert "1 (0.5 to 1.1) times the speed of what was measured, and at just that speed on 8" in (
        predict(*flags)
    )
    answer = predict(*flags, "--network-speed", 0.8)
    assert "0.8 times the speed of what was measured; no congestion" in answer


def test_a_cluster_of_ones_own_is_read_from_a_file(tmp_path: Path) -> None:
    text = (ROOT / "data" / "clusters" / "h100-ib.yaml").read_text()
    own = tmp_path / "mine.yaml"
    own.write_text(text)
    assert "predicted, not measured" in predict(*QUESTION[:2], "--cluster", own, "--gpus", "16")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--model", "gpt2", "--cluster", "h100-ib", "--gpus", "0"), ["at least 1"]),
        (("--model", "gpt2", "--cluster", "h100-ib", "--gpus", "12"), ["12 GPUs", "multiples"]),
        (("--model", "gpt2", "--cluster", "h100-ib", "--gpus", "many"), ["many", "8..16384"]),
        (("--model", "gpt9", "--cluster", "h100-ib", "--gpus", "8"), ["gpt9", "gpt2-large"]),
        (("--model", "gpt2", "--cluster", "h100-id", "--gpus", "8"), ["h100-id", "h100-ib"]),
        (("--model", "gpt2", "--cluster", "h100-ib"), ["--gpus"]),
        (("--cluster", "h100-ib", "--gpus", "8"), ["--model"]),
        (("--gpus", "8"), ["--gpus", "--cluster"]),
        ((*QUESTION, "--mfu", "1.4"), ["--mfu", "0.001 to 1"]),
        ((*QUESTION, "--mfu", "0.4", "0.5"), ["--mfu", "three"]),
        ((*QUESTION, "--mfu", "0.4", "--pass-rate", "1"), ["--pass-rate", "--mfu"]),
        ((*QUESTION, "--mfu", "0.4", "--compile"), ["--compile", "--mfu"]),
        ((*QUESTION, "--overlap-slowdown", "0.9"), ["--overlap-slowdown"]),
        ((*QUESTION, "--straggler-distribution", "cauchy"), ["cauchy", "lognormal"]),
        ((*QUESTION, "--draws", "1"), ["1 draws"]),
        ((*QUESTION, "--batch-size", "0"), ["batch_size"]),
        ((*QUESTION, "--seq-len", "4096"), ["4096", "1024 learned positions"]),
        ((*QUESTION, "--precision", "int8"), ["int8", "bfloat16"]),
        ((*QUESTION, "--global-batch-size", "0"), ["global batch"]),
        ((*QUESTION, "--csv", "/nowhere/at/all.csv"), ["--csv", "no folder /nowhere/at"]),
        ((*QUESTION, "--csv", "."), ["--csv .", "name of a file"]),
        ((*QUESTION, "--csv", ""), ["--csv ''", "name of a file"]),
        ((*QUESTION, "--tf32"), ["tf32", "bfloat16"]),
        ((*QUESTION, "--run-dir", "data"), ["--run-dir", "--cluster"]),
        ((*QUESTION, "--allreduce", "nowhere.txt"), ["nowhere.txt"]),
        ((*QUESTION, "--allreduce", "a", "--from-traces", "b"), ["give one"]),
    ],
)
def test_mistakes_get_one_line(arguments: tuple[str, ...], words: list[str]) -> None:
    line = refused("predict", *arguments)
    assert [word for word in words if word not in line] == []


def test_a_cluster_file_with_impossible_values_is_refused(tmp_path: Path) -> None:
    text = (ROOT / "data" / "clusters" / "h100-ib.yaml").read_text()
    own = tmp_path / "mine.yaml"
    own.write_text(text.replace("gpus_per_node: 8", "gpus_per_node: 0"))
    line = refused("predict", *QUESTION[:2], "--cluster", own, "--gpus", "8")
    assert "gpus_per_node" in line
    assert "mine.yaml" in line
