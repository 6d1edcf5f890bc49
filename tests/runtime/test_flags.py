"""Settings become flags that make the same settings."""

from __future__ import annotations

from dataclasses import asdict, dataclass

import pytest

from common.runtime.flags import as_flags
from common.runtime.script import parse_settings


@dataclass(frozen=True)
class Settings:
    """Anything a script may have."""

    name: str = "default"
    count: int = 1
    share: float = 0.5
    limit: float | None = None
    sizes: tuple[int, ...] = (1,)
    compiled: bool = False
    checked: bool = True


@pytest.mark.parametrize(
    "settings",
    [
        Settings(),
        Settings("--two words=", -3, 1e-9, 2.5, (1, 2, 3), True, False),
        Settings(name="", checked=False),
    ],
)
def test_a_script_reads_the_settings_back(settings):
    assert parse_settings(Settings, as_flags(asdict(settings)), "script", None) == settings
