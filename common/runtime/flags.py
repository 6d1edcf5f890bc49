"""Settings as command-line flags, which ``script.run_script`` reads back into settings."""

from __future__ import annotations

from collections.abc import Mapping


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
