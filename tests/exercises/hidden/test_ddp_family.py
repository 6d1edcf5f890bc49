"""Ring all-reduce, DDP from naive to bucketed, and ZeRO-1, on two to four real ranks."""

from __future__ import annotations

import runpy
from pathlib import Path

import pytest

WORKER = Path(__file__).with_name("family_worker.py")
CHECKS = list(runpy.run_path(str(WORKER))["CHECKS"])

pytestmark = pytest.mark.two_ranks


@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_on_ranks(rank_server, ranks: int) -> None:
    done = rank_server.run(WORKER, *CHECKS, ranks=ranks)
    assert done.exit_codes == [0] * ranks, "\n".join(done.stderr)


def test_in_a_world_of_one(rank_server) -> None:
    alone = [name for name in CHECKS if name not in ("refused", "ring")]
    done = rank_server.run(WORKER, *alone, ranks=1)
    assert done.exit_codes == [0], "\n".join(done.stderr)
