"""Runs that do not go together, and hand-ins that are too much alike: a list for the instructor.

Nothing here gives or takes points. Of each submission it is kept what is compared, so that one that
comes late is held against those that came before.
"""

from __future__ import annotations

import functools
import hashlib
import json
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from itertools import combinations
from pathlib import Path
from tempfile import TemporaryDirectory

from common.course.answers import TEXT, read_questions
from common.course.grading.evidence import (
    PROFILE,
    SKETCH,
    SOME,
    STRONG,
    WEAK,
    evidence,
    profile,
    shingles,
    sketch,
    stages_of,
    words_of,
)
from common.course.grading.limited import lay_out, limited
from common.course.grading.tables import table
from common.course.markers import solution_pieces, student_source
from common.course.pooling.hand_ins import in_a_line
from common.course.submission import Submission
from common.course.tasks import read_tasks
from common.errors import UserError, naming_os_errors
from common.runtime.records.run_directory import write_atomically

TABLE, PAGE, KEPT = "plausibility.csv", "plausibility.md", "plausibility"
"""The list, the page, and the folder of what is kept of each submission."""
FORMAT = 1
"""Number of the format of what is kept; with another it is read again."""
RUN_KIND, SAMPLES, CODE, TEXTS = "run", "same run", "same code", "same text"
REFERENCE = "(the reference)"
STRENGTHS = (STRONG, SOME, WEAK)
SHARES = {SAMPLES: (0.5, 0.1), CODE: (0.6, 0.3), TEXTS: (0.7, 0.4)}
"""Kind → share from which on two are alike: strongly, and somewhat."""
FEWEST = {SAMPLES: 4, CODE: 60, TEXTS: 8}
"""Kind → number of pieces below which two may be alike by chance."""
MANY, MANY_SHARE = 5, 0.5
"""What so many students have, and so large a share of them, was forced on them or is common."""
SAME, WIDTH = 1e-4, 0.01
"""Largest relative difference of all quantiles where a column is another's multiple, and the least
spread of quantiles that tells anything."""
MOST_WORDS = 4
NOTES = (
    "Nothing here has changed a point. Talk to a student before you conclude anything.",
    "run: tables, records and clocks of a run that do not go together. A run on a cluster, or one "
    "that was taken up again, may look so and be right.",
    "same run: the share of measured times that two have in common, in whatever order and form, or "
    "times that are another's multiplied.",
    "same code: the share of all runs of 8 tokens that two have in common, without names of "
    "variables, comments, what every student gets, and what many have.",
    "same text: the share of all runs of 5 words that two answers have in common.",
)


@dataclass(frozen=True, order=True)
class Suspicion:
    """What an instructor should look at.

    Attributes:
        student: what the student is called in the grades.
        kind: run, same run, same code or same text.
        other: the other student, or the reference; empty where there is none.
        evidence: what was seen, in a line.
        strength: strong, some or weak.
    """

    student: str
    kind: str
    other: str
    evidence: str
    strength: str

    def __post_init__(self) -> None:
        object.__setattr__(self, "evidence", in_a_line(self.evidence))


def suspicions_by_strength(
    folder: Path, root: Path, handed_in: Mapping[str, datetime] | None = None
) -> list[Suspicion]:
    """Returns what does not go together of all of whom something is kept, the strongest first.

    Args:
        folder: folder of the grades of one assignment and part.
        root: the project, with references and questions.
        handed_in: student → when it was handed in, with a time zone.
    """
    kept = kept_in(folder)
    suspicions = list(run_suspicions(kept, handed_in or {}))
    suspicions += sample_suspicions(kept | recorded(kept, root))
    suspicions += [*code_suspicions(kept, root), *text_suspicions(kept, root)]
    return sorted(suspicions, key=lambda s: (STRENGTHS.index(s.strength), s))


def kept_in(folder: Path) -> dict[str, dict]:
    """Reads what is kept of each student."""
    kept = {path.stem: json.loads(path.read_text()) for path in (folder / KEPT).glob("*.json")}
    return {stem: read for stem, read in sorted(kept.items()) if read["format"] == FORMAT}


def pages_of(folder: Path, suspicions: Sequence[Suspicion]) -> dict[str, str]:
    """Returns the texts of ``plausibility.csv`` and ``plausibility.md``."""
    return {TABLE: as_csv(suspicions), PAGE: as_page(suspicions, len(kept_in(folder)))}


def keep(path: Path, submission: Submission, root: Path) -> None:
    """Writes what is compared of a submission, if it is not there for these files.

    A submission that cannot be read has nothing but the reason.
    """
    digest = digest_of(submission)
    head = {"format": FORMAT, "assignment": submission.of.assignment, "digest": digest}
    if path.is_file() and head.items() <= json.loads(path.read_text()).items():
        return
    with TemporaryDirectory(prefix="ddplab-plausibility-") as scratch:
        try:
            lay_out(submission, Path(scratch))
            assignment = submission.of.assignment
            read = limited(evidence, folder=scratch, root=str(root), assignment=assignment)
        except UserError as error:
            read = {"run": [[SOME, str(error)]], "end": ""}
            read |= {name: {} for name in ("samples", "profiles", "code", "texts")}
    with naming_os_errors(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(path, json.dumps(head | read))


def digest_of(submission: Submission) -> str:
    """Returns the SHA-256 of all files of a submission with their names."""
    total = hashlib.sha256()
    for name, content in sorted(submission.files.items()):
        total.update(f"{name} {hashlib.sha256(content).hexdigest()}\n".encode())
    return total.hexdigest()


def run_suspicions(
    kept: Mapping[str, Mapping], handed_in: Mapping[str, datetime]
) -> Iterator[Suspicion]:
    """Yields what does not go together in each run, and with the time of the hand-in."""
    for stem, read in kept.items():
        for strength, words in read["run"]:
            yield Suspicion(stem, RUN_KIND, "", words, strength)
        end, limit = read["end"], handed_in.get(stem)
        if end and limit and datetime.fromisoformat(end) > limit:
            yield Suspicion(stem, RUN_KIND, "", f"it ended at {end}, after the hand-in", STRONG)


def recorded(kept: Mapping[str, Mapping], root: Path) -> dict[str, dict[str, dict]]:
    """Returns samples and profiles of the runs that come with the project, like a student's.

    They are those of the assignments of which somebody has handed in a run.
    """
    assignments = {read["assignment"] for read in kept.values() if read["samples"]}
    runs = [p for n in assignments for p in sorted((root / "data").glob(f"*/assignment{n}"))]
    return {f"(recorded, {run.parent.name})": measured_of(run) for run in runs}


@functools.cache
def measured_of(run: Path) -> dict[str, dict]:
    """Returns samples and profiles of a run that comes with the project, which takes seconds."""
    columns = {n: c for stage in stages_of(run) for n, c in stage.measured()}
    return {
        "samples": {name: sketch(column) for name, column in columns.items()},
        "profiles": {name: profile(column) for name, column in columns.items()},
    }


def sample_suspicions(kept: Mapping[str, Mapping]) -> Iterator[Suspicion]:
    """Yields pairs with measured times in common, or with the same times scaled."""
    samples = {
        stem: {name: set(hashes) for name, hashes in read["samples"].items()}
        for stem, read in kept.items()
    }
    for first, second in combinations(kept, 2):
        columns = []
        for name in sorted(samples[first].keys() & samples[second].keys()):
            a, b = samples[first][name], samples[second][name]
            share = 0.0 if a.isdisjoint(b) else share_of(a, b, SAMPLES, is_sketch=True)
            profiles = (kept[stem]["profiles"].get(name) for stem in (first, second))
            if share < SHARES[SAMPLES][1] and has_same_shape(*profiles):
                columns.append((1.0, f"{name} is the other's scaled"))
            elif share:
                columns.append((share, f"{name} {share:.0%}"))
        yield from suspicion_of(first, second, SAMPLES, columns)


def has_same_shape(first: Sequence[float] | None, second: Sequence[float] | None) -> bool:
    """Returns True if two columns of many values are one another's multiple, by their profiles."""
    if not first or not second or len(set(first)) < PROFILE:
        return False
    gap = max(abs(a - b) for a, b in zip(first, second, strict=True))
    return gap < SAME and first[-1] - first[0] > WIDTH


def code_suspicions(kept: Mapping[str, Mapping], root: Path) -> Iterator[Suspicion]:
    """Yields pairs with nearly the same code, and those whose code is nearly the reference's."""
    files = {file for read in kept.values() for file in read["code"]}
    likes: dict[tuple[str, str], list[tuple[float, str]]] = {}
    for task in read_tasks(root).values():
        if task.file not in files or not (root / task.path).is_file():
            continue
        source = (root / task.path).read_text()
        skeleton = set(shingles(student_source(source, task.file, ())))
        reference = set(shingles("\n".join(text for _, text in solution_pieces(source, task.file))))
        code = {stem: set(read["code"].get(task.file, ())) for stem, read in kept.items()}
        forced = skeleton | common_pieces(code.values())
        for stem, pieces in code.items():
            share = share_of(pieces - skeleton, reference - skeleton, CODE)
            likes.setdefault((stem, REFERENCE), []).append((share, task.file))
        for first, second in combinations(code, 2):
            # What the reference has may be the way to write it.
            pair = (code[stem] - forced - reference for stem in (first, second))
            likes.setdefault((first, second), []).append((share_of(*pair, CODE), task.file))
    for (first, second), columns in likes.items():
        words = [(share, f"{file} {share:.0%}") for share, file in columns if share]
        yield from suspicion_of(first, second, CODE, words)


def text_suspicions(kept: Mapping[str, Mapping], root: Path) -> Iterator[Suspicion]:
    """Yields pairs with nearly the same answers in words."""
    likes: dict[tuple[str, str], list[tuple[float, str]]] = {}
    assignments = {read["assignment"] for read in kept.values()}
    questions = [q for number in assignments for q in read_questions(root, number).items()]
    for name, question in questions:
        if question.kind != TEXT:
            continue
        texts = {stem: set(read["texts"].get(name, ())) for stem, read in kept.items()}
        forced = common_pieces(texts.values())
        forced |= set(words_of(" ".join([question.about, *question.levels.values()])))
        for first, second in combinations(texts, 2):
            share = share_of(texts[first] - forced, texts[second] - forced, TEXTS)
            likes.setdefault((first, second), []).append((share, f"{name} {share:.0%}"))
    for (first, second), columns in likes.items():
        yield from suspicion_of(first, second, TEXTS, [c for c in columns if c[0]])


def suspicion_of(
    first: str, second: str, kind: str, columns: Sequence[tuple[float, str]]
) -> Iterator[Suspicion]:
    """Yields the suspicion of a pair, by the columns, files or answers that it shares most of."""
    strong, some = SHARES[kind]
    best = sorted((c for c in columns if c[0] >= some), reverse=True)
    if best:
        more = f" and {len(best) - MOST_WORDS} more" if len(best) > MOST_WORDS else ""
        words = "; ".join(words for _, words in best[:MOST_WORDS])
        strength = STRONG if best[0][0] >= strong else SOME
        yield Suspicion(first, kind, second, f"{words}{more}", strength)


def share_of(first: set[int], second: set[int], kind: str, is_sketch: bool = False) -> float:
    """Returns the share of the smaller set that is in the other; 0 where one is too small.

    Of sketches only those hashes count that both would hold.
    """
    if is_sketch:
        edge = min((max(s) for s in (first, second) if len(s) > SKETCH // 2), default=0)
        first, second = ({n for n in s if n <= edge or not edge} for s in (first, second))
    if min(len(first), len(second)) < FEWEST[kind]:
        return 0.0
    return len(first & second) / min(len(first), len(second))


def common_pieces(students: Iterable[Iterable[int]]) -> set[int]:
    """Returns the pieces that many students have."""
    sets = [set(pieces) for pieces in students]
    counts = Counter(piece for pieces in sets for piece in pieces)
    many = max(MANY, MANY_SHARE * len(sets))
    return {piece for piece, count in counts.items() if count >= many}


def as_csv(suspicions: Iterable[Suspicion]) -> str:
    """Returns the list as CSV."""
    rows = [[s.student, s.kind, s.other, s.evidence, s.strength] for s in suspicions]
    return table(["student", "kind", "other student", "evidence", "strength"], rows)


def as_page(suspicions: Sequence[Suspicion], count: int) -> str:
    """Returns the list as a page of Markdown.

    Args:
        count: number of submissions that were compared.
    """
    rows = [
        f"| {' | '.join(map(escaped, (s.strength, s.student, s.kind, s.other, s.evidence)))} |"
        for s in suspicions
    ]
    head = ["| strength | student | kind | other student | evidence |", "| :-- " * 5 + "|"]
    parts = [
        "# What to look at",
        f"{len(suspicions)} suspicions among {count} submissions.",
        "\n".join(f"- {note}" for note in NOTES),
        "\n".join([*head, *rows]) if rows else "There is nothing.",
    ]
    return "\n\n".join(parts) + "\n"


def escaped(words: str) -> str:
    """Returns words of somebody else's for a cell of Markdown."""
    return "".join(f"\\{c}" if c in "\\|`*_<>[]!#" else c for c in words)
