"""Experiment files and presets of ``train_text.py``, read as flags.

Three kinds of YAML come in with ``--config``: an experiment in the sections of the original
(``model``, ``data``, ``training``, ``distributed``); a preset of ``ddplab run``, whose section
``train_text`` holds settings without sections and may name an experiment to start from; or such
settings alone. Rising priority: the experiment, the file, flags.
"""

from __future__ import annotations

import argparse
import sys
import typing
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

from common.errors import UserError, unknown_name
from common.runtime.flags import as_flags, check_kind, read_section, read_yaml
from common.runtime.paths import project_root
from common.runtime.script import exit_status, parse_settings, run_script
from common.training.texts.config import TextScalingConfig

FOLDER = project_root() / "assignments" / "assignment4" / "configs"
SCRIPT_SECTION = "train_text"
SECTIONS = {
    "model": ("d_model", "n_head", "n_layer", "d_ff", "dropout", "vocab_size", "max_length"),
    "data": (
        "dataset",
        "dataset_dir",
        "synthetic_like",
        "max_train_samples",
        "eval_samples",
        "pad",
        "data_seed",
        "workers",
        "persistent_workers",
    ),
    "training": (
        "epochs",
        "batch_size_per_rank",
        "accumulation",
        "total_batch_size",
        "lr",
        "weight_decay",
        "warmup_steps",
        "max_gradient_norm",
        "precision",
        "cudnn_benchmark",
        "discard_steps",
        "log_every",
        "probe_repeats",
    ),
    "distributed": (
        "device",
        "backend",
        "threads",
        "bucket_cap_mb",
        "compression",
        "static_graph",
        "gradient_as_bucket_view",
    ),
}
"""Sections of an experiment file and the settings in each."""
IN_FILES = {"batch_size_per_rank": "batch_size"}
"""Maps names of settings in files to their flags, where the two differ."""


def run_experiment(train: Callable[[TextScalingConfig], None]) -> None:
    """Runs ``train`` with the settings of files and flags, as ``train_text.py``."""
    with exit_status():
        arguments = with_files(sys.argv[1:])
    run_script(train, TextScalingConfig, arguments=arguments)


def parse_experiment(argv: Sequence[str]) -> TextScalingConfig:
    """Returns the settings of a command line that may have ``--config`` or ``--experiment``."""
    return parse_settings(TextScalingConfig, with_files(argv), SCRIPT_SECTION)


def with_files(argv: Sequence[str]) -> list[str]:
    """Returns a command line with the files that it names replaced by the flags they stand for.

    Raises:
        UserError: a file that cannot be read, or an unknown section, setting or experiment.
    """
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False, exit_on_error=False)
    parser.add_argument("--config")
    parser.add_argument("--experiment")
    try:
        options, flags = parser.parse_known_args(list(argv))
    except argparse.ArgumentError as error:
        raise UserError(f"{error.argument_name}: {error.message}") from None
    settings = file_settings(Path(options.config)) if options.config else {}
    experiment = options.experiment or settings.pop("experiment", None)
    if experiment:
        settings = file_settings(find_experiment(str(experiment))) | settings
        settings["experiment"] = experiment
    return [*as_flags(settings), *flags]


def find_experiment(name: str) -> Path:
    """Returns the file of an experiment, by its name among ``configs`` or by its path.

    Raises:
        UserError: an unknown name.
    """
    if Path(name).suffix in (".yaml", ".yml"):
        return Path(name)
    if (FOLDER / f"{name}.yaml").is_file() and name in known_experiments():
        return FOLDER / f"{name}.yaml"
    raise UserError(unknown_name("experiment", name, known_experiments()))


def known_experiments() -> list[str]:
    """Returns the names of the experiments among ``configs``, which holds presets as well."""
    paths = sorted(FOLDER.glob("*.yaml"))
    return [path.stem for path in paths if SECTIONS.keys() & read_yaml(path).keys()]


def file_settings(path: Path) -> dict[str, object]:
    """Reads the settings of a file by the names of their flags, and checks the kind of each.

    Raises:
        UserError: it cannot be read, or names what is no setting.
    """
    content = read_section(path, SCRIPT_SECTION)
    types = typing.get_type_hints(TextScalingConfig)
    settings = {}
    for key, value in _without_sections(path, content):
        name = IN_FILES.get(key, key)
        if name not in types:
            names = [*types, *IN_FILES, *SECTIONS]
            raise UserError(f"{path}: {unknown_name('setting', key, names)}")
        check_kind(f"{path}: {key}", value, types[name])
        settings[name] = value
    return settings


def _without_sections(path: Path, content: Mapping) -> Iterator[tuple[str, object]]:
    for key, value in content.items():
        if key not in SECTIONS:
            yield str(key).replace("-", "_"), value
            continue
        if not isinstance(value, dict):
            raise UserError(f"{path}: section {key!r} holds no 'key: value' settings")
        for name, inner in value.items():
            name = str(name).replace("-", "_")
            if name not in SECTIONS[key]:
                raise UserError(f"{path}: {key}: {_not_here(name, key)}")
            yield name, inner


def _not_here(name: str, section: str) -> str:
    """Returns the error message for a setting that its section does not have."""
    for other, names in SECTIONS.items():
        if name in names:
            return f"{name} belongs in section {other}"
    return unknown_name("setting", name, SECTIONS[section])
