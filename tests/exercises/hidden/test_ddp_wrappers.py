"""A1.2, A1.3 and A2.4 against a twin: one process in float64 that sees the samples of all ranks.

Every rank has its own weights and samples, which no other rank is told. What the ranks exchange
goes by way of the check, so that it is seen which gradients were sent, and when.
"""

from __future__ import annotations

import functools
import secrets
import time
from collections.abc import Sequence
from contextlib import ExitStack

import pytest
import torch
import torch.distributed as dist
from judging import (
    assert_sent,
    assert_states_equal,
    drawn_tokens,
    drawn_values,
    on_so_many_ranks,
)
from probes.models import (
    Locked,
    Timed,
    layers,
    odd_model,
    sgd,
    trained,
    values_of,
    with_values,
)
from torch import Tensor

from common.errors import UserError
from common.samples import Interval, paired_ratio

pytestmark = pytest.mark.two_ranks
RANKS = on_so_many_ranks(2, graded=(3, 4))
FLAT = pytest.param("flat", marks=pytest.mark.grading)  # naive_ddp has both
NAIVE_AND_FLAT = pytest.mark.parametrize("name", ["naive", FLAT])
STEPS, TIMED_STEPS, LAYERS = 4, 3, 20


def gradients_of(model: torch.nn.Module, loss: Tensor) -> list[Tensor]:
    """Returns the gradient of each parameter that is trained; zeros where none comes."""
    return list(torch.autograd.grad(loss, trained(model), materialize_grads=True))


def twin_of(
    values: dict[str, Tensor], batches: Sequence, used_by: Sequence[Sequence[bool]]
) -> tuple[dict[str, Tensor], list[list[Tensor]]]:
    """Trains one process on the samples of all ranks.

    Args:
        values: the first parameters and buffers.
        batches: rank → step → micro-batch → tokens.
        used_by: rank → step → whether it uses the branch.

    Returns:
        the last parameters and buffers; rank → its own gradients, of all steps.
    """
    twin, ranks = with_values(odd_model(), values), len(batches)
    optimizer = sgd(twin)
    local: list[list[Tensor]] = [[] for _ in range(ranks)]
    for step in range(len(batches[0])):
        by_rank = []
        for rank in range(ranks):
            parts = batches[rank][step]
            losses = [twin(tokens, used_by[rank][step]) / len(parts) for tokens in parts]
            by_rank.append(gradients_of(twin, torch.stack(losses).sum()))
            local[rank] += by_rank[-1]
        for parameter, same in zip(trained(twin), zip(*by_rank, strict=True), strict=True):
            parameter.grad = torch.stack(same).mean(0)
        optimizer.step()
    return values_of(twin), local


def check_training(
    on_ranks, name: str, ranks: int, parts: int = 1, members: list[int] | None = None
) -> None:
    """Checks that ranks train as the twin does, and begin with their first rank's state.

    In each step another rank is the only one that uses the branch. What they exchange is each
    rank's gradients, once: those of the last micro-batch with what was added up before.
    """
    these = members or list(range(ranks))
    values, tokens = drawn_values(odd_model, ranks), drawn_tokens(ranks, STEPS, parts)
    used_by = [[rank == these[step % len(these)] for step in range(STEPS)] for rank in range(ranks)]
    last, local = twin_of(
        values[these[0]], [tokens[rank] for rank in these], [used_by[rank] for rank in these]
    )
    together = on_ranks(ranks)
    arguments = [(name, values[r], tokens[r], used_by[r], members) for r in range(ranks)]
    results = together.call_each("train", arguments)
    for place, rank in enumerate(these):
        where = f"on {len(these)} ranks, rank {rank}"
        assert_states_equal(results[rank]["first"], values[these[0]], f"{where}, at the beginning")
        assert_states_equal(results[rank]["last"], last, f"{where}, in the end")
        assert_sent(together.exchange, rank, local[place], len(these))


def check_overlap(on_ranks, name: str, ranks: int, after_an_error: bool = False) -> None:
    """Checks that gradients are sent while the layers before them are still to be computed.

    Each layer's gradient needs factors that the check tells when it is asked: then those of the
    layers behind must have been sent, but for two, and of the last one nine tenths of the others.
    An exception may have left ``no_sync`` before.
    """
    together, model = on_ranks(ranks), functools.partial(Locked, LAYERS, 16)
    torch.manual_seed(secrets.randbits(62))
    factors = 1 + torch.rand(ranks, LAYERS, 3, 16, dtype=torch.float64)
    values = drawn_values(lambda: model(lambda _: torch.ones(3, 16)), ranks)
    inputs = [torch.randn(3, 16, dtype=torch.float64) for _ in range(ranks)]

    def asked(rank: int, layer: int) -> Tensor:
        together.exchange.mark(rank)
        return factors[rank][layer]

    answers = [functools.partial(asked, rank) for rank in range(ranks)]
    together.call_each(
        "overlap",
        [(name, values[r], inputs[r], answers[r], after_an_error) for r in range(ranks)],
    )
    for rank in range(ranks):
        twin = with_values(model(factors[rank].__getitem__), values[0])
        assert_sent(together.exchange, rank, gradients_of(twin, twin(inputs[rank])), ranks)
        launched = together.exchange.sent(rank, "all_reduce")
        where, all_bytes = f"on {ranks} ranks, rank {rank}", sum(one.nbytes for one in launched)
        assert len(launched) > 10, f"{where}: {len(launched)} all-reduces for 40 gradients"
        for asks in range(4, LAYERS + 1):
            early = [one for one in launched if one.moment < asks]
            share, least = sum(one.nbytes for one in early) / all_bytes, (asks - 3) / LAYERS
            assert share >= 0.99 * least, (
                f"{where}: {share:.0%} of the bytes are sent when {asks - 1} of {LAYERS} layers "
                "have their gradients"
            )
        assert len(early) >= 0.9 * len(launched), (
            f"{where}: {len(early)} of {len(launched)} all-reduces precede the last gradient"
        )


def check_two_passes(on_ranks, name: str, is_refused: bool) -> None:
    """Checks two backward passes before one exchange: they add up, or the second is refused."""
    values, tokens = drawn_values(odd_model, 2), drawn_tokens(2, 1, 2)
    results = on_ranks(2).call_each(
        "two_passes", [(name, values[r], tokens[r][0]) for r in range(2)]
    )
    if is_refused:
        why = "a second backward pass before the exchange is not refused"
        assert all(isinstance(gradients, str) for gradients in results), why
        return
    twin = with_values(odd_model(), values[0])
    losses = [twin(each, True) for rank in range(2) for each in tokens[rank][0]]
    mean = gradients_of(twin, torch.stack(losses).sum() / 2)
    names = [name for name, parameter in twin.named_parameters() if parameter.requires_grad]
    for rank, gradients in enumerate(results):
        expected = dict(zip(names, mean, strict=True))
        assert_states_equal(gradients, expected, f"on 2 ranks, rank {rank}, gradients")


@RANKS
def test_naive_ddp_trains_as_its_twin(on_ranks, ranks: int) -> None:
    check_training(on_ranks, "naive", ranks)


@pytest.mark.grading
@RANKS
def test_flat_ddp_trains_as_its_twin(on_ranks, ranks: int) -> None:
    check_training(on_ranks, "flat", ranks)


def test_all_reduces_are_one_a_gradient_and_one_a_dtype(on_ranks) -> None:
    together = on_ranks(2)
    for name, count in (("naive", len(trained(odd_model()))), ("flat", 2)):
        together.exchange.log.clear()
        values, tokens = drawn_values(odd_model, 2), drawn_tokens(2, 1)
        together.call_each("train", [(name, values[r], tokens[r], [True]) for r in range(2)])
        for rank in range(2):
            launched = len(together.exchange.sent(rank, "all_reduce"))
            assert launched == count, f"{name}: {launched} all-reduces a step"


@NAIVE_AND_FLAT
def test_a_group_of_some_ranks_trains_by_itself(on_ranks, name: str) -> None:
    check_training(on_ranks, name, 3, members=[1, 2])


@NAIVE_AND_FLAT
def test_gradients_of_two_passes_add_up(on_ranks, name: str) -> None:
    check_two_passes(on_ranks, name, is_refused=False)


@RANKS
def test_overlapped_ddp_trains_as_its_twin(on_ranks, ranks: int) -> None:
    check_training(on_ranks, "overlapped", ranks)


def test_overlapped_ddp_of_some_ranks_trains_by_itself(on_ranks) -> None:
    check_training(on_ranks, "overlapped", 3, members=[1, 2])


@RANKS
def test_overlapped_ddp_accumulates(on_ranks, ranks: int) -> None:
    check_training(on_ranks, "overlapped", ranks, parts=2)


def test_overlapped_ddp_exchanges_after_an_error(on_ranks) -> None:
    check_overlap(on_ranks, "overlapped", 2, after_an_error=True)


def test_overlapped_ddp_refuses_a_second_pass(on_ranks) -> None:
    check_two_passes(on_ranks, "overlapped", is_refused=True)


@RANKS
def test_overlapped_ddp_sends_early(on_ranks, ranks: int) -> None:
    check_overlap(on_ranks, "overlapped", ranks)


@RANKS
def test_bucketed_ddp_trains_as_its_twin(on_ranks, ranks: int) -> None:
    check_training(on_ranks, "bucketed", ranks)


@pytest.mark.grading
@RANKS
def test_default_buckets_train_as_their_twin(on_ranks, ranks: int) -> None:
    check_training(on_ranks, "bucketed by default", ranks)


@pytest.mark.grading
def test_bucketed_ddp_of_some_ranks_trains_by_itself(on_ranks) -> None:
    check_training(on_ranks, "bucketed", 3, members=[1, 2])


@RANKS
def test_bucketed_ddp_accumulates(on_ranks, ranks: int) -> None:
    check_training(on_ranks, "bucketed", ranks, parts=2)


@pytest.mark.grading
def test_bucketed_ddp_exchanges_after_an_error(on_ranks) -> None:
    check_overlap(on_ranks, "bucketed", 2, after_an_error=True)


@pytest.mark.grading
def test_bucketed_ddp_refuses_a_second_pass(on_ranks) -> None:
    check_two_passes(on_ranks, "bucketed", is_refused=True)


@RANKS
def test_bucketed_ddp_sends_early(on_ranks, ranks: int) -> None:
    check_overlap(on_ranks, "bucketed", ranks)


def test_buckets_are_those_of_torch(on_ranks) -> None:
    assign = dist._compute_bucket_assignment_by_size
    together = on_ranks(2)
    for cap_mb in (1e-6, 0.0005, 0.001, 0.003, 1.0, None):
        # PyTorch's default, of a first bucket and others, shows in more than the first one's bytes.
        shape = (20, 16) if cap_mb else (4, 400)
        parameters = list(reversed(list(layers(*shape).float().parameters())))
        limits = [2**20, 25 * 2**20] if cap_mb is None else [int(cap_mb * 2**20)]
        expected, _ = assign(parameters, limits, [False] * len(parameters))
        for buckets in together.call("buckets", cap_mb, *shape):
            assert buckets == expected, f"cap of {cap_mb} MiB: other buckets than PyTorch's"
        together.exchange.log.clear()
        together.call("bucketed_step", cap_mb, *shape)
        sizes = [sum(parameters[index].nbytes for index in bucket) for bucket in expected]
        for rank in range(2):
            sent = [one.nbytes for one in together.exchange.sent(rank, "all_reduce")]
            assert sent == sizes, f"cap of {cap_mb} MiB: what is sent is not its buckets, in order"


def step_times(student, reference) -> Interval:
    """Compares steps on a slow network, whose computation is a pause, so that cores do not matter.

    They are timed here and not by the student. Rounds alternate between his and the reference's.
    What he sends is seen at the network: all gradients.
    """
    least = 0.95 * 2 * TIMED_STEPS * Timed.COUNT * 4 * Timed.ELEMENTS  # of two ranks, once each
    with ExitStack() as limits:
        try:
            for one in (student, reference):
                limits.enter_context(one.sandbox.limited_network("750mbit"))
        except UserError as refusal:
            pytest.skip(f"not timed here: {refusal}")
        jobs = {"his": student.over_gloo(2), "reference": reference.over_gloo(2)}
        times = {name: [] for name in jobs}
        for number in range(10):
            for name in list(jobs)[:: 1 if number % 2 else -1]:
                factors = [1 + secrets.randbelow(1000) / 1000 for _ in range(2)]
                arguments = [("bucketed to 1 MiB", TIMED_STEPS, factor) for factor in factors]
                before, began = student.sandbox.sent_bytes(), time.perf_counter()
                with ExitStack() as others:
                    if name != "his":  # nothing of his computes meanwhile
                        others.enter_context(student.sandbox.still())
                        began = time.perf_counter()
                    gradients = jobs[name].call_each("timed_steps", arguments)
                    times[name].append(time.perf_counter() - began)
                for means in gradients:
                    wanted = [sum(factors) / 2] * Timed.COUNT
                    assert means == pytest.approx(wanted), "other gradients"
                sent = student.sandbox.sent_bytes() - before
                assert name != "his" or sent > least, f"{sent} bytes are sent, of {least:.0f}"
    # The first two rounds make the models and the connections.
    return paired_ratio(times["his"][2:], times["reference"][2:])


@pytest.mark.grading
def test_steps_are_at_most_half_as_long_again_as_the_references(student, reference) -> None:
    assert step_times(student, reference).estimate <= 1.5


@pytest.mark.grading
def test_steps_are_as_fast_as_the_references(student, reference) -> None:
    assert step_times(student, reference).low <= 1.1


def test_models_that_differ_are_refused_on_all_ranks_alike(on_ranks) -> None:
    cases = {
        "other shape": "rank 2: parameter weight (3×4, float32)",
        "integers": "rank 0: parameter weight is int64",
        "fewer": "parameter bias (4, float32)",
        "none": "rank 0: the model has no parameters",
    }
    together = on_ranks(3)
    for case, words in cases.items():
        for name in ("naive", "flat", "overlapped", "bucketed"):
            for said in together.call("refused", case, name):
                assert said.startswith("UserError"), said
                assert words in said, said


@pytest.mark.parametrize(
    "name",
    [
        "bucketed",
        *(
            pytest.param(name, marks=pytest.mark.grading)
            for name in ("naive", "flat", "overlapped", "bucketed by default")
        ),
    ],
)
def test_one_rank_trains_alone(on_ranks, name: str) -> None:
    check_training(on_ranks, name, 1)
