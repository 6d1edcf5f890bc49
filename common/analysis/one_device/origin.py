"""Runs of assignment 0, whose notebooks say first whose measurements they show, and of what."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from common.analysis import runs
from common.judged import FIRST_PAGE_ROUNDS

COMMAND = "uv run ddplab run assignment0"
"""The command that measures all that the notebooks show."""


@dataclass(frozen=True, eq=False)
class OneDeviceRun(runs.OfRun):
    """Base of what was read from one run of assignment 0."""

    @property
    def origin(self) -> str:
        """Returns the line that says whose measurements these are, as Markdown."""
        return origin_of(self.opened)

    @property
    def conditions(self) -> dict[str, object]:
        """Returns scope, state of the machine and least rounds, as ``Judged`` takes them."""
        return {
            "scope": step_text(self.settings),
            "machine": self.opened.machine_state,
            "least_rounds": FIRST_PAGE_ROUNDS,
        }


def origin_of(run: runs.Run, workload: str = "", command: str = COMMAND) -> str:
    """Returns the line that says whose measurements these are, as Markdown.

    Args:
        run: Opened run.
        workload: Training step in words; by default ``workload_text`` of the settings.
        command: Command that measures on the reader's machine.
    """
    what = f"{run.caption}. {workload or workload_text(run.settings)}"
    return runs.origin(what, run.recorded, command)


def workload_text(settings: Mapping) -> str:
    """Returns model, batch, sequence and precision of a run's settings."""
    return "{model}, batch {batch_size}, sequence {seq_len}, {precision}".format(**settings)


def product_type(settings: Mapping) -> str:
    """Returns what matrix products are computed in, such as bfloat16 or TF32."""
    is_tf32 = settings["tf32"] and settings["precision"] == "float32"
    return "TF32" if is_tf32 else settings["precision"]


def step_text(settings: Mapping) -> str:
    """Returns ``workload_text``, the optimizer, and what is not the default."""
    pieces = settings["loss_chunks"]
    parts = [
        workload_text(settings),
        "TF32" if product_type(settings) == "TF32" else "",
        f"{settings['optimizer']} ({settings['optimizer_implementation']})",
        "attention written out" if settings["attention"] == "eager" else "",
        "compiled" if settings["compile"] else "",
        "activation checkpointing" if settings["activation_checkpointing"] else "",
        f"loss in {pieces} pieces" if pieces > 1 else "",
    ]
    return ", ".join(filter(None, parts))
