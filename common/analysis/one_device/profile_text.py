"""A profile as text: the summary that the script prints, tables and facts for the notebook."""

from __future__ import annotations

import pandas as pd

from common.analysis.one_device.profile import BUSY, ProfileRun, open_profile
from common.analysis.runs import gpu_folder
from common.analysis.show import Table, judged_format
from common.perfmodel.one_device.roofline import COMPUTE, MEMORY, OVERHEAD, UNKNOWN
from common.traces.operator_categories import BOOKKEEPING

SHORT = {"native_layer_norm": "layer_norm", "embedding_dense": "embedding"}
OPERATORS = {
    **dict.fromkeys(("operator", "phase", "tensors", "calls", "ms", "share", "FLOP/B", "of roof")),
    "bound by": ("bound by", lambda bound: "neither" if bound == OVERHEAD else bound),
}
"""Titles of ``operator_frame``."""
KINDS = {
    "kind": "kind of work",
    "ms": ("ms", "{:.1f}"),
    "low_ms": ("least", "{:.1f}"),
    "high_ms": ("greatest", "{:.1f}"),
    "share": ("of the time", "{:.1%}"),
    "judged": ("over all steps, 95 %", judged_format("{:.1%}")),
    "flops_share": ("of the FLOP", "{:.1%}"),
    "most": "takes most",
}
"""Titles of ``ProfileRun.categories``."""
PHASES = {
    "phase": "phase",
    "ms": ("ms", "{:.1f}"),
    "share": ("of the step", "{:.1%}"),
    "ms_over_forward": "time over forward's",
    "judged": ("over all steps, 95 %", judged_format()),
    "flops": ("GFLOP", lambda flops: f"{flops / 1e9:.2f}"),
    "flops_over_forward": "FLOP over forward's",
}
"""Titles of ``ProfileRun.phase_costs``."""
MOST_NAMES = 5
"""Operators that a cell of a table names."""
PROFILER = {
    "overhead.said": "the profiler's cost is",
    "plain_ms": ("step without the profiler (median of {0.repeats})", "{:.1f} ms"),
    "profiled_ms": ("step under the profiler (median of {0.repeats})", "{:.1f} ms"),
    "overhead.difference.estimate": ("difference, paired by step", "{:+.1%}"),
    "overhead.difference": ("its 95 % interval", lambda interval: interval.text("{:+.1%}")),
    "step_ms": ("profiled step of median length, shown below", "{:.1f} ms"),
}
"""Titles of ``ProfileRun``: a step with and without the profiler."""
IDLE_TIME = {
    "keeps_busy": f"the host keeps the GPU busy (idle at most {BUSY:.0%})",
    "idle_share": ("{0.idle_name}, of a step", judged_format("{:.1%}")),
    "bookkeeping_share": (f"{BOOKKEEPING}, of a step", judged_format("{:.1%}")),
}
"""Titles of ``ProfileRun``: the time in which nothing computes."""
ROOF = {
    "knows_roof": (
        "the peaks of this device are known",
        {True: "yes", False: "no, and no operator's bound is"},
    ),
    "roof.flops_per_s": ("peak in {0.product_type}", lambda rate: f"{rate / 1e9:,.0f} GFLOP/s"),
    "roof.memory_bytes_per_s": ("memory bandwidth", lambda rate: f"{rate / 1e9:,.0f} GB/s"),
    "roof.ridge": ("ridge", "{:.3g} FLOP/byte"),
    "more_arithmetic_ms": (
        "operators that arithmetic bounds take more than those that memory does, by (ms)",
        judged_format("{:+.0f}"),
    ),
    ("knows_roof", "peak"): ("source", lambda knows, peak: peak.source if knows else None),
}
"""Titles of ``ProfileRun``: the roof, what bounds more of a step, and where the peaks are from."""
BOUNDS = {
    "bound": "bound by",
    "share": ("of the step", "{:.0%}"),
    "operators": "operators",
    "above_roof": "above the roof",
}
"""Titles of ``bounds``."""
FUSION = {
    "between_calls": ("calls of {0.calls_name} between matrix products and attention", "{:,}"),
    "between_share": ("their share of the step", "{:.0%}"),
    "most_fusing_gains": ("times as fast, if they took no time", judged_format()),
}
"""Titles of ``ProfileRun``: the calls between matrix products, and the most fusing can gain."""


def short_name(operator: str) -> str:
    """Returns an operator's name without its library, its kind of kernel and its pass."""
    name = operator.removeprefix("aten::").lstrip("_")
    name = name.removesuffix("_data").removesuffix("_backward")
    if name.startswith(("scaled_dot_product", "flash_att", "efficient_att", "cudnn_att")):
        return "attention"
    return SHORT.get(name, name)


def shown_shapes(operator: str, shapes: str) -> str:
    """Returns what a call works on: the two matrices of a product, else its first tensor."""
    parts = shapes.replace("x", "×").split()
    if len(parts) > 1 and "tensors" not in shapes:
        name = operator.removeprefix("aten::")
        first = 1 if name.startswith(("addmm", "baddbmm")) else 0  # after the bias
        parts = parts[first : first + 2] if "mm" in name else parts[:1]
        return " · ".join(parts)
    return shapes.replace("x", "×") or "–"


def summary(run: ProfileRun, top: int = 10) -> str:
    """Returns what the script prints: phases, categories, the longest operators and their bound."""
    cost = f"what the profiler costs is {run.overhead.said}"
    if run.overhead.is_settled:
        cost = f"{run.overhead.difference.estimate:+.0%}"
    lines = [run.workload]
    lines.append(
        f"A step takes {run.plain_ms:.1f} ms, and {run.profiled_ms:.1f} ms under the profiler "
        f"({cost}; medians of {run.repeats} each). What follows is the profiled step of median "
        f"length, {run.step_ms:.1f} ms."
    )
    for title, table in (
        ("Where the step goes", run.phase_costs()),
        ("By kind of work", run.categories()),
    ):
        lines += ["", f"--- {title} ---"]
        for name, row in table.iterrows():
            lines.append(f"{run.category_name(name):<28}{row.ms:>10.2f} ms {row.share:>7.1%}")
    lines += ["", "--- The longest operators ---", *_aligned(operator_frame(run, top))]
    peaks = "unknown for this device, so what bounds an operator cannot be said"
    if run.roof is not None:
        rate, bandwidth = run.roof.flops_per_s / 1e9, run.roof.memory_bytes_per_s / 1e9
        peaks = (
            f"{rate:,.0f} GFLOP/s in {run.product_type} and {bandwidth:,.0f} GB/s, so the ridge is "
            f"at {run.roof.ridge:.3g} FLOP/byte ({run.peak.source})"
        )
    return "\n".join([*lines, "", f"Peaks: {peaks}"])


def operator_frame(run: ProfileRun, top: int) -> pd.DataFrame:
    """Returns the longest kinds of calls: on what, how often and long, how fast, bound by what."""
    rows = run.roofline.head(top)
    return pd.DataFrame(
        {
            "operator": rows["operator"].map(short_name),
            "phase": rows["phase"],
            "tensors": [
                shown_shapes(*pair) for pair in zip(rows.operator, rows.shapes, strict=True)
            ],
            "calls": rows["calls"],
            "ms": rows["time_ms"],
            "share": rows["time_ms"] / run.parts_ms,
            "GFLOP/s": rows["achieved_flops_per_s"] / 1e9,
            "GB/s": rows["achieved_bytes_per_s"] / 1e9,
            "FLOP/B": rows["intensity"],
            "of roof": rows["share_of_roof"],
            "bound by": rows["bound"],
        }
    )


def beside_gpu(run: ProfileRun) -> pd.DataFrame:
    """Returns the share of a step by kind of work, of the run and of one recorded on a GPU."""
    on_gpu = open_profile(gpu_folder("assignment0/profile_training"))
    shares = {
        name: side.categories()["share"].rename(index=side.category_name)
        for name, side in {on_gpu.opened.device: on_gpu, "this run": run}.items()
    }
    table = pd.DataFrame(shares).sort_values("this run", ascending=False)
    return table.iloc[:, ::-1].reset_index(names="kind of work")


def bounds(run: ProfileRun) -> pd.DataFrame:
    """Returns each bound's share of the step and its operators; columns as in ``BOUNDS``.

    The last row is the time of no operator, or of one whose cost is unknown: shares add up to 1.
    """
    operators = run.main_operators()
    is_above = [
        at
        for at, share in run.shares_of_roof.items()
        if share.is_settled and share.estimate > share.null
    ]
    rows = []
    for bound in (COMPUTE, MEMORY, OVERHEAD) if run.roof else (UNKNOWN,):
        bounded = operators[operators["bound"] == bound]
        above_roof = bounded.loc[bounded.index.isin(is_above), "operator"]
        name = "neither" if bound == OVERHEAD else bound
        share = bounded["share"].sum()
        rows.append((name, share, _names(bounded["operator"]), _names(above_roof)))
    not_placed = 1 - operators["share"].sum()
    rows.append(("not placed", not_placed, "idle, or of unknown cost", "none"))
    return pd.DataFrame(rows, columns=[*BOUNDS])


def _names(operators: pd.Series) -> str:
    """Returns the short names of operators, each once; of many only the first."""
    names = list(dict.fromkeys(map(short_name, operators)))
    more = ", …" if len(names) > MOST_NAMES else ""
    return ", ".join(names[:MOST_NAMES]) + more if names else "none"


def _aligned(frame: pd.DataFrame) -> list[str]:
    """Returns a table as lines of text: words to the left, numbers to the right."""
    table = Table(frame)
    rows = [table.columns, *table.cells]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    words = ("operator", "phase", "tensors", "bound by")
    sides = [str.ljust if name in words else str.rjust for name in table.columns]
    return [
        "  ".join(side(cell, w) for side, cell, w in zip(sides, row, widths, strict=True)).rstrip()
        for row in rows
    ]
