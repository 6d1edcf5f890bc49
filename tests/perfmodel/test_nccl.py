"""NCCL's all-reduce from a cluster's description: by hand, against published peaks, and bounds."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from perfmodel_support import refused

from common.perfmodel.cluster.clusters import load_cluster
from common.perfmodel.cluster.nccl import (
    NO_RAMP,
    RAMP,
    NcclAllReduce,
    NcclRing,
    soft_minimum,
    with_measured,
)
from common.perfmodel.collectives import MeasuredAllReduce, bus_bandwidth
from common.perfmodel.tables import AllReduceTable

MIB = 2**20
A100, H100 = load_cluster("a100-ib"), load_cluster("h100-ib")


def by_name(model) -> dict:
    return {choice.name: choice for choice in model.choices}


def test_a_measured_table_holds_on_its_ranks_and_scales_others() -> None:
    sizes = np.array([2.0**20, 2.0**26, 2.0**30])
    model = NcclAllReduce(H100, 16)
    times = model.time_s(sizes) * [1.0, 3.0, 2.0]
    measured = with_measured(H100, AllReduceTable(MeasuredAllReduce(sizes, times), None, 16, "x"))
    assert NcclAllReduce(measured, 16).time_s(sizes) == pytest.approx(times)
    # Twice as slow from the largest size on, on any number of GPUs and in any collective.
    for kind in (NcclAllReduce, NcclRing):
        assert kind(measured, 64).time_s(2**33) == pytest.approx(2 * kind(H100, 64).time_s(2**33))
    with refused("x", "at most"):
        with_measured(
            load_cluster("a10-pcie"), AllReduceTable(MeasuredAllReduce(sizes, times), None, 16, "x")
        )


ONE_NODE = {
    "Ring/LL": (6.6 + 14 * 0.6, 87.7 * 8 / 14),
    "Ring/LL128": (14 + 14 * 1.9, 0.92 * 240 * 8 / 14),
    "Ring/Simple": (8.4 + 14 * 3.4, 240 * 8 / 14),
    "Tree/LL": (6.8 + 14 * 0.6, 0.92 * 240 / 3.8 / 2),
    "Tree/LL128": (14 + 14 * 1.25, 0.92 * 240 * 7 / 9 / 2),
    "Tree/Simple": (8.4 + 14 * 4.0, 0.92 * 240 / 2),
}
"""Ring: 14 hops; LL is limited by the GPU, LL128 to 0.92 of 240 GB/s, bus bandwidth · 8 / 14."""
FOUR_NODES = {
    "Ring/LL": (6.6 + 56 * 1.0 + 6 * 2.7, 20.4 * 32 / 62),
    "Ring/LL128": (14 + 56 * 1.9 + 6 * 4.0, 0.92 * 360 * 32 / 62),
    "Ring/Simple": (1.4 * (8.4 + 56 * 3.4 + 6 * 14), 360 * 32 / 62),
    "Tree/LL": (6.8 + 2 * (7 * 0.6 + 2 * 5), 20.4 / 2),
    "Tree/LL128": (14 + 2 * (7 * 1.25 + 2 * 8.5), 0.92 * 360 * 120 / 128 / 2),
    "Tree/Simple": (8.4 + 2 * (7 * 4 + 2 * 14), 0.92 * 360 / 2),
    "NVLSTree/Simple": (25 + 2 * 2 * 20.9, 45.5 * 8 * 32 / 62),
}
"""62 ring hops, 6 of them between nodes; two levels of tree. LL is Intel's 20.4 GB/s."""


@pytest.mark.parametrize(
    ("cluster", "gpus", "expected"), [(A100, 8, ONE_NODE), (H100, 32, FOUR_NODES)]
)
def test_latencies_and_bandwidths_are_those_by_hand(cluster, gpus, expected) -> None:
    choices = by_name(NcclAllReduce(cluster, gpus))
    assert set(choices) == set(expected)
    for name, (latency_us, gb_per_s) in expected.items():
        assert choices[name].latency_s == pytest.approx(latency_us * 1e-6), name
        assert choices[name].bandwidth_bytes_per_s == pytest.approx(gb_per_s * 1e9), name


def test_the_networks_latency_counts_once_a_hop_and_twice_for_simple() -> None:
    slow = by_name(NcclAllReduce(replace(H100, network_latency_us=3.0), 16))
    quick = by_name(NcclAllReduce(H100, 16))
    added = {
        name: (slow[name].latency_s - quick[name].latency_s) * 1e6
        for name in ("Ring/LL", "Ring/Simple", "Tree/LL128", "NVLSTree/Simple")
    }
    hops = {"Ring/LL": 2, "Ring/Simple": 2 * 2 * 1.4, "Tree/LL128": 2, "NVLSTree/Simple": 2 * 2}
    assert added == pytest.approx({name: 3.0 * count for name, count in hops.items()})


@pytest.mark.parametrize(
    ("cluster", "gpus", "size", "algorithms", "bus_gb_per_s", "within"),
    [
        # 8 × A100: 235 GB/s, as nccl-tests issue 175 and the published table have it
        (A100, 8, 8 * 2**30, None, 235, 0.03),
        # NVIDIA in nccl-tests issue 212: about 480 GB/s with NVLink SHARP, 370 by ring
        (H100, 8, 8 * 2**30, None, 480, 0.03),
        (H100, 8, 8 * 2**30, ("Ring",), 370, 0.04),
        # 3 nodes of 8 × A100 with 4 cards of 200 Gb/s: peak 96 GB/s (nccl-tests issue 119)
        (replace(A100, network_gb_per_s=96.0), 24, 8 * 2**30, ("Ring",), 96, 0.03),
        # 248 nodes of 8 × H200 at 512 MiB: "typically around 350" GB/s (nccl-tests issue 283)
        (load_cluster("h200-ib"), 1984, 512 * MIB, None, 350, 0.1),
    ],
)
def test_published_peaks_are_met(cluster, gpus, size, algorithms, bus_gb_per_s, within) -> None:
    model = NcclAllReduce(cluster, gpus, algorithms=algorithms)
    bus = bus_bandwidth(size, model.time_s(size), gpus) / 1e9
    assert bus == pytest.approx(bus_gb_per_s, rel=within)


def test_a_small_message_over_infiniband_takes_what_was_published() -> None:
    # 46.3 µs for 16 bytes on 2 × 8 H20, whose NVLink and cards are an H100's (NVIDIA/nccl 1244)
    assert NcclAllReduce(H100, 16).time_s(16) == pytest.approx(46.3e-6, rel=0.15)


def test_rings_alone_are_far_off_on_a_thousand_gpus() -> None:
    all_ways = NcclAllReduce(H100, 1024).time_s(MIB)
    assert NcclAllReduce(H100, 1024, algorithms=("Ring",)).time_s(MIB) > 10 * all_ways


def test_two_nodes_send_a_byte_once_through_the_network_and_four_twice() -> None:
    narrow = replace(H100, network_gb_per_s=50.0)
    tree = {gpus: by_name(NcclAllReduce(narrow, gpus))["Tree/Simple"] for gpus in (16, 32)}
    assert tree[16].bandwidth_bytes_per_s == pytest.approx(0.92 * 50e9)
    assert tree[32].bandwidth_bytes_per_s == pytest.approx(0.92 * 25e9)


@given(
    st.sampled_from(["a100-ib", "h100-roce", "h100-a3mega"]),
    st.sampled_from([2, 4, 8, 16, 24, 128, 1024, 16_384]),
    st.lists(st.floats(0, 2**36), min_size=2, max_size=12),
    st.sampled_from([RAMP, NO_RAMP]),
)
def test_time_grows_with_size_and_is_that_of_the_fastest_way(name, gpus, sizes, ramp) -> None:
    cluster = load_cluster(name)
    model = NcclAllReduce(cluster, gpus, ramp=ramp)
    sizes = np.sort(np.array(sizes))
    times = model.time_s(sizes)
    assert (np.diff(times) >= -1e-12).all()
    alone = [
        NcclAllReduce(cluster, gpus, ramp=ramp, algorithms=(algorithm,)).time_s(sizes)
        for algorithm in {choice.algorithm for choice in model.choices}
    ]
    assert times == pytest.approx(np.min(alone, axis=0))
    # scalars are what arrays are, and on one node no ramp is never slower; between nodes NCCL's
    # tuner adds up what a ring hides
    assert model.time_s(float(sizes[-1])) == pytest.approx(times[-1])
    if gpus <= cluster.gpus_per_node:
        assert (NcclAllReduce(cluster, gpus, ramp=NO_RAMP).time_s(sizes) <= times + 1e-15).all()
    # nothing is faster than the bytes that leave a GPU or a node
    if gpus > cluster.gpus_per_node:
        assert (times >= sizes / (cluster.network_gb_per_s * 1.07e9)).all()


def test_the_way_that_is_named_is_the_one_that_is_timed() -> None:
    model = NcclAllReduce(H100, 8)
    assert model.choice(1024) == "Ring/LL"
    assert model.choice(2**30) == "NVLS/Simple"
    only = NcclAllReduce(H100, 8, algorithms=("NVLS",))
    assert model.time_s(2**30) == only.time_s(2**30)


def test_nvlink_sharp_needs_five_gpus_to_beat_a_ring() -> None:
    # ml-engineering, network/README.md: 8 GiB on an H200 node, bus bandwidth in GB/s by default
    # (363.3 on four GPUs, also with NVLink SHARP turned off)
    published = {4: 363.3, 5: 414.2, 6: 435.6, 7: 460.0, 8: 473.1}
    h200 = load_cluster("h200-ib")
    for gpus in range(2, 9):
        model = NcclAllReduce(h200, gpus)
        assert model.choice(2**33).startswith("Ring" if gpus < 5 else "NVLS"), gpus
        if gpus in published:
            bus = bus_bandwidth(2**33, model.time_s(2**33), gpus) / 1e9
            # NCCL's channels of seven are as fast as of eight, where the published are faster
            assert bus == pytest.approx(published[gpus], rel=0.12 if gpus == 7 else 0.03), gpus


@pytest.mark.parametrize(("mib", "published_us"), [(16, 133.52), (64, 338.92), (1024, 4053.34)])
def test_a_round_of_nvlink_sharp_is_waited_for(mib, published_us) -> None:
    # ml-engineering, network/benchmarks/results/all-reduce-8xH200.md
    assert NcclAllReduce(load_cluster("h200-ib"), 8).time_s(mib * MIB) == pytest.approx(
        published_us * 1e-6, rel=0.07
    )


@pytest.mark.parametrize(
    ("gpus", "mib", "published_us"),
    # boeschf/nccl-benchmark-on-alps-2025, medians of ten settings, out of place
    [(16, 128, 2829.5), (16, 1024, 22_123), (32, 512, 11_476), (64, 256, 5900), (64, 2048, 45_902)],
)
def test_a_ring_between_nodes_hides_its_hops_behind_transfers(gpus, mib, published_us) -> None:
    model = NcclAllReduce(load_cluster("gh200-alps"), gpus)
    assert model.time_s(mib * MIB) == pytest.approx(published_us * 1e-6, rel=0.09)
    # but never those of a message without length
    alone = by_name(NcclAllReduce(load_cluster("gh200-alps"), gpus, algorithms=("Ring",)))
    ring = NcclAllReduce(load_cluster("gh200-alps"), gpus, algorithms=("Ring",))
    assert ring.time_s(0) == pytest.approx(RAMP.launch_s + min(c.latency_s for c in alone.values()))


def test_pcie_has_its_own_hops_and_no_ll128() -> None:
    # four GPUs at 24 GB/s: 6 hops of a ring, 3 up and 3 down a tree
    choices = by_name(NcclAllReduce(load_cluster("a100-pcie"), 4))
    assert set(choices) == {"Ring/LL", "Ring/Simple", "Tree/LL", "Tree/Simple"}
    assert choices["Ring/Simple"].latency_s == pytest.approx((8.4 + 6 * 5.7) * 1e-6)
    assert choices["Ring/LL"].latency_s == pytest.approx((6.6 + 6 * 1.0) * 1e-6)
    assert choices["Tree/LL"].latency_s == pytest.approx((6.8 + 6 * 1.0) * 1e-6)
    assert choices["Ring/Simple"].bandwidth_bytes_per_s == pytest.approx(24e9 * 4 / 6)
    # eight cross the two sockets
    crossing = by_name(NcclAllReduce(load_cluster("a100-pcie"), 8))
    assert crossing["Ring/Simple"].bandwidth_bytes_per_s == pytest.approx(16e9 * 8 / 14)


def test_volta_has_its_own_limits() -> None:
    choices = by_name(NcclAllReduce(load_cluster("v100-dgx2"), 32))
    # 62 hops, 2 of them between nodes, and the plateau of GPUs before Ampere
    assert choices["Ring/Simple"].latency_s == pytest.approx(1.9 * (8.4 + 60 * 3.4 + 2 * 14) * 1e-6)
    assert choices["Tree/Simple"].bandwidth_bytes_per_s == pytest.approx(0.92 * 120e9 / 2)
    one_node = by_name(NcclAllReduce(load_cluster("v100-dgx2"), 16))
    assert one_node["Ring/LL"].bandwidth_bytes_per_s == pytest.approx(39e9 * 16 / 30)


def test_one_gpu_has_nothing_to_do() -> None:
    model = NcclAllReduce(H100, 1)
    assert model.time_s(2**30) == 0
    assert model.time_s([1.0, 2.0]).tolist() == [0, 0]
    assert model.choice(5) == "none"
    assert NcclRing(H100, 1).time_s(2**30) == 0


@pytest.mark.parametrize("gpus", [2, 8])
def test_a_reduce_scatter_and_an_all_gather_make_an_all_reduce(gpus) -> None:
    # by ring in one node: the same hops and bytes, and a base latency more
    halves = [
        by_name(NcclRing(A100, gpus, one, ramp=NO_RAMP)) for one in ("reduce_scatter", "all_gather")
    ]
    whole = by_name(NcclAllReduce(A100, gpus, algorithms=("Ring",), ramp=NO_RAMP))
    for name, base_us in (("Ring/LL", 6.6), ("Ring/LL128", 14.0), ("Ring/Simple", 8.4)):
        both = sum(half[name].latency_s for half in halves)
        assert both == pytest.approx(whole[name].latency_s + base_us * 1e-6)
        inverse = sum(1 / half[name].bandwidth_bytes_per_s for half in halves)
        assert inverse == pytest.approx(1 / whole[name].bandwidth_bytes_per_s)


def test_a_soft_minimum_is_below_both_and_near_the_smaller() -> None:
    low = soft_minimum(np.array([0.0, 1.0, 3.0, 1e-9]), np.array([5.0, 1.0, 4.0, 1.0]))
    assert low == pytest.approx([0.0, 0.5**0.5, 12 / 5, 1e-9])
    assert soft_minimum(np.array([0.0]), np.array([0.0])).tolist() == [0]


def test_mistakes_are_one_line() -> None:
    with refused("unknown algorithm 'Rings'", "Ring"):
        NcclAllReduce(H100, 8, algorithms=("Rings",))
    with refused("no NVLS", "Ring, Tree"):
        NcclAllReduce(A100, 8, algorithms=("NVLS",))
    with refused("unknown collective", "all_gather"):
        NcclRing(H100, 8, "gather")
    with refused("12 GPUs", "multiples of 8"):
        NcclAllReduce(H100, 12)
    with refused("0 GPUs"):
        NcclRing(H100, 0)
