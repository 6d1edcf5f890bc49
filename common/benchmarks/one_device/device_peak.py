"""The peaks of the device at hand: a GPU's from its data sheet, a CPU's measured.

No table holds what a processor can do with the cores, threads and clock that it has just now, so
there the peak is that of a large matrix product in each precision, and the bandwidth that of a
large copy. Best of several: noise only ever makes them slower.
"""

from __future__ import annotations

import itertools
import timeit
from collections.abc import Callable, Iterable

import pandas as pd
import torch

from common.perfmodel.one_device.peaks import DevicePeak, known_peak
from common.runtime.machine.environment import cpu_model
from common.runtime.wording import counted
from common.training.precision import DTYPES

SIZES = (256, 512, 1024, 2048, 4096)
"""Rows and columns of the square matrices: as large as ``PRODUCT_S`` allows."""
PRODUCT_S = 0.4
"""Upper bound on a product's time: one of 2048 takes a minute if hardware lacks its precision."""
COPY_BYTES = 256 * 2**20
"""More than most processors' caches hold."""
REPEATS = 5
SAMPLE_COLUMNS = ("quantity", "iteration", "amount", "unit", "time_ms")


def peak_of(device: torch.device, precisions: Iterable[str]) -> DevicePeak | None:
    """Returns the peak of ``device`` in these precisions, or None where it is not known.

    It takes seconds on a CPU, which is measured with torch's present number of threads.
    """
    if device.type == "cuda":
        return known_peak(torch.cuda.get_device_name(device))
    return cpu_peak(measure_cpu(precisions))


def measure_cpu(precisions: Iterable[str]) -> list[dict]:
    """Times a matrix product per precision and a copy; returns rows of SAMPLE_COLUMNS.

    ``amount`` is what a sample does: operations, or bytes read and written.
    """
    rows = []
    for precision in precisions:
        dtype = DTYPES[precision]
        size = largest_product(dtype)
        rows += _rows(precision, _time(_product(size, dtype), REPEATS), 2 * size**3, "operations")
    source = torch.ones(COPY_BYTES // 4)  # pages never written to would all be one page
    target = torch.zeros_like(source)
    copies = _time(lambda: target.copy_(source), REPEATS)
    return rows + _rows("memory", copies, 2 * COPY_BYTES, "bytes")


def largest_product(dtype: torch.dtype) -> int:
    """Returns the largest of ``SIZES`` whose product takes no longer than ``PRODUCT_S``."""
    # The next size's time is estimated from this one's, as a product of n × n matrices takes 2 n³
    # operations: running it may take a minute.
    for size, larger in itertools.pairwise(SIZES):
        if min(_time(_product(size, dtype), 1)) * (larger / size) ** 3 > PRODUCT_S:
            return size
    return SIZES[-1]


def cpu_peak(samples: list[dict]) -> DevicePeak:
    """Returns the best rate of each quantity in the samples of ``measure_cpu``."""
    table = pd.DataFrame(samples)
    best = (table["amount"] / table["time_ms"] * 1e3).groupby(table["quantity"]).max()
    products = table[table["unit"] == "operations"]
    size = round((products["amount"].max() / 2) ** (1 / 3))  # a product has 2 size³ operations
    threads = torch.get_num_threads()
    return DevicePeak(
        device=cpu_model(),
        flops_per_s=best.drop("memory").to_dict(),
        memory_bytes_per_s=float(best["memory"]),
        source=f"measured here: best of {REPEATS} products of {size} × {size} matrices and copies "
        f"of {COPY_BYTES >> 20} MiB, {counted(threads, 'thread')}",
    )


def peak_table(peak: DevicePeak | None) -> pd.DataFrame:
    """Returns ``device-peak.csv``: a row per precision, or none where the peak is unknown."""
    columns = ["precision", "flops_per_s", "memory_bytes_per_s", "source", "device"]
    rates = peak.flops_per_s.items() if peak else ()
    rows = [(*rate, peak.memory_bytes_per_s, peak.source, peak.device) for rate in rates]
    return pd.DataFrame(rows, columns=columns)


def _product(size: int, dtype: torch.dtype) -> Callable[[], object]:
    left, right = (torch.randn(size, size).to(dtype) for _ in range(2))
    out = torch.empty_like(left)
    return lambda: torch.mm(left, right, out=out)


def _time(work: Callable[[], object], repeats: int) -> list[float]:
    """Returns the seconds of each of ``repeats`` calls, after one for warm-up."""
    work()
    return timeit.repeat(work, repeat=repeats, number=1)


def _rows(quantity: str, times_s: list[float], amount: int, unit: str) -> list[dict]:
    return [
        dict(zip(SAMPLE_COLUMNS, (quantity, iteration, amount, unit, time_s * 1e3), strict=True))
        for iteration, time_s in enumerate(times_s)
    ]
