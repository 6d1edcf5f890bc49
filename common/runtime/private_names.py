"""Names that torch does not promise to keep: one that a later version has moved is one line."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import torch

from common.errors import UserError


def private_name(module: ModuleType, name: str, user: str) -> Any:
    """Returns a private name of a module of torch's, looked up where it is used.

    Args:
        module: such as ``torch.cuda``.
        name: such as ``_sleep``.
        user: what cannot be done without it.

    Raises:
        UserError: this torch has no such name.
    """
    try:
        return getattr(module, name)
    except AttributeError:
        raise UserError(
            f"torch {torch.__version__} has no {module.__name__}.{name}, without which {user}; "
            "torch 2.9 to 2.15 have it"
        ) from None
