"""A4.1: pairs of runs, with what makes their comparison void."""

from __future__ import annotations

from dataclasses import replace

from common.exercises.comparable_runs import Conditions, differing_conditions, differing_setting

TCP = Conditions("A100", "TCP between 2 hosts", world_size=4, backend="nccl")
EMULATED = replace(TCP, device="EPYC", network="2 emulated hosts at 1 Gbit/s", is_emulated=True)
ON_ONE = replace(TCP, network="NVLink", world_size=2)
ALONE = replace(TCP, network=None, world_size=1, exchanged=False)

PAIRS = (
    (TCP, TCP, None),
    (TCP, replace(TCP, device="H100"), "device"),
    (TCP, replace(TCP, device="H100", network="NVLink"), "device"),
    (TCP, replace(TCP, device=None), None),
    (replace(TCP, device=None), replace(TCP, device=None), None),
    (TCP, replace(TCP, network="NVLink"), "network"),
    (TCP, replace(TCP, network=None), None),
    (TCP, ON_ONE, None),
    (TCP, replace(ON_ONE, backend="gloo"), "network"),
    (TCP, replace(ON_ONE, ranks_per_gpu=2), "network"),
    (TCP, replace(ON_ONE, device="H100"), "device"),
    (TCP, ALONE, None),
    (TCP, replace(ALONE, device="H100"), "device"),
    (EMULATED, EMULATED, None),
    (EMULATED, replace(EMULATED, network="2 emulated hosts at 100 Mbit/s"), "network"),
    (EMULATED, replace(EMULATED, network="4 emulated hosts", world_size=8), "network"),
    (EMULATED, replace(EMULATED, network=None, is_emulated=False), "network"),
    (EMULATED, replace(ALONE, device="EPYC"), None),
    (replace(EMULATED, is_emulated=False), EMULATED, None),
    (replace(TCP, network=None, exchanged=False), replace(TCP, network="NVLink"), None),
)


def test_pairs_are_judged_alike_in_either_order() -> None:
    for one, other, expected in PAIRS:
        assert differing_conditions(one, other) == expected, (one, other)
        assert differing_conditions(other, one) == expected, (other, one)


def test_the_first_setting_that_differs_is_named() -> None:
    one = {"model": "gpt2", "batch": 8, "seed": 1}
    other = {"model": "gpt2", "batch": 4, "seed": 2}
    assert differing_setting(one, other, ["model", "seed", "batch"]) == "seed"
    assert differing_setting(one, other, ["batch", "seed"]) == "batch"
    assert differing_setting(one, other, ["model"]) is None
    assert differing_setting(one, other, []) is None
    older = {"model": "gpt2", "seed": 1}
    assert differing_setting(one, older, ["batch"]) == "batch"
    assert differing_setting(older, one, ["batch"], unknown_agrees=True) is None
    assert differing_setting(older, older, ["batch"]) is None
