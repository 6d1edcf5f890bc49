"""The model that the explorer puts on clusters: chosen by the command, or by name in the page.

Nothing here imports torch, so a module is followed before, by the command, which hands over its
layers in a file.
"""

from __future__ import annotations

import os
import pickle
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from common.perfmodel.architectures.architecture import Architecture
from common.perfmodel.architectures.published_sizes import NAMES, sized_architecture

DEFAULT_MODEL = "gpt2-large"
MODEL_VARIABLE = "DDPLAB_EXPLORE_MODEL"
"""Names the file of the model that the command was given, for the notebook's kernel."""


@dataclass(frozen=True)
class ChosenModel:
    """A model as ``ddplab predict --model`` names it, and its layers.

    ``seq_len`` is the tokens of a sample where they are a choice, else None.
    """

    name: str
    architecture: Architecture
    seq_len: int | None = None

    @property
    def flags(self) -> tuple[str, ...]:
        """Returns the flags of ``ddplab predict`` that ask for it."""
        length = ("--seq-len", f"{self.seq_len}") if self.seq_len else ()
        return ("--model", self.name, *length)


def offered_names(chosen: ChosenModel | None) -> list[str]:
    """Returns names of models to choose from, the command's or the default first."""
    return list(dict.fromkeys([chosen.name if chosen else DEFAULT_MODEL, *NAMES]))


@cache
def named_model(name: str, chosen: ChosenModel | None = None) -> ChosenModel:
    """Returns the chosen model of this name, a published size, or a configuration.

    Raises UserError for what is none of these.
    """
    if chosen and name == chosen.name:
        return chosen
    return ChosenModel(name, *sized_architecture(name, None))


def write_model(model: ChosenModel, path: Path) -> None:
    """Writes a model for the kernel, into a folder that only its owner can write."""
    path.write_bytes(pickle.dumps(model))


def given_model(name: str = "") -> ChosenModel | None:
    """Returns the model of that name, else the one that the command was given, if any."""
    if name:
        return named_model(name)
    path = os.environ.get(MODEL_VARIABLE)
    return pickle.loads(Path(path).read_bytes()) if path else None
