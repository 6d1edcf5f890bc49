"""Training that is refused, told to stop, or runs out of disk: exit status, one line, what is left.

Scripts run as processes of their own, on one rank or two.
"""

from __future__ import annotations

import functools
import json
import shutil
import signal
import subprocess
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from common.data.token_shards import write_shard
from common.runtime.records.run_directory import read_environment

SCRIPTS = Path(__file__).resolve().parents[2] / "assignments" / "assignment1"
STOPPED = Path(__file__).with_name("stopped_worker.py")
REFUSED = Path(__file__).with_name("refused_worker.py")
STEPS, STOPPED_AT = 6, 4
slow = functools.partial(pytest.param, marks=pytest.mark.slow)
FLAGS = (
    *("--model", "gpt2-pico", "--seq_len", 16, "--num_steps", STEPS, "--lr", 0.003),
    *("--global_batch_size", 8, "--micro_batch_size", 2, "--device", "cpu", "--no-profile"),
    *("--run_id", "run"),
)


@pytest.fixture(scope="module")
def run(rank_server, tokens):
    """Returns ``run(script, folder, *flags, ranks=1)``: trains with runs in folder; flags win."""

    def run(script: Path | str, folder: Path, *flags: object, ranks: int = 1, **variables: str):
        path = SCRIPTS / f"{script}.py" if isinstance(script, str) else script
        words = (*FLAGS, "--data", tokens, "--output_dir", folder, *flags)
        return rank_server.run(path, *words, ranks=ranks, variables=variables or None)

    return run


@pytest.fixture(scope="module")
def undisturbed(run, tmp_path_factory):
    """Returns ``undisturbed(ranks)``: the steps of a run on so many ranks, no checkpoint."""

    @functools.cache
    def undisturbed(ranks: int) -> pd.DataFrame:
        folder = tmp_path_factory.mktemp("undisturbed")
        done = run(STOPPED, folder, ranks=ranks)
        assert done.exit_codes == [0] * ranks, "\n".join(done.stderr)
        return steps(folder / "run" / "training-steps.csv")

    return undisturbed


def steps(*tables: Path) -> pd.DataFrame:
    """Reads tables of one training, by step and rank, to the last bit."""
    together = pd.concat([pd.read_csv(table, dtype=str) for table in tables])
    exact = together[["step", "rank", "loss", "gradient_norm"]].astype(float)
    return exact.sort_values(["step", "rank"], ignore_index=True)


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir() if path.is_dir())


@pytest.mark.parametrize(("name", "ranks"), [slow("SIGTERM", 1), ("SIGUSR1", 2)])
def test_a_signal_saves_and_the_same_command_goes_on(run, undisturbed, tmp_path, name, ranks):
    """On two ranks only the last one hears of it, and all stop after the same step."""
    flags = ("--checkpoint_dir", tmp_path / "checkpoints")
    stop = {"STOP_SIGNAL": name, "STOP_RANK": str(ranks - 1)}
    stopped = run(STOPPED, tmp_path, *flags, ranks=ranks, **stop)
    assert stopped.exit_codes == [75] * ranks
    assert stopped.error_line.startswith(f"stopped: checkpoint of step {STOPPED_AT} made in ")
    assert read_environment(tmp_path / "run")["status"] == "interrupted"
    assert names(tmp_path / "checkpoints") == [f"step-{STOPPED_AT:08d}"]

    done = run(STOPPED, tmp_path, *flags, ranks=ranks)
    assert done.exit_codes == [0] * ranks
    assert read_environment(tmp_path / "run-2")["status"] == "complete"
    table = "training-steps.csv"
    both = steps(tmp_path / "run" / f"{table}.partial", tmp_path / "run-2" / table)
    pd.testing.assert_frame_equal(both, undisturbed(ranks), check_exact=True)

    again = run(STOPPED, tmp_path, *flags, ranks=ranks)
    assert again.exit_codes == [0] * ranks
    assert "Nothing left to do" in again.stdout[0]
    assert not (tmp_path / "run-3").exists()


@pytest.mark.parametrize(
    ("name", "status", "said"),
    [("SIGTERM", 1, "failed: terminated"), ("SIGUSR1", -signal.SIGUSR1, "")],
)
def test_without_checkpoints_a_signal_ends_the_run(run, tmp_path, name, status, said):
    done = run(STOPPED, tmp_path, STOP_SIGNAL=name, STOP_RANK="0")
    assert done.exit_codes == [status]
    assert done.stderr[0].startswith(said)
    assert len(done.stderr[0].splitlines()) <= 1
    assert read_environment(tmp_path / "run")["status"] == "failed"


@pytest.fixture
def small_disk(tmp_path):
    """Yields ``small_disk(mib)``: a folder on a disk of that size, which can grow later."""
    folder = tmp_path / "disk"
    folder.mkdir()

    def mount(mib: int, *options: str) -> Path:
        words = ["mount", "-t", "tmpfs", "-o", ",".join((*options, f"size={mib}m"))]
        try:
            subprocess.run([*words, "tmpfs", folder], check=True, capture_output=True, text=True)
        except (OSError, subprocess.CalledProcessError) as error:
            pytest.skip(f"cannot mount a disk: {getattr(error, 'stderr', error)}")
        return folder

    yield mount
    subprocess.run(["umount", folder], check=False, capture_output=True)


@pytest.mark.parametrize(("ranks", "asynchronous"), [slow(1, "off"), (2, "on")])
def test_a_full_disk_leaves_the_last_good_checkpoint(
    run, undisturbed, small_disk, tmp_path, ranks, asynchronous
):
    # A checkpoint takes 5.2 MiB: the second does not fit.
    folder = small_disk(8) / "checkpoints"
    flags = ("--checkpoint_dir", folder, "--save_every", 2, "--async_checkpoints", asynchronous)
    full = run(STOPPED, tmp_path, *flags, ranks=ranks)
    assert full.exit_codes == [2] * ranks
    assert "No space left on device" in full.error_line
    assert "the last good one is step-00000002" in full.error_line
    assert names(folder) == ["step-00000002"]

    small_disk(64, "remount")
    done = run(STOPPED, tmp_path, *flags, ranks=ranks)
    assert done.exit_codes == [0] * ranks
    expected = undisturbed(ranks).query("step >= 2").reset_index(drop=True)
    own = steps(tmp_path / "run-2" / "training-steps.csv")
    pd.testing.assert_frame_equal(own, expected, check_exact=True)


def shard(folder: Path, tokens: list[int]) -> Path:
    folder.mkdir()
    write_shard(folder / "a.bin", np.array(tokens, np.uint16))
    return folder


def wrong_magic(folder: Path) -> Path:
    (shard(folder, [1] * 200) / "a.bin").write_bytes(bytes(2048))
    return folder


def fewer_tokens_than_the_header_says(folder: Path) -> Path:
    path = shard(folder, [1] * 200) / "a.bin"
    path.write_bytes(path.read_bytes()[:-10])
    return folder


def outside_the_vocabulary(folder: Path) -> Path:
    return shard(folder, [1] * 100 + [300] + [1] * 100)


@pytest.fixture(scope="module")
def saved(run, tmp_path_factory) -> Path:
    """Runs one device that is stopped after step 4; returns its checkpoints."""
    folder = tmp_path_factory.mktemp("saved")
    stop = {"STOP_SIGNAL": "SIGTERM", "STOP_RANK": "0"}
    assert run(STOPPED, folder, "--checkpoint_dir", folder / "c", **stop).exit_codes == [75]
    return folder / "c"


BAD = {
    "unknown strategy": ("train_fsdp", ("--strategy", "FULLSHARD"), "'FULL_SHARD'"),
    "warm-up": ("train_ddp", ("--warmup_steps", STEPS), "must be below num_steps"),
    "hybrid": ("train_fsdp", ("--strategy", "HYBRID_SHARD"), "at least 4 ranks"),
    "baseline": ("train_baseline", (), "is for one device"),
    "not a flag": ("train_ddp", ("--save_evry", 3), "--save-every"),
    "batch": ("train_ddp", ("--global_batch_size", 6), "is no multiple of micro-batch size 2"),
}
BAD_DATA = {
    "wrong magic": (wrong_magic, "a.bin"),
    "cut off": (fewer_tokens_than_the_header_says, "a.bin"),
    "empty": (lambda folder: folder.mkdir() or folder, "holds no *.bin"),
}
OF_CHECKPOINTS = {
    "another model": (("--vocab_size", 260), "another model (vocab_size 256, this run has 260)"),
    "another optimizer": (("--optimizer", "sgd"), "another optimizer (adamw, this run has sgd)"),
}


@pytest.fixture(scope="module")
def refused(rank_server, saved, tokens, tmp_path_factory) -> list[dict[str, str]]:
    """Returns what two ranks say to trainings that cannot be, in one launch; by name."""
    folder = tmp_path_factory.mktemp("refused")
    cases = {name: (script, flags) for name, (script, flags, _) in BAD.items()}
    for name, (make, _) in BAD_DATA.items():
        cases[name] = ("train_ddp", ("--data", make(folder / name)))
    shutil.copytree(saved, folder / "c")
    for name, (flags, _) in OF_CHECKPOINTS.items():
        cases[name] = ("train_ddp", ("--checkpoint_dir", folder / "c", *flags))
    (folder / "file").touch()  # also the superuser makes no folder below a file
    cases["below a file"] = ("train_ddp", ("--checkpoint_dir", folder / "file" / "c"))
    listed = []
    for name, (script, flags) in cases.items():
        where = ("--data", tokens, "--output_dir", folder / "out" / name)
        listed.append((name, script, [str(word) for word in (*FLAGS, *where, *flags)]))
    (folder / "cases.json").write_text(json.dumps(listed))
    done = rank_server.succeed(REFUSED, folder / "cases.json", ranks=2)
    assert not list((folder / "out").glob("*/run"))
    assert names(folder / "c") == [f"step-{STOPPED_AT:08d}"]
    return [json.loads(said.splitlines()[-1]) for said in done.stdout]


@pytest.mark.parametrize(
    ("name", "words"),
    [
        *((name, words) for name, (_, _, words) in BAD.items()),
        *((name, words) for name, (_, words) in BAD_DATA.items()),
        *((name, words) for name, (_, words) in OF_CHECKPOINTS.items()),
        ("below a file", "Not a directory"),
    ],
)
def test_what_cannot_be_is_one_line_of_every_rank(refused, name, words):
    for said in refused:
        assert words in said[name]
        assert len(said[name].splitlines()) == 1


@pytest.mark.parametrize(
    ("script", "ranks", "flags", "words"),
    [
        ("train_ddp", 2, ("--data", outside_the_vocabulary), "token 300 at 100 is outside the mod"),
        ("train_baseline", 1, ("--data", wrong_magic), "a.bin"),
    ],
    ids=["outside the vocabulary", "one rank"],
)
def test_a_refused_training_ends_with_one_line_and_status_2(
    run, tmp_path, script, ranks, flags, words
):
    flags = [flag(tmp_path / "data") if callable(flag) else flag for flag in flags]
    done = run(script, tmp_path / "out", *flags, ranks=ranks)
    assert done.exit_codes == [2] * ranks
    assert done.error_line.startswith("error: ")
    assert words in done.error_line
    assert not (tmp_path / "out" / "run").exists()
