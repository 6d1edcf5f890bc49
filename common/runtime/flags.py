"""Settings as the command line that ``script.run_script`` makes them from."""

from __future__ import annotations

from collections.abc import Mapping


def as_flags(settings: Mapping[str, object]) -> list[str]:
    """``--name=value`` for each; ``--name`` or ``--no-name`` for a switch; nothing for None.

    Several values follow the name.
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
