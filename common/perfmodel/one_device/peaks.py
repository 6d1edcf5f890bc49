"""Upper bounds of a GPU: operations and bytes per second, as its maker's data sheet says.

The denominators of MFU and of a roofline, and what a model has to fit into. Figures are *dense*:
where a data sheet prints one "with sparsity", which a training step cannot use, half of it stands
here. They are those of products that accumulate in float32, as PyTorch's do; GeForce cards are
twice as fast when they accumulate in float16. NVIDIA's matrix units do not compute in float32, so
that figure is the CUDA cores'.

Data sheets call GiB of memory GB: an "80 GB" A100 has 80 GiB. The driver keeps one to two per cent
of it, and error correction of GDDR6 another sixteenth (T4, A10).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace


@dataclass(frozen=True)
class DevicePeak:
    """The highest rates of a device.

    Attributes:
        device: name of the device.
        flops_per_s: precision (float32, tf32, bfloat16 or float16) → rate; a precision that the
            hardware lacks is absent.
        memory_bytes_per_s: bandwidth of its memory, reading and writing together.
        source: origin of the figures, for a caption.
        memory_bytes: size of its memory; None of a device whose rates were measured.
    """

    device: str
    flops_per_s: Mapping[str, float]
    memory_bytes_per_s: float
    source: str
    memory_bytes: int | None = None

    def flops(self, precision: str, tf32: bool = False) -> float | None:
        """Returns the peak of matrix products in ``precision``, in FLOP/s, or None without one.

        With ``tf32``, float32 products take the TF32 units where the device has them.
        """
        if precision == "float32" and tf32 and "tf32" in self.flops_per_s:
            return self.flops_per_s["tf32"]
        return self.flops_per_s.get(precision)


def copy_s_per_byte(memory_bytes_per_s: float) -> float:
    """Returns the seconds in which a byte is copied in memory, which reads and writes it."""
    return 2 / memory_bytes_per_s


def known_peak(device_name: str) -> DevicePeak | None:
    """Returns a GPU's peaks by its name as ``torch.cuda.get_device_name()`` gives it, or None.

    Names are compared whole: a slice of a GPU (MIG), a variant of another clock or a GPU that only
    begins like a known one has other peaks.
    """
    name = device_name.removeprefix("NVIDIA ").removeprefix("Tesla ")  # older drivers name no maker
    peak = GPUS.get(name)
    return replace(peak, device=device_name) if peak else None


def _sheet(
    source: str, memory_gib: int, gb_per_s: float, float32: float, tf32: float | None, half: float
) -> DevicePeak:
    """Makes a row of the table: rates in TFLOP/s; GPUs without TF32 have no bfloat16 either."""
    rates = {"float32": float32, "tf32": tf32, "bfloat16": half if tf32 else None, "float16": half}
    flops = {name: rate * 1e12 for name, rate in rates.items() if rate is not None}
    return DevicePeak("", flops, gb_per_s * 1e9, source, memory_gib * 2**30)


V100 = "NVIDIA's V100 data sheet"
TURING = "NVIDIA's Turing whitepaper"
A100 = "NVIDIA's A100 data sheet"
GA102 = "NVIDIA's GA102 whitepaper 2.0"
RTX_A = "NVIDIA's RTX A{} data sheet, halved: printed with sparsity"
ADA = "NVIDIA's Ada whitepaper"
SPARSE = "data sheet, halved: printed with sparsity"
H100 = f"NVIDIA's H100 {SPARSE}"
H100_96 = (
    f"{H100}; memory of torchtitan's benchmark tables, clocks assumed those of the SXM module of "
    "700 W, though it has 500 W"
)
H200 = f"NVIDIA's H200 {SPARSE}"
GH200 = f"NVIDIA's GH200 {SPARSE}"
BLACKWELL = f"NVIDIA's Blackwell {SPARSE}"

# By name without NVIDIA's. Memory in GiB, its bandwidth in GB/s, then TFLOP/s: float32, TF32 and
# 16 bits.
GPUS: dict[str, DevicePeak] = {
    "V100-PCIE-16GB": _sheet(V100, 16, 900, 14.0, None, 112),
    "V100-PCIE-32GB": _sheet(V100, 32, 900, 14.0, None, 112),
    "V100-SXM2-16GB": _sheet(V100, 16, 900, 15.7, None, 125),
    "V100-SXM2-32GB": _sheet(V100, 32, 900, 15.7, None, 125),
    "V100-SXM3-32GB": _sheet(V100, 32, 900, 15.7, None, 125),  # in a DGX-2
    "V100S-PCIE-32GB": _sheet(V100, 32, 1134, 16.4, None, 130),
    "T4": _sheet("NVIDIA's T4 data sheet and product brief", 16, 320, 8.1, None, 65),
    "TITAN RTX": _sheet("NVIDIA's TITAN RTX data sheet", 24, 672, 16.3, None, 130),
    "Quadro RTX 6000": _sheet(TURING, 24, 672, 16.3, None, 130.5),
    "Quadro RTX 8000": _sheet(TURING, 48, 672, 16.3, None, 130.5),
    "GeForce RTX 2080 Ti": _sheet(TURING, 11, 616, 13.4, None, 53.8),
    "A10": _sheet("NVIDIA's A10 data sheet", 24, 600, 31.2, 62.5, 125),
    "A30": _sheet("NVIDIA's A30 data sheet", 24, 933, 10.3, 82, 165),
    "A40": _sheet("NVIDIA's A40 data sheet", 48, 696, 37.4, 74.8, 149.7),
    "A100-PCIE-40GB": _sheet(A100, 40, 1555, 19.5, 156, 312),
    "A100-SXM4-40GB": _sheet(A100, 40, 1555, 19.5, 156, 312),
    "A100 80GB PCIe": _sheet(A100, 80, 1935, 19.5, 156, 312),
    "A100-SXM4-80GB": _sheet(A100, 80, 2039, 19.5, 156, 312),
    "RTX A4000": _sheet(RTX_A.format(4000), 16, 448, 19.2, 76.7 / 2, 153.4 / 2),
    "RTX A5000": _sheet(RTX_A.format(5000), 24, 768, 27.8, 111.1 / 2, 222.2 / 2),
    "RTX A6000": _sheet(GA102, 48, 768, 38.7, 77.4, 154.8),
    "GeForce RTX 3090": _sheet(GA102, 24, 936, 35.6, 35.6, 71),
    "GeForce RTX 4090": _sheet(ADA, 24, 1008, 82.6, 82.6, 165.2),
    "RTX 6000 Ada Generation": _sheet(ADA, 48, 960, 91.1, 182.1, 364.2),
    "L4": _sheet(f"NVIDIA's L4 {SPARSE}", 24, 300, 30.3, 120 / 2, 242 / 2),
    "L40": _sheet("NVIDIA's L40 data sheet", 48, 864, 90.5, 90.5, 181.05),
    "L40S": _sheet("NVIDIA's L40S data sheet", 48, 864, 91.6, 183, 362.05),
    "H100 PCIe": _sheet(H100, 80, 2000, 51, 756 / 2, 1513 / 2),
    "H100 80GB HBM3": _sheet(H100, 80, 3350, 67, 989 / 2, 1979 / 2),  # the SXM module
    "H100 96GB HBM2e": _sheet(H100_96, 96, 2400, 67, 989 / 2, 1979 / 2),
    "H100 NVL": _sheet(H100, 94, 3900, 60, 835 / 2, 1671 / 2),
    # A Grace Hopper is named by the memory of its CPU; the GPU has 96 GB in both.
    "GH200 120GB": _sheet(GH200, 96, 4000, 67, 989 / 2, 1979 / 2),
    "GH200 480GB": _sheet(GH200, 96, 4000, 67, 989 / 2, 1979 / 2),
    "GH200 144G HBM3e": _sheet(GH200, 144, 4900, 67, 989 / 2, 1979 / 2),
    "H200": _sheet(H200, 141, 4800, 67, 989 / 2, 1979 / 2),  # the SXM module
    "H200 NVL": _sheet(H200, 141, 4800, 60, 835 / 2, 1671 / 2),
    "B200": _sheet(BLACKWELL, 180, 7700, 75, 2200 / 2, 4500 / 2),  # in an HGX B200
    "GB200": _sheet(BLACKWELL, 186, 8000, 80, 2500 / 2, 5000 / 2),
    "AMD Instinct MI300X": _sheet("AMD's MI300X data sheet", 192, 5300, 163.4, 653.7, 1307.4),
}

WITH_FLOAT8 = ("H100", "H200", "GH200", "B200", "GB200", "L4", "RTX 6000 Ada", "GeForce RTX 40")
"""Beginnings of the names of NVIDIA's GPUs whose matrix units compute in float8, and do so twice as
fast as in 16 bits (data sheets of Ada, Hopper and Blackwell; MI300X's, too)."""


def has_float8(device_name: str) -> bool:
    """Returns whether a GPU of the table computes matrix products in float8."""
    return device_name.startswith((*WITH_FLOAT8, "AMD Instinct MI300X"))
