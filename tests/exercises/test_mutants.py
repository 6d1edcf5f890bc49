"""Every wrong solution fails the check that it is meant for."""

from __future__ import annotations

from pathlib import Path

import pytest
from mutants import MUTANTS, Mutant

WORKER = Path(__file__).with_name("family_worker.py")

pytestmark = pytest.mark.two_ranks


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_a_mistake_is_found(rank_server, tmp_path: Path, mutant: Mutant) -> None:
    wrong = tmp_path / f"{mutant.exercise}.py"
    wrong.write_text(mutant.source())
    done = rank_server.run(WORKER, mutant.check, ranks=2, variables={"WRONG_SOLUTION": str(wrong)})
    assert 1 in done.exit_codes, done.exit_codes
    assert "Error" in "".join(done.stderr)
    for stderr in done.stderr:  # found by the check, not by Python
        assert "SyntaxError" not in stderr
        assert "NameError" not in stderr
