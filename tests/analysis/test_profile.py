"""Who has which moment of a step, and what follows: hand-made traces whose answers are known.

Times are in microseconds. On the host, ``call`` makes an operator's call; on a device ``launched``
makes the host's launch and the kernel that runs later.
"""

from __future__ import annotations

import itertools
from pathlib import Path

import pandas as pd
import pytest
from hypothesis import given
from hypothesis import strategies as st

from common.analysis.one_device.profile import ProfileRun
from common.analysis.runs import Run
from common.errors import UserError
from common.traces.attribution import attribute, exclusive
from common.traces.profiler_trace import Event
from common.traces.trace_work import Piece, Window


def call(name: str, start: float, end: float, thread: int = 1, shapes=()) -> Event:
    return Event(f"aten::{name}", start, end, thread, shapes)


def marked(name: str, start: float, end: float) -> Event:
    return Event(name, start, end, 1, kind="range")


def launched(
    number: int, at: float, start: float, end: float, stream: int = 7, name: str = "gemm", thread=1
) -> list[Event]:
    launch = Event("cudaLaunchKernel", at, at + 1, thread, kind="launch", correlation=number)
    return [launch, Event(name, start, end, stream, kind="kernel", correlation=number)]


def times(table: pd.DataFrame, *keys: str) -> dict:
    return table.groupby(list(keys))["time_us"].sum().to_dict()


ONE_STEP = [
    marked("ProfilerStep#4", 0, 100),
    marked("data", 2, 10),
    call("to", 3, 8),
    marked("forward", 12, 40),
    call("linear", 14, 30),
    call("t", 15, 17),
    call("addmm", 18, 28, shapes=((768,), (256, 256), (256, 768))),
    call("copy_", 19, 21),  # the bias, which addmm copies to where it adds
    call("gelu", 31, 36),
    marked("backward", 42, 80),
    Event("autograd::engine::evaluate_function: MmBackward0", 44, 70, 1),
    Event("MmBackward0", 46, 66, 1),
    call("mm", 48, 60),
    marked("optimizer", 82, 96),
    marked("Optimizer.step#SGD.step", 83, 95),
    call("add_", 84, 90),
]


def test_an_operator_has_its_call_with_all_that_it_calls_inside():
    table = attribute(ONE_STEP)
    row = table[table["operator"] == "aten::addmm"].iloc[0]
    assert (row["time_us"], row["calls"], row["shapes"]) == (10, 1, "768 256x256 256x768")
    assert "aten::copy_" not in set(table["operator"])


def test_what_only_passes_on_has_what_remains_between_the_operators_inside():
    by_operator = times(attribute(ONE_STEP), "operator")
    # linear runs from 14 to 30, with t from 15 to 17 and addmm from 18 to 28 in it.
    assert by_operator["aten::linear"] == 1 + 1 + 2
    assert by_operator["autograd::engine::evaluate_function: MmBackward0"] == 2 + 4
    assert by_operator["MmBackward0"] == 2 + 6


def test_categories_of_a_step_by_hand():
    assert times(attribute(ONE_STEP), "category") == {
        "data": 5,
        "matrix products": 10 + 12,
        "activation & element-wise": 5,
        "views, allocation, autograd": 2 + 4 + 6 + 8,  # t, linear, the engine and its node
        "optimizer": 6,
        # Ranges are no operators: in 8 of the optimizer's 14 µs, Python is between its calls.
        "idle": 3 + (2 + 1 + 4) + (2 + 10) + 8 + (2 + 2 + 2 + 2 + 4),
    }


def test_phases_of_a_step_are_as_long_as_their_ranges():
    assert times(attribute(ONE_STEP), "phase") == {
        **{"data": 8, "forward": 28, "backward": 38, "optimizer": 14},
        "between phases": 2 + 2 + 2 + 2 + 4,
    }


def test_steps_are_numbered_from_0_and_each_adds_up_to_its_own_length():
    later = [
        Event(
            e.name.replace("#4", "#5"), e.start_us + 130, e.end_us + 130, e.thread, e.shapes, e.kind
        )
        for e in ONE_STEP
    ]
    longer = [marked("ProfilerStep#5", 130, 250) if "#5" in e.name else e for e in later]
    assert times(attribute([*longer, *ONE_STEP]), "step") == {0: 100, 1: 120}


def test_backward_operators_of_autograds_own_thread_are_in_the_backward_phase():
    # The main thread waits in the engine from 10 to 90; the other thread computes.
    events = [
        *[marked("ProfilerStep#0", 0, 100), marked("backward", 5, 95)],
        Event("autograd::engine::execute", 10, 90, 1),
        *[call("mm", 20, 50, thread=2), call("sum", 50, 60, thread=2)],
    ]
    table = attribute(events)
    backward = times(table[table["phase"] == "backward"], "category")
    assert backward["matrix products"] == 30
    assert backward["activation & element-wise"] == 10
    assert backward["views, allocation, autograd"] == 80 - 40
    assert sum(backward.values()) == 90


def test_two_threads_at_once_do_not_make_a_step_longer():
    events = [
        *[marked("ProfilerStep#0", 0, 100), marked("backward", 0, 100)],
        *[call("mm", 10, 50, thread=1), call("gelu", 30, 70, thread=2)],
    ]
    by_category = times(attribute(events), "category")
    assert by_category == {"matrix products": 40, "activation & element-wise": 20, "idle": 40}


def test_a_trace_without_steps_is_refused():
    with pytest.raises(UserError, match="no steps"):
        attribute([call("mm", 0, 1)])


def gpu_step(offset: float, number: int) -> list[Event]:
    """Makes a step in which the host launches within 60 µs what the device then computes for 100.

    Kernels: forward 20..60, backward 60..90 and 95..110 after a gap of 5, the optimizer 110..118.
    """
    return [
        marked(f"ProfilerStep#{number}", offset, offset + 60),
        *[marked("forward", offset + 1, offset + 20), marked("backward", offset + 20, offset + 40)],
        marked("optimizer", offset + 40, offset + 59),
        *[call("linear", offset + 2, offset + 10), call("addmm", offset + 3, offset + 9)],
        *launched(10 * number + 1, offset + 5, offset + 20, offset + 60),
        # Autograd's thread launches the backward kernels.
        call("mm", offset + 22, offset + 30, thread=2),
        *launched(10 * number + 2, offset + 24, offset + 60, offset + 90, thread=2),
        call("sum", offset + 31, offset + 35, thread=2),
        *launched(10 * number + 3, offset + 32, offset + 95, offset + 110, thread=2),
        call("_fused_adamw_", offset + 42, offset + 50),
        *launched(10 * number + 4, offset + 45, offset + 110, offset + 118, name="multi_tensor"),
    ]


TWO_GPU_STEPS = [*gpu_step(0, 0), *gpu_step(110, 1)]


def test_on_a_device_a_step_runs_from_its_first_kernel_to_the_next_steps_first():
    # The first kernels start at 20 and 130, the last ends at 228.
    assert times(attribute(TWO_GPU_STEPS), "step") == {0: 110, 1: 98}


def test_kernels_belong_to_the_operator_and_the_phase_that_launched_them():
    table = attribute(TWO_GPU_STEPS)
    first = table[table["step"] == 0]
    assert times(first[first["category"] != "idle"], "phase", "operator") == {
        ("forward", "aten::addmm"): 40,
        ("backward", "aten::mm"): 30,
        ("backward", "aten::sum"): 15,
        ("optimizer", "aten::_fused_adamw_"): 8,
    }
    assert first.loc[first["operator"] == "aten::addmm", "category"].item() == "matrix products"
    assert first.loc[first["phase"] == "optimizer", "category"].unique().tolist() == ["optimizer"]


def test_a_device_is_idle_for_the_kernel_that_comes_next():
    table = attribute(TWO_GPU_STEPS)
    idle = table[table["category"] == "idle"]
    # 5 before the sum of each backward pass; 12 between the last kernel and the next step's first.
    assert times(idle, "step", "phase") == {
        **{(0, "backward"): 5, (0, "between phases"): 12},
        (1, "backward"): 5,
    }


def test_a_copy_beside_a_kernel_takes_no_time_and_one_alone_does():
    # The first runs beside the kernels of 20 to 60 and 60 to 90, of which it began before one.
    hidden = launched(91, 15, 30, 80, stream=9, name="Memcpy HtoD")
    alone = launched(92, 16, 91, 93, stream=9, name="Memcpy HtoD")
    table = attribute([*TWO_GPU_STEPS, *hidden, *alone])
    copies = table[table["operator"] == "Memcpy HtoD"].iloc[0]
    assert (copies["time_us"], copies["calls"], copies["category"]) == (2, 2, "copies & fills")
    assert times(table, "step") == {0: 110, 1: 98}


def test_a_copy_that_outlasts_its_step_is_one_call():
    # From 120, in the gap between the steps, into the second one, where kernels hide it.
    table = attribute([*TWO_GPU_STEPS, *launched(91, 15, 120, 140, stream=9, name="Memcpy HtoD")])
    copies = table[table["operator"] == "Memcpy HtoD"]
    assert (copies["calls"].sum(), copies["time_us"].sum()) == (1, 10)


def test_several_kernels_of_one_call_are_one_call():
    second = launched(93, 6, 118, 124)
    table = attribute([*TWO_GPU_STEPS, *second])
    row = table[(table["operator"] == "aten::addmm") & (table["step"] == 0)].iloc[0]
    assert (row["calls"], row["time_us"]) == (1, 46)


def test_a_step_without_kernels_is_refused():
    with pytest.raises(UserError, match="launched no kernels"):
        attribute([*gpu_step(0, 0), marked("ProfilerStep#9", 60, 80), *gpu_step(110, 1)])


def test_a_last_step_that_the_loop_never_entered_is_none():
    never = marked("ProfilerStep#9", 170, 190)
    assert times(attribute([*TWO_GPU_STEPS, never]), "step") == {0: 110, 1: 98}


PIECES = st.lists(st.tuples(st.integers(0, 60), st.integers(1, 30), st.integers(0, 2)), max_size=12)


@given(PIECES)
def test_every_moment_belongs_to_the_lowest_ranked_piece_or_to_none(spans):
    pieces = [
        Piece(start, start + length, "", "", "", "", index, rank)
        for index, (start, length, rank) in enumerate(spans)
    ]
    got = list(exclusive(pieces, Window(10, 50)))
    # The parts follow each other without a gap, from the window's start to its end.
    assert [got[0][1], got[-1][2]] == [10, 50]
    assert all(one[2] == other[1] for one, other in itertools.pairwise(got))
    for moment in range(10, 50):  # brute force
        owner = next(piece for piece, start, end in got if start <= moment < end)
        there = [piece for piece in pieces if piece.start_us <= moment < piece.end_us]
        expected = min(((piece.rank, piece.start_us) for piece in there), default=None)
        assert (owner and (owner.rank, owner.start_us)) == expected


OPERATORS = [
    # phase, category, operator, calls, µs
    ("forward", "matrix products", "aten::mm", 2, 4000),
    ("forward", "activation & element-wise", "aten::gelu", 1, 1000),
    ("forward", "idle", "", 0, 500),
    ("backward", "matrix products", "aten::mm", 4, 8000),
    ("optimizer", "optimizer", "aten::add_", 3, 500),
]
"""One step of 14 ms."""
FLOPS = [
    ("forward", "aten::mm", 100),
    ("forward", "aten::gelu", 4),
    ("backward", "aten::mm", 200),
    ("optimizer", "aten::add_", 16),
]


def profile_of(times_ms: dict[bool, list[float]]) -> ProfileRun:
    """Makes a profile of three equal steps, with these times under the profiler and without."""
    columns = ["phase", "category", "operator", "calls", "time_us"]
    step = pd.DataFrame(OPERATORS, columns=columns).assign(shapes="")
    opened = Run(folder=Path("nowhere"), source=Path("nowhere"))
    settings = {"model": "gpt2-nano", "batch_size": 1, "seq_len": 32, "precision": "float32"}
    settings |= {"tf32": False, "loss_chunks": 1, "optimizer": "sgd", "attention": "sdpa"}
    settings |= {"optimizer_implementation": "fused", "compile": False}
    opened.__dict__["settings"] = settings | {"activation_checkpointing": False}
    steps = [(profiled, time_ms) for profiled, times in times_ms.items() for time_ms in times]
    return ProfileRun(
        opened=opened,
        operators=pd.concat([step.assign(step=index) for index in range(3)], ignore_index=True),
        steps=pd.DataFrame(steps, columns=["profiled", "time_ms"]),
        roofline=pd.DataFrame(FLOPS, columns=["phase", "operator", "flops"]),
        peak=None,
    )


PROFILE = profile_of({True: [14.0], False: [13.0]})


def test_costs_of_phases_are_over_the_forward_passes():
    costs = PROFILE.phase_costs()
    assert costs.at["backward", "ms_over_forward"] == pytest.approx(8 / 5.5)
    assert costs.at["backward", "flops_over_forward"] == pytest.approx(200 / 104)
    assert costs["share"].sum() == pytest.approx(1)


def test_operations_are_of_the_kind_of_work_and_all_of_the_optimizers_of_one():
    shares = PROFILE.flops_shares()
    assert shares.to_dict() == {
        "matrix products": pytest.approx(300 / 320),
        "activation & element-wise": pytest.approx(4 / 320),
        "optimizer": pytest.approx(16 / 320),
    }


def test_what_can_be_fused_lies_between_matrix_products():
    assert (PROFILE.between_calls, PROFILE.between_share) == (1, pytest.approx(1 / 14))


def test_the_profilers_cost_is_told_from_the_spread_of_the_steps():
    plain = [10.0, 11.0, 10.0, 11.0]
    assert profile_of({False: plain, True: [13.0, 14.0, 13.5, 13.0]}).overhead.is_settled
    # longer in the median, and in three pairs of four
    assert not profile_of({False: plain, True: [10.5, 11.5, 12.5, 10.5]}).overhead.is_settled
    assert not profile_of({False: plain[:3], True: [13.0, 14.0, 13.5]}).overhead.is_settled
