"""Which device a job file asks for before it starts ranks."""

from __future__ import annotations

import pytest

from common.errors import UserError
from common.runtime import job_device


@pytest.mark.parametrize(
    ("arguments", "asked"),
    [
        ("--model gpt2 --rounds 2", [None]),
        ("--device cpu --model gpt2 --numel 1 2", ["cpu"]),
        ("--device cpu --model gpt2 --device=cuda", ["cuda"]),  # FLAGS come last and win
        ("--device_mesh 2 --dev 3", [None]),
        ("--config laptop.yaml", []),  # it may say cpu
        ("--config=laptop.yaml --device cuda", ["cuda"]),
    ],
)
def test_the_last_device_among_a_scripts_flags_is_asked_for(monkeypatch, arguments, asked):
    devices = []
    monkeypatch.setattr(job_device, "choose_device", lambda device, **_: devices.append(device))
    job_device.main(arguments.split())
    assert devices == asked


def test_an_unusable_gpu_is_refused_with_the_variable_that_job_files_have(monkeypatch):
    monkeypatch.setenv("SLURM_GPUS_ON_NODE", "4")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    with pytest.raises(UserError, match=r"granted 4 GPUs.*DEVICE=cpu"):
        job_device.main(["--num_steps", "3"])
    job_device.main(["--device", "cpu"])
