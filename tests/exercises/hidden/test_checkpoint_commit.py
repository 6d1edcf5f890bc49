"""A1.6: power cuts between any two file operations, and every kind of damage.

Files are looked at by a process that runs none of the student's code.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest

from common.course.sandbox.student import Student
from common.course.sandbox.wire import Ended

FOLDER = "/checkpoints"
CONTENTS = {1: [b"one" * 50], 2: [b"two" * 50], 3: [b"three" * 50, b"three again" * 50]}
MOST_OPERATIONS, LEAST_POWER_CUTS = 200, 10
"""Operations on files that the scene may have, and of those that each checkpoint needs."""
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


def test_a_power_cut_leaves_the_newest_whole_checkpoint(student: Student, folder: str) -> None:
    newest_before, power_cuts = 1, 0
    for dies_at in range(1, MOST_OPERATIONS):
        student.afresh()
        ours = student.onlooker().module(WHERE)
        student.probe("checkpoints").write(folder, 1, {"weights.bin": CONTENTS[1][0]})
        try:
            said = student.another_process().module(WHERE).write_until_death(folder, dies_at)
        except Ended as end:
            said, power_cuts = str(end), power_cuts + 1
        assert said in ("done", "its process has ended"), f"{said}, before operation {dies_at}"
        found = student.probe("checkpoints").newest(folder)
        files = ours.files_of(folder)
        assert found is not None, f"nothing is left after operation {dies_at}"
        step = int(found.rpartition("-")[2])
        assert step >= newest_before, f"step {step} after operation {dies_at}"
        assert files[f"{found}/weights.bin"] in CONTENTS[step]
        finished = sorted({name.split("/")[0] for name in files if name.startswith("step-")})
        for name in finished:  # none looks whole and is not
            assert files.get(f"{name}/weights.bin") in CONTENTS[int(name.rpartition("-")[2])]
            assert student.probe("checkpoints").complaints(f"{folder}/{name}") == [""]
        if step == 2:  # from here on only step 3 is newer; replacing it may take it away again
            newest_before = 2
        if said == "done":
            assert power_cuts >= LEAST_POWER_CUTS, f"its process ended {power_cuts} times only"
            assert step == 3
            assert finished == ["step-00000001", "step-00000003"]
            assert not [name for name in files if not name.startswith("step-")]
            return
    raise AssertionError("it goes on and on")


def flip(content: bytes) -> dict[str, bytes]:
    changed = bytearray(content)
    changed[len(changed) // 2] ^= 1
    return {"": bytes(changed)}


def add(content: bytes) -> dict[str, bytes]:
    return {"": content + b"x"}


def truncate(content: bytes) -> dict[str, bytes]:
    return {"": content[:-1]}


def swap(content: bytes) -> dict[str, bytes]:
    return {"/": b""}


def remove(content: bytes) -> dict[str, bytes]:
    return {}


def damage(ours, path: str, harm: Callable[[bytes], dict[str, bytes]]) -> None:
    """Changes a file, puts a folder in its place, or deletes it."""
    parent, _, name = path.rpartition("/")
    content = ours.files_of(parent)[name]
    ours.remove(path)
    ours.put(parent, {f"{name}{end}": changed for end, changed in harm(content).items()})


@pytest.mark.parametrize("name", ["weights.bin", "manifest.json"])
@pytest.mark.parametrize("harm", [flip, add, truncate, swap, remove])
def test_damage_is_found_and_the_one_before_is_taken(
    folder: str, theirs, ours, name: str, harm: Callable
) -> None:
    older, newer = (theirs.write(folder, step, {"weights.bin": b"abc" * 99}) for step in (4, 12))
    assert theirs.newest(folder) == "step-00000012"
    damage(ours, f"{newer}/{name}", harm)
    [said] = theirs.complaints(newer)
    assert said.startswith("Damaged: "), said
    assert name in said
    assert theirs.newest(folder) == "step-00000004"
    damage(ours, f"{older}/{name}", harm)
    assert theirs.newest(folder) is None


def test_damage_is_found_in_files_of_the_same_size(folder: str, theirs, ours) -> None:
    newer = [theirs.write(folder, step, {"weights.bin": b"abc" * 99}) for step in (4, 12)][1]
    damage(ours, f"{newer}/weights.bin", flip)
    assert theirs.newest(folder) == "step-00000004"


def test_a_digit_of_the_manifest_is_not_taken_for_another(folder: str, theirs, ours) -> None:
    path = theirs.write(folder, 7, {"weights.bin": b"abc"})
    damage(ours, f"{path}/manifest.json", lambda content: {"": content.replace(b"7", b"8")})
    assert theirs.complaint_about_manifest(path).startswith("Damaged")


def test_ranks_read_their_part_of_the_files(folder: str, theirs, ours) -> None:
    contents = {f"part-{number}": f"part-{number}".encode() for number in range(5)}
    path = theirs.write(folder, 5, contents)
    damage(ours, f"{path}/part-3", lambda _: {"": b"other!"})
    said = theirs.complaints(path, 3)
    assert [one.startswith("Damaged") for one in said].count(True) == 1
    assert theirs.newest(folder) is None


def test_nothing_is_found_where_nothing_is(folder: str, student: Student, theirs, ours) -> None:
    assert theirs.newest(f"{folder}/missing") is None
    ours.put(folder, {"step-abc/": b""})
    assert theirs.newest(folder) is None
    student.exercise("checkpoint_commit").start_checkpoint(ours_path(folder), 3)
    assert theirs.newest(folder) is None


def ours_path(folder: str):
    """Returns a path, which crosses as one."""
    from pathlib import Path

    return Path(folder)
