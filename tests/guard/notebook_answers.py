"""Runs every notebook on the recorded runs, in this process, and writes down what it shows."""

from __future__ import annotations

import ast
import contextlib
import io
import json
import os
from collections.abc import Mapping
from pathlib import Path

from figures import figure_text
from matplotlib.figure import Figure
from plain_text import frame_text

PROJECT = Path(__file__).resolve().parents[2]
RECORDED = {
    "assignment0_memory": "data/epyc-2-cores/assignment0",
    "assignment0_profile": "data/epyc-2-cores/assignment0",
    "assignment0_throughput": "data/epyc-2-cores/assignment0",
    "assignment1_ddp": "data/epyc-2-cores/assignment1",
    "assignment1_fsdp": "data/epyc-2-cores/assignment1",
    "assignment2_discussion": "data/epyc-2-cores/assignment2",
    "assignment2_emulated_hosts": "data/epyc-2-cores/assignment2",
    "assignment2_part1_model": "data/epyc-2-cores/assignment2",
    "assignment2_part2_prediction": "data/epyc-2-cores/assignment2",
    "assignment2_part3_evaluation": "data/epyc-2-cores/assignment2",
    "assignment2_part4_scale": "",
    "assignment3_dynamic_batches": "data/epyc-2-cores/assignment3",
    "assignment4_synthetic_scaling": "data/xeon-2-cores/assignment4",
    "assignment4_text_scaling": "data/xeon-2-cores/assignment4",
    "summary": "",
}
"""The recorded run that each notebook is given."""
MEASURES = {"example_tune"}
"""Notebooks that measure, and have no recorded run to read."""
SHOWS = {"explore"}
"""Notebooks of widgets, which tests/explore moves."""


def notebook_answers() -> dict[str, str]:
    """Returns, for each notebook, one text with the output of every cell."""
    found = {path.stem for path in (PROJECT / "notebooks").glob("*.ipynb")}
    if found != set(RECORDED) | MEASURES | SHOWS:
        raise SystemExit(
            f"notebook_answers.RECORDED and notebooks/ differ: {found ^ set(RECORDED)}"
        )
    return {f"{name}.txt": notebook_text(name, run_dir) for name, run_dir in RECORDED.items()}


def notebook_text(name: str, run_dir: str) -> str:
    """Returns the outputs of a notebook's cells, in order, with ``run_dir`` as its parameter."""
    cells = json.loads((PROJECT / "notebooks" / f"{name}.ipynb").read_text())["cells"]
    shown: list[object] = []
    scope: dict = {"__name__": "__main__", "display": shown.append}
    lines = []
    with contextlib.chdir(PROJECT):
        for place, cell in enumerate(cells):
            if cell["cell_type"] != "code":
                continue
            shown.clear()
            printed = io.StringIO()
            with contextlib.redirect_stdout(printed):
                _run("".join(cell["source"]), scope, shown)
            if "parameters" in cell["metadata"].get("tags", ()):
                scope["run_dir"] = run_dir and str(PROJECT / run_dir)
            outputs = [output_text(output) for output in shown]
            outputs += [printed.getvalue()] if printed.getvalue() else []
            lines += [f"== cell {place}", *outputs] if outputs else []
    return "\n".join(lines).replace(f"{PROJECT}{os.sep}", "")


def _run(source: str, scope: dict, shown: list[object]) -> None:
    """Runs a cell as a kernel does: the value of its last expression is shown."""
    tree = ast.parse(source)
    last = tree.body.pop() if tree.body and isinstance(tree.body[-1], ast.Expr) else None
    exec(compile(tree, "<cell>", "exec"), scope)
    if last is None:
        return
    value = eval(compile(ast.Expression(last.value), "<cell>", "eval"), scope)
    if value is not None:
        shown.append(value)


def output_text(output: object) -> str:
    """Returns a table, a figure or a text as text."""
    if isinstance(output, Figure):
        return figure_text(output)
    if hasattr(output, "data") and isinstance(output.data, str):  # Markdown and Code of IPython
        return output.data
    if hasattr(output, "_repr_markdown_"):
        return output._repr_markdown_()
    if hasattr(output, "map") and hasattr(output, "columns"):
        return frame_text(output)
    if isinstance(output, Mapping):
        return json.dumps(output, indent=1, sort_keys=True, default=str)
    return str(output)
