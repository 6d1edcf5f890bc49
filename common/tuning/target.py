"""MODULE:FUNCTION, as a user types it; without torch, so that a wrong one is refused at once."""

from __future__ import annotations

import re
import sys
from importlib.machinery import PathFinder
from pathlib import Path

from common.errors import UserError

LIKE = "like my_model:make"


def parse_target(text: str) -> tuple[str, str]:
    """Returns module and function of ``package.module:function``.

    Raises UserError for anything else.
    """
    match = re.fullmatch(r"([A-Za-z_]\w*(?:\.[A-Za-z_]\w*)*):([A-Za-z_]\w*)", text.strip())
    if match and not match[1].endswith(".py"):
        return match[1], match[2]
    if re.search(r"\.py(:|$)|[/\\]", text):
        raise UserError(
            f"{text!r}: MODULE is the name that Python imports, not a file; {LIKE} in the folder "
            "of my_model.py"
        )
    raise UserError(f"{text!r} is not MODULE:FUNCTION; {LIKE}")


def check_module_exists(target: str, folder: Path) -> None:
    """Raises UserError where there is no such module, before ranks take seconds to find out.

    Nothing is imported: of a dotted name only the first part is looked for.
    """
    name, _ = parse_target(target)
    if PathFinder.find_spec(name.partition(".")[0], [str(folder), *sys.path]) is None:
        raise UserError(no_module(name, folder))


def no_module(name: str, folder: Path) -> str:
    """Returns the message for a module that is not there."""
    return f"no module {name!r} in {folder} or among the installed packages"
