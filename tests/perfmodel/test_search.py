"""The search for the best cap against brute force over every cap of one byte more."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from perfmodel_support import MIB, gpt2_profile, make_profile, multiples, networks, refused

from common.perfmodel.buckets import assign_buckets
from common.perfmodel.collectives import AlphaBeta
from common.perfmodel.ddp.bucketings import choose_caps
from common.perfmodel.ddp.profile import DdpCosts
from common.perfmodel.model import DdpModel

COSTS = DdpCosts(
    copy_in_s_per_byte=0.01,
    copy_out_s_per_byte=0.02,
    communication_slowdown=1.2,
    compute_slowdown=1.5,
)


@st.composite
def small_profiles(draw):
    """Draws few bytes, so that every cap there is can be tried."""
    count = draw(st.integers(1, 8))
    sizes = draw(st.lists(st.integers(1, 30), min_size=count, max_size=count))
    gaps = draw(st.lists(multiples(0, 3), min_size=count, max_size=count))
    return make_profile(sizes, np.cumsum(gaps), tail_s=draw(multiples(0, 1)))


def every_cap(profile, network, costs) -> dict[int, float]:
    """Simulates T of each cap in bytes, up to one that holds all gradients."""
    return {
        cap: DdpModel(profile, network, costs=costs).at_cap(cap / MIB).total_s
        for cap in range(1, profile.total_bytes + 1)
    }


@given(small_profiles(), networks(), st.sampled_from([DdpCosts(), COSTS]))
def test_the_search_finds_what_trying_every_cap_finds(profile, network, costs):
    best = DdpModel(profile, network, costs=costs).best_cap()
    times = every_cap(profile, network, costs)
    sizes = profile.sizes_bytes.tolist()
    assert best.total_s == pytest.approx(min(times.values()))
    # The cap itself, in MiB as DDP takes it, gives that time, and it is a searched cap.
    chosen = DdpModel(profile, network, costs=costs).at_cap(best.cap_mib)
    assert chosen.total_s == best.total_s == best.predicted_s(best.cap_mib)
    # Of caps that are equally good a larger one is taken: fewer all-reduces.
    largest = max(cap for cap, total in times.items() if total == best.total_s)
    assert assign_buckets(sizes, int(best.cap_mib * MIB)) == assign_buckets(sizes, largest)
    owners = []
    for cap, total in times.items():
        (owner,) = (c for c in best.candidates if c.contains(cap / MIB))
        owners.append(best.candidates.index(owner))
        assert owner.total_s == best.predicted_s(cap / MIB) == total
        assert owner.num_buckets == len(assign_buckets(sizes, cap))
        near = any(low <= cap / MIB <= high for low, high in best.near_mib)
        assert near == (total <= best.total_s * 1.01)
    # In ascending order, none of them empty, and no two with the same buckets.
    assert sorted(owners) == owners
    assert set(owners) == set(range(len(best.candidates)))
    different = {str(assign_buckets(sizes, cap)) for cap in times}
    assert len(best.candidates) == len(different)
    # The intervals ascend and are maximal: between two of them lies a cap that is not near.
    for (_, high), (low, _) in pairwise(best.near_mib):
        assert any(high * MIB < cap < low * MIB for cap in times)
    assert any(low <= best.cap_mib <= high for low, high in best.near_mib)


@given(
    small_profiles(),
    networks(),
    st.lists(st.integers(1, 260).map(lambda cap: cap / MIB), min_size=1, max_size=12),
)
def test_of_given_caps_the_best_is_one_of_them(profile, network, caps):
    best = DdpModel(profile, network).best_cap(caps)
    times = {cap: DdpModel(profile, network).at_cap(cap).total_s for cap in caps}
    assert best.cap_mib in caps
    assert times[best.cap_mib] == best.total_s == pytest.approx(min(times.values()))
    for cap, total in times.items():
        assert best.predicted_s(cap) == total
    # Caps with the same buckets are one candidate.
    sizes = profile.sizes_bytes.tolist()
    assert len(best.candidates) == len({str(assign_buckets(sizes, int(c * MIB))) for c in caps})
    within = {cap for cap in caps if times[cap] <= best.total_s * 1.01}
    inside = {cap for cap in caps if any(low <= cap <= high for low, high in best.near_mib)}
    assert inside == within


def test_the_best_of_240_caps_for_gpt2_large_is_the_minimum_by_brute_force():
    # A network on which both many small and few large buckets are bad.
    profile = gpt2_profile("gpt2-large", seconds_per_gib=0.25)
    network = AlphaBeta(2e-4, 12e9)
    caps = np.geomspace(0.25, 1000, 240).tolist()
    best = DdpModel(profile, network).best_cap(caps)
    times = [DdpModel(profile, network).at_cap(cap).total_s for cap in caps]
    assert best.total_s == pytest.approx(min(times))
    assert times[caps.index(best.cap_mib)] == best.total_s
    assert 1 < len(best.candidates) < len(caps)
    # The best of all bucketings is at least as good as the best of some caps.
    assert DdpModel(profile, network).best_cap().total_s <= best.total_s


def test_a_cap_matches_b_star_only_where_it_is_as_fast():
    profile, network = make_profile([10, 10, 10], [1, 2, 3]), AlphaBeta(0.4, 20)
    best = DdpModel(profile, network).best_cap()
    times = every_cap(profile, network, DdpCosts())
    as_fast = [cap for cap, total in times.items() if total <= min(times.values()) * 1.001]
    slower = [cap for cap in times if cap not in as_fast]
    assert slower
    assert best.matched_by([slower[0] / MIB, as_fast[0] / MIB])
    assert not best.matched_by([cap / MIB for cap in slower])


def test_gradients_of_several_dtypes_are_searched_over_given_caps_or_a_grid():
    profile = make_profile([8, 4, 8, 4], [1.0, 2.0, 3.0, 4.0], kinds=["f64", "f32", "f64", "f32"])
    network = AlphaBeta(0.1, 10)
    caps = [4 / MIB, 9 / MIB, 100 / MIB]
    best = DdpModel(profile, network).best_cap(caps)
    times = [DdpModel(profile, network).at_cap(cap).total_s for cap in caps]
    assert best.total_s == pytest.approx(min(times))
    every = every_cap(profile, network, DdpCosts())
    anywhere = DdpModel(profile, network).best_cap()
    # There are so few bytes that the grid has all caps.
    assert anywhere.total_s == pytest.approx(min(every.values()))
    chosen = DdpModel(profile, network).at_cap(anywhere.cap_mib)
    assert chosen.total_s == anywhere.total_s


@pytest.mark.parametrize("asked_bytes", [1, 10, 25 * MIB])
def test_a_cap_that_was_not_among_the_given_ones_has_no_prediction(asked_bytes):
    # Below, between and above them; above, too, another cap may give other buckets.
    profile = make_profile([8, 8, 8], [1.0, 2.0, 3.0])
    best = DdpModel(profile, AlphaBeta(0.1, 10)).best_cap([4 / MIB, 12 / MIB])
    with refused("cap", asked_bytes / MIB, "not searched"):
        best.predicted_s(asked_bytes / MIB)


@pytest.mark.parametrize("caps", [[], [0], [1, -5], [float("nan")], [1, float("inf")]])
def test_caps_that_cannot_be_are_refused(caps):
    with refused("cap"):
        DdpModel(make_profile([8, 8], [1.0, 2.0]), AlphaBeta(0.1, 10)).best_cap(caps)


@pytest.mark.parametrize("cap_bytes", [1.9, 8.5, 10.5, 16.5, 23.9, 24, 25, 1000, 25 * MIB])
def test_every_cap_has_a_prediction_when_all_bucketings_were_searched(cap_bytes):
    # DDP rounds a cap down to bytes, so 8.5 bytes give the buckets of 8; and a cap beyond all
    # gradients gives the one bucket that a cap of their sum gives.
    profile = make_profile([8, 8, 8], [1.0, 2.0, 3.0])
    network = AlphaBeta(0.1, 10)
    expected = DdpModel(profile, network).at_cap(cap_bytes / MIB).total_s
    assert DdpModel(profile, network).best_cap().predicted_s(cap_bytes / MIB) == expected


def test_few_are_spread_from_the_most_buckets_allowed_to_one():
    chosen = choose_caps([1000] * 64, 5, 40)
    for cap in chosen:
        assert len(assign_buckets([1000] * 64, int(cap.cap_mib * MIB))) == cap.num_buckets
    assert [cap.num_buckets for cap in chosen] == sorted(
        (cap.num_buckets for cap in chosen), reverse=True
    )
    assert len(chosen) == 5
    assert chosen[0].num_buckets == 32  # 64 would be more than 40
    assert chosen[-1].num_buckets == 1
    assert len(choose_caps([1, 1], 5, 40)) == 2  # there are no more


@pytest.mark.parametrize(("sizes", "count"), [([8], 3), ([8, 8], 1)])
def test_fewer_than_two_are_refused(sizes, count):
    with refused("at least 2 are needed"):
        choose_caps(sizes, count, 10)
