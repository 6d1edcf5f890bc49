"""Grades a class: points, tables and a sheet of texts to read, merged with what is there already.

A hand-in that is broken, or is nobody's, is a row with its reason, and costs nobody else anything.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import datetime
from pathlib import Path

from common.course.answers import TEXT, read_questions
from common.course.grading.checks import TIME_S
from common.course.grading.grade import Grader
from common.course.grading.marks import Grade, read_key
from common.course.grading.people.identify import (
    BY_ROSTER,
    HandIn,
    completed,
    files_of,
    identified,
    newest,
    people_of,
    read_hand_in,
    slug_of,
    what_is_graded,
    why_unclear,
)
from common.course.grading.people.roster import Roster
from common.course.grading.plausibility import KEPT, keep, pages_of, suspicions_by_strength
from common.course.grading.reading import (
    Levels,
    apply_levels,
    as_levels,
    check_levels,
    read_levels,
    reading_sheet,
    texts_of,
)
from common.course.grading.records import (
    ClassResults,
    Record,
    What,
    check_is_of,
    locked,
    read_class_results,
    state_of,
    write_together,
)
from common.course.grading.tables import PLATFORMS, as_grades, as_history, what_is_open
from common.course.hand_ins.tarball import printable
from common.course.sandbox.isolation import strongest_isolation
from common.course.submission import HandedIn
from common.errors import RunFailed, UserError
from common.runtime.processes.bytecode import shared_bytecode
from common.runtime.processes.child import end_children
from common.runtime.script import is_full

logger = logging.getLogger(__name__)
LEVELS, CACHE = "levels.csv", ".checks"
POLL_S = 0.1


@dataclass(frozen=True)
class Class:
    """The hand-ins of a class, of one assignment.

    Attributes:
        grader: grades one submission.
        paths: files that were handed in, of any name, or folders of such.
        roster: who is who; None to believe what hand-ins say.
        assignment, part: what is graded; by default what most hand-ins are of.
        due: the deadline; None for none, or for that of the results that are there.
        by_file_time: True to take a file's time of change for that of the hand-in.
        jobs: submissions that are graded at once.
        platforms: learning platforms whose import is written.
    """

    grader: Grader
    paths: Sequence[Path]
    roster: Roster | None = None
    assignment: int | None = None
    part: int = 0
    due: datetime | None = None
    by_file_time: bool = False
    jobs: int = 1
    platforms: Sequence[str] = ()

    def grade(
        self, folder: Path, say: Callable[[str], None], levels: Path | None = None
    ) -> list[Grade]:
        """Grades all, and merges them into the results of a folder.

        Writes STEM.json for each student, grades.csv, history.csv, reading.html, levels.csv and the
        platforms' tables. A submission at which the grader breaks is not judged; its grade says so,
        and the log why.

        Args:
            folder: folder of the results.
            say: called with a line for each hand-in.
            levels: table of levels besides the folder's own.

        Returns:
            the grades of these hand-ins, in their order; those without marks say why.

        Raises:
            UserError: this machine cannot grade, a key is missing, the folder has results of
                something else or is being written, a level is of nobody's text, or nothing can be
                written.
        """
        files = files_of(self.paths, folder)
        with locked(folder), shared_bytecode():
            hand_ins = [read_hand_in(path, by_file_time=self.by_file_time) for path in files]
            results = self.results(folder, hand_ins)
            of = (results.what.assignment, results.what.part)
            hand_ins = [identified(hand_in, of, self.roster) for hand_in in hand_ins]
            before = dict(results.records)
            self.refresh(results)
            hand_ins, names = self.names(hand_ins, results)
            grades = self.judge(folder, hand_ins, names, results, say)
            self.write(folder, results, before, levels)
            for line in what_is_open(results, self.roster, self.platforms):
                say(line)
            return grades

    def results(self, folder: Path, hand_ins: Sequence[HandIn]) -> ClassResults:
        """Returns the results that a folder has, or begins them."""
        earlier = read_class_results(folder)
        try:
            assignment, part = what_is_graded(hand_ins, self.assignment, self.part)
        except UserError:
            if earlier is None or self.assignment is not None:
                raise
            assignment, part = earlier.what.assignment, earlier.what.part
        course = self.grader.course(HandedIn("", assignment, part))
        what = What(assignment, part, self.grader.variant, course)
        results = earlier or ClassResults(what)
        check_is_of(folder, results.what, what)
        if self.due:
            results.due = self.due.isoformat()
        return results

    def refresh(self, results: ClassResults) -> None:
        """Takes over what the roster has of students who were graded before."""
        for name, record in results.records.items() if self.roster else ():
            of = HandedIn(record.name, 0, 0, record.email, record.id)
            with suppress(UserError):  # who is not on it stays as he is
                p = self.roster.person(of)
                new = replace(record, name=p.name, email=p.email, id=p.id)
                if p.handed_in:
                    time = p.handed_in.isoformat(timespec="seconds")
                    new = replace(new, handed_in=time, time_from=BY_ROSTER)
                results.records[name] = replace(new, extension_days=p.extension_days)

    def names(
        self, hand_ins: Sequence[HandIn], results: ClassResults
    ) -> tuple[list[HandIn], dict[str, list[HandIn]]]:
        """Tells hand-ins apart: which of them may be of several people, and so count for nobody.

        Returns:
            the hand-ins; those that count by their submission's name, one for each student.
        """
        graded = {name: record.person for name, record in results.records.items()}
        counting = [hand_in for hand_in in hand_ins if not hand_in.problem]
        people = people_of([*graded.values(), *(hand_in.person for hand_in in counting)])
        groups: dict[object, list[HandIn]] = {}
        for person, hand_in in zip(people[len(graded) :], counting, strict=True):
            groups.setdefault(person, []).append(hand_in)
        unclear = {hand_in.path for hand_in in groups.pop(None, ())}
        names: dict[str, list[HandIn]] = {}
        for person, group in groups.items():
            earlier = [n for n, p in zip(graded, people, strict=False) if p == person]
            group = completed(group, [graded[name] for name in earlier])
            first, suffix = group[0].person, group[0].of.suffix
            if earlier:
                name = earlier[0]  # whose record stays where it is newer
                results.records[name] = results.records[name].completed(first)
            else:
                taken = [n.removesuffix(suffix) for n in (*graded, *names)]
                name = slug_of(first, self.roster, taken) + suffix
            names[name] = group
        hand_ins = [
            replace(h, problem=why_unclear(h.person)) if h.path in unclear else h for h in hand_ins
        ]
        return hand_ins, names

    def judge(
        self,
        folder: Path,
        hand_ins: Sequence[HandIn],
        names: Mapping[str, Sequence[HandIn]],
        results: ClassResults,
        say: Callable[[str], None],
    ) -> list[Grade]:
        """Grades what counts, and puts all of it into the results."""
        grader = replace(self.grader, cache=folder / CACHE)
        grades: dict[Path, Grade] = {}
        for hand_in in hand_ins:
            if hand_in.problem:
                grades[hand_in.path] = put_problem(hand_in, results, say)
        last = {name: newest(group, say) for name, group in names.items()}
        for name, record in results.records.items():
            if name in last and record.is_newer_than(last[name][0]):
                hand_in, earlier = last.pop(name)
                for before in (*earlier, hand_in):
                    put_earlier(before, name, results)
                say(f"{printable(hand_in.path.name)}: older than {record.file}, which counts")
                grades |= {h.path: record.grade for h in names[name]}
        isolation = strongest_isolation() if last else ""
        if self.jobs > 1:
            self.prepare(grader, [hand_in for hand_in, _ in last.values()], say)
        for name, (hand_in, earlier) in last.items():
            grade = self.grade_one(grader, name, hand_in, isolation, folder)
            if grade.marks:
                for before in earlier:
                    put_earlier(before, name, results)
                results.put(Record.of(name, hand_in, grade))
                say(grade.line())
            else:
                grade = put_problem(replace(hand_in, problem=grade.remark), results, say)
            grades |= {h.path: grade for h in names[name]}
        return [grades[hand_in.path] for hand_in in hand_ins]

    def prepare(
        self, grader: Grader, hand_ins: Sequence[HandIn], say: Callable[[str], None]
    ) -> None:
        """Runs the checks of several submissions at once, but for those that time something.

        What goes wrong does so again, and is told, when the submission is graded.
        """

        def prepare(hand_in: HandIn) -> None:
            try:
                grader.prepare(hand_in.read(), TIME_S * self.jobs)
            except Exception as error:
                logger.debug("%s: %s", hand_in.path, error)

        with ThreadPoolExecutor(self.jobs) as pool:
            begun = [pool.submit(prepare, hand_in) for hand_in in hand_ins]
            try:
                for number, future in enumerate(begun, start=1):
                    future.result()
                    say(f"checks of {number} of {len(hand_ins)}")
            except BaseException:
                pool.shutdown(wait=False, cancel_futures=True)
                while not all(future.done() for future in begun):
                    end_children()  # a thread may be about to start one
                    time.sleep(POLL_S)
                raise

    def grade_one(
        self, grader: Grader, name: str, hand_in: HandIn, isolation: str, folder: Path
    ) -> Grade:
        """Grades one, and keeps what is compared of it in the folder of the results.

        Where the grader breaks, nothing is judged; without marks it has changed.
        """
        try:
            submission = hand_in.read()
        except UserError as error:
            return Grade(name, (), "", grader.variant, str(error))
        keep(folder / KEPT / f"{name}.json", submission, grader.root)
        try:
            return replace(grader.judge(submission, isolation), stem=name)
        except UserError:
            raise
        except Exception as error:
            if is_full(error):  # it would be for all submissions
                raise
            logger.exception("%s: the grader broke", hand_in.path)
            why = str(error) if isinstance(error, RunFailed) else type(error).__name__
            broken = grader.without_checks(submission.of, None, f"not graded: {why}")
            return replace(broken, stem=name)

    def write(
        self, folder: Path, results: ClassResults, before: Mapping[str, Record], table: Path | None
    ) -> None:
        """Gives texts their levels, notes what changed, and writes all files of the folder."""
        root, assignment = self.grader.root, results.what.assignment
        of = HandedIn("", assignment, results.what.part)
        questions = read_questions(root, assignment) if of.has_answers else {}
        levels: Levels = {}
        for path in (folder / LEVELS, table):
            if path is not None and (path is table or path.exists()):
                more = read_levels(path)
                check_levels(more, results, questions, path)
                levels |= {p: row for p, row in more.items() if row["level"] or p not in levels}
        apply_levels(results, levels, questions)
        results.note_changes(before)
        tasks = self.grader.tasks(of)
        bonus = {name for name, task in tasks.items() if task.bonus}
        worth = {**tasks, **questions}
        possible = float(sum(item.points for name, item in worth.items() if name not in bonus))
        texts = {f"{r.submission}.json": r.grade.text() for r in results.records.values()}
        texts |= {"grades.csv": as_grades(results, bonus), "history.csv": as_history(results)}
        for name in self.platforms:
            texts[f"{name}.csv"] = PLATFORMS[name](results, self.roster, possible)
        if any(question.kind == TEXT for question in questions.values()):
            title = f"Assignment {assignment}: texts to read"
            by_question = {name: texts_of(results, name) for name in questions}
            key = read_key(root, assignment)
            texts["reading.html"] = reading_sheet(title, questions, key, by_question)
            texts[LEVELS] = as_levels(results, levels, questions)
        times = {r.submission: r.handed_in for r in results.records.values() if r.handed_in}
        handed_in = {name: datetime.fromisoformat(time) for name, time in times.items()}
        texts |= pages_of(folder, suspicions_by_strength(folder, root, handed_in))
        write_together(folder, {**texts, "class.json": state_of(results)})


def put_problem(hand_in: HandIn, results: ClassResults, say: Callable[[str], None]) -> Grade:
    """Notes a hand-in that counts for nobody."""
    name = printable(hand_in.path.name)
    grade = Grade(name, (), "", results.what.variant, hand_in.problem)
    results.put_problem(Record.of(name, hand_in, replace(grade, remark="")))
    say(f"{name}: counts for nobody: {hand_in.problem}")
    return grade


def put_earlier(hand_in: HandIn, name: str, results: ClassResults) -> None:
    """Notes a hand-in in whose place a later one counts."""
    why = "handed in again later: it does not count"
    row = (name, hand_in.sha256[:12], why)
    if row not in {(r["submission"], r["sha256"], r["why"]) for r in results.history}:
        record = Record.of(name, hand_in, Grade(name, (), "", results.what.variant))
        results.note(replace(record, problem=why), None, why)
