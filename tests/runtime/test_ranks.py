"""Ranks are read from torchrun's variables, else Slurm's, else there is one process."""

from __future__ import annotations

import pytest
from refusals import problem

from common.runtime.processes.ranks import (
    Ranks,
    current_ranks,
    meeting_port,
    rendezvous_environment,
)

TORCHRUN = {"RANK": "5", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "4"}
SLURM = {
    "SLURM_PROCID": "9",
    "SLURM_NTASKS": "11",
    "SLURM_LOCALID": "1",
    "SLURM_NODEID": "2",
    "SLURM_TASKS_PER_NODE": "4(x2),3",
    "SLURM_STEP_ID": "0",
}


def test_without_variables_there_is_one_process():
    assert current_ranks({}) == Ranks(0, 1, 0, 1, "single")
    assert current_ranks({}).is_main


def test_torchruns_variables_win_over_those_of_the_slurm_step_it_runs_in():
    for env in (TORCHRUN, SLURM | TORCHRUN):
        assert current_ranks(env) == Ranks(5, 8, 1, 4, "torchrun")
    assert not current_ranks(TORCHRUN).is_main
    assert current_ranks(SLURM) == Ranks(9, 11, 1, 3, "slurm")


@pytest.mark.parametrize(
    ("text", "node", "tasks"),
    [
        *(("4(x2),3", "0", 4), ("4(x2),3", "1", 4), ("4(x2),3", "2", 3)),
        *(("8", "0", 8), ("1(x16)", "15", 1), ("2,1,2", "1", 1)),
    ],
)
def test_the_tasks_of_a_node_are_read_from_slurms_compressed_list(text, node, tasks):
    env = SLURM | {"SLURM_TASKS_PER_NODE": text, "SLURM_NODEID": node, "SLURM_LOCALID": "0"}
    assert current_ranks(env).local_world_size == tasks


def test_the_steps_own_size_wins_over_that_of_the_allocation():
    """``srun -n 2`` in an allocation of 8 tasks starts 2 ranks."""
    step = {"SLURM_STEP_NUM_TASKS": "2", "SLURM_STEP_TASKS_PER_NODE": "2", "SLURM_PROCID": "1"}
    ranks = current_ranks(SLURM | {"SLURM_NTASKS": "8", "SLURM_NODEID": "0"} | step)
    assert (ranks.world_size, ranks.local_world_size) == (2, 2)


def test_ranks_that_a_shell_names_after_slurm_know_how_many_are_on_their_node():
    named = {"RANK": "9", "WORLD_SIZE": "11", "LOCAL_RANK": "1"}
    assert current_ranks(SLURM | named) == Ranks(9, 11, 1, 3, "torchrun")
    assert "LOCAL_WORLD_SIZE is not set, though LOCAL_RANK is 1" in problem(current_ranks, named)
    assert current_ranks(named | {"LOCAL_RANK": "0"}).local_world_size == 1


@pytest.mark.parametrize("port", ["abc", "", "0", "70000"])
def test_what_is_no_port_is_refused_by_name(port):
    meet = rendezvous_environment({"MASTER_ADDR": "n1", "MASTER_PORT": port})
    assert "MASTER_PORT" in problem(meeting_port, meet)


def test_the_shell_of_a_batch_script_is_no_rank_but_a_step_that_it_starts_has_ranks():
    shell = {"SLURM_PROCID": "0", "SLURM_LOCALID": "0", "SLURM_NTASKS": "8", "ENVIRONMENT": "BATCH"}
    assert current_ranks(shell) == Ranks()
    assert current_ranks(SLURM | {"ENVIRONMENT": "BATCH"}).rank == 9


@pytest.mark.parametrize(
    ("env", "change", "named"),
    [
        (TORCHRUN, {"RANK": "two"}, "RANK='two'"),
        (TORCHRUN, {"WORLD_SIZE": "1.5"}, "WORLD_SIZE='1.5'"),
        (TORCHRUN, {"LOCAL_RANK": ""}, "LOCAL_RANK"),
        (TORCHRUN, {"RANK": "8"}, "rank 8 of 8"),
        (TORCHRUN, {"RANK": "-1"}, "rank -1"),
        (TORCHRUN, {"WORLD_SIZE": "0", "RANK": "0"}, "rank 0 of 0"),
        (TORCHRUN, {"LOCAL_RANK": "4"}, "local rank 4 of 4"),
        (TORCHRUN, {"WORLD_SIZE": None}, "WORLD_SIZE is not set"),
        (TORCHRUN, {"RANK": None}, "RANK is not set"),
        (TORCHRUN, {"LOCAL_RANK": None}, "LOCAL_RANK is not set"),
        (SLURM, {"SLURM_PROCID": "x"}, "SLURM_PROCID='x'"),
        (SLURM, {"SLURM_NTASKS": "many"}, "SLURM_NTASKS='many'"),
        (SLURM, {"SLURM_PROCID": "11"}, "rank 11 of 11"),
        (SLURM, {"SLURM_LOCALID": "3"}, "local rank 3 of 3"),
        (SLURM, {"SLURM_LOCALID": None}, "SLURM_LOCALID is not set"),
        (SLURM, {"SLURM_NODEID": "?"}, "SLURM_NODEID='?'"),
        (SLURM, {"SLURM_TASKS_PER_NODE": "four"}, "'four'"),
        (SLURM, {"SLURM_TASKS_PER_NODE": "4(x2"}, "4(x2"),
    ],
)
def test_unusable_variables_are_named(env, change, named):
    changed = {name: value for name, value in (env | change).items() if value is not None}
    assert named in problem(current_ranks, changed)


@pytest.mark.parametrize(
    ("nodes", "first"),
    [
        *(("n[1-2]", "n1"), ("n[3,7]", "n3"), ("gpu[008-012,020]", "gpu008"), ("gpu7", "gpu7")),
        *(("a1,b2", "a1"), ("rack-a[10,12],rack-b1", "rack-a10")),
    ],
)
def test_the_rendezvous_is_on_the_first_node_of_slurms_list(monkeypatch, tmp_path, nodes, first):
    monkeypatch.setenv("PATH", str(tmp_path))  # no scontrol
    job = {"SLURM_STEP_NODELIST": nodes, "SLURM_JOB_ID": "7", "SLURM_STEP_ID": "0"}
    assert rendezvous_environment(job)["MASTER_ADDR"] == first


def test_scontrol_is_asked_for_the_nodes_where_it_is(monkeypatch, tmp_path):
    scontrol = tmp_path / "scontrol"
    scontrol.write_text('#!/bin/sh\n[ "$1 $2 $3" = "show hostnames r[1-2]b[3-4]" ] && echo r1b3\n')
    scontrol.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert rendezvous_environment({"SLURM_JOB_NODELIST": "r[1-2]b[3-4]"})["MASTER_ADDR"] == "r1b3"


def test_jobs_and_steps_on_one_node_get_ports_of_their_own(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    steps = [(str(job), str(step)) for job in range(812_000, 812_100) for step in range(4)]
    ports = [
        rendezvous_environment(
            {"SLURM_JOB_NODELIST": "n[1-2]", "SLURM_JOB_ID": job, "SLURM_STEP_ID": step}
        )["MASTER_PORT"]
        for job, step in steps
    ]
    assert len(set(ports)) == len(steps)
    assert all(1024 <= int(port) <= 65535 for port in ports)


def test_torchruns_rendezvous_wins_and_one_has_to_be_there():
    given = {"MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "1234"}
    job = {"SLURM_JOB_NODELIST": "n[1-2]", "SLURM_JOB_ID": "7"}
    assert rendezvous_environment(given | job) == given
    assert "torchrun" in problem(rendezvous_environment, TORCHRUN)
    assert "SLURM_JOB_ID" in problem(rendezvous_environment, job | {"SLURM_JOB_ID": "job"})
