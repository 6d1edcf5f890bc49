"""Change points of long runs: what is found in planted series, how seldom nothing is, and by whom.

Oracles are what was planted, and Siegmund's formula.
"""

from __future__ import annotations

import errno
import io
import json
import math
import os
import random
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest
import torch.distributed as dist
from command_line import Ended, ddplab, error_line
from ddplab_watch import change_points, long_watch
from ddplab_watch.change_points import Change, ChangePoints
from ddplab_watch.cusum import ALLOWANCE, LENGTHS, Levels, Series
from ddplab_watch.long_watch import LongWatch
from ddplab_watch.record import Record
from ddplab_watch.step_blocks import MOST_TIMED, Block, Schedule, block_steps
from watch_support import rows_of

from common.diagnose.evidence.bundle import read_bundle
from common.diagnose.opened import open_diagnosis

USUAL_MS = {"data": 1.0, "forward": 30.0, "update": 10.0, "between": 0.5}
CHANGED, STEPS, BLOCK_S = 60, 40, 4
"""Block from which a change is planted; steps and seconds of a block."""
Fault = Callable[[int, dict], None]


def block(number: int, draw: random.Random, fault: Fault) -> Block:
    """Makes a block of two ranks, whose times vary by 2 % together and by 3 % each."""
    together, ranks = draw.gauss(1, 0.02), {}
    for rank in (0, 1):
        row = {name: ms * together * draw.gauss(1, 0.03) for name, ms in USUAL_MS.items()}
        row |= {"backward": 60 * together * draw.gauss(1, 0.03), "elements": 100, "memory": 1e9}
        row["copy"] = 0.1
        fault(rank, row)
        ranks[rank] = row
    alone = {rank: sum(row[name] for name in USUAL_MS) for rank, row in ranks.items()}
    for rank, row in ranks.items():
        row["backward"] += max(alone.values()) - alone[rank]
        row["step"] = alone[rank] + row["backward"]
        row.setdefault("alone_ms", [alone[rank]] * 10)
    first = number * STEPS
    return Block(first, first + STEPS - 1, 1e9 + BLOCK_S * number, ranks)


def none(rank: int, row: dict) -> None:
    """Changes nothing."""


def slow_forward(rank: int, row: dict) -> None:
    row["forward"] *= 1.2 if rank == 1 else 1


def slow_exchange(rank: int, row: dict) -> None:
    row["backward"] += 12


def slow_loader(rank: int, row: dict) -> None:
    row["data"] += 8 if rank == 0 else 0


def taking_turns(rank: int, row: dict) -> None:
    """Makes each rank wait for the other in every second step: no phase has another median."""
    row["backward"] += 20
    row["alone_ms"] = [50 + 30 * (step % 2 == rank) for step in range(10)]


def with_longer_texts(rank: int, row: dict) -> None:
    if rank == 1:
        row["forward"] *= 1.3
        row["elements"] *= 1.04


def changes_of(fault: Fault, seed: int, last: int = 100, before: Fault = none) -> Iterator[Change]:
    """Yields the changes that are noticed in blocks of which later ones have a fault."""
    points, draw = ChangePoints([0, 1]), random.Random(seed)
    faults = (fault if number >= CHANGED else before for number in range(last))
    changes = (points.add(block(number, draw, each)) for number, each in enumerate(faults))
    yield from filter(None, changes)


def first_change(fault: Fault, seed: int) -> Change | None:
    return next(changes_of(fault, seed), None)


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize(
    ("fault", "rank", "phase", "grown_ms"),
    [
        (slow_forward, 1, "forward", 6.0),
        (slow_exchange, None, "backward", 12.0),
        (slow_loader, 0, "data", 8.0),
    ],
)
def test_a_change_is_found_within_a_minute_on_its_rank_in_its_phase(
    fault: Fault, rank: int | None, phase: str, grown_ms: float, seed: int
) -> None:
    change = first_change(fault, seed)
    assert (change.rank, change.phase) == (rank, phase)
    assert change.after - change.before == pytest.approx(grown_ms, rel=0.3)
    assert change.step == pytest.approx(CHANGED * STEPS, abs=2 * STEPS)
    assert change.noticed <= (CHANGED + 60 / BLOCK_S) * STEPS


def test_memory_that_goes_on_growing_is_named_and_a_step_of_it_is_not() -> None:
    held = {0: 1e9, 1: 1e9}

    def growing(rank: int, row: dict) -> None:
        held[rank] += 4e7 if rank == 1 else 0
        row["memory"] = held[rank]

    change = first_change(growing, seed=0)
    assert (change.rank, change.phase) == (1, "memory")
    assert "rank 1's memory grows" in change.said()
    assert first_change(lambda rank, row: row.update(memory=2e9), seed=0) is None


@pytest.mark.parametrize(
    ("fault", "said"), [(taking_turns, "take turns"), (with_longer_texts, "batches have grown")]
)
def test_steps_that_go_with_lengths_are_told_from_a_slow_rank(fault: Fault, said: str) -> None:
    assert said in first_change(fault, seed=1).said()


def test_a_rank_that_may_wait_for_another_outside_of_the_exchange_is_said_to() -> None:
    """Rank 1 waits after its update for rank 0's, as at a barrier."""

    def meeting_after_updates(rank: int, row: dict) -> None:
        row["update" if rank == 0 else "between"] += 8

    said = first_change(meeting_after_updates, seed=1).said()
    assert "or it waits for rank" in said
    assert "update" in said
    assert "between" in said


@pytest.mark.parametrize("phase", ["data", "update"])
def test_a_rank_that_waits_before_its_forward_pass_is_not_named_but_the_one_it_waits_for(
    phase: str,
) -> None:
    """Ranks meet there under a Trainer that counts tokens."""

    def meeting_in_copies(rank: int, row: dict) -> None:
        row[phase if rank == 0 else "copy"] += 8

    change = first_change(meeting_in_copies, seed=1)
    assert (change.rank, change.phase) == (0, phase)
    assert "waits" not in change.said()


@pytest.mark.parametrize("forward_ms", [0, 8])
def test_a_rank_that_is_late_for_its_forward_pass_is_named_though_others_wait_in_theirs(
    forward_ms: int,
) -> None:
    """As where FSDP gathers in forward passes."""

    def late(rank: int, row: dict) -> None:
        row["copy" if rank == 1 else "forward"] += 8 if rank == 1 else forward_ms

    change = first_change(late, seed=1)
    assert (change.rank, change.phase) in {(1, "copy"), (0, "forward")}
    assert change.rank == 1 or "or it waits for rank 1, whose copy takes" in change.said()
    assert "slowest" not in change.said() or change.phase == "forward"


def test_a_rank_is_waited_for_that_takes_longer_in_several_phases() -> None:
    def busy(rank: int, row: dict) -> None:
        for phase in ("data", "update", "between") if rank == 0 else ("copy",):
            row[phase] += 5 if rank == 0 else 15

    change = first_change(busy, seed=1)
    assert change.rank == 0
    assert change.phase in {"data", "update", "between"}


def test_two_blocks_that_others_disturb_do_not_name_a_change_of_many() -> None:
    points, draw, change = ChangePoints([0, 1]), random.Random(3), None
    for number in range(CHANGED + 40):
        made = block(number, draw, none)
        for row in made.ranks.values():
            row["update"] += 8 if number >= CHANGED else 0
            # The alarm comes while the exchange has been slow for two blocks.
            row["backward"] += 30 if number - CHANGED in (3, 4) else 0
        if change := points.add(made):
            break
    assert change.noticed // STEPS - CHANGED in (3, 4)
    assert (change.rank, change.phase) == (None, "update")


def test_what_others_did_shortly_before_does_not_hide_a_faults_phase() -> None:
    """For three seconds all steps take longer; after that rank 0's update does."""
    points, draw, steps = ChangePoints([0, 1]), random.Random(7), STEPS // 8

    def busy(rank: int, row: dict) -> None:
        row["backward"] += 25

    def slow_update(rank: int, row: dict) -> None:
        row["update" if rank == 0 else "copy"] += 30

    for number in range(CHANGED + 40):
        fault = none if number < CHANGED else busy if number < CHANGED + 6 else slow_update
        first = number * steps
        made = replace(block(number, draw, fault), first=first, last=first + steps - 1)
        if change := points.add(made):
            break
    assert (change.rank, change.phase) == (0, "update")
    assert change.step == pytest.approx((CHANGED + 6) * steps, abs=steps)


def test_a_slow_rank_is_said_to_be_the_slowest() -> None:
    assert "rank 0 is the slowest in 100%" in first_change(slow_loader, seed=1).said()


def test_another_batch_is_no_slower_step() -> None:
    def larger(rank: int, row: dict) -> None:
        for name in ("forward", "backward", "elements"):
            row[name] *= 2

    [change] = changes_of(larger, seed=0, last=150)
    assert "a batch has 400 elements instead of 200" in change.said()
    assert change.step == CHANGED * STEPS


@pytest.mark.parametrize("grows", [False, True])
def test_batches_of_unequal_length_are_no_other_batches_before_they_have_grown(grows: bool) -> None:
    for seed in range(5):
        lengths = random.Random(100 + seed)

        def unequal(rank: int, row: dict, lengths: random.Random = lengths) -> None:
            row["elements"] = lengths.uniform(70, 130)

        def longer(rank: int, row: dict, lengths: random.Random = lengths) -> None:
            row["elements"] = lengths.uniform(170, 230)

        changes = changes_of(longer if grows else unequal, seed, before=unequal)
        assert ["a batch has" in change.said() for change in changes] == [True] * grows


def test_a_few_sizes_that_are_drawn_are_no_other_batch() -> None:
    """As images of three sizes in a run whose blocks are of one step."""
    changed = 0
    for seed in range(200):
        sizes = random.Random(seed)

        def drawn(rank: int, row: dict, sizes: random.Random = sizes) -> None:
            row["elements"] = sizes.choice((100, 144, 196))

        points, draw = ChangePoints([0, 1]), random.Random(seed)
        for step in range(20):
            change = points.add(replace(block(step, draw, drawn), first=step, last=step))
            changed += change is not None and "a batch has" in change.said()
    assert changed <= 1


@pytest.mark.parametrize("further_ms", [0.0, 40.0])
def test_a_level_that_comes_again_is_said_once_and_a_higher_one_anew(further_ms: float) -> None:
    """As others use a machine's memory now and then; at last the exchange itself slows down.

    After a change, blocks are shorter, as they are after a window.
    """

    def slower(extra_ms: float) -> Fault:
        return lambda rank, row: row.update(backward=row["backward"] + extra_ms)

    points, draw, noticed = ChangePoints([0, 1]), random.Random(4), []
    for number in range(480):
        extra_ms = 12 * (number // 40 % 2) + (further_ms if number >= 400 else 0)
        made = block(number, draw, slower(extra_ms))
        steps = STEPS // 4 if noticed else STEPS
        if points.add(replace(made, last=made.first + steps - 1)):
            noticed.append(number)
    assert 40 <= noticed[0] < 60
    assert sum(number < 400 for number in noticed) == 1
    assert (noticed[-1] >= 400) == (further_ms > 0)


def test_levels_are_the_highest_medians_of_stretches_half_a_length_apart() -> None:
    draw, levels = random.Random(2), Levels()
    values, highest = [draw.gauss(0, 1) for _ in range(300)], {}
    for value in values:
        levels.add(value, steps=3)
    for length in LENGTHS:
        ends = [end for end in range(length, 301) if end % max(1, length // 2) == 0]
        medians = [statistics.median(values[end - length : end]) for end in ends]
        highest[3 * length] = max(medians)
    for steps in range(3, 3 * 65):
        shortest = max(length for length in highest if length <= steps)
        longer = [level for length, level in highest.items() if length >= shortest]
        assert levels.highest(steps) == max(longer)
    assert Levels().highest(3) == -math.inf
    levels.raise_to(Levels())
    longer = Levels()
    longer.add(100.0, steps=24)  # as high for 24 steps
    levels.raise_to(longer)
    assert levels.highest(20) == levels.highest(24) == 100.0 > levels.highest(36)


@pytest.mark.parametrize("spoilt", [math.nan, -3e6])
def test_a_block_whose_clock_has_jumped_is_left_out(spoilt: float) -> None:
    def jumping(rank: int, row: dict) -> None:
        row["forward"] = spoilt if rank == 0 else row["forward"]

    assert first_change(jumping, seed=0) is None


@pytest.mark.parametrize("distribution", ["gauss", "paretovariate"])
def test_limits_are_crossed_no_more_often_than_siegmunds_formula_says(distribution: str) -> None:
    draw, series, crossings, values, high = random.Random(1), Series(3, Levels()), 0, 20_000, 3.0
    parameters = (0, 1) if distribution == "gauss" else (1.1,)
    was_above = False
    for _ in range(values):
        series.add(getattr(draw, distribution)(*parameters))
        is_above = series.evidence > high
        crossings += is_above and not was_above
        was_above = is_above
    x = 2 * ALLOWANCE * (high + 1.166)
    expected = values / ((math.exp(x) - 1 - x) / (2 * ALLOWANCE**2))
    assert 0 < crossings <= expected + 3 * math.sqrt(expected)


@pytest.mark.slow  # the hours that quick tests' blocks stand for
def test_in_ten_hours_of_blocks_nothing_is_said_of_steps_that_stay_as_they_are() -> None:
    count = int(36_000 / change_points.BLOCK_S)
    assert len(list(changes_of(none, seed=3, last=count))) <= 1


def test_blocks_double_until_they_take_seconds() -> None:
    schedule, lengths = Schedule(45, block_steps(0.1, ranks=2)), []
    for _ in range(400):
        lengths.append(schedule.size)
        schedule.advance()
    assert lengths[0] == 5  # half a second
    assert lengths[-1] == 40  # of a tenth of a second each: 4 s
    assert all(after <= 2 * before for before, after in pairwise(lengths))
    assert block_steps(100.0, ranks=2) == 3
    assert block_steps(0.1, ranks=1000) > block_steps(0.1, ranks=2)


def step_of(rank: int, is_slow: bool, draw: random.Random) -> dict:
    row = {name: ms * draw.gauss(1, 0.03) for name, ms in USUAL_MS.items()}
    row["forward"] += 30 if is_slow and rank == 1 else 0
    waits = 30 if is_slow and rank == 0 else 0
    row |= {"copy": 0.1, "backward": 60 * draw.gauss(1, 0.03) + waits}
    return row | {"step": 400.0, "elements": 64}


def followed(folder: Path, spoil: Callable[[int, Path], None] = lambda step, path: None) -> list:
    """Follows two ranks in one process, the second of which is slow from step 120 on."""
    store, draw = dist.HashStore(), random.Random(0)
    records = [Record(folder / f"rank{rank}.jsonl") for rank in (0, 1)]
    watches = [
        LongWatch(record, (rank, 2), store, lambda: 10**9, first=0, usual_s=2.0)
        for rank, record in enumerate(records)
    ]
    windows: list[list[int]] = [[], []]
    for step in range(180):
        for rank in (1, 0) if step % 2 else (0, 1):
            watches[rank].add(step, step_of(rank, step >= 120, draw))
            if watches[rank].begins_window(step + 1):
                windows[rank].append(step + 1)
                watches[rank].resume(step + 1)
            records[rank].write()
        spoil(step, records[0].path)
    return windows


def rows_in(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_rank_0_says_it_once_and_all_ranks_begin_a_window_at_one_step(tmp_path, capsys) -> None:
    windows = followed(tmp_path)
    assert windows[0] == windows[1]
    assert len(windows[0]) == 1
    [line] = capsys.readouterr().err.splitlines()
    assert "since step 120" in line
    assert "rank 1's forward pass takes" in line
    [change] = [row for row in rows_in(tmp_path / "rank0.jsonl") if row["table"] == "changes"]
    assert change["noticed"] <= 150  # 30 steps


def test_blocks_hold_all_steps_of_which_long_ones_time_some(tmp_path: Path) -> None:
    record, lag = Record(tmp_path / "rank0.jsonl"), 5
    watch = LongWatch(record, (0, 1), None, lambda: 10**9, first=7, usual_s=0.02)
    draw, rows, timed = random.Random(0), [], set()
    for number in range(7, 20_000):
        if watch.next_timed(number) != number:
            continue
        timed.add(number)
        rows.append((number, step_of(0, False, draw)))
        if len(rows) > lag:
            watch.add(*rows.pop(0))
    record.write()
    blocks = [row for row in rows_in(record.path) if row["table"] == "blocks"]
    assert blocks[0]["first"] == 7
    assert all(after["first"] == before["last"] + 1 for before, after in pairwise(blocks))
    for block in blocks:
        steps = range(block["first"], block["last"] + 1)
        times = [number for number in steps if number in timed]
        least = len(steps) if len(steps) <= MOST_TIMED else MOST_TIMED // 2
        assert least <= len(times) <= MOST_TIMED
        parts = [(number - block["first"]) * len(times) // len(steps) for number in times]
        assert parts == [*range(len(times))] or len(steps) % len(times)  # one of each part
    assert len(steps) == 200


def test_a_disk_that_is_full_is_said_once_and_the_change_all_the_same(tmp_path, capsys) -> None:
    def fill(step: int, path: Path) -> None:
        if step == 60:
            path.unlink()
            path.symlink_to("/dev/full")

    followed(tmp_path, fill)
    full, change = capsys.readouterr().err.splitlines()
    assert "No space left on device; not recorded" in full
    assert "rank 1's forward pass takes" in change


def test_a_standard_error_that_is_full_ends_nothing(tmp_path, monkeypatch) -> None:
    class Full(io.StringIO):
        def write(self, text: str) -> int:
            raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(sys, "stderr", Full())
    assert len(followed(tmp_path)[0]) == 1
    assert '"changes"' in (tmp_path / "rank0.jsonl").read_text()


def test_a_disk_that_stands_still_is_waited_for_by_no_step(tmp_path: Path) -> None:
    path = tmp_path / "rank0.jsonl"
    os.mkfifo(path)  # whoever opens it waits for a reader
    record = Record(path)
    record.add("first")
    writer = threading.Thread(target=record.write)
    writer.start()
    while record._rows:  # taken, and being written
        time.sleep(0.01)
    record.add("second")
    assert path.read_text() == '{"table": "first"}\n'
    writer.join()


def test_a_time_of_day_that_jumps_is_said_and_changes_nothing(
    tmp_path, capsys, monkeypatch
) -> None:
    plain, jump_s = time.time, [0.0]
    monkeypatch.setattr(long_watch.time, "time", lambda: plain() + jump_s[0])
    followed(tmp_path, lambda step, path: jump_s.__setitem__(0, 3600.0 * (step > 60)))
    jumped, change = capsys.readouterr().err.splitlines()
    assert "the time of day has jumped by +3600 s" in jumped
    assert "rank 1's forward pass takes" in change


@pytest.mark.slow
@pytest.mark.alone  # other tests' load begins and ends as a change does
def test_a_rank_that_becomes_slow_is_found_in_a_run_and_its_cause_after(loop_run) -> None:
    flags = ("--slow_loss_s", 0.1, "--slow_rank_s", 0.1, "--slow_after", 180)
    folder, _ = loop_run("--steps", 320, *flags, to_end=1)
    [change] = rows_of(folder, 0, "changes")
    assert (change["rank"], change["phase"]) == (1, "forward")
    assert 155 <= change["step"] <= 195  # a busy machine moves where it seems to begin
    assert (folder / "rank0.err").read_text().count("ddplab-watch: since step") == 1
    assert "ddplab-watch" not in (folder / "rank1.err").read_text()
    opened = open_diagnosis(folder / "bundle")
    [(_, after)] = opened.later
    assert "slow-rank" in {verdict.cause for verdict in after.verdicts}
    assert "(loop.py:" in "\n".join(opened.lines())
    assert opened.as_json()["changes"][0]["rank"] == 1


def test_a_job_that_is_resumed_has_one_record_of_all_its_ranks(rank_server, tmp_path) -> None:
    # Rank 1 ended before it had written anything.
    variables = {"TORCHELASTIC_RESTART_COUNT": "1"}
    bundle = tmp_path / "bundle"
    bundle.mkdir()
    (bundle / "rank0.jsonl").write_text("of the first start\n")
    main = Path(long_watch.__file__).with_name("__main__.py")
    words = (Path(__file__).parent / "scripts" / "loop.py", tmp_path / "out", "--steps", 4)
    done = rank_server.run(main, f"folder={bundle}", *words, ranks=2, variables=variables)
    assert done.exit_codes == [0, 0]
    [line] = "".join(done.stderr).splitlines()
    assert "the job was resumed; its record" in line
    assert [path.name for path in bundle.glob("*.jsonl")] == ["rank0.jsonl"]
    assert (bundle / "rank0.jsonl").read_text() == "of the first start\n"
    for rank in (0, 1):
        assert '"steps"' in (bundle / "restart-1" / f"rank{rank}.jsonl").read_text()


DYING = """
import os

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

dist.init_process_group("gloo")
model = DistributedDataParallel(torch.nn.Linear(8, 8))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(30):
    if step == 20 and dist.get_rank() == 1 and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
        os._exit(1)
    model(torch.randn(4, 8)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
"""


@pytest.mark.slow  # torchrun itself starts the ranks, twice
def test_each_start_of_torchruns_ranks_has_one_record(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(DYING)
    torchrun = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2")
    watch = ("--max-restarts=1", "-m", "ddplab_watch", "window=10", "bucket_steps=2", "probe=0")
    command = [sys.executable, *torchrun, *watch, "train.py"]
    # Of torch 2.15, which gives gloo addresses of dead ranks where starts share a store.
    variables = os.environ | {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
    options = {"capture_output": True, "text": True, "check": True}
    finished = subprocess.run(command, cwd=tmp_path, env=variables, **options)
    assert finished.stderr.count("the job was resumed") == 1
    [folder] = (tmp_path / "ddplab-watch").iterdir()
    assert {str(path.relative_to(folder)) for path in folder.rglob("*.jsonl")} == {
        *("rank0.jsonl", "rank1.jsonl", "restart-1/rank0.jsonl", "restart-1/rank1.jsonl")
    }
    opened = {path: open_diagnosis(path) for path in (folder, folder / "restart-1")}
    assert any("restart-1" in note for note in opened[folder].notes)
    for start in opened.values():
        assert start.case.run.world_size == 2


ALONE = """
import torch

model = torch.nn.Linear(8, 8)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(16):
    model(torch.randn(4, 8)).square().mean().backward()
    optimizer.step()
"""


@pytest.mark.slow
def test_each_start_of_a_requeued_slurm_job_has_a_record_and_another_job_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("train.py").write_text(ALONE)
    bundle = tmp_path / "bundle"
    watch = ("--bundle", bundle, "--window", 8, "--bucket_steps", 2, "--no_probe", "train.py")

    def start(job: int, requeued: int) -> Ended:
        monkeypatch.setenv("SLURM_JOB_ID", str(job))
        monkeypatch.setenv("SLURM_RESTART_COUNT", str(requeued))
        return ddplab("diagnose", *watch)

    for requeued in range(3):
        started = start(7, requeued)
        assert started.status == 0, started.stderr
    records = {str(path.relative_to(bundle)) for path in bundle.rglob("rank*.jsonl")}
    assert records == {f"{folder}rank0.jsonl" for folder in ("", "requeue-1/", "requeue-2/")}
    assert "bundle/requeue-2/diagnosis.json" in started.stdout.replace("\n", "")
    notes = read_bundle(bundle).notes
    assert any("record in bundle, not in requeue-1, requeue-2" in note for note in notes)
    assert "exists; give each run a folder" in error_line(start(7, 0))
    assert "is of job 7; give each job" in error_line(start(8, 3))
    assert not (bundle / "requeue-3").exists()
