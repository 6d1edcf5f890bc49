"""The display of a run while it works: stages, their time, the last line of each."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.markup import escape


class StageProgress:
    """One line per finished stage; while one runs, its elapsed time and its latest output."""

    def __init__(self, console: Console | None = None) -> None:
        self.console = console or Console()
        self._start = self._ended = time.monotonic()

    @contextmanager
    def stage(self, name: str, ahead: Callable[[], str] = str) -> Iterator[Callable[[str], None]]:
        """Shows a stage; yields a function that takes its output lines.

        Its time is counted from the end of the one before.

        Args:
            ahead: returns how much of the run is still to come, in words.
        """
        start = self._ended
        if not self.console.is_terminal:
            words = ahead()
            self.console.print(f"… {name}{f' ({words})' if words else ''}", highlight=False)
        with self.console.status(name) as status:

            def update(line: str) -> None:
                elapsed = time.monotonic() - start
                words = "  ".join(filter(None, [f"{elapsed:.0f} s", ahead(), escape(line[:50])]))
                status.update(f"{name} [dim]{words}[/dim]")

            update("")
            try:
                yield update
            except BaseException:
                self.console.print(f"[red]✗[/red] {name}", highlight=False)
                raise
        self._ended = time.monotonic()
        took = self._ended - start
        self.console.print(f"[green]✓[/green] {name:<44} {took:6.1f} s", highlight=False)

    def say(self, line: str) -> None:
        """Prints a line of its own."""
        self.console.print(line, highlight=False, soft_wrap=True, markup=False)

    @property
    def elapsed_s(self) -> float:
        """Returns the seconds since the start."""
        return time.monotonic() - self._start
