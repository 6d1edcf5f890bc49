"""The output of ``ddplab tune`` on the terminal: tables of settings, and sentences."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from common.analysis.show import show
from common.runtime.paths import relative_to_project
from common.runtime.wording import size_text
from common.tuning.results.recommendation import Recommendation, Verified

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

WIDTH = 100
MEANS = {
    "fp16": "gradients are rounded to 11 bits on their way, and overflow above 65,504",
    "bf16": "gradients are rounded to 8 bits on their way",
}

SETTINGS = {
    "setting.label": "setting",
    "num_buckets": "buckets",
    "predicted_step_s": ("expected", lambda step_s: f"{step_s * 1e3:.1f}"),
    "measured_step_s": ("verified", lambda step_s: f"{step_s * 1e3:.1f}"),
    "predicted_gain": ("gain expected", "{:+.1%}"),
    "gain": (
        "gain verified",
        lambda gain: f"{gain.estimate:+.1%} ({gain.text('{:+.1%}')})",
    ),
    "gain.rounds": "rounds",
}
"""Titles of settings: steps in ms, gains as shares of the default's step; – where not run."""


def print_recommendation(advice: Recommendation, console: Console | None = None) -> None:
    """Prints a recommendation: what was tuned, what was found, the lines to paste, the cost."""
    from rich.console import Console

    console = console or Console()
    if not console.is_terminal:
        console = Console(width=WIDTH, file=console.file)

    def say(line: str = "") -> None:
        console.print(line, highlight=False, markup=False, soft_wrap=line.startswith(" "))

    say(subject(advice))
    title = "Forward and backward pass, ms; the default, then the best first"
    console.print(_table([advice.default, *advice.candidates], title))
    say(verdict(advice))
    if advice.worth_it:
        say()
        for line in advice.python.splitlines():
            say(f"    {line}")
        say()
    if advice.options:
        console.print(_table(advice.options, "Options that change the numbers, ms per micro-batch"))
        for option in advice.options:
            say(f"- {option.setting.label}: {meaning(option)}")
    for line in advice.expected_error.splitlines():
        say(line)
    say(spent(advice))
    say(f"Written to {relative_to_project(advice.run_dir)}")


def subject(advice: Recommendation) -> str:
    """Returns what was tuned, and where, in a few sentences."""
    return (
        f"{advice.model}: {advice.parameters:,} trained parameters in {advice.tensors} tensors, "
        f"{size_text(advice.gradient_bytes)} of gradients; {advice.hardware}. Without DDP the "
        f"forward pass takes {advice.forward_s * 1e3:.1f} ms and the backward pass "
        f"{advice.backward_s * 1e3:.1f} ms. {advice.bucketings} distinct bucketings were predicted."
    )


def verdict(advice: Recommendation) -> str:
    """Returns the recommendation in a sentence or two."""
    best, gain = advice.best, advice.best.gain
    noise = f"Instances of DDP's default differ by {advice.noise:.1%} (standard deviation)."
    if gain is None:
        return f"Nothing was verified; keep DDP's default. {noise}"
    interval = f"{gain.confidence:.0%} interval {gain.text('{:+.1%}')}"
    measured = f"expected {best.predicted_gain:+.1%}, verified {gain.estimate:+.1%} ({interval})"
    if advice.worth_it:
        return (
            f"Recommended: {best.setting.label}, {best.num_buckets} buckets. Time saved per step: "
            f"{measured}, from {gain.rounds} rounds that had no part in the choice. {noise}"
        )
    judged = advice.judged
    why = f" ({judged.verdict}: {judged.reason})" if judged.reason else ""
    return (
        f"Nothing beats DDP's default{why}: keep it. The best candidate was {best.setting.label}; "
        f"time saved per step: {measured}, {gain.rounds} rounds. {noise}"
    )


def meaning(option: Verified) -> str:
    """Returns what an option does to training."""
    if option.setting.accumulation > 1:
        return (
            f"gradients are exchanged once per {option.setting.accumulation} micro-batches; the "
            "global batch grows as much, or the micro-batch must shrink; times are per micro-batch"
        )
    return MEANS[option.setting.compression]


def spent(advice: Recommendation) -> str:
    """Returns the time that tuning took, and that of a sweep, in a sentence or two."""
    share = advice.tuning_s / advice.sweep_s
    text = (
        f"Took {advice.tuning_s:.0f} s; visiting all {advice.bucketings} bucketings as often as a "
        f"sweep does would take {advice.sweep_s:.0f} s ({share:.0%})."
    )
    if share > 1:
        text += " With so few bucketings a sweep would be as quick."
    return text


def _table(rows: Sequence[Verified], title: str) -> Table:
    from rich.box import SIMPLE
    from rich.table import Table

    formatted = show(rows, SETTINGS)
    table = Table(title=title, title_justify="left", box=SIMPLE, padding=(0, 1, 0, 0))
    for name in formatted.columns:
        header = name.replace("gain ", "gain\n")
        table.add_column(header, justify="left" if name == "setting" else "right", no_wrap=True)
    for row in formatted.cells:
        table.add_row(*row)
    return table
