"""Overlap of computation and communication: brute force, and HolisticTraceAnalysis.

Traces of real ranks are read in tests/perfmodel/test_communication.py.
"""

from __future__ import annotations

import itertools
import json
import logging
import random
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from common.errors import NotYetWritten, UserError
from common.exercises import step_apart
from common.traces import coarse_intervals
from common.traces.step_overlap import collectives_of, read_step_overlap

HOST, STREAM, NCCL_STREAM = 100, 7, 20
NCCL = "ncclDevKernel_AllReduce_Sum_f32_RING_LL(ncclDevKernelArgsStorage<4096ul>)"
MAIN, ENGINE, GLOO = 1, 2, 3


def record(category: str, name: str, start: float, end: float, thread: int, **arguments) -> dict:
    place = {"ph": "X", "pid": HOST, "tid": thread, "cat": category, "name": name}
    return place | {"ts": start, "dur": end - start, "args": arguments}


def write(path: Path, records: list[dict]) -> Path:
    """Writes a trace with the heading by which HolisticTraceAnalysis knows a rank."""
    heading = {"schemaVersion": 1, "distributedInfo": {"backend": "nccl", "rank": 0}}
    path.write_text(json.dumps(heading | {"traceEvents": records}, indent=1))
    return path


# Sets of moments


spans = st.lists(
    st.tuples(st.integers(0, 40), st.integers(0, 12)).map(lambda p: (p[0], p[0] + p[1])),
    max_size=12,
)


def timeline(intervals, moments: int = 60) -> np.ndarray:
    """Marks which moments [i, i + 1) are in one of the intervals: the slow, obvious way."""
    active = np.zeros(moments, dtype=bool)
    for start, end in intervals:
        active[int(start) : int(end)] = True
    return active


@given(spans, spans)
def test_sets_of_moments_are_those_of_a_boolean_timeline(left, right):
    # Those of the exercise: tests/exercises/hidden/test_models.py.
    a, b = coarse_intervals.union(left), coarse_intervals.union(right)
    a_slow, b_slow = timeline(left), timeline(right)
    for fast, slow in [
        (a, a_slow),
        (coarse_intervals.intersection(a, b), a_slow & b_slow),
        (coarse_intervals.difference(a, b), a_slow & ~b_slow),
        (coarse_intervals.union([*a, *b]), a_slow | b_slow),
    ]:
        assert coarse_intervals.length(fast) == slow.sum()
        assert (timeline(fast) == slow).all()
    assert (np.diff(a.ravel()) > 0).all()  # ascending, disjoint, not even touching
    apart = step_apart.take_apart((3, 40), left, right)
    assert coarse_intervals.take_apart((3, 40), left, right) == apart


def test_intervals_are_the_students_unless_they_are_not_written(monkeypatch) -> None:
    assert coarse_intervals.arithmetic() is step_apart

    def unwritten(_):
        raise NotYetWritten("A4.2")

    monkeypatch.setattr(step_apart, "union", unwritten)
    assert coarse_intervals.arithmetic() is coarse_intervals


# GPU


def gpu_records(kernels: list[list[tuple[str, int, int, int]]]) -> list[dict]:
    """Makes a GPU trace: for each step its kernels (name, stream, start, end), in µs."""
    # As large as real ones: HolisticTraceAnalysis keeps small numbers in a byte, in which pandas 3
    # then refuses its row numbers.
    records, correlation, moment = [], itertools.count(100_000), 10
    for number, of_step in enumerate(kernels, start=1):
        begin = moment
        for name, stream, start, end in of_step:
            key = next(correlation)
            moment += 4
            records += [
                record("cpu_op", "aten::mm", moment, moment + 3, MAIN, **{"External id": key}),
                record(
                    "cuda_runtime",
                    "cudaLaunchKernel",
                    moment + 1,
                    moment + 2,
                    MAIN,
                    correlation=key,
                    **{"External id": key},
                ),
                record(
                    "gpu_memcpy" if name.startswith("Memcpy") else "kernel",
                    name,
                    start,
                    end,
                    stream,
                    correlation=key,
                    stream=stream,
                    device=0,
                    **{"External id": key},
                ),
            ]
        moment += 4
        records.append(record("user_annotation", f"ProfilerStep#{number}", begin, moment, MAIN))
        moment += 1
    return records


def random_steps(seed: int, steps: int = 3) -> list[list[tuple[str, int, int, int]]]:
    """Makes steps that follow each other on the device, each begun by a computing kernel."""
    source = random.Random(seed)
    kernels, moment = [], 1000
    for _ in range(steps):
        end = moment
        of_step = []
        for name, stream in (("gemm", STREAM), (NCCL, NCCL_STREAM), ("Memcpy HtoD", 9)):
            start = moment + (0 if name == "gemm" else source.randint(1, 60))
            for _ in range(source.randint(1, 12)):
                stop = start + source.randint(1, 50)
                of_step.append((name, stream, start, stop))
                start = stop + source.choice([0, source.randint(1, 40)])
            end = max(end, stop)
        kernels.append(of_step)
        moment = end + source.randint(0, 20)
    return kernels


@given(st.integers(0, 2**32))
def test_gpu_times_are_those_of_a_boolean_timeline(tmp_path_factory, seed):
    steps = random_steps(seed)
    path = tmp_path_factory.mktemp("trace") / "trace.json"
    table = read_step_overlap(write(path, gpu_records(steps)))
    borders = [min(s for name, _, s, _ in step if name == "gemm") for step in steps]
    borders.append(max(end for _, _, _, end in steps[-1]))
    everything = [kernel for step in steps for kernel in step]
    computing, communicating, copying = (
        timeline([(s, e) for n, _, s, e in everything if n == name], borders[-1] + 1)
        for name in ("gemm", NCCL, "Memcpy HtoD")
    )
    for row, (start, end) in zip(table.itertuples(), itertools.pairwise(borders), strict=True):
        compute, communicate = computing[start:end], communicating[start:end]
        copy_only = copying[start:end] & ~compute & ~communicate
        expected_us = {
            "step_ms": end - start,
            "computation_ms": compute.sum(),
            "communication_ms": communicate.sum(),
            "overlap_ms": (compute & communicate).sum(),
            "exposed_communication_ms": (communicate & ~compute).sum(),
            "idle_ms": (~compute & ~communicate).sum(),
            "copy_ms": copy_only.sum(),
        }
        for name, value in expected_us.items():
            assert getattr(row, name) == pytest.approx(value / 1000, abs=1e-9), name


@pytest.mark.slow  # in kind: the boolean timeline above
@pytest.mark.filterwarnings("ignore:The inplace keyword")
@pytest.mark.parametrize("seed", range(4))
def test_gpu_times_are_those_of_holistic_trace_analysis(tmp_path, seed):
    hta = pytest.importorskip("hta.trace_analysis", reason="HolisticTraceAnalysis is not installed")
    logging.getLogger("hta").setLevel(logging.ERROR)
    steps = random_steps(seed)
    path = write(tmp_path / "trace.json", gpu_records(steps))
    theirs = hta.TraceAnalysis(trace_files={0: str(path)}, include_last_profiler_step=True)
    ours = read_step_overlap(path).sum()

    overlap = theirs.get_comm_comp_overlap(visualize=False)["comp_comm_overlap_pctg"][0]
    share = 100 * ours["overlap_ms"] / ours["communication_ms"]
    assert share == pytest.approx(overlap, abs=0.006)  # theirs is rounded to 0.01

    times = theirs.get_temporal_breakdown(visualize=False).iloc[0]
    busy_besides = ours["exposed_communication_ms"] + ours["copy_ms"]
    for name, milliseconds in {
        "kernel_time(us)": ours["step_ms"],
        "compute_time(us)": ours["computation_ms"],
        "non_compute_time(us)": busy_besides,
        "idle_time(us)": ours["idle_ms"] - ours["copy_ms"],
    }.items():
        assert 1000 * milliseconds == pytest.approx(times[name], abs=1e-6), name


def test_collectives_of_a_gpu_are_read_from_nccls_records(tmp_path):
    def asked(name: str, moment: int, inside: int, outside: int, kind: str) -> dict:
        sizes = {"In msg nelems": inside, "Out msg nelems": outside, "dtype": kind}
        what = {"Collective name": name, "Group size": 4}
        return record("cpu_op", "record_param_comms", moment, moment + 1, MAIN, **what, **sizes)

    path = write(
        tmp_path / "trace.json",
        [
            record("user_annotation", "ProfilerStep#5", 0, 100, MAIN),
            record("cpu_op", "c10d::_allgather_base_", 1, 5, MAIN),  # the same one, less precise
            asked("_allgather_base", 2, 100, 400, "BFloat16"),
            asked("_allgather_base", 12, 100, 400, "BFloat16"),
            asked("_reduce_scatter_base", 20, 400, 100, "Float"),
            asked("allreduce", 30, 7, 7, "Float"),
            asked("wait", 40, 0, 0, "Float"),
            asked("allreduce", 130, 7, 7, "Float"),  # in no step
            # the same of ProcessGroupNCCL2 (c10d/nccl2/ProcessGroupNCCL.cpp)
            record("user_annotation", "ProfilerStep#6", 200, 300, MAIN),
            asked("allGatherSingleImpl", 202, 100, 400, "BFloat16"),
            asked("all_gather", 212, 400, 100, "BFloat16"),
            asked("reduceScatterSingleImpl", 220, 400, 100, "Float"),
            asked("all_reduce", 230, 7, 7, "Float"),
            asked("wait", 240, 0, 0, "Float"),
            asked("allToAllSingleImpl", 250, 8, 8, "Float"),
            asked("all_to_all_v_single", 260, 8, 8, "Float"),
            asked("broadcast", 270, 2, 2, "Float"),
        ],
    )
    found = collectives_of(path).values.tolist()
    old = [["all_gather", 800, 2], ["all_reduce", 28, 1], ["reduce_scatter", 1600, 1]]
    more = [["all_to_all", 32, 2], ["broadcast", 8, 1]]
    assert [row[1:] for row in found if row[0] == 5] == old
    assert [row[1:] for row in found if row[0] == 6] == sorted(old + more)


# CPU


def host_times(tmp_path: Path, *records: dict) -> dict[str, float]:
    """Reads the only step of a trace on the CPU, 100 µs long; times in µs."""
    step = record("user_annotation", "ProfilerStep#1", 0, 100, MAIN)
    table = read_step_overlap(write(tmp_path / "trace.json", [step, *records]))
    return {name.removesuffix("_ms"): 1000 * table[name][0] for name in table.columns[1:]}


def test_a_wait_inside_autograd_is_exposed_communication(tmp_path):
    # As fully_shard does it: in a hook of the backward pass a reduce-scatter is started and waited
    # for; gloo's thread carries it out, and divides, which is no computation of the rank's own.
    node = "autograd::engine::evaluate_function: RegisterPostBackwardFunctionBackward"
    times = host_times(
        tmp_path,
        record("cpu_op", "aten::mm", 0, 30, ENGINE),
        record("cpu_op", node, 30, 90, ENGINE),
        record("cpu_op", "RegisterPostBackwardFunctionBackward", 31, 89, ENGINE),
        record("cpu_op", "fsdp::chunk_cat", 32, 40, ENGINE),
        record("cpu_op", "c10d::_reduce_scatter_base_", 40, 42, ENGINE),
        record("user_annotation", "gloo:all_reduce", 41, 81, GLOO),
        record("cpu_op", "aten::div_", 50, 60, GLOO),
        record("cpu_op", "aten::add_", 90, 95, MAIN),
    )
    assert times["computation"] == pytest.approx(30 + 8 + 5)
    assert times["communication"] == times["exposed_communication"] == pytest.approx(40)
    assert times["overlap"] == 0
    assert times["idle"] == pytest.approx(100 - 43 - 40)


def test_all_reduces_at_once_and_beside_computation_count_once(tmp_path):
    times = host_times(
        tmp_path,
        record("cpu_op", "aten::addmm", 0, 60, MAIN),
        record("cpu_op", "aten::mm", 10, 20, MAIN),
        record("cpu_op", "aten::mm", 40, 50, ENGINE),
        record("user_annotation", "gloo:all_reduce", 30, 70, GLOO),
        record("user_annotation", "gloo:all_reduce", 50, 120, GLOO + 1),  # into the next step
    )
    expected = {"computation": 60, "communication": 70, "overlap": 30, "exposed_communication": 40}
    assert {name: times[name] for name in expected} == pytest.approx(expected)
    assert times["idle"] == pytest.approx(0)


def test_a_collective_inside_an_operator_is_taken_out_of_it(tmp_path):
    # The norm of sharded gradients is one operator that waits for an all-reduce inside.
    times = host_times(
        tmp_path,
        record("cpu_op", "aten::linalg_vector_norm", 0, 50, MAIN),
        record("cpu_op", "_c10d_functional::wait_tensor", 10, 40, MAIN),
        record("user_annotation", "gloo:all_reduce", 10, 40, GLOO),
    )
    assert times["computation"] == pytest.approx(20)
    assert times["exposed_communication"] == pytest.approx(30)


def test_a_list_of_tensors_has_the_type_that_gloo_names(tmp_path):
    path = write(
        tmp_path / "trace.json",
        [
            record("user_annotation", "ProfilerStep#1", 0, 100, MAIN),
            record(
                "cpu_op",
                "c10d::allreduce_",
                1,
                2,
                MAIN,
                **{"Input Dims": [[[6, 5]], []], "Input type": ["TensorList", ""]},
            ),
            record(
                "user_annotation",
                "gloo:all_reduce",
                2,
                9,
                GLOO,
                **{"Input Dims": [[6, 5]], "Input type": ["c10::BFloat16"]},
            ),
            record("cpu_op", "c10d::barrier", 20, 21, MAIN),  # and one without a size
        ],
    )
    table = collectives_of(path)
    assert table["operation"].tolist() == ["all_reduce", "barrier"]
    assert table["size_bytes"][0] == 60
    assert table["size_bytes"].isna().tolist() == [False, True]


# Mistakes


@pytest.mark.parametrize(
    ("records", "message"),
    [
        ([record("cpu_op", "aten::mm", 0, 5, MAIN)], "no steps"),
        (gpu_records([[("gemm", STREAM, 50, 60)], [(NCCL, NCCL_STREAM, 70, 80)]]), "step 2"),
    ],
)
def test_a_trace_without_steps_or_kernels_in_a_step_is_refused_by_name(tmp_path, records, message):
    with pytest.raises(UserError, match=message) as caught:
        read_step_overlap(write(tmp_path / "trace.json", records))
    assert "trace.json" in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("read", [read_step_overlap, collectives_of])
def test_a_file_that_is_not_there_is_a_users_mistake(tmp_path, read):
    with pytest.raises(UserError, match="No such file"):
        read(tmp_path / "absent.json")
