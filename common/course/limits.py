"""Reads YAML, JSON and tables of somebody else's within limits, and executes nothing in them.

What a file may cost is bounded before it is read: bytes, depth, values, digits, rows and columns.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import yaml
from yaml.composer import ComposerError
from yaml.constructor import ConstructorError

from common.errors import UserError, naming_os_errors

SETTINGS, RECORD = "config.yaml", "environment.json"
TEXT_BYTES, SETTINGS_BYTES, TABLE_BYTES = 2**20, 2**16, 2**25
"""Most bytes of answers or a record, of settings, and of a table."""
VALUES, DEPTH, DIGITS = 10_000, 20, 1_000
"""Most values and levels of a YAML file, an alias counted as what it stands for; most characters of
a number."""
ROWS, COLUMNS, LINE_BYTES = 500_000, 200, 2**18
"""Most rows and columns of a table, and most bytes of a line."""
INTEGER, FLOAT, STRING = (f"tag:yaml.org,2002:{kind}" for kind in ("int", "float", "str"))


class Loader(yaml.SafeLoader):
    """Reads YAML without anchors, and without numbers to base 60.

    YAML 1.1 reads ``1:30`` as a number, in a time that grows with the square of its length; here it
    is text.
    """

    takes_aliases = False

    def __init__(self, stream: bytes) -> None:
        super().__init__(stream)
        self.values = self.depth = 0
        self.sizes: dict[str, int] = {}
        """Values that an anchor stands for."""

    def compose_node(self, parent: yaml.Node | None, index: object) -> yaml.Node | None:
        """Returns the next node. Raises ComposerError for an anchor, an alias, or too much."""
        event = self.peek_event()
        anchor, is_alias = event.anchor, isinstance(event, yaml.AliasEvent)
        if anchor and not self.takes_aliases:
            what = "aliases" if is_alias else "anchors"
            raise ComposerError(None, None, f"{what} are not read", event.start_mark)
        if is_alias and anchor in self.anchors and anchor not in self.sizes:
            raise ComposerError(None, None, "an alias of what it is in", event.start_mark)
        before = self.values
        self.values += self.sizes.get(anchor, 1) if is_alias else 1
        self.depth += 1
        if self.values > VALUES or self.depth > DEPTH:
            most = f"{VALUES:,} values" if self.values > VALUES else f"{DEPTH} levels"
            raise ComposerError(None, None, f"more than {most}", event.start_mark)
        node = super().compose_node(parent, index)
        self.depth -= 1
        if anchor and not is_alias:
            self.sizes[anchor] = self.values - before
        return node

    def resolve(self, kind: type, value: str, implicit: tuple[bool, bool]) -> str:
        """Returns the tag of a node that names none."""
        tag = super().resolve(kind, value, implicit)
        return STRING if tag in (INTEGER, FLOAT) and ":" in value else tag

    def construct_number(self, node: yaml.Node) -> int | float:
        """Returns a number. Raises ConstructorError for one to base 60, or of many digits."""
        text = self.construct_scalar(node)
        problem = ""
        if len(text) > DIGITS:
            problem = f"a number of more than {DIGITS:,} digits"
        elif ":" in text:
            problem = "numbers to base 60 are not read"
        if problem:
            raise ConstructorError(None, None, problem, node.start_mark)
        is_integer = node.tag == INTEGER
        return self.construct_yaml_int(node) if is_integer else self.construct_yaml_float(node)


class SettingsLoader(Loader):
    """Reads a run's settings, in which the lab itself writes aliases."""

    takes_aliases = True


for _tag in (INTEGER, FLOAT):
    Loader.add_constructor(_tag, Loader.construct_number)
    SettingsLoader.add_constructor(_tag, Loader.construct_number)


def read_yaml(content: bytes, where: str, loader: type[Loader] = Loader) -> object:
    """Reads YAML. Raises UserError, with the line, for what is none or goes beyond a limit."""
    check_size(content, SETTINGS_BYTES if loader.takes_aliases else TEXT_BYTES, where)
    try:
        return yaml.load(content, loader)
    except yaml.YAMLError as error:
        line = getattr(getattr(error, "problem_mark", None), "line", None)
        position = f"{where}:{line + 1}" if line is not None else where
        raise UserError(f"{position}: {getattr(error, 'problem', None) or 'no YAML'}") from None
    except Exception:  # of a value that is not what its tag says, PyYAML raises anything
        raise UserError(f"{where}: no YAML") from None


def read_json(content: bytes, where: str) -> object:
    """Reads JSON. Raises UserError for what is none or goes beyond a limit."""
    check_size(content, TEXT_BYTES, where)
    try:
        document = json.loads(content)
    except (ValueError, RecursionError):
        raise UserError(f"{where}: no JSON") from None
    level = [document]
    for _ in range(DEPTH):
        level = [part for value in level for part in parts_of(value)]
    if level:
        raise UserError(f"{where}: more than {DEPTH} levels")
    return document


def parts_of(value: object) -> Iterator[object]:
    """Yields the values in a list or a mapping."""
    if isinstance(value, list | dict):
        yield from value.values() if isinstance(value, dict) else value


def check_csv(content: bytes, where: str) -> None:
    """Raises UserError for a CSV that goes beyond a limit, or whose quotes are not closed.

    Commas in quotes count as if they began a column.
    """
    check_size(content, TABLE_BYTES, where)
    if content.count(b"\n") + content.count(b"\r") - content.count(b"\r\n") > ROWS:
        raise UserError(f"{where}: more than {ROWS:,} rows")
    if content.count(b'"') % 2:
        raise UserError(f"{where}: a quote is not closed")
    for number, line in enumerate(content.splitlines(), start=1):
        if len(line) > LINE_BYTES:
            raise UserError(f"{where}:{number}: a line of more than {LINE_BYTES // 2**10} KiB")
        if line.count(b",") >= COLUMNS:
            raise UserError(f"{where}:{number}: more than {COLUMNS} columns")


def check_run(folder: Path) -> None:
    """Checks all tables, settings and records of a run, before anybody reads them.

    Raises:
        UserError: a file goes beyond a limit, or cannot be read.
    """
    for path in sorted(folder.rglob("*")):
        name = str(path.relative_to(folder))
        if not path.is_file():
            continue
        if path.suffix == ".csv":
            check_csv(beginning(path, TABLE_BYTES), name)
        elif path.name == SETTINGS:
            read_yaml(beginning(path, SETTINGS_BYTES), name, SettingsLoader)
        elif path.name == RECORD:
            read_json(beginning(path, TEXT_BYTES), name)


def beginning(path: Path, most: int) -> bytes:
    """Returns at most one byte more of a file than are allowed."""
    with naming_os_errors(path.name), path.open("rb") as file:
        return file.read(most + 1)


def check_size(content: bytes, most: int, where: str) -> None:
    """Raises UserError for a file of more bytes than are allowed."""
    if len(content) > most:
        size = f"{most / 2**20:.0f} MB" if most >= 2**20 else f"{most / 2**10:.0f} KB"
        raise UserError(f"{where}: more than {size}")
