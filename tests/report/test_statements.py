"""One answer per question: whatever the report states twice, it states alike.

The report is that of the recorded runs, as the guard keeps it (tests/guard/answers/notebooks, which
CI compares with what the notebooks print). Every statement of a best cap, a speedup, an efficiency
or an error belongs to a quantity below, and all statements of one quantity are equal, as far as
their digits tell. A statement of none of them fails, too: it may be a second answer.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

NOTEBOOKS = Path(__file__).resolve().parents[1] / "guard" / "answers" / "notebooks"
OF_A_FIGURE = re.compile(r"^(figure|axes|  )")
N = r"\*{0,2}[+-]?([\d,]*\d(?:\.\d+)?)\*{0,2}"
"""A number, in bold or not."""
CELL = r" *[^|\n]* *\|"

DETECTED = (
    rf"b\^?\*\$?(?: by hand)? = {N}",
    rf"{N} times\*{{0,2}} as fast",
    rf"{N}x(?=[ *(])",
    rf"(?<!an )efficiency(?: of| to|:)? {N} ?%",
    rf"an efficiency of {N} ?%",
    rf"off by {N} ?%",
    rf"[Mm]edian error (?:is|goes from) {N} ?%",
)
"""What counts as a statement, wherever it stands in the text."""

A0_MEMORY, A0_PROFILE = "assignment0_memory", "assignment0_profile"
A1_DDP, A1_FSDP = "assignment1_ddp", "assignment1_fsdp"
PART1, PART2 = "assignment2_part1_model", "assignment2_part2_prediction"
PART3, PART4 = "assignment2_part3_evaluation", "assignment2_part4_scale"
HOSTS, DISCUSSION = "assignment2_emulated_hosts", "assignment2_discussion"
SYNTHETIC, TEXT = "assignment4_synthetic_scaling", "assignment4_text_scaling"

QUANTITIES: dict[str, list[tuple[str, str]]] = {
    "b* of the run": [
        (PART2, rf"\$b\^\*\$ = {N} MiB\*\* is predicted"),
        (PART2, rf"line predicted b\* = {N} MiB: \S+ [\d.]+\n(?:.*\n){{,8}}Of 10"),
        (DISCUSSION, rf"At a factor of 1, \$b\^\*\$ = {N} MiB"),
    ],
    "caps within 1 % of b* of the run": [
        (PART2, r"Caps within 1 % of it: ([^.]*(?:\.\d[^.]*)*)\."),
        (DISCUSSION, r"caps within 1 % of it: ([^.]*(?:\.\d[^.]*)*)\."),
    ],
    "b* of the run, by hand": [(PART1, rf"\$b\^\*\$ by hand = {N} MiB")],
    "error of the backward pass, full model": [
        (PART3, rf"predicted backward time is off by {N}%"),
        (DISCUSSION, rf"predicted backward time is off by {N}%"),
        (PART3, rf"\| full model \| {N}%"),
        (PART3, rf"the median error goes from \S+ to {N}%"),
        (HOSTS, rf"\| loopback \|(?:{CELL}){{5}} {N}%"),
    ],
    "error of the backward pass, by hand": [
        (PART3, rf"the median error goes from {N}%"),
        (PART3, rf"\| by hand \| {N}%"),
    ],
    "worst error of the backward pass, full model": [
        (PART3, rf"backward time is off by \S+ in the median and {N}% at worst"),
        (DISCUSSION, rf"backward time is off by \S+ in the median and {N}% at worst"),
        (PART3, rf"\| full model \|(?:{CELL}) {N}%"),
    ],
    "noise floor of the sweep": [
        (PART3, rf"the noise floor is {N}%"),
        (PART3, rf"beside a noise floor of {N}%"),
        (DISCUSSION, rf"the noise floor is {N}%"),
        (HOSTS, rf"\| loopback \|(?:{CELL}){{6}} {N}%"),
    ],
    "regret of the run": [
        (PART3, rf"\| full model \|(?:{CELL}){{3}} {N}%"),
        (HOSTS, rf"\| loopback \|(?:{CELL}){{7}} {N}%"),
    ],
    "error without copies and contention": [
        (DISCUSSION, rf"the same model is off by {N}%"),
        (PART3, rf"\| real buckets, a\(x\) \| {N}%"),
    ],
    "error between hosts at 1 Gbit/s": [
        (HOSTS, rf"at 1 Gbit/s the prediction is off by {N}%"),
        (HOSTS, rf"\| 1 Gbit/s \|(?:{CELL}){{5}} {N}%"),
    ],
    "noise floor between hosts at 1 Gbit/s": [
        (HOSTS, rf"in the median, beside a noise floor of {N}%"),
        (HOSTS, rf"\| 1 Gbit/s \|(?:{CELL}){{6}} {N}%"),
    ],
    "error of peaks over all cases": [(A0_MEMORY, rf"the median error is {N}%")],
    "what fusing could gain": [(A0_PROFILE, rf"more than {N} times as fast")],
    "error of memory under each strategy": [(A1_FSDP, rf"the prediction is off by {N}% in the")],
    "error of steps between emulated hosts": [(A1_FSDP, rf"predicted step is off by {N}%")],
    "speedup of DDP, 1 micro-batch": [
        (A1_DDP, rf"with 1 micro-batch a step DDP is {N} times as fast"),
        (A1_DDP, rf"\| DDP \| 1 \|(?:{CELL}){{4}} {N} \|"),
    ],
    "speedup of DDP, 2 micro-batches": [
        (A1_DDP, rf"with 2 micro-batches a step DDP is {N} times as fast"),
        (A1_DDP, rf"\| DDP \| 2 \|(?:{CELL}){{4}} {N} \|"),
    ],
    "speedup, weak scaling, batch 128": [
        (SYNTHETIC, rf"Weak scaling, batch per rank 128: {N}x"),
        (SYNTHETIC, rf"\| weak \| batch per rank 128 \|(?:{CELL}){{3}} {N} \|"),
    ],
    "efficiency, weak scaling, batch 128": [
        (SYNTHETIC, rf"1\.06x on 2 ranks[^%]*efficiency {N}%"),
        (SYNTHETIC, rf"\| weak \| batch per rank 128 \|(?:{CELL}){{5}} {N}%"),
    ],
    "speedup, strong scaling, batch 64": [
        (SYNTHETIC, rf"strong scaling, global batch 64: {N}x"),
        (SYNTHETIC, rf"\| strong \| global batch 64 \|(?:{CELL}){{3}} {N} \|"),
    ],
    "efficiency, strong scaling, batch 64": [
        (SYNTHETIC, rf"global batch 64: [^%]*efficiency {N}%"),
        (SYNTHETIC, rf"\| strong \| global batch 64 \|(?:{CELL}){{5}} {N}%"),
    ],
    "efficiency that counts as kept": [
        (SYNTHETIC, rf"keep an efficiency of {N}%"),
        (TEXT, rf"brings the efficiency to {N} %"),
    ],
    "error of other arms' steps": [
        (SYNTHETIC, rf"the steps of the other 3 are off by {N}%"),
    ],
    "error of other arms' steps, between hosts": [
        (SYNTHETIC, rf"the steps of the other 4 are off by {N}%"),
    ],
    "published AG News, as printed": [
        (TEXT, rf"\*\*{N}x\*\* as printed"),
        (TEXT, rf"\| AGNews \| small \|(?:{CELL}){{3}} {N} \| 4 \|"),
    ],
    "published AG News, efficiency as printed": [(TEXT, rf"an efficiency of {N} %\. \*Neg")],
    **{
        f"published {data}, {model}: {what}": [
            (TEXT, rf"{start}.*?{before}{N}{after}"),
            (TEXT, rf"\| {data} \| {model} \|(?:{CELL}){{{cells}}} {N}"),
        ]
        for data, model, start in (
            ("AGNews", "small", "AGNews, small, 4 GPUs"),
            ("AGNews", "optimized", "AGNews, optimized, 4 GPUs"),
            ("IMDB", "small", "IMDB, 4 GPUs"),
        )
        for what, before, after, cells in (
            ("speedup per sample", r"\*\*", r"x \(", 5),
            ("efficiency", "efficiency ", " %", 6),
        )
    },
    "speedup of text training, by epochs": [
        (TEXT, rf"synthetic, 2 ranks: {N}x \("),
        (TEXT, rf"\| synthetic \| 2 ranks \|(?:{CELL}){{4}} {N}x"),
    ],
    "efficiency of text training, by epochs": [
        (TEXT, rf"synthetic, 2 ranks: [^%]*efficiency {N} %"),
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
        (TEXT, rf"times\*\* as fast as one \(predicted {N}\)"),
        (TEXT, rf"\| none \|{CELL} {N} \|"),
    ],
    "efficiency between hosts, by steps": [
        (TEXT, rf"```text\n2 ranks are [^%]*efficiency {N} %"),
    ],
    "speedup between hosts, measured again": [
        (TEXT, rf"Measured again as it was, 2 ranks are \*\*{N} times"),
        (TEXT, rf"\| none \|(?:{CELL}){{2}} {N} \|"),
    ],
    "speedup between hosts, best change": [
        (TEXT, rf"accumulation=32 brings {N},"),
        (TEXT, rf"\| accumulation=32 \|(?:{CELL}){{2}} {N} \|"),
    ],
    "efficiency between hosts, best change": [
        (TEXT, rf"accumulation=32 brings [^%]*an efficiency of {N}%"),
        (TEXT, rf"\| accumulation=32 \|(?:{CELL}){{6}} {N}%"),
    ],
}
"""What the report states → where: a notebook, and the text around the number."""


def text_of(notebook: str) -> str:
    """All that a notebook prints."""
    return (NOTEBOOKS / f"{notebook}.txt").read_text()


def statements(quantity: str) -> Iterator[tuple[str, str]]:
    """The notebook and the text of each statement of a quantity; each place has at least one."""
    for notebook, pattern in QUANTITIES[quantity]:
        found = re.findall(pattern, text_of(notebook))
        assert found, f"{notebook} no longer states {quantity}: {pattern}"
        yield from ((notebook, one) for one in found)


def alike(one: str, other: str) -> bool:
    """Whether two texts are the same number, as far as the one with fewer digits tells."""
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
        text = path.read_text()
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
