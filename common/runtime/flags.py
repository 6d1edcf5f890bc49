"""Settings as command-line flags, which ``script.run_script`` reads back, and in YAML files."""

from __future__ import annotations

import typing
from collections.abc import Mapping
from pathlib import Path

import yaml

from common.errors import UserError, unknown_name


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


def read_yaml(path: Path) -> dict:
    """Reads a YAML file that holds a mapping.

    Raises:
        UserError: it cannot be read, or is no YAML mapping; with the line of a syntax error.
    """
    try:
        content = yaml.safe_load(path.read_text())
    except OSError as error:
        raise UserError(f"{path}: {error.strerror}") from None
    except UnicodeDecodeError:
        raise UserError(f"{path}: not a text file") from None
    except (yaml.YAMLError, ValueError) as error:  # YAML's dates may be impossible ones
        mark = getattr(error, "problem_mark", None)
        where = f"line {mark.line + 1}: " if mark else ""
        problem = " ".join(str(getattr(error, "problem", error)).split())
        raise UserError(f"{path}: {where}not YAML ({problem})") from None
    if not isinstance(content, dict):
        raise UserError(f"{path}: expected settings as 'key: value' lines")
    return content


def read_section(path: Path, section: str) -> dict:
    """Reads the settings of a YAML file: its part ``section``, or all of a file without it.

    Raises:
        UserError: the file cannot be read, or is a preset that has no such section.
    """
    content = read_yaml(path)
    if section not in content:
        if "stages" in content:
            raise UserError(f"{path}: no section {section!r}; has {', '.join(content)}")
        return content
    if not isinstance(content[section], dict):
        raise UserError(f"{path}: section {section!r} holds no 'key: value' settings")
    return content[section]


def file_flags(path: Path, settings_type: type, section: str) -> list[str]:
    """Returns the settings of a YAML file as flags.

    Raises:
        UserError: no such section, an unknown setting, or a value of the wrong kind.
    """
    types = typing.get_type_hints(settings_type)
    settings: dict[str, object] = {}
    for key, value in read_section(path, section).items():
        name = str(key).replace("-", "_")
        if name not in types:
            raise UserError(f"{path}: {unknown_name('setting', str(key), types)}")
        check_kind(f"{path}: {key}", value, types[name])
        settings[name] = value
    return as_flags(settings)
