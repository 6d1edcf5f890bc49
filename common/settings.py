"""Settings of scripts: dataclasses whose fields are flags, with the legal values of each.

A legal value is part of a field's type: ``rounds: Annotated[int, Positive] = 4``. ``Settings``
checks them when an instance is made; rules between fields stand in a class's own
``__post_init__``, after ``super().__post_init__()``.
"""

from __future__ import annotations

import dataclasses
import functools
import typing
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Annotated

from common.errors import UserError, require_known

Part = typing.TypeVar("Part")


class Rule(typing.Protocol):
    """The legal values of a field."""

    def check(self, name: str, value: object) -> None:
        """Raises UserError, naming the field, for a value that is not legal."""


@dataclass(frozen=True)
class Bound:
    """A rule for a number, or for each number of a tuple.

    Attributes:
        legal: words after "it must be".
        holds: returns True for a legal number; NaN is none.
    """

    legal: str
    holds: Callable[[float], bool]

    def check(self, name: str, value: object) -> None:
        """Raises UserError for the first number that is not legal."""
        if not isinstance(value, tuple):
            if not self.holds(value):
                raise UserError(f"{name} is {value}; it must be {self.legal}")
            return
        for number in value:
            if not self.holds(number):
                raise UserError(f"{name}: {number}; each is {self.legal}")


INFINITY = float("inf")
Positive = Bound("above 0 and finite", lambda number: 0 < number < INFINITY)
NonNegative = Bound("at least 0 and finite", lambda number: 0 <= number < INFINITY)
Seed = Bound("from 0 to 2^63 - 2^20", lambda number: 0 <= number <= 2**63 - 2**20)
"""Seeds that PyTorch takes, with room for a rank's number."""
Fraction = Bound("at least 0 and below 1", lambda number: 0 <= number < 1)


def AtLeast(least: int, why: str = "") -> Bound:
    """Returns the rule of a least number; a refusal says ``why`` in parentheses."""
    return Bound(f"at least {least}" + (why and f" ({why})"), lambda number: number >= least)


@dataclass(frozen=True, eq=False)
class OneOf:
    """A rule for a name, or for each name of a tuple.

    Attributes:
        names: legal names.
        kind: what a refusal calls a name; by default as the field.
    """

    names: Collection[str]
    kind: str = ""

    def check(self, name: str, value: object) -> None:
        """Raises UserError for the first unknown name; the refusal suggests the nearest."""
        for chosen in value if isinstance(value, tuple) else (value,):
            require_known(self.kind or name, chosen, self.names)


class SomeOf(OneOf):
    """A rule for a tuple of names, which is not empty."""

    def check(self, name: str, value: object) -> None:
        """Raises UserError for an empty tuple, and for the first unknown name."""
        if not value:
            raise UserError(f"{name} is empty; give one or more of {', '.join(self.names)}")
        super().check(name, value)


class NonEmpty:
    """The rule of a tuple that holds something."""

    @staticmethod
    def check(name: str, value: object) -> None:
        """Raises UserError for an empty tuple."""
        if not value:
            raise UserError(f"{name} is empty; give at least one")


@functools.cache
def rules_of(settings_type: type) -> tuple[tuple[str, Rule], ...]:
    """Returns each rule of a dataclass's fields with the field's name, in the fields' order."""
    hints = typing.get_type_hints(settings_type, include_extras=True)
    return tuple(
        (name, rule)
        for name, hint in hints.items()
        for rule in getattr(hint, "__metadata__", ())
        if hasattr(rule, "check")
    )


class Settings:
    """The base of settings: an instance has legal values only.

    Raises:
        UserError: for the first field whose value is not legal. None is, where a field's type has
            it.
    """

    def __post_init__(self) -> None:
        for name, rule in rules_of(type(self)):
            value = getattr(self, name)
            if value is not None:
                rule.check(name, value)


def part_of(kind: type[Part], values: Mapping[str, object], **other: object) -> Part:
    """Makes a dataclass of what settings have under its fields' names, and of ``other``."""
    names = [field.name for field in dataclasses.fields(kind)]
    return kind(**{name: values[name] for name in names if name in values} | other)


def is_changed(settings: Settings, name: str) -> bool:
    """Returns True if a field has not its default."""
    defaults = {field.name: field.default for field in dataclasses.fields(settings)}
    return getattr(settings, name) != defaults[name]


@dataclass(frozen=True, kw_only=True)
class RunOptions(Settings):
    """The folder of a run's results, and its id."""

    output_dir: str = "outputs"
    """Folder that the run directory is made in."""
    run_id: str = ""
    """Name of the run directory below output_dir; made up by default."""


@dataclass(frozen=True, kw_only=True)
class DeviceOptions(RunOptions):
    """The device of a script, and where its results go."""

    device: str | None = None
    """cpu or cuda; by default CUDA where there is a GPU that can be used."""


@dataclass(frozen=True, kw_only=True)
class RankOptions(DeviceOptions):
    """The device and the backend of a script's ranks, and where its results go."""

    backend: str | None = None
    """nccl or gloo; by default NCCL on CUDA and gloo on the CPU."""


@dataclass(frozen=True, kw_only=True)
class RoundOptions(Settings):
    """The number of rounds: fixed, or as many as make the intervals narrow enough."""

    rounds: Annotated[int, Positive] = 4
    """Rounds, at least; each visits every arm once."""
    budget_s: Annotated[float, NonNegative] = 0
    """Make further rounds until there are six and intervals are narrow enough, as long as all
    rounds together have taken less than so many seconds; 0 for the least number only."""
    half_width: Annotated[float, Positive] = 0.05
    """Half-width of the ratios of arms' times that is narrow enough; 0.05 is ±5 %. With a smaller
    one two equal arms seem to differ in 7 to 8 % of runs in place of 5 %."""


def dividing_batch(wanted: int, at_once: int) -> int:
    """Returns the largest multiple of ``at_once`` up to ``wanted``; at least one of them.

    Args:
        wanted: samples of a step, over all ranks.
        at_once: samples that all ranks take in one forward pass: ranks × micro-batch.
    """
    return max(1, wanted // at_once) * at_once
