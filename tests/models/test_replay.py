"""A replay has the recorded gradients, hands them over in the recorded order and at their time,
and is an ordinary module to autograd and to DDP (two real gloo ranks, replay_worker.py)."""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import replay_worker
from replay_worker import ARMS, CAPS_MIB, ELEMENTS, ITERATIONS, NAMES, PROFILE, REGISTRATION

from common.errors import UserError
from common.models.replay import ReplayModel
from common.perfmodel.buckets import DdpOptions, assign_buckets
from common.perfmodel.ddp.profile import BackwardProfile


@pytest.fixture(scope="module")
def ranks(rank_server) -> list[dict]:
    """Returns what each of two ranks saw, by arm."""
    done = rank_server.run(Path(replay_worker.__file__), ranks=2)
    assert done.exit_codes == [0, 0], "\n".join(done.stderr)
    return [*done.lines(0), *done.lines(1)]


def slow(count: int, seconds: float) -> BackwardProfile:
    """Makes gradients of one element each, evenly spread over a backward pass."""
    ready_s = np.arange(1, count + 1) * seconds / count
    names = tuple(f"p{index}" for index in range(count))
    return BackwardProfile(names, np.full(count, 4), ready_s, seconds)


def timed_backward(model: ReplayModel) -> tuple[float, float]:
    """Runs a backward pass; returns when it began and how long it took, in seconds."""
    loss = model()
    start_s = time.perf_counter()
    loss.backward()
    return start_s, time.perf_counter() - start_s


def test_it_has_a_parameter_of_the_recorded_size_for_every_gradient_registered_as_recorded():
    parameters = {name: p.numel() for name, p in ReplayModel(PROFILE).named_parameters()}
    assert parameters == dict(zip(NAMES, ELEMENTS, strict=True))
    assert [list(parameters).index(name) for name in NAMES] == list(REGISTRATION)


def test_without_a_recorded_registration_it_is_the_reverse_of_the_ready_order():
    flat = replace(PROFILE, names=tuple("abcdefghi"), registration=())
    assert [name for name, _ in ReplayModel(flat).named_parameters()] == list("ihgfedcba")


def test_gradients_come_in_the_recorded_order_each_once_and_all_of_one_value():
    model = ReplayModel(PROFILE, value=3.0)
    came = []
    for name, parameter in model.named_parameters():
        parameter.register_post_accumulate_grad_hook(lambda _, name=name: came.append(name))
    model().backward()
    assert came == list(NAMES)
    for parameter in model.parameters():
        assert parameter.grad.shape == parameter.shape
        assert (parameter.grad == 3.0).all()


def test_handing_a_gradient_over_copies_nothing():
    """Autograd clones a gradient that somebody else holds; then it would lie elsewhere."""
    model = ReplayModel(PROFILE)
    places = []
    for _ in range(3):
        model.zero_grad()
        model().backward()
        places.append([parameter.grad.data_ptr() for parameter in model.parameters()])
    assert places[0] == places[1] == places[2]
    assert len(set(places[0])) == len(NAMES)


def test_gradients_add_up_until_they_are_forgotten():
    model = ReplayModel(PROFILE, value=2.0)
    for total in (2.0, 4.0, 6.0):
        model().backward()
        assert all((parameter.grad == total).all() for parameter in model.parameters())
    model.zero_grad()
    model().backward()
    assert all((parameter.grad == 2.0).all() for parameter in model.parameters())


def test_what_was_written_over_a_gradient_does_not_come_back_with_the_next():
    """As DDP writes the average of the ranks, and whoever forgets the gradients."""
    model = ReplayModel(PROFILE, value=2.0)
    for _ in range(2):
        model().backward()
        for parameter in model.parameters():
            parameter.grad.fill_(99.0)
            parameter.grad = None
    model().backward()
    assert all((parameter.grad == 2.0).all() for parameter in model.parameters())


def test_a_backward_pass_lasts_as_long_as_recorded_and_gradients_wait_for_their_moment():
    """Lower bounds only: a busy machine may be late. What a pass costs besides its sleeps is
    measured and slept less, hence a tenth of slack."""
    profile = slow(count=4, seconds=0.2)
    model = ReplayModel(profile)
    came_s: list[float] = []
    for parameter in reversed(list(model.parameters())):
        parameter.register_post_accumulate_grad_hook(lambda _: came_s.append(time.perf_counter()))
    start_s, took_s = timed_backward(model)
    assert took_s >= 0.9 * profile.backward_s
    assert (np.array(came_s) - start_s >= profile.ready_s - 0.1 * profile.backward_s).all()
    assert came_s == sorted(came_s)


def test_a_pass_says_when_its_gradients_came_and_how_late_the_latest_was():
    profile = slow(count=4, seconds=0.1)
    model = ReplayModel(profile)
    _, took_s = timed_backward(model)
    assert len(model.handed_s) == 4
    assert model.handed_s == sorted(model.handed_s)
    late_s = np.array([*model.handed_s, model.ended_s]) - [*profile.ready_s, profile.backward_s]
    assert model.lateness_s == pytest.approx(late_s.max())
    # A gradient that came within the pass is not later than that, but for what was taken for
    # autograd's own time.
    assert model.lateness_s <= took_s - profile.ready_s[0] + 0.05


def test_a_pass_that_cannot_keep_up_says_so():
    """Half a thousand gradients in a microsecond: autograd alone takes longer."""
    profile = slow(count=500, seconds=1e-6)
    model = ReplayModel(profile)
    _, took_s = timed_backward(model)
    assert model.lateness_s > 0
    assert model.lateness_s > took_s / 10


def test_a_delay_between_two_gradients_makes_the_next_late_and_not_those_after_it():
    profile = slow(count=4, seconds=0.8)
    model = ReplayModel(profile)
    first = dict(model.named_parameters())["p0"]
    first.register_post_accumulate_grad_hook(lambda _: time.sleep(0.35))  # until 0.55 s
    late_s = []
    for _ in range(3):  # a busy machine may make p3 late, too, but hardly in every pass
        model().backward()
        assert model.lateness_s >= 0.08  # p1 was due at 0.4 s
        late_s.append(np.array(model.handed_s) - profile.ready_s)
    # Errors do not add up: had they, p3 would be as late.
    assert any(late[3] < late[1] for late in late_s)


def test_a_forward_pass_sleeps_as_long_as_it_is_told():
    model = ReplayModel(PROFILE, forward_s=0.05)
    start_s = time.perf_counter()
    model()
    assert time.perf_counter() - start_s >= 0.05


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"kinds": ("float32",) * 8 + ("bfloat16",)}, "bfloat16 gradients: only float32"),
        ({"sizes_bytes": np.array([4] * 8 + [6])}, "embedding.weight of 6 bytes"),
        (
            {"names": ("a", "a.b", *NAMES[2:])},
            "'a.b' cannot be replayed: attribute 'a' already exists",
        ),
        ({"names": ("", *NAMES[1:])}, "cannot be replayed"),
        ({"names": ("x.a", "y", "x.b", *"cdefgh"), "registration": ()}, "is registered at place"),
    ],
)
def test_a_recording_that_no_module_can_have_is_refused(changes, said):
    with pytest.raises(UserError, match=said):
        ReplayModel(replace(PROFILE, **changes))


@pytest.mark.two_ranks
@pytest.mark.parametrize("arm", ARMS)
def test_under_ddp_gradients_come_in_the_recorded_order_on_both_ranks(ranks, arm):
    assert [rank[arm]["ready"] for rank in ranks] == [[list(NAMES)] * ITERATIONS] * 2


@pytest.mark.two_ranks
@pytest.mark.parametrize("cap", CAPS_MIB)
def test_ddp_forms_the_buckets_that_the_profile_gives(ranks, cap):
    buckets = assign_buckets(list(PROFILE.sizes_bytes), DdpOptions(cap).limits_bytes())
    sizes = [int(PROFILE.sizes_bytes[bucket].sum()) for bucket in buckets]
    assert [rank[f"cap {cap}"]["bucket_sizes"] for rank in ranks] == [
        ", ".join(map(str, sizes))
    ] * 2


@pytest.mark.two_ranks
def test_the_caps_are_told_apart(ranks):
    assert len({ranks[0][f"cap {cap}"]["bucket_sizes"] for cap in CAPS_MIB}) == len(CAPS_MIB)


@pytest.mark.two_ranks
@pytest.mark.parametrize("arm", ARMS)
def test_after_every_backward_pass_each_gradient_is_the_mean_over_the_ranks(ranks, arm):
    """Ranks 0 and 1 have gradients of 1 and 2."""
    for rank in ranks:
        assert rank[arm]["ranges"] == [{name: [1.5, 1.5] for name in NAMES}] * ITERATIONS
