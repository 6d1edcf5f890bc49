"""The studies of the training step at their smallest: what they write, and what they refuse."""

from __future__ import annotations

import itertools
import platform
import subprocess
import sys

import pandas as pd
import pytest
import torch

from common.errors import RunFailed, UserError
from common.report.progress import StageProgress
from common.runtime.run_directory import read_environment
from common.studies import transformers_step
from common.studies.transformers_step import OURS, THEIRS, TransformersStudy

TINY = {"model": "gpt2-pico", "batch_size": 1, "seq_len": 16}


@pytest.fixture(scope="module")
def compared(tmp_path_factory):
    pairings = ("eager mode, SDPA", "eager mode, attention written out", "bfloat16, SDPA")
    study = TransformersStudy(**TINY, rounds=2, pairings=pairings, best_of=())
    return transformers_step.run_study(study, str(tmp_path_factory.mktemp("s")), StageProgress())


def test_every_pairing_has_a_sample_of_each_side_in_each_round(compared):
    times = pd.read_csv(compared / "step-times.csv")
    assert times.groupby(["pairing", "side", "round"]).size().tolist() == [1] * 3 * 2 * 2
    assert (times["step_time_ms"] > 0).all()
    assert (times["page_faults"] >= 0).all()
    verdicts = pd.read_csv(compared / "verdicts.csv")
    assert len(verdicts) == 3
    assert (verdicts["lowest"] <= verdicts["found"]).all()
    assert (verdicts["found"] <= verdicts["highest"]).all()
    settings = pd.read_csv(compared / "settings.csv")
    assert set(settings["side"]) == {OURS, THEIRS}
    assert read_environment(compared)["status"] == "complete"


def test_different_computations_are_not_compared():
    study = TransformersStudy(**TINY)
    workload, batch = study.workload(), transformers_step.shifted_batch(study)
    ours, theirs = (
        transformers_step.build(side, workload, study.torch_device()) for side in (OURS, THEIRS)
    )
    transformers_step.check_agreement(ours, theirs, batch, 1e-4)
    with torch.no_grad():
        ours.model.ln_f.weight.mul_(1.5)
    with pytest.raises(RunFailed, match="not the same computation"):
        transformers_step.check_agreement(ours, theirs, batch, 1e-4)


def test_both_sides_take_the_same_steps():
    # Same weights, batch and optimizer: after three updates the losses are still the same.
    study = TransformersStudy(**TINY)
    batches = itertools.repeat(transformers_step.shifted_batch(study))
    losses = {}
    for side in (OURS, THEIRS):
        step = transformers_step.build(side, study.workload(), study.torch_device())
        losses[side] = [step.run(batches).item() for _ in range(4)]
    assert losses[OURS] == pytest.approx(losses[THEIRS], rel=1e-4)
    assert losses[OURS][-1] < losses[OURS][0]


def test_the_ratio_is_theirs_over_ours_of_one_round():
    rows = [("p", OURS, 0, 2.0), ("p", THEIRS, 0, 3.0), ("p", OURS, 1, 4.0), ("p", THEIRS, 1, 4.0)]
    rows += [("best, x", OURS, 0, 2.0), ("best, x", THEIRS, 0, 2.2)]
    samples = pd.DataFrame(rows, columns=["pairing", "side", "round", "step_time_ms"])
    verdicts = transformers_step.judge(samples)
    assert verdicts["found"].tolist() == pytest.approx([1.25, 1.1])
    assert verdicts["lowest"].tolist() == pytest.approx([1.0, 1.1])
    assert verdicts["held"].tolist() == [True, False]


def test_best_settings_are_compared_with_and_without_kept_memory(tmp_path, monkeypatch):
    monkeypatch.setattr(transformers_step, "CANDIDATES", {OURS: ({"loss_chunks": 2},), THEIRS: ()})
    study = TransformersStudy(
        **TINY, rounds=2, candidate_steps=1, pairings=("eager mode, SDPA",), best_of=("float32",)
    )
    path = transformers_step.run_study(study, str(tmp_path), StageProgress())
    times = pd.read_csv(path / "step-times.csv")
    rows = times.groupby(["pairing", "side"]).size()
    assert rows["best, float32"].to_dict() == dict.fromkeys(
        (OURS, THEIRS, f"{OURS}, memory kept", f"{THEIRS}, memory kept"), 2
    )
    assert rows["eager mode, SDPA"].to_dict() == {OURS: 2, THEIRS: 2}
    # What is ours alone is stated beside the ratio without it, and the one where both have it.
    promises = pd.read_csv(path / "verdicts.csv")["promise"].str.split(": ").str[1]
    best = ["best, float32", "best, float32, ours keeping memory"]
    assert promises.tolist() == ["eager mode, SDPA", *best, "best, float32, both keeping memory"]
    # Candidates of two precisions can be told apart.
    candidates = pd.read_csv(path / "candidate-times.csv")
    assert candidates["pairing"].str.startswith("float32, ").all()


FAULTS = """
import resource, numpy
from common.runtime.kept_memory import kept_memory

def page_faults():  # of filling 64 MiB that was filled and freed before
    for _ in range(3):
        before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        numpy.full(64 * 2**20, 1, numpy.uint8)
        faults = resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before
    return faults

print(page_faults())
with kept_memory() as kept:
    print(page_faults() if kept else "cannot")
print(page_faults())
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="mallopt is glibc's")
def test_kept_memory_is_mapped_when_it_is_used_again():
    # In a process of its own: the heap of this one has gaps that other tests have left.
    done = subprocess.run([sys.executable, "-c", FAULTS], capture_output=True, text=True)
    before, kept, after = map(int, done.stdout.split())
    assert before > 10  # 32 if pages are huge ones, else 16,384
    assert kept <= 5
    assert after == pytest.approx(before, rel=0.1)


@pytest.mark.parametrize(
    ("study", "settings", "message"),
    [
        (TransformersStudy, {"rounds": 0}, "rounds is 0"),
        (TransformersStudy, {"seq_len": 2000}, "positions"),
    ],
)
def test_bad_settings_get_one_line(study, settings, message):
    with pytest.raises(UserError, match=message):
        study(**settings)
