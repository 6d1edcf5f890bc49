"""The model that ``--model`` and ``--seq-len`` name, followed here where it has to be."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from common.errors import UserError

if TYPE_CHECKING:
    from common.perfmodel.architectures.architecture import Architecture


def asked_model(model: str, seq_len: int | None) -> tuple[Architecture, int | None]:
    """Returns a model, and the tokens of its samples where they are a choice.

    Args:
        model: name of a published size, path of a ``config.json``, or ``MODULE:FUNCTION``.
        seq_len: tokens of a sample; None for the default.

    Raises UserError for what is none of them, and for a length that the model cannot have.
    """
    from common.perfmodel.architectures.published_sizes import FOLLOWED, sized_architecture

    target = FOLLOWED.get(model, model)
    if ":" not in target:
        return sized_architecture(model, seq_len)
    if seq_len is not None:
        raise UserError(f"--seq-len has no effect on {model}, whose batch has a length")
    from common.tuning.user_model import followed_model

    return replace(followed_model(target, Path.cwd()), name=model), None
