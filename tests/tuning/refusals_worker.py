"""One of two ranks for test_tune_two_ranks.py: tries FUNCTIONs that cannot be tuned, in turn.

Prints, for each, what this rank was told, and the files that it left behind.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch

from common.errors import UserError
from common.runtime.group.process_group import process_group
from common.tuning import tune
from common.tuning.same_graph import together
from common.tuning.tune_settings import TuneSettings
from common.tuning.user_model import load_user_model


def main(folder: str, output: str, names: list[str]) -> None:
    with process_group("cpu") as worker:
        for name in names:
            settings = TuneSettings(function=f"tuned_models:{name}", output_dir=output)

            def load(target: str = settings.function):
                return load_user_model(target, Path(folder), torch.device("cpu"))

            said = "nothing"
            try:
                user = together(worker, load)
                tune(user.module, user.batch, user.loss, worker, settings)
            except UserError as error:
                said = str(error)
            left = Path(output).exists()
            print(json.dumps({"name": name, "said": said, "left": left}), flush=True)


main(sys.argv[1], sys.argv[2], sys.argv[3:])
