"""A profile as text: the summary that the script prints, tables and facts for the notebook."""

from __future__ import annotations

import pandas as pd

from common.analysis.one_device.origin import product_type
from common.analysis.one_device.profile import ProfileRun, open_profile
from common.analysis.runs import gpu_folder
from common.analysis.show import Table
from common.perfmodel.one_device.roofline import COMPUTE, MEMORY, OVERHEAD, UNKNOWN
from common.traces.operator_categories import BOOKKEEPING, IDLE

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
    "flops_share": ("of the FLOP", "{:.1%}"),
}
"""Titles of ``ProfileRun.categories``."""
PHASES = {
    "phase": "phase",
    "ms": ("ms", "{:.1f}"),
    "share": ("of the step", "{:.1%}"),
    "ms_over_forward": "time over forward's",
    "flops": ("GFLOP", lambda flops: f"{flops / 1e9:.2f}"),
    "flops_over_forward": "FLOP over forward's",
}
"""Titles of ``ProfileRun.phase_costs``."""
MOST_NAMES = 5
"""Operators that a cell of a table names."""
ABOVE_ROOF = 1.05
"""Share of the roof from which on an operator counts as above it."""
BUSY = 0.1
"""Idle share up to which the host keeps a GPU busy."""


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
    lines = [run.workload, overhead_text(run)]
    for title, table in (
        ("Where the step goes", run.phases()),
        ("By kind of work", run.categories()),
    ):
        lines += ["", f"--- {title} ---"]
        for name, row in table.iterrows():
            lines.append(f"{run.category_name(name):<28}{row.ms:>10.2f} ms {row.share:>7.1%}")
    lines += ["", "--- The longest operators ---", *_aligned(operator_frame(run, top))]
    lines += ["", f"Peaks: {peaks_text(run)}"]
    return "\n".join(lines)


def overhead_text(run: ProfileRun) -> str:
    """Returns the length of a step, and by how much the profiler makes it longer."""
    cost = (
        f"{run.profiler_overhead:.0%} more"
        if run.profiler_overhead > 0
        else "the profiler costs less than the steps vary"
    )
    return (
        f"A step takes {run.plain_ms:.1f} ms, and {run.profiled_ms:.1f} ms under the profiler "
        f"({cost}; medians of {len(run.steps) // 2} each). What follows is the profiled step of "
        f"median length, {run.step_ms:.1f} ms."
    )


def peaks_text(run: ProfileRun) -> str:
    """Returns the roof's two figures and where they come from."""
    if run.roof is None:
        return "unknown for this device, so what bounds an operator cannot be said"
    rate, bandwidth = run.roof.flops_per_s / 1e9, run.roof.memory_bytes_per_s / 1e9
    return (
        f"{rate:,.0f} GFLOP/s in {product_type(run.settings)} and {bandwidth:,.0f} GB/s, so the "
        f"ridge is at {run.roof.ridge:.3g} FLOP/byte ({run.peak.source})"
    )


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


def overhead_facts(run: ProfileRun) -> dict[str, str]:
    """Returns the length of a step with and without the profiler, and whether the two differ."""
    each = len(run.steps) // 2
    return {
        "the profiler's cost can be told from noise": "yes" if run.overhead_is_clear else "no",
        f"step without the profiler (median of {each})": f"{run.plain_ms:.1f} ms",
        f"step under the profiler (median of {each})": f"{run.profiled_ms:.1f} ms",
        "difference": f"{run.profiler_overhead:+.1%}",
        "profiled step of median length, shown below": f"{run.step_ms:.1f} ms",
    }


def beside_gpu(run: ProfileRun) -> pd.DataFrame:
    """Returns the share of a step by kind of work, of the run and of one recorded on a GPU."""
    on_gpu = open_profile(gpu_folder("assignment0/profile_training"))
    shares = {
        name: each.categories()["share"].rename(index=each.category_name)
        for name, each in {on_gpu.opened.device: on_gpu, "this run": run}.items()
    }
    table = pd.DataFrame(shares).sort_values("this run", ascending=False)
    return table.iloc[:, ::-1].reset_index(names="kind of work")


def idle_facts(run: ProfileRun) -> dict[str, str]:
    """Returns the share of the step in which nothing computes."""
    share = run.categories()["share"]
    idle = share.get(IDLE, 0.0)
    facts = {run.category_name(IDLE): f"{idle:.1%} of the step"}
    if run.on_host:
        return facts | {BOOKKEEPING: f"{share.get(BOOKKEEPING, 0.0):.1%} of the step"}
    busy = "yes" if idle <= BUSY else "no"
    return {f"the host keeps the GPU busy (idle at most {BUSY:.0%})": busy} | facts


def roof_facts(run: ProfileRun) -> dict[str, str]:
    """Returns the roof's two figures, the ridge, and where they come from."""
    if run.roof is None:
        return {"the peaks of this device are known": "no, and no operator's bound is"}
    return {
        "the peaks of this device are known": "yes",
        f"peak in {product_type(run.settings)}": f"{run.roof.flops_per_s / 1e9:,.0f} GFLOP/s",
        "memory bandwidth": f"{run.roof.memory_bytes_per_s / 1e9:,.0f} GB/s",
        "ridge": f"{run.roof.ridge:.3g} FLOP/byte",
        "source": run.peak.source,
    }


def bound_table(run: ProfileRun) -> Table:
    """Returns each bound's share of the step and its operators, the longest first.

    The last row is the time of no operator, or of one whose cost is unknown: shares add up to 1.
    """
    operators = run.main_operators()
    rows = []
    for bound in (COMPUTE, MEMORY, OVERHEAD) if run.roof else (UNKNOWN,):
        own = operators[operators["bound"] == bound]
        rows.append(
            {
                "bound by": "neither" if bound == OVERHEAD else bound,
                "of the step": own["share"].sum(),
                "operators": _names(own["operator"]),
                "above the roof": _names(own.loc[own["share_of_roof"] > ABOVE_ROOF, "operator"]),
            }
        )
    rows.append(
        {
            "bound by": "not placed",
            "of the step": 1 - operators["share"].sum(),
            "operators": "idle, or of unknown cost",
            "above the roof": "none",
        }
    )
    return Table(pd.DataFrame(rows), {"of the step": "{:.0%}"})


def fusion_facts(run: ProfileRun) -> dict[str, str]:
    """Returns the share of a step between its matrix products, and the most fusing can gain."""
    calls, share = run.between_products()
    made = "generated kernels and operators" if run.settings["compile"] else "operators"
    return {
        f"calls of {made} between matrix products and attention": f"{calls:,}",
        "their share of the step": f"{share:.0%}",
        "the step, if they took no time": f"no more than {1 / (1 - share):.2f} times as fast",
    }


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
