"""Every wrong solution fails the check that it is meant for."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import sys
from pathlib import Path
from types import ModuleType

import pytest
from mutants.mutant import Mutant
from mutants.numbers import NUMBERS
from mutants.ranks import RANKS

HIDDEN = Path(__file__).with_name("hidden")
WORKER = HIDDEN / "family_worker.py"


@pytest.mark.two_ranks
@pytest.mark.parametrize("mutant", RANKS, ids=lambda mutant: mutant.name)
def test_a_mistake_is_found_on_ranks(rank_server, tmp_path: Path, mutant: Mutant) -> None:
    wrong = tmp_path / f"{mutant.exercise}.py"
    wrong.write_text(mutant.source())
    done = rank_server.run(WORKER, mutant.check, ranks=2, variables={"WRONG_SOLUTION": str(wrong)})
    assert 1 in done.exit_codes, done.exit_codes
    assert "Error" in "".join(done.stderr)
    for stderr in done.stderr:  # found by the check, not by Python
        assert "SyntaxError" not in stderr
        assert "NameError" not in stderr


@pytest.mark.parametrize("mutant", NUMBERS, ids=lambda mutant: mutant.name)
def test_a_mistake_is_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mutant: Mutant
) -> None:
    monkeypatch.syspath_prepend(HIDDEN)
    right = importlib.import_module(f"common.exercises.{mutant.exercise}")
    wrong = load(mutant, tmp_path)
    file, _, name = mutant.check.partition("::")
    checks = importlib.import_module(file.removesuffix(".py"))
    for own, value in list(vars(checks).items()):
        if value is right:
            monkeypatch.setattr(checks, own, wrong)
        elif own in vars(right) and value is vars(right)[own]:
            monkeypatch.setattr(checks, own, vars(wrong)[own])
    if hasattr(checks, "EXERCISE"):  # the file itself
        monkeypatch.setattr(checks, "EXERCISE", Path(wrong.__file__))
    check = getattr(checks, name)
    given = {"tmp_path": tmp_path / "check", "monkeypatch": monkeypatch}
    given["tmp_path"].mkdir()
    wanted = inspect.signature(check).parameters
    with pytest.raises((Exception, pytest.fail.Exception)) as error:
        check(**{key: value for key, value in given.items() if key in wanted})
    assert not isinstance(error.value, NameError | SyntaxError), error.value


def load(mutant: Mutant, folder: Path) -> ModuleType:
    """Load the module with the mistake, beside the right one."""
    path = folder / f"{mutant.exercise}.py"
    path.write_text(mutant.source())
    name = f"wrong_{mutant.exercise}"
    spec = importlib.util.spec_from_file_location(name, path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # which dataclasses look into
    try:
        spec.loader.exec_module(module)
    finally:
        del sys.modules[name]
    return module
