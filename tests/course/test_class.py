"""A class's hand-ins: whose they are, what is merged, and what is refused; no code is run."""

from __future__ import annotations

import csv
import errno
import fcntl
import io
import itertools
import json
import os
import re
import shutil
import tarfile
import unicodedata
from datetime import UTC, datetime
from pathlib import Path

import pytest
from right_answers import answers

from common.course.answers import CHOICE, TEXT, read_questions
from common.course.grading.classes import Class
from common.course.grading.grade import Grader
from common.course.grading.people.identify import people_of
from common.course.grading.people.roster import Person, Roster, read_roster
from common.course.overlay import with_overlay
from common.course.sandbox.isolation import strongest_isolation
from common.course.submission import handed_in, pack
from common.errors import UserError
from common.runtime.paths import project_root

pytestmark = pytest.mark.usefixtures("read_here")
ROOT = project_root()
QUESTIONS = read_questions(ROOT, 3)
TEXTS = [name for name, question in QUESTIONS.items() if question.kind == TEXT]
DAY_S = 86400
CHOICES = sum(question.points for question in QUESTIONS.values() if question.kind == CHOICE)

try:
    strongest_isolation()
except UserError as refusal:
    pytest.skip(str(refusal), allow_module_level=True)


class MadeClass:
    """Hand-ins of a class, and the folder of their grades."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.grades_dir = folder / "submissions", folder / "grades"
        self.folder.mkdir()

    def hand_in(
        self, name: str, content: bytes, file: str = "", assignment: int = 3, day: float = 0, **who
    ) -> Path:
        """Packs answers; returns the tarball, which was changed so many days after 1970."""
        of = handed_in(name, assignment, **who)
        path = self.folder / (file or f"{of.stem}.tar.gz")
        pack(path, of, {"answers.yaml": content})
        if day:
            os.utime(path, (DAY_S * day, DAY_S * day))
        return path

    def grade(self, *paths: Path, levels: Path | None = None, **settings: object) -> list[str]:
        """Grades, with settings of ``Class``; returns the lines printed."""
        lines: list[str] = []
        grader = settings.pop("grader", Grader(ROOT))
        folder = settings.pop("folder", self.grades_dir)
        Class(grader, paths, **settings).grade(folder, lines.append, levels)
        return lines

    def rows(self, file: str) -> list[dict[str, str]]:
        """Returns the rows of a table of the grades."""
        return rows(self.grades_dir / file)

    def grades(self) -> dict[str, dict[str, str]]:
        """Returns the rows of grades.csv by submission."""
        return {row["submission"]: row for row in self.rows("grades.csv")}


@pytest.fixture
def class_(tmp_path: Path) -> MadeClass:
    return MadeClass(tmp_path)


def rows(path: Path) -> list[dict[str, str]]:
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def roster_of(tmp_path: Path, text: str) -> Roster:
    path = tmp_path / "roster.csv"
    path.write_text(text)
    return read_roster(path)


def test_any_file_name_is_graded_and_the_manifest_says_whose_it_is(class_: MadeClass) -> None:
    paths = [
        class_.hand_in("doe-jane", answers(), "doe-jane-assign3 (1).tar.gz"),
        class_.hand_in("Plato", answers(), "roemax_17_23_doe-jane-assign3-1.tar.gz"),
        class_.hand_in("Mary O'Brien", answers(), "HOMEWORK.TGZ"),
        class_.hand_in("王 小明", answers(), "文件"),
    ]
    class_.grade(*paths)
    assert {name: row["score"] for name, row in class_.grades().items()} == {
        name: str(CHOICES)
        for name in (
            "doe-jane-assign3",
            "mary-obrien-assign3",
            "plato-assign3",
            "王-小明-assign3",
        )
    }
    assert (class_.grades_dir / "王-小明-assign3.json").is_file()


ROSTER = (
    "Name,SID,Email\n"
    '"Doe, Jane",s1,jane@x.org\n'
    "Jane Doe,s2,doe@x.org\n"
    "Plato,s3,plato@x.org\n"
    "Mary O’Brien,s4,mary@x.org\n"
    f"{unicodedata.normalize('NFD', 'Jörg Müller')},s5,jm@x.org\n"
)


def test_a_roster_says_who_is_who(tmp_path: Path, class_: MadeClass) -> None:
    paths = [
        class_.hand_in("doe-jane", answers(), "a", id_="s2"),
        class_.hand_in("doe-jane", answers(right=False), "b", email="JANE@x.org"),
        class_.hand_in("doe-jane", answers(), "c"),
        class_.hand_in("PLATO", answers(), "d"),
        class_.hand_in("o'brien mary", answers(), "e"),
        class_.hand_in("müller-jörg", answers(), "f"),
        class_.hand_in("somebody else", answers(), "g"),
        class_.hand_in("Plato", answers(), "h", id_="s9"),
        class_.hand_in("Plato", answers(), "i", id_="s4"),
        class_.hand_in("Plato", answers(), "j", id_="s3", email="mary@x.org"),
    ]
    lines = class_.grade(*paths, roster=roster_of(tmp_path, ROSTER))
    found = class_.grades()
    assert {name: row["id"] for name, row in found.items() if row["score"]} == {
        "jane-doe-s2-assign3": "s2",
        "doe-jane-s1-assign3": "s1",
        "plato-assign3": "s3",
        "mary-obrien-assign3": "s4",
        "jörg-müller-assign3": "s5",
    }
    assert float(found["doe-jane-s1-assign3"]["score"]) == 0
    reasons = {name: found[name]["remark"] for name in "cghij"}
    assert "2 on the roster are called doe-jane" in reasons["c"]
    assert "nobody on the roster is called somebody else" in reasons["g"]
    assert "nobody on the roster has id s9" in reasons["h"]
    assert "id s4 is Mary O’Brien's, not Plato's" in reasons["i"]
    assert "id s3 is Plato's, and mary@x.org Mary O’Brien's" in reasons["j"]
    assert sum("counts for nobody" in line for line in lines) == 5


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("name,id\na,1\nb,1\n", r"roster\.csv:3: id 1 is there twice"),
        ("name,email\na,X@y\nb,x@y\n", r"roster\.csv:3: e-mail x@y is there twice"),
        ("name,id\nA B,1\nb-a,\n", r"roster\.csv:3: two are called b-a"),
        ("name\na\n", "expected the columns name, and email or id"),
        ("id\n1\n", "expected the columns name"),
        ("", "expected the columns"),
        ("name,id\n", "nobody is on it"),
        ("name,id,extension_days\na,1,-1\n", r"roster\.csv:2: extension_days '-1'"),
        ("name,id,extension_days\na,1,x\n", "extension_days 'x'"),
        ("name,id,handed_in\na,1,2027-10-01\n", r"roster\.csv:2: time '2027-10-01'"),
    ],
)
def test_rosters_that_are_none(tmp_path: Path, text: str, words: str) -> None:
    with pytest.raises(UserError, match=words) as error:
        roster_of(tmp_path, text)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    "text",
    [
        "Student;ID;SIS User ID;SIS Login ID\n Points Possible;;;\nDoe, Jane;7;s1;j@x.org\n",
        "First name,Last name,ID number,Email address\nJane,Doe,s1,j@x.org\n",
        "\ufefffirst name,last name,email,sid\nJane,Doe,j@x.org,s1\n",
    ],
)
def test_rosters_as_platforms_export_them(tmp_path: Path, text: str) -> None:
    [person] = roster_of(tmp_path, text).people
    assert person.is_called("doe-jane")
    assert (person.id, person.email) == ("s1", "j@x.org")


def test_broken_and_hostile_hand_ins_are_rows_and_cost_nobody_else_anything(
    tmp_path: Path, class_: MadeClass
) -> None:
    good = class_.hand_in("doe-jane", answers())
    class_.grade(good, folder=tmp_path / "alone")
    [alone] = rows(tmp_path / "alone" / "grades.csv")
    folder = good.parent
    (folder / "roe-max-assign3.tar.gz").write_bytes(good.read_bytes()[:300])
    (folder / "noise").write_bytes(os.urandom(1000))
    (folder / "=cmd.tar.gz").write_bytes(b"\x1f\x8b")
    (folder / "empty").touch()
    with tarfile.open(folder / "link.tar.gz", "w:gz") as tar:
        info = tarfile.TarInfo("doe-jane-assign3/answers.yaml")
        info.type, info.linkname = tarfile.SYMTYPE, "/etc/passwd"
        tar.addfile(info)
    class_.hand_in("poe-kim", answers(), assignment=2)
    class_.grade(folder)
    found = class_.grades()
    assert found["doe-jane-assign3"] == alone
    reasons = {name: row["remark"] for name, row in found.items() if not row["score"]}
    expected = {
        "roe-max-assign3.tar.gz": "cut off",
        "noise": "no whole tarball",
        "'=cmd.tar.gz": "no whole tarball",
        "empty": "no whole tarball",
        "link.tar.gz": "is no file",
        "poe-kim-assign2.tar.gz": "it is of assignment 2, not assignment 3",
    }
    assert set(reasons) == set(expected)
    for name, words in expected.items():
        assert words in reasons[name], name
    assert found["roe-max-assign3.tar.gz"]["name"] == "roe-max"


def test_names_that_a_terminal_or_a_disk_does_not_take(class_: MadeClass) -> None:
    folder = class_.hand_in("doe-jane", answers()).parent
    for name in (b"\xff.tar.gz", b"a\nb", b"\xe2\x80\xaex"):
        Path(os.fsdecode(bytes(folder) + b"/" + name)).write_bytes(b"x")
    for number, name in enumerate(("İ" * 100, "a" * 200)):
        manifest = json.dumps({"name": name, "assignment": 3, "id": "s" * 64, "files": {}})
        with tarfile.open(folder / f"long {number}", "w:gz") as tar:
            info = tarfile.TarInfo("x/manifest.json")
            info.size = len(manifest.encode())
            tar.addfile(info, io.BytesIO(manifest.encode()))
    shutil.copy(folder / "long 1", folder / "long 2")
    lines = class_.grade(folder)
    assert all(line.encode().decode().isprintable() for line in lines)
    assert len(class_.grades()) == 6
    # The results may lie among the hand-ins.
    class_.grade(folder, folder=folder / "grades")
    before = rows(folder / "grades" / "grades.csv")
    class_.grade(folder, folder=folder / "grades")
    assert rows(folder / "grades" / "grades.csv") == before
    assert len(before) == 6


def test_a_name_with_a_slash_has_files(tmp_path: Path, class_: MadeClass) -> None:
    roster = roster_of(tmp_path, "name,id\nRajesh a/l Kumar,s7\n")
    class_.grade(class_.hand_in("Rajesh Kumar", answers(), id_="s7"), roster=roster)
    assert list(class_.grades()) == ["rajesh-a-l-kumar-assign3"]
    assert (class_.grades_dir / "rajesh-a-l-kumar-assign3.json").is_file()


@pytest.mark.parametrize(("assignment", "part"), [(2, 1), (1, 3), (1, -1), (None, 3)])
def test_a_part_that_there_is_not(class_: MadeClass, assignment: int | None, part: int) -> None:
    with pytest.raises(UserError, match=f"assignment {assignment or 1} has no part {part}"):
        class_.grade(class_.hand_in("a", answers()), assignment=assignment, part=part)
    assert not (class_.grades_dir).exists()


def test_of_which_assignment_a_class_is(tmp_path: Path, class_: MadeClass) -> None:
    paths = [class_.hand_in("a", answers()), class_.hand_in("b", answers(), assignment=2)]
    with pytest.raises(UserError, match=r"1 of assignment 2, 1 of assignment 3.*--assignment"):
        class_.grade(*paths)
    class_.grade(*paths, assignment=3)
    assert class_.grades()["a-assign3"]["score"]
    with pytest.raises(UserError, match="no such file"):
        class_.grade(tmp_path / "nothing")
    paths[0].write_bytes(b"")
    paths[0].rename(tmp_path / "unknown")
    with pytest.raises(UserError, match="no hand-in says of what it is"):
        class_.grade(tmp_path / "unknown", folder=tmp_path / "other")


@pytest.mark.parametrize("order", ["-12", "12|-", "1|-|2"])
def test_a_hand_in_that_may_be_of_two_namesakes_is_nobodys(class_: MadeClass, order: str) -> None:
    ids = {"1": "s1", "2": "s2", "-": ""}
    paths = {
        sign: class_.hand_in("Jane Doe", answers(right=bool(id_)), sign, id_=id_)
        for sign, id_ in ids.items()
    }
    for batch in order.split("|"):
        class_.grade(*(paths[sign] for sign in batch))
    graded = {row["id"]: row for row in class_.grades().values() if row["score"]}
    assert graded.keys() == {"s1", "s2"}
    if order != "1|-|2":  # which is not known to have a namesake yet, and keeps the id
        assert all(float(row["score"]) for row in graded.values())
        remarks = [row["remark"] for row in class_.grades().values()]
        assert any("several are called Jane Doe" in remark for remark in remarks)


@pytest.mark.parametrize(
    ("said", "people"),
    [
        # id and e-mail of each hand-in of Jane Doe's; one letter for a person, - for nobody
        (["s1 ", " j@x", "s2 j@y"], "aab"),
        ([" j@x", "S1 J@x", "s1 "], "aaa"),
        (["s1 ", " j@x", "s2 j@x"], "abb"),
        ([" j@x", "s1 ", "s2 "], "-ab"),
        (["s1 ", " j@x", " j@y", " "], "abc-"),
        (["s1 ", "s2 ", " j@x", " j@y"], "ab--"),
        (["s1 j@x", "s1 j@y", " j@x", " j@y", " "], "aaaaa"),
        (["s1 j@x", " j@y", " "], "ab-"),
        (["s1 j@x", "s2 j@x", " j@x", " "], "ab--"),
        ([" ", " "], "aa"),
    ],
)
def test_whose_a_hand_in_is_does_not_depend_on_their_order(said: list[str], people: str) -> None:
    for order in itertools.permutations(range(len(said))):
        pairs = [said[number].split(" ") for number in order]
        found = people_of(Person("Jane Doe", email, id_) for id_, email in pairs)
        whose = dict(zip(order, found, strict=True))
        letters: dict[object, str] = {None: "-"}
        told = [letters.setdefault(whose[n], "abcd"[len(letters) - 1]) for n in range(len(said))]
        assert "".join(told) == people, order


def test_a_person_keeps_all_addresses_of_before(class_: MadeClass) -> None:
    for file, (id_, email) in enumerate((("s1", "j@x.org"), ("s1", "j@y.org"), ("", "j@x.org"))):
        class_.grade(class_.hand_in("Jane Doe", answers(), str(file), id_=id_, email=email))
    assert [row["id"] for row in class_.grades().values()] == ["s1"]


def test_of_two_hand_ins_the_newest_counts(tmp_path: Path, class_: MadeClass) -> None:
    first = class_.hand_in("doe-jane", answers(right=False), "x", day=2)
    last = class_.hand_in("doe-jane", answers(), "x (1)", day=1)
    class_.grade(first, last, by_file_time=True)
    row = class_.grades()["doe-jane-assign3"]
    assert (float(row["score"]), row["handed_in"][:10]) == (0, "1970-01-03")
    assert "2 hand-ins; the newest counts: x" in row["remark"]
    why = {row["file"]: row["why"] for row in class_.rows("history.csv")}
    assert why == {"x": "first graded", "x (1)": "handed in again later: it does not count"}
    # So it is where they are graded one after the other.
    for path in (first, last, first):
        lines = class_.grade(path, by_file_time=True, folder=tmp_path / "one by one")
        [row] = rows(tmp_path / "one by one" / "grades.csv")
        assert (float(row["score"]), row["handed_in"][:10]) == (0, "1970-01-03")
        assert any("older than x" in line for line in lines) == (path is last)
    assert {row["file"]: row["why"] for row in rows(tmp_path / "one by one" / "history.csv")} == why
    class_.grade(last, by_file_time=True, folder=tmp_path / "in order")
    class_.grade(first, by_file_time=True, folder=tmp_path / "in order")
    [row] = rows(tmp_path / "in order" / "grades.csv")
    assert float(row["score"]) == 0
    times = "name,id,handed_in\nJane Doe,s1,2027-10-03T00:00+02:00\n"
    roster = roster_of(tmp_path, times)
    class_.grade(last, first, by_file_time=True, roster=roster, folder=tmp_path / "on time")
    [row] = rows(tmp_path / "on time" / "grades.csv")
    assert "the newest counts: x" in row["remark"]  # the platform has the time of the last alone
    assert float(row["score"]) == 0
    shutil.copy(first, first.with_name("x (2)"))
    class_.grade(first, first.with_name("x (2)"), folder=tmp_path / "same")
    [row] = rows(tmp_path / "same" / "grades.csv")
    assert row["remark"] == ""


@pytest.mark.parametrize("order", ["xy", "yx", "x|y", "y|x"])
def test_of_hand_ins_of_one_time_that_of_the_last_name_counts_in_any_order(
    class_: MadeClass, order: str
) -> None:
    for name in "xy":
        class_.hand_in("doe-jane", answers(right=name == "y"), name, day=1)
    for batch in order.split("|"):
        class_.grade(*(class_.folder / name for name in batch), by_file_time=True)
    assert float(class_.grades()["doe-jane-assign3"]["score"]) > 0


@pytest.mark.parametrize("time_from", ["file", "roster"])
def test_a_record_without_a_stamp_has_its_time_unless_it_is_a_platforms(
    class_: MadeClass, time_from: str
) -> None:
    first = class_.hand_in("doe-jane", answers(right=False), "first", day=1)
    last = class_.hand_in("doe-jane", answers(), "last", day=2)
    class_.grade(last, by_file_time=True)
    state = class_.grades_dir / "class.json"
    content = json.loads(state.read_text())
    [record] = content["records"].values()
    del record["stamp"]
    record["time_from"] = time_from
    state.write_text(json.dumps(content))
    class_.grade(first, by_file_time=True)
    score = float(class_.grades()["doe-jane-assign3"]["score"])
    assert (score > 0) == (time_from == "file")


@pytest.fixture
def read_class(class_: MadeClass, read_here: None) -> MadeClass:
    """Grades two students, of whose texts a reader has found all to be full."""
    class_.hand_in("doe-jane", answers("Jane's"))
    class_.hand_in("roe-max", answers("Max's"))
    class_.grade(class_.folder)
    path = class_.grades_dir / "levels.csv"
    path.write_text(path.read_text().replace(",\n", ",full\n"))
    class_.grade()
    return class_


def test_levels_are_given_to_texts_without_their_authors(read_class: MadeClass) -> None:
    points = sum(QUESTIONS[name].points for name in TEXTS)
    for row in read_class.grades().values():
        assert (float(row["score"]), row["not_judged"]) == (CHOICES + points, "0")
    history = read_class.rows("history.csv")
    assert [row["why"] for row in history] == ["first graded"] * 2 + ["texts read"] * 2
    for name in ("reading.html", "levels.csv"):
        text = (read_class.grades_dir / name).read_text()
        assert "doe-jane" not in text
        assert "roe-max" not in text
    assert "Max&#x27;s" in (read_class.grades_dir / "reading.html").read_text()


@pytest.mark.usefixtures("read_class")
def test_a_late_hand_in_and_a_regrade_lose_nothing(tmp_path: Path, class_: MadeClass) -> None:
    before = class_.grades()
    class_.grade(class_.hand_in("poe-kim", answers("Kim's")))
    class_.grade(class_.hand_in("roe-max", answers("Max's", right=False)))
    found = class_.grades()
    assert found["doe-jane-assign3"] == before["doe-jane-assign3"]
    assert float(found["poe-kim-assign3"]["score"]) == CHOICES
    # His texts are the same: so are their levels.
    lost = float(before["roe-max-assign3"]["score"]) - float(found["roe-max-assign3"]["score"])
    assert lost == CHOICES
    levels = class_.rows("levels.csv")
    assert [row["level"] for row in levels].count("full") == 2 * len(TEXTS)
    assert [row["level"] for row in levels].count("") == len(TEXTS)
    assert "Kim&#x27;s" in (class_.grades_dir / "reading.html").read_text()
    *_, last = class_.rows("history.csv")
    assert last["submission"] == "roe-max-assign3"
    assert last["score_before"] == before["roe-max-assign3"]["score"]
    assert "handed in again" in last["why"]
    # A broken one of his is a row, and what he had stays.
    broken = tmp_path / "roe-max-assign3 (2).tar.gz"
    broken.write_bytes(b"x")
    class_.grade(broken)
    again = class_.grades()
    assert again.pop(broken.name)["remark"]
    assert again == found


@pytest.mark.usefixtures("read_class")
def test_a_level_is_of_the_text_that_was_read(class_: MadeClass) -> None:
    class_.grade(class_.hand_in("roe-max", answers("Another.")))
    assert float(class_.grades()["roe-max-assign3"]["score"]) == CHOICES
    levels = class_.rows("levels.csv")
    assert [row["level"] for row in levels].count("full") == 2 * len(TEXTS)
    class_.grade(class_.hand_in("roe-max", answers("Max's")))
    assert float(class_.grades()["roe-max-assign3"]["score"]) > CHOICES


def test_no_answer_waits_until_texts_are_read(class_: MadeClass) -> None:
    class_.grade(class_.hand_in("doe-jane", answers()), class_.hand_in("roe-max", answers("")))
    found = class_.grades()
    assert found["doe-jane-assign3"]["percent"] == found["roe-max-assign3"]["percent"]
    path = class_.grades_dir / "levels.csv"
    path.write_text(path.read_text().replace(",\n", ",half\n"))
    class_.grade()
    found = class_.grades()
    assert found["doe-jane-assign3"]["maximum"] == found["roe-max-assign3"]["maximum"]
    assert float(found["roe-max-assign3"]["score"]) == CHOICES


def test_codes_are_no_numbers_and_remarks_stay(class_: MadeClass) -> None:
    class_.grade(class_.hand_in("doe-jane", answers()))
    path = class_.grades_dir / "levels.csv"
    codes = [row["text"] for row in rows(path)]
    assert all(re.fullmatch("t[0-9a-f]{8}", code) for code in codes)
    head, *lines = path.read_text().splitlines()
    path.write_text("\n".join([f"{head},remark", *(f"{line}half,good" for line in lines)]))
    class_.grade()
    half = sum(QUESTIONS[name].points for name in TEXTS) / 2
    assert float(class_.grades()["doe-jane-assign3"]["score"]) == CHOICES + half
    assert [(row["text"], row["level"], row["remark"]) for row in rows(path)] == [
        (code, "half", "good") for code in codes
    ]


NOBODYS = {
    "t01234567,{text},full": "nobody handed in 't01234567'",
    "doe-jane-assign3,{text},full": "nobody handed in 'doe-jane-assign3'",
    "t01234567,Q9.9,full": "'Q9.9' is no question with a text",
    "t01234567,{text},good": "2: level 'good'; known: none, half, full",
}
"""Lines of a table of levels, and what is said of them."""


def test_levels_that_are_nobodys(tmp_path: Path, class_: MadeClass) -> None:
    path = class_.hand_in("doe-jane", answers())
    class_.grade(path)
    before = {p.name: p.read_bytes() for p in (class_.grades_dir).glob("*.*")}
    levels = tmp_path / "levels.csv"
    for line, words in NOBODYS.items():
        levels.write_text(f"text,question,level\n{line.format(text=TEXTS[0])}\n")
        with pytest.raises(UserError, match=words):
            class_.grade(path, levels=levels)
        assert {p.name: p.read_bytes() for p in (class_.grades_dir).glob("*.*")} == before
    levels.write_text("text,question,level\ndoe-jane-assign3\n")
    class_.grade(levels=levels)  # a line that was cut off gives no level
    assert class_.grades()["doe-jane-assign3"]["score"] == str(CHOICES)


def test_results_of_something_else_are_refused(tmp_path: Path, class_: MadeClass) -> None:
    path = class_.hand_in("doe-jane", answers())
    class_.grade(path)
    with pytest.raises(UserError, match=r"has results of assignment 3, .* are of assignment 2"):
        class_.grade(class_.hand_in("doe-jane", b"{}", assignment=2))
    with pytest.raises(UserError, match="results of --variant 0, not 7"):
        class_.grade(path, grader=Grader(ROOT, 7))
    hidden = tmp_path / "overlay" / "tests" / "exercises" / "hidden"
    hidden.mkdir(parents=True)
    (hidden / "test_min_max_partition.py").write_text("# changed\n")
    with (
        with_overlay(ROOT, tmp_path / "overlay") as root,
        pytest.raises(UserError, match="another version of the course"),
    ):
        class_.grade(path, grader=Grader(root))
    old = tmp_path / "old"
    old.mkdir()
    (old / "grades.csv").write_text("submission\n")
    with pytest.raises(UserError, match=r"has no class\.json beside it"):
        class_.grade(path, folder=old)
    (old / "class.json").write_text("{")
    with pytest.raises(UserError, match="cannot be read"):
        class_.grade(path, folder=old)


def test_two_gradings_do_not_write_into_one_folder(class_: MadeClass) -> None:
    path = class_.hand_in("doe-jane", answers())
    class_.grade(path)
    with (class_.grades_dir / ".lock").open() as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        with pytest.raises(UserError, match="another grading writes into it"):
            class_.grade(path)
    class_.grade(path)


def test_a_disk_that_is_full_leaves_all_as_it_was(
    class_: MadeClass, monkeypatch: pytest.MonkeyPatch
) -> None:
    class_.grade(class_.hand_in("doe-jane", answers()))
    before = {p.name: p.read_bytes() for p in (class_.grades_dir).iterdir() if p.is_file()}
    late = class_.hand_in("roe-max", answers())
    left = 3

    def full(_: int) -> None:
        nonlocal left
        left -= 1
        if left < 0:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patched:
        patched.setattr(os, "fsync", full)
        with pytest.raises(OSError, match="No space left"):
            class_.grade(late)
    assert left < 0
    after = {p.name: p.read_bytes() for p in (class_.grades_dir).iterdir() if p.is_file()}
    assert after == before
    class_.grade(late)
    assert len(class_.grades()) == 2


def test_a_file_that_changes_meanwhile_is_not_graded(
    class_: MadeClass, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, other = class_.hand_in("doe-jane", answers()), class_.hand_in("roe-max", answers())
    judge = Grader.judge

    def judge_while_it_comes(self: Grader, *arguments: object) -> object:
        class_.hand_in("roe-max", answers("Later."))
        return judge(self, *arguments)

    monkeypatch.setattr(Grader, "judge", judge_while_it_comes)
    class_.grade(path, other)
    assert "changed meanwhile" in class_.grades()[other.name]["remark"]
    assert float(class_.grades()["doe-jane-assign3"]["score"]) == CHOICES


DUE = datetime(2027, 10, 1, 21, 59, tzinfo=UTC)


@pytest.mark.parametrize(
    ("after_s", "extension", "days"),
    [(-1, 0, 0), (0, 0, 0), (1, 0, 1), (DAY_S, 0, 1), (DAY_S + 1, 0, 2), (DAY_S, 1.0, 0)],
)
def test_days_late(
    tmp_path: Path, class_: MadeClass, after_s: int, extension: float, days: int
) -> None:
    path = class_.hand_in("doe-jane", answers())
    os.utime(path, (DUE.timestamp() + after_s,) * 2)
    text = f"name,id,extension_days\nJane Doe,s1,{extension}\n"
    roster = roster_of(tmp_path, text)
    class_.grade(path, roster=roster, due=DUE, by_file_time=True)
    row = class_.grades()["jane-doe-assign3"]
    assert (row["days_late"], row["time_from"]) == (str(days), "file")


def test_whose_clock_a_time_is_from(tmp_path: Path, class_: MadeClass) -> None:
    path = class_.hand_in("doe-jane", answers())
    class_.grade(path)
    row = class_.grades()["doe-jane-assign3"]
    assert (row["time_from"], row["days_late"]) == ("claimed", "")
    text = "name,id,handed_in\nJane Doe,s1,2027-10-03T00:00+02:00\n"
    class_.grade(path, roster=roster_of(tmp_path, text), due=DUE)
    row = class_.grades()["doe-jane-assign3"]  # the one that was there
    assert (row["time_from"], row["days_late"], row["id"]) == ("roster", "2", "s1")
    class_.grade()  # the deadline is kept
    assert class_.grades()["doe-jane-assign3"] == row


def test_what_platforms_import(tmp_path: Path, class_: MadeClass) -> None:
    exported = (
        "Student,ID,SIS User ID,SIS Login ID,Section\n"
        '    Points Possible,,,,\n"Doe, Jane",71,s1,jane,A\n"Roe, Max",72,s2,max,B\n'
    )
    roster = roster_of(tmp_path, exported)
    lines = class_.grade(
        class_.hand_in("doe-jane", answers()),
        class_.hand_in("nobody", answers()),
        roster=roster,
        platforms=["canvas", "moodle", "gradescope"],
    )
    assert "nothing counts of 1 student: Roe, Max" in lines
    folder = class_.grades_dir
    # Canvas's importer: Student and ID first, SIS columns, Section, then assignments.
    head, possible, *students = csv.reader((folder / "canvas.csv").open(newline=""))
    assert head[:5] == ["Student", "ID", "SIS User ID", "SIS Login ID", "Section"]
    assert "Points Possible" in possible[0]
    total = sum(q.points for q in QUESTIONS.values()) + 55
    assert float(possible[5]) == total
    assert students == [["Doe, Jane", "71", "s1", "jane", "A", str(CHOICES)]]
    [row] = rows(folder / "moodle.csv")
    assert (row["ID number"], row["Assignment 3"]) == ("s1", str(CHOICES))
    [row] = rows(folder / "gradescope.csv")
    assert (row["SID"], row["Total Score"]) == ("s1", str(CHOICES))
    assert float(row["Max Points"]) == total


def test_an_address_of_before_leaves_the_rosters_row(tmp_path: Path, class_: MadeClass) -> None:
    path = class_.hand_in("doe-jane", answers(), email="j@x.org")
    class_.grade(path)
    text = 'Student,ID,SIS User ID,Section\n"Doe, Jane",71,s1,A\n'
    class_.grade(path, roster=roster_of(tmp_path, text), platforms=["canvas"])
    *_, student = csv.reader((class_.grades_dir / "canvas.csv").open(newline=""))
    assert student[:5] == ["Doe, Jane", "71", "s1", "", "A"]


def test_names_are_no_formulas(class_: MadeClass) -> None:
    class_.grade(class_.hand_in("-Doe", answers()))
    assert class_.grades()["doe-assign3"]["name"] == "'-Doe"
