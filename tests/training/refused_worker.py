"""Beginnings of trainings that cannot be, one after another in one launch.

``refused_worker.py CASES``: a JSON file of [name, script, flags]. Each rank prints a line of JSON
with what it raised, by name.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from common.errors import UserError
from common.runtime.group.process_group import process_group
from common.runtime.script import parse_settings
from common.training.config import BaselineConfig, DdpConfig, FsdpConfig
from common.training.trainer import train

SETTINGS = {"train_baseline": BaselineConfig, "train_ddp": DdpConfig, "train_fsdp": FsdpConfig}


def refusal(script: str, flags: list[str]) -> str:
    """Returns what the script raises."""
    try:
        train(parse_settings(SETTINGS[script], flags, script))
    except UserError as error:
        return str(error)
    return "nothing"


with process_group("cpu"):
    cases = json.loads(Path(sys.argv[1]).read_text())
    print(json.dumps({name: refusal(script, flags) for name, script, flags in cases}), flush=True)
