"""What ``ddplab --help`` shows: a line for each subcommand, whole on a small terminal, at once."""

import contextlib
import io
import re
import subprocess
import sys

import pytest
import tyro
from command_line import ROOT, answered, ddplab, refused

from common.cli.main import Command

LISTED = re.compile(r"^  ([a-z0-9-]+)  +\S", re.MULTILINE)
LINES, COLUMNS = 24, 80
"""A small terminal."""
LISTS = ((), ("course",), ("study",), ("data",))
"""Commands that have subcommands."""


def known_to_the_parser(*words: str) -> set[str]:
    """Returns the subcommands in the line of usage that tyro prints."""
    with contextlib.redirect_stdout(io.StringIO()) as shown, contextlib.suppress(SystemExit):
        tyro.cli(Command, args=[*words, "--help"], prog="ddplab")
    usage, _, _ = shown.getvalue().partition("\n\n")
    [names] = re.findall(r"\{([a-z0-9,\s-]+)\}", usage)
    return set(re.split(r",\s*", names))


@pytest.mark.parametrize("words", LISTS)
def test_every_subcommand_has_a_line_and_all_fit_on_a_small_terminal(words: tuple[str]) -> None:
    shown = answered(*words, "--help")
    listed = LISTED.findall(shown)
    assert len(listed) == len(set(listed))
    assert set(listed) == known_to_the_parser(*words)
    lines = shown.splitlines()
    assert len(lines) < LINES  # one is left for what is typed next
    assert max(map(len, lines)) <= COLUMNS
    assert not [line for line in lines if line != line.rstrip()]


@pytest.mark.parametrize("words", LISTS)
def test_no_subcommand_asks_for_the_list_too(words: tuple[str]) -> None:
    shown = answered(*words, "--help")
    assert answered(*words) == answered(*words, "-h") == shown


def test_what_a_subcommand_takes_is_in_its_own_help() -> None:
    assert "--preset" in answered("run", "--help")
    assert "--overlay" in answered("course", "export", "--help")
    assert "--vocab" in answered("data", "tokens", "--help")


@pytest.mark.parametrize("words", LISTS)
@pytest.mark.parametrize("more", [(), ("--help",), ("x", "--y")])
def test_an_unknown_subcommand_is_refused_with_all_that_there_are(
    words: tuple[str], more: tuple[str]
) -> None:
    line = refused(*words, "bogus", *more)
    assert "bogus" in line
    assert set(line.rpartition("known: ")[2].split(", ")) == known_to_the_parser(*words)


def test_colours_are_for_terminals_and_change_no_letter(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.delenv("FORCE_COLOR", raising=False)
    plain = answered("--help")
    assert "\x1b" not in plain
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("TERM", "xterm-256color")
    coloured = answered("--help")
    assert "\x1b[" in coloured
    assert re.sub(r"\x1b\[[0-9;]*m", "", coloured) == plain


def test_a_narrow_terminal_gets_the_same_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    plain = answered("--help")
    monkeypatch.setenv("COLUMNS", "40")
    assert answered("--help") == plain


def test_the_list_is_shown_without_waiting_for_large_packages() -> None:
    code = (
        "import sys; from common.cli.main import main; sys.argv = ['ddplab', '--help']; main(); "
        "print(*{'torch', 'pandas', 'numpy', 'matplotlib'} & set(sys.modules), file=sys.stderr)"
    )
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr.strip()) == (0, "")
    assert done.stdout == ddplab("--help").stdout
