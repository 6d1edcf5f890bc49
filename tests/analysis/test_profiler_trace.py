"""Reading a trace, the kinds of work by name, and names beside points that cover nothing."""

from __future__ import annotations

import gzip
import itertools
import json

import numpy as np
import pytest
from matplotlib.backends.backend_agg import FigureCanvasAgg

from common.analysis.one_device.profile_figures import label_points, text_box
from common.analysis.style import figure
from common.errors import UserError
from common.traces.operator_categories import kernel_category, operator_category
from common.traces.profiler_trace import Event, read_trace, shapes_text, tensor_shapes


@pytest.mark.parametrize(
    ("name", "category"),
    [
        ("aten::addmm", "matrix products"),
        ("aten::_scaled_dot_product_flash_attention_backward", "attention"),
        ("aten::_scaled_dot_product_cudnn_attention", "attention"),
        ("aten::native_layer_norm_backward", "normalisation"),
        ("aten::_log_softmax", "loss"),
        ("aten::_to_copy", "copies & fills"),
        ("aten::linear", None),
        ("ProfilerStep", None),
        ("triton_poi_fused_add_gelu_3", "fused element-wise"),
        ("triton_per_fused_add_native_layer_norm_1", "normalisation"),
        ("triton_tem_fused_addmm_7", "matrix products"),
        ("triton_red_fused__log_softmax_nll_loss_forward_5", "loss"),
        ("graph_0_cpp_fused_gelu_gelu_backward_view_4", "fused element-wise"),
    ],
)
def test_categories_of_operators_and_generated_kernels(name, category):
    assert operator_category(name) == category


def test_kernels_whose_launch_is_not_in_the_trace_go_by_their_own_names():
    assert kernel_category("ampere_sgemm_128x64_tn") == "matrix products"
    assert kernel_category("Memcpy DtoH (Device -> Pageable)") == "copies & fills"
    assert kernel_category("void pytorch_flash::flash_fwd_kernel<…>") == "attention"
    assert kernel_category("somebody_elses") == "other"


def test_shapes_are_those_of_tensors_also_inside_lists():
    assert tensor_shapes([[4, 64], [], [[2], [3, 3]], "x", []]) == ((4, 64), (2,), (3, 3))
    assert shapes_text(((4, 64), (2,))) == "4x64 2"
    assert shapes_text(((2,),) * 76) == "76 tensors"


def test_a_compressed_trace_is_read_with_its_launches_and_streams(tmp_path):
    shown = {"ph": "X", "pid": 1, "tid": 5}
    records = [
        shown
        | {"cat": "cpu_op", "name": "aten::mm", "ts": 1000.5, "dur": 4.0}
        | {"args": {"Input Dims": [[2, 3], [3, 4], []]}},
        shown
        | {"cat": "cuda_runtime", "name": "cudaLaunchKernel", "ts": 1001.5, "dur": 1.0}
        | {"args": {"correlation": 8}},
        shown
        | {"cat": "kernel", "name": "gemm", "ts": 1010.5, "dur": 2.0}
        | {"args": {"correlation": 8, "stream": 7}},
        shown | {"cat": "python_function", "name": "f", "ts": 0, "dur": 9},
        {"ph": "M", "name": "process_name", "ts": 0},
    ]
    path = tmp_path / "trace.json.gz"
    path.write_bytes(gzip.compress(json.dumps({"traceEvents": records}).encode()))
    assert read_trace(path) == [
        Event("aten::mm", 0.0, 4.0, 5, ((2, 3), (3, 4))),
        Event("cudaLaunchKernel", 1.0, 2.0, 5, (), "launch", 8),
        Event("gemm", 10.0, 12.0, 7, (), "kernel", 8),
    ]


@pytest.mark.parametrize("content", [None, b"not JSON", b"[]", b'{"a": 1}'])
def test_a_file_that_is_no_trace_is_refused_by_name(tmp_path, content):
    path = tmp_path / "trace.json"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(UserError, match=r"trace\.json"):
        read_trace(path)


def test_names_beside_points_cover_neither_each_other_nor_markers():
    points = np.array([[1.0, 1.0], [1.01, 1.0], [1.02, 1.01], [1.0, 1.02], [2.0, 3.0], [9.0, 9.0]])
    radii = np.full(6, 5.0)
    with figure("caption") as (fig, axes):
        axes.set_xlim(0, 10)
        axes.set_ylim(0, 10)
        axes.axvline(1.6)
    names = ["a long name 12 %", "another long name 9 %", "third 3 %", "fourth 3 %"]
    label_points(fig, axes, points, radii, names)
    renderer = FigureCanvasAgg(fig).get_renderer()
    boxes = [text_box(text, renderer) for text in axes.texts]
    assert [text.get_text() for text in axes.texts] == names
    assert not any(one.overlaps(other) for one, other in itertools.combinations(boxes, 2))
    line_at = axes.transData.transform((1.6, 0))[0]
    assert not any(box.x0 < line_at < box.x1 for box in boxes)
    for x, y in axes.transData.transform(points):
        assert not any(box.contains(x, y) for box in boxes)
