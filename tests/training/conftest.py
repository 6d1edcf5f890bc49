"""Tokens to train on."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from common.data.shard_files import write_shard


@pytest.fixture(scope="session")
def tokens(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Returns a folder with 5,000 tokens of gpt2-pico's vocabulary."""
    folder = tmp_path_factory.mktemp("tokens")
    write_shard(folder / "a.bin", np.random.default_rng(0).integers(0, 256, 5000).astype("uint16"))
    return folder
