"""Tarballs that are handed in: honest ones, and those that are not what they should be."""

from __future__ import annotations

import gzip
import hashlib
import io
import json
import tarfile
from pathlib import Path

import pytest

from common.course.submission import (
    HandedIn,
    Submission,
    handed_in,
    of_file_name,
    pack,
    read_submission,
)
from common.errors import UserError

DOE = HandedIn("doe-jane", 2)
FILES = {"exercises/cap_search.py": b"def f(): pass\n", "run/a/steps.csv": b"a,b\n1,2\n"}


def tarball(folder: Path, *members: tuple[tarfile.TarInfo, bytes], listed: bool = True) -> Path:
    """Writes a tarball with a manifest of these members."""
    path = folder / f"{DOE.stem}.tar.gz"
    hashes = {
        info.name.partition("/")[2]: hashlib.sha256(content).hexdigest()
        for info, content in members
        if info.isreg()
    }
    if listed:
        entries = {"name": DOE.name, "assignment": DOE.assignment, "files": hashes}
        text = json.dumps(entries).encode()
        members = (*members, (member("manifest.json", text)[0], text))
    with tarfile.open(path, "w:gz") as tar:
        for info, content in members:
            tar.addfile(info, io.BytesIO(content))
    return path


def member(name: str, content: bytes = b"", kind: bytes = tarfile.REGTYPE, link: str = ""):
    """Returns a member below the tarball's folder; a name that begins with a slash stays."""
    info = tarfile.TarInfo(name if name.startswith(("/", "..")) else f"{DOE.stem}/{name}")
    info.size, info.type, info.linkname = len(content), kind, link
    return info, content


def test_what_is_packed_is_read_back(tmp_path: Path) -> None:
    path = tmp_path / f"{DOE.stem}.tar.gz"
    pack(path, DOE, FILES)
    found = read_submission(path)
    assert found.of == DOE
    assert found.files == FILES
    assert found.exercises() == {"cap_search.py": FILES["exercises/cap_search.py"].decode()}
    found.write_run(tmp_path / "run")
    assert (tmp_path / "run" / "a" / "steps.csv").read_bytes() == b"a,b\n1,2\n"
    assert [each.name for each in tmp_path.iterdir() if each.name.startswith(".")] == []


def test_an_exercise_with_a_byte_order_mark_is_read_as_python_reads_it() -> None:
    content = "\ufeffx = 'ü'\n".encode()
    assert Submission(DOE, {"exercises/x.py": content}).exercises() == {"x.py": "x = 'ü'\n"}


@pytest.mark.parametrize(
    ("name", "stem"),
    [
        ("Mary O'Brien", "mary-obrien"),
        ("doe-jane", "doe-jane"),
        ("Plato", "plato"),
        ("J. R. R. Tolkien", "j-r-r-tolkien"),
        ("Mu\u0308ller", "m\u00fcller"),
        ("علی\u200cرضا", "علیرضا"),
        ("सिंह अमित", "सिंह-अमित"),
        ("王小明", "王小明"),
        ("иванова-анна", "иванова-анна"),
        ("o-brien-mary", "o-brien-mary"),
    ],
)
def test_names_as_people_have_them(tmp_path: Path, name: str, stem: str) -> None:
    of = handed_in(name, 2, email="x@example.org", id_="s-1")
    assert of.stem == f"{stem}-assign2"
    path = tmp_path / "homework (1).TAR.GZ"
    pack(path, of, FILES)
    assert read_submission(path).of == of


@pytest.mark.parametrize(
    ("said", "words"),
    [
        ({"name": ""}, "expected letters of any script"),
        ({"name": "'-. "}, "expected letters of any script"),
        ({"name": "../doe-jane"}, "expected letters of any script"),
        ({"name": "doe-j4ne"}, "expected letters of any script"),
        ({"name": "a\nb"}, "expected letters of any script"),
        ({"name": "\u0301"}, "expected letters of any script"),
        ({"name": "=a"}, "expected letters of any script"),
        ({"name": f"{'a' * 220}-b"}, "expected letters of any script"),  # files are called so
        ({"email": "x"}, "e-mail 'x'"),
        ({"id_": "=1"}, "id '=1'"),
        ({"id_": "a b"}, "id 'a b'"),
        ({"assignment": 1}, "two parts: --part 1 or 2"),
        ({"part": 1}, "has no part 1"),
    ],
)
def test_who_and_what_cannot_be(said: dict, words: str) -> None:
    with pytest.raises(UserError, match=words):
        handed_in(**{"name": "a-b", "assignment": 2} | said)


@pytest.mark.parametrize(
    "name",
    [
        "doe-jane-assign2 (1).tar.gz",
        "Doe-Jane-Assign2.tar.gz",
        "doejane_LATE_9_17_doe-jane-assign2-1.tar.gz",  # Canvas
        "Jane Doe_17_assignsubmission_file_doe-jane-assign2.tar.gz",  # Moodle
    ],
)
def test_where_nothing_else_says_it_the_files_name_does(name: str) -> None:
    assert of_file_name(Path(name)).stem == DOE.stem
    with pytest.raises(UserError, match="neither it nor its name says whose it is"):
        of_file_name(Path("homework.tar.gz"))


def test_a_tarball_that_a_browser_has_unpacked(tmp_path: Path) -> None:
    path = tmp_path / "x.tar.gz"
    pack(path, DOE, FILES)
    plain = tmp_path / "x.tar"
    plain.write_bytes(gzip.decompress(path.read_bytes()))
    assert read_submission(plain).files == FILES


@pytest.mark.parametrize(
    ("entries", "words"),
    [
        ({}, "name is no text"),
        ({"name": 3}, "name is no text"),
        ({"name": "a", "assignment": 2, "files": []}, "manifest.json cannot be read"),
        ({"name": "a", "assignment": "2"}, "assignment is no number"),
        ({"name": "a", "assignment": True}, "assignment is no number"),
        ({"name": "=a", "assignment": 2}, "expected letters"),
        ({"name": "a", "assignment": 2, "id": "@x"}, "id '@x'"),
        ({"name": "a", "assignment": 1}, "two parts"),
    ],
)
def test_manifests_that_say_what_cannot_be(tmp_path: Path, entries: dict, words: str) -> None:
    text = json.dumps({"files": {}, **entries}).encode()
    with pytest.raises(UserError, match=words):
        read_submission(tarball(tmp_path, member("manifest.json", text), listed=False))


@pytest.mark.parametrize(
    ("bad", "words"),
    [
        (member("../../etc/passwd", b"x"), "does not belong"),
        (member("/etc/passwd", b"x"), "does not belong"),
        (member("exercises/../../x.py", b"x"), "does not belong"),
        (member("exercises/deep/x.py", b"x"), "does not belong"),
        (member("conftest.py", b"x"), "does not belong"),
        (member("exercises/x.pth", b"x"), "does not belong"),
        (member("run/x.pkl", b"x"), "does not belong"),
        (member("answers.yaml", kind=tarfile.SYMTYPE, link="/etc/passwd"), "is no file"),
        (member("answers.yaml", kind=tarfile.LNKTYPE, link="/etc/passwd"), "is no file"),
        (member("run/x.csv", kind=tarfile.CHRTYPE), "is no file"),
        (member("run/x.csv", kind=tarfile.FIFOTYPE), "is no file"),
    ],
)
def test_members_that_may_not_be_there(tmp_path: Path, bad, words: str) -> None:
    with pytest.raises(UserError, match=words):
        read_submission(tarball(tmp_path, bad))


def test_a_member_twice_and_one_too_many(tmp_path: Path) -> None:
    twice = member("run/x.csv", b"x")
    with pytest.raises(UserError, match="is in it twice"):
        read_submission(tarball(tmp_path, twice, twice))
    many = [member(f"run/{number}.csv") for number in range(1001)]
    with pytest.raises(UserError, match="more than 1000 members"):
        read_submission(tarball(tmp_path, *many))


@pytest.mark.parametrize(
    ("info", "words"),
    [
        (tarfile.TarInfo("."), "does not belong"),
        (tarfile.TarInfo(f"{DOE.stem}/run/\udcff.csv"), "does not belong"),
        (tarfile.TarInfo(f"{DOE.stem}/run/a\nb.csv"), "does not belong"),
        (tarfile.TarInfo(f"{DOE.stem}/run/{'a' * 300}.csv"), "does not belong"),
    ],
)
def test_names_that_are_none_of_a_file(tmp_path: Path, info: tarfile.TarInfo, words: str) -> None:
    path = tmp_path / f"{DOE.stem}.tar.gz"
    with tarfile.open(path, "w:gz", format=tarfile.GNU_FORMAT) as tar:
        tar.addfile(info)
    with pytest.raises(UserError, match=words) as error:
        read_submission(path)
    assert str(error.value).encode().decode().isprintable()


def test_a_file_is_no_folder(tmp_path: Path) -> None:
    both = [member("run/a.csv", b"x"), member("run/a.csv/b.csv", b"x")]
    for members in (both, both[::-1]):
        with pytest.raises(UserError, match="is a file and a folder"):
            read_submission(tarball(tmp_path, *members))


def sparse(**headers: str) -> tuple[tarfile.TarInfo, bytes]:
    """Returns a sparse member, of which the tarball has nothing but a map."""
    info, content = member("run/x.csv", b"1\n0\n0\n".ljust(512, b"\0"))
    info.pax_headers = {name.replace("_", "."): value for name, value in headers.items()}
    return info, content


def test_sparse_members_and_headers_that_are_none(tmp_path: Path) -> None:
    version = {"GNU_sparse_major": "1", "GNU_sparse_minor": "0"}
    bad = {
        "is no file": sparse(**version, GNU_sparse_realsize=str(2**40)),
        "no whole tarball": sparse(GNU_sparse_map="x"),
    }
    for words, one in bad.items():
        with pytest.raises(UserError, match=words):
            read_submission(tarball(tmp_path, one))


def test_texts_that_are_parsed_are_short(tmp_path: Path) -> None:
    long = b"[]," * 2**19
    for name in ("exercises/cap_search.py", "manifest.json"):
        path = tarball(tmp_path, member(name, long), listed=name != "manifest.json")
        with pytest.raises(UserError, match=f"{name} has more than 1 MB"):
            read_submission(path)


def test_a_manifest_names_what_is_missing_in_letters_that_there_are(tmp_path: Path) -> None:
    text = b'{"files": {"\\udcff": "0"}}'
    path = tarball(tmp_path, member("manifest.json", text), listed=False)
    with pytest.raises(UserError, match="is missing") as error:
        read_submission(path)
    assert str(error.value).encode()


def test_a_bomb_is_not_unpacked(tmp_path: Path) -> None:
    path = tmp_path / f"{DOE.stem}.tar.gz"
    path.write_bytes(300 * gzip.compress(bytes(2**20)))
    assert path.stat().st_size < 2**20
    with pytest.raises(UserError, match="unpacks to more than 200 MB"):
        read_submission(path)


def test_cut_off_changed_and_without_manifest(tmp_path: Path) -> None:
    whole = tarball(tmp_path, member("run/x.csv", b"x" * 5000))
    content = whole.read_bytes()
    whole.write_bytes(content[: len(content) // 2])
    with pytest.raises(UserError, match="no whole tarball"):
        read_submission(whole)
    whole.write_bytes(b"not a tarball")
    with pytest.raises(UserError, match="no whole tarball"):
        read_submission(whole)
    with pytest.raises(UserError, match=r"manifest\.json is missing"):
        read_submission(tarball(tmp_path, member("run/x.csv", b"x"), listed=False))
    other = json.dumps({"files": {"run/x.csv": "0" * 64}}).encode()
    changed = tarball(
        tmp_path, member("run/x.csv", b"x"), member("manifest.json", other), listed=False
    )
    with pytest.raises(UserError, match=r"run/x\.csv is not what manifest\.json says"):
        read_submission(changed)
    with pytest.raises(UserError, match=r"homework\.zip: No such file"):
        read_submission(tmp_path / "homework.zip")


def test_too_large_is_not_packed(tmp_path: Path) -> None:
    import random

    noise = random.Random(0).randbytes(21 * 2**20)
    with pytest.raises(UserError, match=r"the largest file is run/noise\.csv"):
        pack(tmp_path / f"{DOE.stem}.tar.gz", DOE, {"run/noise.csv": noise})
    assert list(tmp_path.iterdir()) == []
