"""Legal values of settings: what a field's type allows, and what its refusal says."""

from __future__ import annotations

import ast
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import pytest

from common.errors import UserError
from common.runtime.script import parse_settings
from common.settings import (
    AtLeast,
    Fraction,
    NonEmpty,
    NonNegative,
    OneOf,
    Positive,
    RunOptions,
    Seed,
    Settings,
    SomeOf,
    part_of,
)

COMMON = Path(__file__).resolve().parents[1] / "common"
COLOURS = ("red", "green")


@dataclass(frozen=True)
class Paint(RunOptions):
    """Settings with a rule of each kind."""

    coats: Annotated[int, Positive] = 1
    """Layers of paint."""
    dilution: Annotated[float | None, Fraction] = None
    drying_h: Annotated[float, NonNegative] = 0
    hands: Annotated[int, AtLeast(2, "one holds the ladder")] = 2
    widths: Annotated[tuple[int, ...], NonEmpty, AtLeast(1)] = (10, 20)
    colour: Annotated[str, OneOf(COLOURS)] = "red"
    spots: Annotated[tuple[str, ...], SomeOf(COLOURS, "spot")] = COLOURS


@pytest.mark.parametrize(
    ("flags", "refusal"),
    [
        (("--coats", "0"), "coats is 0; it must be above 0 and finite"),
        (("--dilution", "1"), "dilution is 1.0; it must be at least 0 and below 1"),
        (("--drying-h", "inf"), "drying_h is inf; it must be at least 0 and finite"),
        (("--drying-h", "nan"), "drying_h is nan; it must be at least 0 and finite"),
        (("--hands", "1"), "hands is 1; it must be at least 2 (one holds the ladder)"),
        (("--widths",), "widths is empty; give at least one"),
        (("--widths", "3", "0"), "widths: 0; each is at least 1"),
        (
            ("--colour", "reed"),
            "unknown colour 'reed'; did you mean 'red'? known: red, green",
        ),
        (("--spots",), "spots is empty; give one or more of red, green"),
        (("--spots", "green", "pnik"), "unknown spot 'pnik'; known: red, green"),
    ],
)
def test_an_illegal_value_is_refused_in_one_line(flags: tuple[str, ...], refusal: str) -> None:
    with pytest.raises(UserError) as raised:
        parse_settings(Paint, flags, "paint")
    assert str(raised.value) == refusal


def test_legal_values_are_taken() -> None:
    flags = ("--coats", "3", "--dilution", "0", "--widths", "1", "--spots", "red")
    paint = parse_settings(Paint, flags, "paint")
    assert paint == Paint(coats=3, dilution=0.0, widths=(1,), spots=("red",))


def test_the_help_of_a_flag_says_nothing_of_its_rule(capsys) -> None:
    with pytest.raises(SystemExit):
        parse_settings(Paint, ("--help",), "paint")
    shown = " ".join(capsys.readouterr().out.split())
    assert "--coats INT Layers of paint. (default: 1)" in shown


def test_a_rule_between_fields_leaves_none_of_a_field_out() -> None:
    for path in COMMON.rglob("*.py"):
        text = path.read_text()
        if "from common.settings import" not in text:
            continue
        classes = [node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.ClassDef)]
        for node in (node for of in classes if of.bases for node in of.body):
            if isinstance(node, ast.FunctionDef) and node.name == "__post_init__":
                assert ast.unparse(node.body[0]) == "super().__post_init__()", path


def test_a_subclass_keeps_the_rules_of_its_base() -> None:
    @dataclass(frozen=True)
    class Fence(Paint):
        metres: Annotated[int, Positive] = 5

    with pytest.raises(UserError, match="coats is -1"):
        Fence(coats=-1)
    with pytest.raises(UserError, match="metres is 0"):
        Fence(metres=0)
    assert isinstance(Fence(), Settings)


def test_a_part_takes_the_settings_of_its_own_names() -> None:
    settings = {"coats": 3, "colour": "green", "brush": "wide"}
    expected = Paint(coats=3, colour="red", hands=4)
    assert part_of(Paint, settings, colour="red", hands=4) == expected


HELP = Path(__file__).parent / "guard" / "answers" / "help"
FLAG = re.compile(r"  (-{1,2}[a-z][\w-]*.*)")
SIGNATURE = re.compile(r"(-{1,2}[\w-]+,? *)+(\{[^}]*\}\S*|[A-Z]+\b|\[.*?\]\])? *")


@pytest.mark.parametrize("path", sorted(HELP.glob("*.txt")), ids=lambda path: path.stem)
def test_every_flag_of_a_command_says_what_it_is(path: Path) -> None:
    flags: dict[str, str] = {}
    for line in path.read_text().splitlines():
        if flag := FLAG.fullmatch(line):
            flags[flag[1]] = flag[1]
        elif flags and line.startswith("      "):
            flags[list(flags)[-1]] += " " + line.strip()
    said = {flag: SIGNATURE.sub("", text, count=1) for flag, text in flags.items()}
    assert [flag for flag, text in said.items() if not re.sub(r"\(default:.*", "", text)] == []


def test_a_seed_that_pytorch_does_not_take_is_refused() -> None:
    Seed.check("seed", 2**62)
    for number in (-1, 2**64):
        with pytest.raises(UserError, match=f"seed is {number}; it must be from 0 to"):
            Seed.check("seed", number)
