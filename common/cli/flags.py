"""Flags of a command: those without an effect, and the files that they name."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import fields
from pathlib import Path

from common.errors import UserError, naming_os_errors


def refuse_given(
    settings: object,
    why: str,
    *,
    leave_out: Collection[str] = (),
    only: Collection[str] | None = None,
) -> None:
    """Raises UserError for the first flag that differs from its default.

    Args:
        settings: a dataclass of the command line.
        why: end of the message, after the flag's name.
        leave_out: fields that are not looked at.
        only: fields that are; None for all others.
    """
    for field in fields(settings):
        is_looked_at = field.name not in leave_out if only is None else field.name in only
        if is_looked_at and getattr(settings, field.name) != field.default:
            no = "no-" if field.default is True else ""
            raise UserError(f"--{no}{field.name.replace('_', '-')} {why}")


def check_output(flag: str, path: str | None) -> None:
    """Raises UserError where no file could be written there, before anything is computed.

    A flag that was not given, whose path is None, is legal.
    """
    if path is None:
        return
    target = Path(path)
    if target.is_dir() or not path:
        raise UserError(f"{flag} {path or repr(path)}: give the name of a file")
    if not target.parent.is_dir():
        raise UserError(f"{flag} {path}: there is no folder {target.parent}")


def write_output(flag: str, path: str, text: str) -> None:
    """Writes a file, whole or not at all. Raises UserError where it cannot be written."""
    from common.runtime.records.run_directory import write_atomically

    with naming_os_errors(f"{flag} {path}"):
        write_atomically(Path(path), text)
