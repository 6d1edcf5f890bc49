"""A group in which each rank is alone, on three ranks."""

from __future__ import annotations

import json
from pathlib import Path

WORKER = Path(__file__).with_name("one_rank_group_worker.py")


def test_each_rank_is_alone_in_a_group_that_it_makes_in_one_call(rank_server):
    done = rank_server.run(WORKER, ranks=3)
    assert done.exit_codes == [0, 0, 0], done.stderr
    for rank, line in enumerate(done.stdout):
        said = json.loads(line)
        assert said["size"] == 1
        assert said["made"] == 2  # groups, by as many calls: none for another rank's
        assert said["sums"] == [rank + 1, 6, rank + 1, 6]  # the world still sums 1 + 2 + 3
