"""A profile in words: the script's summary, and sentences that read their own numbers."""

from __future__ import annotations

import pandas as pd

from common.analysis.assignment0_profile import ProfileRun
from common.analysis.operator_categories import (
    BOOKKEEPING,
    COPIES,
    ELEMENTWISE,
    FUSED,
    IDLE,
    LOSS,
    MATRIX,
    NORMALISATION,
    operator_category,
)
from common.analysis.tables import Table
from common.perfmodel.roofline import COMPUTE, MEMORY, OVERHEAD, OVERHEAD_SHARE

BETWEEN_PRODUCTS = (ELEMENTWISE, FUSED, NORMALISATION, LOSS, COPIES)
SHORT = {"native_layer_norm": "layer_norm", "embedding_dense": "embedding"}


def short_name(operator: str) -> str:
    """An operator's name without what says little here: its library, kind of kernel and pass."""
    name = operator.removeprefix("aten::").lstrip("_")
    name = name.removesuffix("_data").removesuffix("_backward")
    if name.startswith(("scaled_dot_product", "flash_att", "efficient_att", "cudnn_att")):
        return "attention"
    return SHORT.get(name, name)


def shown_shapes(operator: str, shapes: str) -> str:
    """What a call works on: the two matrices of a product, else its first tensor."""
    parts = shapes.replace("x", "×").split()
    if len(parts) > 1 and "tensors" not in shapes:
        name = operator.removeprefix("aten::")
        first = 1 if name.startswith(("addmm", "baddbmm")) else 0  # after the bias
        parts = parts[first : first + 2] if "mm" in name else parts[:1]
        return " · ".join(parts)
    return shapes.replace("x", "×") or "–"


def workload_text(run: ProfileRun) -> str:
    """What was trained: model, batch, sequence, precision, and what is not the default."""
    told = "{model}, batch {batch_size}, sequence {seq_len}, {precision}".format(**run.settings)
    more = [
        "attention written out" if run.settings["attention"] == "eager" else "",
        "compiled" if run.settings["compile"] else "",
        "activation checkpointing" if run.settings["activation_checkpointing"] else "",
    ]
    optimizer = f"{run.settings['optimizer']} ({run.settings['optimizer_implementation']})"
    return ", ".join([told, optimizer, *filter(None, more)])


def where_from(run: ProfileRun) -> str:
    """Whose data these are; says so where they are recorded."""
    if run.recorded:
        return (
            f"> **Recorded data, not yours.** {run.caption}. {workload_text(run)}. "
            "`uv run python assignments/assignment0/profile_training.py` measures here."
        )
    return f"> Measured in this run: {run.caption}. {workload_text(run)}."


def summary(run: ProfileRun, top: int = 10) -> str:
    """What the script prints: phases, categories, and the longest operators with their bound."""
    lines = [workload_text(run), overhead_text(run)]
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


def operator_table(run: ProfileRun, top: int = 10) -> Table:
    """The longest kinds of calls and what bounds them, as a table for a page."""
    frame = operator_frame(run, top).drop(columns=["GFLOP/s", "GB/s"])
    return _table(frame.replace(OVERHEAD, "neither"))


def operator_frame(run: ProfileRun, top: int) -> pd.DataFrame:
    """The longest kinds of calls: on what, how often and long, how fast, bound by what."""
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


def _table(frame: pd.DataFrame) -> Table:
    formats = {"calls": "{:.0f}", "ms": "{:.2f}", "share": "{:.1%}", "of roof": "{:.0%}"}
    return Table(frame, formats | dict.fromkeys(("GFLOP/s", "GB/s", "FLOP/B"), "{:.1f}"))


def _aligned(frame: pd.DataFrame) -> list[str]:
    """A table as lines of text: words to the left, numbers to the right."""
    table = _table(frame)
    rows = [table.columns, *table.cells]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    words = ("operator", "phase", "tensors", "bound by")
    sides = [str.ljust if name in words else str.rjust for name in table.columns]
    return [
        "  ".join(side(cell, w) for side, cell, w in zip(sides, row, widths, strict=True)).rstrip()
        for row in rows
    ]


def overhead_text(run: ProfileRun) -> str:
    """How long a step takes, and how much longer for being profiled."""
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
    """The roof's two figures and where they come from."""
    if run.roof is None:
        return "unknown for this device, so what bounds an operator cannot be said"
    rate, bandwidth = run.roof.flops_per_s / 1e9, run.roof.memory_bytes_per_s / 1e9
    return (
        f"{rate:,.0f} GFLOP/s in {run.settings['precision']} and {bandwidth:,.0f} GB/s, so the "
        f"ridge is at {run.roof.ridge:.3g} FLOP/byte ({run.peak.source})"
    )


def where_text(run: ProfileRun) -> str:
    """The largest parts of a step, and what matrix products have of its time and arithmetic."""
    table = run.categories().drop(index=[IDLE, BOOKKEEPING], errors="ignore")
    first = ", ".join(f"{name} ({row.share:.0%})" for name, row in table.head(4).iterrows())
    is_matrix = run.roofline["operator"].map(operator_category) == MATRIX
    flops = run.roofline["flops"]
    return (
        f"The largest kinds of work are {first}. Matrix products do "
        f"{flops[is_matrix].sum() / flops.sum():.0%} of the arithmetic in "
        f"{table['share'].get(MATRIX, 0.0):.0%} of the time."
    )


def ratio_text(run: ProfileRun) -> str:
    """Backward over forward, in time and in arithmetic, and the shares of all phases."""
    shares = run.phases()["share"]
    time = shares["backward"] / shares["forward"] if shares["forward"] else float("nan")
    flops = run.roofline.groupby("phase")["flops"].sum().reindex(["forward", "backward"])
    return (
        f"Here the backward pass does {flops['backward'] / flops['forward']:.2f} times the "
        f"operations of the forward pass, and takes {time:.2f} times as long. Of the step, forward "
        f"is {shares['forward']:.0%}, backward {shares['backward']:.0%}, the optimizer "
        f"{shares['optimizer']:.0%} and fetching data {shares['data']:.1%}."
    )


def bound_text(run: ProfileRun) -> str:
    """What share of the step each bound has, and which operators memory bounds."""
    if run.roof is None:
        return "The peaks of this device are unknown, so nothing can be said about bounds."
    table = run.main_operators()
    share = table.groupby("bound")["share"].sum().reindex([COMPUTE, MEMORY, OVERHEAD]).fillna(0.0)
    slow = table[table["bound"] == MEMORY]
    names = list(dict.fromkeys(f"`{short_name(name)}`" for name in slow["operator"]))
    listed = f" ({', '.join(names[:5])}{', …' if len(names) > 5 else ''})" if names else ""
    return (
        f"Arithmetic bounds operators that take {share[COMPUTE]:.0%} of the step, memory "
        f"{share[MEMORY]:.0%}{listed}. Another {share[OVERHEAD]:.0%} goes into calls that reach "
        f"less than {OVERHEAD_SHARE:.0%} of the roof: too small, or too irregular, for either."
    )


def fusion_text(run: ProfileRun) -> str:
    """How much of a step lies between its matrix products, which is what fusing works on."""
    rows = run.step[run.step["phase"].isin(["forward", "backward"])]
    rows = rows[rows["category"].isin(BETWEEN_PRODUCTS)]
    share = rows["time_us"].sum() / 1e3 / run.step_ms
    made = "generated kernels and operators" if run.settings["compile"] else "operators"
    return (
        f"Between matrix products and attention, forward and backward pass call "
        f"{rows['calls'].sum():,} {made}, which take {share:.0%} of the step. Whatever fuses them "
        f"cannot make it more than {1 / (1 - share):.2f} times as fast."
    )


def idle_text(run: ProfileRun) -> str:
    """How long nothing computes, and how long PyTorch only keeps its books."""
    share = run.categories()["share"]
    idle, books = share.get(IDLE, 0.0), share.get(BOOKKEEPING, 0.0)
    if run.on_host:
        return (
            f"No operator runs for {idle:.1%} of the step: Python is on its way from one call to "
            f"the next. Another {books:.1%} goes into views, allocations and autograd's engine."
        )
    cause = "the host launches too slowly" if idle > 0.1 else "the host keeps it busy"
    return f"The GPU is idle for {idle:.1%} of the step: {cause}."


def above_roof_text(run: ProfileRun) -> str:
    """Which operators stand above the roof, and why that can be."""
    if run.roof is None:
        return ""
    table = run.main_operators()
    above = table[table["share_of_roof"] > 1.05]
    if above.empty:
        return "No operator stands above the roof."
    names = list(dict.fromkeys(f"`{short_name(name)}`" for name in above["operator"]))
    return (
        f"{', '.join(names[:5])} stand{'s' if len(names) == 1 else ''} above the roof: their data "
        "come from a cache, which is faster than the memory whose bandwidth the roof is made of."
    )
