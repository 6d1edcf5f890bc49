"""Lists the subcommands of a command: for the parser, and as ``ddplab --help``, in groups.

A subcommand's details and flags are in its own ``--help``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Union

import tyro

from common.errors import require_known

HELP_FLAGS = ("-h", "--help")
HEADING, NAME = "bold green", "bold cyan"
"""Colours of headings, and of what is typed."""


@dataclass(frozen=True)
class Subcommands:
    """Subcommands of a command.

    Attributes:
        about: a sentence on the command.
        groups: heading → subcommand → its class, and a line of at most 80 columns with its name.
        noun: name of a subcommand in messages.
    """

    about: str
    groups: Mapping[str, Mapping[str, tuple[type, str]]]
    noun: str = "subcommand"

    @property
    def classes(self) -> dict[str, type]:
        """Returns the class of each subcommand, in their order."""
        return {name: kind for lines in self.groups.values() for name, (kind, _) in lines.items()}

    @property
    def union(self) -> object:
        """Returns the type from which the parser chooses the subcommand."""
        kinds = self.classes.items()
        return Union[  # noqa: UP007 – of as many as there are
            tuple(Annotated[kind, tyro.conf.subcommand(name)] for name, kind in kinds)
        ]


def asked_page(
    words: Sequence[str], pages: Mapping[str, Subcommands]
) -> tuple[str, Subcommands] | None:
    """Finds the list of subcommands that a command line asks for; None where it asks for none.

    A command without its subcommand asks for the list, too.

    Args:
        words: the command line, with the program's name first.
        pages: the commands that have subcommands.

    Raises UserError for a subcommand that is none.
    """
    command, *arguments = words
    for word in [*arguments, HELP_FLAGS[0]]:
        page = pages.get(command)
        if page is None:
            return None
        if word in HELP_FLAGS:
            return command, page
        if word.startswith("-"):
            return None
        require_known(page.noun, word, page.classes)
        command = f"{command} {word}"
    return None


def print_page(command: str, page: Subcommands) -> None:
    """Prints a list of subcommands, in colours where the terminal has them."""
    from rich.console import Console
    from rich.text import Text

    console = Console(highlight=False, soft_wrap=True)
    console.print(page.about)
    usage = f"{command} {page.noun.upper()}"
    console.print(
        Text.assemble(
            ("Usage: ", HEADING), (usage, NAME), " …; ", (f"{usage} --help", NAME), " says more"
        )
    )
    width = max(map(len, page.classes))
    for heading, lines in page.groups.items():
        console.print()
        console.print(Text(heading, HEADING))
        for name, (_, line) in lines.items():
            console.print(Text.assemble("  ", (f"{name:<{width}}", NAME), f"  {line}"))
