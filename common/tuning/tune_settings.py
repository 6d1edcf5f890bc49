"""The settings of a tuning run, and its MODULE:FUNCTION: without torch, so that a wrong one is
refused at once."""

from __future__ import annotations

import re
import sys
from dataclasses import dataclass
from importlib.machinery import PathFinder
from pathlib import Path
from typing import Annotated

from common.errors import UserError
from common.settings import Positive, RankOptions

SWEEP_ROUNDS = 2
"""Visits that an exhaustive sweep makes to each bucketing; tuning takes a share of their time."""
LIKE = "like my_model:make"
"""An example of MODULE:FUNCTION, for refusals."""


@dataclass(frozen=True)
class TuneSettings(RankOptions):
    """Find the best DDP settings for a model on the ranks of this job.

    Recipe: uv run torchrun --nproc_per_node=2 common/tuning/job.py --function my_model:make
    (or ddplab tune my_model:make). Settings may also come from --config FILE (a YAML file; flags
    win).
    """

    function: str = ""
    """MODULE:FUNCTION that returns (module, batch, loss)."""
    folder: str = "."
    """Folder in which MODULE is looked for, besides the installed packages."""
    share: Annotated[float, Positive] = 0.2
    """Time that tuning may take, as a share of that of measuring every bucketing; where there are
    few of them it takes more."""
    seed: int = 42
    """Seed that is set before FUNCTION is called, the same on all ranks."""
    output_dir: str = "outputs/tune"


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
