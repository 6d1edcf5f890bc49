"""A name for each attempt of a job, so that restarted ranks do not read what dead ranks wrote.

torchrun serves one store for all attempts of a job, and counts restarts on each node separately: a
node that only joins a new round does not count it. So neither the store nor the count tells ranks
of one attempt from those of the last. Here the ranks of one attempt agree on a name.
"""

from __future__ import annotations

import json
import secrets
import time

import torch.distributed as dist

from common.errors import RunFailed

POLL_S = 0.01


def agree_on_attempt(store: dist.Store, rank: int, world_size: int, limit_s: float) -> str:
    """Returns a name that all living ranks share and that no earlier attempt had.

    Each rank writes a random word of its own. Rank 0 publishes the words of all ranks with a name
    for the attempt. A rank that finds its own word there knows that rank 0 has read it, and not the
    word of its predecessor, and confirms. When all have confirmed, the name is valid.

    Raises:
        RunFailed: not all ranks confirmed within ``limit_s`` seconds.
    """
    word = secrets.token_hex(8)
    store.set(f"word/{rank}", word)
    deadline = time.monotonic() + limit_s
    repeated: dict[str, str] = {}
    name = ""
    while time.monotonic() < deadline:
        if rank == 0:
            words = _words(store, world_size)
            if words != repeated and len(words) == world_size:
                repeated, name = words, secrets.token_hex(8)
                store.set("attempt", json.dumps({"name": name, "words": words}))
            if name and store.check([f"{name}/{other}" for other in range(1, world_size)]):
                store.set(f"{name}/stands", "yes")
                return name
        elif store.check(["attempt"]):
            attempt = json.loads(store.get("attempt"))
            if attempt["words"].get(str(rank)) == word:
                name = attempt["name"]
                store.set(f"{name}/{rank}", "heard")
                if store.check([f"{name}/stands"]):
                    return name
        time.sleep(POLL_S)
    raise RunFailed(f"rank {rank}: not all {world_size} ranks were there within {limit_s:g} s")


def _words(store: dist.Store, world_size: int) -> dict[str, str]:
    """Returns the word of each rank that has written one, in this attempt or an earlier one."""
    ranks = [rank for rank in range(world_size) if store.check([f"word/{rank}"])]
    return {str(rank): store.get(f"word/{rank}").decode() for rank in ranks}
