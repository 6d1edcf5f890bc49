"""The bucket assignment against PyTorch's own, and against the published counts for GPT-2.

Real DDP runs are in test_ddp_buckets_two_ranks.py.
"""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from perfmodel_support import MIB, gpt2_parameters, gpt2_ready_order, refused

from common.exercises.cap_search import cap_interval
from common.perfmodel.buckets import DdpOptions, assign_buckets, cap_label, ddp_buckets, parse_cap

DTYPES = (torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.complex64)
NUMELS = st.one_of(st.integers(0, 40), st.integers(0, 100_000))
CAPS = st.one_of(st.integers(1, 400), st.integers(1, 1_000_000))
FIRST_CAPS = st.none() | CAPS
ONE_DTYPE = st.lists(st.tuples(NUMELS, st.just(torch.float32)), min_size=1, max_size=25)
SEVERAL_DTYPES = st.lists(st.tuples(NUMELS, st.sampled_from(DTYPES)), min_size=1, max_size=25)
MODULE = st.lists(
    st.tuples(st.integers(1, 20 * MIB), st.sampled_from(DTYPES)), min_size=1, max_size=20
)
CAPS_MIB = st.sampled_from([None, 0.001, 0.5, 1, 5, 25, 33.3])


def tensors(spec: list[tuple[int, torch.dtype]]) -> list[torch.Tensor]:
    """Makes tensors without storage; torch only asks for their size, dtype and device."""
    return [torch.empty(numel, dtype=dtype, device="meta") for numel, dtype in spec]


def torch_buckets(
    gradients: list[torch.Tensor], limits: list[int], ready_order: list[int]
) -> list[list[int]]:
    """Groups gradients in this order as DDP's C++ does; with no order it sorts its buckets."""
    sparse = [False] * len(gradients)
    return dist._compute_bucket_assignment_by_size(gradients, limits, sparse, ready_order)[0]


def limits(cap: int, first_cap: int | None) -> list[int]:
    return [cap] if first_cap is None else [first_cap, cap]


def ddp_limits(cap_mib: float | None) -> list[int]:
    """Returns the limits DDP derives from ``bucket_cap_mb``."""
    return [MIB, 25 * MIB] if cap_mib is None else [int(cap_mib * MIB)]


@given(ONE_DTYPE, CAPS, FIRST_CAPS)
def test_buckets_of_one_dtype_equal_torchs(spec, cap, first_cap):
    gradients = tensors(spec)
    expected = torch_buckets(gradients, limits(cap, first_cap), list(range(len(spec))))
    assert assign_buckets([g.nbytes for g in gradients], cap, first_cap) == expected


@given(SEVERAL_DTYPES, CAPS, FIRST_CAPS)
def test_buckets_of_several_dtypes_equal_torchs_and_come_in_its_order(spec, cap, first_cap):
    gradients = tensors(spec)
    expected = torch_buckets(gradients, limits(cap, first_cap), list(range(len(spec))))
    sizes = [gradient.nbytes for gradient in gradients]
    assert assign_buckets(sizes, cap, first_cap, [g.dtype for g in gradients]) == expected


@given(MODULE, CAPS_MIB, st.randoms(use_true_random=False))
def test_rebuilt_buckets_of_a_module_equal_torchs_for_any_ready_order(spec, cap_mib, random):
    gradients = tensors(spec)
    order = list(range(len(spec)))
    random.shuffle(order)
    # DDP hands its C++ the gradients in ready order, with their registration indices beside.
    expected = torch_buckets([gradients[i] for i in order], ddp_limits(cap_mib), order)
    sizes, kinds = [g.nbytes for g in gradients], [g.dtype for g in gradients]
    assert ddp_buckets(sizes, order, DdpOptions(cap_mib), kinds=kinds) == expected


@given(MODULE, CAPS_MIB)
def test_buckets_that_are_never_rebuilt_equal_torchs_initial_ones_in_reverse(spec, cap_mib):
    gradients = tensors(spec)
    # As in DDP's constructor: no ready order is known, the buckets are sorted, then reversed.
    expected = torch_buckets(gradients, ddp_limits(cap_mib), [])[::-1]
    sizes, kinds = [g.nbytes for g in gradients], [g.dtype for g in gradients]
    options = DdpOptions(cap_mib, find_unused_parameters=True)
    order = list(range(len(spec)))
    for iteration in (0, 1, 10, None):
        assert ddp_buckets(sizes, order, options, iteration, kinds) == expected


def test_an_explicit_cap_of_25_mib_is_not_the_default():
    # The default closes the first bucket at 1 MiB; an explicit cap counts for the first one too.
    sizes = [2 * MIB] * 20
    order = list(range(20))
    assert ddp_buckets(sizes, order, DdpOptions(None))[0] == [0]
    assert ddp_buckets(sizes, order, DdpOptions(25))[0] == list(range(13))


@pytest.mark.parametrize(
    ("options", "rebuilt_at"),
    [(DdpOptions(1), 1), (DdpOptions(1, static_graph=True), 2), (DdpOptions(1, True, True), 2)],
)
def test_until_the_rebuild_all_gradients_are_one_bucket(options, rebuilt_at):
    sizes, order = [MIB] * 4, [3, 1, 2, 0]
    for iteration in range(4):
        expected = [[0, 1, 2, 3]] if iteration < rebuilt_at else [[3], [1], [2], [0]]
        assert ddp_buckets(sizes, order, options, iteration) == expected


GPT2_COUNTS = {1: 50, 5: 37, 10: 24, 25: 13, 50: 7, 100: 4, 200: 2, 400: 1, None: 13}
GPT2_LARGE_COUNTS = {1: 146, 2: 146, 5: 146, 10: 109, 25: 109, 50: 55, 100: 28, 200: 14, 400: 7}


@pytest.mark.parametrize(
    ("model", "cap_mib", "count"),
    [
        *(("gpt2", cap, count) for cap, count in GPT2_COUNTS.items()),
        *(("gpt2-large", cap, count) for cap, count in GPT2_LARGE_COUNTS.items()),
    ],
)
def test_gpt2_has_its_known_number_of_buckets(model, cap_mib, count):
    assert len(gpt2_buckets(model, cap_mib)) == count


def test_gpt2_by_default_starts_with_a_small_bucket_and_ends_with_its_embedding():
    parameters = gpt2_parameters("gpt2")
    sizes = list(parameters.values())
    buckets = gpt2_buckets("gpt2", None)
    mib = [sum(sizes[i] for i in bucket) / MIB for bucket in buckets]
    assert mib[0] == pytest.approx(9.01, abs=0.005)
    assert mib[-1] == pytest.approx(168.27, abs=0.005)
    assert list(parameters)[buckets[-1][-1]] == "wte.weight"


def gpt2_buckets(model: str, cap_mib: float | None) -> list[list[int]]:
    parameters = gpt2_parameters(model)
    names = list(parameters)
    order = [names.index(name) for name in gpt2_ready_order(names)]
    assert sorted(order) == list(range(len(names)))
    return ddp_buckets(list(parameters.values()), order, DdpOptions(cap_mib))


@given(st.lists(st.integers(1, 60), min_size=1, max_size=20), st.integers(1, 300))
def test_cap_interval_holds_all_caps_that_give_these_buckets_and_no_other(sizes, cap):
    buckets = assign_buckets(sizes, cap)
    low, high = cap_interval(sizes, buckets)
    assert low <= cap <= high
    assert assign_buckets(sizes, low) == buckets
    assert assign_buckets(sizes, high) == buckets
    assert low == 1 or assign_buckets(sizes, low - 1) != buckets
    # One bucket stays one bucket however large the cap.
    assert (assign_buckets(sizes, high + 1) == buckets) == (len(buckets) == 1)


def test_no_gradients_make_no_buckets():
    assert assign_buckets([], 10) == []


@pytest.mark.parametrize(
    ("text", "cap"), [("25", 25.0), ("0.5", 0.5), ("1e2", 100.0), ("None", None), ("default", None)]
)
def test_a_cap_is_read_as_mib_and_none_as_the_default(text, cap):
    assert parse_cap(text) == cap
    assert cap is None or isinstance(parse_cap(text), float)


@pytest.mark.parametrize(
    "text", ["0", "-1", "-0.5", "nan", "inf", "abc", "", "1,5", "25MB", "1e-9"]
)
def test_a_cap_that_is_no_number_above_zero_is_refused_by_name(text):
    with refused("bucket cap", text):
        parse_cap(text)


@pytest.mark.parametrize("cap", [0, -1, -(2**20)])
def test_a_cap_below_one_byte_is_refused(cap):
    with refused("bucket cap", cap, "at least 1"):
        assign_buckets([4, 4], cap)
    with refused("bucket cap", cap, "at least 1"):
        assign_buckets([4, 4], 10, first_cap_bytes=cap)


@pytest.mark.parametrize("cap_mib", [0, -25, float("nan"), float("inf")])
def test_ddp_options_with_an_impossible_cap_are_refused(cap_mib):
    with refused("cap"):
        ddp_buckets([4, 4], [1, 0], DdpOptions(cap_mib))


@pytest.mark.parametrize("cap", [None, 0.25, 1.0, 25.0, 12.5, 400.0])
def test_the_label_of_a_cap_reads_back_as_the_cap(cap):
    assert parse_cap(cap_label(cap)) == cap
