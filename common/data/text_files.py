"""Labelled texts in local files: GLUE TSV, AG News CSV, label,text CSV and parquet.

A malformed row is an error that names file and line: a model still trains on texts that were read
wrongly, only to a lower accuracy.
"""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path

from common.errors import UserError, naming_os_errors

TEXT_COLUMNS = ("sentence", "text", "content")
"""Names of the text's column in GLUE, on the Hugging Face hub and in copies of them."""
SPLIT_FILES = {"train": ("train",), "validation": ("dev", "validation", "valid", "val", "test")}
"""Split → names of files without their ending, in the order in which they are tried."""
ENDINGS = (".tsv", ".csv", ".parquet")
AG_NEWS_HEADER = ["class index", "title", "description"]
WELL_FORMED_FIELD = re.compile(r'(?:"[^"]*+(?:""[^"]*+)*+"|[^",\r\n][^,\r\n]*+|)(?:,|\r\n|\r|\n)')
INTEGER = re.compile(r"-?[0-9]{1,9}")
csv.field_size_limit(2**31 - 1)  # a text may be longer than csv's 131,072 characters


class NoLabels(Exception):
    """The error of a file that is well formed but has no column of labels."""


@dataclass(frozen=True)
class Columns:
    """The layout of a row, by indices of its fields; text fields are joined by spaces, in order."""

    fields: int
    label: int
    text: tuple[int, ...]
    first_label: int
    """The number of the first class: 1 in AG News, 0 elsewhere."""
    header: bool


def split_files(folder: Path, split: str) -> Iterator[list[Path]]:
    """Yields the files in ``folder`` that may hold a split, one candidate after another.

    A candidate is one file, or the parts of one parquet table (``train-00000-of-00002.parquet``).

    Raises:
        UserError: several files have the same name, so it is not clear which is meant; or a part
            of a table is missing.
    """
    for name in SPLIT_FILES[split]:
        candidates = [
            [path] for ending in ENDINGS if (path := folder / f"{name}{ending}").is_file()
        ]
        if parts := sorted(folder.glob(f"{name}-*-of-*.parquet")):
            check_parts(folder, name, parts)
            candidates.append(parts)
        if len(candidates) > 1:
            names = " and ".join(paths[0].name for paths in candidates)
            raise UserError(f"{folder}: both {names} are there; keep the one that is meant")
        yield from candidates


def check_parts(folder: Path, name: str, parts: Sequence[Path]) -> None:
    """Raises UserError unless the files are all parts of one table."""
    totals = {path.stem.rpartition("-of-")[2] for path in parts}
    if len(totals) > 1:
        raise UserError(
            f"{folder}: parts of {name} of {' and of '.join(sorted(totals))} are there; keep those "
            "that are meant"
        )
    [total] = totals
    if not total.isdecimal():
        raise UserError(f"{parts[0]}: no part of a table; such as {name}-00000-of-00002.parquet")
    wanted = [f"{name}-{part:05d}-of-{total}.parquet" for part in range(int(total))]
    missing = [file for file in wanted if file not in {path.name for path in parts}]
    if missing:
        more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
        raise UserError(f"{folder}: {missing[0]}{more} missing; all {int(total)} parts are needed")


def read_split(
    folder: Path, split: str, dataset: str, num_labels: int
) -> tuple[list[str], list[int], Path]:
    """Reads a split from the first candidate that has labels.

    Returns:
        Texts, labels (0 to ``num_labels`` − 1) and the file they were read from, the first one if
        there are several parts.

    Raises:
        UserError: no such file, or one of its rows is malformed.
    """
    unlabelled = []
    for paths in split_files(folder, split):
        try:
            parts = [read_file(path, dataset, num_labels) for path in paths]
        except NoLabels:
            unlabelled.append(paths[0].name)
            continue
        texts = [text for part, _ in parts for text in part]
        return texts, [label for _, part in parts for label in part], paths[0]
    if unlabelled:
        raise UserError(f"{folder}: {' and '.join(unlabelled)}: no column label; it is needed")
    names = " or ".join(SPLIT_FILES[split])
    raise UserError(
        f"{folder}: no {split} split; looked for {names} with the ending {' or '.join(ENDINGS)}"
    )


def read_file(path: Path, dataset: str, num_labels: int) -> tuple[list[str], list[int]]:
    """Reads the texts and labels of one file, in the format that its ending names.

    Raises:
        NoLabels: it has no column of labels.
        UserError: it cannot be read, or a row is malformed.
    """
    if path.suffix == ".parquet":
        return _read_parquet(path, num_labels)
    rows = _tsv_rows(path) if path.suffix == ".tsv" else _csv_rows(path)
    first = next(rows)
    columns = _columns(path, first[1], dataset)
    if not columns.header:
        rows = chain([first], rows)
    texts, labels = [], []
    for line, fields in rows:
        where = f"{path}:{line}"
        if len(fields) != columns.fields:
            raise UserError(f"{where}: {len(fields)} fields, others have {columns.fields}")
        labels.append(parse_label(fields[columns.label], columns.first_label, num_labels, where))
        texts.append(check_text(_joined(fields, columns.text), where))
    if not texts:
        raise UserError(f"{path}: no texts below its header")
    return texts, labels


def parse_label(field: str, first_label: int, num_labels: int, where: str) -> int:
    """Returns a field's label, counted from 0, or raises UserError with ``where`` in front."""
    legal = f"legal are {first_label} to {first_label + num_labels - 1}"
    if not field.strip():
        raise UserError(f"{where}: no label; {legal}")
    if not INTEGER.fullmatch(field.strip()):
        raise UserError(f"{where}: label {field.strip()[:40]!r} is not an integer; {legal}")
    return check_label(int(field), first_label, num_labels, where)


def check_label(label: int, first_label: int, num_labels: int, where: str) -> int:
    """Returns the label, counted from 0, or raises UserError with ``where`` in front."""
    legal = f"legal are {first_label} to {first_label + num_labels - 1}"
    if label == -1:
        raise UserError(f"{where}: label -1 stands for a hidden one (GLUE's test split); {legal}")
    if not first_label <= label < first_label + num_labels:
        raise UserError(f"{where}: label {label}; {legal}")
    return label - first_label


def check_text(text: str, where: str) -> str:
    """Returns the text, or raises UserError with ``where`` in front if it has no character."""
    if not text or text.isspace():
        raise UserError(f"{where}: empty text; remove the row")
    return text


def _joined(fields: Sequence[str], indices: tuple[int, ...]) -> str:
    if len(indices) == 1:
        return fields[indices[0]]
    # Some copies of AG News have no titles; a text must not begin with a space for that.
    return " ".join(fields[index] for index in indices if fields[index].strip())


def _columns(path: Path, first: list[str], dataset: str) -> Columns:
    """Returns the layout of a file's rows by its first row; NoLabels where those are missing."""
    names = [name.strip().lower() for name in first]
    if names == AG_NEWS_HEADER:
        return Columns(3, 0, (1, 2), first_label=1, header=True)
    text = next((names.index(name) for name in TEXT_COLUMNS if name in names), None)
    if "label" in names and text is not None:
        return Columns(len(names), names.index("label"), (text,), first_label=0, header=True)
    if text is not None:
        raise NoLabels
    if dataset == "ag_news" and path.suffix == ".csv" and len(first) == 3:
        return Columns(3, 0, (1, 2), first_label=1, header=False)
    columns = ", ".join(name[:20] for name in first)
    raise UserError(
        f"{path}:1: columns label and {', '.join(TEXT_COLUMNS[:-1])} or {TEXT_COLUMNS[-1]} are "
        f"needed (or AG News's three, without a header); found {columns}"
    )


def _read_text(path: Path) -> str:
    with naming_os_errors(path):
        content = path.read_bytes()
    try:
        text = content.decode("utf-8-sig")  # without a spreadsheet's byte-order mark
    except UnicodeDecodeError as error:
        line = content.count(b"\n", 0, error.start) + 1
        raise UserError(f"{path}:{line}: not UTF-8 ({error.reason})") from None
    if not text.strip():
        raise UserError(f"{path}: an empty file")
    return text.rstrip("\r\n") + "\n"


def _lines(text: str) -> list[str]:
    # Not splitlines(), which divides also at characters that occur within a text (U+0085, U+2028).
    return list(io.StringIO(text, newline=""))


def _tsv_rows(path: Path) -> Iterator[tuple[int, list[str]]]:
    """Yields rows with their line numbers; a TSV's row is one line, so a quote ends within it."""
    for line, row in enumerate(_lines(_read_text(path)), 1):
        try:
            yield line, next(csv.reader([row], delimiter="\t", strict=True))
        except csv.Error:
            raise UserError(
                f"{path}:{line}: a field begins with a quote that is not closed at its end "
                "(a quote within a quoted field is written twice)"
            ) from None


def _csv_rows(path: Path) -> Iterator[tuple[int, list[str]]]:
    """Yields rows with the numbers of their first lines; a quoted field may span several lines."""
    lines = _lines(_read_text(path))
    reader = csv.reader(lines, strict=True)
    line = 1
    while line <= len(lines):
        try:
            row = next(reader)
        except csv.Error as error:
            # csv has read on to the next quote, or to the end.
            begin = _broken_field(lines, line)
            if begin is None:
                raise UserError(f"{path}:{line}: {error}") from None
            raise UserError(
                f"{path}:{begin}: a field begins with a quote that is not closed before a comma or "
                "line break (a quote within a quoted field is written twice)"
            ) from None
        yield line, row
        line = reader.line_num + 1


def _broken_field(lines: list[str], first: int) -> int | None:
    """Returns the line on which the first malformed field begins, from line ``first`` on."""
    # Well-formed fields are matched one after another; the first character that none of them
    # covers belongs to the malformed field. Its line is the number of lines up to it.
    text = "".join(lines[first - 1 :])
    position = 0
    while match := WELL_FORMED_FIELD.match(text, position):
        position = match.end()
    return first + len(_lines(text[:position] + "x")) - 1 if position < len(text) else None


def _read_parquet(path: Path, num_labels: int) -> tuple[list[str], list[int]]:
    import pyarrow
    import pyarrow.parquet
    from pyarrow import types

    try:
        table = pyarrow.parquet.read_table(path)
    except (pyarrow.ArrowException, OSError) as error:
        problem = str(error).strip().splitlines()[0]
        raise UserError(f"{path}: no parquet file that can be read ({problem})") from None
    text_name = next((name for name in TEXT_COLUMNS if name in table.column_names), None)
    if text_name is None:
        raise UserError(
            f"{path}: one of the columns {', '.join(TEXT_COLUMNS)} is needed; found "
            f"{', '.join(table.column_names)}"
        )
    if "label" not in table.column_names:
        raise NoLabels
    kind = table["label"].type
    if not types.is_integer(kind):
        raise UserError(f"{path}: labels are {kind}; they must be integers")
    kind = table[text_name].type
    kind = kind.value_type if types.is_dictionary(kind) else kind
    if not (types.is_string(kind) or types.is_large_string(kind)):
        raise UserError(f"{path}: column {text_name} is of {kind}; it must be of strings")
    if not table.num_rows:
        raise UserError(f"{path}: no texts in it")
    texts, labels = table[text_name].to_pylist(), table["label"].to_pylist()
    for row, (text, label) in enumerate(zip(texts, labels, strict=True), 1):
        where = f"{path}, row {row}"
        parse_label("" if label is None else str(label), 0, num_labels, where)
        check_text(text or "", where)
    return texts, labels
