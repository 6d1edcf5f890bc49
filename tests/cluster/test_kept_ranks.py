"""Ranks that wait between the scripts of a run: started once for each place, and left nowhere."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest
from interruptible import living
from quick_torchrun import write_quick_torchrun

from common.cluster.emulated import EmulatedCluster, why_no_hosts
from common.cluster.kept_ranks import KeptRanks, Place
from common.cluster.launch import MARK
from common.errors import RunFailed
from common.runtime.processes.process_identity import LAUNCHER

pytestmark = pytest.mark.two_ranks

SCRIPT = """
import json, os, sys
who = {"parent": os.getppid(), "rank": os.environ["RANK"], "host": os.environ.get("HOSTNAME", "")}
who |= {"network": os.environ.get("DDPLAB_EMULATED_NETWORK"), "arguments": sys.argv[1:]}
os.write(1, (json.dumps(who) + "\\n").encode())
if sys.argv[1:] == ["fail"]:
    raise ValueError("seven")
"""


@pytest.fixture
def script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    quick = write_quick_torchrun(tmp_path / "quick")
    for name, value in quick.items():
        monkeypatch.setenv(name, value)
    path = tmp_path / "who.py"
    path.write_text(SCRIPT)
    return path


@pytest.fixture
def run(script: Path, tmp_path: Path) -> Callable[..., list[dict]]:
    """Returns ``run(kept, place, *arguments)``: what the ranks of that place said, by rank."""

    def run(kept: KeptRanks, place: Place, *arguments: str) -> list[dict]:
        lines: list[str] = []
        with kept.series(place) as series:
            series.add(script, *arguments)
            series.wait(tmp_path / "log", lines.append)
        said = [json.loads(line[line.index("{") :]) for line in lines if "{" in line]
        return sorted(said, key=lambda one: one["rank"])

    return run


def started() -> set[int]:
    """Returns the processes that a launcher of this process has started and that are alive."""
    launcher = f"{os.getpid()}:"
    launched = living(lambda own: MARK in own and own.get(LAUNCHER, "").startswith(launcher))
    return {process.pid for process in launched}


def test_each_place_has_its_ranks_which_start_once_and_end_when_told(run) -> None:
    one, two = Place(ranks=1), Place(ranks=2)
    with KeptRanks() as kept:
        first = [run(kept, place) for place in (one, two)]
        again = [run(kept, place) for place in (two, one)]
        assert again == first[::-1]  # the same parents: nothing was started again
        assert [each["rank"] for each in first[1]] == ["0", "1"]
        assert first[0][0]["parent"] not in {each["parent"] for each in first[1]}
        assert {each["parent"] for said in first for each in said} <= started()
        kept.end_all_but([one])
        assert first[0][0]["parent"] in started()
        assert not {each["parent"] for each in first[1]} & started()
        assert run(kept, two)[0]["parent"] != first[1][0]["parent"]
    assert not started()


def test_a_script_that_fails_ends_the_ranks_of_its_place_alone(run) -> None:
    one, two = Place(ranks=1), Place(ranks=2)
    with KeptRanks() as kept:
        [alone], pair = run(kept, one), run(kept, two)
        with pytest.raises(RunFailed, match="ValueError: seven"):
            run(kept, two, "fail")
        assert alone["parent"] in started()
        assert not {each["parent"] for each in pair} & started()
        assert run(kept, two)[0]["parent"] != pair[0]["parent"]
    assert not started()


def test_an_interruption_ends_the_ranks_of_all_places(run) -> None:
    def interrupted() -> None:
        with KeptRanks() as kept:
            run(kept, Place(ranks=1))
            run(kept, Place(ranks=2))
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert not started()


def test_emulated_hosts_are_a_place_of_their_own(run) -> None:
    if reason := why_no_hosts():
        pytest.skip(reason)
    here, there = Place(ranks=2), Place(ranks=2, hosts=EmulatedCluster.of(2, ["1gbit"]))
    with KeptRanks() as kept:
        first = run(kept, there, "--flag")
        assert [(each["rank"], each["host"]) for each in first] == [("0", "host1"), ("1", "host2")]
        assert all(each["arguments"] == ["--flag"] for each in first)
        assert not any(each["host"].startswith("host1") for each in run(kept, here))
        assert run(kept, there, "--flag") == first  # the same ranks; links were probed once
    assert not started()
