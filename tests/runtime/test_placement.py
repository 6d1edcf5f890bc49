"""Where ranks run, read from the variables of torchrun and Slurm; and what is wrong with it."""

import pytest

from common.runtime.machine.placement import own_placement, placement_problems, split_groups


def torchrun(rank: int, local_rank: int, local_size: int, **more: str) -> dict[str, str]:
    return {
        "RANK": str(rank),
        "WORLD_SIZE": "8",
        "LOCAL_RANK": str(local_rank),
        "LOCAL_WORLD_SIZE": str(local_size),
        **more,
    }


def in_step(node: int, tasks: str, gpus: int = 4) -> dict[str, str]:
    return {
        "SLURM_STEP_ID": "0",
        "SLURM_STEP_TASKS_PER_NODE": tasks,
        "SLURM_NODEID": str(node),
        "SLURMD_NODENAME": f"n{node + 1}",
        "SLURM_GPUS_ON_NODE": str(gpus),
        "CUDA_VISIBLE_DEVICES": ",".join(map(str, range(gpus))),
    }


def test_one_torchrun_per_node_with_a_rank_per_gpu_is_right() -> None:
    places = [
        own_placement(torchrun(rank, rank % 4, 4) | in_step(rank // 4, "1(x2)"))
        for rank in range(8)
    ]
    assert [place.host for place in places] == ["n1"] * 4 + ["n2"] * 4
    assert [place.device for place in places] == [f"GPU {i}" for i in range(4)] * 2
    assert placement_problems(places) == []


def test_cuda_shows_no_device_behind_an_invalid_entry() -> None:
    places = [
        own_placement(torchrun(rank, rank, 3) | {"CUDA_VISIBLE_DEVICES": "3, 5,-1,7"})
        for rank in range(3)
    ]
    assert [place.device for place in places[:2]] == ["GPU 3", "GPU 5"]
    [problem] = placement_problems(places)
    assert "local rank 2 has no device" in problem


def test_four_tasks_that_each_start_four_ranks_are_sixteen_workers() -> None:
    place = own_placement(torchrun(0, 0, 4) | in_step(0, "4(x2)"))
    [problem] = placement_problems([place])
    assert "n1: 16 workers for 4 GPUs (4 srun tasks, each with a torchrun that starts 4)" in problem
    assert "srun --ntasks-per-node=1" in problem


def test_slurm_tasks_without_torchrun_with_a_gpu_each() -> None:
    def task(rank: int, gpu: int) -> dict[str, str]:
        return in_step(0, "2", 2) | {
            "SLURM_PROCID": str(rank),
            "SLURM_LOCALID": str(rank),
            "SLURM_STEP_NUM_TASKS": "2",
            "CUDA_VISIBLE_DEVICES": str(gpu),
        }

    apart = [own_placement(task(0, 0)), own_placement(task(1, 1))]
    assert placement_problems(apart) == []
    together = [own_placement(task(0, 0)), own_placement(task(1, 0))]
    [problem] = placement_problems(together)
    assert "n1: ranks 0 and 1 share GPU 0" in problem


def test_a_rank_beyond_the_visible_devices_has_none() -> None:
    variables = {"CUDA_VISIBLE_DEVICES": "0,1"}
    places = [own_placement(torchrun(rank, rank, 3) | variables) for rank in range(3)]
    [problem] = placement_problems(places)
    assert "local rank 2 has no device (CUDA_VISIBLE_DEVICES=0,1)" in problem


@pytest.mark.parametrize(
    "variables", [{}, *({"CUDA_VISIBLE_DEVICES": none} for none in ("", "-1", "NoDevFiles"))]
)
def test_without_gpus_ranks_share_the_cpu(variables: dict) -> None:
    places = [own_placement(torchrun(rank, rank, 2) | variables) for rank in range(2)]
    assert [place.device for place in places] == ["cpu", "cpu"]
    assert placement_problems(places) == []


def test_gpus_that_no_variable_hides_go_by_local_rank() -> None:
    places = [own_placement(torchrun(rank, rank, 2), gpus=("GPU-a", "GPU-b")) for rank in range(2)]
    assert [place.device for place in places] == ["GPU 0", "GPU 1"]


def test_ranks_that_each_call_their_own_gpu_number_0_share_nothing() -> None:
    # With devices confined to tasks, Slurm may number each task's only GPU 0.
    variables = {"CUDA_VISIBLE_DEVICES": "0"}
    apart = [
        own_placement(torchrun(rank, rank, 2) | variables, gpus=(uuid,))
        for rank, uuid in enumerate(("GPU-a", "GPU-b"))
    ]
    assert placement_problems(apart) == []
    together = [
        own_placement(torchrun(rank, rank, 2) | variables, gpus=("GPU-a",)) for rank in (0, 1)
    ]
    assert len(placement_problems(together)) == 1


def test_ranks_that_share_a_gpu_on_purpose_take_turns_on_the_gpus() -> None:
    variables = {"CUDA_VISIBLE_DEVICES": "0,1", "SLURM_GPUS_ON_NODE": "2"}
    places = [
        own_placement(torchrun(rank, rank, 4) | variables, gpus=("GPU-a", "GPU-b"), ranks_per_gpu=2)
        for rank in range(4)
    ]
    assert [place.device for place in places] == ["GPU 0", "GPU 1", "GPU 0", "GPU 1"]
    assert [place.identity for place in places] == ["GPU-a", "GPU-b", "GPU-a", "GPU-b"]
    assert placement_problems(places, ranks_per_gpu=2) == []
    assert len(placement_problems(places)) == 3  # four workers for two GPUs, both of them shared


def test_more_ranks_on_a_gpu_than_were_meant_to_share_it_are_told() -> None:
    places = [
        own_placement(torchrun(rank, rank, 3), gpus=("GPU-a",), ranks_per_gpu=2)
        for rank in range(3)
    ]
    [problem] = placement_problems(places, ranks_per_gpu=2)
    assert "ranks 0 and 1 and 2 share GPU 0; start 2 ranks per GPU" in problem


@pytest.mark.parametrize(
    ("hosts", "size", "split"),
    [
        ("aabb", 2, ()),
        ("abab", 2, ("ranks 0 to 1 is on hosts a, b", "ranks 2 to 3 is on hosts a, b")),
        ("aaabbb", 3, ()),
        ("aaaaaabbbbbb", 4, ("ranks 4 to 7 is on hosts a, b",)),
        ("aabbccdd", 4, ()),  # no host has four: as was asked for
    ],
)
def test_groups_of_ranks_are_on_one_host_where_they_can_be(hosts, size, split):
    problems = split_groups(hosts, size)
    assert len(problems) == len(split)
    assert all(words in problem for words, problem in zip(split, problems, strict=True))
