"""One answer per question: whatever the report states twice, it states alike.

The report is that of the recorded runs, as the guard keeps it (tests/guard/answers/notebooks, which
CI compares with what the notebooks print), and the staff's answers.
Every statement of a best cap, a speedup, an efficiency or an error belongs to a quantity below, and
all statements of one quantity are equal, as far as their digits tell. A statement of none of them
fails, too: it may be a second answer.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

TESTS = Path(__file__).resolve().parents[1]
NOTEBOOKS = TESTS / "guard" / "answers" / "notebooks"
SOURCES = TESTS.parent / "notebooks"
OF_A_FIGURE = re.compile(r"^(figure|axes|  )")
N = r"\*{0,2}[+-]?([\d,]*\d(?:\.\d+)?)\*{0,2}"
"""A number, in bold or not."""
CELL = r" *[^|\n]* *\|"


def row(label: str) -> str:
    """Returns the pattern of a row of a table of facts, up to its number."""
    return rf"\| {re.escape(label)} \| {N}"


DETECTED = (
    rf"b\^?\*\$?(?: by hand)? = {N}",
    rf"{N} times\*{{0,2}} as fast",
    rf"{N}x(?=[ *(])",
    rf"(?<!an )efficiency(?: of| to|:)? {N} ?%",
    rf"an efficiency of {N} ?%",
    rf"off by {N} ?%",
    rf"[Mm]edian error (?:is|goes from) {N} ?%",
    rf"\| b\*[^|\n]* \| {N} MiB \|",
    rf"\| (?:median|worst|largest) error[^|\n]* \| {N} ?%",
    rf"\| noise floor[^|\n]* \| {N} ?%",
    rf"\| regret[^|\n]* \| {N} ?% \|",
)
"""What counts as a statement, wherever it stands in the text."""

A0_MEMORY, A0_PROFILE = "assignment0_memory", "assignment0_profile"
A0_THROUGHPUT, MODES = "assignment0_throughput", "assignment3_dynamic_batches"
A1_DDP, A1_FSDP = "assignment1_ddp", "assignment1_fsdp"
PART1, PART2 = "assignment2_part1_model", "assignment2_part2_prediction"
PART3, PART4 = "assignment2_part3_evaluation", "assignment2_part4_scale"
HOSTS, DISCUSSION = "assignment2_emulated_hosts", "assignment2_discussion"
SYNTHETIC, TEXT = "assignment4_synthetic_scaling", "assignment4_text_scaling"

QUANTITIES: dict[str, list[tuple[str, str]]] = {
    "b* of the run": [
        (PART2, row("b*, predicted to be the fastest")),
        (PART2, rf"predicted b\* = {N} MiB: 21"),
        (DISCUSSION, row("b* at a factor of 1")),
    ],
    "caps within 1 % of b* of the run": [
        (PART2, r"\| caps within 1 % of it \| ([^|]*) \|"),
        (DISCUSSION, r"\| within 1 % \| ([^|]*) \|"),
    ],
    "b* of the run, by hand": [(PART1, row("b* by hand, no smaller than B/L"))],
    "b* of the run, both cases of the equation": [
        (PART1, row("b*, both cases")),
        (DISCUSSION, rf"\| latency α \| {N} MiB \|{CELL} 22 MiB"),
    ],
    "b* of the run, square-root law": [(PART1, row("b*, square-root law"))],
    "error of the backward pass, full model": [
        (PART3, row("median error of T(b)")),
        (PART3, rf"\| full model \| {N}%"),
        (DISCUSSION, row("median error of T(b)")),
        (HOSTS, rf"\| loopback \|(?:{CELL}){{5}} {N}%"),
    ],
    "worst error of the backward pass, full model": [
        (PART3, row("worst error of T(b)")),
        (PART3, rf"\| full model \|(?:{CELL}){{3}} {N}%"),
        (DISCUSSION, row("worst error of T(b)")),
    ],
    "noise floor of the sweep": [
        (PART3, row("noise floor")),
        (DISCUSSION, row("noise floor")),
        (HOSTS, rf"\| loopback \|(?:{CELL}){{6}} {N}%"),
    ],
    "regret of the run": [
        (PART3, row("regret of the prediction")),
        (PART3, rf"\| full model \|(?:{CELL}){{5}} {N}%"),
        (DISCUSSION, row("regret of the prediction")),
        (HOSTS, rf"\| loopback \|(?:{CELL}){{7}} {N}%"),
    ],
    "median error over noise floor": [
        (PART3, row("median error over noise floor")),
        (DISCUSSION, row("median error over noise floor")),
    ],
    "error without copies and contention": [
        (DISCUSSION, row("median error without copies and contention")),
        (PART3, rf"\| real buckets, a\(x\) \| {N}%"),
    ],
    "error at the sweep's own speed": [
        (DISCUSSION, row("median error at the sweep's own speed")),
        (PART3, rf"\| full model \|(?:{CELL}){{2}} {N}%"),
    ],
    "error without copies and contention, at the sweep's own speed": [
        (DISCUSSION, row("median error without both, at that speed")),
        (PART3, rf"\| real buckets, a\(x\) \|(?:{CELL}){{2}} {N}%"),
    ],
    "error of peaks over all cases": [(A0_MEMORY, row("median error"))],
    "largest error of peaks": [(A0_MEMORY, row("largest error"))],
    "what fusing could gain": [(A0_PROFILE, rf"\| times as fast, if they took no time \| {N}")],
    "speedup of DDP, 1 micro-batch": [
        (A1_DDP, rf"\| DDP \| 1 \|(?:{CELL}){{3}} {N} \|"),
        (A1_FSDP, rf"\| DDP \| 1 \| 195 \|(?:{CELL}){{2}} {N} \|"),
    ],
    "speedup of DDP, 2 micro-batches": [
        (A1_DDP, rf"\| DDP \| 2 \|(?:{CELL}){{3}} {N} \|"),
        (A1_FSDP, rf"\| DDP \| 2 \| 327 \|(?:{CELL}){{2}} {N} \|"),
    ],
    "speedup of text training, by epochs": [
        (TEXT, rf"\| synthetic, 2 ranks \|{CELL} {N} \|"),
        (TEXT, rf"\| synthetic \| 2 ranks \|(?:{CELL}){{4}} {N}x"),
    ],
    "speedup of text training, by steps": [
        (TEXT, rf"text_2_ranks:\n2 ranks are {N} times as fast"),
        (TEXT, rf"text_2_ranks:\n(?:.*\n)+?   Speedup now {N},"),
    ],
    "efficiency of text training, by steps": [
        (TEXT, rf"text_2_ranks:\n[^%]*efficiency {N} %"),
    ],
    "speedup between hosts, by steps": [
        (TEXT, rf"```text\n2 ranks are {N} times as fast"),
        (TEXT, rf"```text\n2 ranks are (?:.*\n)+?   Speedup now {N},"),
    ],
    "efficiency between hosts, by steps": [
        (TEXT, rf"```text\n2 ranks are [^%]*efficiency {N} %"),
    ],
    "control of the options": [
        (A0_THROUGHPUT, row("control: the baseline measured twice")),
        (A0_THROUGHPUT, rf"\| baseline-again \|(?:{CELL}){{2}} {N} \|"),
    ],
    "errors of the published pair": [
        (SYNTHETIC, row("largest error with others' mean slowdown of 18.9%")),
    ],
    "errors of the published pair without slowdown": [
        (SYNTHETIC, row("largest error without any slowdown")),
    ],
    "noise floor of the sweep of assignment 4": [
        (SYNTHETIC, row("noise floor: the same step under two names differs by")),
        (SYNTHETIC, row("noise floor of the measured steps")),
    ],
    "error of a proposed change": [(TEXT, row("largest error of a gain"))],
}
"""What the report states → where: a notebook, and the text around the number."""


def text_of(notebook: str) -> str:
    """Returns all that a notebook prints, and the staff's answers in it."""
    cells = json.loads((SOURCES / f"{notebook}.ipynb").read_text())["cells"]
    answers = [cell["source"] for cell in cells if "staff" in cell["metadata"].get("tags", ())]
    joined = "\n".join(" ".join(map(str.strip, lines)) for lines in answers)
    return (NOTEBOOKS / f"{notebook}.txt").read_text() + "\n" + joined


def statements(quantity: str) -> Iterator[tuple[str, str]]:
    """Yields notebook and text of each statement of a quantity; fails where a place has none."""
    for notebook, pattern in QUANTITIES[quantity]:
        found = re.findall(pattern, text_of(notebook))
        assert found, f"{notebook} no longer states {quantity}: {pattern}"
        yield from ((notebook, one) for one in found)


def alike(one: str, other: str) -> bool:
    """Judges if two texts are the same number, as far as the one with fewer digits tells."""
    if one == other:
        return True
    try:
        values = [float(text.replace(",", "")) for text in (one, other)]
    except ValueError:
        return False
    digits = min(len(text.partition(".")[2]) for text in (one, other))
    return abs(values[0] - values[1]) <= 0.5 * 10**-digits * (1 + 1e-9)


@pytest.mark.parametrize("quantity", QUANTITIES)
def test_what_is_stated_twice_is_stated_alike(quantity):
    (first, value), *others = statements(quantity)
    for notebook, other in others:
        assert alike(value, other), f"{quantity}: {first} says {value}, {notebook} says {other}"


def test_there_is_no_statement_of_another_quantity():
    known: dict[str, set[int]] = {}
    for places in QUANTITIES.values():
        for notebook, pattern in places:
            spans = known.setdefault(notebook, set())
            spans |= {found.start(1) for found in re.finditer(pattern, text_of(notebook))}
    strange = []
    for path in sorted(NOTEBOOKS.glob("*.txt")):
        text = text_of(path.stem)
        for pattern in DETECTED:
            for found in re.finditer(pattern, text):
                line = text[text.rfind("\n", 0, found.start()) + 1 :].partition("\n")[0]
                if OF_A_FIGURE.match(line) or found.start(1) in known.get(path.stem, ()):
                    continue
                strange.append(f"{path.stem}: {found[0]!r} in {line[:90]!r}")
    assert not strange, "\n".join(strange)


def test_a_second_answer_would_be_seen():
    assert alike("1.8", "1.8")
    assert alike("1.84", "1.8")
    assert not alike("1.86", "1.8")
    assert alike("26", "25.6")
    assert not alike("5 to 6", "5 to 7")
