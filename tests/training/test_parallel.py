"""The strategies: which cannot be had is said before anything is sent, and what MY_FSDP sends."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from rank_support import torchrun_variables

from common.errors import UserError
from common.models.gpt2 import GPT2, GPT2Config
from common.runtime.group.process_group import Worker
from common.runtime.processes.ranks import Ranks
from common.training.config import DdpConfig, FsdpConfig
from common.training.parallel import parallelise

TRAIN_FSDP = Path(__file__).resolve().parents[2] / "assignments" / "assignment1" / "train_fsdp.py"
FLAGS = "--strategy HYBRID_SHARD --model gpt2-pico --seq_len 16 --num_steps 1 --no-profile"


def test_fsdp_on_gpus_is_refused_over_gloo_which_torch_would_replace_by_nccl() -> None:
    worker = Worker(Ranks(0, 2, 0, 2, "torchrun"), torch.device("cuda", 0), "gloo", 2)
    with pytest.raises(UserError, match="over NCCL, not over gloo"):
        parallelise(GPT2(GPT2Config.named("gpt2-pico")), FsdpConfig(), worker)


def test_a_shard_group_across_hosts_is_one_line(rank_server, tmp_path) -> None:
    # Two hosts with two ranks each, dealt out in turn: srun --distribution=cyclic.
    done = rank_server.run(
        TRAIN_FSDP,
        *(*FLAGS.split(), "--device", "cpu", "--shard_size", 2, "--output_dir", tmp_path),
        ranks=4,
        variables=lambda rank, port: {
            **torchrun_variables(rank, 4, port),
            "SLURMD_NODENAME": f"n{1 + rank % 2}",
        },
    )
    assert done.exit_codes == [2] * 4
    assert "the group of ranks 0 to 1 is on hosts n1, n2" in done.error_line
    assert list(tmp_path.iterdir()) == []


@pytest.mark.two_ranks
def test_a_pass_that_computes_activations_again_sends_as_much_as_one_that_keeps_them(rank_server):
    # MY_FSDP gathers nothing that the blocks do not need again.
    done = rank_server.succeed(Path(__file__).with_name("recomputation_worker.py"), ranks=2)
    for rank in (0, 1):
        [counts] = done.lines(rank)
        if counts["True"] is None:
            pytest.skip("the kernel does not count the bytes of a socket")
        # One block of the six, gathered once more, would be 5 % of all.
        assert counts["True"] == pytest.approx(counts["False"], rel=0.02)


def rank_0_of(ranks: int) -> Worker:
    return Worker(Ranks(0, ranks, 0, ranks, "torchrun"), torch.device("cpu"), "gloo")


@pytest.mark.parametrize("ranks", [*range(1, 18), 32, 33, 64])
@pytest.mark.parametrize("micro_batch_size", [0, 3])
def test_a_global_batch_that_nobody_set_divides_by_any_number_of_ranks(
    ranks, micro_batch_size
) -> None:
    worker = rank_0_of(ranks)
    chosen = DdpConfig(micro_batch_size=micro_batch_size).resolved(worker)
    total, micro = chosen.global_batch_size, chosen.micro_batch_size
    at_once = ranks * micro
    assert total % at_once == 0
    assert micro == micro_batch_size or 1 <= micro <= 8
    # The default is 32: no more, unless every rank must have one, and no micro-batch more fits.
    assert total <= 32 or total == at_once
    assert total + at_once > 32 or not micro_batch_size
    # What the user set stays.
    given = DdpConfig(global_batch_size=7, micro_batch_size=2).resolved(worker)
    assert (given.global_batch_size, given.micro_batch_size) == (7, 2)


@pytest.mark.parametrize(
    ("ranks", "sizes"), [(1, (32, 8)), (2, (32, 8)), (4, (32, 8)), (8, (32, 4)), (3, (30, 5))]
)
def test_default_batches(ranks, sizes) -> None:
    chosen = DdpConfig().resolved(rank_0_of(ranks))
    assert (chosen.global_batch_size, chosen.micro_batch_size) == sizes
