"""Exercises that compute a number, against oracles that are not the solution."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Iterator, Sequence

import numpy as np
import pytest
import torch
from arguments import assert_unchanged
from hypothesis import example, given
from hypothesis import strategies as st
from judging import DRAWN, assert_close, assert_nothing_put_by
from probes import one_process

from common.course.sandbox.student import Student

SIZES = st.lists(st.integers(1, 10**6), min_size=1, max_size=30)
SMALL = st.lists(st.integers(1, 12), min_size=1, max_size=8)
PIECES, SAMPLES, WIDTH = 64, 2**10, 2**8
KINDS = {
    ("bfloat16", "cpu"): torch.int8,
    ("float32", "cpu"): torch.uint8,
    ("float32", "cuda:0"): torch.bool,
}
"""What students are told of a tensor, and a dtype of one byte that PyTorch tells apart for us."""


Kind = tuple[str, str]
Buckets = tuple[list[int], list[int], list[Kind]]
"""Sizes of gradients, caps, and the kind of each gradient."""
FULL: Buckets = ([2] * 8, [2, 4, 6], [("float32", "cpu")] * 8)
"""Every bucket but the last is full to the byte, and the third cap differs from the second."""


@st.composite
def bucket_cases(draw: st.DrawFn) -> Buckets:
    sizes = draw(SIZES)
    # With caps below the largest gradients the last cap has buckets to close, too.
    most = draw(st.sampled_from([max(sizes), 2 * 10**6]))
    count = draw(st.sampled_from([3, 2, 1, 3]))
    caps = draw(st.lists(st.integers(1, most), min_size=count, max_size=count))
    chosen = st.sampled_from(list(KINDS)[: draw(st.integers(1, len(KINDS)))])
    return sizes, caps, draw(st.lists(chosen, min_size=len(sizes), max_size=len(sizes)))


@DRAWN
@given(case=bucket_cases(), with_first=st.booleans(), with_kinds=st.booleans())
@example(case=FULL, with_first=False, with_kinds=True)
@example(case=FULL, with_first=False, with_kinds=False)
def test_buckets_are_those_of_torch(
    student: Student, case: Buckets, with_first: bool, with_kinds: bool
) -> None:
    assign_buckets = student.exercise("bucket_assignment").assign_buckets
    sizes, caps, kinds = case
    tensors = [
        torch.empty(size, dtype=KINDS[kind], device="meta")
        for size, kind in zip(sizes, kinds, strict=True)
    ]
    # With an order in which gradients are ready, it leaves buckets in that of their reductions.
    expected, _ = torch._C._distributed_c10d._compute_bucket_assignment_by_size(
        tensors, caps, [False] * len(sizes), list(range(len(sizes)))
    )
    if len(caps) == 1:
        arguments = [sizes, caps[0]]
    elif with_first:
        arguments = [sizes, caps[1:] if len(caps) > 2 else caps[1], caps[0]]
    else:
        arguments = [sizes, caps]
    count = len(set(kinds))
    keywords = {"kinds": kinds} if count > 1 or with_kinds else {}
    words = f"{len(sizes)} gradients of {count} kinds, {len(caps)} caps"
    assert assign_buckets(*arguments, **keywords) == expected, f"other buckets than DDP's: {words}"


def test_no_gradients_make_no_buckets_and_sizes_stay(student: Student) -> None:
    assign_buckets = student.exercise("bucket_assignment").assign_buckets
    assert assign_buckets([], 8) == [], "buckets of no gradients"
    assert assign_buckets([], 8, kinds=[]) == [], "buckets of no gradients of any kind"
    assert_unchanged(student, "bucket_assignment", "assign_buckets", [5, 3, 4], [6, 4], 2)


@DRAWN
@given(sizes=SIZES, data=st.data())
def test_the_time_of_a_pass_is_the_simulators_without_costs(
    student: Student, sizes: list[int], data: st.DataObject
) -> None:
    # In any order, as a branch of a model may have its gradients late.
    moments = st.lists(st.floats(0, 1e-1), min_size=len(sizes), max_size=len(sizes))
    ready = data.draw(moments, label="ready")
    latency, rate = data.draw(st.floats(0, 1e-2)), data.draw(st.floats(1e8, 1e10))
    buckets = data.draw(st.permutations(buckets_of(sizes, data.draw(st.integers(1, 10**6)))))
    # What is in no bucket is computed, and not sent.
    buckets = buckets[: data.draw(st.integers(1, len(buckets)))]

    def time_s(size: float) -> float:
        return latency + size / rate

    result = student.exercise("bucket_time").backward_time_s(sizes, ready, buckets, time_s)
    end = 0.0
    for bucket in buckets:  # an all-reduce at a time, once the bucket's last gradient is ready
        end = max(end, max(ready[i] for i in bucket)) + time_s(sum(sizes[i] for i in bucket))
    case = f"{len(buckets)} buckets of {len(sizes)} gradients"
    assert_close(result, max(end, *ready), f"T of {case}", rel=1e-12)


@DRAWN
@given(pairs=st.lists(st.tuples(st.integers(0, 50), st.integers(0, 20)), min_size=1, max_size=9))
def test_all_reduces_end_one_after_another(student: Student, pairs: list[tuple[int, int]]) -> None:
    one_after_another = student.exercise("bucket_time").one_after_another
    ready, alone = ([float(pair[part]) for pair in pairs] for part in (0, 1))
    # The latest of all chains that begin when some all-reduce is ready, and never pause.
    expected = [
        max(ready[start] + sum(alone[start : end + 1]) for start in range(end + 1))
        for end in range(len(pairs))
    ]
    assert list(one_after_another(ready, alone)) == expected, f"ends of {len(pairs)} all-reduces"


def test_gradients_of_a_pass_stay(student: Student) -> None:
    arguments = [8, 4, 2], [3.0, 1.0, 2.0], [[2, 0], [1]], float
    assert_unchanged(student, "bucket_time", "backward_time_s", *arguments)
    assert_unchanged(student, "bucket_time", "one_after_another", [3.0, 1.0], [2.0, 2.0])


def buckets_of(sizes: list[int], cap: int) -> list[list[int]]:
    """Returns the buckets of PyTorch's C++."""
    tensors = [torch.empty(size, dtype=torch.uint8, device="meta") for size in sizes]
    found, _ = torch._C._distributed_c10d._compute_bucket_assignment_by_size(tensors, [cap])
    return sorted(found)


def caps_of_bucketings(sizes: list[int]) -> dict[str, list[int]]:
    """Returns for each distinct bucketing all caps that give it, by trying every cap."""
    caps: dict[str, list[int]] = {}
    for cap in range(1, sum(sizes) + 1):
        caps.setdefault(str(buckets_of(sizes, cap)), []).append(cap)
    return caps


def times_of_caps(sizes: list[int], ready: list[int], latency: int) -> dict[int, int]:
    """Returns the time of every cap."""
    times = {}
    for cap in range(1, sum(sizes) + 1):
        end = 0
        for bucket in buckets_of(sizes, cap):  # one after another, each when its last is ready
            end = max(end, ready[max(bucket)]) + latency + sum(sizes[i] for i in bucket)
        times[cap] = max(end, ready[-1])
    return times


@DRAWN
@given(sizes=SMALL, data=st.data())
def test_no_cap_is_faster_than_the_one_that_is_found(
    student: Student, sizes: list[int], data: st.DataObject
) -> None:
    gaps = data.draw(st.lists(st.integers(0, 9), min_size=len(sizes), max_size=len(sizes)))
    ready = np.cumsum(gaps).tolist()
    latency = data.draw(st.integers(0, 5))
    asked = []

    def all_reduce_s(size: float) -> float:
        asked.append(size)
        return latency + size

    cap, time_s = student.exercise("cap_search").fastest_cap(sizes, ready, all_reduce_s)
    distinct = {str(buckets_of(sizes, cap)): cap for cap in range(1, sum(sizes) + 1)}
    number = sum(len(buckets_of(sizes, cap)) for cap in distinct.values())
    case = f"{len(sizes)} gradients, {len(distinct)} distinct bucketings"
    words = f"{len(asked)} calls of all_reduce_s, where a call a bucket makes {number}"
    assert 0 < len(asked) <= number, f"{words}: {case}"
    times = times_of_caps(sizes, ready, latency)
    assert time_s == min(times.values()), f"the smallest T: {case}"
    assert times.get(cap) == time_s, f"the cap has another T: {case}"
    largest = max(cap for cap, value in times.items() if value == time_s)
    assert cap == largest, f"the largest of the fastest caps: {case}"


@DRAWN
@given(sizes=SMALL)
def test_every_bucketing_is_walked_once_with_its_caps(student: Student, sizes: list[int]) -> None:
    walked = student.probe("searches").bucketings(sizes)
    assert [(str(buckets), [low, high]) for low, high, buckets in walked] == [
        (buckets, [caps[0], caps[-1]]) for buckets, caps in caps_of_bucketings(sizes).items()
    ], f"bucketings and their caps, of {len(sizes)} gradients"
    cap_interval = student.exercise("cap_search").cap_interval
    for low, high, buckets in walked:
        interval = cap_interval(sizes, buckets)
        assert interval[0] == low, f"smallest cap of {len(buckets)} buckets"
        is_largest = interval[1] == high if high < sum(sizes) else interval[1] >= high
        assert is_largest, f"largest cap of {len(buckets)} buckets"


def test_gigabytes_take_as_few_tries_as_bytes(
    student: Student, generator: np.random.Generator
) -> None:
    unit, latency = 10**9, int(generator.integers(1, 5))
    sizes = generator.integers(1, 9, 8).tolist()
    ready = np.cumsum(generator.integers(0, 9, 8)).tolist()
    walked = student.probe("searches").bucketings([unit * size for size in sizes])
    expected = [
        (str(buckets_of(sizes, caps[0])), [unit * (caps[0] - 1) + 1, unit * caps[-1]])
        for caps in caps_of_bucketings(sizes).values()
    ]
    assert [(str(buckets), [low, high]) for low, high, buckets in walked] == expected, (
        "bucketings and their caps, of gradients of gigabytes"
    )
    cap, time_s = student.exercise("cap_search").fastest_cap(
        [unit * size for size in sizes],
        [unit * moment for moment in ready],
        lambda size: unit * latency + size,
    )
    times = times_of_caps(sizes, ready, latency)
    fastest = max(cap for cap, value in times.items() if value == min(times.values()))
    assert (cap, time_s) == (unit * fastest, unit * times[fastest]), "cap and T of gigabytes"


TEXTS = st.lists(st.lists(st.integers(1, 4), min_size=1, max_size=3), min_size=1, max_size=4)
"""Ranks, each with the lengths of its texts."""


@DRAWN
@given(lengths=TEXTS)
def test_scaled_means_of_samples_have_the_gradient_of_the_whole_batch(
    student: Student, lengths: list[list[int]]
) -> None:
    check_scaled_means(student, "samples", lengths)


@DRAWN
@given(lengths=TEXTS)
def test_scaled_means_of_tokens_have_the_gradient_of_the_whole_batch(
    student: Student, lengths: list[list[int]]
) -> None:
    check_scaled_means(student, "tokens", lengths)


def check_scaled_means(student: Student, mean: str, lengths: list[list[int]]) -> None:
    """Checks that the ranks' mean of scaled gradients is the gradient of all ranks' mean."""
    loss_scale = student.exercise("loss_scale").loss_scale
    torch.manual_seed(0)
    model = torch.nn.Linear(5, 1).double()
    texts = [[torch.randn(length, 5).double() for length in rank] for rank in lengths]
    units = [len(rank) if mean == "samples" else sum(rank) for rank in lengths]

    def loss(batch: list[torch.Tensor], count: int) -> torch.Tensor:
        parts = [model(text).square() for text in batch]
        sums = [part.mean() if mean == "samples" else part.sum() for part in parts]
        return torch.stack(sums).sum() / count

    whole = loss([text for rank in texts for text in rank], sum(units))
    expected = torch.autograd.grad(whole, model.parameters())
    scaled = [
        loss(rank, count) * loss_scale(mean, len(lengths), count, sum(units))
        for rank, count in zip(texts, units, strict=True)
    ]
    gradients = torch.autograd.grad(torch.stack(scaled).mean(), model.parameters())
    words = f"{len(lengths)} ranks with {units} {mean}: not the whole batch's gradient"
    for gradient, wanted in zip(gradients, expected, strict=True):
        torch.testing.assert_close(gradient, wanted, rtol=1e-12, atol=1e-14, msg=words)


def test_a_planted_cost_is_found_and_noise_makes_none_negative(
    student: Student, generator: np.random.Generator
) -> None:
    fit_cost = student.exercise("cost_fit").fit_cost
    batch, longest = generator.integers(1, 64, 200) * 1.0, generator.integers(4, 256, 200) * 1.0
    terms = np.stack([np.ones_like(batch), batch * longest, batch * longest**2], axis=1)
    for number in range(20):
        # Parts of a step that differ by up to a hundred, of steps from microseconds to minutes.
        parts = 10 ** generator.uniform(-1, 1, 3) * 10 ** generator.uniform(-6, 2)
        planted = parts / terms.mean(axis=0)
        times = terms @ planted
        fitted = fit_cost(batch, longest, times)
        assert fitted == pytest.approx(planted, rel=1e-6), "planted coefficients, without noise"
        noisy = times * generator.lognormal(0, 0.5, len(times))
        fitted = fit_cost(batch, longest, noisy)
        assert min(fitted) >= 0, "a negative coefficient, with noise"
        best = min(
            relative_error(terms, noisy, cost) for cost in fits_without_some_terms(terms, noisy)
        )
        is_best = relative_error(terms, noisy, fitted) <= 1.000001 * best
        assert is_best, "with noise: not the least sum of squared relative errors"
        missing = number % 3  # a term that is not there
        fitted = fit_cost(batch, longest, terms @ np.where(np.arange(3) == missing, 0, planted))
        limit = 1e-3 * planted[missing]
        assert fitted[missing] <= limit, f"term {missing} is not in the times, and in the fit"
    assert_unchanged(student, "cost_fit", "fit_cost", batch, longest, times)


def relative_error(terms: np.ndarray, time_s: np.ndarray, cost: Sequence[float]) -> float:
    """Returns the sum of squared relative errors of a cost."""
    return float(((terms @ np.array(cost) / time_s - 1) ** 2).sum())


def fits_without_some_terms(terms: np.ndarray, time_s: np.ndarray) -> Iterator[np.ndarray]:
    """Yields least squares of each choice of terms whose coefficients all come out positive.

    The best fit without negative coefficients is one of them: that of the terms it has.
    """
    scale = 1 / terms.mean(axis=0)
    rows = terms * scale / time_s[:, None]
    for kept in itertools.product([False, True], repeat=3):
        cost = np.zeros(3)
        cost[list(kept)] = np.linalg.lstsq(rows[:, kept], np.ones(len(rows)), rcond=None)[0]
        if (cost >= 0).all():
            yield cost * scale


def states_of(seed: int, scale: float) -> tuple[dict[str, torch.Tensor], torch.Generator]:
    """Draws the weights of the model that is trained partly."""
    draw = torch.Generator().manual_seed(seed)
    shapes = {"weight": (3, 4), "bias": (3,)}
    return {
        f"{layer}.{name}": scale * torch.randn(shape, generator=draw, dtype=torch.float64)
        for layer in one_process.LAYERS
        for name, shape in shapes.items()
    }, draw


@DRAWN
@given(
    sizes=st.lists(st.integers(1, 5), min_size=1, max_size=5),
    largest=st.sampled_from([0.1, 1000.0, None]),
    scale=st.sampled_from([1.0, 1.0, 0.0]),  # of zeros the loss is 0, and so is the norm
    seed=st.integers(0, 10**6),
)
def test_any_split_of_a_batch_makes_the_update_of_the_whole(
    student: Student, sizes: list[int], largest: float | None, scale: float, seed: int
) -> None:
    states, draw = states_of(seed, scale)
    samples = torch.randn(sum(sizes), 4, generator=draw, dtype=torch.float64)
    twin = one_process.partly_trained(copy.deepcopy(states))
    loss = one_process.mean_square(twin, samples)
    loss.backward()
    norm = torch.nn.utils.clip_grad_norm_(twin.parameters(), largest or float("inf"))
    one_process.sgd(twin).step()
    pieces = [piece.clone() for piece in samples.split(sizes)]
    result = student.probe("one_process").accumulated(states, pieces, largest)
    case = f"{len(sizes)} pieces of {sizes} samples, max_norm {largest}"
    for name, expected in (("loss", loss.item()), ("norm", norm.item())):
        assert_close(result[name], expected, f"{name}: {case}", rel=1e-12)
    for name, expected in twin.state_dict().items():
        # PyTorch's clipping adds 1e-6 to the norm, which moves small weights by more than a share.
        relative, absolute = (1e-4, 1e-7) if largest else (1e-12, 1e-12)
        torch.testing.assert_close(
            result["state"][name], expected, rtol=relative, atol=absolute, msg=f"{name}: {case}"
        )
    assert not result["remaining"], f"gradients are left: {case}"


def test_pieces_are_computed_one_after_another(
    student: Student, generator: np.random.Generator
) -> None:
    sizes = generator.permutation([1, 2, 3, 5]).tolist()
    pieces = [torch.randn(size, 4, dtype=torch.float64) for size in sizes]
    result = student.probe("one_process").accumulated(states_of(0, 1.0)[0], pieces, None)
    expected = [[way, size] for size in sizes for way in ("forward", "backward")]
    assert result["passes"] == expected, (
        f"not a forward pass, then a backward pass, of each of {len(sizes)} pieces in turn"
    )
    # As seen from outside: the activations of one piece at a time.
    step = student.probe("one_process").accumulated_in_memory
    step(PIECES, 1, 1)
    assert_nothing_put_by(student.put_by_bytes())
    with student.measured() as memory:
        step(PIECES, SAMPLES, WIDTH)
    taken = (max(memory) - memory[0]) / (4 * SAMPLES * WIDTH)
    assert taken < PIECES / 2, f"it takes memory of {taken:.0f} activations, with {PIECES} pieces"


SPANS = st.lists(st.tuples(st.integers(-50, 250), st.integers(0, 80)), max_size=6)
CELLS = np.arange(-60, 340)
"""Moments of a scene: each lasts 1/64 of a unit, which floats hold exactly."""


def intervals_of(spans: list[tuple[int, int]]) -> list[tuple[float, float]]:
    """Returns intervals of (start, length) in cells."""
    return [(start / 64, (start + span) / 64) for start, span in spans]


def within(spans: list[tuple[int, int]]) -> np.ndarray:
    """Returns for each cell whether it lies in one of the intervals."""
    return np.array([any(a <= cell < a + span for a, span in spans) for cell in CELLS])


def pieces_of(cells: np.ndarray) -> np.ndarray:
    """Returns the intervals [n, 2] of runs of cells."""
    edges = np.flatnonzero(np.diff(np.concatenate([[False], cells, [False]]).astype(int)))
    return (edges.reshape(-1, 2) + CELLS[0]) / 64


@DRAWN
@given(
    computing=SPANS, communicating=SPANS, window=st.tuples(st.integers(-40, 40), st.integers(1, 90))
)
@example(computing=[(0, 80), (10, 5), (20, 10)], communicating=[], window=(0, 90))  # one holds two
def test_every_moment_of_a_step_is_one_of_its_parts(
    student: Student,
    computing: list[tuple[int, int]],
    communicating: list[tuple[int, int]],
    window: tuple[int, int],
) -> None:
    step = within([window])
    first, second = within(computing) & step, within(communicating) & step
    apart = student.exercise("step_apart").take_apart(
        intervals_of([window])[0], intervals_of(computing), intervals_of(communicating)
    )
    for name, cells in (
        ("total", step),
        ("computation", first),
        ("communication", second),
        ("overlap", first & second),
        ("exposed", second & ~first),
        ("idle", step & ~first & ~second),
    ):
        case = f"{len(computing)} and {len(communicating)} intervals, step from {window[0]}/64"
        assert getattr(apart, name) == cells.sum() / 64, f"{name}: {case}"


@DRAWN
@given(computing=SPANS, communicating=SPANS)
@example(computing=[(0, 10), (10, 5)], communicating=[(12, 3), (15, 4)])  # that touch
def test_intervals_are_joined_cut_and_taken_away(
    student: Student, computing: list[tuple[int, int]], communicating: list[tuple[int, int]]
) -> None:
    exercise = student.exercise("step_apart")  # what the lab takes traces apart with
    first, second = within(computing), within(communicating)
    joined, further = pieces_of(first), pieces_of(second)
    case = f"{len(computing)} and {len(communicating)} intervals"
    for name, result, cells in (
        ("union", exercise.union(intervals_of(computing)), first),
        ("difference", exercise.difference(joined, further), first & ~second),
        ("intersection", exercise.intersection(joined, further), first & second),
    ):
        pieces = np.asarray(result).reshape(-1, 2)
        assert np.array_equal(pieces, pieces_of(cells)), f"{name}: {case}"
    assert exercise.length(joined) == first.sum() / 64, f"length: {case}"


def test_many_thousands_of_intervals_are_taken_apart(
    student: Student, generator: np.random.Generator
) -> None:
    count = 100_000
    cells = generator.random((2, count)) < 0.5
    computation, communication = (
        generator.permutation(np.flatnonzero(kind))[:, None] + np.array([0.0, 1.0])
        for kind in cells
    )
    apart = student.exercise("step_apart").take_apart((0, count), computation, communication)
    first, second = cells
    for name, expected in (
        ("computation", first),
        ("overlap", first & second),
        ("exposed", second & ~first),
        ("idle", ~first & ~second),
    ):
        assert getattr(apart, name) == expected.sum(), f"{name} of {count // 2} intervals each"
    few = [(5.0, 6.0), (1.0, 3.0), (2.0, 4.0)]
    assert_unchanged(student, "step_apart", "union", few)
    assert_unchanged(student, "step_apart", "union", np.array(few))
    assert_unchanged(student, "step_apart", "take_apart", (0.0, 9.0), few, np.array(few))
