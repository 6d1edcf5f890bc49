"""The time of passes on a GPU, against steps that were measured on one."""

from __future__ import annotations

from dataclasses import replace

import pytest

from common.perfmodel.architectures.hugging_face import model_of
from common.perfmodel.architectures.published_sizes import architecture_of
from common.perfmodel.cluster.job import Job
from common.perfmodel.cluster.pass_time import forward_s, step_s
from common.perfmodel.one_device.peaks import known_peak
from common.runtime.paths import project_root
from common.studies.model_steps import by_case

H100, H200 = known_peak("NVIDIA H100 80GB HBM3"), known_peak("NVIDIA H200")
LAUNCHED_SLOWLY = ("llama-2048-batch-1", "t5-base", "vit-base")
"""Cases whose kernels waited for the host: their rounds differ by a tenth and more."""
WITHOUT_SEARCH = ("resnet-50-tf32",)
"""Cases whose convolutions cuDNN did not search the fastest kernels for."""
WRITTEN_OUT = ("t5-base", "llama-2048-tf32")
"""Cases whose attention is not fused, as transformers runs them there."""


@pytest.fixture(scope="module")
def cases():
    pytest.importorskip("transformers")
    return by_case(project_root() / "data" / "h200-1" / "study-models").set_index("case")


def test_steps_that_nothing_was_fitted_to_take_as_long_as_predicted(cases):
    held_out = cases[cases["held_out"]].dropna().drop([*LAUNCHED_SLOWLY, *WITHOUT_SEARCH])
    assert len(held_out) >= 6
    assert held_out["step_error"].abs().max() < 0.12
    assert held_out["step_error"].abs().median() < 0.05


def test_steps_that_wait_for_the_host_take_longer_than_predicted(cases):
    waiting = cases.loc[list(LAUNCHED_SLOWLY)]
    assert (waiting["step_error"] < -0.2).all()
    assert (waiting["high_ms"] / waiting["low_ms"] > 1.1).all()


def test_peaks_of_eager_steps_are_those_of_the_allocator(cases):
    eager = cases.dropna().drop(list(WRITTEN_OUT))
    eager = eager[~eager.index.str.endswith("compiled")]
    assert eager["peak_error"].abs().median() < 0.03
    assert eager["peak_error"].abs().max() < 0.08


def test_gpt2_on_another_gpu_reaches_what_was_measured_there():
    # data/h100-1/one-gpu: not compiled and compiled, tokens per second
    job = Job(architecture_of("gpt2", 1024), batch_size=8)
    for compiled, tokens_per_s in ((False, 279_000), (True, 410_000)):
        predicted = 8 * 1024 / step_s(replace(job, compile=compiled), H100)
        assert predicted == pytest.approx(tokens_per_s, rel=0.2)


@pytest.mark.parametrize("name", ["gpt2", "resnet"])
def test_tf32_has_no_effect_on_a_gpu_without_it(name):
    layers = architecture_of("gpt2", 1024)
    if name == "resnet":
        layers = model_of({"model_type": "resnet"}, name).architecture(None)
    quick, v100 = (known_peak(gpu) for gpu in ("A100-SXM4-80GB", "V100-SXM2-32GB"))
    seconds = {
        (peak.device, tf32): step_s(Job(layers, precision="float32", tf32=tf32), peak)
        for peak in (quick, v100)
        for tf32 in (False, True)
    }
    assert seconds[v100.device, True] == seconds[v100.device, False]
    assert seconds[quick.device, True] < seconds[quick.device, False]


def test_parts_of_a_layer_add_up():
    job = Job(architecture_of("llama-2-7b", 2048))
    [block] = job.architecture.blocks
    whole = forward_s(job, block, H200)
    products = forward_s(job, replace(block, activations=type(block.activations)()), H200)
    moved = forward_s(job, replace(block, forward_flops=0, attention_flops=0), H200)
    assert whole == pytest.approx(products + moved)
    # attention, counted whole, takes half as long again as other products
    without = forward_s(job, replace(block, attention_flops=0), H200)
    share = block.attention_flops / block.forward_flops
    assert (whole - moved) / (without - moved) == pytest.approx(1 + share / 2)
    twice = replace(H200, memory_bytes_per_s=2 * H200.memory_bytes_per_s)
    assert forward_s(job, block, twice) == pytest.approx(products + moved / 2)


def test_what_is_computed_again_takes_time_again():
    job = Job(architecture_of("llama-2-7b", 2048), batch_size=2)
    step = {
        kind: step_s(replace(job, checkpointing=kind), H200)
        for kind in ("none", "selective", "block")
    }
    blocks_s = 2 * sum(b.count * forward_s(job, b, H200) for b in job.architecture.blocks)
    assert step["block"] - step["none"] == pytest.approx(blocks_s)
    assert step["selective"] - step["none"] == pytest.approx(blocks_s / 2)
