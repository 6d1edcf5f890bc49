"""A4.1: pairs of runs, with what makes their comparison void."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
from judging import shuffled

from common.course.sandbox.student import Student

Run = dict[str, Any]


def pairs(draw: np.random.Generator) -> Iterator[tuple[str, Run, Run, str | None]]:
    """Yields pairs of runs: in words, the two, and what makes their comparison void.

    Names and numbers are drawn: what counts is whether they are equal.
    """
    device, other_device, cpu = names(draw, "A100", "H100", "EPYC", "L4", "Xeon")[:3]
    network, other, links, slow = names(draw, "TCP", "NVLink", "IB", "PCIe", "Ethernet")[:4]
    backend, other_backend = names(draw, "nccl", "gloo", "mpi")[:2]
    few, many, more = sorted(draw.choice(np.arange(2, 40), 3, replace=False).tolist())
    run = {"device": device, "network": network, "world_size": many, "backend": backend}
    emulated = run | {"device": cpu, "network": links, "is_emulated": True}
    smaller = run | {"network": other, "world_size": few}
    alone = run | {"network": None, "world_size": 1, "exchanged": False}

    yield "the same", run, run, None
    yield "another device", run, run | {"device": other_device}, "device"
    both = run | {"device": other_device, "network": other}
    yield "another device and another network", run, both, "device"
    yield "a device that is not recorded", run, run | {"device": None}, None
    yield "two such", run | {"device": None}, run | {"device": None}, None
    yield "such a device, another network", run | {"device": None}, smaller, None
    yield "another network", run, run | {"network": other}, "network"
    yield "a network that is not recorded", run, run | {"network": None}, None
    yield "two such networks", run | {"network": None}, run | {"network": None}, None
    yield "fewer ranks on another network", run, smaller, None
    yield "the same, over another backend", run, smaller | {"backend": other_backend}, "network"
    yield "the same, with two ranks a GPU", run, smaller | {"ranks_per_gpu": 2}, "network"
    yield "the same, on another device", run, smaller | {"device": other_device}, "device"
    yield "other backends over one network", run, run | {"backend": other_backend}, None
    yield "a backend that is not recorded", run, smaller | {"backend": None}, "network"
    unknown = run | {"world_size": None}
    yield "numbers of ranks that are not recorded", unknown, unknown | {"network": other}, "network"
    yield "one rank, nothing exchanged", run, alone, None
    yield "the same, on another device", run, alone | {"device": other_device}, "device"
    silent = run | {"exchanged": False}
    yield "nothing exchanged, another network", silent, run | {"network": other}, None
    yield "two that exchanged nothing", silent, silent | {"network": other}, None
    yield "two emulated networks of one name", emulated, emulated, None
    yield "two of different names", emulated, emulated | {"network": slow}, "network"
    larger = emulated | {"network": slow, "world_size": more}
    yield "the same, with more ranks", emulated, larger, "network"
    plain = emulated | {"network": None, "is_emulated": False}
    yield "an emulated and one without a name", emulated, plain, "network"
    yield "an emulated one of no name", emulated | {"network": None}, emulated, "network"
    yield "an emulated one, nothing exchanged", emulated, alone | {"device": cpu}, None
    yield "one name, one emulated", emulated | {"is_emulated": False}, emulated, None


def names(draw: np.random.Generator, *some: str) -> list[str]:
    """Returns names in any order, each with a number behind it."""
    return [f"{name}-{draw.integers(10, 1000)}" for name in draw.permutation(some)]


def test_pairs_are_judged_alike_in_either_order(
    student: Student, generator: np.random.Generator
) -> None:
    runs = student.exercise("comparable_runs")
    for words, first, second, expected in shuffled(pairs(generator), generator):
        conditions = [runs.Conditions(**run) for run in (first, second)]
        for order, two in (("", conditions), (" the other way round", conditions[::-1])):
            answer = runs.differing_conditions(*two)
            assert answer == expected, f"{words}{order}: {answer} makes it void"


def test_the_first_setting_that_differs_is_named(
    student: Student, generator: np.random.Generator
) -> None:
    differing_setting = student.exercise("comparable_runs").differing_setting
    model, batch, seed, rate = names(generator, "model", "batch", "seed", "rate")
    run = {model: "gpt2", batch: 8, seed: 1, rate: 0}
    other = {model: "gpt2", batch: 4, seed: 2, rate: 0}

    def check(words: str, expected: str | None, *arguments: Any, **keywords: Any) -> None:
        assert differing_setting(*arguments, **keywords) == expected, f"the setting named: {words}"

    check("the second of three", seed, run, other, [model, seed, batch])
    check("the first of two", batch, run, other, [batch, seed])
    check("none differs", None, run, other, [model, rate])
    check("none has to agree", None, run, other, [])
    older = {model: "gpt2", seed: 1}
    check("one has no such setting", batch, run, older, [model, batch])
    check("the other has no such setting", batch, older, run, [batch])
    check("it may be unknown", None, older, run, [batch], unknown_agrees=True)
    check("it may be unknown, in the other", None, run, older, [batch], unknown_agrees=True)
    check("known ones differ", batch, run, other, [batch], unknown_agrees=True)
    for empty in (0, False, ""):  # are settings, too
        zero = run | {batch: empty}
        check(f"{empty!r} and 8", batch, zero, run, [batch], unknown_agrees=True)
        check(f"8 and {empty!r}", batch, run, zero, [batch], unknown_agrees=True)
        check(f"{empty!r} and nothing", batch, zero, older, [batch])
    check("neither has it", None, older, older, [batch])
    check("a tuple of names", batch, run, other, (model, batch))
