"""A4.1: pairs of runs, with what makes their comparison void."""

from __future__ import annotations

from common.course.sandbox.student import Student

TCP = {"device": "A100", "network": "TCP between 2 hosts", "world_size": 4, "backend": "nccl"}
EMULATED = TCP | {"device": "EPYC", "network": "2 emulated hosts at 1 Gbit/s", "is_emulated": True}
ON_ONE = TCP | {"network": "NVLink", "world_size": 2}
ALONE = TCP | {"network": None, "world_size": 1, "exchanged": False}

PAIRS = (
    (TCP, TCP, None),
    (TCP, TCP | {"device": "H100"}, "device"),
    (TCP, TCP | {"device": "H100", "network": "NVLink"}, "device"),
    (TCP, TCP | {"device": None}, None),
    (TCP | {"device": None}, TCP | {"device": None}, None),
    (TCP, TCP | {"network": "NVLink"}, "network"),
    (TCP, TCP | {"network": None}, None),
    (TCP, ON_ONE, None),
    (TCP, ON_ONE | {"backend": "gloo"}, "network"),
    (TCP, ON_ONE | {"ranks_per_gpu": 2}, "network"),
    (TCP, ON_ONE | {"device": "H100"}, "device"),
    (TCP, ALONE, None),
    (TCP, ALONE | {"device": "H100"}, "device"),
    (EMULATED, EMULATED, None),
    (EMULATED, EMULATED | {"network": "2 emulated hosts at 100 Mbit/s"}, "network"),
    (EMULATED, EMULATED | {"network": "4 emulated hosts", "world_size": 8}, "network"),
    (EMULATED, EMULATED | {"network": None, "is_emulated": False}, "network"),
    (EMULATED, ALONE | {"device": "EPYC"}, None),
    (EMULATED | {"is_emulated": False}, EMULATED, None),
    (TCP | {"network": None, "exchanged": False}, TCP | {"network": "NVLink"}, None),
)


def test_pairs_are_judged_alike_in_either_order(student: Student) -> None:
    runs = student.exercise("comparable_runs")
    for one, other, expected in PAIRS:
        conditions = [runs.Conditions(**each) for each in (one, other)]
        assert runs.differing_conditions(*conditions) == expected, (one, other)
        assert runs.differing_conditions(*conditions[::-1]) == expected, (other, one)


def test_the_first_setting_that_differs_is_named(student: Student) -> None:
    differing_setting = student.exercise("comparable_runs").differing_setting
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
