"""Settings as command-line flags, which ``script.run_script`` reads back into settings."""

from __future__ import annotations

import typing
from collections.abc import Mapping

from common.errors import UserError


def as_flags(settings: Mapping[str, object]) -> list[str]:
    """Returns the settings as flags.

    A flag is ``--name=value``, ``--name`` or ``--no-name`` for a switch, and ``--name`` followed by
    the values for a list or tuple. None gives no flag.
    """
    flags = []
    for name, value in settings.items():
        if isinstance(value, bool):
            flags.append(f"--{name}" if value else f"--no-{name}")
        elif isinstance(value, (tuple, list)):
            flags += [f"--{name}", *map(str, value)]
        elif value is not None:
            flags.append(f"--{name}={value}")
    return flags


def check_kind(where: str, value: object, expected: object) -> None:
    """Raises UserError for a value that flags cannot express; the parser of flags checks the rest.

    Args:
        where: file and setting, for the message.
        value: the setting's value, as YAML has it.
        expected: the setting's type.
    """
    if (expected is bool) != isinstance(value, bool):
        kind = "true or false" if expected is bool else f"{type_name(expected)}, not true or false"
        raise UserError(f"{where}: {value!r}; expected {kind}")
    takes_list = typing.get_origin(expected) is tuple
    if isinstance(value, dict) or (isinstance(value, list) and not takes_list):
        raise UserError(f"{where}: {value!r}; expected a single value")
    if value is None and type(None) not in typing.get_args(expected):
        raise UserError(f"{where} has no value")


def type_name(kind: object) -> str:
    """Returns a type as settings write it, such as ``int`` or ``float | None``."""
    return kind.__name__ if isinstance(kind, type) and not typing.get_args(kind) else str(kind)
