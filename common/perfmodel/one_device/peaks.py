"""Upper bounds of a GPU: operations and bytes per second, as its maker's data sheet says.

The denominators of MFU and of a roofline. Figures are *dense*: where a data sheet prints one "with
sparsity", which a training step cannot use, half of it stands here. They are those of products that
accumulate in float32, as PyTorch's do; GeForce cards are twice as fast when they accumulate in
float16. NVIDIA's matrix units do not compute in float32, so that figure is the CUDA cores'.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

PRECISIONS = ("float32", "tf32", "bfloat16", "float16")


@dataclass(frozen=True)
class DevicePeak:
    """The highest rates of a device.

    Attributes:
        device: name of the device.
        flops_per_s: precision (of ``PRECISIONS``) → rate; a precision that the hardware lacks is
            absent.
        memory_bytes_per_s: bandwidth of its memory, reading and writing together.
        source: origin of the figures, for a caption.
    """

    device: str
    flops_per_s: Mapping[str, float]
    memory_bytes_per_s: float
    source: str

    def flops(self, precision: str, tf32: bool = False) -> float | None:
        """Returns the peak of matrix products in ``precision``, in FLOP/s, or None without one.

        With ``tf32``, float32 products take the TF32 units where the device has them.
        """
        if precision == "float32" and tf32 and "tf32" in self.flops_per_s:
            return self.flops_per_s["tf32"]
        return self.flops_per_s.get(precision)


def known_peak(device_name: str) -> DevicePeak | None:
    """Returns a GPU's peaks by its name as ``torch.cuda.get_device_name()`` gives it, or None.

    Names are compared whole: a slice of a GPU (MIG), a variant of another clock or a GPU that only
    begins like a known one has other peaks.
    """
    name = device_name.removeprefix("NVIDIA ").removeprefix("Tesla ")  # older drivers name no maker
    peak = GPUS.get(name)
    return replace(peak, device=device_name) if peak else None


def _sheet(
    source: str, gb_per_s: float, float32: float, tf32: float | None, half: float, bf16: bool = True
) -> DevicePeak:
    """Makes a row of the table: rates in TFLOP/s, bfloat16 as fast as float16 where it exists."""
    rates = {"float32": float32, "tf32": tf32, "bfloat16": half if bf16 else None, "float16": half}
    flops = {name: rate * 1e12 for name, rate in rates.items() if rate is not None}
    return DevicePeak("", flops, gb_per_s * 1e9, f"NVIDIA's {source}")


def _volta_or_turing(source: str, gb_per_s: float, float32: float, half: float) -> DevicePeak:
    """Makes a row for a GPU before Ampere, which has matrix units for float16 only."""
    return _sheet(source, gb_per_s, float32, None, half, bf16=False)


V100 = "V100 data sheet"
A100 = "A100 data sheet"
GA102 = "GA102 whitepaper 2.0"
ADA = "Ada whitepaper"
H100 = "H100 data sheet, halved: printed with sparsity"
H200 = "H200 data sheet, halved: printed with sparsity"
GH200 = "GH200 data sheet, halved: printed with sparsity"
BLACKWELL = "Blackwell data sheet, halved: printed with sparsity"

# By name without the maker's. Bandwidth in GB/s, then TFLOP/s: float32, TF32, 16 bits.
GPUS: dict[str, DevicePeak] = {
    "V100-PCIE-16GB": _volta_or_turing(V100, 900, 14.0, 112),
    "V100-PCIE-32GB": _volta_or_turing(V100, 900, 14.0, 112),
    "V100-SXM2-16GB": _volta_or_turing(V100, 900, 15.7, 125),
    "V100-SXM2-32GB": _volta_or_turing(V100, 900, 15.7, 125),
    "V100S-PCIE-32GB": _volta_or_turing(V100, 1134, 16.4, 130),
    "T4": _volta_or_turing("T4 data sheet and product brief", 320, 8.1, 65),
    "A10": _sheet("A10 data sheet", 600, 31.2, 62.5, 125),
    "A30": _sheet("A30 data sheet", 933, 10.3, 82, 165),
    "A40": _sheet("A40 data sheet", 696, 37.4, 74.8, 149.7),
    "A100-PCIE-40GB": _sheet(A100, 1555, 19.5, 156, 312),
    "A100-SXM4-40GB": _sheet(A100, 1555, 19.5, 156, 312),
    "A100 80GB PCIe": _sheet(A100, 1935, 19.5, 156, 312),
    "A100-SXM4-80GB": _sheet(A100, 2039, 19.5, 156, 312),
    "RTX A6000": _sheet(GA102, 768, 38.7, 77.4, 154.8),
    "GeForce RTX 3090": _sheet(GA102, 936, 35.6, 35.6, 71),
    "GeForce RTX 4090": _sheet(ADA, 1008, 82.6, 82.6, 165.2),
    "RTX 6000 Ada Generation": _sheet(ADA, 960, 91.1, 182.1, 364.2),
    "L4": _sheet("L4 data sheet, halved: printed with sparsity", 300, 30.3, 120 / 2, 242 / 2),
    "L40": _sheet("L40 data sheet", 864, 90.5, 90.5, 181.05),
    "L40S": _sheet("L40S data sheet", 864, 91.6, 183, 362.05),
    "H100 PCIe": _sheet(H100, 2000, 51, 756 / 2, 1513 / 2),
    "H100 80GB HBM3": _sheet(H100, 3350, 67, 989 / 2, 1979 / 2),  # the SXM module
    "H100 NVL": _sheet(H100, 3900, 60, 835 / 2, 1671 / 2),
    "GH200 480GB": _sheet(GH200, 4000, 67, 989 / 2, 1979 / 2),
    "H200": _sheet(H200, 4800, 67, 989 / 2, 1979 / 2),  # the SXM module
    "H200 NVL": _sheet(H200, 4800, 60, 835 / 2, 1671 / 2),
    "B200": _sheet(BLACKWELL, 7700, 75, 2200 / 2, 4500 / 2),  # in an HGX B200
    "GB200": _sheet(BLACKWELL, 8000, 80, 2500 / 2, 5000 / 2),
}
