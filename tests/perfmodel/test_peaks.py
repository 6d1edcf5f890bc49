"""The table of GPU peaks against what follows from the hardware: units × operations × clock.

A peak is multiprocessors × operations per clock of each × boost clock, and a bandwidth is bus width
× data rate. NVIDIA prints these apart from the peaks, and none knows of sparsity: a figure that
should have been halved is out by a factor of two.
"""

from __future__ import annotations

import pytest

from common.perfmodel.one_device.peaks import GPUS, known_peak

# Multiprocessors, dense float16 operations per clock and multiprocessor with float32 accumulation,
# boost clock in GHz; memory bus in bits and data rate in Gbit/s.
HARDWARE = {
    "Tesla V100-PCIE-16GB": (80, 1024, 1.38, 4096, 1.752),
    "Tesla V100-SXM2-32GB": (80, 1024, 1.53, 4096, 1.752),
    "Tesla T4": (40, 1024, 1.59, 256, 10),
    "TITAN RTX": (72, 1024, 1.77, 384, 14),
    "Quadro RTX 8000": (72, 1024, 1.77, 384, 14),
    "NVIDIA GeForce RTX 2080 Ti": (68, 512, 1.545, 352, 14),
    "NVIDIA RTX A4000": (48, 1024, 1.56, 256, 14),
    "NVIDIA RTX A5000": (64, 1024, 1.695, 384, 16),
    "NVIDIA A10": (72, 1024, 1.695, 384, 12.5),
    "NVIDIA A30": (56, 2048, 1.44, 3072, 2.43),
    "NVIDIA A40": (84, 1024, 1.74, 384, 14.5),
    "NVIDIA A100-SXM4-40GB": (108, 2048, 1.41, 5120, 2.43),
    "NVIDIA A100-SXM4-80GB": (108, 2048, 1.41, 5120, 3.186),
    "NVIDIA A100 80GB PCIe": (108, 2048, 1.41, 5120, 3.024),
    "NVIDIA RTX A6000": (84, 1024, 1.8, 384, 16),
    "NVIDIA GeForce RTX 3090": (82, 512, 1.695, 384, 19.5),
    "NVIDIA GeForce RTX 4090": (128, 512, 2.52, 384, 21),
    "NVIDIA L4": (58, 1024, 2.04, 192, 12.5),
    "NVIDIA L40S": (142, 1024, 2.52, 384, 18),
    "NVIDIA H100 PCIe": (114, 4096, 1.62, 5120, 3.2),
    "NVIDIA H100 80GB HBM3": (132, 4096, 1.83, 5120, 5.24),
    "NVIDIA H200": (132, 4096, 1.83, 6144, 6.25),
    # 304 compute units of 2,048 operations, as AMD prints them
    "AMD Instinct MI300X": (304, 2048, 2.1, 8192, 5.2),
}

# GiB in all, as torch names them where a GPU is full: a little less than the chips hold.
REPORTED_GIB = {
    "Tesla V100-SXM2-16GB": 15.78,
    "NVIDIA A100-SXM4-40GB": 39.39,
    "NVIDIA A100-SXM4-80GB": 79.15,
    "NVIDIA H100 80GB HBM3": 79.10,
    "AMD Instinct MI300X": 191.98,
}


@pytest.mark.parametrize("name", HARDWARE)
def test_peaks_follow_from_the_hardware(name: str) -> None:
    multiprocessors, per_clock, ghz, bus_bits, gbit_per_s = HARDWARE[name]
    peak = known_peak(name)
    expected = multiprocessors * per_clock * ghz * 1e9
    assert peak.flops("float16") == pytest.approx(expected, rel=0.03)
    assert peak.memory_bytes_per_s == pytest.approx(bus_bits / 8 * gbit_per_s * 1e9, rel=0.03)


@pytest.mark.parametrize("name", REPORTED_GIB)
def test_memory_is_what_drivers_report_and_what_they_keep(name: str) -> None:
    reported = REPORTED_GIB[name] * 2**30
    assert reported <= known_peak(name).memory_bytes <= reported * 1.02


@pytest.mark.parametrize("name", GPUS)
def test_every_entry_is_of_one_piece(name: str) -> None:
    peak = known_peak(name)
    # The matrix units do TF32 at half the rate of 16 bits, and bfloat16 at that of float16; the
    # CUDA cores' float32 is never above TF32.
    if peak.flops("bfloat16"):
        assert peak.flops("bfloat16") == peak.flops("float16")
        tf32 = peak.flops("float32", tf32=True)
        assert tf32 == pytest.approx(peak.flops("float16") / 2, rel=0.03)
        assert peak.flops("float32") <= tf32 * 1.01
    assert 1e12 < peak.flops("float32") < peak.flops("float16") < 3e15
    assert "data sheet" in peak.source or "whitepaper" in peak.source
    assert 10 * 2**30 < peak.memory_bytes < 200 * 2**30


def test_a_precision_without_hardware_has_no_peak() -> None:
    volta = known_peak("Tesla V100-SXM2-16GB")
    assert volta.flops("bfloat16") is None
    # TF32 cannot be turned on there, so float32 stays what it is.
    assert volta.flops("float32", tf32=True) == volta.flops("float32") == 15.7e12
    # With 16 bits the setting means nothing.
    assert known_peak("NVIDIA H200").flops("bfloat16", tf32=True) == 989.5e12


def test_names_are_compared_whole() -> None:
    assert known_peak("NVIDIA A10").flops("float16") == 125e12
    assert known_peak("NVIDIA A100-PCIE-40GB").flops("float16") == 312e12
    assert known_peak("A100-SXM4-40GB") is not None  # as older drivers call it
    for unknown in (
        "NVIDIA A100",
        "NVIDIA A100-SXM4-40GB MIG 1g.5gb",
        "NVIDIA A10G",
        "NVIDIA GeForce RTX 3090 Ti",
        "NVIDIA H100 80GB HBM3 MIG 3g.40gb",
        "NVIDIA Foo",
        "Instinct MI300X",
        "",
    ):
        assert known_peak(unknown) is None, unknown
