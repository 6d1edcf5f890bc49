"""The line that a user reads of a mistake."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from common.errors import UserError


def problem(call: Callable, *arguments: object, **options: object) -> str:
    """Returns the one line that a user reads."""
    with pytest.raises(UserError) as caught:
        call(*arguments, **options)
    assert "\n" not in str(caught.value)
    return str(caught.value)
