"""Predicted memory against oracles that do not know the formulas: PyTorch's operator-level tracker
on fake tensors, its CPU allocator under real steps, and published figures."""

from __future__ import annotations

from dataclasses import replace

import pandas as pd
import pytest
import torch

from common.benchmarks.one_device.memory_tracker import measure_peak, saved_by_layer, track_step
from common.errors import UserError
from common.perfmodel.one_device.memory import (
    estimated_states,
    predict_memory,
    saved_bytes_by_layer,
)
from common.perfmodel.one_device.memory_fit import largest_batch, what_would_fit
from common.perfmodel.one_device.workload import Workload
from common.runtime.paths import project_root

MIB = 2**20
PICO = Workload("gpt2-pico", 4, 64, optimizer_implementation="fused")
OPTIONS = {
    "plain": {},
    "eager attention": {"attention": "eager", "seq_len": 128},
    "checkpointing": {"activation_checkpointing": True},
    "both": {"attention": "eager", "activation_checkpointing": True},
    "bfloat16": {"precision": "bfloat16"},
    "bfloat16, eager": {"precision": "bfloat16", "attention": "eager"},
    "loss in pieces": {"loss_chunks": 16, "batch_size": 8},
    "bfloat16 loss in pieces": {"loss_chunks": 16, "precision": "bfloat16"},
    "pieces, eager": {"loss_chunks": 16, "attention": "eager", "seq_len": 128},
    "pieces, checkpointing": {"loss_chunks": 16, "activation_checkpointing": True},
    "accumulation": {"gradient_accumulation": 2},
    "small batch": {"batch_size": 1, "seq_len": 32},
    "small batch, sgd": {"batch_size": 1, "seq_len": 32, "optimizer": "sgd"},
    "small batch, loop": {"batch_size": 1, "seq_len": 32, "optimizer_implementation": "for-loop"},
    "small batch, foreach": {"batch_size": 1, "seq_len": 32, "optimizer_implementation": "foreach"},
    "padded vocabulary": {"vocab_multiple": 1000},
}

QUICK = {"plain", "checkpointing"}
"""All others are also tracked one by one, hardly change what is held, or are held elsewhere."""
slow = pytest.mark.slow


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=[slow] * (name not in QUICK)) for name in OPTIONS],
)
def test_the_peak_is_the_trackers(name):
    workload = replace(PICO, **OPTIONS[name])
    tracked = track_step(workload)
    assert predict_memory(workload).peak_bytes == pytest.approx(tracked.total_bytes, rel=0.005)


@pytest.mark.parametrize(
    "name", [*(pytest.param(name, marks=slow) for name in ("both", "bfloat16")), "loss in pieces"]
)
def test_the_peak_is_the_allocators_in_a_real_step(name):
    # oneDNN's products of bfloat16 allocate as the processor's instructions let them.
    workload = replace(PICO, **{"batch_size": 2} | OPTIONS[name])
    with torch.backends.mkldnn.flags(enabled=False):
        peak = measure_peak(workload, torch.device("cpu"))
    assert predict_memory(workload).peak_bytes == pytest.approx(peak.allocated_bytes, rel=0.005)
    assert peak.reserved_bytes is None


@pytest.mark.parametrize(
    "options",
    [{}, {"attention": "eager"}, {"precision": "bfloat16"}, {"loss_chunks": 3}],
    ids=str,
)
def test_every_layer_keeps_what_is_predicted_to_the_byte(options):
    workload = replace(PICO, **options)
    seen = saved_by_layer(workload).set_index("layer")["saved_bytes"].to_dict()
    predicted = saved_bytes_by_layer(workload)
    head = predicted.pop("head and loss"), seen.pop("head and loss")
    assert seen == predicted
    assert head[0] == pytest.approx(head[1], rel=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "batch_size", "parameters"),
    [
        ("gpt2", 16, 124_439_808),
    ],
)
def test_a_published_size_is_tracked_without_its_memory(model, batch_size, parameters):
    workload = Workload(model, batch_size, 1024, optimizer_implementation="fused")
    tracked = track_step(workload)
    assert tracked.total_bytes > 20e9  # more than this test could allocate everywhere
    assert predict_memory(workload).peak_bytes == pytest.approx(tracked.total_bytes, rel=0.01)
    assert tracked.phase == "backward"
    assert tracked.categories["parameters"] == 4 * parameters


@pytest.mark.parametrize(
    ("table", "median", "largest"),
    [("memory-tracked.csv", 2e-6, 0.0123), ("memory-allocator.csv", 1.01e-4, 0.0297)],
)
def test_the_published_errors_are_those_of_today(table, median, largest):
    recorded = pd.read_csv(project_root() / "data" / "xeon-2-cores" / "study-memory" / table)
    peaks = [predict_memory(Workload.of(row)).peak_bytes for row in recorded.to_dict("records")]
    error = (peaks / recorded["measured_bytes"] - 1).abs()
    assert error.median() <= median
    assert error.max() <= largest


def test_the_states_are_those_of_the_course():
    # Its printout for GPT-2 Small: 474.70, 474.70, 949.40, together 1898.80 (MiB).
    sizes = [f"{size / MIB:.2f}" for size in estimated_states(Workload("gpt2")).values()]
    assert sizes == ["474.70", "474.70", "949.40"]
    assert f"{sum(estimated_states(Workload('gpt2')).values()) / MIB:.2f}" == "1898.80"


def test_a_gradient_waits_for_the_update_and_activations_do_not():
    prediction = predict_memory(Workload("gpt2", 8, 1024))
    assert "gradients" not in prediction.at("loss").components
    assert prediction.at("update").components["gradients"] == 4 * 124_439_808
    assert "feed-forward" not in prediction.at("update").components
    # With accumulation the gradients of the passes before are there in every pass.
    later = predict_memory(Workload("gpt2", 8, 1024, gradient_accumulation=2))
    assert later.at("loss").components["gradients"] == 4 * 124_439_808


def test_the_largest_batch_fits_and_the_next_does_not():
    for options in ({}, {"precision": "bfloat16"}, {"activation_checkpointing": True}):
        workload = Workload("gpt2-medium", 1, 1024, **options)
        batch = largest_batch(workload, 40e9)
        assert predict_memory(replace(workload, batch_size=batch)).peak_bytes <= 40e9
        assert predict_memory(replace(workload, batch_size=batch + 1)).peak_bytes > 40e9


def test_nothing_fits_where_the_states_do_not():
    # 16 bytes a parameter of gpt2-xl are 24.9 GB.
    assert largest_batch(Workload("gpt2-xl", 1, 1024), 24e9) == 0
    assert "no batch is predicted to fit" in what_would_fit(Workload("gpt2-xl"), 20e9)
    advice = what_would_fit(Workload("gpt2", 64, 1024), 23e9)
    assert advice.startswith("largest batch predicted to fit: 17,")
    assert "--activation_checkpointing" in advice
    # One sequence has fewer tokens than this loss is in pieces, and eight pieces need more memory.
    advice = what_would_fit(Workload("gpt2", 64, 128, loss_chunks=256), 4e9)
    assert "with --loss_chunks 256" in advice


def test_padding_of_the_vocabulary_is_in_the_model_but_no_token():
    workload = Workload.of({"model": "gpt2", "vocab_size": 100_000, "seed": 1}, vocab_multiple=64)
    assert workload.unpadded.vocab_size == 100_000
    assert workload.config.vocab_size == 100_032


def test_a_compiled_step_is_refused_in_one_line():
    with pytest.raises(UserError, match="leave out --compile"):
        track_step(replace(PICO, compile=True))
