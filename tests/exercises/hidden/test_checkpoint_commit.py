"""A1.6: power cuts between any two file operations, and every kind of damage.

Files are looked at by a process that runs none of the student's code.
"""

from __future__ import annotations

import itertools
import zlib
from collections.abc import Callable

import numpy as np
import pytest

from common.course.sandbox.student import Student
from common.course.sandbox.wire import Ended

FOLDER = "/checkpoints"
CONTENTS = {
    1: [b"one" * 50],
    2: [b"two" * 50],
    3: [b"three" * 50, b"three again" * 50],
    4: [b"four" * 50],
}
MOST_OPERATIONS, LEAST_POWER_CUTS = 200, 10
"""Operations on files that the scene may have, and of those that each checkpoint needs."""
NAMES_CHANGE, OF_AN_OPERATION = ("create", "delete", "enter", "leave"), 6
"""Events by which names come and go, and the most for one operation: a rename makes two, and
as many when it is undone."""
WHERE = "probe checkpoints"


@pytest.fixture
def folder(student: Student) -> str:
    """Returns a folder in the student's scratch."""
    return f"{student.sandbox.scratch_inside}{FOLDER}"


@pytest.fixture
def theirs(student: Student):
    """Returns the probe, in a process that runs the student's code."""
    return student.probe("checkpoints")


@pytest.fixture
def ours(student: Student):
    """Returns the probe, in a process that does not."""
    return student.onlooker().module(WHERE)


def test_a_power_cut_leaves_the_newest_whole_checkpoint(
    student: Student, folder: str, every: int
) -> None:
    newest_before, logs = 1, []
    for dies_at in range(1, MOST_OPERATIONS, every):
        student.afresh()
        ours = student.onlooker().module(WHERE)
        student.probe("checkpoints").write(folder, 1, {"weights.bin": CONTENTS[1][0]})
        ours.watch(folder, "")
        try:
            said = student.another_process().module(WHERE).write_until_death(folder, dies_at)
        except Ended as end:
            said = str(end)
        logs.append([kind for _, kind, _ in ours.events() if kind in NAMES_CHANGE])
        case = f"the power is cut before operation {dies_at}"
        assert said in ("done", "its process has ended"), f"{said}: {case}"
        found = student.probe("checkpoints").newest(folder)
        files = ours.files_of(folder)
        assert found is not None, f"no whole checkpoint remains: {case}"
        step = int(found.rpartition("-")[2])
        assert step >= newest_before, f"step {newest_before} was there, now step {step}: {case}"
        is_whole = files[f"{found}/weights.bin"] in CONTENTS[step]
        assert is_whole, f"what is found has other bytes: {case}"
        finished = sorted({name.split("/")[0] for name in files if name.startswith("step-")})
        for name in finished:  # none looks whole and is not
            content = files.get(f"{name}/weights.bin")
            assert content in CONTENTS[int(name.rpartition("-")[2])], f"{name} is damaged: {case}"
            complaints = student.probe("checkpoints").complaints(f"{folder}/{name}")
            assert complaints == [""], f"{name}: {complaints[0]}: {case}"
        if step == 2:  # step 3 is newer, but replacing it may take it away again
            newest_before = 2
        if said == "done":
            check_power_cuts(logs, every)
            assert step == 4, "the power is cut when step 4 was committed, and it is not found"
            steps = [int(name.rpartition("-")[2]) for name in finished]
            assert steps == [1, 3, 4], f"steps at the end, after step 2 was removed: {steps}"
            further = [name for name in files if not name.startswith("step-")]
            assert not further, f"at the end there is {further[0]}"
            return
    raise AssertionError("it goes on and on")


def check_power_cuts(logs: list[list[str]], every: int) -> None:
    """Checks that each power cut came so many operations later than the one before.

    Args:
        logs: after each power cut, and at last without one, what an onlooker saw of names.
        every: number of operations.
    """
    *cut, complete = logs
    assert len(cut) * every >= LEAST_POWER_CUTS, f"its process ended {len(cut)} times only"
    reached = [common_events(events, complete) for events in cut]
    # Renames that are undone when the power is cut may be like those that would have come.
    further = np.diff(np.maximum.accumulate([0, *reached, len(complete)]))
    assert further.max() <= every * OF_AN_OPERATION, "what happens before power cuts is left out"


def common_events(first: list[str], second: list[str]) -> int:
    """Returns how many events two sequences begin with in common."""
    pairs = zip(first, second, strict=False)
    return sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], pairs))


def test_others_see_only_whole_checkpoints(folder: str, theirs, ours) -> None:
    """Somebody else looks on: what is called ``step-…`` is whole, and nothing changes in it."""
    final = ""
    for case, content in (("is committed", b"one" * 50), ("is replaced", b"two" * 50)):
        partial = theirs.begin(folder, 7)
        ours.watch(folder, "")
        ours.watch(partial, "new")
        if final:
            ours.watch(final, "old")
        final = theirs.finish(partial, {"step": 7}, {"weights.bin": content})
        check_names(ours.events(), "enter", case)
        assert ours.files_of(final)["weights.bin"] == content, f"content of one that {case}"
    ours.watch(folder, "")
    ours.watch(final, "old")
    theirs.take_away(final)
    check_names(ours.events(), "leave", "is removed")
    assert not ours.files_of(folder), "something remains when all checkpoints are removed"


def check_names(events: list[list[str]], last: str, case: str) -> None:
    """Checks that a folder gets and loses its name at once, and changes only under another."""
    named, written, ways = "old", set(), []
    for where, kind, name in events:
        if not where and name.startswith("step-"):
            is_renamed = kind in ("enter", "leave")
            assert is_renamed, f"a checkpoint {case}: {kind} {name}, which is not renamed"
            ways.append(kind)
            named = "new" if kind == "enter" else ""
            is_complete = kind == "leave" or {"weights.bin", "manifest.json"} <= written
            assert is_complete, f"a checkpoint {case}: {name} appears without its manifest"
        elif where:
            changes = where == named and kind != "close"
            assert not changes, f"a checkpoint {case}: {kind} {name} in the folder step-…"
            written |= {name} if where == "new" and kind in ("close", "enter") else set()
    assert ways[-1:] == [last], f"a checkpoint {case}: no folder is renamed"


Harm = Callable[[bytes], dict[str, bytes]]


def flip(content: bytes) -> dict[str, bytes]:
    changed = bytearray(content)
    changed[len(changed) // 2] ^= 1
    return {"": bytes(changed)}


HARMS: dict[str, Harm] = {
    "flip": flip,
    "add": lambda content: {"": content + b"x"},
    "truncate": lambda content: {"": content[:-1]},
    "empty": lambda content: {"": b""},
    "garble": lambda content: {"": b"\xff" * len(content)},  # no UTF-8
    "swap": lambda content: {"/": b""},
    "remove": lambda content: {},
}
"""What happens to a file of this content: what stands there then, by the end of its name."""


def damage(ours, path: str, harm: Harm) -> None:
    """Changes a file, puts a folder in its place, or deletes it."""
    parent, _, name = path.rpartition("/")
    content = ours.files_of(parent)[name]
    ours.remove(path)
    ours.put(parent, {f"{name}{end}": changed for end, changed in harm(content).items()})


@pytest.mark.parametrize("name", ["weights.bin", "manifest.json"])
@pytest.mark.parametrize("harm", HARMS)
def test_damage_is_found_and_the_one_before_is_taken(
    folder: str, theirs, ours, name: str, harm: str
) -> None:
    older, newer = (theirs.write(folder, step, {"weights.bin": b"abc" * 99}) for step in (4, 12))
    case = f"{harm} {name}"
    assert theirs.newest(folder) == "step-00000012", "two whole checkpoints"
    damage(ours, f"{newer}/{name}", HARMS[harm])
    [said] = theirs.complaints(newer)
    assert said.startswith("Damaged: "), f"{case}: it says {said!r}"
    assert name in said, f"{case}: it does not name the file, but says {said!r}"
    assert theirs.newest(folder) == "step-00000004", f"newest_whole: {case}"
    damage(ours, f"{older}/{name}", HARMS[harm])
    assert theirs.newest(folder) is None, f"newest_whole: {case}, in all checkpoints"


def test_damage_is_found_in_files_of_the_same_size(folder: str, theirs, ours) -> None:
    newer = [theirs.write(folder, step, {"weights.bin": b"abc" * 99}) for step in (4, 12)][1]
    damage(ours, f"{newer}/weights.bin", flip)
    assert theirs.newest(folder) == "step-00000004", "a bit of weights.bin has changed"


def test_a_digit_of_the_manifest_is_not_taken_for_another(folder: str, theirs, ours) -> None:
    path = theirs.write(folder, 7, {"weights.bin": b"abc"})
    damage(ours, f"{path}/manifest.json", lambda content: {"": content.replace(b"7", b"8")})
    said = theirs.complaint_about_manifest(path)
    assert said.startswith("Damaged"), f"a digit of the manifest has changed: it says {said!r}"


def test_what_a_run_says_of_itself_comes_back(
    folder: str, theirs, generator: np.random.Generator
) -> None:
    draw = int(generator.integers(1000, 10**6))
    facts = {"step": draw, "loss": draw / 7, "name": f"Läufer {draw}", "is_last": False}
    facts |= {"none": None, "deep": {"seeds": [draw, 0], "empty": {}}}
    contents = {"weights.bin": bytes(draw % 997), "empty.bin": b""}
    read = theirs.read(theirs.finish(theirs.begin(folder, draw), facts, contents))
    assert read["facts"] == facts, "facts that read_manifest returns"
    assert read["checked"] == facts, "facts that check_checkpoint returns"
    records = {name: (len(data), zlib.crc32(data)) for name, data in contents.items()}
    assert {name: tuple(record) for name, record in read["files"].items()} == records, (
        "records of the files that read_manifest returns"
    )


@pytest.mark.parametrize("ranks", [1, 3, 7])
def test_ranks_read_their_part_of_the_files(folder: str, theirs, ours, ranks: int) -> None:
    contents = {f"part-{number}": f"part-{number}".encode() for number in range(5)}
    path = theirs.write(folder, 5, contents)
    readers = []
    for name, content in contents.items():
        damage(ours, f"{path}/{name}", lambda _: {"": b"other!"})
        said = theirs.complaints(path, ranks)
        who = [rank for rank, line in enumerate(said) if line.startswith("Damaged")]
        assert len(who) == 1, f"{len(who)} of {ranks} ranks see that {name} is damaged"
        readers += who
        assert theirs.newest(folder) is None, f"newest_whole: {name} is damaged"
        ours.put(path, {name: content})
    most = max(readers.count(rank) for rank in readers)
    assert most <= -(-len(contents) // ranks), f"one of {ranks} ranks reads {most} of 5 files"


def test_nothing_is_found_where_nothing_is(folder: str, student: Student, theirs, ours) -> None:
    assert theirs.newest(f"{folder}/missing") is None, "newest_whole: there is no folder"
    ours.put(folder, {"step-abc/": b""})
    assert theirs.newest(folder) is None, "newest_whole: a folder that is no checkpoint"
    theirs.begin(folder, 3)
    assert theirs.newest(folder) is None, "newest_whole: a checkpoint that has only begun"
