"""Prints ``ddplab --help``: a line for each subcommand, in groups.

A subcommand's details and flags are in its own ``--help``.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace

from common.cli.study import STUDIES
from common.errors import UserError, unknown_name

PROGRAM = "ddplab"
HELP_FLAGS = ("-h", "--help")
HEADING, NAME = "bold green", "bold cyan"
"""Colours of headings, and of what is typed."""


@dataclass(frozen=True)
class HelpPage:
    """Subcommands of a command.

    Attributes:
        about: a sentence on the command.
        groups: heading → subcommand → what it does, a line of at most 80 columns with its name.
        noun: what a subcommand is called.
    """

    about: str
    groups: Mapping[str, Mapping[str, str]]
    noun: str = "subcommand"

    @property
    def names(self) -> list[str]:
        """Returns the subcommands in their order."""
        return [name for lines in self.groups.values() for name in lines]

    def only(self, known: Collection[str]) -> HelpPage:
        """Returns the page without subcommands that the program does not have."""
        groups = {
            heading: {name: line for name, line in lines.items() if name in known}
            for heading, lines in self.groups.items()
        }
        return replace(self, groups={heading: left for heading, left in groups.items() if left})


PAGES = {
    PROGRAM: HelpPage(
        about="Measure, predict, verify and explain data-parallel training.",
        groups={
            "Run and read": {
                "run": "measure here, execute the notebooks, and write report.pdf",
                "explore": "a model to play with: sliders for the network, the ranks, the cap",
            },
            "Predict, tune and diagnose": {
                "predict": "the best bucket cap from measurements, or a step on 16,384 GPUs",
                "tune": "the best DDP settings for a model of yours, verified by real steps",
                "diagnose": "why a training script is slow, and what each change would gain",
            },
            "Machines": {
                "doctor": "what this machine has, what works here, and where ranks would run",
                "emulate": "run a script on hosts whose links carry a stated rate (Linux)",
            },
            "Course": {
                "course": "a student's tree, its tests and progress, and grades",
                "handin": "build and check the tarball that is handed in",
            },
            "Evidence and data": {
                "study": "what the project's claims rest on, measured anew; minutes to hours",
                "data": "keep a run for others, make token shards, measure lengths of texts",
            },
        },
    ),
    f"{PROGRAM} course": HelpPage(
        about="A student's tree, the proof that it leaks nothing, progress, and grades.",
        groups={
            "Students": {
                "test": "run the public tests of the tree you are in, and show progress",
            },
            "Staff": {
                "export": "write the tree that students of an assignment get",
                "check": "prove that such a tree shows no solution, imports, and starts",
                "grade": "grade submissions of an assignment, in a sandbox",
                "faults": "plant fresh faults for A4.4 and measure them on this machine",
                "autograder": "write the bundle for Gradescope",
            },
        },
    ),
    f"{PROGRAM} study": HelpPage(
        about="What the project's claims rest on, measured anew on this machine.",
        groups={
            "What it shows, and minutes on two cores": {
                name: f"{shows}; {minutes}" for name, (_, shows, minutes) in STUDIES.items()
            },
        },
        noun="study",
    ),
    f"{PROGRAM} data": HelpPage(
        about="Keep measurements for others, make token shards, or measure lengths of texts.",
        groups={
            "Measurements": {
                "record": "keep a complete run's tables under data/, for others to read",
            },
            "Texts": {
                "tokens": "token shards of a file, a dataset or a source of known entropy",
                "text-lengths": "how long the texts of training splits are",
            },
        },
    ),
}
"""The commands that have subcommands. A subcommand without a line here would not be listed."""


def asked_page(words: Sequence[str], known: Collection[str]) -> tuple[str, HelpPage] | None:
    """Finds the list of subcommands that a command line asks for; None where it asks for none.

    A command without its subcommand asks for the list, too.

    Args:
        words: the command line after ``ddplab``.
        known: the subcommands that the parser has.

    Raises UserError for a subcommand that is none.
    """
    command = PROGRAM
    for word in [*words, HELP_FLAGS[0]]:
        page = PAGES.get(command)
        if page is None:
            return None
        if command == PROGRAM:
            page = page.only(known)
        if word in HELP_FLAGS:
            return command, page
        if word.startswith("-"):
            return None
        if word not in page.names:
            raise UserError(unknown_name(page.noun, word, page.names))
        command = f"{command} {word}"
    return None


def print_page(command: str, page: HelpPage) -> None:
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
    width = max(map(len, page.names))
    for heading, lines in page.groups.items():
        console.print()
        console.print(Text(heading, HEADING))
        for name, line in lines.items():
            console.print(Text.assemble("  ", (f"{name:<{width}}", NAME), f"  {line}"))
