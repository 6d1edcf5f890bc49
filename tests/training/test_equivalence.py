"""Two ranks under every strategy train as one device does: the same losses, norms and weights.

The trainings of equivalence_worker.py run on two gloo ranks, all in one launch; one device runs
here. Weights are read from the checkpoints by torch's own reader.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch
import torch.distributed.checkpoint as dcp
from equivalence_worker import CASES, DIFFERENT, EXACT, GLOBAL_BATCH, ROUNDED, STEPS, Case
from torch import Tensor

from common.data.shard_files import write_shard
from common.models.gpt2 import CONFIGS, GPT2
from common.training.trainer import train

pytestmark = pytest.mark.two_ranks
WORKER = Path(__file__).with_name("equivalence_worker.py")


def ids(cases: tuple[Case, ...]) -> dict:
    """Returns arguments of parametrize."""
    slow = pytest.mark.slow
    values = [pytest.param(case, marks=() if case.is_quick else slow) for case in cases]
    return {"argnames": "case", "argvalues": values, "ids": [case.name for case in cases]}


@pytest.fixture(scope="module")
def trained(rank_server, slow_chosen, tmp_path_factory) -> Path:
    """Trains on two ranks, and in either precision on one device; returns the folder."""
    folder = tmp_path_factory.mktemp("equivalence")
    (folder / "tokens").mkdir()
    # Small tokens are frequent, so that there is something to learn.
    tokens = np.random.default_rng(3).geometric(0.03, 8000) % 256
    write_shard(folder / "tokens" / "tokens_000000.bin", tokens)
    names = [case.name for case in CASES if case.is_quick or slow_chosen]
    rank_server.succeed(WORKER, folder, *names, ranks=2)
    for precision in ("float64", "float32")[: 1 + slow_chosen]:
        train(alone(precision).config(folder))
    return folder


def alone(precision: str) -> Case:
    """Returns the case of one device, and all sequences of a step at once."""
    return Case("single", precision, micro_batch=GLOBAL_BATCH)


def steps(folder: Path, case: Case) -> pd.DataFrame:
    """Reads what the ranks of a training measured, by step and rank."""
    table = pd.read_csv(folder / "runs" / case.name / "training-steps.csv")
    return table.set_index(["step", "rank"]).sort_index()


def curve(folder: Path, case: Case, what: str) -> np.ndarray:
    """Reads a loss or norm of every step, on which all ranks agree."""
    by_rank = steps(folder, case)[what].unstack("rank")
    assert len(by_rank) == case.steps
    assert (by_rank.nunique(axis=1) == 1).all()
    return by_rank[0].to_numpy()


def weights(folder: Path, case: Case) -> dict[str, Tensor]:
    """Reads the final weights, in a model of one device."""
    model = GPT2(CONFIGS["gpt2-pico"]).to(getattr(torch, case.precision))
    states = {"model": model.state_dict()}
    path = folder / "checkpoints" / case.name / f"step-{STEPS:08d}"
    dcp.load(states, checkpoint_id=path, no_dist=True)
    return states["model"]


@pytest.mark.parametrize(**ids(EXACT))
def test_losses_and_gradient_norms_are_those_of_one_device(trained, case):
    for what in ("loss", "gradient_norm"):
        found, expected = (curve(trained, c, what) for c in (case, alone("float64")))
        np.testing.assert_allclose(found, expected, rtol=0, atol=1e-10)


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")  # one process reads
@pytest.mark.parametrize(**ids(EXACT))
def test_final_weights_are_those_of_one_device(trained, case):
    found, expected = weights(trained, case), weights(trained, alone("float64"))
    assert found.keys() == expected.keys()
    for name, weight in found.items():
        torch.testing.assert_close(weight, expected[name], rtol=0, atol=1e-8)


@pytest.mark.parametrize(**ids(ROUNDED))
def test_in_float32_losses_agree_up_to_rounding(trained, case):
    for what, close in (("loss", {"atol": 1e-5, "rtol": 0}), ("gradient_norm", {"rtol": 1e-4})):
        found, expected = (curve(trained, c, what) for c in (case, alone("float32")))
        np.testing.assert_allclose(found, expected, **close)


@pytest.mark.parametrize(**ids(DIFFERENT))
def test_without_rank_0s_weights_on_all_ranks_losses_differ(trained, case):
    # What the tests above would see: the first loss is off already, and it stays so.
    found, expected = (curve(trained, c, "loss") for c in (case, alone("float64")))
    assert (np.abs(found - expected[: case.steps]) > 1e-6).all()


def test_the_trainings_learn_something(trained):
    loss = curve(trained, alone("float64"), "loss")
    assert loss[-1] < loss[0] - 0.3
