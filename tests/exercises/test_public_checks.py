"""Public checks on ranks: what is none of the task's fails them, and says in which property."""

from __future__ import annotations

from pathlib import Path

import pytest

WORKER = Path(__file__).parent / "public" / "ranks_worker.py"
BEFORE = """
import runpy, sys
from contextlib import nullcontext
import torch
import torch.distributed as dist
from common.exercises import naive_ddp, overlapped_ddp, sharded_optimizer
"""
WITHOUT_HOOKS = """
class OverlappedDDP(naive_ddp.NaiveDDP):
    no_sync = nullcontext
overlapped_ddp.OverlappedDDP = OverlappedDDP
"""
UNSHARDED = """
class ShardedOptimizer(torch.optim.AdamW):
    owners, own = {}, None
    def __init__(self, params, optimizer_class, group=None, **settings):
        super().__init__(params, **settings)
sharded_optimizer.ShardedOptimizer = ShardedOptimizer
"""
STATES_ONLY = """
def broadcast_state(module, group):
    for value in module.state_dict().values():
        dist.broadcast(value, 0)
naive_ddp.broadcast_state = broadcast_state
"""
READY_MADE = """
from common.exercises import ring_all_reduce
ring_all_reduce.ring_all_reduce = lambda tensor, group=None: dist.all_reduce(tensor)
"""
WRONG = (
    ("A1.1 sums", READY_MADE, "dist.all_reduce is called"),
    ("A1.2 naive trains", STATES_ONLY, "scale, before the first step, on 2 ranks"),
    ("A1.3 sends early", WITHOUT_HOOKS, "0 of 3264 elements are sent before the last gradient"),
    ("A1.4 shards", UNSHARDED, "0 of 4 parameters have an owner"),
)


@pytest.mark.two_ranks
@pytest.mark.parametrize(("check", "solution", "words"), WRONG, ids=[case[0] for case in WRONG])
def test_what_is_none_of_the_task_fails(
    rank_server, tmp_path: Path, check: str, solution: str, words: str
) -> None:
    script = tmp_path / "worker.py"
    after = f"runpy.run_path({str(WORKER)!r}, run_name='__main__')\n"
    script.write_text(BEFORE + solution + after)
    done = rank_server.run(script, check, ranks=2)
    assert all(done.exit_codes), f"{check} passes"
    assert any(words in text for text in done.stderr), done.stderr
