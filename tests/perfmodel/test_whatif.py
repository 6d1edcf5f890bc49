"""What-ifs: a ring's cost on other numbers of ranks, and how b* moves."""

import numpy as np
import pytest
from perfmodel_support import MIB, make_profile

from common.perfmodel.collectives import AlphaBeta, MeasuredAllReduce, scaled, with_latency
from common.perfmodel.ddp.profile import BackwardProfile
from common.perfmodel.model import DdpModel
from common.perfmodel.whatif import best_caps, cases, near_interval, scale_ranks


@pytest.fixture
def profile() -> BackwardProfile:
    return make_profile([MIB] * 64, np.linspace(0.001, 0.064, 64))


@pytest.mark.parametrize("ranks", [2, 3, 8, 64])
def test_a_ring_makes_two_passes_of_n_minus_1_steps(ranks: int) -> None:
    # One step costs 10 µs plus its bytes over 1 GB/s; a ring moves x/n bytes in 2(n−1) steps.
    def ring(n: int) -> AlphaBeta:
        return AlphaBeta(2 * (n - 1) * 10e-6, 1e9 / (2 * (n - 1) / n))

    scaled = scale_ranks(ring(4), 4, ranks)
    assert scaled.alpha_s == pytest.approx(ring(ranks).alpha_s)
    assert scaled.bandwidth_bytes_per_s == pytest.approx(ring(ranks).bandwidth_bytes_per_s)


def test_b_star_grows_with_latency(profile: BackwardProfile) -> None:
    table = best_caps(cases(DdpModel(profile, AlphaBeta(1e-4, 1e9)), 2, (1, 4, 16)))
    alpha = table[table["quantity"] == "latency α"].sort_values("factor")
    assert alpha["closed_form_mib"].is_monotonic_increasing
    # communication-bound at 1 GB/s: the square-root law doubles b* for four times the latency
    ratios = alpha["closed_form_mib"].to_numpy()[1:] / alpha["closed_form_mib"].to_numpy()[:-1]
    assert ratios == pytest.approx([2, 2], rel=0.05)


def test_latency_added_to_each_bucket_counts_as_the_links_own(profile: BackwardProfile) -> None:
    # Nothing is slowed and one bucket is under way at a time: 0.3 of 0.4 ms may stand in either.
    added = DdpModel(profile, AlphaBeta(1e-4, 1e9), added_latency_s=3e-4)
    own = DdpModel(profile, AlphaBeta(4e-4, 1e9))
    tables = [best_caps(cases(model, 2, (0.5, 1, 4))) for model in (added, own)]
    # More ranks make more turns on the link, and an added latency once a bucket all the same.
    tables = [table[table["quantity"] != "ranks n (ring)"] for table in tables]
    assert len(tables[0]) == 4 * 3
    for column in ("best_mib", "closed_form_mib", "total_ms"):
        assert tables[0][column].tolist() == pytest.approx(tables[1][column].tolist())


def test_only_whole_numbers_of_ranks_are_asked_about(profile: BackwardProfile) -> None:
    found = cases(DdpModel(profile, AlphaBeta(1e-4, 1e9)), 2, (0.25, 0.5, 1, 2))
    assert [case.factor for case in found if case.quantity.startswith("ranks")] == [1, 2]


def test_the_near_interval_holds_b_star(profile: BackwardProfile) -> None:
    best = DdpModel(profile, AlphaBeta(1e-4, 1e9)).best_cap()
    low, high = near_interval(best)
    assert low <= best.cap_mib <= high


def test_at_a_factor_of_one_the_system_is_the_one_that_was_given(profile: BackwardProfile) -> None:
    curve = MeasuredAllReduce([4, 2**20, 2**26], [3e-4, 2e-4, 5e-2])  # with a dip
    crowded = MeasuredAllReduce([4, 2**20, 2**26], [2e-4, 2e-4, 5e-2])
    model = DdpModel(profile, curve, in_flight=2, crowded_network=crowded)
    table = best_caps(cases(model, 2, (1,)))
    assert len(table) == 5
    assert set(table["best_mib"]) == {model.best_cap().cap_mib}
    assert table["total_ms"].to_numpy() == pytest.approx(model.best_cap().total_s * 1e3)


def test_a_curve_is_scaled_in_latency_and_transfer() -> None:
    curve = MeasuredAllReduce([4, 100, 1000], [3.0, 2.0, 5.0])
    assert scaled(curve, latency=2).times_s.tolist() == pytest.approx([5.0, 4.0, 7.0])
    assert scaled(curve, transfer=2).times_s.tolist() == pytest.approx([4.0, 2.0, 8.0])


def test_another_latency_shifts_the_whole_curve() -> None:
    curve = MeasuredAllReduce([4, 100, 1000], [3.0, 2.9, 5.0])
    shifted = with_latency(curve, 1.0)
    # 3.0 -> 1.0, 5.0 -> 3.0; the dip below the first time stays at the latency
    assert shifted.times_s.tolist() == pytest.approx([1.0, 1.0, 3.0])
