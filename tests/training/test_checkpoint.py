"""Checkpoints: what was cut off goes on as if nothing had happened, and what is damaged is named.

The oracle is a run of the same settings that was not disturbed: losses are compared bit for bit.
"""

from __future__ import annotations

import json
import shutil
import zlib
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch
import yaml
from refusals import problem
from resume_worker import COMMON, HALF
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

from common.data.token_shards import write_shard
from common.errors import RunFailed
from common.exercises.checkpoint_commit import read_manifest
from common.runtime.group.process_group import process_group
from common.training.checkpoints import states
from common.training.config import BaselineConfig
from common.training.trainer import is_lost, train

WORKER = Path(__file__).with_name("resume_worker.py")
STEPS = COMMON["num_steps"]
slow = partial(pytest.param, marks=pytest.mark.slow)
RESUMED = ["FULL_SHARD", "DDP", "MY_ZERO1", "MY_FSDP"]


@pytest.fixture(scope="module", autouse=True)
def _one_group() -> Iterator[None]:
    """Runs this process in one process group, as those of the ranks."""
    with process_group("cpu"):
        yield


@pytest.fixture(scope="module")
def start(tokens):
    """Returns ``start(folder, **settings)``: trains on one device; all output goes to folder."""

    def start(folder: Path, **settings: object) -> None:
        where = {"output_dir": str(folder), "checkpoint_dir": str(folder / "checkpoints")}
        own = {"data": str(tokens), "micro_batch_size": 4, "run_id": "run"}
        train(BaselineConfig(**COMMON | where | own | settings))

    return start


@pytest.fixture(scope="module")
def undisturbed(start, tmp_path_factory) -> Path:
    """Runs one device undisturbed, with checkpoints of steps 2, 4 and 6."""
    folder = tmp_path_factory.mktemp("undisturbed")
    start(folder)
    return folder


@pytest.fixture
def cut_off(undisturbed, tmp_path) -> Path:
    """Makes a folder in which the same run seems to have been killed after step 4."""
    return cut(undisturbed, tmp_path, 2, 4)


def cut(source: Path, target: Path, *steps: int) -> Path:
    for step in steps:
        name = Path("checkpoints") / f"step-{step:08d}"
        shutil.copytree(source / name, target / name)
    return target


def rows(run: Path) -> pd.DataFrame:
    """Reads step, rank, loss and gradient norm as they were written, to the last bit."""
    table = pd.read_csv(run / "training-steps.csv", dtype=str)
    columns = ["step", "rank", "loss", "gradient_norm", "learning_rate"]
    return table[columns].astype(float)  # Python's own parser, exact in every pandas


def from_step(table: pd.DataFrame, step: int) -> pd.DataFrame:
    return table[table["step"] >= step].reset_index(drop=True)


def warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    """Returns what our own modules said; torch.distributed.checkpoint logs its calls, too."""
    return [one.getMessage() for one in caplog.records if one.name.startswith("common.")]


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in (folder / "checkpoints").iterdir())


def held(checkpoint: Path, scratch: Path) -> dict[str, object]:
    """Reads all that a checkpoint holds, by PyTorch's own converter without any process group."""
    dcp_to_torch_save(checkpoint, scratch)
    found: dict[str, object] = {}

    def collect(prefix: str, value: object) -> None:
        if isinstance(value, dict | list):
            inner = value.items() if isinstance(value, dict) else enumerate(value)
            for key, one in inner:
                collect(f"{prefix}/{key}", one)
        else:
            found[prefix] = value

    collect("", torch.load(scratch, weights_only=False))
    return found


def hold_the_same(one: Path, other: Path, scratch: Path) -> bool:
    """Compares two checkpoints to the last bit; the test fails if they are not whole."""
    a, b = (held(path, scratch / f"{n}.pt") for n, path in enumerate((one, other)))
    numbers = sum(value.numel() for value in a.values() if isinstance(value, torch.Tensor))
    assert numbers > 3 * 400_000  # weights and both of Adam's moments
    return a.keys() == b.keys() and all(
        torch.equal(value, b[name]) if isinstance(value, torch.Tensor) else value == b[name]
        for name, value in a.items()
    )


def test_asynchronous_checkpoints_hold_what_synchronous_ones_do(start, undisturbed, tmp_path):
    # Training goes on while they are written: a copy that is not one would show later weights.
    start(tmp_path, async_checkpoints="on")
    assert names(tmp_path) == names(undisturbed)
    own, reference = (
        folder / "checkpoints" / "step-00000004" for folder in (tmp_path, undisturbed)
    )
    assert hold_the_same(own, reference, tmp_path)
    assert torch.equal(*(torch.load(path / "random-0.pt")["cpu"] for path in (own, reference)))


def test_only_the_newest_checkpoints_are_kept(start, tmp_path):
    start(tmp_path, num_steps=3, save_every=1, keep_checkpoints=2, async_checkpoints="on")
    assert names(tmp_path) == ["step-00000002", "step-00000003"]


def test_a_damaged_newer_checkpoint_takes_no_intact_ones_place(start, cut_off, capsys):
    # The run goes on from step 2 and ends before the damaged one's step.
    flip(cut_off / "checkpoints" / "step-00000004" / "__0_0.distcp")
    start(cut_off, num_steps=3, save_every=1, keep_checkpoints=1)
    assert names(cut_off) == ["step-00000003", "step-00000004"]
    capsys.readouterr()
    start(cut_off, num_steps=5, save_every=1, keep_checkpoints=1)
    assert "step-00000003 (single" in capsys.readouterr().out
    assert names(cut_off) == ["step-00000005"]


@pytest.mark.parametrize(("last", "left"), [(5, [3, 4, 5]), (7, [6, 7])])
def test_a_damaged_checkpoint_in_between_goes_when_enough_newer_ones_are_intact(
    start, cut_off, last, left
):
    flip(cut_off / "checkpoints" / "step-00000004" / "__0_0.distcp")
    start(cut_off, num_steps=last, save_every=3, keep_checkpoints=2)
    assert names(cut_off) == [f"step-{step:08d}" for step in left]


def test_a_checkpoint_that_cannot_be_written_is_told_with_the_last_intact_one(start, cut_off):
    flip(cut_off / "checkpoints" / "step-00000004" / "__0_0.distcp")
    (cut_off / "checkpoints" / ".partial-00000003").touch()  # in the way of the folder
    assert "the last good one is step-00000002" in problem(start, cut_off, save_every=3)


def test_what_a_killed_run_was_writing_or_deleting_is_removed(start, cut_off):
    for name in (".partial-00000006", ".old-step-00000001"):
        (cut_off / "checkpoints" / name).mkdir()
        (cut_off / "checkpoints" / name / "__0_0.distcp").write_bytes(b"half")
    start(cut_off)
    assert names(cut_off) == ["step-00000002", "step-00000004", "step-00000006"]


def test_changed_settings_and_data_are_said(start, cut_off, tmp_path, caplog):
    data = tmp_path / "tokens"
    data.mkdir()
    write_shard(data / "a.bin", np.arange(5001) % 256)  # one more, as by another download
    start(cut_off, lr=0.002, num_steps=5, micro_batch_size=8, data=str(data))
    assert [line for line in warnings(caplog) if not line.startswith("data was")] == [
        "num_steps was 6 in the checkpoint and is 5 now",
        "lr was 0.003 in the checkpoint and is 0.002 now",
        "data_tokens was 5000 in the checkpoint and is 5001 now",
    ]


def test_a_resumed_run_decays_weights_as_it_was_told_and_not_as_before(
    start, undisturbed, tmp_path
):
    # AdamW takes lr · weight_decay of the weights before it updates them (Loshchilov and Hutter).
    lr, after = 0.003, {}
    for decay in (0.1, 0.5):
        folder = cut(undisturbed, tmp_path / str(decay), 4)
        start(folder, num_steps=5, min_lr=lr, weight_decay=decay, save_every=1)
        after[decay] = held(folder / "checkpoints" / "step-00000005", folder / "held.pt")
    before = held(undisturbed / "checkpoints" / "step-00000004", tmp_path / "held.pt")
    weights = [name for name in before if name.startswith("/model/")]
    assert weights
    for name in weights:
        moved = after[0.1][name] - after[0.5][name]
        torch.testing.assert_close(moved, lr * 0.4 * before[name], rtol=1e-2, atol=1e-6)


def test_a_loss_that_is_no_number_ends_the_run_before_checkpoints_hold_it(start, tmp_path):
    said = r"the (loss|gradient norm) is (nan|inf) since step \d+: training went apart"
    with pytest.raises(RunFailed, match=said):
        start(tmp_path, lr=1e30, save_every=1, keep_checkpoints=2)
    for name in names(tmp_path):
        for value in held(tmp_path / "checkpoints" / name, tmp_path / "held.pt").values():
            assert not isinstance(value, torch.Tensor) or value.isfinite().all()
    table = pd.read_csv(tmp_path / "run" / "training-steps.csv.partial")  # has the step, too
    assert table["loss"].isna().tolist() == [False] * (len(table) - 1) + [True]


@pytest.mark.parametrize(
    ("loss", "scale", "is_last", "lost"),
    [
        (float("nan"), None, False, True),
        (float("nan"), 65536.0, False, False),  # the scaler leaves the update out
        (float("nan"), 0.5, False, True),  # and has done so for long
        (float("nan"), 65536.0, True, True),
        (1.0, 0.5, True, False),  # a gradient that overflows
        (1.0, None, False, True),
    ],
)
def test_what_is_no_number_ends_a_training_unless_a_scaler_leaves_it_out(
    loss: float, scale: float | None, is_last: bool, lost: bool
) -> None:
    scaler = torch.amp.GradScaler("cpu", init_scale=scale or 1.0, enabled=scale is not None)
    assert is_lost(loss, scaler, is_last) == lost


@pytest.mark.parametrize(
    ("optimizer_class", "settings"),
    [(torch.optim.AdamW, {"foreach": True}), (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9})],
)
def test_making_a_checkpoint_is_no_step_of_an_optimizer_that_has_made_none(
    optimizer_class: type, settings: dict
) -> None:
    model = torch.nn.Linear(2, 2)
    optimizer = optimizer_class(model.parameters(), **settings)
    found = states._states(model, optimizer)["optimizer"]["state"]
    for state in (*optimizer.state.values(), *found.values()):
        assert not any(value.any() for value in state.values())
    assert len(found) == len(optimizer.state) == 2


def test_settings_without_effect_are_said(start, tmp_path, caplog):
    start(tmp_path, num_steps=1, optimizer="sgd", weight_decay=0.5, profile_wait=3)
    assert {line.partition(";")[0] for line in warnings(caplog)} >= {
        "without effect: weight_decay: sgd has none here",
        "without effect: profile_wait: no step is traced",
    }


OVERFLOWING = HALF | {"lr": 3e-4}
"""In the first steps the scaled gradients do not fit into 16 bits, and the scale is lowered."""


def rewrite_facts(checkpoint: Path, change: Callable[[dict], object]) -> None:
    """Changes a checkpoint's facts and makes its manifest whole again."""
    facts, files = read_manifest(checkpoint)
    change(facts)
    text = json.dumps({"facts": facts, "files": files})
    whole = {"crc": zlib.crc32(text.encode()), "content": text}
    (checkpoint / "manifest.json").write_text(json.dumps(whole))


def scale(folder: Path, step: int) -> float:
    return read_manifest(folder / "checkpoints" / f"step-{step:08d}")[0]["scaler"]["scale"]


@pytest.fixture(scope="module")
def overflowing(start, tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("overflowing")
    start(folder, **OVERFLOWING)
    return folder


def test_a_float16_run_that_was_cut_off_goes_on_with_its_loss_scale(start, overflowing, tmp_path):
    # Or the test shows nothing:
    assert scale(overflowing, 2) < torch.amp.GradScaler("cpu").get_scale()
    start(cut(overflowing, tmp_path, 2), **OVERFLOWING)
    expected = from_step(rows(overflowing / "run"), 2)
    pd.testing.assert_frame_equal(rows(tmp_path / "run"), expected, check_exact=True)
    assert scale(tmp_path, 6) == scale(overflowing, 6)


def test_a_checkpoint_from_before_scales_were_saved_is_still_loaded(
    start, overflowing, tmp_path, capsys
):
    folder = cut(overflowing, tmp_path, 4)
    rewrite_facts(folder / "checkpoints" / "step-00000004", lambda facts: facts.pop("scaler"))
    start(folder, **OVERFLOWING)
    assert "Resumed from" in capsys.readouterr().out
    assert len(rows(folder / "run")) == 2


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 3] ^= 4
    path.write_bytes(content)


def replace_by_folder(path: Path) -> None:
    path.unlink()
    path.mkdir()


@pytest.mark.parametrize(
    ("name", "harm", "words"),
    [
        ("__0_0.distcp", flip, "__0_0.distcp has been changed"),
        slow(".metadata", Path.unlink, ".metadata is missing"),
        slow("random-0.pt", flip, "random-0.pt has been changed"),
        ("manifest.json", replace_by_folder, "manifest.json has been changed"),
    ],
)
def test_a_damaged_checkpoint_is_named_and_the_one_before_goes_on_as_if_never_cut_off(
    start, undisturbed, cut_off, caplog, name, harm, words
):
    expected = rows(undisturbed / "run")
    assert expected["loss"].nunique() == STEPS
    harm(cut_off / "checkpoints" / "step-00000004" / name)
    start(cut_off)
    [line] = warnings(caplog)
    assert f"step-00000004 is damaged: {words}" in line
    pd.testing.assert_frame_equal(rows(cut_off / "run"), from_step(expected, 2), check_exact=True)
    config = yaml.safe_load((cut_off / "run" / "config.yaml").read_text())
    assert config["resumed_from_step"] == 2
    # The damaged one was made anew on the way.
    caplog.clear()
    start(cut_off)
    assert not warnings(caplog)


def test_where_all_are_damaged_nothing_is_trained_or_deleted(start, cut_off):
    for path in (cut_off / "checkpoints").iterdir():
        flip(path / "__0_0.distcp")
    assert "none of the 2 checkpoints is intact" in problem(start, cut_off)
    assert names(cut_off) == ["step-00000002", "step-00000004"]
    assert not (cut_off / "run").exists()


@pytest.fixture(scope="module")
def two_ranks(rank_server, start, tokens, tmp_path_factory) -> Path:
    """Runs resume_worker.py, and moves runs between it and one device."""
    folder = tmp_path_factory.mktemp("two-ranks")
    exact = {"precision": "float64", "run_id": "one-device"}
    start(folder, **exact, checkpoint_dir=str(folder / "one-device"), output_dir=f"{folder}/runs")
    target = folder / "checkpoints" / "from-one-device" / "step-00000004"
    shutil.copytree(folder / "one-device" / "step-00000004", target)
    rank_server.succeed(WORKER, folder, tokens, *RESUMED, ranks=2)
    target = folder / "to-one-device" / "step-00000004"
    shutil.copytree(folder / "checkpoints" / "moved" / "step-00000004", target)
    moved = {"checkpoint_dir": str(target.parent), "run_id": "to-one-device"}
    start(folder, **exact | moved, output_dir=f"{folder}/runs")
    return folder


@pytest.mark.slow  # in kind: test_training_stops.py goes on, on two ranks
@pytest.mark.two_ranks
@pytest.mark.parametrize("strategy", [*RESUMED, "float16"])
def test_two_ranks_go_on_with_the_same_losses(two_ranks, strategy):
    expected = rows(two_ranks / "runs" / strategy)
    assert set(expected["rank"]) == {0, 1}
    resumed = rows(two_ranks / "runs" / f"{strategy}-resumed")
    order = ["step", "rank"]
    pd.testing.assert_frame_equal(
        resumed.sort_values(order, ignore_index=True),
        from_step(expected, 2).sort_values(order, ignore_index=True),
        check_exact=True,
    )


@pytest.mark.slow
@pytest.mark.two_ranks
@pytest.mark.parametrize("strategy", RESUMED)
def test_asynchronous_checkpoints_of_two_ranks_hold_the_same(two_ranks, strategy, tmp_path):
    step = "step-00000006"
    saved = [two_ranks / "checkpoints" / f"{strategy}{end}" for end in ("", "-asynchronous")]
    assert sorted(path.name for path in saved[1].iterdir()) == ["step-00000004", step]
    assert hold_the_same(saved[0] / step, saved[1] / step, tmp_path)


@pytest.mark.slow
@pytest.mark.two_ranks
def test_any_strategy_and_number_of_ranks_goes_on_from_any_other(two_ranks):
    """DDP on two ranks, FULL_SHARD on two from step 2, one device from step 4; and one device,
    DDP from step 4. In float64 the order of sums is all that differs."""
    firsts = {"exact": 0, "one-device": 0, "moved": 2, "to-one-device": 4, "from-one-device": 4}
    losses = {
        name: rows(two_ranks / "runs" / name).query("rank == 0").set_index("step")["loss"]
        for name in firsts
    }
    expected = losses["exact"]
    for name, own in losses.items():
        assert own.index.tolist() == list(range(firsts[name], STEPS))
        assert own.to_numpy() == pytest.approx(expected.loc[own.index].to_numpy(), abs=1e-10)
    # Weights that were not taken over would show: the losses have moved by far more than that.
    assert abs(expected.iloc[0] - expected.iloc[-1]) > 1e-3


@pytest.mark.slow
@pytest.mark.two_ranks
def test_sgd_goes_on_under_another_strategy_whose_implementation_is_another(two_ranks):
    """DDP's is fused, for which PyTorch has no kernel where parameters are sharded."""
    whole, sharded = (rows(two_ranks / "runs" / name) for name in ("sgd", "sgd-sharded"))
    assert set(sharded["step"]) == {2, 3, 4, 5}
    expected = from_step(whole, 2)
    for what in ("loss", "gradient_norm"):
        assert sharded[what].to_numpy() == pytest.approx(expected[what].to_numpy(), abs=1e-10)


@pytest.mark.slow
@pytest.mark.two_ranks
def test_a_run_goes_from_exercise_to_exercise(two_ranks):
    """Five strategies, each of which takes up the checkpoint of another and makes a step."""
    expected = rows(two_ranks / "runs" / "unchanged")
    for step in range(5):
        own = rows(two_ranks / "runs" / (f"chain-{step + 1}" if step else "chain"))
        assert set(own["step"]) == {step}
        of_step = expected[expected["step"] == step]
        for what in ("loss", "gradient_norm"):
            assert own[what].to_numpy() == pytest.approx(of_step[what].to_numpy(), abs=1e-10)
