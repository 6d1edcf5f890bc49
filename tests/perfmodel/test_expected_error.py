"""What users are told of a prediction's error: the regime they are in, and its recorded study."""

from __future__ import annotations

from dataclasses import replace

import pytest
from perfmodel_support import MIB, make_profile, refused, write_csv

from common.perfmodel.calibration import calibrated_model
from common.perfmodel.collectives import AlphaBeta
from common.perfmodel.expected_error import (
    ERROR_COLUMNS,
    ERRORS,
    expectation,
    expected_error,
    regime_of,
)
from common.perfmodel.model import DdpModel

PROFILE = make_profile([MIB] * 10, [0.1 * k for k in range(1, 11)])  # 10 MiB in 1 s


def model(communication_s: float) -> DdpModel:
    """Makes a model whose gradients take so long to reduce at once, and 1 s to compute."""
    return DdpModel(PROFILE, AlphaBeta(0.0, 10 * MIB / communication_s))


@pytest.mark.parametrize(
    ("communication_s", "regime"),
    [
        (9.0, "communication-bound"),
        (1.4, "communication-bound"),
        (1.3, "balanced"),
        (0.7, "balanced"),
        (0.6, "compute-bound"),
        (0.01, "compute-bound"),
    ],
)
def test_the_regime_is_the_nearest_by_ratio(communication_s, regime):
    assert regime_of(model(communication_s), loopback=False) == regime
    assert regime_of(model(communication_s), loopback=True) == "loopback"
    late = replace(model(communication_s), added_latency_s=0.01)
    assert regime_of(late, loopback=False) == "added latency"


def write_study(folder, name: str, date: str, median: float) -> None:
    """Writes one study with one regime."""
    (folder / name).mkdir(parents=True)
    row = ("balanced", 20, 0.05, median, 0.07, 0.2, "a machine", date)
    write_csv(folder / name / ERRORS, ",".join(ERROR_COLUMNS), [row])


def test_the_newest_study_counts(tmp_path):
    write_study(tmp_path, "one/study-accuracy", "2026-11-22", 0.03)
    write_study(tmp_path, "two/study-accuracy-again", "2026-11-23", 0.02)
    found = expected_error("balanced", tmp_path)
    assert (found.median, found.bucketings) == (0.02, 20)
    assert "a machine; 2026-11-23" in found.text()
    assert "2.0%" in found.text()
    with refused("replay"):
        expected_error("replay", tmp_path)
    with refused("no accuracy study"):
        expected_error("balanced", tmp_path / "one")


def test_of_gpus_nothing_is_promised():
    assert "not known" in expectation(model(1.0), "nccl", "NVLink", 1.0)
    assert "loopback" in expectation(model(1.0), "gloo", "TCP over loopback", 1.0)
    assert "balanced" in expectation(model(1.0), "gloo", "2 emulated hosts at 1 Gbit/s", 1.0)


def test_the_interval_holds_what_the_error_allows(tmp_path):
    write_study(tmp_path, "one/study-accuracy", "2026-11-22", 0.03)  # 90 % within 7 %
    found = expected_error("balanced", tmp_path)
    low_s, high_s = found.interval_s(2.0)
    # At both ends the prediction is off by 7 % of what was measured.
    assert [2.0 / low_s - 1, 2.0 / high_s - 1] == pytest.approx([0.07, -0.07])
    # Chance in the measurements adds to it, as independent errors do: 0.07² + 0.24² = 0.25².
    low_s, high_s = found.interval_s(2.0, chance=0.24)
    assert [2.0 / low_s - 1, 2.0 / high_s - 1] == pytest.approx([0.25, -0.25])
    assert found.interval_s(2.0, chance=3.0)[1] > 0  # however large


@pytest.mark.parametrize(
    ("backend", "latency_s", "in_flight"),
    [("gloo", 0.0, 2), ("nccl", 0.0, 1), (None, 0.0, 1), ("gloo", 0.008, 1)],
)
def test_the_backend_says_how_many_buckets_are_under_way(backend, latency_s, in_flight):
    network = AlphaBeta(0.0, 1e9)
    found = calibrated_model(
        PROFILE, network, crowded=network, backend=backend, added_latency_s=latency_s
    )
    assert found.in_flight == in_flight
    assert (found.crowded_network is None) == (in_flight == 1)
